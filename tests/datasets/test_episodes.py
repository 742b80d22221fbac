"""Episodes on disk: exact round trips, LeRobot's layout, and how disks and processes fail."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodied.core.spec import Leaf, Spec, SpecMismatch
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import DatasetError, EpisodeWriter, read_episodes, salvage
from embodied.datasets.lerobot.video import decode_film, encode_film, join_films
from tests.builders import ROOT, python
from tests.datasets.test_foreign_columns import foreign
from tests.tiers import usually

ACT = Leaf((2,), low=-1.0, high=1.0, names=("x", "y"))
STATE = Spec(obs={"state": Leaf((4,))}, act=ACT, dt=0.05, text="lift the cube")
FILMED = Spec(obs={"wrist": Leaf((16, 32, 3), "uint8"), "state": Leaf((4,))}, act=ACT, dt=0.05)
RICH = Spec(
    obs={"wrist": Leaf((16, 32, 3), "uint8"), "state": Leaf((4,), names=("a", "b", "c", "d"))}
    | {"height": Leaf((1,)), "pose": Leaf((2, 3)), "critic/load": Leaf(())}
    | {"count": Leaf((), "int64")},
    act=ACT,
    dt=0.05,
    task=Leaf((3,), low=0.0, high=1.0),
)


def episode(spec: Spec, number: int, steps: int | None = None) -> Tensors:
    """Numbers that depend on `number` only; even ones terminate, odd ones are cut by the clock."""
    generator = torch.Generator().manual_seed(number)
    steps = 3 + number % 4 if steps is None else steps
    rows: Tensors = {}
    for name, leaf in spec.obs.items():
        values = torch.randn(steps + 1, *leaf.shape, generator=generator)
        if leaf.is_image:  # smooth, as H.264 expects of a picture
            shade = torch.rand(steps + 1, 1, 1, 3, generator=generator) * 250
            values = (shade * torch.linspace(0, 1, leaf.shape[1]).view(1, 1, -1, 1)).expand(
                -1, leaf.shape[0], -1, -1
            )
        elif leaf.dtype == "int64":
            values = values * 1000
        values = values.to(getattr(torch, leaf.dtype))
        rows |= {f"obs/{name}": values[:-1], f"next_obs/{name}": values[-1]}
    last = torch.arange(steps) == steps - 1
    rows["action"] = torch.rand(steps, 2, generator=generator) * 2 - 1
    rows["reward"] = torch.rand(steps, generator=generator)
    rows["terminated"], rows["truncated"] = last & (number % 2 == 0), last & (number % 2 == 1)
    rows["success"] = rows["terminated"].clone()
    if spec.task is not None:
        rows["task"] = torch.rand(3, generator=generator)
        rows["noise"] = torch.randn(steps, 4, 2, generator=generator)
        rows["intervention"] = torch.rand(steps, generator=generator) > 0.5
    return rows


def require_equal(ours: Tensors, given: Tensors, filmed: bool = False) -> None:
    assert set(ours) == set(given)
    for key, value in given.items():
        value = value.expand(len(given["action"]), 3) if key == "task" else value
        assert ours[key].dtype == value.dtype and ours[key].shape == value.shape, key
        if filmed and key == "obs/wrist":
            assert (ours[key].float() - value.float()).abs().mean() < 3
        else:
            assert torch.equal(ours[key], value), key


def write(path: Path, spec: Spec, numbers: range, images: str = "mp4") -> None:
    with EpisodeWriter(path, spec, images=images) as writer:  # pyright: ignore[reportArgumentType]
        for number in numbers:
            text = f"do {number % 3}" if spec.task else None
            writer.add(episode(spec, number), text, {"seed": number})


def started(path: Path, count: int) -> EpisodeWriter:
    """A session that has added episodes of STATE, and goes on."""
    writer = EpisodeWriter(path, STATE)
    for number in range(count):
        writer.add(episode(STATE, number))
    return writer


def require_numbers(path: Path, spec: Spec, count: int, filmed: bool = False) -> None:
    """The dataset is exactly episodes 0 to count - 1."""
    found = read_episodes(path)
    assert len(found) == count
    for number in range(count):
        require_equal(found.episode(number), episode(spec, number), filmed)


def info_of(path: Path) -> dict:
    return json.loads((path / "meta" / "info.json").read_text())


@pytest.mark.parametrize("images", ["mp4", "png"])
def test_what_is_written_is_read(tmp_path: Path, images: str) -> None:
    with EpisodeWriter(tmp_path, RICH, images=images) as writer:  # pyright: ignore
        for number in range(3):
            added = writer.add(episode(RICH, number), f"do {number % 3}", {"seed": number})
            assert added == number
        require_numbers(tmp_path, RICH, 3, images == "mp4")  # before anything was moved
    write(tmp_path, RICH, range(3, 6), images)  # and again, appended
    require_numbers(tmp_path, RICH, 6, images == "mp4")
    found = read_episodes(tmp_path)
    assert found.spec == RICH and found.spec.to_json() == RICH.to_json()
    assert found.texts == ("do 0", "do 1", "do 2") * 2
    assert [one["seed"] for one in found.info] == list(range(6))
    assert found.length.tolist() == [3, 4, 5, 6, 3, 4]
    assert found.start.tolist() == [0, 3, 7, 12, 18, 21]
    assert len(read_episodes(tmp_path, limit=4)) == 4


def test_the_layout_is_lerobots(tmp_path: Path) -> None:
    write(tmp_path, RICH, range(3))
    write(tmp_path, RICH, range(3, 5))
    info = info_of(tmp_path)
    assert info["codebase_version"] == "v3.0" and info["fps"] == 20
    lengths = [3, 4, 5, 6, 3]
    assert info["total_episodes"] == 5 and info["total_frames"] == sum(lengths)
    assert info["total_tasks"] == 3 and info["splits"] == {"train": "0:5"}
    camera = "observation.images.wrist"
    assert info["features"][camera]["dtype"] == "video"
    state = {"dtype": "float32", "shape": [4], "names": ["a", "b", "c", "d"]}
    assert info["features"]["observation.state"] == state
    assert next(iter(info["features"])) == "observation.state"
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    ends = {"data": "parquet", "meta/episodes": "parquet", f"videos/{camera}": "mp4"}
    twice = {f"{k}/chunk-000/file-00{i}.{end}" for k, end in ends.items() for i in range(2)}
    assert files == twice | {"meta/info.json", "meta/stats.json", "meta/tasks.parquet"}
    tasks = pandas.read_parquet(tmp_path / "meta/tasks.parquet")
    assert tasks.loc["do 2"].task_index == 2 and tasks.iloc[1].name == "do 1"
    data = pa.concat_tables(
        pq.read_table(tmp_path / f"data/chunk-000/file-00{i}.parquet") for i in range(2)
    )
    stored = [name for name, feature in info["features"].items() if feature["dtype"] != "video"]
    assert sorted(data.column_names) == sorted(stored)
    assert data["index"].to_pylist() == list(range(sum(lengths)))
    assert data["episode_index"].to_pylist() == np.repeat(range(5), lengths).tolist()
    assert data["frame_index"].to_pylist() == [t for n in lengths for t in range(n)]
    assert data["task_index"].to_pylist() == np.repeat([0, 1, 2, 0, 1], lengths).tolist()
    assert data["timestamp"].to_pylist()[:3] == pytest.approx([0, 0.05, 0.1])
    assert data["next.done"].to_pylist()[:4] == [False, False, True, False]
    assert data["observation.height"].type == pa.float32()  # one number is no list
    assert data["observation.pose"].type == pa.list_(pa.float32(), 6)
    line = pq.read_table(tmp_path / "meta/episodes/chunk-000/file-001.parquet").to_pylist()[1]
    for what in ("data", f"videos/{camera}", "meta/episodes"):
        assert (line[f"{what}/chunk_index"], line[f"{what}/file_index"]) == (0, 1)
    assert (line["episode_index"], line["tasks"], line["length"]) == (4, ["do 1"], 3)
    assert (line["dataset_from_index"], line["dataset_to_index"]) == (18, 21)
    assert line[f"videos/{camera}/from_timestamp"] == pytest.approx(0.3)
    assert line[f"videos/{camera}/to_timestamp"] == pytest.approx(0.45)


def test_statistics_are_those_of_all_steps(tmp_path: Path) -> None:
    write(tmp_path, RICH, range(2))
    write(tmp_path, RICH, range(2, 5))
    stats = json.loads((tmp_path / "meta" / "stats.json").read_text())
    state = read_episodes(tmp_path).steps["obs/state"].double()
    ours = stats["observation.state"]
    found = {"mean": state.mean(0), "std": state.std(0, correction=0)}
    for name, value in (found | {"min": state.amin(0), "max": state.amax(0)}).items():
        assert ours[name] == pytest.approx(value.tolist(), abs=1e-9)
    assert ours["count"] == [21]
    assert all(a <= b for a, b in zip(ours["q01"], ours["q99"], strict=True))
    assert np.shape(stats["observation.images.wrist"]["mean"]) == (3, 1, 1)
    assert 0 < stats["observation.images.wrist"]["mean"][0][0][0] < 1


def test_what_lerobot_recorded_is_read(tmp_path: Path) -> None:
    """Without our key, channels first, one column in native units and no flag of truncation."""
    write(tmp_path, RICH, range(3), "png")
    shape = {"shape": [3, 16, 32], "names": ["channels", "height", "width"]}

    def theirs(features: dict[str, Any]) -> None:
        del features["next.truncated"]
        features["observation.images.wrist"].update(shape)

    foreign(tmp_path, theirs)
    found = read_episodes(tmp_path)
    given = episode(RICH, 2)
    rows = found.episode(2)
    for key in ("obs/state", "obs/wrist", "action", "reward", "success"):
        assert torch.equal(rows[key], given[key]), key
    assert torch.equal(rows["next_obs/state"], given["obs/state"][-1])  # the last one stands in
    assert found.steps["terminated"].nonzero().flatten().tolist() == [2, 6, 11]
    assert found.spec.dt == pytest.approx(0.05) and found.texts == ("do 0", "do 1", "do 2")
    with pytest.raises(DatasetError, match="recorded by LeRobot"):
        EpisodeWriter(tmp_path, RICH)


@pytest.mark.parametrize(
    ("file", "missing"),
    [(lambda e: e, ()), (lambda e: e // 4, (0, 7, 21)), (lambda e: e % 3, (5,))],
    ids=["40 files", "missing episodes", "episodes in turns"],
)
def test_rows_are_those_of_their_episode_in_whatever_file(
    tmp_path: Path, file: Callable[[int], int], missing: tuple[int, ...]
) -> None:
    """`file` says where each of 40 episodes is; of the `missing` ones only their rows are left."""
    write(tmp_path, STATE, range(40))
    (whole,) = (tmp_path / "data").rglob("*.parquet")
    (lines,) = (tmp_path / "meta" / "episodes").rglob("*.parquet")
    data, index, info = pq.read_table(whole), pq.read_table(lines), info_of(tmp_path)
    owner = np.array([file(e) for e in data["episode_index"].to_pylist()])
    for number in set(owner.tolist()):
        part = data.take(np.flatnonzero(owner == number))
        pq.write_table(part, whole.with_name(f"file-{number:03d}.parquet"))
    kept = [e for e in range(40) if e not in missing]
    index = index.take(kept)
    at = index.column_names.index("data/file_index")
    index = index.set_column(at, "data/file_index", pa.array([file(e) for e in kept], pa.int64()))
    pq.write_table(index, lines)
    info |= {"total_episodes": len(kept), "total_frames": int(sum(index["length"].to_pylist()))}
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
    found = read_episodes(tmp_path)
    assert len(found) == len(kept)
    for place, number in enumerate(kept):
        require_equal(found.episode(place), episode(STATE, number))


def test_films_are_joined_frame_by_frame(tmp_path: Path) -> None:
    for fps in (20.0, 12.5):
        parts = [episode(RICH, number, steps=5)["obs/wrist"] for number in range(3)]
        film = tmp_path / "film.mp4"
        film.write_bytes(join_films([encode_film(part, fps) for part in parts]))
        pictures = torch.stack(list(decode_film(film)))
        assert pictures.shape == (15, 16, 32, 3)
        each = (pictures.float() - torch.cat(parts).float()).abs().flatten(1).mean(1)
        assert each.max() < 4  # a picture in the wrong place differs by tens


CHILD = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from embodied.datasets.lerobot.video import encode_film, encode_png
from tests.datasets.test_episodes import FILMED, EpisodeWriter, episode
picture = episode(FILMED, 0)["obs/wrist"]
encode_film(picture, 20.0), encode_png(picture[0])  # imported once, not in every child
root, limit = Path(sys.argv[1]), int(sys.argv[2])
real = os.fsync
for moment in range(limit):
    child = os.fork()
    if child == 0:
        passed = 0
        def fsync(handle):
            global passed
            real(handle)
            if passed == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 1
        os.fsync = fsync
        with EpisodeWriter(root / str(moment), FILMED) as writer:
            for number in range(2, 4):
                writer.add(episode(FILMED, number), f"do {number}")
                (root / f"{moment}.kept").write_text(str(len(writer)))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        break
(root / "moments").write_text(str(moment))
"""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of fsyncs take long on a busy disk."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


