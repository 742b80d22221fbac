"""Merge, drop, split and check: new folders only, every kept step and picture as it was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.editing.check import CheckConfig
from embodied.datasets.editing.edit import Split, checked, drop, failed, merge, numbered, split
from embodied.datasets.lerobot.reader import Episodes, EpisodeWriter, read_episodes
from embodied.datasets.lerobot.schema import DatasetError
from tests.builders import exit_of, recorded

pytest.importorskip("av")

H, W, FPS = 32, 48, 10
JOINTS = ("a.pos", "b.pos")
SPEC = Spec(
    obs={"state": Leaf((2,), names=JOINTS), "front": Leaf((H, W, 3), "uint8", 0, 255)},
    act=Leaf((2,), low=-1.0, high=1.0, names=JOINTS),
    dt=1 / FPS,
    text="push",
)
LENGTHS = (11, 30, 17, 24)


def episode(length: int, seed: int) -> Tensors:
    """Joints that follow their commands, a block that moves, a success where the seed is even."""
    time_ = torch.arange(length + 1) / FPS
    state = torch.stack([torch.sin(2 * time_ + seed), torch.cos(3 * time_)], 1)
    front = torch.full((length + 1, H, W, 3), 60 + 10 * seed % 100, dtype=torch.uint8)
    for t in range(length + 1):
        at = (3 * t + seed) % (W - 8)
        front[t, 8:24, at : at + 8] = 240
    success = torch.zeros(length, dtype=torch.bool)
    success[-1] = seed % 2 == 0
    obs, action = {"state": state, "front": front}, state[1:].clamp(-1, 1)
    return recorded(obs, action, reward=success.float(), success=success)


def record(folder: Path, lengths: tuple[int, ...] = LENGTHS, text: str = "push") -> Path:
    with EpisodeWriter(folder, SPEC, "sim") as writer:
        for number, length in enumerate(lengths):
            writer.add(episode(length, number), text, {"seed": number})
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "demos")


@pytest.fixture
def source(whole: Path, tmp_path: Path) -> Path:
    """A dataset of one's own, as `record` makes it."""
    return Path(shutil.copytree(whole, tmp_path / "demos"))


def fingerprint(folder: Path) -> dict[str, str]:
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return {str(f.relative_to(folder)): hashlib.md5(f.read_bytes()).hexdigest() for f in files}


def require_same_episode(one: Episodes, i: int, other: Episodes, j: int) -> None:
    here, there = one.episode(i), other.episode(j)
    assert here.keys() == there.keys()
    for key, value in here.items():
        assert torch.equal(value, there[key]), key
    assert one.texts[i] == other.texts[j] and one.info[i] == other.info[j]


def test_drop_keeps_the_others_as_they_were(source: Path, tmp_path: Path) -> None:
    before = fingerprint(source)
    drop(source, tmp_path / "kept", numbered("0,2"))
    whole, kept = read_episodes(source), read_episodes(tmp_path / "kept")
    assert len(kept) == 2 and kept.length.tolist() == [30, 24]
    require_same_episode(whole, 1, kept, 0)
    require_same_episode(whole, 3, kept, 1)
    assert fingerprint(source) == before
    film = "videos/observation.images.front/chunk-000/file-000.mp4"
    assert (tmp_path / "kept" / film).stat().st_size < (source / film).stat().st_size
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


def test_the_new_dataset_counts_and_summarises_its_own(source: Path, tmp_path: Path) -> None:
    drop(source, tmp_path / "kept", numbered("1-3"))
    alone = record(tmp_path / "alone", LENGTHS[:1])
    mine, theirs = (
        json.loads((p / "meta/stats.json").read_text()) for p in (tmp_path / "kept", alone)
    )
    assert mine.keys() == theirs.keys()
    assert np.allclose(mine["action"]["mean"], theirs["action"]["mean"])
    info = json.loads((tmp_path / "kept/meta/info.json").read_text())
    assert (info["total_episodes"], info["total_frames"]) == (1, 11)
    assert info["splits"] == {"train": "0:1"}
    rows = pq.read_table(tmp_path / "kept/data/chunk-000/file-000.parquet")
    assert rows["index"].to_pylist() == list(range(11))


def test_failed_episodes_are_dropped(source: Path, tmp_path: Path) -> None:
    drop(source, tmp_path / "kept", failed)
    assert read_episodes(tmp_path / "kept").length.tolist() == [11, 17]


