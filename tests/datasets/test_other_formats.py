"""LeRobot's version 2, zarr and RLDS, laid out as their own writers do."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import DatasetError, EpisodeWriter, read_episodes
from embodied.datasets.lerobot.video import encode_png
from embodied.importers import Bounds, Converted, convert
from tests.builders import exit_of, recorded
from tests.datasets.test_foreign_columns import foreign
from tests.foreign import as_version_2

SPEC = Spec(
    {"state": Leaf((3,), names=("x", "y", "z")), "top": Leaf((16, 24, 3), "uint8")},
    Leaf((2,), names=("x.pos", "y.pos")),
    dt=0.1,
)


def episode(number: int, steps: int) -> Tensors:
    random = torch.Generator().manual_seed(number)
    shade = torch.arange(steps + 1)[:, None, None, None] * 8 + 40 * number
    obs = {
        "state": torch.randn(steps + 1, 3, generator=random),
        "top": shade.expand(-1, 16, 24, 3).to(torch.uint8).contiguous(),
    }
    return recorded(obs, 90 * torch.randn(steps, 2, generator=random))


@pytest.fixture(scope="module", params=["mp4", "png"])
def version_3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes, two sentences, no key of ours."""
    folder = tmp_path_factory.mktemp("three") / "demos"
    with EpisodeWriter(folder, SPEC, "arm", request.param) as writer:
        for number, text in enumerate(("push", "pull", "push")):
            writer.add(episode(number, 5 + number), text)
    return foreign(folder)


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_lerobot_2_is_read_as_3(version_3: Path, tmp_path: Path, version: str) -> None:
    old = as_version_2(version_3, tmp_path / "old", version)
    with pytest.raises(DatasetError, match=f"of version {version}") as told:
        read_episodes(old)
    command = str(told.value).partition("convert it: embodied ")[2]
    assert exit_of(*command.replace("NEW_FOLDER", str(tmp_path / "new")).split()) == 0
    theirs, ours = read_episodes(version_3), read_episodes(tmp_path / "new")
    assert ours.spec == theirs.spec and ours.texts == theirs.texts == ("push", "pull", "push")
    assert ours.length.tolist() == [5, 6, 7]
    assert all(torch.equal(ours.steps[key], value) for key, value in theirs.steps.items())
    stats = [json.loads((f / "meta/stats.json").read_text()) for f in (version_3, tmp_path / "new")]
    for feature, kinds in stats[1].items():
        for kind, value in kinds.items():
            np.testing.assert_allclose(value, stats[0][feature][kind], err_msg=feature)
    for file in old.glob("data/*/*.parquet"):
        kept = tmp_path / f"new/data/chunk-000/file-{file.stem[-3:]}.parquet"
        assert kept.read_bytes() == file.read_bytes()


def test_a_damaged_lerobot_2_is_one_line(version_3: Path, tmp_path: Path) -> None:
    old = as_version_2(version_3, tmp_path / "old")
    steps = old / "data/chunk-000/episode_000001.parquet"
    (old / "data/chunk-000/episode_000002.parquet").rename(steps)
    with pytest.raises(DatasetError, match=r"episode_000001.parquet has 7 steps.*says 6"):
        convert("lerobot", old, tmp_path / "new")
    steps.unlink()
    with pytest.raises(DatasetError, match=r"episode_000001.parquet is missing"):
        convert("lerobot", old, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(DatasetError, match=r"is of version v3.0.*needs no conversion"):
        convert("lerobot", version_3, tmp_path / "new")


RNG = np.random.default_rng(0)
LZ4: Any = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}
ZSTD: Any = {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 2, "blocksize": 0}


