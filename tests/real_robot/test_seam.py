"""A slow policy moves an arm that goes on meanwhile: how its chunks join, guided and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.core import build as core_build
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, allow, build
from embodied.core.checkpoint import save
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.policies.remote.address import PACKAGE, remote_policy
from embodied.policies.wrappers.real_time_chunking import RealTimeChunking
from embodied.real_robot.control.chunk_follower import ChunkCheck, ChunkFollower
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.drivers.replay import Config as ReplayConfig
from embodied.real_robot.drivers.replay import Replay
from embodied.real_robot.ipc.channels import CHUNK, MOST_STEPS
from embodied.real_robot.ipc.ring_buffer import write_records
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.messages import Command, Mode, state_record
from embodied.real_robot.policy.decider import Decider, RtcAlignment
from embodied.real_robot.policy.observer import with_real_time_chunking
from embodied.serve.policy_service import PolicyService
from embodied.serve.server import Server
from tests.builders import make_policy, node_of
from tests.policies.remote.servers import Process, free_port
from tests.real_robot.test_control import DT, STEP, Bench
from tests.real_robot.test_daemon import SCRIPT, bridging, simulated, until
from tests.real_robot.test_decide import SPEC, Arm, decider_of, tool
from tests.real_robot.test_deploy import said, start
from tests.tiers import only_all

BASE = node_of("policies.generative.flow.Flow", width=32, chunk=12)
REALTIME = node_of("policies.wrappers.real_time_chunking.RealTimeChunking", base=BASE)
CHUNKING = {**REALTIME, "base": {**BASE, "chunk": 8, "width": 8}, "delay": 0}
BOX = torch.tensor([[-0.3], [0.3]]).expand(2, SPEC.act.size)
LATE = (2, 6, 5, 4)
"""Ticks of 10 ms that each decision takes, in turn."""


def made(node: dict[str, Any]) -> Policy:
    torch.manual_seed(0)
    return build(node, Policy, spec=SPEC).eval()


@dataclass(eq=False)
class Slow:
    """The control process goes on while the policy decides, and notes what the arm follows."""

    bench: Bench
    policy: Policy
    turns: int = 0
    actions: list[Floats] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)
    """Where a newer chunk is followed for the first time: how far it is from the one before it."""

    def __post_init__(self) -> None:
        self.act, self.policy.act = self.policy.act, self
        self.step, self.chunk = -1, self.bench.control.source.follower.chunk

    def __call__(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        made = self.act(obs, carry, noise)
        self.turns += 1
        self.ticks(LATE[self.turns % len(LATE)])
        return made

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.bench.now += DT
            self.bench.control.turn()
            self.look(self.bench.control.source.follower)

    def look(self, follower: ChunkFollower) -> None:
        if self.bench.control.mode != Mode.RUNNING or follower.step == self.step:
            return
        self.step = follower.step
        self.actions.append(follower.action.copy())
        middle = follower.origin + (follower.step + 0.5) * follower.dt
        new, old = (
            follower._action_of(chunk, middle) for chunk in (follower.chunk, follower.previous)
        )
        if follower.chunk is not self.chunk and new is not None and old is not None:
            self.apart.append(float(np.abs(new - old).max()))
        self.chunk = follower.chunk


def moved(folder: Path, mode: str) -> Slow:
    """Some seconds of an arm under a policy that is only noise, the worst that can join; without
    `mode` it continues nothing."""
    folder.mkdir()
    bench = Bench(folder, noise=1e-4)
    policy = made({**REALTIME, "mode": mode} if mode else BASE)
    actions: Any = policy.get_submodule("base.range" if mode else "range")
    actions.fit(BOX)
    slow = Slow(bench, policy)
    decider = decider_of(bench, policy)
    slow.ticks(5)

    def turns(count: int) -> None:
        for _ in range(count):
            slow.ticks(1)
            while round(bench.now / DT) % round(STEP / DT):
                slow.ticks(1)
            decider.turn()

    turns(4)
    for wish, mode_then in ((Command.ARM, Mode.ARMED), (Command.START, Mode.RUNNING)):
        bench.request(wish)
        turns(2)
        assert bench.control.mode == mode_then, bench.control.fault
    turns(40)
    assert bench.control.mode == Mode.RUNNING, bench.control.fault
    return slow


def test_a_chunk_that_is_late_begins_as_what_the_arm_did_meanwhile(tmp_path: Path) -> None:
    alone, naive, guided = (moved(tmp_path / f"a{mode}", mode) for mode in ("", "naive", "guided"))
    # What was asked for before the arm was started is nothing that it followed: one seam is open.
    for slow in (naive, guided):
        assert len(slow.apart) > 35 and max(slow.apart[1:]) < 1e-6, slow.apart
    assert np.mean(alone.apart) > 0.2, "without a memory, every chunk is another plan"
    actions = {slow: np.stack(slow.actions) for slow in (alone, naive, guided)}
    changes = {slow: np.abs(np.diff(each, axis=0)).mean() for slow, each in actions.items()}
    assert changes[guided] < 0.8 * changes[naive]
    assert changes[guided] < 0.95 * changes[alone], "though that one is blended, and so averaged"


def test_the_clock_says_where_a_plan_is() -> None:
    policy: RealTimeChunking = build(REALTIME, RealTimeChunking, spec=SPEC)
    actor, now = Actor(policy, 1, execute=1), 100.0
    seam = RtcAlignment(0.1, 12, lambda: now)
    assert not seam.align(actor, 99.98, moves=False) and seam.start == 99.98
    now = 100.21
    seam.chunk_posted()  # 0.23 s late, plus half a step to the middle of the next one
    assert seam.delay == 3
    assert seam.align(actor, 100.2, moves=True)
    assert actor.cursor.item() == 2 and actor.carry["delay"].item() == 3
    assert seam.start == pytest.approx(100.18), "on the grid of the plan before"
    assert seam.align(actor, 100.21, moves=True) and actor.cursor.item() == 1
    assert seam.align(actor, 100.41, moves=True, paused=0.1) and actor.cursor.item() == 1, "waited"
    assert not seam.align(actor, 101.7, moves=True, paused=0.1), "of 12 steps nothing is left"
    assert seam.start == 101.7


@only_all  # in this process: below
def test_a_deployed_policy_continues_its_plans(tmp_path: Path, folder: Path) -> None:
    """In its own process: it decides on, and the arm runs."""
    policy: Any = made(BASE)
    policy.range.fit(BOX)
    plain = simulated(tmp_path, policy=str(save(tmp_path / "0", policy, 0)))
    deployment = replace(plain, chunks="guided")
    continues = with_real_time_chunking(policy, deployment)
    assert isinstance(continues, RealTimeChunking) and continues.config.mode == "guided"
    assert with_real_time_chunking(continues, deployment) is continues
    assert with_real_time_chunking(policy, plain) is policy
    gaussian = make_policy("gaussian.Gaussian", SPEC, chunk=4)
    with pytest.raises(ConfigError, match="Gaussian has no sampler that could be guided"):
        with_real_time_chunking(gaussian, deployment)
    with bridging(folder, deployment) as bridge:
        number = bridge.running()["policy"]["number"]
        until(lambda: bridge.status["policy"]["number"] > number + 10, "it decides on")
        assert bridge.status["mode"] == "RUNNING" and bridge.ask(Verb.STOP).ok
        bridge.mode("IDLE")


LONG = 128


class DecidesAtRest(Arm):
    def decides(self) -> bool:
        return self.bench.control.mode != Mode.RUNNING


def test_a_plan_of_128_steps_arrives_whole_and_is_followed(tmp_path: Path) -> None:
    """The policy decides once a second; what the arm does is the plan's, step by step."""
    arm = DecidesAtRest(tmp_path, made({**BASE, "chunk": LONG}))
    bench, decider = arm.bench, arm.decider
    arm.runs()
    chunk = bench.control.source.follower.chunk
    assert chunk is not None and chunk.actions.shape == (LONG, SPEC.act.size)
    plan = decider.actor.plan[0].reshape(LONG, -1).numpy()
    assert np.array_equal(chunk.actions.astype(np.float32), plan)
    noise = bench.there.chunk.fields[0]
    assert noise["noise_size"] == LONG * SPEC.act.size
    arm.run(round(3 * STEP / DT))
    apart = np.abs(plan - bench.control.source.follower.action).max(1)
    assert apart.min() < 1e-6 and apart.argmin() >= 2, "steps of the plan by the clock"


