"""Merge, drop, split, check, mirror, and failed attempts as episodes: new folders only, every kept
step and picture as it was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodied.core.spec import POINTS, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.editing import rewritten
from embodied.datasets.editing.check import CheckConfig
from embodied.datasets.editing.edit import Split, checked, drop, failed, merge, numbered, split
from embodied.datasets.editing.rewritten import Table, attempts, mirror, mirrored, read_table
from embodied.datasets.lerobot.reader import Episodes, EpisodeWriter, read_episodes
from embodied.datasets.lerobot.schema import DatasetError
from embodied.embodiments import fr3
from embodied.envs.fr3.base import ROBOT_NAMES
from embodied.envs.fr3.tasks import TASKS
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
    drop(source, tmp_path / "succeeded", failed)
    assert read_episodes(tmp_path / "succeeded").length.tolist() == [11, 17]
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


def test_merge_is_one_after_the_other(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", LENGTHS[:2]), record(tmp_path / "b", LENGTHS[1:], "pull")
    merge([a, b, a], tmp_path / "all")
    one, other, all_ = (read_episodes(tmp_path / n) for n in ("a", "b", "all"))
    wanted = [(one, 0), (one, 1), (other, 0), (other, 1), (other, 2), (one, 0), (one, 1)]
    assert len(all_) == len(wanted)
    for i, (part, j) in enumerate(wanted):
        require_same_episode(part, j, all_, i)
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


SLOW = """
import sys, time, embodied.datasets.editing.edit as edit
write = edit.write_dataset
def slow(*args):
    write(*args)
    print("written", flush=True)
    time.sleep(600)
