"""Policy process: `python -m embodied.real_robot.policy.decider FOLDER [POLICY]`, started by the
daemon. Observations in, action chunks out; it may stall or die without moving the arm.

Each turn reads the newest state, runs the policy, and posts the chunk with the time of the
observation. Before that it runs a few decisions without posting them, and locks itself
(`lockdown`): what it posts is of a process that can write nothing else. With POLICY it takes over
from another policy process: it writes a file when it is ready, and posts once the daemon has
stopped the other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, allow
from embodied.core.checkpoint import CheckpointError, load_policy
from embodied.core.errors import RemoteError, ServerLost
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.policies.abilities import without_reflex
from embodied.policies.remote.address import PACKAGE
from embodied.real_robot.assemble import open_channels, tool_target
from embodied.real_robot.cameras.policy_images import PolicyImages
from embodied.real_robot.cameras.sources import CameraError
from embodied.real_robot.control.main import DaemonWatch
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import MOST_NOISE, MOST_STEPS, READY, Role
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.mailbox import Mailbox, MailboxError
from embodied.real_robot.kernel.messages import MOST_ACTION, Mode
from embodied.real_robot.kernel.rate import Rate
from embodied.real_robot.policy.lockdown import lock
from embodied.real_robot.policy.observer import (
    Observer,
    observer,
    require_actions,
    require_rate,
    with_real_time_chunking,
)


class RtcAlignment:
    """Where the next chunk joins the one being executed (real-time chunking).

        start      measured            posted
         |a0 |a1 |a2 |a3 |a4 |a5 |a6 |        the previous plan
                 |a2 |a3 |b2 |b3 |b4 |b5 |    the next, on the same grid: 2 executed steps, delay 2

    A policy that continues its own plan has to know how many steps of it were executed, and how
    many will have been when the next chunk arrives. Both are measured by the clock, not by counting
    decisions. Call `align` before a decision and `chunk_posted` after its chunk; `clock` is that of
    the stamps.

    The delay is the largest of the last `KEPT` decisions, to the nearest step: each that is fixed
    for longer than it has to be makes the arm slower to see (of 20 lifts 80 ms late, 11 succeeded
    with one step more, 18 with none), and one too few is a seam with nothing but the blend.
    """

    KEPT = 20

    def __init__(self, dt: float, chunk: int, clock: Callable[[], float]) -> None:
        self.dt = dt
        self.chunk = chunk
        self.clock = clock
        self.start = 0.0  # time (s) at which the first action of the newest plan begins
        self.paused = 0.0
        self.latencies: deque[float] = deque(maxlen=self.KEPT)

    def align(self, actor: Actor, measured: float, moves: bool, paused: float = 0.0) -> bool:
        """Tell the policy where it is at `measured` (s); False where it begins anew, because the
        arm does not follow what it said (it does not move, or nothing was left). `paused` (s): for
        how long the arm has waited for its tool so far."""
        self.start += paused - self.paused
        self.paused = paused
        followed = max(1, round((measured - self.start) / self.dt))
        if not moves or followed >= self.chunk:
            self.start = measured
            return False
        self.start += followed * self.dt
        actor.cursor = torch.tensor([followed])
        actor.carry = {**actor.carry, "delay": torch.tensor([self.delay])}
        return True

    @property
    def delay(self) -> int:
        """Steps from the beginning of a plan to the last that is done without it. A chunk counts
        from the arm's next step on, half a step later on average, and the middle of that step says
        which action it is."""
        return min(int(max(self.latencies, default=0.0) / self.dt + 1.0), self.chunk - 1)

    def chunk_posted(self) -> None:
        self.latencies.append(self.clock() - self.start)


Target = Callable[[Floats], Floats]


class Decider:
    """`turn` is one decision. The same `Actor` as in simulation keeps what the policy remembers;
    it begins an episode with every decision while the arm is armed, and anew where a person gives
    the arm back: neither follows what the policy said. Where the policy continues its own
    plans, they join at a `seam`; `clock` is that of the state's stamps."""

    def __init__(
        self,
        policy: Policy,
        observer: Observer,
        state: Mailbox,
        chunk: Mailbox,
        target: Target,
        images: PolicyImages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        spec = policy.spec
        if policy.chunk > MOST_STEPS or spec.act.size > MOST_ACTION:
            raise ConfigError(
                f"a chunk of {policy.chunk} x {spec.act.size} is larger than a message "
                f"({MOST_STEPS} x {MOST_ACTION})"
            )
        if spec.act.dtype != "float32":
            raise ConfigError("a robot needs continuous actions")
        self.policy = policy
        self.observer = observer
        self.target = target
        self.images = images
        self.state = state
        self.chunk = chunk
        self.dt = spec.dt
        self.noise = np.zeros(0, np.float32)  # the newest that the policy drew, flat
        draw = policy.sample_noise

        def drawn(n: int, explore: bool = False) -> Tensor:
            noise = draw(n, explore)
            self.noise = noise.detach().reshape(-1).numpy().astype(np.float32)
            return noise

        policy.sample_noise = drawn
        self.actor = Actor(policy, 1, execute=1)
        if "executed_steps" in self.actor.carry and "delay" not in self.actor.carry:
            raise ConfigError(
                f"{type(policy).__name__} needs every observation between two decisions, and a "
                "robot's policy sees that of a decision only: evaluate it in simulation"
            )
        self.mode = Mode.DISCONNECTED
        self.first = True
        self.number = 0
        self.lost = ""
        self.seen: Tensors = {}
        self.alignment = (
            RtcAlignment(spec.dt, policy.chunk, clock)
            if "executed_steps" in self.actor.carry
            else None
        )

    def turn(self) -> bool:
        """Decide from the newest state; False: there is no new one, or no policy server."""
        if not self.state.receive():
            return False
        fields = self.state.fields[0]
        self.mode = Mode(int(fields["mode"]))
        self.first = self.first or self.mode == Mode.ARMED or bool(fields["intervened"])
        try:
            plan = self._decide(fields)
        except ServerLost as error:  # nothing is posted, so the arm comes to rest (safety.fresh)
            self._server_lost(str(error))
            return False
        self._server_lost("")
        self.first = False
        self._post(plan, fields)
        return True

    def _server_lost(self, why: str) -> None:
        """Say once that a policy server is lost, and that it is back. Its policy begins anew."""
        if bool(why) != bool(self.lost):
            print(f"policy: {why}" if why else "policy: the server is back", flush=True)
        self.lost = why
        self.first = self.first or bool(why)

    def warm_up(self, patient: bool) -> bool:
        """Decide, and tell nobody: what has to be loaded or compiled then is. False where there is
        no state yet. ServerLost; where it is `patient`, False."""
        if not self.state.receive():
            return False
        self.first = True
        self.state.seen = 0
        try:
            self._decide(self.state.fields[0])
        except ServerLost as error:
            if not patient:
                raise
            self._server_lost(str(error))
            return False
        self._server_lost("")
        return True

    @torch.inference_mode()
    def _decide(self, fields: np.void) -> Floats:
        """The plan [chunk, A] for what the state message shows."""
        leaves: dict[str, NDArray[Any]] = dict(observe_state(self.observer, fields, self.target))
        if self.images is not None:
            leaves |= self.images.read()
        self.seen = {name: torch.tensor(value)[None] for name, value in leaves.items()}
        first = self.first
        if self.alignment is not None:
            moves = not first and self.mode == Mode.RUNNING
            measured, paused = float(fields["measured"]), float(fields["paused"])
            first = not self.alignment.align(self.actor, measured, moves, paused)
        self.actor(self.seen, torch.tensor([first]))
        return self.actor.plan[0].reshape(self.policy.chunk, -1).numpy()

    def _post(self, plan: Floats, fields: np.void) -> None:
        message = self.chunk.fields[0]
        self.number += 1
        steps, size = plan.shape
        message["number"], message["seen"] = self.number, fields["measured"]
        message["start"] = fields["measured"] if self.alignment is None else self.alignment.start
        message["steps"] = steps
        message["size"] = size
        message["actions"][:steps, :size] = plan
        noise = self.noise
        message["noise_size"] = len(noise) if len(noise) <= MOST_NOISE else 0
        message["noise"][: message["noise_size"]] = noise[:MOST_NOISE]
        if self.images is not None:
            message["image_times"][: len(self.images.taken_at)] = [*self.images.taken_at.values()]
        self.chunk.send()
        if self.alignment is not None:
            self.alignment.chunk_posted()


def observe_state(
    observer: Observer, fields: np.void, target: Target
) -> dict[str, NDArray[np.float32]]:
    """The observation that a policy gets of a state message. The tool's target is the one that the
    next action moves, as in simulation: what is sent follows it within the limits."""
    place = target(np.array(fields["reference"]))
    width, sensed = float(fields["width"]), fields["sensed"]
    return observer(fields["q"], fields["dq"], place, width, sensed)


WARM_UP_DECISIONS = 3
PAUSE = 0.05  # s between them, at most


def main(folder: Path, policy: str = "") -> None:
    """Decide once a step of the policy, until the daemon is gone."""
    turn = threading.Event()
    # Also out of a policy that never comes back.
    watch = DaemonWatch(lambda reason: os._exit(0), turn.set)
    torch.set_num_threads(1)
    deployment = Deployment.read(folder).allow_packages()
    if not policy and not deployment.policy:  # a guest decides (embodied.real_robot.rl.session)
        threading.Event().wait()
    if deployment.served and not policy:  # an operator typed the server's address
        allow(PACKAGE)
    acting = without_reflex(load_policy(policy if policy else deployment.policy))
    require_rate(acting.spec, deployment)
    require_actions(acting.spec, deployment)
    acting = with_real_time_chunking(acting, deployment)
    channels = open_channels(deployment, folder, Role.POLICY)
    observations = observer(acting.spec, deployment)
    with PolicyImages(acting.spec, deployment.cameras, deployment.picture, folder) as images:
        decider = Decider(
            acting, observations, channels.state, channels.chunk, tool_target(deployment), images
        )
        rate, decided = Rate(1 / min(acting.spec.dt, PAUSE)), 0
        while decided < WARM_UP_DECISIONS:
            rate.wait()
            decided += decider.warm_up(patient=not policy)
        if policy:
            (folder / READY).write_text(str(os.getpid()))
        # A server that an operator named, or a person's own code, may need connections.
        network = (deployment.served and not policy) or bool(deployment.allow)
        if missing := lock(network):
            print(f"policy: not locked: {missing}", flush=True)
        watch.renew()
        if policy:
            turn.wait()
        rate = Rate(1 / acting.spec.dt)
        while True:
            rate.wait()
            decider.turn()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:3])
    except (CheckpointError, MailboxError, ConfigError, CameraError, RemoteError) as error:
        sys.exit(f"policy: {error}")
