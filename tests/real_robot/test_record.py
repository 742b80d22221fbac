"""What the recorder makes of ticks and of pictures; nothing that befalls it touches the arm."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import load_policy, save
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes
from embodied.embodiments import fr3
from embodied.real_robot.assemble import build_chain, open_channels, open_flight_recorder
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
from embodied.real_robot.ipc.channels import DISCARD, RECORDED, Role
from embodied.real_robot.kernel.checks import FreshConfig
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import VERSION, Mode, state_record
from embodied.real_robot.policy.decider import observe_state
from embodied.real_robot.policy.observer import Observer
from embodied.real_robot.recorder import Episode, EpisodeBuilder, Recorder, recorded_spec
from tests.builders import node_of, rendered
from tests.builders import recorded as episode_of
from tests.real_robot.test_daemon import Bridge, bridging, simulated, until
from tests.real_robot.test_decide import GOAL, SPEC, tool
from tests.real_robot.test_deploy import robot
from tests.tiers import only_all

FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 4, "steps": 2, "width": 32}


def ticks(*rows: dict[str, Any], stages: int = 2) -> np.ndarray:
    """States with those fields set; the rest are zeros of an FR3 at home."""
    made = np.zeros(len(rows), state_record(7, stages))
    made["q"] = made["sent"] = made["reference"] = fr3.HOME
    for k, row in enumerate(rows):
        made["now"][k] = made["measured"][k] = 10.0 + 0.01 * k
        for name, value in row.items():
            made[name][k] = value
    return made


def place(q: np.ndarray) -> np.ndarray:
    return tool(q[None])[0]


def recording(
    noise: int,
    success: Callable[..., bool | None] = lambda q, s: None,
    *pictures: FrameHistory,
) -> EpisodeBuilder:
    """An episode builder whose policy draws `noise` numbers and maybe sees `pictures`."""
    cameras = {"front": FRAME} if pictures else {}
    spec = recorded_spec(SPEC, cameras)
    observer = Observer(spec, 7, tool, GOAL, pictures=tuple(cameras))
    return EpisodeBuilder(spec, observer, place, noise, success, *pictures)


def seen(builder: EpisodeBuilder, tick: np.ndarray) -> np.ndarray:
    """The state that a policy sees of `tick`."""
    return observe_state(builder.observer, tick, place)["state"]


def test_rows_are_the_followers_steps() -> None:
    """Two ticks a step: what is seen is of the first, what came of it is of the last."""
    scribe = recording(3, lambda q, sensed: bool(q[0] > 0.1))
    act = np.zeros(32)
    act[:4] = [1.0, -1.0, 0.5, 0.0]
    runs = {"mode": Mode.RUNNING, "size": 4, "action": act, "followed": 10.0}
    made = ticks(
        {"mode": Mode.ARMED},
        {**runs, "step": 0, "counts": [0, 1], "reference": fr3.HOME + 0.1},
        {**runs, "step": 0, "proposed": 1.0, "filtered": 0.5, "sent": 0.25, "counts": [0, 3]},
        {**runs, "step": 1, "starved": 1},  # nothing to follow: no row
        {**runs, "step": 2},
        {**runs, "step": 2, "q": fr3.HOME + 0.2},
        {"mode": Mode.STOPPING, "fault": b"why"},
    )
    scribe.add_decision(10.0, np.array([1.0, 2.0, 3.0], np.float32))
    said = [scribe.add_tick(tick) for tick in made]
    assert said[:-1] == [None] * 6
    episode = said[-1]
    assert episode is not None and episode.fault == "why" and episode.success is True
    rows = episode.steps
    wanted = {
        "action": [[1.0, -1.0, 0.5, 0.0]] * 2,
        "stamp/decided": [10.0, 10.0],
        "interventions": [[0, 2], [0, 0]],
        "noise": [[1.0, 2.0, 3.0]] * 2,
        "success": [False, True],
        "reward": [0.0, 1.0],
        "terminated": [False, True],
    }
    assert {name: rows[name].tolist() for name in wanted} == wanted
    for name, value in (("proposed", 1.0), ("filtered", 0.5), ("sent", 0.25)):
        assert rows[f"action/{name}"][0].tolist() == [value] * 7
    assert rows["stamp/measured"].tolist() == pytest.approx([10.01, 10.04])
    # What an action does is seen after it: of ticks 0 and 4, and at the end of tick 5.
    saw = [seen(scribe, made[tick]) for tick in (0, 4, 5)]
    assert rows["obs/state"].numpy() == pytest.approx(np.stack(saw[:2]))
    assert rows["next_obs/state"].numpy() == pytest.approx(saw[2])


def test_an_episode_that_is_cut_off_is_kept_as_far_as_it_went() -> None:
    """A row whose decision was made upon a tick that was not seen has no noise."""
    scribe = recording(2)
    runs = {"mode": Mode.RUNNING, "size": 4}
    steps = [{**runs, "step": 0, "followed": 9.5}, {**runs, "step": 1, "followed": 10.0}]
    for t in (9.5, 10.0):
        scribe.add_decision(t, np.ones(2, np.float32))
    for tick in ticks({"mode": Mode.ARMED}, *steps):
        assert scribe.add_tick(tick) is None
    episode = scribe.finish()
    assert episode is not None and len(episode.steps["action"]) == 2
    assert episode.steps["noise"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert "success" not in episode.steps and episode.success is None
    assert not episode.steps["terminated"].any(), "nobody knows how it would have ended"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    place = tmp_path_factory.mktemp("recorded")
    torch.manual_seed(0)
    fresh = FreshConfig(hold=1.0, stop=5.0, state=2.0)
    settings: dict[str, Any] = {"fresh": fresh, "blend": 0, "seconds": 60.0, "records": ""}
    return simulated(place, FLOW, recording=str(place / "episodes"), **settings)


def test_a_first_decision_takes_longer_than_a_look(deployment: Deployment, tmp_path: Path) -> None:
    """The recorder learns what policy there is from its first chunk, ticks after what it is of."""
    deployment.write(tmp_path)
    ring = open_flight_recorder(deployment, tmp_path, create=True)
    boxes = open_channels(deployment, tmp_path, Role.ALL, create=True)
    tell = Mailbox(tmp_path / "recorded", RECORDED, VERSION, create=True)
    discard = Mailbox(tmp_path / "discard", DISCARD, VERSION, create=True)
    heard = open_channels(deployment, tmp_path).chunk
    recorder = Recorder(tmp_path, ring, heard, tell, discard)
    runs = {"mode": Mode.RUNNING, "size": 4, "followed": 10.0}
    armed = {"mode": Mode.ARMED}
    steps = [{**armed, "q": fr3.HOME + 0.2}, armed, {**runs, "step": 0}, {**runs, "step": 1}]
    made = ticks(*steps, stages=len(build_chain(deployment).names))
    for k in range(len(made)):
        ring.add(made[k : k + 1])
        if k == 2:
            chunk = boxes.chunk.fields[0]
            chunk["number"], chunk["seen"], chunk["noise_size"] = 1, 10.0, 2
            boxes.chunk.send()
        recorder.update()
    assert recorder.builder is not None and len(recorder.builder.steps) == 1
    row = recorder.builder.steps[0]
    assert row["decided/state"] == pytest.approx(seen(recorder.builder, made[0]), abs=1e-6)


def recorded(bridge: Bridge, steps: int = 20) -> dict[str, Any]:
    """One more episode of about so many steps; what the recorder says."""
    before = bridge.status["recorder"]["ended"]
    first = bridge.running()["policy"]["number"]
    until(lambda: bridge.status["policy"]["number"] > first + steps, "the policy decides")
    assert bridge.ask(Verb.STOP).ok
    return ended(bridge, before)


def ended(bridge: Bridge, before: int) -> dict[str, Any]:
    """What the recorder says once it has seen more than `before` episodes end."""
    bridge.mode("IDLE")
    return until(
        lambda: s if (s := bridge.status["recorder"])["ended"] > before else None,
        "the recorder has seen it",
    )


def reset(bridge: Bridge) -> None:
    """An operator's stop and reset, which starts again what has died."""
    assert bridge.ask(Verb.ESTOP).ok
    bridge.done(Verb.RESET)


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