@pytest.mark.parametrize(("before", "limit"), usually([(0, 8)], [(0, 8), (2, 40)]))
def test_killed_between_any_two_writes(memory: Path, before: int, limit: int) -> None:
    """kill -9 after every single fsync of a session, the moving of files included: nothing that
    `add` returned for is lost, the folder reads, and the next session goes on from it."""
    if before:
        write(memory / "0", FILMED, range(before))
        for moment in range(1, limit):
            shutil.copytree(memory / "0", memory / str(moment))
    done = python("-c", CHILD, memory, limit)
    assert done.returncode == 0, done.stderr
    moments = int((memory / "moments").read_text())
    assert moments == 7 if limit == 8 else 20 < moments < 39  # the last one ran to its end
    for moment in range(moments + 1):
        path, kept = memory / str(moment), memory / f"{moment}.kept"
        least = int(kept.read_text()) if kept.exists() else before
        if least == 0 and not list(path.glob("pending/*.parquet")):
            with pytest.raises(DatasetError, match="holds no"):
                read_episodes(path)
            found = 0
        else:
            episodes = read_episodes(path)
            found = len(episodes)
            for i in range(found):
                number = i if before else i + 2
                require_equal(episodes.episode(i), episode(FILMED, number), filmed=True)
        assert least <= found <= least + 1, moment
        with EpisodeWriter(path, FILMED) as writer:
            assert len(writer) == found
            writer.add(episode(FILMED, 9))
        whole = read_episodes(path)
        require_equal(whole.episode(found), episode(FILMED, 9), filmed=True)
        assert info_of(path)["total_episodes"] == found + 1 == len(whole)
        index = pq.read_table(path / "meta/episodes")
        files = sorted(p.name for p in path.glob("data/*/*"))
        assert files == [
            f"file-{i:03d}.parquet" for i in sorted({*index["data/file_index"].to_pylist()})
        ]
        assert not (path / "pending").exists() and not list(path.rglob("*.partial"))