def test_longer_ones_are_refused_where_they_are_made_and_where_they_are_received() -> None:
    assert MOST_STEPS == LONG
    with pytest.raises(ConfigError, match=r"chunk of 129 x 4 is larger than a message \(128 x 32"):
        Decider(made({**BASE, "chunk": 129}), None, None, None, tool)  # type: ignore[arg-type]
    check, record = ChunkCheck(("x",) * 4, 0.05, 1.0), np.zeros(1, CHUNK)
    record["steps"], record["size"], record["noise_size"] = 128, 4, 4096
    assert check(record[0], 0.0) == ""
    record["steps"] = 129
    assert "1 to 128" in check(record[0], 0.0)


def test_flight_records_of_the_version_before_are_read(tmp_path: Path) -> None:
    """A flight record holds state messages, which do not change with chunks. Those of version 5 and
    before did not say whether a person had taken over."""
    today = state_record(7, 3)
    newer = ("intervened", "paused", "reference")
    fields = {name: today[name] for name in today.names or () if name not in newer}
    before = np.dtype([*fields.items()])
    assert before.itemsize == 1104, "as in versions 4 and 5"
    records = np.zeros(5, before)
    records["q"], records["measured"] = 0.25, np.arange(5)
    write_records(records, tmp_path / "old.npz")
    driver = Replay(ReplayConfig(str(tmp_path / "old.npz")))
    driver.connect()
    assert driver.read().q.tolist() == [0.25] * 7


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_build, "ASKED", [])
    allow(PACKAGE)