def test_an_episode_ends_before_a_row_without_a_new_picture() -> None:
    """Steps at 10.01, 10.02, ...; a picture may be 10.5 ms old."""
    runs = {"mode": Mode.RUNNING, "size": 4, "followed": 10.0}
    steps = [{**runs, "step": k, "q": 0.1 * k} for k in range(5)]
    made = ticks({"mode": Mode.ARMED}, *steps, {"mode": Mode.STOPPING, "fault": b"why"})

    def filmed(*times: float) -> Episode:
        builder = recording(0, lambda q, s: False, album(*times, age=0.0105))
        builder.add_decision(10.0, np.zeros(0, np.float32), np.array([10.005]))
        said = [builder.add_tick(tick) for tick in made]
        assert said[:-1] == [None] * 6 and said[-1] is not None
        return said[-1]

    # Ages of the rows: 5 ms, 15 ms: the second one is stale, and there is no step before the first.
    episode = filmed(10.005, 10.021)
    assert episode.steps == {} and "at step 1; 0 steps before it are kept" in episode.lost
    # 5, 8, 0 ms, then 10 and (the end, of the same tick) 20: the fifth row is stale.
    episode = filmed(10.005, 10.012, 10.03)
    assert episode.fault == "why" and episode.success is False
    assert "for 0.02 s at step 4; 3 steps before it are kept" in episode.lost
    rows = episode.steps
    assert rows["obs/front"][:, 0, 0, 0].tolist() == [1, 2, 3]
    assert rows["stamp/front"].tolist() == [10.005, 10.012, 10.03]
    assert int(rows["next_obs/front"].max()) == 3, "the end is the last moment that was seen"
    names = SPEC.obs["state"].names
    assert float(rows["next_obs/state"][names.index("q1")]) == pytest.approx(0.3)
    assert (rows["decided/front"] == 1).all() and (rows["stamp/decided/front"] == 10.005).all()


