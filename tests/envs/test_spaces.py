"""Foreign spaces: what goes out is what was meant, and every door agrees on what comes in."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn import Conv2d

from embodied.core.errors import ContractError
from embodied.core.native import Native, picked
from embodied.core.spec import Leaf, Spec
from embodied.envs.spaces import achieved, action_of, entries
from embodied.policies.networks.encoders import Encoder
from tests.toy_envs import batched

F32, F64, I64, U8 = np.float32, np.float64, np.int64, np.uint8


def box(low: Any, high: Any, shape: tuple[int, ...] = (3,), dtype: Any = F32) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)


def require_saved(native: Native) -> None:
    """It is in the spec, which goes through JSON."""
    assert Native.of(Spec.from_json(json.loads(json.dumps(native.spec(0.1).to_json())))) == native


ACTIONS: list[spaces.Space[Any]] = [
    box(-1, 1),
    box(-0.5, 7.25, (2, 3)),
    box(-3, 1, (), F64),
    spaces.Box(np.array([-2.0, 0.0], F32), np.array([1.0, 100.0], F32)),
    spaces.Box(np.array([-1.0, 5.0], F32), np.array([1.0, 5.0], F32)),
    box(-1e5, 1e5),
    box(0, 10, (1,), I64),
    box(0, 255, (1,), U8),
    box(-128, 127, (2,), np.int8),
    spaces.Discrete(5),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([3, 1, 4]),
    spaces.MultiDiscrete([[3, 4], [2, 5]], start=[[0, -1], [2, 7]]),
    spaces.MultiBinary((2, 3)),
    spaces.Tuple([spaces.Discrete(3, start=1), box(-2, 5, (2,)), spaces.MultiBinary(2)]),
    spaces.Tuple([box(-1, 1), spaces.Tuple([box(0, 9, (), I64), box(-1, 4, (2, 2), F64)])]),
    spaces.Dict({"gear": spaces.Discrete(4), "steer": box(-30, 30, (1,))}),
    spaces.Dict({"b": spaces.Dict({"z": spaces.Discrete(2), "a": box(0, 255, (2,), U8)})}),
]


def every(space: spaces.Space[Any]) -> np.ndarray:
    """The bounds of a box, and the bytes of one whose bounds are the same."""
    assert isinstance(space, spaces.Box)
    numbers = [space.low, space.high]
    if np.dtype(space.dtype).kind in "iu" and space.high.max() < 300:
        low, high = int(space.low.flat[0]), int(space.high.flat[0])
        numbers += [np.full(space.shape, number) for number in range(low, high + 1)]
    return np.stack(numbers).astype(space.dtype)


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_an_imported_action_comes_out_as_it_was(space: spaces.Space[Any]) -> None:
    action = action_of(space, "it")
    space.seed(0)
    given = batched(space, [space.sample() for _ in range(200)])
    if isinstance(space, spaces.Box):
        given = np.concatenate([given, every(space)])
    unit = action.unit(given)
    assert unit.dtype == getattr(torch, action.leaf.dtype) and unit.shape[1:] == action.leaf.shape
    again = action.native(unit)
    assert all(action.one(again, row) in space for row in range(len(unit)))
    for path, part in action.parts:
        came, went = picked(again, path), picked(given, path)
        reach = 1.0 if part.discrete else float(np.max(np.abs([*part.low, *part.high])))
        slack = 0 if np.dtype(part.dtype).kind in "iu" else 1e-6 * max(reach, 1.0)
        assert came.dtype == went.dtype
        assert np.abs(came.astype(F64) - went.astype(F64)).max() <= slack
    require_saved(Native((), action))


@pytest.mark.parametrize(
    ("space", "numbers"),
    [
        (box(0, 10, (1,), I64), [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        (box(0, 255, (1,), U8), [0, 32, 64, 96, 128, 159, 191, 223, 255]),
    ],
)
def test_integers_are_rounded_after_scaling(space: spaces.Box, numbers: list[int]) -> None:
    grid = torch.linspace(-1, 1, 9)[:, None]
    assert action_of(space, "it").native(grid).ravel().tolist() == numbers


@pytest.mark.parametrize(
    "space", [box(-np.inf, np.inf), box(np.finfo(F32).min, np.finfo(F32).max), box(0, 1e7)]
)
def test_what_has_no_limits_says_how_to_give_them(space: spaces.Box) -> None:
    class Unbounded(gymnasium.Env[Any, Any]):
        observation_space, action_space = box(-1, 1), space

    with pytest.raises(ValueError, match="infinite bounds") as told:
        action_of(space, "it")
    advice = str(told.value).partition("env = ")[2]
    wrapped = eval(advice, {"gymnasium": gymnasium, "env": Unbounded()})
    assert action_of(wrapped.action_space, "it").leaf.shape == (3,)


PICTURES: list[tuple[tuple[int, ...], Any, float, float, str]] = [
    # shape, dtype, low, high, axes: height, width, channels, pictures of a stack
    ((48, 32, 3), U8, 0, 255, "hwc"),
    ((3, 48, 32), U8, 0, 255, "chw"),
    ((3, 64, 3), U8, 0, 255, "hwc"),
    ((1, 84, 84), U8, 0, 255, "chw"),
    ((84, 84, 4), U8, 0, 255, "hwc"),
    ((12, 64, 64), U8, 0, 255, "chw"),
    ((4, 64, 64, 3), U8, 0, 255, "shwc"),
    ((4, 3, 64, 48), U8, 0, 255, "schw"),
    ((4, 64, 48, 1), U8, 0, 255, "shwc"),
    ((64, 48), U8, 0, 255, "hw"),
    ((3, 64, 48), F32, 0, 1, "chw"),
    ((4, 64, 48, 3), F64, 0, 1, "shwc"),
    # said to be one
    ((3, 84, 84), F64, -0.5, 0.5, "chw"),
    ((32, 32, 1), np.uint16, 0, 65535, "hwc"),
    ((9, 12), I64, -3, 4, "hw"),
]


@pytest.mark.parametrize(("shape", "dtype", "low", "high", "axes"), PICTURES)
def test_a_pixel_is_found_again(
    shape: tuple[int, ...], dtype: Any, low: float, high: float, axes: str
) -> None:
    told = dtype == U8 or (low, high) == (0, 1)
    kinds = {} if told else {"state": "picture"}
    (entry,) = entries(box(low, high, shape, dtype), "state", "it", kinds)
    size = dict(zip(axes, shape, strict=True))
    seen = (size["h"], size["w"], size.get("s", 1) * size.get("c", 1))
    assert entry.leaf.is_image and entry.leaf.shape == seen
    convolutions = [m for m in Encoder({"state": entry.leaf}).modules() if isinstance(m, Conv2d)]
    assert convolutions and convolutions[0].in_channels == seen[2]
    random, dark = np.random.default_rng(0), np.full(shape, low, dtype)
    for _ in range(20):
        place = tuple(random.integers(size) for size in shape)
        given = dark.copy()
        given[place] = high
        picture = entry.converted(given)
        assert picture.dtype == U8 and np.count_nonzero(picture) == 1
        assert np.array_equal(entry.converted(np.stack([given, dark]))[0], picture)
        assert np.array_equal(entry.restored(picture[None])[0], given)
        at = dict(zip(axes, place, strict=True))
        channel = at.get("s", 0) * size.get("c", 1) + at.get("c", 0)
        assert picture[at["h"], at["w"], channel] == 255
    require_saved(Native((entry,), action_of(spaces.Discrete(2), "it")))


@pytest.mark.parametrize(
    ("space", "kinds", "line"),
    [
        (box(-1, 1, (7,)), {"state": "picture"}, r"state is no picture: it is \[7\] in \[-1, 1\]"),
        (box(-np.inf, np.inf, (64, 48, 3)), {"state": "picture"}, "and finite bounds"),
        (box(-1, 1), {"stat": "picture"}, r'obs_kind.stat is no observation.*"state"'),
        (spaces.Discrete(3), {"state": "numbers"}, r"it is no Box but Discrete\(3\)"),
    ],
)
def test_what_cannot_be_of_its_kind_is_one_line(space: Any, kinds: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        entries(space, "state", "it", kinds)


def test_a_picture_may_be_said_to_be_numbers() -> None:
    (entry,) = entries(box(0, 255, (9, 9, 3), U8), "state", "it", {"state": "numbers"})
    assert entry.leaf == Leaf((9, 9, 3), "float32", 0.0, 255.0)


NUMBERS: list[spaces.Space[Any]] = [
    box(-1, 1, (7,)),
    box(-np.inf, np.inf, (2, 3)),
    box(0, 1, (8, 8, 3)),
    box(0, 9, (9, 9), I64),
    box(0, 65535, (32, 32, 1), np.uint16),
    spaces.Discrete(4, start=2),
    spaces.MultiBinary(5),
    spaces.MultiDiscrete([3, 4, 2]),
    spaces.MultiDiscrete([3, 4], start=[1, 1]),
    spaces.Tuple([spaces.Discrete(32), box(-1, 1, (2,)), spaces.Discrete(2)]),
    spaces.Dict({"arm": spaces.Dict({"q": box(-3, 3, (6,)), "grip": box(0, 1, (1,))})}),
    spaces.Dict({"cam": box(0, 255, (3, 20, 30), U8), "state": box(-1, 1, (4,))}),
    spaces.Dict({"state": box(-1, 1), "privileged_mass": box(0, 9, (1,))}),
]


@pytest.mark.parametrize("space", NUMBERS, ids=str)
def test_one_observation_and_a_batch_are_the_same_numbers(space: spaces.Space[Any]) -> None:
    native = Native(entries(space, "state", "it"), action_of(spaces.Discrete(2), "it"))
    require_saved(native)
    space.seed(0)
    given = space.sample()
    single, alone = native.tensors(given, [entry.name for entry in native.obs])
    assert alone
    for entry in native.obs:
        value, raw = single[entry.name][0], np.asarray(entry.pick(given))
        assert value.shape == entry.leaf.shape and value.dtype == getattr(torch, entry.leaf.dtype)
        assert entry.leaf.is_image == (entry.name == "cam")
        assert not entry.plain or np.allclose(value.numpy(), raw)
        back = entry.restored(value[None].numpy())[0]
        assert np.allclose(back, raw) and back.dtype == np.dtype(entry.dtype)
        if entry.leaf.is_symbol:
            assert value.min() >= 0 and (value <= torch.tensor(entry.leaf.high)).all()


@pytest.mark.parametrize(
    ("said", "won"),
    [(True, True), (0.4, False), (0.6, True), ([False], False), (np.array([1.0]), True)],
)
def test_a_success_is_a_flag_or_a_share_above_one_half(said: Any, won: bool) -> None:
    assert achieved("it", said) is won


@pytest.mark.parametrize("said", ["yes", None, [True, False], float("nan")])
def test_what_is_neither_yes_nor_no_is_refused(said: Any) -> None:
    with pytest.raises(ContractError, match=r'info\["success"\] is .*: write a bool'):
        achieved("it", said)
