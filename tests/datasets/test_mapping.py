"""The mapping file between a dataset or policy and an environment or robot, and its linear maps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.affine import Affine
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.datasets.mapping import (
    Mapping,
    Source,
    Statistics,
    inverse_order,
    measured,
    permuted,
    remapped,
    require_names,
)
from tests.datasets.test_transitions import TWO, episodes, with_steps

TEXT = """
obs:
  front: observation.images.top
  state: {name: observation.state, scale: 0.5, offset: 1}
action: {low: [-90, 0], high: [90, 100]}
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "map.yaml"
    file.write_text(text)
    return file


def test_a_file_names_observations_and_the_range_of_actions(tmp_path: Path) -> None:
    mapping = Mapping.load(written(tmp_path, TEXT))
    assert mapping.source("front") == Source("top")
    assert mapping.source("wrist") == Source("wrist")
    assert mapping.action == Affine((-90.0, 0.0), (90.0, 100.0))
    assert Mapping.parse(mapping.to_json()) == mapping
    there = {"top": torch.zeros(1, 2, 2, 3, dtype=torch.uint8), "state": torch.tensor([[4.0]])}
    here = mapping.obs_here(there, ("front", "state"))
    assert here["state"].tolist() == [[3.0]] and here["front"].dtype == torch.uint8
    assert mapping.obs_there(here, ("front", "state"))["state"].tolist() == [[4.0]]
    assert Mapping.parse({}).action == "quantiles", "measured unless it is given"
    assert Mapping.parse({"action": "minmax"}).action == "minmax"


def test_every_element_has_its_own_scale_sign_and_name() -> None:
    """LeRobot's degrees and a gripper of 0 to 100, of which one joint turns the other way."""
    degree = 0.0174533
    node = {
        "obs": {"joints": {"name": "observation.state", "scale": [degree, -degree, 7e-4],
                           "offset": [0, 0.1, 0.0], "elements": ["q1", "q2", "width"]}},
        "action": {"scale": [degree, -degree, 7e-4], "offset": [0.0, 0.1, 0.0],
                   "elements": ["pan", "lift", "hand"]},
    }  # fmt: skip
    mapping = Mapping.parse(node)
    assert Mapping.parse(mapping.to_json()) == mapping
    here = Spec({"joints": Leaf((3,), names=("width", "q1", "q2"))}, act("hand", "lift", "pan"), 1)
    there = Spec({"state": Leaf((3,), names=("a", "b", "c"))}, act("x", "y", "z"), 1)
    require_names(here, mapping)
    ordered = mapping.ordered(here, there)
    values = torch.tensor([[90.0, 90.0, 50.0]])
    seen = ordered.obs_here({"state": values}, here.obs)
    radians = torch.tensor([[0.035, 1.5708, 0.1 - 1.5708]])
    torch.testing.assert_close(seen["joints"], radians, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ordered.obs_there(seen, here.obs)["state"], values)
    assert isinstance(mapping.action, Affine)
    order = mapping.action_order(here.act, there.act)
    torch.testing.assert_close(
        permuted(mapping.action.to_unit(values), order),
        torch.tensor([[0.035, 0.1 - 1.5708, 1.5708]]), rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    assert permuted(permuted(values, order), inverse_order(order)).equal(values)


def act(*names: str) -> Leaf:
    return Leaf((len(names),), names=names)


def state_of(**how: Any) -> Mapping:
    return Mapping.parse({"obs": {"state": {"name": "state", **how}}})


def test_datasets_share_the_range_that_is_measured_and_choices_have_none() -> None:
    here = Spec({"place": Leaf((1,))}, Leaf((2,), low=-1.0, high=1.0), 0.05)
    mapping = Mapping.parse({"obs": {"place": "state"}, "action": "minmax"})
    made = remapped({"a": episodes([[0.0] * 3], [True]), "b": TWO}, here, mapping)
    of_a, of_b = (made[name].steps["action"][:, 0] for name in "ab")
    assert torch.equal(of_a, of_b[:3]) and of_b[[0, -1]].tolist() == [-1, 1]
    chosen, choice = torch.arange(6), Leaf((), "int64", 0, 5)
    there = replace(with_steps(TWO, {"action": chosen}), spec=TWO.spec.with_act(choice))
    found = remapped({"a": there}, here.with_act(choice), replace(mapping, action="quantiles"))
    assert torch.equal(found["a"].steps["action"], chosen)


def test_elements_are_matched_by_name_and_never_by_place() -> None:
    plain, named = Mapping(), Mapping.parse({"action": {"elements": ["b", "a"]}})
    assert plain.action_order(act("a", "b", "c"), act("c", "a", "b")) == (1, 2, 0)
    assert plain.action_order(act("a", "b"), act("a", "b")) == ()
    assert plain.action_order(act("a", "b"), Leaf((2,))) == ()  # nobody says any: as they are
    assert named.action_order(act("a", "b"), act("x", "y")) == (1, 0)
    assert named.action == "quantiles"
    here, there = (Spec({"state": act(*names)}, act("a"), 1) for names in (("q1", "q2"), "pq"))
    turned = state_of(elements=["q2", "q1"]).ordered(here, there)
    assert turned.source("state").order == (1, 0)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: plain.action_order(act("a", "b"), act("x", "y")),
         r"the action is a, b here and x, y there: .*elements"),
        (lambda: plain.ordered(here, there),
         r"obs.state is q1, q2 here and p, q there: .*elements:"),
        (lambda: require_names(here, state_of(scale=[1, 2, 3])),
         "scale has 3 numbers, the observation 2"),
        (lambda: require_names(here, state_of(elements=["q1", "q3"])),
         "elements are q1, q3, the observation has q1, q2"),
    ]  # fmt: skip
    for asked, line in refused:
        with pytest.raises(ConfigError, match=line):
            asked()