edit.write_dataset = slow
edit.drop(*sys.argv[1:], edit.numbered("0"))
"""


def test_a_killed_edit_leaves_no_dataset_and_can_be_repeated(source: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", SLOW, str(source), str(tmp_path / "kept")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
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


def unfit(rows: list[list[float]]) -> list[list[float]]:
    rows[3][0] = float("nan")
    rows[11 + 5][1] = 1.5
    return rows


def late(times: list[float]) -> list[float]:
    """A constant shift is no gap. The last steps have no picture at their time any more."""
    return [t + (i > 11 + 8) for i, t in enumerate(times)]


def stuck(rows: list[list[float]]) -> list[list[float]]:
    for row in rows[11 + 6 : 11 + 22]:
        row[1] = rows[11 + 6][1]
    return rows


@pytest.mark.parametrize(
    ("column", "change", "found", "settings", "left"),
    [
        ("action", list, [], {}, 0),
        ("action", unfit, [(0, 3, "action[a.pos] is not finite"),
                           (1, 5, "action[b.pos] 1.5 outside limits")], {"action": (-2.0, 2.0)}, 1),
        ("timestamp", late, [(1, 9, "timestamp: 1.100 s after the step before"),
                             (3, None, "observation.images.front: it has no picture at 8.200 s, "
                              "it ends before")], {"pictures": False}, 1),
        ("observation.state", stuck, [(1, 6, "observation.state[b.pos] is stuck")],
         {"still": 2.0}, 0),
    ],
)  # fmt: skip
def test_wrong_numbers_gaps_and_stuck_joints_are_found(
    column: str, change: object, found: list[Any], settings: dict[str, Any], left: int, source: Path
) -> None:
    """And with other `settings` so many are `left`."""
    rewrite(source / DATA, column, change)
    assert findings(source) == found
    assert len(findings(source, CheckConfig(**settings))) == left


def test_missing_steps_are_found(source: Path) -> None:
    table = pq.read_table(source / DATA)
    keep = [i for i in range(len(table)) if i != 20]
    pq.write_table(table.take(keep), source / DATA)
    assert findings(source) == [
        (1, None, "chunk-000/file-000.parquet: it has 29 steps of episode 1, not 30")
    ]


def test_dark_and_frozen_pictures_are_found(tmp_path: Path) -> None:
    good, frozen, dark = episode(20, 0), episode(30, 1), episode(20, 2)
    frozen["obs/front"][12:26] = frozen["obs/front"][12].clone()
    dark["obs/front"][7:] = 2
    with EpisodeWriter(tmp_path / "demos", SPEC, "sim") as writer:
        for rows in (good, frozen, dark):
            writer.add(rows)
    found = findings(tmp_path / "demos")
    assert (1, 12, "observation.images.front is frozen while the robot moves") in found
    assert (2, 7, "observation.images.front is dark") in found
    assert {episode for episode, _, _ in found} == {1, 2}
    assert findings(tmp_path / "demos", CheckConfig(pictures=False)) == []


def test_missing_and_short_films_and_damaged_data_are_found(source: Path, tmp_path: Path) -> None:
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
    (source / DATA).write_bytes((source / DATA).read_bytes()[:500])
    assert [episode for episode, _, what in findings(source) if ".parquet" in what] == [0, 1, 2, 3]


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


ROBOTS = Path("embodied/embodiments")
SO101 = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
NAMES = [
    *(("fr3", (*ROBOT_NAMES, *TASKS[name].names)) for name in ("insert", "lift", "push", "slalom")),
    ("so101", tuple(f"{side}_{joint}.pos" for side in ("left", "right") for joint in SO101)),
]
ARMS = Spec(
    {
        "state": Leaf((4,), names=("left_x", "left_y", "right_x", "right_y")),
        "left_wrist": Leaf((4, 6, 3), "uint8"),
        "right_wrist": Leaf((4, 6, 3), "uint8"),
        "seen": Leaf((5, 3), unit=POINTS),
    },
    Leaf((2,), low=-1.0, high=1.0, names=("dx", "dy")),
    dt=0.1,
    text="put the left cube upright",
)
TABLE = Table(keep=("*_x", "dx"), negate=("*_y",), about={"dy": 0.1})


@pytest.mark.parametrize(("robot", "names"), NAMES)
def test_every_table_is_an_involution(robot: str, names: tuple[str, ...]) -> None:
    table = read_table(ROBOTS / f"{robot}_mirror.yaml")
    order, sign, shift = table.reflection(names, "state")
    there = torch.randn(3, len(names), dtype=torch.float64)
    once = there[:, order] * sign + shift
    assert not torch.allclose(once, there)
    torch.testing.assert_close(once[:, order] * sign + shift, there)


def test_the_mirrored_fr3_holds_its_hand_where_the_mirror_does() -> None:
    """Place and turn of the tool, and their change with the joint velocities, by kinematics."""
    order, sign, shift = read_table(ROBOTS / "fr3_mirror.yaml").reflection(ROBOT_NAMES, "state")
    q = np.random.default_rng(0).uniform(fr3.LOWER, fr3.UPPER, (20, 7))
    other = q[:, order[:7]] * sign[:7].numpy() + shift[:7].numpy()
    flip = np.diag([1.0, -1.0, 1.0])
    place, turn, jacobian = fr3.forward(q)
    place_there, turn_there, jacobian_there = fr3.forward(other)
    np.testing.assert_allclose(place_there, place @ flip, atol=1e-6)
    np.testing.assert_allclose(turn_there, flip @ turn @ flip, atol=1e-6)
    moved = flip @ jacobian[:, :3] * sign[7:14].numpy()
    np.testing.assert_allclose(jacobian_there[:, :3], moved, atol=1e-6)
    assert sign[14:21].tolist() == [1, -1, 1, 1, -1, 1, 1], "tool, lead, width"


def two_arms(seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    obs = {"state": torch.randn(4, 4), "seen": torch.randn(4, 5, 3)}
    for side in ("left", "right"):
        obs[f"{side}_wrist"] = torch.randint(256, (4, 4, 6, 3)).to(torch.uint8)
    return recorded(obs, 0.5 * torch.randn(3, 2))


def test_sides_signs_pictures_and_points_by_hand() -> None:
    episode = two_arms()
    made = mirrored(episode, ARMS, TABLE)
    state = episode["obs/state"]
    expected = torch.stack([state[:, 2], -state[:, 3], state[:, 0], -state[:, 1]], 1)
    torch.testing.assert_close(made["obs/state"], expected)
    action = episode["action"]
    torch.testing.assert_close(made["action"], torch.stack([action[:, 0], 0.2 - action[:, 1]], 1))
    assert torch.equal(made["obs/left_wrist"], episode["obs/right_wrist"].flip(2))
    assert torch.equal(made["next_obs/right_wrist"], episode["next_obs/left_wrist"].flip(1))
    signs = torch.tensor([1.0, -1.0, 1.0])
    assert torch.equal(made["next_obs/seen"], episode["next_obs/seen"] * signs)
    assert torch.equal(made["reward"], episode["reward"])
    said = rewritten.other_side("Left arm, right_wrist, upright")
    assert said == "Right arm, left_wrist, upright"


def test_a_dataset_mirrored_twice_is_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = Spec({"state": ARMS.obs["state"]}, ARMS.act, 0.1, text=ARMS.text)
    with EpisodeWriter(tmp_path / "one", spec) as writer:
        for seed in range(2):
            human = torch.tensor([False, True, True])
            writer.add({**two_arms(seed), "intervened": human}, info={"number": seed})
    (tmp_path / "table.yaml").write_text("keep: ['*_x', dx]\nnegate: ['*_y', dy]\n")
    given = ("demos", "mirror")
    table = f"table={tmp_path / 'table.yaml'}"
    assert exit_of(*given, tmp_path / "one", table, f"out={tmp_path / 'two'}") == 0
    table = read_table(tmp_path / "table.yaml")
    assert mirror(tmp_path / "two", tmp_path / "three", table).episodes == 2
    one, two, three = (read_episodes(tmp_path / name) for name in ("one", "two", "three"))
    assert not torch.equal(one.steps["obs/state"], two.steps["obs/state"])
    assert two.texts == ("put the right cube upright",) * 2 and three.texts == one.texts
    assert two.info == one.info
    assert one.spec == two.spec == three.spec
    for key, value in one.steps.items():
        assert torch.equal(value, three.steps[key]), key
    assert torch.equal(one.final["state"], three.final["state"])
    assert exit_of(*given, tmp_path / "one", f"out={tmp_path / 'x'}") == 2
    assert "say whose reflection" in capsys.readouterr().err


def test_what_has_no_reflection_is_named(tmp_path: Path) -> None:
    cases = [
        (Table(keep=("left_*",)), "state: the table says 0 things of right_x"),
        (Table(keep=("*",), negate=("*_y",)), "says 2 things of left_y"),
        (Table(keep=("*_x", "left_y"), negate=("right_y",)), "not the same for left and right"),
    ]
    for table, line in cases:
        with pytest.raises(DatasetError, match=line):
            table.reflection(ARMS.obs["state"].names, "state")
    with pytest.raises(DatasetError, match="has no right_y"):
        TABLE.reflection(("left_y", "dx"), "state")
    unnamed = Spec({"state": Leaf((4,))}, ARMS.act, 0.1)
    with pytest.raises(DatasetError, match="state has no reflection"):
        mirrored(two_arms(), unnamed, TABLE)
    with pytest.raises(DatasetError, match="task vector"):
        mirrored({**two_arms(), "task": torch.zeros(2)}, ARMS, TABLE)


def test_failed_attempts_end_where_a_person_takes_over_or_tries_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = torch.arange(7.0)[:, None]
    human = torch.tensor([False, False, True, True, False, True])
    more = {"intervened": human, "success": torch.tensor([False] * 5 + [True])}
    episode = recorded({"state": state}, -state[:6], **more)
    episode["reward"][-1] = 1.0
    episode["terminated"] = torch.tensor([False] * 5 + [True])
    assert attempts(episode) == [2, 5]
    marked = torch.tensor([True, False, False, True, False, False])
    assert attempts({**episode, "retry": marked}) == [2, 3, 5]
    made = rewritten.failed_attempt({**episode, "reward": torch.ones(6)}, 2)
    assert made["obs/state"].flatten().tolist() == [0, 1] and made["next_obs/state"].item() == 2
    assert made["reward"].tolist() == [0, 0] and made["terminated"].tolist() == [False, True]
    spec = Spec({"state": Leaf((1,))}, Leaf((1,), low=-9.0, high=9.0), dt=0.1)
    with EpisodeWriter(tmp_path / "one", spec) as writer:
        writer.add(episode)
    assert exit_of("demos", "retries", tmp_path / "one", f"out={tmp_path / 'two'}") == 0
    found = read_episodes(tmp_path / "two")
    assert found.length.tolist() == [2, 5] and not found.steps["success"].any()
    assert found.steps["terminated"].sum() == 2 and not found.steps["reward"].any()
    again = exit_of("demos", "retries", tmp_path / "two", f"out={tmp_path / 'three'}")
    assert again == 0, "the second attempt holds the first"
    with EpisodeWriter(tmp_path / "plain", spec) as writer:
        writer.add({**episode, "intervened": human & False})
    assert exit_of("demos", "retries", tmp_path / "plain", f"out={tmp_path / 'none'}") == 2
    assert "no new attempt is marked" in capsys.readouterr().err
