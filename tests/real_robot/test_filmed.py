"""Recordings with pictures: real processes, a rendered camera that the policy sees, and a folder of
files that it does not."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import load_policy, save
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes, EpisodeWriter, read_episodes
from embodied.real_robot.cameras.shared_frames import (
    KEPT,
    FrameHistory,
    FrameReader,
    FrameWriter,
    camera_mailbox,
)
from embodied.real_robot.cameras.sources import CameraError, Picture
from embodied.real_robot.daemon.client import call
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.kernel.checks import FreshConfig
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.policy.observer import Observer
from embodied.real_robot.recorder import EpisodeBuilder, recorded_spec
from tests.builders import node_of, rendered
from tests.real_robot.test_daemon import Bridge, bridging, simulated, until
from tests.real_robot.test_decide import GOAL, SPEC, tool
from tests.real_robot.test_deploy import robot, said, start
from tests.real_robot.test_record import FLOW as PLAIN
from tests.real_robot.test_record import recorded, ticks
from tests.tiers import only_all

cv2: Any = pytest.importorskip("cv2", reason="OpenCV is not installed")
FRAME = (4, 6)


def grey(level: int, size: tuple[int, int] = FRAME) -> np.ndarray:
    return np.full((*size, 3), level, np.uint8)


def album(*times: float, age: float = 0.5) -> FrameHistory:
    """Pictures taken at those times, of grey levels 1, 2, ..."""
    made = FrameHistory({}, {"front": FRAME}, ("front",), age)
    for level, t in enumerate(times, 1):
        made.add("front", t, grey(level))
    return made


def test_the_newest_that_is_not_later() -> None:
    made = album(1.0, 1.1, 1.2)
    for measured, level, t in ((0.99, 0, 0.0), (1.0, 1, 1.0), (1.15, 2, 1.1), (9.0, 3, 1.2)):
        row = made.at(measured)
        assert (row["obs/front"] == level).all() and row["stamp/front"] == t
    assert (made.decided({"front": 1.1})["decided/front"] == 2).all()
    nothing = made.decided({"front": 1.05})
    assert nothing["stamp/decided/front"] == 0 and not nothing["decided/front"].any()
    for k in range(KEPT):
        made.add("front", 2.0 + k, grey(7))
    assert made.at(1.9)["stamp/front"] == 0, "long gone"


def scribe(made: FrameHistory) -> EpisodeBuilder:
    spec = recorded_spec(SPEC, {"front": FRAME})
    observer = Observer(spec, 7, tool, GOAL, pictures=("front",))
    return EpisodeBuilder(spec, observer, lambda q: tool(q[None])[0], 0, lambda q, s: False, made)


def test_an_episode_ends_before_a_row_without_a_new_picture() -> None:
    """Steps at 10.01, 10.02, ...; the camera shows nothing after 10.021."""
    writes = scribe(album(10.005, 10.021, age=0.0105))
    runs = {"mode": Mode.RUNNING, "size": 4, "followed": 10.0}
    steps = [{**runs, "step": k, "q": 0.1 * k} for k in range(5)]
    made = ticks({"mode": Mode.ARMED}, *steps, {"mode": Mode.STOPPING, "fault": b"why"})
    writes.add_decision(10.0, np.zeros(0, np.float32), np.array([10.005]))
    said = [writes.add_tick(tick) for tick in made]
    episode = said[-1]
    assert said[:-1] == [None] * 6 and episode is not None
    # Ages of the rows: 5 ms, 15 ms: the second one is stale, and there is no step before the first.
    assert episode.steps == {} and "at step 1; 0 steps before it are kept" in episode.lost
    writes.frames = album(10.005, 10.012, 10.03, age=0.0105)
    said = [writes.add_tick(tick) for tick in made]
    episode = said[-1]
    assert episode is not None and episode.fault == "why" and episode.success is False
    # 5, 8, 0 ms, then 10 and (the end, of the same tick) 20: the fifth row is stale.
    assert "for 0.02 s at step 4; 3 steps before it are kept" in episode.lost
    rows = episode.steps
    assert rows["obs/front"][:, 0, 0, 0].tolist() == [1, 2, 3]
    assert rows["stamp/front"].tolist() == [10.005, 10.012, 10.03]
    assert int(rows["next_obs/front"].max()) == 3, "the end is the last moment that was seen"
    names = SPEC.obs["state"].names
    assert float(rows["next_obs/state"][names.index("q1")]) == pytest.approx(0.3)
    assert (rows["decided/front"] == 1).all() and (rows["stamp/decided/front"] == 10.005).all()


@pytest.mark.parametrize("images", ["png", "mp4"])
def test_what_was_decided_upon_is_read_back(tmp_path: Path, images: Literal["png", "mp4"]) -> None:
    steps = torch.arange(5)
    smooth = (steps[:, None, None, None] * 40 + 10).expand(5, 16, 24, 3).to(torch.uint8)
    rows = {"action": torch.zeros(5, 4), "reward": torch.zeros(5), "decided/front": smooth}
    rows |= {"obs/state": torch.zeros(5, 27), "next_obs/state": torch.zeros(27)}
    rows |= {"terminated": steps == 4, "truncated": steps < 0}
    with EpisodeWriter(tmp_path / "d", SPEC, images=images) as writer:
        writer.add(rows)
        early = read_episodes(tmp_path / "d").steps["decided/front"]
        writer.add(rows)
    late = read_episodes(tmp_path / "d").steps["decided/front"]
    assert late.shape == (10, 16, 24, 3) and late[:5].equal(early)
    apart = (early.int() - smooth.int()).abs().max()
    assert int(apart) == 0 if images == "png" else int(apart) < 6


def test_a_view_sees_what_is_shown(tmp_path: Path) -> None:
    now = 5.0
    told = camera_mailbox(tmp_path, "front", create=True)
    with FrameReader(tmp_path, "front", lambda: now) as view:
        now = 5.2
        with pytest.raises(CameraError, match=r"camera front has shown nothing new for 0.20 s"):
            view.newest(0.1)
        shown = FrameWriter(tmp_path, "front")
        for number in range(1, 101):
            shown.add(Picture(grey(number), 5.0 + number / 1000, number))
        newest = view.newest(0.2)
        assert (newest.number, newest.t, int(newest.frame.min())) == (100, 5.1, 100)
        assert [each.number for each in view.since()] == list(range(38, 101)), "of 64, one is open"
        assert view.since() == [] and view.next(99, 1.0).number == 100
        with pytest.raises(CameraError, match="one size"):
            shown.add(Picture(grey(1, (8, 6)), 5.2, 101))
        shown.fail("it broke")
        with pytest.raises(CameraError, match="it broke"):
            view.newest(9.0)
        told.fields[:] = 0
        told.send()
        again = FrameWriter(tmp_path, "front")
        again.add(Picture(grey(9, (8, 6)), 5.3, 1))
        assert view.newest(1.0).frame.shape == (8, 6, 3)
        assert [each.number for each in view.since()] == [1]
    assert (tmp_path / "frames.front").stat().st_mode & 0o777 == 0o600


SIZE, SMALL = 32, (12, 16)
SEEING = SPEC.with_obs(front=Leaf((SIZE, SIZE, 3), "uint8", 0, 255))
FLOW = {**PLAIN, "images": {"channels": [8, 16], "features": 16}}
FILES = 40


def files(folder: Path) -> dict[str, Any]:
    """A camera of as many pictures, of which the kth is 6 k grey."""
    folder.mkdir()
    for k in range(FILES):
        cv2.imwrite(str(folder / f"{k:03d}.png"), np.full((24, 32, 3), 6 * k, np.uint8))
    return node_of("real_robot.cameras.sources.Folder", path=str(folder), fps=30.0)


def policy(folder: Path, spec: Spec = SEEING) -> str:
    torch.manual_seed(0)
    return str(save(folder / "0", build(FLOW, Policy, spec=spec), 0))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    place = tmp_path_factory.mktemp("filmed")
    return simulated(
        place,
        policy=policy(place / "first"),
        fresh=FreshConfig(hold=2.0, stop=10.0, state=5.0),
        blend=0,
        seconds=60.0,
        records="",
        recording=str(place / "episodes"),
        cameras={"front": rendered("reach", SIZE, 15.0), "side": files(place / "files")},
        filmed={"side": SMALL},
        picture=4.0,  # of a machine that does much else
    )


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory, deployment: Deployment) -> Iterator[Bridge]:
    folder = tmp_path_factory.mktemp("f")
    with bridging(folder, deployment) as made:
        until(lambda: made.status["recorder"]["ready"], "the recorder looks")
        yield made
    assert not [*folder.glob("frames.*"), *folder.glob("camera.*")], "nothing is left in memory"


def in_time(rows: Tensors, names: tuple[str, ...] = ("front", "side")) -> None:
    """Every picture was taken before what was measured with it, none too long before."""
    for name in names:
        old = rows["stamp/measured"] - rows[f"stamp/{name}"]
        assert float(old.min()) >= 0 and float(old.max()) <= 4.0
        assert (rows[f"stamp/{name}"].diff() >= 0).all()


@only_all  # as of an FR3: below
def test_demonstrations_of_a_servo_arm_have_pictures(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever acts sees none; a policy that does is to learn from them."""
    camera = json.dumps(files(tmp_path / "files")).replace('"', "")
    words = ["robot=so101_sim", "demonstrator=reach", "robot.driver.timeout=0.3"]
    words += [f"robot.cameras={{side: {camera}}}", "robot.images=mp4", "robot.picture=4.0"]
    code, text = robot(capsys, "check", *words)
    assert code == 1 and "FAIL cameras" in text and "robot.filmed.side=[96, 96]" in text
    words.append("robot.filmed={side: [12, 16]}")
    code, text = robot(capsys, "check", *words)
    assert code == 0 and "side (12 x 16, filmed)" in text, text
    deploy = start(tmp_path, folder, *words)
    text = said(deploy)
    assert deploy.returncode == 0 and "success" in text, text
    episodes: Episodes = read_episodes(tmp_path / "out" / "recording")
    rows = episodes.steps
    assert bool(rows["success"][-1]) and rows["obs/side"].shape[1:] == (12, 16, 3)
    assert "decided/side" not in rows
    in_time(rows, ("side",))
    assert np.abs(rows["obs/side"].float().mean((1, 2, 3)).diff()).max() > 3, "a film goes on"