def test_merge_is_one_after_the_other(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", LENGTHS[:2]), record(tmp_path / "b", LENGTHS[1:], "pull")
    merge([a, b, a], tmp_path / "all")
    one, other, all_ = (read_episodes(tmp_path / n) for n in ("a", "b", "all"))
    assert len(all_) == 7
    for i in range(2):
        require_same_episode(one, i, all_, i)
        require_same_episode(one, i, all_, 5 + i)
    for i in range(3):
        require_same_episode(other, i, all_, 2 + i)
    tasks = pq.read_table(tmp_path / "all/meta/tasks.parquet")
    assert tasks["task"].to_pylist() == ["push", "pull"]


def test_what_does_not_fit_is_named_in_one_line(tmp_path: Path) -> None:
    a = record(tmp_path / "a", LENGTHS[:1])
    other = Spec(obs={"state": Leaf((2,))}, act=Leaf((2,), low=-1.0, high=1.0), dt=0.05)
    with EpisodeWriter(tmp_path / "b", other) as writer:
        rows = {k: v for k, v in episode(5, 0).items() if not k.endswith("front")}
        writer.add(rows)
    with pytest.raises(DatasetError, match=r"fps 10 \| 20.*images\.front is in one") as error:
        merge([a, tmp_path / "b"], tmp_path / "all")
    assert "\n" not in str(error.value) and not (tmp_path / "all").exists()


def test_split_by_share_and_by_count(source: Path, tmp_path: Path) -> None:
    whole = read_episodes(source)
    for how, sizes in ((Split(share=0.75), (3, 1)), (Split(episodes=1, seed=None), (1, 3))):
        out, rest = tmp_path / f"out{sizes[0]}", tmp_path / f"rest{sizes[0]}"
        split(source, out, rest, how)
        parts = read_episodes(out), read_episodes(rest)
        assert tuple(map(len, parts)) == sizes
        seeds = [info["seed"] for part in parts for info in part.info]
        assert sorted(seeds) == [0, 1, 2, 3]
        for part in parts:
            for i, info in enumerate(part.info):
                require_same_episode(whole, int(info["seed"]), part, i)
    assert Split(share=0.5, seed=1).first(100) != Split(share=0.5, seed=2).first(100)
    assert Split(share=0.5, seed=1).first(100) == Split(share=0.5, seed=1).first(100)


def test_a_killed_recording_is_finished_in_the_copy_only(tmp_path: Path) -> None:
    source = record(tmp_path / "demos", LENGTHS[:2])
    writer = EpisodeWriter(source, SPEC, "sim")
    writer.add(episode(17, 2), "push", {"seed": 2})
    writer._unlock()  # as a killed process leaves it
    before = fingerprint(source)
    drop(source, tmp_path / "kept", numbered("0"))
    assert read_episodes(tmp_path / "kept").length.tolist() == [30, 17]
    assert fingerprint(source) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [("9", "no episode 9"), ("a", "3,7-9"), ("5-2", "ends before"), ("0-3", "nothing is left")],
)
def test_a_wrong_choice_is_one_line_and_leaves_nothing(
    words: str, said: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=said):
        drop(source, tmp_path / "kept", numbered(words))
    with pytest.raises(DatasetError, match="exists"):
        drop(source, source, numbered("0"))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["demos"]