def test_a_film_of_what_was_decided_upon_is_read_back(tmp_path: Path) -> None:
    steps = torch.arange(5)
    smooth = (steps[:, None, None, None] * 40 + 10).expand(5, 16, 24, 3).to(torch.uint8)
    obs = {"state": torch.zeros(6, 27)}
    rows = episode_of(obs, torch.zeros(5, 4), **{"decided/front": smooth})
    with EpisodeWriter(tmp_path / "d", SPEC, images="mp4") as writer:
        writer.add(rows)
        early = read_episodes(tmp_path / "d").steps["decided/front"]
        writer.add(rows)
    late = read_episodes(tmp_path / "d").steps["decided/front"]
    assert late.shape == (10, 16, 24, 3) and late[:5].equal(early)
    assert int((early.int() - smooth.int()).abs().max()) < 6


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
CHUNKS = {**FLOW, "images": {"channels": [8, 16], "features": 16}}
FILES = 40


def files(folder: Path) -> dict[str, Any]:
    """A camera of as many pictures, of which the kth is 6 k grey."""
    folder.mkdir()
    for k in range(FILES):
        cv2.imwrite(str(folder / f"{k:03d}.png"), np.full((24, 32, 3), 6 * k, np.uint8))
    return node_of("real_robot.cameras.sources.Folder", path=str(folder), fps=30.0)


def policy(folder: Path, spec: Spec = SEEING) -> str:
    torch.manual_seed(0)
    return str(save(folder / "0", build(CHUNKS, Policy, spec=spec), 0))