ENDLESS = """
import sys
from pathlib import Path
from tests.datasets.test_episodes import STATE, EpisodeWriter, episode
with EpisodeWriter(Path(sys.argv[1]), STATE) as writer:
    for number in range(10**6):
        writer.add(episode(STATE, number))
        print(len(writer), flush=True)
"""


def test_killed_from_outside(tmp_path: Path) -> None:
    words = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(20):
        child.stdout.readline()
    with pytest.raises(DatasetError, match="another process"):
        EpisodeWriter(tmp_path, STATE)
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    said = [int(line) for line in child.stdout if line.strip().isdigit()]
    child.wait()
    count = len(read_episodes(tmp_path))
    assert count - max(said, default=20) in (0, 1)
    require_numbers(tmp_path, STATE, count)
    EpisodeWriter(tmp_path, STATE).close()  # moves them, and the lock is free
    assert info_of(tmp_path)["total_episodes"] == count


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    writer = started(tmp_path, 3)
    safe = r"could not write to .* its 3 finished episodes are safe"
    with pytest.raises(DatasetError, match=safe), files_at_most(30_000), writer:
        writer.add(episode(STATE, 3, steps=2000))
    require_numbers(tmp_path, STATE, 3)
    assert not list(tmp_path.rglob("*.partial"))
    with EpisodeWriter(tmp_path, STATE) as writer:
        writer.add(episode(STATE, 3))
    require_numbers(tmp_path, STATE, 4)


