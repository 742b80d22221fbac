"""A slow policy moves an arm that goes on meanwhile: how its chunks join, guided and not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import save
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.policies.wrappers.real_time_chunking import RealTimeChunking
from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.control.chunk_follower import ChunkFollower
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.ipc.messages import Command, Mode
from embodied.real_robot.policy.compatibility import with_real_time_chunking
from embodied.real_robot.policy.decider import RtcAlignment
from tests.real_robot.test_control import DT, STEP, Bench
from tests.real_robot.test_daemon import bridging, simulated, until
from tests.real_robot.test_decide import SPEC, decider_of

BASE = {"_target_": "embodied.policies.generative.flow.Flow", "width": 32, "chunk": 12}
REALTIME = {
    "_target_": "embodied.policies.wrappers.real_time_chunking.RealTimeChunking",
    "base": BASE,
}
BOX = torch.tensor([[-0.3], [0.3]]).expand(2, SPEC.act.size)
LATE = (2, 6, 5, 4)
"""Ticks of 10 ms that each decision takes, in turn."""


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
        self.step, self.chunk = -1, self.bench.control.follower.chunk

    def __call__(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        made = self.act(obs, carry, noise)
        self.turns += 1
        self.ticks(LATE[self.turns % len(LATE)])
        return made

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.bench.now += DT
            self.bench.control.turn()
            self.look(self.bench.control.follower)

    def look(self, follower: ChunkFollower) -> None:
        if self.bench.control.mode != Mode.RUNNING or follower.step == self.step:
            return
        self.step = follower.step
        self.actions.append(follower.action.copy())
        middle = follower.origin + (follower.step + 0.5) * follower.dt
        new, old = (
            follower._action_of(follower.chunk, middle),
            follower._action_of(follower.previous, middle),
        )
        if follower.chunk is not self.chunk and new is not None and old is not None:
            self.apart.append(float(np.abs(new - old).max()))
        self.chunk = follower.chunk


def moved(folder: Path, mode: str) -> Slow:
    """Some seconds of an arm under a policy that is only noise, the worst that can join; without
    `mode` it continues nothing."""
    torch.manual_seed(0)
    folder.mkdir()
    bench = Bench(folder, noise=1e-4)
    policy: Policy = build({**REALTIME, "mode": mode} if mode else BASE, Policy, spec=SPEC)
    actions: Any = policy.get_submodule("base.range" if mode else "range")
    actions.fit(BOX)
    slow = Slow(bench, policy.eval())
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
    changes = {slow: mean_change(slow.actions) for slow in (alone, naive, guided)}
    assert changes[guided] < 0.8 * changes[naive]
    assert changes[guided] < 0.95 * changes[alone], "though that one is blended, and so averaged"


def mean_change(actions: list[Floats]) -> float:
    return float(np.abs(np.diff(np.stack(actions), axis=0)).mean())


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
    assert not seam.align(actor, 101.5, moves=True), "of 12 steps nothing is left"
    assert seam.start == 101.5


def test_policies_that_do_not_continue_have_no_seam(tmp_path: Path) -> None:
    assert decider_of(Bench(tmp_path), build(BASE, Policy, spec=SPEC)).alignment is None


def test_a_deployed_policy_continues_its_plans(tmp_path: Path, folder: Path) -> None:
    """In its own process: it decides on, and the arm runs."""
    torch.manual_seed(0)
    policy = build(BASE, Policy, spec=SPEC)
    policy.range.fit(BOX)
    plain = simulated(tmp_path, policy=str(save(tmp_path / "0", policy, 0)))
    deployment = replace(plain, chunks="guided")
    made = with_real_time_chunking(policy, deployment)
    assert isinstance(made, RealTimeChunking) and made.config.mode == "guided"
    assert with_real_time_chunking(made, deployment) is made
    assert with_real_time_chunking(policy, plain) is policy
    gaussian = build(
        {"_target_": "embodied.policies.gaussian.Gaussian", "chunk": 4}, Policy, spec=SPEC
    )
    with pytest.raises(ConfigError, match="Gaussian has no sampler that could be guided"):
        with_real_time_chunking(gaussian, deployment)
    with bridging(folder, deployment) as bridge:
        number = bridge.running()["policy"]["number"]
        until(lambda: bridge.status["policy"]["number"] > number + 10, "it decides on")
        assert bridge.status["mode"] == "RUNNING" and bridge.ask(Verb.STOP).ok
        bridge.mode("IDLE")
