"""Datasets of LeRobot's own writer and of ours, films included, are read by the other's reader;
policies of either are the same; and all that LeRobot's writer can store in a column."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.interop import need

need("lerobot", "av")

from lerobot.configs.video import DepthEncoderConfig, RGBEncoderConfig  # noqa: E402
from lerobot.datasets.dataset_tools import delete_episodes  # noqa: E402
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

from embodied.commands.train import train  # noqa: E402
from embodied.core import checkpoint  # noqa: E402
from embodied.core.build import build  # noqa: E402
from embodied.core.env import VecEnv  # noqa: E402
from embodied.core.policy import Policy  # noqa: E402
from embodied.core.spec import Leaf, Spec  # noqa: E402
from embodied.core.tensors import Tensors  # noqa: E402
from embodied.datasets.collect import play  # noqa: E402
from embodied.datasets.editing.check import CheckConfig  # noqa: E402
from embodied.datasets.editing.edit import checked  # noqa: E402
from embodied.datasets.lerobot.pictures import LazyPictures  # noqa: E402
from embodied.datasets.lerobot.reader import Episodes, EpisodeWriter, read_episodes  # noqa: E402
from embodied.datasets.lerobot.schema import Depth  # noqa: E402
from embodied.datasets.transitions import human_steps  # noqa: E402
from tests.adopt.checkpoints import embodied  # noqa: E402
from tests.builders import exit_of, node_of, recorded  # noqa: E402
from tests.interop.datasets import FPS, H, W, action, picture, state  # noqa: E402

EPISODES, TASK = 30, "pass the wall"
NUMBERS = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
FEATURES = {"observation.state": NUMBERS, "action": NUMBERS}
MAPPING = "obs: {state: observation.state}\naction: {low: [-1, -1], high: [1, 1]}\n"
STEPS = ("steps=120", "learner.batch_size=64", "policy.width=64", "eval.episodes=20", "video=false")


def two_gap() -> VecEnv:
    return build(node_of("envs.toy.two_gap.TwoGap", num_envs=8), VecEnv)


@pytest.fixture(scope="module")
def episodes() -> list[Tensors]:
    env = two_gap()
    demonstrator = node_of("policies.scripted.simple.TwoGapDemonstrator")
    played = play(build(demonstrator, Policy, spec=env.spec), env, 0)
    return [episode for episode, _ in islice(played, EPISODES)]


@pytest.fixture(scope="module")
def theirs(episodes: list[Tensors], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstrations as LeRobot's writer records them."""
    folder = tmp_path_factory.mktemp("theirs") / "two_gap"
    dataset = LeRobotDataset.create("me/two_gap", FPS, FEATURES, root=folder, use_videos=False)
    for episode in episodes:
        for seen, done in zip(episode["obs/state"], episode["action"], strict=True):
            frame = {"observation.state": seen.numpy(), "action": done.numpy(), "task": TASK}
            dataset.add_frame(frame)
        dataset.save_episode()
    dataset.finalize()
    return folder