def test_a_disk_that_fills_while_files_are_moved(tmp_path: Path) -> None:
    writer = started(tmp_path, 40)
    safe = "its 40 finished episodes are safe"
    with pytest.raises(DatasetError, match=safe) as error, files_at_most(40_000):
        writer.close()
    assert "\n" not in str(error.value)
    require_numbers(tmp_path, STATE, 40)
    EpisodeWriter(tmp_path, STATE).close()
    require_numbers(tmp_path, STATE, 40)
    assert not (tmp_path / "pending").exists()


def flip(file: Path) -> None:
    """One bit among the numbers of the largest column, of the last episode in a file."""
    about = pq.ParquetFile(file).metadata
    group = about.row_group(about.num_row_groups - 1)
    columns = [group.column(i) for i in range(group.num_columns)]
    column = max(columns, key=lambda each: each.total_compressed_size)
    begin = column.dictionary_page_offset or column.data_page_offset
    content = bytearray(file.read_bytes())
    content[begin + column.total_compressed_size - 3] ^= 1
    file.write_bytes(content)


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def shorten(data: Path) -> None:
    pq.write_table(pq.read_table(data).slice(0, 4), data)


def miscount(info: Path) -> None:
    text = info.read_text()
    assert '"total_frames": 18' in text
    info.write_text(text.replace('"total_frames": 18', '"total_frames": 99'))