@pytest.mark.parametrize("how", ["quantiles", "minmax", "mean_std"])
def test_what_only_noise_moved_keeps_its_scale(how: Statistics) -> None:
    """A hand that stayed closed, measured to 2 micrometres: open by 8 cm is not 80,000.
    A joint that moved by a milliradian did move."""
    torch.manual_seed(0)
    width, joint = 2e-6 * torch.rand(500), 2.0 + 1e-3 * torch.rand(500)
    by = measured(torch.stack([width, joint], 1), how)
    unit = by.to_unit(torch.tensor([[0.08, 2.0005]]))[0]
    assert abs(unit[0]) < 1.1 and abs(unit[1]) < 0.1
    assert by.high[1] - by.low[1] < 1.1e-3


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("action: degrees", "low: ..., high|{low"),
        ("action: {low: [1]}", "{low"),
        ("action: {low: [a], high: [1]}", "action"),
        ("obss: {}", 'did you mean "obs"'),
        ("obs: [a, b]", "NAME_HERE"),
        ("obs: {front: 3}", "obs.front"),
        ("obs: {front: {name: top, sclae: 2}}", 'did you mean "scale"'),
        ("obs: {front: {name: top, scale: yes}}", "numbers"),
        ("obs: {front: {name: top, scale: [1, 0]}}", "not be 0"),
        ("obs: {front: {name: top, elements: [a, a]}}", "different names"),
        ("action: {scale: 2}", "list of numbers"),
        ("action: {scale: [1, 2], offset: [1, 2, 3]}", "2 scales and 3 offsets"),
        ("- a", "should hold"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        Mapping.load(written(tmp_path, text))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="mapping=FILE"):
        Mapping.load(tmp_path / "none.yaml")


DEGREES = Affine((-90.0, 0.0), (90.0, 100.0))


def test_the_edges_are_minus_one_and_one_and_nothing_is_clamped() -> None:
    for physical, unit in (
        ([[-90.0, 0.0], [90.0, 100.0]], [[-1.0, -1.0], [1.0, 1.0]]),
        ([180.0, -50.0], [2.0, -2.0]),
        ([90, 50], [1, 0]),  # integers become numbers
    ):
        assert DEGREES.to_unit(torch.tensor(physical)).tolist() == unit
        assert DEGREES.to_physical(torch.tensor(unit)).tolist() == physical
    square = Affine(tuple(range(4)), tuple(range(10, 14)))
    assert square.to_unit(torch.zeros(3, 2, 2)).shape == (3, 2, 2)
    assert Affine((0.0,), (2.0,)).to_unit(torch.tensor(2.0)) == 1
    gripper = Affine((1.0,), (0.0,))  # an axis may point the other way
    assert gripper.to_unit(torch.tensor([[1.0], [0.0]])).flatten().tolist() == [-1, 1]
    assert Affine.of_range([5.0, -1.0], [5.0, 1.0]) == Affine((4.0, -1.0), (6.0, 1.0))
    assert Affine.from_json(DEGREES.to_json()) == DEGREES
    with pytest.raises(ValueError, match="do not end in 2"):
        DEGREES.to_unit(torch.zeros(3))


def test_other_numbers_are_refused() -> None:
    for low, high, word in (
        ((0.0,), (0.0,), "equal in element 0"),
        ((0.0,), (1.0, 2.0), "has 1 numbers"),
        ((float("nan"),), (1.0,), "finite"),
        ((), (), "0 numbers"),
    ):
        with pytest.raises(ConfigError, match=word):
            Affine(low, high)
