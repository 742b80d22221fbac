"""Chunks of 128 steps through the bridge: policy, mailbox, check, follower, RTC, recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.embodiments.joint_delta import Config as DeltaConfig
from embodied.embodiments.joint_delta import JointDelta
from embodied.real_robot.control.chunk_follower import Chunk, ChunkCheck, ChunkFollower
from embodied.real_robot.drivers.replay import Config as ReplayConfig
from embodied.real_robot.drivers.replay import Replay
from embodied.real_robot.ipc.messages import CHUNK, MOST_STEPS, Mode, state_record
from embodied.real_robot.ipc.ring_buffer import write_records
from embodied.real_robot.policy.decider import Decider, RtcAlignment
from tests.real_robot.test_control import DT, STEP
from tests.real_robot.test_decide import SPEC, Arm, tool
from tests.real_robot.test_record import recording

LONG = 128


def flow(chunk: int) -> Policy:
    node = {"_target_": "embodied.policies.generative.flow.Flow", "width": 16, "chunk": chunk}
    torch.manual_seed(0)
    return build(node, Policy, spec=SPEC).eval()


class DecidesAtRest(Arm):
    def decides(self) -> bool:
        return self.bench.control.mode != Mode.RUNNING


def test_a_plan_of_128_steps_arrives_whole_and_is_followed(tmp_path: Path) -> None:
    """The policy decides once a second; what the arm does is the plan's, step by step."""
    arm = DecidesAtRest(tmp_path, flow(LONG))
    bench, decider = arm.bench, arm.decider
    arm.runs()
    chunk = bench.control.follower.chunk
    assert chunk is not None and chunk.actions.shape == (LONG, SPEC.act.size)
    plan = decider.actor.plan[0].reshape(LONG, -1).numpy()
    assert np.array_equal(chunk.actions.astype(np.float32), plan)
    noise = bench.there.chunk.fields[0]
    assert noise["noise_size"] == LONG * SPEC.act.size
    arm.run(round(3 * STEP / DT))
    apart = np.abs(plan - bench.control.follower.action).max(1)
    assert apart.min() < 1e-6 and apart.argmin() >= 2, "steps of the plan by the clock"


def test_longer_ones_are_refused_where_they_are_made_and_where_they_are_received() -> None:
    assert MOST_STEPS == LONG
    with pytest.raises(ConfigError, match=r"chunk of 129 x 4 is larger than a message \(128 x 32"):
        Decider(flow(129), None, None, None, tool)  # type: ignore[arg-type]
    check, record = ChunkCheck(("x",) * 4, 0.05, 1.0), np.zeros(1, CHUNK)
    record["steps"], record["size"], record["noise_size"] = 128, 4, 4096
    assert check(record[0], 0.0) == ""
    record["steps"] = 129
    assert "1 to 128" in check(record[0], 0.0)


def test_the_last_step_of_128_is_followed_at_its_time() -> None:
    follower = ChunkFollower(JointDelta(DeltaConfig()), 0.1)
    follower.begin(np.zeros(7), 0.0, 0.0)
    actions = np.tile(np.arange(LONG)[:, None] / LONG, (1, 7))
    follower.take(Chunk(actions, 0.0, 0.0))
    out = np.zeros(7)
    for k in (0, 63, 64, 127):
        follower(np.zeros(7), (k + 0.5) * 0.1, out)
        assert not follower.starved and follower.action[0] == pytest.approx(k / LONG)
    follower(np.zeros(7), 13.5, out)
    assert follower.starved


def test_alignment_joins_a_chunk_of_128_after_100_steps() -> None:
    now = [0.0]
    base = {"_target_": "embodied.policies.generative.flow.Flow", "width": 16, "chunk": LONG}
    target = "embodied.policies.wrappers.real_time_chunking.RealTimeChunking"
    policy = build({"_target_": target, "base": base}, Policy, spec=SPEC)
    actor = Actor(policy, 1, execute=1)
    actor({"state": torch.zeros(1, SPEC.obs["state"].size)}, torch.tensor([True]))
    alignment = RtcAlignment(0.1, LONG, lambda: now[0])
    assert not alignment.align(actor, 0.0, moves=False)
    now[0] = 3.0
    alignment.chunk_posted()
    assert alignment.align(actor, 10.0, moves=True)
    assert actor.cursor.tolist() == [100] and alignment.delay == 31
    assert alignment.start == pytest.approx(10.0)


def test_noise_of_a_long_chunk_is_recorded(tmp_path: Path) -> None:
    size = LONG * 32
    builder = recording(size)
    noise = np.random.default_rng(0).normal(size=size).astype(np.float32)
    ticks = np.zeros(4, state_record(7, 2))
    ticks["mode"], ticks["size"], ticks["action"] = Mode.RUNNING, 4, 0.5
    ticks["measured"] = np.arange(4) / 100
    builder.add_decision(0.0, noise)
    for tick, step in zip(ticks, (0, 0, 1, 1), strict=True):
        tick["step"] = step
        builder.add_tick(tick)
    made = builder.finish()
    assert made is not None
    assert np.array_equal(made.steps["noise"][0].numpy(), noise)


def test_flight_records_of_the_version_before_are_read(tmp_path: Path) -> None:
    """A flight record holds state messages, which do not change with chunks. Those of version 5 and
    before did not say whether a person had taken over."""
    today = state_record(7, 3)
    fields = {name: today[name] for name in today.names or () if name != "intervened"}
    before = np.dtype([*fields.items()])
    assert before.itemsize == 1104, "as in versions 4 and 5"
    records = np.zeros(5, before)
    records["q"], records["measured"] = 0.25, np.arange(5)
    write_records(records, tmp_path / "old.npz")
    driver = Replay(ReplayConfig(str(tmp_path / "old.npz")))
    driver.connect()
    assert driver.read().q.tolist() == [0.25] * 7
