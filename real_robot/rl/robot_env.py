"""RealEnv: a robot as an environment with one parallel env, for training and evaluation.

Steps go through a daemon and the robot's own control process, never straight to a driver: learning
stalls (updates, checkpoints, garbage collection), and the rate, the limits and the stops of an arm
must not depend on it. While `step` is not called, the arm is brought to rest and held. When this
process hangs or dies, the control process does the same by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.bounds import Bound, Count, CountOrZero, NonNegative, Number
from embodied.core.build import ConfigError, Node, build
from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.real_robot.assemble import build_chain, tool_target
from embodied.real_robot.cameras.policy_images import EnvImages
from embodied.real_robot.cameras.sources import CameraError, fitted
from embodied.real_robot.deployment import Deployment, controller_settings, with_allowed
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.emulators.process import SharedEmulator
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.kernel.rate import Rate
from embodied.real_robot.policy.decider import observe_state
from embodied.real_robot.policy.observer import Success, observer, require_actions, require_rate
from embodied.real_robot.rl.rehearsal import require_rehearsed
from embodied.real_robot.rl.session import DeadmanTimer, RobotSession, RobotSessionError

HARD = ("limits",)  # what it changes is not worth a flag: it smooths every step


@dataclass(frozen=True)
class ArmConfig:
    """Settings of a robot as an environment, with resets or without. What policies of `world` see
    is taken by the robot's `cameras`. Rewards look through `camera`, whose picture has to come
    within `age` s after what it is to show."""

    robot: Node  # a robot's YAML
    world: Node  # environment whose Spec policies are made for
    num_envs: Count = 1  # 1: a real robot is one arm
    patience: NonNegative = 600.0  # s for an operator to reset the arm or mend a camera
    folder: str = ""  # the daemon's working folder; empty: one in memory
    given: Mapping[str, tuple[Number, Number]] = field(default_factory=dict[str, Any])  # low, high
    seed: CountOrZero = 0  # of the numbers that are drawn for each episode
    camera: Node | None = None  # what rewards look through; null: nothing
    age: Annotated[float, Bound(above=0.0, high=600.0)] = 0.5  # oldest picture that is used, s


@dataclass(frozen=True)
class Config(ArmConfig):
    """Settings of a robot as an environment.

    Success (as the deployment knows it) ends an episode and pays 1. Where `robot` has
    `hold_to_run`, a step waits until the key of `hold` is held."""

    horizon: Count = 100  # steps of an episode
    hold: Node | None = None  # device of hold-to-run; null: the space bar of this terminal


class RealEnv(VecEnv):
    """`log`: `success` where it is known, `filtered` (safety stages changed what was asked for in
    this step), `stopped` (the arm stopped for good in it, was held because a camera failed, or
    another session used it: truncated)."""

    def __init__(self, config: Config) -> None:
        if config.num_envs != 1:
            raise ConfigError("a real robot is one arm: num_envs=1 (and eval.num_envs=1)")
        self.config = config
        self.num_envs = 1
        self.random = np.random.default_rng(config.seed)
        inner = build({**config.world, "num_envs": 1}, VecEnv)
        self.spec = inner.spec
        inner.close()
        robot = env_robot(config)
        self.emulator = SharedEmulator.at(robot["emulator"]) if robot.get("emulator") else None
        if self.emulator is not None:
            robot["driver"] = {**robot["driver"], **self.emulator.settings}
        sensed = list(build(robot["driver"], Driver).sensed)
        given = {**robot.get("given", {}), **{k: sum(v) / 2 for k, v in config.given.items()}}
        own = {"sensed": sensed, "given": given, "policy": ""}  # no policy of the robot's
        self.deployment = Deployment.parse({**robot, **own})
        require_rate(self.spec, self.deployment)
        require_actions(self.spec, self.deployment)
        require_rehearsed(self.deployment)
        self.observer = observer(self.spec, self.deployment)
        self.success, self.target = Success(self.deployment), tool_target(self.deployment)
        self.names = build_chain(self.deployment).names
        self.images = EnvImages(self.spec, self.deployment, config.camera, config.age)
        self.session = RobotSession.at(
            self.deployment, Path(config.folder) if config.folder else None, config.hold
        )
        self.images.attach_state(self.session.folder, self.observer.given)
        self.rate = Rate(1 / self.spec.dt)
        self.deadman = DeadmanTimer(0.4 * self.deployment.fresh.stop, self._rest, self.session.lock)
        self.age, self.observed_at, self.counts = 0, 0.0, np.zeros(len(self.names))
        self._obs: Tensors | None = None

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """The arm goes home; `seed` decides the `given` numbers only."""
        if task is not None:
            raise ConfigError("the task of a real robot can't be set: it is what stands before it")
        if seed is not None:
            self.random = np.random.default_rng(seed)
        if mask is not None and not bool(mask.any()) and self._obs is not None:
            return self._obs
        with self.session.lock:
            self.deadman.pause()
            self.images.open(self.session.rest)
            self._begin_episode()
        return self._observe()

    def step(self, action: Tensor) -> Step:
        if self._obs is None:
            raise RuntimeError("RealEnv: call reset() before step()")
        wish = action.detach().cpu().numpy().astype(np.float64)[0]
        with self.session.lock:
            if self.session.owner is self:
                self._apply_action(wish)
            following = self._observe()
            stopped = self.session.mode != Mode.RUNNING or self.session.owner is not self
            (won, late), reward, log = self._evaluate(stopped)
            if won or late:
                self.deadman.pause()
                self.session.rest()  # hooks before the reset may take their time
                self._notify_before_reset(torch.tensor([True]))
                self._begin_episode()
                self._obs = self._observe()
            else:
                self.deadman.feed()
        ended = (torch.tensor([won]), torch.tensor([late]))
        return Step(self._obs, following, torch.tensor([reward]), *ended, log)

    def _rest(self) -> None:
        if self.session.owner is self:
            self.session.rest()

    def _apply_action(self, wish: np.ndarray[Any, Any]) -> None:
        session = self.session
        session.wait_until_held(self.config.patience)
        if session.mode != Mode.RUNNING:
            session.update()
        if session.mode in (Mode.IDLE, Mode.STOPPING):  # it was held between two steps
            session.rest()
            session.start()
            self.observed_at = float(session.state["measured"])
            self.rate.begin()
        session.send_action(wish, self.observed_at)
        self.rate.wait()
        session.update()
        self.age += 1

    def _evaluate(self, stopped: bool) -> tuple[tuple[bool, bool], float, Tensors]:
        fields = self.session.state
        won = self.success(fields["q"], fields["sensed"])
        counts = np.array(fields["counts"], float)
        moved = counts - self.counts
        self.counts = counts
        soft = [n for n, more in zip(self.names, moved, strict=True) if more and n not in HARD]
        log = {"filtered": torch.tensor([bool(soft)]), "stopped": torch.tensor([stopped])}
        if won is not None:
            log["success"] = torch.tensor([won])
        done = bool(won) and not stopped
        late = not done and (stopped or self.age >= self.config.horizon)
        return (done, late), float(done), log

    def _begin_episode(self) -> None:
        """Rest, go home, run again; after a latched fault, wait for the operator."""
        session = self.session
        session.owner = self
        session.rest()
        self._wait_for_operator()
        session.home()
        self._wait_for_operator()
        for name, (low, high) in self.config.given.items():
            self.observer.given[name] = float(self.random.uniform(low, high))
        self.success.given = dict(self.observer.given)
        self.images.use_own_state()
        session.start()
        session.update()
        self.counts = np.array(session.state["counts"], float)
        self.age = 0
        self.rate.begin()
        self.deadman.feed()

    def _wait_for_operator(self) -> None:
        session = self.session
        if session.mode != Mode.ESTOP:
            return
        then = f"look at it, then: embodied robot reset folder={session.folder}"
        print(f"the arm latched a fault: {session.fault}\n{then}", file=sys.stderr, flush=True)
        deadline = time.monotonic() + self.config.patience
        while session.mode == Mode.ESTOP:
            if time.monotonic() > deadline:
                raise RobotSessionError(
                    f"the arm was not reset within {self.config.patience:.0f} s"
                )
            time.sleep(0.1)
            session.update()

    def _observe(self) -> Tensors:
        """What the newest state looks like to a policy; where a picture is missing the arm is held
        until there are some again, and the state is the one then."""
        try:
            images = self.images.read()
        except CameraError as error:
            self.session.rest()
            images = self.images.wait(error, self.config.patience)
            self.session.update()
        fields = self.session.state
        self.observed_at = float(fields["measured"])
        leaves: dict[str, NDArray[Any]] = dict(observe_state(self.observer, fields, self.target))
        leaves |= images
        self._obs = {name: torch.tensor(value)[None] for name, value in leaves.items()}
        return self._obs

    def render_batch(self, rows: Tensor, size: int) -> Tensor:
        """The middle of the camera's next picture, uint8 [n, size, size, 3]. CameraError."""
        picture = torch.tensor(fitted(self.images.reward_image(self.observed_at), size, size))
        return picture[None].expand(len(rows), -1, -1, -1).clone()

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        return torch.tensor(fitted(self.images.reward_image(self.observed_at), height, width))

    def close(self) -> None:
        self.images.close()
        self.deadman.close()
        self.session.close()
        if self.emulator is not None:
            self.emulator.close()


def env_robot(config: Config) -> Node:
    """The robot's settings, with the task of `world` where a simulated robot has it as trained."""
    robot = with_allowed(controller_settings(config.robot))
    robot.pop("_target_", None)
    task = {"task": config.world.get("task"), "ranges": config.world.get("ranges", {})}
    for part in ("driver", "emulator"):
        world: Node | None = (robot.get(part) or Node()).get("world")
        if world and world.get("task") == "as_trained":
            robot[part] = {**robot[part], "world": {**world, **task}}
    return robot