@pytest.fixture(scope="module")
def ours(episodes: list[Tensors], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours") / "two_gap"
    with EpisodeWriter(folder, two_gap().spec) as writer:
        for episode in episodes:
            writer.add(episode)
    return folder


def test_a_policy_of_their_dataset_is_that_of_ours(
    theirs: Path, ours: Path, tmp_path: Path
) -> None:
    """In the environment, by a mapping: the same numbers, so the same weights."""
    read = read_episodes(theirs)
    assert set(read.texts) == {TASK} and read.spec.dt == pytest.approx(0.1)
    assert read.spec.act.names == ("x", "y")
    mapping = tmp_path / "two_gap.yaml"
    mapping.write_text(MAPPING)
    words = ("env=two_gap", "policy=flow", "learner=imitate", *STEPS)
    there = train([*words, f"demos={theirs}", f"mapping={mapping}", f"out={tmp_path / 'a'}"])
    here = train([*words, f"demos={ours}", f"out={tmp_path / 'b'}"])
    a, b = (load_file(run / "checkpoints/00000120/policy.safetensors") for run in (there, here))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


LENGTHS = [12, 25, 8]


def our_dataset(folder: Path, images: Any) -> None:
    frame = Leaf((H, W, 3), "uint8", 0, 255)
    spec = Spec(
        obs={"state": Leaf((3,)), "top": frame, "side": frame, "privileged/mass": Leaf((1,))},
        act=Leaf((2,), low=-1.0, high=1.0),
        dt=1 / FPS,
        text="push the block",
    )
    with EpisodeWriter(folder, spec, "sim", images) as writer:
        for number, length in enumerate(LENGTHS):
            steps = range(length + 1)
            seen = {"top": [picture(number, t) for t in steps]}
            seen["side"] = [picture(number, t + 7) for t in steps]
            seen["state"] = [state(number, t) for t in steps]
            obs = {name: torch.from_numpy(np.stack(values)) for name, values in seen.items()}
            obs["privileged/mass"] = torch.ones(length + 1, 1)
            acts = np.stack([action(number, t) / 200 for t in range(length)])
            writer.add(recorded(obs, torch.from_numpy(acts)))


@pytest.mark.parametrize("images", ["mp4", "png"])
def test_lerobot_reads_what_we_wrote(images: str, tmp_path: Path) -> None:
    our_dataset(tmp_path / "ours", images)
    ours = read_episodes(tmp_path / "ours")
    later = {"action": [0.0, 1 / FPS, 2 / FPS]}
    theirs = LeRobotDataset("me/ours", root=tmp_path / "ours", delta_timestamps=later)
    assert len(theirs) == sum(LENGTHS) and theirs.num_episodes == len(LENGTHS)
    for row in range(len(theirs)):
        item = theirs[row]
        assert item["task"] == "push the block"
        assert torch.allclose(item["observation.state"], ours.steps["obs/state"][row])
        assert torch.allclose(item["action"][0], ours.steps["action"][row])
        for name in ("top", "side"):
            shown = (item[f"observation.images.{name}"] * 255).round().permute(1, 2, 0)
            assert (shown - ours.steps[f"obs/{name}"][row].float()).abs().max() <= 1
    last = theirs[sum(LENGTHS) - 1]
    assert last["action_is_pad"].tolist() == [False, True, True]


def test_lerobot_trains_on_what_we_wrote_and_its_policy_comes_back(tmp_path: Path) -> None:
    """ACT of two cameras; what policies do not see is none of its inputs."""
    our_dataset(tmp_path / "ours", "mp4")
    words = [f"--dataset.root={tmp_path / 'ours'}", "--dataset.repo_id=me/ours", "--steps=2"]
    words += ["--policy.type=act", "--policy.device=cpu", "--policy.push_to_hub=false"]
    words += ["--policy.pretrained_backbone_weights=null", "--policy.chunk_size=4"]
    words += ["--policy.n_action_steps=4", "--batch_size=2", "--num_workers=0", "--save_freq=2"]
    words += ["--policy.dim_model=32", "--policy.dim_feedforward=32", "--policy.n_heads=2"]
    command = [sys.executable, "-m", "lerobot.scripts.lerobot_train", *words]
    done = subprocess.run(
        [*command, f"--output_dir={tmp_path / 'out'}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (weights,) = (tmp_path / "out").glob("checkpoints/000002/pretrained_model")
    embodied("adopt", str(weights), f"fps={FPS}", f"out={tmp_path / 'run'}")
    spec = checkpoint.load_policy(tmp_path / "run").spec
    assert set(spec.obs) == {"state", "top", "side"} and spec.act.size == 2


HEIGHT, WIDTH, SHORT = 48, 64, (4, 7)
STATE = {"dtype": "float32", "shape": (3,), "names": ["a", "b", "c"]}
ACTION = {"dtype": "float32", "shape": (2,), "names": ["x.pos", "y.pos"]}
DEPTH = {"is_depth_map": True}
Values = Callable[[int], Any]


def numbers(dtype: str, *shape: int) -> Values:
    size = int(np.prod(shape))
    base = np.arange(size).reshape(shape)
    return lambda step: (base + step % 2 if dtype == "bool" else base + step).astype(dtype)


def distances(dtype: str, unit: float) -> Values:
    """A slope from 0.4 to 3 m that comes nearer, [HEIGHT, WIDTH, 1], in units of `unit` m; in the
    first row nothing was measured."""
    slope = np.linspace(0.4, 3.0, WIDTH)[None, :, None].repeat(HEIGHT, 0)
    known = np.arange(HEIGHT)[:, None, None] > 0
    return lambda step: (known * (slope - 0.01 * step) / unit).astype(dtype)


def colours(step: int) -> np.ndarray:
    shown = np.full((HEIGHT, WIDTH, 3), 40 + 10 * step, np.uint8)
    shown[:, :, 2] = np.linspace(0, 120, WIDTH, dtype=np.uint8)
    return shown


def first_axis(step: int) -> np.ndarray:
    return np.ascontiguousarray(colours(step).transpose(2, 0, 1))


def feature_of(dtype: str, channels: int, info: dict[str, Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"dtype": dtype, "shape": (HEIGHT, WIDTH, channels)}
    made["names"] = ["height", "width", "channels"]
    return made if info is None else {**made, "info": info}


def vector(dtype: str, *shape: int) -> dict[str, Any]:
    names = [f"e{i}" for i in range(shape[0])] if len(shape) == 1 else None
    return {"dtype": dtype, "shape": shape, "names": names}


LINEAR = DepthEncoderConfig(depth_min=0.2, depth_max=4.0, use_log=False)
TOP, TOUCH = "observation.images.top", "observation.touch"
CLASSES = {"dtype": "int64", "shape": (1,), "names": ["choice"]}
AXES = ["channels", "height", "width"]
CHANNELS_FIRST = {"dtype": "image", "shape": (3, HEIGHT, WIDTH), "names": AXES}
DTYPES = "float64 float16 int8 int16 int32 int64 uint8 uint16 uint32 bool"
SHAPES: list[Any] = [("float32", 1), ("float32", 4, 5), ("float32", 2, 4, 5), ("int32", 2, 2, 4, 5)]
# Features beyond state and action, and their values at a step.
CASES: dict[str, dict[str, tuple[dict[str, Any], Values]]] = {
    "plain": {},
    **{dtype: {TOUCH: (vector(dtype, 4), numbers(dtype, 4))} for dtype in DTYPES.split()},
    **{
        f"{len(shape)} axes of {shape[0]}": {TOUCH: (vector(dtype, *shape), numbers(dtype, *shape))}
        for dtype, *shape in SHAPES
    },
    "words": {"note": ({"dtype": "string", "shape": (1,), "names": None}, lambda step: "ok")},
    "rewards": {
        "next.reward": (vector("float32", 1), numbers("float32", 1)),
        "next.success": (vector("bool", 1), numbers("bool", 1)),
        "next.done": (vector("bool", 1), lambda step: np.array([False])),
    },
    "intervention": {"complementary_info.is_intervention": (vector("bool", 1), numbers("bool", 1))},
    "class": {"action": (CLASSES, lambda step: np.array([step % 3]))},
    "float64 action": {"action": (vector("float64", 2), numbers("float64", 2))},
    "picture": {TOP: (feature_of("image", 3), colours)},
    "picture, channels first": {TOP: (CHANNELS_FIRST, first_axis)},
    "film": {TOP: (feature_of("video", 3), colours)},
    "film, AV1": {TOP: (feature_of("video", 3), colours)},
    "depth picture, mm": {TOP: (feature_of("image", 1, DEPTH), distances("uint16", 1e-3))},
    "depth picture, m": {TOP: (feature_of("image", 1, DEPTH), distances("float32", 1.0))},
    "depth film": {TOP: (feature_of("video", 1, DEPTH), distances("uint16", 1e-3))},
    "depth film, even steps": {TOP: (feature_of("video", 1, DEPTH), distances("float32", 1.0))},
    "two tasks": {},
}


def write_case(root: Path, name: str) -> Path:
    more = CASES[name]
    features = {"observation.state": STATE, "action": ACTION}
    features |= {key: dict(feature) for key, (feature, _) in more.items()}
    films = any(feature["dtype"] == "video" for feature in features.values())
    codec = "libsvtav1" if name == "film, AV1" else "h264"
    settings: dict[str, Any] = {"rgb_encoder": RGBEncoderConfig(vcodec=codec)} if films else {}
    if name == "depth film, even steps":
        settings["depth_encoder"] = LINEAR
    dataset = LeRobotDataset.create(
        "me/test", FPS, features, root, "arm", use_videos=films, **settings
    )
    for length in SHORT:
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
    root = write_case(tmp_path / "theirs", name)
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
        assert human_steps(ours).tolist() == [step % 2 == 1 for n in SHORT for step in range(n)]
    if name == "class":
        assert spec.act.dtype == "int64" and spec.act.high == 2


@pytest.mark.parametrize("name", [case for case in CASES if case.startswith("depth")])
def test_depth_becomes_points_that_lerobot_keeps(name: str, tmp_path: Path) -> None:
    root, out = write_case(tmp_path / "theirs", name), tmp_path / "out"
    sight = ("fx=60", "fy=60", "cx=31.5", "cy=23.5", "voxel=0.001", "points=300")
    assert exit_of("demos", "points", root, *sight, f"out={out}") == 0
    depth, clouds = read_episodes(root).steps["obs/top"], read_episodes(out).steps["obs/points"]
    for seen, cloud in zip(depth, clouds, strict=True):
        # The pixel of each point has its distance; a voxel holds less than a pixel.
        column = (cloud[:, 0] / cloud[:, 2] * 60 + 31.5).round().long()
        row = (cloud[:, 1] / cloud[:, 2] * 60 + 23.5).round().long()
        torch.testing.assert_close(cloud[:, 2], seen[row, column, 0], atol=1e-5, rtol=0)
        assert row.min() > 0, "nothing was measured in the first row"
    theirs = LeRobotDataset("me/test", root=out)
    assert not theirs.meta.camera_keys and not list(out.glob("videos/*"))
    assert torch.equal(theirs[5]["observation.points"].view(300, 3), clouds[5])
    delete_episodes(theirs, [0], tmp_path / "edited", "me/edited")
    edited = read_episodes(tmp_path / "edited")
    assert edited.spec.obs["points"].is_points
    assert torch.equal(edited.steps["obs/points"], clouds[SHORT[0] :])
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
