"""All that LeRobot's writer can store in a column, read by both readers: the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop import need

need("lerobot", "av")

from lerobot.configs.video import DepthEncoderConfig, RGBEncoderConfig  # noqa: E402
from lerobot.datasets.dataset_tools import delete_episodes  # noqa: E402
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

from embodied.commands.train import train  # noqa: E402
from embodied.core import checkpoint  # noqa: E402
from embodied.datasets.editing.check import CheckConfig  # noqa: E402
from embodied.datasets.editing.edit import checked  # noqa: E402
from embodied.datasets.lerobot.pictures import LazyPictures  # noqa: E402
from embodied.datasets.lerobot.reader import Episodes, read_episodes  # noqa: E402
from embodied.datasets.lerobot.schema import Depth  # noqa: E402
from embodied.datasets.transitions import human_steps  # noqa: E402
from tests.builders import exit_of  # noqa: E402

H, W, FPS, LENGTHS = 48, 64, 10, (4, 7)
STATE = {"dtype": "float32", "shape": (3,), "names": ["a", "b", "c"]}
ACTION = {"dtype": "float32", "shape": (2,), "names": ["x.pos", "y.pos"]}
DEPTH = {"is_depth_map": True}
Values = Callable[[int], Any]


def numbers(dtype: str, *shape: int) -> Values:
    size = int(np.prod(shape))
    base = np.arange(size).reshape(shape)
    return lambda step: (base + step % 2 if dtype == "bool" else base + step).astype(dtype)


def distances(dtype: str, unit: float) -> Values:
    """A slope from 0.4 to 3 m that comes nearer, [H, W, 1], in units of `unit` m; in the first row
    nothing was measured."""
    slope = np.linspace(0.4, 3.0, W)[None, :, None].repeat(H, 0)
    known = np.arange(H)[:, None, None] > 0
    return lambda step: (known * (slope - 0.01 * step) / unit).astype(dtype)


def colours(step: int) -> np.ndarray:
    shown = np.full((H, W, 3), 40 + 10 * step, np.uint8)
    shown[:, :, 2] = np.linspace(0, 120, W, dtype=np.uint8)
    return shown


def first_axis(step: int) -> np.ndarray:
    return np.ascontiguousarray(colours(step).transpose(2, 0, 1))


def picture(dtype: str, channels: int, info: dict[str, Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"dtype": dtype, "shape": (H, W, channels)}
    made["names"] = ["height", "width", "channels"]
    return made if info is None else {**made, "info": info}


def vector(dtype: str, *shape: int) -> dict[str, Any]:
    names = [f"e{i}" for i in range(shape[0])] if len(shape) == 1 else None
    return {"dtype": dtype, "shape": shape, "names": names}


LINEAR = DepthEncoderConfig(depth_min=0.2, depth_max=4.0, use_log=False)
TOP, TOUCH = "observation.images.top", "observation.touch"
CLASSES = {"dtype": "int64", "shape": (1,), "names": ["choice"]}
CHANNELS_FIRST = {"dtype": "image", "shape": (3, H, W), "names": ["channels", "height", "width"]}
# Features beyond state and action, and their values at a step.
CASES: dict[str, dict[str, tuple[dict[str, Any], Values]]] = {
    "plain": {},
    **{
        dtype: {TOUCH: (vector(dtype, 4), numbers(dtype, 4))}
        for dtype in ("float64", "float16", "int8", "int16", "int32", "int64")
    },
    **{
        dtype: {TOUCH: (vector(dtype, 4), numbers(dtype, 4))}
        for dtype in ("uint8", "uint16", "uint32", "bool")
    },
    "grid": {TOUCH: (vector("float32", 4, 5), numbers("float32", 4, 5))},
    "cube": {TOUCH: (vector("float32", 2, 4, 5), numbers("float32", 2, 4, 5))},
    "four axes": {TOUCH: (vector("int32", 2, 2, 4, 5), numbers("int32", 2, 2, 4, 5))},
    "one number": {TOUCH: (vector("float32", 1), numbers("float32", 1))},
    "words": {"note": ({"dtype": "string", "shape": (1,), "names": None}, lambda step: "ok")},
    "rewards": {
        "next.reward": (vector("float32", 1), numbers("float32", 1)),
        "next.success": (vector("bool", 1), numbers("bool", 1)),
        "next.done": (vector("bool", 1), lambda step: np.array([False])),
    },
    "intervention": {"complementary_info.is_intervention": (vector("bool", 1), numbers("bool", 1))},
    "class": {"action": (CLASSES, lambda step: np.array([step % 3]))},
    "float64 action": {"action": (vector("float64", 2), numbers("float64", 2))},
    "picture": {TOP: (picture("image", 3), colours)},
    "picture, channels first": {TOP: (CHANNELS_FIRST, first_axis)},
    "film": {TOP: (picture("video", 3), colours)},
    "depth picture, mm": {TOP: (picture("image", 1, DEPTH), distances("uint16", 1e-3))},
    "depth picture, m": {TOP: (picture("image", 1, DEPTH), distances("float32", 1.0))},
    "depth film": {TOP: (picture("video", 1, DEPTH), distances("uint16", 1e-3))},
    "depth film, even steps": {TOP: (picture("video", 1, DEPTH), distances("float32", 1.0))},
    "two tasks": {},
}


def write(root: Path, name: str) -> Path:
    more = CASES[name]
    features = {"observation.state": STATE, "action": ACTION}
    features |= {key: dict(feature) for key, (feature, _) in more.items()}
    films = any(feature["dtype"] == "video" for feature in features.values())
    settings: dict[str, Any] = {"rgb_encoder": RGBEncoderConfig(vcodec="h264")} if films else {}
    if name == "depth film, even steps":
        settings["depth_encoder"] = LINEAR
    dataset = LeRobotDataset.create(
        "me/test", FPS, features, root, "arm", use_videos=films, **settings
    )
    for length in LENGTHS:
        for step in range(length):
            frame = {"observation.state": numbers("float32", 3)(step)}
            frame["action"] = numbers("float32", 2)(step)
            frame |= {key: values(step) for key, (_, values) in more.items()}
            task = "stop" if name == "two tasks" and step == 3 else "go"
            dataset.add_frame({**frame, "task": task})
        dataset.save_episode()
    dataset.finalize()
    return root


def require_same(ours: Episodes, theirs: LeRobotDataset, name: str) -> None:
    """Every row of both readers; pictures to what encoding costs, distances to a millimetre."""
    keys = {TOP: "obs/top", TOUCH: "obs/touch", "observation.state": "obs/state"}
    keys |= {"next.reward": "reward", "next.success": "success", "action": "action"}
    for row in range(len(theirs)):
        item = theirs[row]
        for column, key in keys.items():
            if column not in item:
                continue
            there, here = torch.as_tensor(item[column]), ours.steps[key][row]
            if column == TOP:
                there = there.permute(1, 2, 0)
                depth = ours.spec.obs["top"].is_depth
                assert depth == name.startswith("depth")
                here, room = (here * 1000, 1.01) if depth else (here / 255, 0.02)
                assert (there - here).abs().max() <= room, (name, row)
                continue
            assert torch.equal(there.double().flatten(), here.double().flatten()), (name, column)
        assert ours.words()[row] == item["task"]


@pytest.mark.parametrize("name", CASES)
def test_both_readers_give_the_same(name: str, tmp_path: Path) -> None:
    root = write(tmp_path / "theirs", name)
    ours = read_episodes(root)
    require_same(ours, LeRobotDataset("me/test", root=root), name)
    lazy = read_episodes(root, memory_mb=0.01)
    for key, value in lazy.steps.items():
        assert isinstance(value, LazyPictures) == (key == "obs/top")
        value = value.load() if isinstance(value, LazyPictures) else value
        assert torch.equal(value, ours.steps[key])
    found = checked(root, CheckConfig(still=10.0))[0]
    assert found == []
    assert exit_of("demos", "info", root) == 0
    policy = "categorical" if name == "class" else "flow"
    words = (f"policy={policy}", "learner=imitate", "size=debug", "steps=2", f"demos={root}")
    spec = checkpoint.load_policy(train([*words, f"out={tmp_path / 'run'}"])).spec
    assert ("instruction" in spec.obs) == (name == "two tasks")
    if name == "intervention":
        assert human_steps(ours).tolist() == [step % 2 == 1 for n in LENGTHS for step in range(n)]
    if name == "class":
        assert spec.act.dtype == "int64" and spec.act.high == 2


@pytest.mark.parametrize("name", [case for case in CASES if case.startswith("depth")])
def test_depth_becomes_points_that_lerobot_keeps(name: str, tmp_path: Path) -> None:
    root, out = write(tmp_path / "theirs", name), tmp_path / "out"
    sight = ("fx=60", "fy=60", "cx=31.5", "cy=23.5", "voxel=0.001", "points=300")
    assert exit_of("demos", "points", root, *sight, f"out={out}") == 0
    depth, clouds = read_episodes(root).steps["obs/top"], read_episodes(out).steps["obs/points"]
    for picture, cloud in zip(depth, clouds, strict=True):
        # The pixel of each point has its distance; a voxel holds less than a pixel.
        column = (cloud[:, 0] / cloud[:, 2] * 60 + 31.5).round().long()
        row = (cloud[:, 1] / cloud[:, 2] * 60 + 23.5).round().long()
        torch.testing.assert_close(cloud[:, 2], picture[row, column, 0], atol=1e-5, rtol=0)
        assert row.min() > 0, "nothing was measured in the first row"
    theirs = LeRobotDataset("me/test", root=out)
    assert not theirs.meta.camera_keys and not list(out.glob("videos/*"))
    assert torch.equal(theirs[5]["observation.points"].view(300, 3), clouds[5])
    delete_episodes(theirs, [0], tmp_path / "edited", "me/edited")
    edited = read_episodes(tmp_path / "edited")
    assert edited.spec.obs["points"].is_points
    assert torch.equal(edited.steps["obs/points"], clouds[LENGTHS[0] :])
    words = ("policy=flow", "learner=imitate", "size=debug", "steps=2", f"demos={out}")
    assert checkpoint.load_policy(train([*words, f"out={tmp_path / 'run'}"])).spec.obs["points"]


def test_codes_of_films_are_lerobots() -> None:
    from lerobot.datasets.depth_utils import dequantize_depth

    codes = np.arange(4096, dtype=np.uint16).reshape(64, 64, 1)
    for logarithmic in (True, False):
        for low, high in ((0.01, 10.0), (0.3, 2.5)):
            there = dequantize_depth(
                codes, low, high, use_log=logarithmic, output_unit="m", output_channel_last=True
            )
            here = Depth("mm", low, high, logarithmic=logarithmic).of_film(codes)
            assert np.abs(here - there.numpy()).max() < 2e-6 * high