def test_what_can_not_be_filmed_is_one_line(deployment: Deployment) -> None:
    with pytest.raises(ConfigError, match=r"filmed: .*no camera sid.*side"):
        replace(deployment, filmed={"sid": SMALL})
    with pytest.raises(ConfigError, match=r"filmed.*=0 should be at least 1, at most 4096"):
        Deployment.parse({**asdict(deployment), "filmed": {"side": (0, 4)}})


def test_rows_have_their_pictures(bridge: Bridge, deployment: Deployment) -> None:
    told = recorded(bridge)
    assert told["episodes"] == 1 and not told["problem"] and told["steps"] > 10
    episodes = read_episodes(deployment.recording)
    rows = episodes.steps
    assert episodes.spec.obs["front"].shape == (SIZE, SIZE, 3)
    assert rows["obs/side"].shape[1:] == (*SMALL, 3) == episodes.final["side"].shape[1:]
    in_time(rows)
    shown, taken = rows["obs/side"].flatten(1).numpy(), rows["stamp/side"].numpy()
    assert (shown == shown[:, :1]).all() and (shown[:, 0] % 6 == 0).all(), "to the last bit"
    steps = np.diff(shown[:, 0] // 6) % FILES
    assert ((steps == 0) == (np.diff(taken) == 0)).all(), "one stamp, one picture"
    assert steps.sum() > 10, "they go on"
    assert len(rows["obs/front"].flatten(1).unique(dim=0)) > 3, "the arm is seen to move"


def test_what_the_policy_saw_is_kept_to_the_last_bit(
    bridge: Bridge, deployment: Deployment
) -> None:
    recorded(bridge)
    rows = read_episodes(deployment.recording).steps
    known = (rows["stamp/decided/front"] > 0) & (rows["noise"].abs().sum(1) > 0)
    assert known.float().mean() > 0.5, "the recorder missed most of it"
    made, seen, apart = load_policy(deployment.policy), rows["decided/front"], []
    noise = rows["noise"].reshape(made.sample_noise(len(seen)).shape)
    for front in (seen, 255 - seen):
        with torch.inference_mode():
            plan, _ = made.act({"state": rows["decided/state"], "front": front}, {}, noise)
        apart.append((plan - rows["action"][:, None]).abs().amax(2).amin(1)[known])
    assert float(apart[0].max()) < 1e-5, "each action is one of the plan's"
    assert float(apart[1].median()) > 1e-3, "with other pictures it is not"
    assert (rows["stamp/decided/front"] <= rows["stamp/sent"]).all()


@only_all
def test_a_killed_recorder_keeps_finished_pictures(bridge: Bridge, deployment: Deployment) -> None:
    recorded(bridge)
    before = read_episodes(deployment.recording)
    running = bridge.running()
    os.kill(running["recorder"]["pid"], signal.SIGKILL)
    until(lambda: "SIGKILL" in bridge.status["recorder"]["died"], "it is noted")
    tick = running["control"]["tick"]
    after = until(
        lambda: s if (s := bridge.status)["control"]["tick"] > tick + 50 else None, "it ticks on"
    )
    assert after["mode"] == "RUNNING" and not after["fault"]
    kept = read_episodes(deployment.recording)
    assert len(kept) == len(before)
    for name in ("obs/front", "obs/side", "decided/front"):
        assert kept.steps[name].equal(before.steps[name])
    bridge.ask(Verb.STOP)
    bridge.mode("IDLE")
    assert bridge.ask(Verb.ESTOP).ok
    bridge.done(Verb.RESET)
    until(lambda: bridge.status["recorder"]["ready"], "another looks")
    assert recorded(bridge)["episodes"] == 1
    in_time(read_episodes(deployment.recording).steps)


@only_all
def test_a_camera_that_nobody_decides_by_costs_its_pictures_only(
    bridge: Bridge, deployment: Deployment
) -> None:
    running = bridge.running()
    os.kill(running["cameras"]["side"]["pid"], signal.SIGKILL)
    status = until(
        lambda: s if (s := bridge.status)["cameras"]["side"]["died"] else None, "it is noted"
    )
    assert "camera-side" in status["cameras"]["side"]["died"]
    tick = status["control"]["tick"]
    until(lambda: bridge.status["control"]["tick"] > tick + 600, "longer than a picture lasts")
    status = bridge.status
    assert status["mode"] == "RUNNING" and not status["fault"] and status["cameras"]["front"]["pid"]
    ended, count = status["recorder"]["ended"], len(read_episodes(deployment.recording))
    bridge.ask(Verb.STOP)
    bridge.mode("IDLE")
    told = until(lambda: s if (s := bridge.status["recorder"])["ended"] > ended else None, "seen")
    assert "camera side had shown nothing new for" in told["problem"]
    episodes = read_episodes(deployment.recording)
    assert len(episodes) == count + 1, "until then it is kept"
    assert episodes.info[-1]["cut"] == told["problem"]
    in_time(episodes.steps)
    again = recorded(bridge)
    assert "camera side" in again["problem"] and again["steps"] == 0
    assert len(read_episodes(deployment.recording)) == count + 1
    assert bridge.ask(Verb.ESTOP).ok
    bridge.done(Verb.RESET)
    until(lambda: bridge.status["cameras"]["side"]["pid"], "it is started again")
    until(lambda: not recorded(bridge)["problem"], "and its pictures come again")


def test_another_policy_takes_over_the_same_cameras(
    bridge: Bridge, deployment: Deployment, tmp_path: Path
) -> None:
    """One device can be opened once: newcomer and predecessor look at what the cameras show."""
    before = bridge.running()
    larger = SPEC.with_obs(front=Leaf((40, 40, 3), "uint8", 0, 255))
    loaded = call(bridge.folder, Verb.LOAD, 120.0, policy(tmp_path, larger))
    assert loaded.ok, loaded.reason
    after = bridge.status
    assert after["mode"] == "RUNNING" and after["policy"]["pid"] != before["policy"]["pid"]
    assert after["cameras"] == before["cameras"]
    number = after["policy"]["number"]
    until(lambda: bridge.status["policy"]["number"] > number + 5, "it decides")
    ended = bridge.status["recorder"]["ended"]
    assert bridge.ask(Verb.STOP).ok
    bridge.mode("IDLE")
    until(lambda: bridge.status["recorder"]["ended"] > ended, "the first one is dealt with")
    assert not recorded(bridge)["problem"]
    place = Path(deployment.recording)
    episodes = read_episodes(place.with_name(f"{place.name}-2"))
    assert episodes.spec.obs["front"].shape == (40, 40, 3)