def write_zarr(
    folder: Path, name: str, values: np.ndarray, chunk: int, compressor: Any, **more: Any
) -> None:
    """An array in zarr's format 2, `chunk` rows a file; the last one is padded, as zarr does."""
    codecs = pytest.importorskip("numcodecs", reason="numcodecs is not installed (extra: data)")
    (folder / name).mkdir(parents=True)
    sizes = [chunk, *(max(1, -(-size // 2)) for size in values.shape[1:])]
    about = {"zarr_format": 2, "shape": values.shape, "chunks": sizes, "dtype": values.dtype.str}
    about |= {"compressor": compressor, "fill_value": 0, "order": "C", "filters": None, **more}
    (folder / name / ".zarray").write_text(json.dumps(about))
    filters = [codecs.get_codec(dict(one)) for one in about["filters"] or []]
    counts = [range(-(-n // c)) for n, c in zip(values.shape, sizes, strict=True)]
    for index in itertools.product(*counts):
        part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, sizes, strict=True))]
        pads = [(0, c - n) for c, n in zip(sizes, part.shape, strict=True)]
        data: Any = np.ascontiguousarray(np.pad(part, pads))
        for one in filters:
            data = one.encode(data)
        if compressor is None:
            data = np.asarray(data).tobytes(order=about["order"])
        else:
            data = codecs.get_codec(dict(compressor)).encode(data)
        (folder / name / ".".join(map(str, index))).write_bytes(bytes(data))


def test_a_replay_buffer_of_diffusion_policy(tmp_path: Path) -> None:
    """As PushT's: pictures are floats from 0 to 255; 3 episodes over many chunks."""
    folder, ends = tmp_path / "replay.zarr", np.array([4, 9, 17])
    data = {
        "action": RNG.uniform(0, 512, (17, 2)).astype(np.float32),
        "img": RNG.integers(0, 256, (17, 24, 32, 3)).astype(np.float32),
        "keypoint": RNG.normal(size=(17, 9, 2)),
        "state": RNG.normal(size=(17, 5)).astype(np.float32),
    }
    delta, zlib = {"id": "delta", "dtype": "<f4", "astype": "<f4"}, {"id": "zlib", "level": 1}
    write_zarr(folder, "meta/episode_ends", ends, 3, None)
    write_zarr(folder, "data/action", data["action"], 5, LZ4)
    write_zarr(folder, "data/img", data["img"], 3, ZSTD)
    write_zarr(folder, "data/keypoint", data["keypoint"], 17, None, order="F")
    write_zarr(folder, "data/state", data["state"], 4, zlib, filters=[delta])
    with pytest.raises(DatasetError, match="does not say its control period: --dt"):
        convert("zarr", folder, tmp_path / "out")
    assert convert("zarr", folder, tmp_path / "out", 0.1, images="png") == Converted(3)
    ours = read_episodes(tmp_path / "out")
    assert ours.spec.obs["img"] == Leaf((24, 32, 3), "uint8", 0, 255)
    assert ours.spec.act == Leaf((2,), names=("action_0", "action_1")) and ours.spec.dt == 0.1
    for at, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        rows = ours.episode(at)
        for name in ("img", "keypoint", "state"):
            np.testing.assert_allclose(rows[f"obs/{name}"], data[name][begin : end - 1], atol=1e-6)
            np.testing.assert_allclose(rows[f"next_obs/{name}"], data[name][end - 1], atol=1e-6)
        np.testing.assert_array_equal(rows["action"], data["action"][begin : end - 1])
        assert rows["truncated"].tolist() == [False] * (end - begin - 2) + [True]
    bounds = Bounds((0.0, 0.0), (512.0, 512.0))
    convert("zarr", folder, tmp_path / "unit", 0.1, images="png", bounds=bounds)
    unit = read_episodes(tmp_path / "unit")
    np.testing.assert_allclose((unit.steps["action"] + 1) * 256, ours.steps["action"], atol=1e-4)


def test_a_zipped_replay_buffer_of_umi(tmp_path: Path) -> None:
    """Without actions: the next pose is the action; what is known afterwards is hidden."""
    folder = tmp_path / "replay"
    pose = {"eef_pos": 3, "eef_rot_axis_angle": 3, "gripper_width": 1}
    data = {f"robot0_{k}": RNG.normal(size=(11, n)).astype(np.float32) for k, n in pose.items()}
    poses = np.concatenate([*data.values()], 1)
    data["camera0_rgb"] = RNG.integers(0, 256, (11, 3, 16, 20)).astype(np.uint8)
    data["robot0_demo_end_pose"] = RNG.normal(size=(11, 6))
    write_zarr(folder, "meta/episode_ends", np.array([6, 10, 11]), 3, LZ4)
    for name, values in data.items():
        write_zarr(folder, f"data/{name}", values, 4, LZ4)
    shutil.make_archive(str(tmp_path / "replay.zarr"), "zip", folder)
    made = convert("zarr", tmp_path / "replay.zarr.zip", tmp_path / "out", 1 / 60, images="png")
    assert made == Converted(2, 0, ("episode 2",))
    ours = read_episodes(tmp_path / "out")
    assert ours.spec.obs["camera0_rgb"].shape == (16, 20, 3)
    assert "privileged/robot0_demo_end_pose" in ours.spec.obs
    assert len(ours.spec.act.names) == 7 and ours.spec.act.names[6] == "robot0_gripper_width"
    for at, (begin, end) in enumerate([(0, 6), (6, 10)]):
        rows = ours.episode(at)
        np.testing.assert_array_equal(rows["action"], poses[begin + 1 : end])
        shown = data["camera0_rgb"][begin:end].transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(rows["obs/camera0_rgb"], shown[:-1])
        np.testing.assert_array_equal(rows["next_obs/camera0_rgb"], shown[-1])


def test_wrong_replay_buffers_are_one_line(tmp_path: Path) -> None:
    def refused(line: str) -> None:
        with pytest.raises(DatasetError, match=line) as error:
            convert("zarr", tmp_path, tmp_path / "out", 0.1)
        assert "\n" not in str(error.value)

    refused("is no replay buffer: it has no meta/episode_ends")
    write_zarr(tmp_path, "meta/episode_ends", np.array([4, 9]), 3, LZ4)
    write_zarr(tmp_path, "data/state", RNG.normal(size=(8, 5)), 4, LZ4)
    refused("data/state has fewer rows than meta/episode_ends")
    write_zarr(tmp_path, "data/more", RNG.normal(size=(9, 5)), 4, LZ4)
    (tmp_path / "data/state/.zarray").unlink()
    refused("has neither data/action nor data/robot0_eef_pos")
    write_zarr(tmp_path, "data/action", RNG.normal(size=(9, 5)), 4, LZ4)
    (tmp_path / "data/action/1.0").write_bytes(b"cut")
    refused("episode 0: .*data/action/1.0 is damaged|data/action/1.0 is damaged")


def varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def field(number: int, data: bytes) -> bytes:
    return varint(number * 8 + 2) + varint(len(data)) + data


def record(features: dict[str, Any]) -> bytes:
    """A tf.train.Example in TFRecord's frame (checksums of zeros, which a reader may skip)."""
    entries = b""
    for name, values in features.items():
        if isinstance(values, list):
            kind = field(1, b"".join(field(1, value) for value in values))
        elif values.dtype == np.float32:
            kind = field(2, field(1, values.tobytes()))
        else:
            packed = b"".join(varint(int(value) % 2**64) for value in values.flat)
            kind = field(3, field(1, packed))
        entries += field(1, field(1, name.encode()) + field(2, kind))
    data = field(1, entries)
    return len(data).to_bytes(8, "little") + bytes(4) + data + bytes(4)


def tensor_feature(dtype: str, *sizes: int) -> dict[str, Any]:
    shape = {"dimensions": [str(size) for size in sizes]} if sizes else {}
    return {"tensor": {"shape": shape, "dtype": dtype, "encoding": "none"}}


def named_features(**features: Any) -> dict[str, Any]:
    return {"featuresDict": {"features": features}}


def write_rlds(folder: Path) -> list[dict[str, Any]]:
    """Three episodes in two splits, laid out as TensorFlow Datasets does."""
    folder.mkdir(parents=True)
    picture: dict[str, Any] = {"image": {"shape": {"dimensions": ["16", "24", "3"]}}}
    picture["image"] |= {"dtype": "uint8", "encodingFormat": "png"}
    steps = named_features(
        observation=named_features(
            image=picture, joints=tensor_feature("float32", 2, 2), gripper=tensor_feature("int64")
        ),
        action=named_features(
            world_vector=tensor_feature("float32", 3), open_gripper=tensor_feature("bool")
        ),
        reward=tensor_feature("float32"),
        is_terminal=tensor_feature("bool"),
        language_instruction={"text": {}},
    )
    about = named_features(
        steps={"sequence": {"feature": steps, "length": "-1"}},
        episode_metadata=named_features(ragged=tensor_feature("float32", -1)),
    )
    (folder / "features.json").write_text(json.dumps(about))
    episodes = []
    for number, split in enumerate(("train", "train", "val")):
        count = 5 + number
        one = {
            "image": RNG.integers(0, 256, (count, 16, 24, 3), dtype=np.uint8),
            "joints": RNG.normal(size=(count, 2, 2)).astype(np.float32),
            "gripper": RNG.integers(-3, 300, count),
            "world_vector": RNG.normal(size=(count, 3)).astype(np.float32),
            "open_gripper": RNG.integers(0, 2, count),
            "reward": RNG.normal(size=count).astype(np.float32),
            "is_terminal": (np.arange(count) == count - 1) * (number != 1),
        }
        made = {
            "steps/observation/image": [encode_png(torch.from_numpy(i)) for i in one["image"]],
            "steps/observation/joints": one["joints"],
            "steps/observation/gripper": one["gripper"],
            "steps/action/world_vector": one["world_vector"],
            "steps/action/open_gripper": one["open_gripper"],
            "steps/reward": one["reward"],
            "steps/is_terminal": one["is_terminal"],
            "steps/language_instruction": [b"pick it up"] * count,
        }
        file = folder / f"robot-{split}.tfrecord-00000-of-00001"
        file.write_bytes((file.read_bytes() if file.exists() else b"") + record(made))
        episodes.append(one)
    return episodes


def test_rlds_without_tensorflow(tmp_path: Path) -> None:
    folder = tmp_path / "robot" / "1.0.0"
    episodes = write_rlds(folder)
    made = convert("rlds", folder, tmp_path / "out", 0.2, images="png")
    assert made == Converted(3, masks={"train": 2, "val": 1})
    ours = read_episodes(tmp_path / "out")
    names = ("open_gripper", "world_vector_0", "world_vector_1", "world_vector_2")
    assert ours.spec.act == Leaf((4,), names=names) and ours.texts == ("pick it up",) * 3
    for at, one in enumerate(episodes):
        rows = ours.episode(at)
        for name in ("image", "joints", "gripper"):
            np.testing.assert_array_equal(rows[f"obs/{name}"], one[name][:-1])
            np.testing.assert_array_equal(rows[f"next_obs/{name}"], one[name][-1])
        moves = np.concatenate([one["open_gripper"][:, None], one["world_vector"]], 1)
        np.testing.assert_array_equal(rows["action"], moves[:-1].astype(np.float32))
        rewards = [*one["reward"][:-2], one["reward"][-2] + one["reward"][-1]]
        np.testing.assert_array_equal(rows["reward"], rewards)
        assert [bool(rows[key][-1]) for key in ("terminated", "truncated")] == [at != 1, at == 1]
    assert convert("rlds", folder, tmp_path / "val", 0.2, images="png", mask="val").episodes == 1
    file = folder / "robot-val.tfrecord-00000-of-00001"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DatasetError, match=r"00000-of-00001 is cut off; copy it again"):
        convert("rlds", folder, tmp_path / "cut", 0.2, images="png")
    with pytest.raises(DatasetError, match="name the folder of a version"):
        convert("rlds", folder.parent, tmp_path / "cut", 0.2)