@pytest.fixture(scope="module")
def filmed(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    place = tmp_path_factory.mktemp("filmed")
    settings: dict[str, Any] = {"blend": 0, "seconds": 60.0, "records": ""}
    return simulated(
        place,
        policy=policy(place / "first"),
        fresh=FreshConfig(hold=2.0, stop=10.0, state=5.0),
        recording=str(place / "episodes"),
        cameras={"front": rendered("reach", SIZE, 15.0), "side": files(place / "files")},
        filmed={"side": SMALL},
        picture=4.0,  # of a machine that does much else
        **settings,
    )


@pytest.fixture(scope="module")
def filming(tmp_path_factory: pytest.TempPathFactory, filmed: Deployment) -> Iterator[Bridge]:
    folder = tmp_path_factory.mktemp("f")
    with bridging(folder, filmed) as made:
        until(lambda: made.status["recorder"]["ready"], "the recorder looks")
        yield made
    assert not [*folder.glob("frames.*"), *folder.glob("camera.*")], "nothing is left in memory"


def in_time(rows: Tensors, names: tuple[str, ...] = ("front", "side")) -> None:
    """Every picture was taken before what was measured with it, none too long before."""
    for name in names:
        old = rows["stamp/measured"] - rows[f"stamp/{name}"]
        assert float(old.min()) >= 0 and float(old.max()) <= 4.0
        assert (rows[f"stamp/{name}"].diff() >= 0).all()


@only_all  # demonstrations with pictures: test_teleoperate.py
def test_a_camera_that_no_size_is_known_of_is_named_by_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    camera = json.dumps(files(tmp_path / "files")).replace('"', "")
    words = ["robot=so101_sim", "demonstrator=reach", f"robot.cameras={{side: {camera}}}"]
    code, text = robot(capsys, "check", *words)
    assert code == 1 and "FAIL cameras" in text and "robot.filmed.side=[96, 96]" in text
    code, text = robot(capsys, "check", *words, "robot.filmed={side: [12, 16]}")
    assert code == 0 and "side (12 x 16, filmed)" in text, text


def test_what_can_not_be_filmed_is_one_line(filmed: Deployment) -> None:
    with pytest.raises(ConfigError, match=r"filmed: .*no camera sid.*side"):
        replace(filmed, filmed={"sid": SMALL})


def test_rows_have_their_pictures(filming: Bridge, filmed: Deployment) -> None:
    told = recorded(filming)
    assert not told["problem"] and told["steps"] > 10
    episodes = read_episodes(filmed.recording)
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


def test_an_episode_can_be_replayed_at_a_desk(filming: Bridge, filmed: Deployment) -> None:
    """What the policy saw is kept to the last bit, pictures and random numbers, too."""
    recorded(filming)
    episodes = read_episodes(filmed.recording)
    assert episodes.info[0]["policy"] == filmed.policy
    assert episodes.info[0]["stages"][-1] == "limits"
    rows = episodes.steps
    known = (rows["stamp/decided/front"] > 0) & (rows["noise"].abs().sum(1) > 0)
    assert known.float().mean() > 0.5, "the recorder missed most of it"
    made, seen, apart = load_policy(filmed.policy), rows["decided/front"], []
    noise = rows["noise"].reshape(made.sample_noise(len(seen)).shape)
    for front in (seen, 255 - seen):
        with torch.inference_mode():
            plan, _ = made.act({"state": rows["decided/state"], "front": front}, {}, noise)
        apart.append((plan - rows["action"][:, None]).abs().amax(2).amin(1)[known])
    assert float(apart[0].max()) < 1e-5, "each action is one of the plan's"
    assert float(apart[1].median()) > 1e-3, "with other pictures it is not"
    assert (rows["stamp/decided/front"] <= rows["stamp/sent"]).all()
    assert (rows["stamp/decided"] <= rows["stamp/measured"]).all()
    assert (rows["action/sent"].diff(dim=0).abs().amax(0) > 0).any(), "it moved"


def test_a_full_disk_costs_an_episode_and_nothing_else(filming: Bridge, filmed: Deployment) -> None:
    recorded(filming)
    count = len(read_episodes(filmed.recording))
    pid = filming.status["recorder"]["pid"]
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, hard))  # nothing larger can be written
    try:
        assert "could not write" in recorded(filming)["problem"]
        status = filming.status
        assert status["mode"] == "IDLE" and not status["fault"] and status["recorder"]["pid"] == pid
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert len(read_episodes(filmed.recording)) == count
    assert not recorded(filming)["problem"], "with room again, it goes on"
    assert len(read_episodes(filmed.recording)) == count + 1