def test_a_killed_edit_leaves_no_dataset_and_can_be_repeated(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time, embodied.datasets.editing.edit as e\n"
        "real = e.write_dataset\n"
        "def slow(*args):\n    made = real(*args)\n    print('written', flush=True)\n"
        "    time.sleep(60)\n    return made\n"
        "e.write_dataset = slow\n"
        f"e.drop({str(source)!r}, {str(tmp_path / 'kept')!r}, e.numbered('0'))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"written\n"
    with pytest.raises(DatasetError, match="another process"):
        drop(source, tmp_path / "kept", numbered("0"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "kept").exists()
    drop(source, tmp_path / "kept", numbered("0"))
    assert len(read_episodes(tmp_path / "kept")) == 3
    assert sorted(f.name for f in tmp_path.iterdir()) == ["demos", "kept"]


def findings(folder: Path, config: CheckConfig | None = None) -> list[tuple[int, int | None, str]]:
    found, _ = checked(folder, config or CheckConfig())
    return [(one.episode, one.frame, one.what) for one in found]


def rewrite(file: Path, name: str, change: object) -> None:
    """Replace a column of a data file by `change(values)`."""
    table = pq.read_table(file)
    at = table.column_names.index(name)
    values = pa.array(change(table[name].to_pylist()), table.schema.field(name).type)  # type: ignore
    pq.write_table(table.set_column(at, table.schema.field(name), values), file)


DATA = "data/chunk-000/file-000.parquet"
FILM = "videos/observation.images.front/chunk-000/file-000.mp4"


def test_numbers_that_are_wrong_are_found(source: Path) -> None:

    def spoil(rows: list[list[float]]) -> list[list[float]]:
        rows[3][0] = float("nan")
        rows[11 + 5][1] = 1.5
        return rows

    rewrite(source / DATA, "action", spoil)
    assert findings(source) == [
        (0, 3, "action[a.pos] is not finite"),
        (1, 5, "action[b.pos] 1.5 outside limits"),
    ]
    assert len(findings(source, CheckConfig(action=(-2.0, 2.0)))) == 1


def test_gaps_in_time_are_found(source: Path) -> None:
    assert findings(source) == []
    rewrite(source / DATA, "timestamp", lambda a: [t + (i > 11 + 8) for i, t in enumerate(a)])
    # A constant shift is no gap. The last steps have no picture at their time any more.
    assert findings(source) == [
        (1, 9, "timestamp: 1.100 s after the step before"),
        (3, None, "observation.images.front: it has no picture at 8.200 s, it ends before"),
    ]


def test_missing_steps_are_found(source: Path) -> None:
    table = pq.read_table(source / DATA)
    keep = [i for i in range(len(table)) if i != 20]
    pq.write_table(table.take(keep), source / DATA)
    assert findings(source) == [
        (1, None, "chunk-000/file-000.parquet: it has 29 steps of episode 1, not 30")
    ]


def test_stuck_joints_are_found(source: Path) -> None:

    def stick(rows: list[list[float]]) -> list[list[float]]:
        for i in range(11 + 6, 11 + 22):
            rows[i][1] = rows[11 + 6][1]
        return rows

    rewrite(source / DATA, "observation.state", stick)
    assert findings(source) == [(1, 6, "observation.state[b.pos] is stuck")]
    assert findings(source, CheckConfig(still=2.0)) == []


def test_dark_and_frozen_pictures_are_found(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "demos", SPEC, "sim") as writer:
        writer.add(episode(20, 0))
        rows = episode(30, 1)
        rows["obs/front"][12:26] = rows["obs/front"][12].clone()
        writer.add(rows)
        rows = episode(20, 2)
        rows["obs/front"][7:] = 2
        writer.add(rows)
    found = findings(tmp_path / "demos")
    assert (1, 12, "observation.images.front is frozen while the robot moves") in found
    assert (2, 7, "observation.images.front is dark") in found
    assert {episode for episode, _, _ in found} == {1, 2}
    assert findings(tmp_path / "demos", CheckConfig(pictures=False)) == []


def test_missing_and_short_films_are_found(source: Path, tmp_path: Path) -> None:
    short = record(tmp_path / "short", LENGTHS[:2])
    os.replace(short / FILM, source / FILM)
    found = findings(source)
    assert [episode for episode, _, _ in found] == [2, 3]
    assert all("no picture at" in what for _, _, what in found)
    (source / FILM).write_bytes(b"not a film")
    assert {episode for episode, _, _ in findings(source)} == {0, 1, 2, 3}
    (source / FILM).unlink()
    missing = "observation.images.front: chunk-000/file-000.mp4 is missing"
    assert findings(source)[0] == (0, None, missing)


def test_a_damaged_data_file_is_found(source: Path) -> None:
    (source / DATA).write_bytes((source / DATA).read_bytes()[:500])
    found = findings(source)
    assert [episode for episode, _, _ in found] == [0, 1, 2, 3]
    assert all("file-000.parquet" in what for _, _, what in found)


def test_the_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(source / DATA, "next.reward", lambda r: [*r[:-1], float("inf")])
    clean, both, four = (str(tmp_path / name) for name in ("clean", "both", "four"))
    assert exit_of("demos", "check", source, f"fix={clean}") == 1
    said = capsys.readouterr().out
    assert "episode     3  frame     23  next.reward is not finite" in said
    assert "1 of 4 episodes have findings" in said and "clean: 3 episodes" in said
    assert exit_of("demos", "check", clean) == 0
    assert exit_of("demos", "merge", clean, clean, f"out={both}") == 0
    assert exit_of("demos", "drop", both, "episodes=0-1", f"out={four}") == 0
    parts = [f"out={tmp_path / 'x'}", f"rest={tmp_path / 'y'}"]
    assert exit_of("demos", "split", four, "share=0.5", *parts) == 0
    assert len(read_episodes(tmp_path / "x")) == len(read_episodes(tmp_path / "y")) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["drop", "D", "out=x"], "episodes=3,7-9 or failed=true"),
        (["drop", "D", "episodes=1"], "out=DIR"),
        (["drop", "D", "episode=1", "out=x"], "episodes"),
        (["merge", "D", "out=x"], "A B out=DIR"),
        (["split", "D", "share=0.5", "out=x"], "rest=DIR"),
        (["split", "D", "share=half", "out=x", "rest=y"], "should be a number"),
        (["check", "D", "dark=much"], "dark"),
        (["check", "nowhere"], "holds no dataset"),
    ],
)
def test_errors_are_one_line(
    words: list[str], said: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word if word != "D" else str(source) for word in words]
    assert exit_of("demos", *words) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
