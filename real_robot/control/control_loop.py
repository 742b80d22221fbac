"""The kernel's control loop, with what moves its arm: chunks of a policy, and the way home."""

from __future__ import annotations

import time
from collections.abc import Callable

from embodied.real_robot.control.chunk_follower import ChunkFollower
from embodied.real_robot.control.homing import Homing
from embodied.real_robot.control.policy_source import PolicySource
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.checks import Fresh
from embodied.real_robot.kernel.driver import ArmDriver
from embodied.real_robot.kernel.loop import ControlLoop
from embodied.real_robot.kernel.report import Recorder


def control_loop(
    driver: ArmDriver,
    chain: Chain,
    follower: ChunkFollower,
    channels: Channels,
    clock: Callable[[], float] = time.monotonic,
    ring: Recorder | None = None,
    homing: Homing | None = None,
) -> ControlLoop:
    """A control loop that follows what comes through `channels`; nothing is connected yet."""
    source = PolicySource(follower, channels, chain.required(Fresh).config.state)
    return ControlLoop(driver, chain, source, channels, clock, ring, homing)
