"""An arm and a policy of the chaos suite: they do what is asked of them until there is trouble."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.embodiments.arrays import Floats
from embodied.embodiments.cartesian_delta import CartesianDelta, Reference
from embodied.embodiments.cartesian_delta import Config as DeltaConfig
from embodied.real_robot.cameras.sources import CameraError, Frame, Source
from embodied.real_robot.drivers.sim import Config as SimConfig
from embodied.real_robot.drivers.sim import Sim
from embodied.real_robot.kernel.arm_state import ArmState
from tests.real_robot.trouble import Trouble


@dataclass(frozen=True)
class TroubledConfig(SimConfig):
    trouble: str = ""


class TroubledSim(Sim):
    """The simulated arm; its wire and its sensors fail when they are told to. What a plate in front
    of it feels is told without them."""

    def __init__(self, config: TroubledConfig) -> None:
        super().__init__(config)
        self.trouble = Trouble(config.trouble)
        self.kept_arm: ArmState | None = None

    def _run(self) -> float:
        now = super()._run()
        if self.world is not None:
            self.trouble.force, self.trouble.felt = float(self.world.sense(self.data)[0]), now
        return now

    def read(self) -> ArmState:
        arm = super().read()
        if self.trouble.blind:
            return replace(arm, q=np.full_like(arm.q, np.nan))
        if not self.trouble.frozen or self.kept_arm is None:
            self.kept_arm = arm
        return replace(self.kept_arm, t=arm.t)


@dataclass(frozen=True)
class TroubledDeltaConfig(DeltaConfig):
    trouble: str = ""


class TroubledDelta(CartesianDelta):
    """The usual action space, in a control process with a mistake in it."""

    def __init__(self, config: TroubledDeltaConfig) -> None:
        super().__init__(config)
        self.trouble = Trouble(config.trouble)

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        if self.trouble.broken:
            raise ValueError("broken on purpose")
        return super().__call__(action, q, reference)


@dataclass(frozen=True)
class CameraConfig:
    trouble: str


class TroubledCamera(Source):
    """Grey pictures of 8 x 8, brighter by 1 from one to the next."""

    name = "of the chaos suite"

    def __init__(self, config: CameraConfig) -> None:
        self.trouble, self.grey = Trouble(config.trouble), 0

    def open(self) -> None: ...

    def grab(self) -> Frame:
        time.sleep(0.02)
        if self.trouble.dark:
            raise CameraError(f"camera {self.name} gives no more pictures")
        self.grey = (self.grey + 1) % 200
        return np.full((8, 8, 3), self.grey, np.uint8)

    def close(self) -> None: ...


@dataclass(frozen=True)
class SwayConfig:
    """Settings of a sway along y; actions as shares of the largest."""

    trouble: str
    period: float = 3.0  # s
    reach: float = 0.8
    down: float = 0.0  # presses on what is below all the while
    grip: float = 0.0  # of the hand


class Sway(Policy):
    """Never at rest: the tool goes to and fro for ever."""

    def __init__(self, config: SwayConfig, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec, self.trouble = config, spec, Trouble(config.trouble)

    def initial(self, n: int) -> Tensors:
        return {"steps": torch.zeros(n)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 0)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        turns = carry["steps"] * self.spec.dt / self.config.period
        action = torch.zeros(len(noise), 1, self.spec.act.size)
        action[:, 0, 1] = self.config.reach * torch.cos(2 * math.pi * turns)
        action[:, 0, 2] = -self.config.down
        action[:, 0, -1] = self.config.grip
        if self.trouble.wild:
            action[:, 0, 0] = torch.nan
        return action, {"steps": carry["steps"] + 1}
