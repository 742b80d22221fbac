"""RealEnv: an arm as an environment of one row, so that what trains and evaluates works on it.

It goes through a daemon and the arm's own control process, never straight to a driver: learning
stalls (updates, checkpoints, a collector of garbage), and neither rate nor limits nor stops of an
arm may depend on that. While nobody steps, the arm is brought to rest and held; when this process
hangs or dies, the control process does so by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.build import ConfigError, Node, build
from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from real_robot.cameras.camera import CameraError, fitted
from real_robot.cameras.env_images import Sight
from real_robot.control.rate import Rate
from real_robot.deployment import Deployment
from real_robot.ipc.messages import Mode
from real_robot.policy.compatibility import observer, require_actions, require_rate
from real_robot.policy.decider import observed
from real_robot.policy.success import Success
from real_robot.rl.session import Dozing, Guest, GuestError

HARD = ("limits",)  # what it changes is not worth a flag: it smooths every step


@dataclass(frozen=True)
class Config:
    """`robot` is a robot's YAML, `world` the environment whose Spec policies are made for.

    An episode lasts `horizon` steps; success (as the deployment knows it) ends it and pays 1.
    `patience`: s that an operator has to reset an arm that stopped for good, or to mend a camera
    that policies see by. `given` numbers are drawn anew for each episode where they are ranges,
    `[low, high]`. What policies of `world` see is taken by the robot's `cameras`; no picture is
    older than `age` s. `camera` (real_robot.cameras.sources) is what rewards look through; a
    picture has to
    come within `age` s after what it is to show.
    """

    robot: Node
    world: Node
    horizon: int = 100
    num_envs: int = 1
    patience: float = 600.0
    folder: str = ""
    given: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, Any])
    seed: int = 0
    camera: Node | None = None
    age: float = 0.5


class RealEnv(VecEnv):
    """`log`: `success` where it is known, `filtered` (safety stages changed what was asked for in
    this step), `stopped` (the arm stopped for good in it, was held because a camera failed, or
    somebody else used it: truncated)."""

    def __init__(self, config: Config) -> None:
        if config.num_envs != 1:
            raise ConfigError("there is one arm: num_envs=1 (and eval.num_envs=1)")
        self.config, self.num_envs = config, 1
        self.random = np.random.default_rng(config.seed)
        inner: VecEnv = build({**config.world, "num_envs": 1})
        self.spec = inner.spec
        inner.close()
        self.deployment = deployed(config)
        require_rate(self.spec, self.deployment)
        require_actions(self.spec, self.deployment)
        self.observer = observer(self.spec, self.deployment)
        self.success, self.target = Success(self.deployment), self.deployment.target()
        self.names = self.deployment.chain().names
        self.sight = Sight(self.spec, self.deployment, config.camera, config.age)
        self.guest = Guest.at(self.deployment, Path(config.folder) if config.folder else None)
        self.sight.follow(self.guest.folder_path, self.observer.given)
        self.rate = Rate(1 / self.spec.dt)
        self.still = np.zeros(self.spec.act.size)
        self.dozing = Dozing(0.4 * self.deployment.fresh.stop, self._doze, self.guest.lock)
        self.age, self.seen_at, self.counts = 0, 0.0, np.zeros(len(self.names))
        self._obs: Tensors | None = None

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """The arm goes home; `seed` decides the `given` numbers only."""
        if task is not None:
            raise ConfigError("an arm's task is what stands before it: it can't be set")
        if seed is not None:
            self.random = np.random.default_rng(seed)
        if mask is not None and not bool(mask.any()) and self._obs is not None:
            return self._obs
        with self.guest.lock:
            self.dozing.asleep()
            self.sight.begin(self.guest.rest)
            self._begin()
        return self._shown()

    def step(self, action: Tensor) -> Step:
        if self._obs is None:
            raise RuntimeError("RealEnv: call reset() before step()")
        wish = action.detach().cpu().numpy().astype(np.float64)[0]
        with self.guest.lock:
            if self.guest.owner is self:
                self._play(wish)
            following = self._shown()
            stopped = self.guest.mode != Mode.RUNNING or self.guest.owner is not self
            (won, late), reward, log = self._judged(stopped)
            if won or late:
                self.dozing.asleep()
                self.guest.rest()  # who looks now may take their time
                self._notify_before_reset(torch.tensor([True]))
                self._begin()
                self._obs = self._shown()
            else:
                self.dozing.awake()
        ended = (torch.tensor([won]), torch.tensor([late]))
        return Step(self._obs, following, torch.tensor([reward]), *ended, log)

    def _doze(self) -> None:
        if self.guest.owner is self:
            self.guest.rest()

    def _play(self, wish: np.ndarray[Any, Any]) -> None:
        """One action, from the moment that it is said on."""
        guest = self.guest
        if guest.mode != Mode.RUNNING:
            guest.look()
        if guest.mode in (Mode.IDLE, Mode.STOPPING):  # it was held while nobody stepped
            guest.rest()
            guest.go(self.still)
            self.seen_at = float(guest.seen["measured"])
            self.rate.begin()
        guest.say(wish, self.seen_at)
        self.rate.wait()
        guest.look()
        self.age += 1

    def _judged(self, stopped: bool) -> tuple[tuple[bool, bool], float, Tensors]:
        """Terminated and truncated, the reward, and what is logged."""
        fields = self.guest.seen
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

    def _begin(self) -> None:
        """Rest, home, and running again; an arm that stopped for good waits for its operator."""
        guest = self.guest
        guest.owner = self
        guest.rest()
        self._wait_for_operator()
        guest.home()
        self._wait_for_operator()
        for name, (low, high) in self.config.given.items():
            self.observer.given[name] = float(self.random.uniform(low, high))
        self.success.given = dict(self.observer.given)
        self.sight.mine()
        guest.go(self.still)
        guest.look()
        self.counts = np.array(guest.seen["counts"], float)
        self.age = 0
        self.rate.begin()
        self.dozing.awake()

    def _wait_for_operator(self) -> None:
        guest = self.guest
        if guest.mode != Mode.ESTOP:
            return
        then = f"look at it, then: embodied robot reset folder={guest.folder_path}"
        print(f"the arm stopped for good: {guest.fault}\n{then}", file=sys.stderr, flush=True)
        deadline = time.monotonic() + self.config.patience
        while guest.mode == Mode.ESTOP:
            if time.monotonic() > deadline:
                raise GuestError(f"nobody reset the arm in {self.config.patience:.0f} s")
            time.sleep(0.1)
            guest.look()

    def _shown(self) -> Tensors:
        """What the newest state looks like to a policy; where a picture is missing the arm is held
        until there are some again, and the state is the one then."""
        try:
            pictures = self.sight.look()
        except CameraError as error:
            self.guest.rest()
            pictures = self.sight.wait(error, self.config.patience)
            self.guest.look()
        fields = self.guest.seen
        self.seen_at = float(fields["measured"])
        leaves: dict[str, NDArray[Any]] = dict(observed(self.observer, fields, self.target))
        leaves |= pictures
        self._obs = {name: torch.tensor(value)[None] for name, value in leaves.items()}
        return self._obs

    def render_batch(self, rows: Tensor, size: int) -> Tensor:
        """The middle of the camera's next picture, uint8 [n, size, size, 3]; CameraError where
        none comes."""
        picture = torch.tensor(fitted(self.sight.after(self.seen_at), size, size))
        return picture[None].expand(len(rows), -1, -1, -1).clone()

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        return torch.tensor(fitted(self.sight.after(self.seen_at), height, width))

    def close(self) -> None:
        """The arm comes to rest and is held."""
        self.sight.close()
        self.dozing.close()
        self.guest.close()


def deployed(config: Config) -> Deployment:
    """The robot's, without a policy of its own; ConfigError."""
    robot = {key: value for key, value in config.robot.items() if key != "_target_"}
    if robot.get("counterpart"):
        raise ConfigError("RealEnv starts no counterpart: name a robot that is there, or robot=sim")
    world = robot.get("driver", {}).get("world")
    if world and world.get("task") == "as_trained":
        task = {"task": config.world.get("task"), "ranges": config.world.get("ranges", {})}
        robot["driver"] = {**robot["driver"], "world": {**world, **task}}
    robot["sensed"] = list(build(robot["driver"]).sensed)
    given = {**robot.get("given", {}), **{k: sum(v) / 2 for k, v in config.given.items()}}
    return Deployment.parse({**robot, "given": given, "policy": ""})
