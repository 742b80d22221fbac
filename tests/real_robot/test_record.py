"""What the recorder makes of an arm's ticks, and that nothing which befalls it touches the arm."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.checkpoint import load_policy
from embodied.datasets.lerobot.reader import read_episodes
from embodied.embodiments import fr3
from embodied.real_robot.assemble import build_chain, open_channels, open_flight_recorder
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import Role
from embodied.real_robot.ipc.messages import DISCARD, RECORDED
from embodied.real_robot.kernel.checks import FreshConfig
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import VERSION, Mode, state_record
from embodied.real_robot.policy.decider import observe_state
from embodied.real_robot.policy.observer import Observer
from embodied.real_robot.recorder import EpisodeBuilder, Recorder, recorded_spec
from tests.real_robot.test_daemon import Bridge, bridging, simulated, until
from tests.real_robot.test_decide import GOAL, SPEC, tool

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


def recording(
    noise: int, success: Callable[..., bool | None] = lambda q, s: None
) -> EpisodeBuilder:
    """An episode builder whose policy draws `noise` numbers."""
    observer = Observer(SPEC, 7, tool, GOAL)
    return EpisodeBuilder(recorded_spec(SPEC), observer, lambda q: tool(q[None])[0], noise, success)


def test_rows_are_the_followers_steps() -> None:
    """Two ticks a step: what is seen is of the first, what came of it is of the last."""
    scribe = recording(3, lambda q, sensed: bool(q[0] > 0.1))
    observer = scribe.observer
    act = np.zeros(32)
    act[:4] = [1.0, -1.0, 0.5, 0.0]
    runs = {"mode": Mode.RUNNING, "size": 4, "action": act, "followed": 10.0}
    away = fr3.HOME + 0.2
    led = fr3.HOME + 0.1
    made = ticks(
        {"mode": Mode.ARMED},
        {**runs, "step": 0, "counts": [0, 1], "reference": led},
        {**runs, "step": 0, "proposed": 1.0, "filtered": 0.5, "sent": 0.25, "counts": [0, 3]},
        {**runs, "step": 1, "starved": 1},  # nothing to follow: no row
        {**runs, "step": 2},
        {**runs, "step": 2, "q": away},
        {"mode": Mode.STOPPING, "fault": b"why"},
    )
    scribe.add_decision(10.0, np.array([1.0, 2.0, 3.0], np.float32))
    said = [scribe.add_tick(tick) for tick in made]
    assert said[:-1] == [None] * 6
    episode = said[-1]
    assert episode is not None and episode.fault == "why" and episode.success is True
    rows = episode.steps
    assert rows["action"].tolist() == [[1.0, -1.0, 0.5, 0.0]] * 2
    for name, value in (("proposed", 1.0), ("filtered", 0.5), ("sent", 0.25)):
        assert rows[f"action/{name}"][0].tolist() == [value] * 7
    assert rows["stamp/measured"].tolist() == pytest.approx([10.01, 10.04])
    assert rows["stamp/decided"].tolist() == [10.0, 10.0]
    assert rows["interventions"].tolist() == [[0, 2], [0, 0]]
    assert rows["noise"].tolist() == [[1.0, 2.0, 3.0]] * 2
    assert rows["success"].tolist() == [False, True] and rows["reward"].tolist() == [0.0, 1.0]
    assert rows["terminated"].tolist() == [False, True]
    for row, tick in ((0, 0), (1, 4)):  # what an action does is seen after it
        seen = observe_state(observer, made[tick], lambda q: tool(q[None])[0])["state"]
        assert rows["obs/state"][row].numpy() == pytest.approx(seen)
    last = observe_state(observer, made[5], lambda q: tool(q[None])[0])["state"]
    assert rows["next_obs/state"].numpy() == pytest.approx(last)


def test_an_episode_that_is_cut_off_is_kept_as_far_as_it_went() -> None:
    """A row whose decision was made upon a tick that was not seen has no noise."""
    scribe = recording(2)
    runs = {"mode": Mode.RUNNING, "size": 4}
    steps = [{**runs, "step": 0, "followed": 9.5}, {**runs, "step": 1, "followed": 10.0}]
    for seen in (9.5, 10.0):
        scribe.add_decision(seen, np.ones(2, np.float32))
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
    return simulated(
        place,
        FLOW,
        fresh=FreshConfig(hold=1.0, stop=5.0, state=2.0),
        blend=0,
        seconds=60.0,
        records="",
        recording=str(place / "episodes"),
    )


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory, deployment: Deployment) -> Iterator[Bridge]:
    with bridging(tmp_path_factory.mktemp("r"), deployment) as made:
        until(lambda: made.status["recorder"]["ready"], "the recorder looks")
        yield made


def test_a_first_decision_takes_longer_than_a_look(deployment: Deployment, tmp_path: Path) -> None:
    """The recorder learns what policy there is from its first chunk, ticks after what it is of."""
    deployment.write(tmp_path)
    stages = len(build_chain(deployment).names)
    ring = open_flight_recorder(deployment, tmp_path, create=True)
    boxes = open_channels(deployment, tmp_path, Role.ALL, create=True)
    tell = Mailbox(tmp_path / "recorded", RECORDED, VERSION, create=True)
    discard = Mailbox(tmp_path / "discard", DISCARD, VERSION, create=True)
    heard = open_channels(deployment, tmp_path).chunk
    recorder = Recorder(tmp_path, ring, heard, tell, discard)
    runs = {"mode": Mode.RUNNING, "size": 4, "followed": 10.0}
    armed = {"mode": Mode.ARMED}
    steps = [{**armed, "q": fr3.HOME + 0.2}, armed, {**runs, "step": 0}, {**runs, "step": 1}]
    made = ticks(*steps, stages=stages)
    for k in range(len(made)):
        ring.add(made[k : k + 1])
        if k == 2:
            chunk = boxes.chunk.fields[0]
            chunk["number"], chunk["seen"], chunk["noise_size"] = 1, 10.0, 2
            boxes.chunk.send()
        recorder.update()
    assert recorder.builder is not None and len(recorder.builder.steps) == 1
    row = recorder.builder.steps[0]
    saw = observe_state(recorder.builder.observer, made[0], lambda q: tool(q[None])[0])["state"]
    assert row["decided/state"] == pytest.approx(saw, abs=1e-6)


def recorded(bridge: Bridge, steps: int = 20) -> dict[str, Any]:
    """One more episode of about so many steps; what the recorder says."""
    before = bridge.status["recorder"]["ended"]
    first = bridge.running()["policy"]["number"]
    until(lambda: bridge.status["policy"]["number"] > first + steps, "the policy decides")
    assert bridge.ask(Verb.STOP).ok
    bridge.mode("IDLE")
    return until(
        lambda: s if (s := bridge.status["recorder"])["ended"] > before else None,
        "the recorder has seen it",
    )


def test_an_episode_can_be_replayed_at_a_desk(bridge: Bridge, deployment: Deployment) -> None:
    said = recorded(bridge)
    assert said["episodes"] == 1 and not said["problem"] and said["steps"] > 10
    episodes = read_episodes(deployment.recording)
    assert episodes.info[0]["policy"] == deployment.policy
    assert episodes.info[0]["stages"][-1] == "limits"
    rows = episodes.steps
    policy = load_policy(deployment.policy)
    noise = rows["noise"]
    heard = noise.abs().sum(1) > 0
    assert heard.float().mean() > 0.5, "the recorder missed most of what was drawn"
    shape = policy.sample_noise(len(noise)).shape
    plan, _ = policy.act({"state": rows["decided/state"]}, {}, noise.reshape(shape))
    apart = (plan.detach() - rows["action"][:, None]).abs().amax(2).amin(1)
    assert float(apart[heard].max()) < 1e-5, "each action is one of the plan's, bit by bit nearly"
    assert (rows["stamp/decided"] <= rows["stamp/measured"]).all()
    sent = rows["action/sent"].numpy()
    assert (np.abs(np.diff(sent, axis=0)).max(0) > 0).any(), "it moved"


def test_a_full_disk_costs_an_episode_and_nothing_else(
    bridge: Bridge, deployment: Deployment
) -> None:
    recorded(bridge)
    count = len(read_episodes(deployment.recording))
    pid = bridge.status["recorder"]["pid"]
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, hard))  # nothing larger can be written
    try:
        said = recorded(bridge)
        assert "could not write" in said["problem"]
        status = bridge.status
        assert status["mode"] == "IDLE" and not status["fault"] and status["recorder"]["pid"] == pid
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert len(read_episodes(deployment.recording)) == count
    assert not recorded(bridge)["problem"], "with room again, it goes on"
    assert len(read_episodes(deployment.recording)) == count + 1