DATA = "data/chunk-000/file-001.parquet"
FILM = "videos/observation.images.wrist/chunk-000/file-001.mp4"
INDEX = "meta/episodes/chunk-000/file-001.parquet"
# What is broken and how; what the message names where that is not the file; what can be saved.
DAMAGE: dict[str, tuple[str, Callable[[Path], None], str, int]] = {
    "data missing": (DATA, Path.unlink, DATA, 2),
    "data cut": (DATA, halve, DATA, 2),
    "data flipped": (DATA, flip, DATA, 3),
    "steps missing": (DATA, shorten, DATA, 2),
    "film missing": (FILM, Path.unlink, FILM, 2),
    "film cut": (FILM, halve, FILM, 2),
    "index missing": (INDEX, Path.unlink, "meta/episodes", 2),
    "index cut": (INDEX, halve, INDEX, 2),
    "index flipped": (INDEX, flip, INDEX, 2),
    "info cut": ("meta/info.json", halve, "info.json", 0),
    "totals": ("meta/info.json", miscount, "info.json", 4),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_names_the_file_and_the_way_out(tmp_path: Path, what: str) -> None:
    path, (file, break_, named, kept) = tmp_path / "set", DAMAGE[what]
    write(path, RICH, range(2))
    write(path, RICH, range(2, 4))
    break_(path / file)
    with pytest.raises(DatasetError) as error:
        read_episodes(path)
    assert named in str(error.value) and "\n" not in str(error.value)
    assert ("salvage" in str(error.value)) == (kept > 0)
    if kept:
        assert salvage(path, tmp_path / "saved") == kept
        saved = read_episodes(tmp_path / "saved")
        assert saved.spec == RICH and [one["seed"] for one in saved.info] == list(range(kept))


def test_a_damaged_pending_episode_is_named(tmp_path: Path) -> None:
    started(tmp_path / "set", 3)
    file = tmp_path / "set/pending/episode-000001.parquet"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DatasetError, match="episode-000001"):
        read_episodes(tmp_path / "set")
    assert salvage(tmp_path / "set", tmp_path / "saved") == 2
    require_equal(read_episodes(tmp_path / "saved").episode(1), episode(STATE, 2))