@only_all
def test_a_killed_recorder_keeps_finished_pictures(filming: Bridge, filmed: Deployment) -> None:
    recorded(filming)
    before = read_episodes(filmed.recording)
    running = filming.running()
    os.kill(running["recorder"]["pid"], signal.SIGKILL)
    until(lambda: "SIGKILL" in filming.status["recorder"]["died"], "it is noted")
    tick = running["control"]["tick"]
    until(lambda: filming.status["control"]["tick"] > tick + 50, "it ticks on")
    after = filming.status
    assert after["mode"] == "RUNNING" and not after["fault"]
    kept = read_episodes(filmed.recording)
    assert len(kept) == len(before)
    for name in ("obs/front", "obs/side", "decided/front"):
        assert kept.steps[name].equal(before.steps[name])
    filming.ask(Verb.STOP)
    filming.mode("IDLE")
    reset(filming)
    until(lambda: filming.status["recorder"]["ready"], "another looks")
    assert recorded(filming)["episodes"] == 1
    in_time(read_episodes(filmed.recording).steps)


@only_all
def test_a_camera_that_nobody_decides_by_costs_its_pictures_only(
    filming: Bridge, filmed: Deployment
) -> None:
    running = filming.running()
    os.kill(running["cameras"]["side"]["pid"], signal.SIGKILL)
    until(lambda: "camera-side" in filming.status["cameras"]["side"]["died"], "it is noted")
    tick = filming.status["control"]["tick"]
    until(lambda: filming.status["control"]["tick"] > tick + 600, "longer than a picture lasts")
    status = filming.status
    assert status["mode"] == "RUNNING" and not status["fault"] and status["cameras"]["front"]["pid"]
    count = len(read_episodes(filmed.recording))
    filming.ask(Verb.STOP)
    told = ended(filming, status["recorder"]["ended"])
    assert "camera side had shown nothing new for" in told["problem"]
    episodes = read_episodes(filmed.recording)
    assert len(episodes) == count + 1, "until then it is kept"
    assert episodes.info[-1]["cut"] == told["problem"]
    in_time(episodes.steps)
    again = recorded(filming)
    assert "camera side" in again["problem"] and again["steps"] == 0
    assert len(read_episodes(filmed.recording)) == count + 1
    reset(filming)
    until(lambda: filming.status["cameras"]["side"]["pid"], "it is started again")
    until(lambda: not recorded(filming)["problem"], "and its pictures come again")


def test_another_policy_takes_over_the_same_cameras(
    filming: Bridge, filmed: Deployment, tmp_path: Path
) -> None:
    """One device can be opened once: newcomer and predecessor look at what the cameras show."""
    before = filming.running()
    larger = SPEC.with_obs(front=Leaf((40, 40, 3), "uint8", 0, 255))
    loaded = call(filming.folder, Verb.LOAD, 120.0, policy(tmp_path, larger))
    assert loaded.ok, loaded.reason
    after = filming.status
    assert after["mode"] == "RUNNING" and after["policy"]["pid"] != before["policy"]["pid"]
    assert after["cameras"] == before["cameras"]
    number = after["policy"]["number"]
    until(lambda: filming.status["policy"]["number"] > number + 5, "it decides")
    count = filming.status["recorder"]["ended"]
    assert filming.ask(Verb.STOP).ok
    ended(filming, count)
    assert not recorded(filming)["problem"]
    place = Path(filmed.recording)
    episodes = read_episodes(place.with_name(f"{place.name}-2"))
    assert episodes.spec.obs["front"].shape == (40, 40, 3)
