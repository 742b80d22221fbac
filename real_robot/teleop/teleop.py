"""Teleoperation: a person drives the arm, or takes over from a policy.

A device reports how it is held. `Teleoperator` turns that into actions, by the names of the action
space, and serves as a policy (demonstrations) and as an intervener (corrections,
`embodied.policies.scripted.intervener`). A person is in control while they hold the device, and for
`linger` s afterwards; a disconnected gamepad or SpaceMouse counts as not held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from embodied.core.bounds import Bound, PositiveFraction
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, length
from embodied.policies.scripted.intervener import Intervener
from embodied.real_robot.teleop.hold_to_run import Key

MOTION = ("dx", "dy", "dz", "roll", "pitch", "yaw")
GRIPPER = "gripper"
OPEN = 1.0


@dataclass(frozen=True)
class Held:
    """`motion` [6] in [-1, 1] as `MOTION` says; `grip`: -1 close, 1 open, 0 as it was; `touched`:
    a person holds it (a button that has to be kept down, where it has one)."""

    motion: tuple[float, float, float, float, float, float]
    grip: float
    touched: bool


NO_INPUT = Held((0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, False)


class Device(Protocol):
    """A device never waits, and never raises once it was opened. `reads_terminal`: the
    terminal's keys are its own, those of the episode among them."""

    reads_terminal = False
    key: Key = ""

    def read(self, tool: tuple[float, float, float] | None) -> Held:
        """The motion of the device now; `tool` (m): the place of the arm's tool, if known."""
        ...

    def pressed(self) -> Key:
        """The newest key of the episode since the last call, where the device has such keys."""
        key = self.key
        self.key = ""
        return key

    def close(self) -> None: ...


@dataclass(frozen=True)
class Config:
    """Settings of a person who moves the arm."""

    device: Node  # node of embodied.real_robot.teleop.devices
    linger: Annotated[float, Bound(0.0, 3600.0)] = 0.3  # s until the person has let go
    speed: PositiveFraction = 1.0  # largest action


class Teleoperator(Policy):
    """A person who moves one arm: batches have one environment. `carry["row/intervened"]` says
    whether the step was theirs."""

    def __init__(
        self,
        config: Config,
        spec: Spec,
        num_envs: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        if num_envs != 1:
            raise ConfigError("teleoperation drives one arm: num_envs=1")
        names = spec.act.names
        if unknown := [name for name in names if name not in (*MOTION, GRIPPER)]:
            raise ConfigError(f"{unknown[0]} cannot be teleoperated (only {', '.join(MOTION)})")
        if not names:
            raise ConfigError("the actions have no names, so a device cannot be mapped to them")
        self.config = config
        self.spec = spec
        self.chunk = 1
        self.clock = clock
        self.device = build(config.device, Device)
        self.grip = OPEN
        self.until = -1.0
        self.held = NO_INPUT

    def initial(self, n: int) -> Tensors:
        return {"row/intervened": torch.zeros(n, dtype=torch.bool)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 0)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        if length(obs) != 1:
            raise ConfigError("teleoperation drives one arm: num_envs=1")
        over = self._look(obs)
        return self._action()[None, None], {"row/intervened": torch.tensor([over])}

    def over(self, obs: Tensors, first: Tensor) -> Tensor:
        """Whether the arm is in the person's hand [1]."""
        return torch.tensor([self._look(obs)])

    def taken(self, obs: Tensors) -> Tensor:
        self._look(obs)
        return self._action()[None]

    def _look(self, obs: Tensors) -> bool:
        now = self.clock()
        self.held = self.device.read(self._tool(obs))
        if self.held.touched:
            self.until = now + self.config.linger
        if self.held.grip:
            self.grip = self.held.grip
        return self.held.touched or now < self.until

    def _action(self) -> Tensor:
        values = dict(zip(MOTION, self.held.motion, strict=True))
        if not self.held.touched:
            values = dict.fromkeys(MOTION, 0.0)
        most = self.config.speed
        moves = {name: max(-most, min(most, value)) for name, value in values.items()}
        return torch.tensor([{**moves, GRIPPER: self.grip}[name] for name in self.spec.act.names])

    def _tool(self, obs: Tensors) -> tuple[float, float, float] | None:
        leaf = self.spec.obs.get("state")
        names = () if leaf is None else leaf.names
        if "tool_x" not in names:
            return None
        state = obs["state"][0]
        x, y, z = (float(state[names.index(f"tool_{axis}")]) for axis in "xyz")
        return x, y, z


class TeleopIntervener(Intervener):
    """A `Teleoperator` as embodied.policies.scripted.intervener asks for one. As in `takeover`, the
    hand's command is the policy's while the policy has the arm, so that taking over does not drop
    what it holds."""

    def __init__(
        self, config: Config, spec: Spec, num_envs: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.person = Teleoperator(config, spec, num_envs, clock)
        names = spec.act.names
        self.gripper = names.index(GRIPPER) if GRIPPER in names else None
        self.has_arm = False

    def over(self, obs: Tensors, first: Tensor) -> Tensor:
        if bool(first[0]):
            self.person.grip = OPEN
        taken = self.person.over(obs, first)
        self.has_arm = bool(taken)
        return taken

    def executed(self, action: Tensor) -> None:
        if self.gripper is not None and not self.has_arm:
            self.person.grip = float(action[0, self.gripper].clamp(-1.0, 1.0))

    def act(self, obs: Tensors, first: Tensor) -> Tensor:
        return self.person.taken(obs)

    def close(self) -> None:
        self.person.device.close()