@pytest.mark.parametrize("node", [SCRIPT, CHUNKING], ids=["script", "real-time chunking"])
def test_its_chunks_are_stamped_and_followed_as_those_in_process(
    tmp_path: Path, node: dict[str, Any]
) -> None:
    here = made(node)
    with Server(PolicyService(made(node)), port=0) as server:
        there = remote_policy(server.url)
        arms = [Arm(tmp_path / "here", here), Arm(tmp_path / "there", there)]
        for arm in arms:
            torch.manual_seed(1)
            arm.runs()
            arm.run(100)
    assert (arms[0].decider.alignment is None) == (node is SCRIPT)
    for chunk, other in zip(arms[0].chunks, arms[1].chunks, strict=True):
        for name in ("number", "seen", "start", "steps", "actions", "noise"):
            np.testing.assert_array_equal(chunk[name], other[name], name)
    sent = [arm.bench.there.state.fields[0]["sent"] for arm in arms]
    np.testing.assert_array_equal(*sent)
    assert np.ptp([chunk["actions"] for chunk in arms[0].chunks]) > 0.1, "it moves"


def test_a_lost_server_brings_the_arm_to_rest_and_a_reset_goes_on_when_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = PolicyService(made(SCRIPT))
    server = Server(service, port=0).start()
    arm = Arm(tmp_path, remote_policy(server.url, wait=0.0, timeout=20.0))
    arm.runs()
    arm.run(50)
    assert all(arm.decided)
    arm.decided.clear()
    server.close()
    for _ in range(400):
        arm.run(10)
        if arm.bench.control.mode == Mode.ESTOP:
            break
    assert arm.bench.control.mode == Mode.ESTOP, "it latches"
    assert "the policy's last observation is" in arm.bench.control.fault
    assert not any(arm.decided)
    arm.run(400)
    rests = arm.bench.driver.read().q.copy()
    arm.run(100)
    np.testing.assert_allclose(arm.bench.driver.read().q, rests, atol=1e-3)

    with Server(service, port=server.port):
        arm.run(20)
        assert arm.decided[-1] and arm.bench.control.mode == Mode.ESTOP, "nothing clears itself"
        assert arm.obey(Command.RESET) == Mode.IDLE
        arm.runs()
        arm.run(300)
        assert arm.bench.control.mode == Mode.RUNNING, arm.bench.control.fault
        assert np.abs(arm.bench.driver.read().q - rests).max() > 0.01, "it moves again"
    told = capsys.readouterr().out
    assert told.count("is lost") == 1 and told.count("the server is back") == 1


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("run") / "0", made(SCRIPT), 0)


@pytest.fixture
def server(script: Path, tmp_path: Path) -> Iterator[Process]:
    process = Process(script, free_port(), tmp_path / "token").ready()
    yield process
    process.process.kill()


def test_deploy_takes_an_address_where_it_takes_a_run(
    server: Process, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBODIED_TOKEN", server.token.read_text().strip())
    file = tmp_path / "server.yaml"
    file.write_text(f"url: {server.url}\ntoken_file: {server.token}\n")
    words = ("robot=sim", f"policy={file}", "robot.driver.world.task=reach")
    deploy = start(tmp_path, folder, *words, "episodes=1", "record=false")
    text = said(deploy)
    assert deploy.returncode == 0, text
    assert "RemotePolicy" in text and "server        decides in" in text
    assert json.loads((tmp_path / "out/summary.json").read_text())["successes"] == 1, text

    server.kill()
    (tmp_path / "second").mkdir()
    refused = start(tmp_path / "second", folder, *words)
    text = said(refused)
    assert refused.returncode == 2 and "nothing answers at ws://" in text
    assert len([line for line in text.splitlines() if line.startswith("embodied:")]) == 1


def test_a_file_that_names_a_server_is_not_believed(
    server: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither `embodied robot load` nor a run that came with data reaches an address by itself."""
    asking = remote_policy(server.url, token_file=str(server.token))
    folder = checkpoint.save(tmp_path / "asking", asking, 0)
    monkeypatch.setattr(core_build, "ASKED", [])
    with pytest.raises(ConfigError, match="reaches beyond this process"):
        checkpoint.load_policy(folder)