def test_no_dataset_and_old_versions(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="holds no dataset"):
        read_episodes(tmp_path)
    EpisodeWriter(tmp_path / "empty", STATE).close()
    with pytest.raises(DatasetError, match="holds no"):
        read_episodes(tmp_path / "empty")
    write(tmp_path / "old", STATE, range(1))
    info = info_of(tmp_path / "old") | {"codebase_version": "v2.1"}
    (tmp_path / "old/meta/info.json").write_text(json.dumps(info))
    with pytest.raises(DatasetError, match=r"version v2\.1, v3\.0 is needed"):
        read_episodes(tmp_path / "old")


def test_another_spec_is_refused(tmp_path: Path) -> None:
    write(tmp_path, STATE, range(1))
    with pytest.raises(SpecMismatch, match="obs/state"):
        EpisodeWriter(tmp_path, Spec(obs={"state": Leaf((5,))}, act=ACT, dt=0.05))
    write(tmp_path, STATE, range(1, 2))  # the refusal left no lock behind
    require_numbers(tmp_path, STATE, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs/state": torch.zeros(3, 5)}, r"obs/state is \[3, 5\], expected \[3, 4\]"),
        ({"reward": torch.tensor([0.0, float("nan"), 0.0])}, "reward is not finite"),
        ({"terminated": torch.tensor([True, False, False])}, "ends at its last step"),
        ({"truncated": torch.tensor([False, False, True])}, "not both"),
        ({"truncated": torch.tensor([0.0, 0.0, 0.5])}, "truncated has numbers that bool cannot"),
        ({"extra": torch.zeros(3)}, "extra differ"),
        ({"action": torch.zeros(0, 2)}, "at least one step"),
    ],
)
def test_a_wrong_episode_is_refused(tmp_path: Path, change: Tensors, message: str) -> None:
    with EpisodeWriter(tmp_path, STATE) as writer:
        writer.add(episode(STATE, 0))
        with pytest.raises(DatasetError, match=message):
            writer.add({**episode(STATE, 0), **change})
        with pytest.raises(DatasetError, match="has no next_obs/state"):
            writer.add({k: v for k, v in episode(STATE, 0).items() if k != "next_obs/state"})
    require_numbers(tmp_path, STATE, 1)


def test_an_episode_that_merely_stops_was_cut_and_ctrl_c_keeps_it(tmp_path: Path) -> None:
    """True successors may stand in place of the final observation."""
    rows = episode(STATE, 0)
    rows["terminated"] = torch.zeros(3, dtype=torch.bool)
    rows["next_obs/state"] = torch.cat([rows["obs/state"][1:], rows["next_obs/state"][None]])
    with pytest.raises(KeyboardInterrupt), EpisodeWriter(tmp_path, STATE) as writer:
        writer.add(rows)
        raise KeyboardInterrupt
    found = read_episodes(tmp_path)
    assert found.steps["truncated"].tolist() == [False, False, True]
    assert torch.equal(found.final["state"][0], rows["next_obs/state"][-1])
    assert found.texts == ("lift the cube",) and info_of(tmp_path)["total_episodes"] == 1


def test_a_camera_that_cannot_be_filmed_says_what_to_do(tmp_path: Path) -> None:
    odd = Spec(obs={"eye": Leaf((7, 7, 3), "uint8")}, act=ACT, dt=0.05)
    with pytest.raises(DatasetError, match='images="png"'):
        write(tmp_path, odd, range(1))
    write(tmp_path, odd, range(1), "png")
    require_numbers(tmp_path, odd, 1)
