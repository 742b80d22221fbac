"""Still: moves nothing, as what stands behind a person who drives the arm all the time.

Shown: does what an environment's own oracle would do, which it shows to demonstrators only.

TwoGapDemonstrator: each of the gaps of env=two_gap equally often, with noise.

FlyTo: flies a quadrotor straight to the goal at a bounded speed and holds position.

    a = k (goal - place - lead), shortened to length 1

An action moves `lead`, the offset of the set-point from the drone.

Lap: drives a race car slowly through the waypoints.

Free: backs a race car away from a wall, with one random steering angle per recovery (FastRLAP).

CheckpointDemonstrator: a trained checkpoint as a demonstrator, with optional action noise.

With probability `random` a decision is uniform, else it is clip(a + noise e, -1, 1), e ~ N(0, I).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.bounds import Bound, Fraction, NonNegative, Positive
from embodied.core.build import ConfigError, nearest
from embodied.core.policy import Policy
from embodied.core.spec import DEMONSTRATOR, Spec
from embodied.core.tensors import Tensors, length


class Script(Policy):
    """Base class of scripts. Noise [n, width] is standard normal, or `uniform` in [0, 1)."""

    config: Any
    width = 0
    uniform = False

    def __init__(self, config: Any, spec: Spec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        make = torch.rand if self.uniform else torch.randn
        return make(n, self.width)


@dataclass(frozen=True)
class StillConfig:
    """Nothing."""


class Still(Script):
    """Zeros, whatever it sees."""

    def __init__(self, config: StillConfig, spec: Spec) -> None:
        super().__init__(config, spec)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        return torch.zeros(length(obs), 1, self.spec.act.size), carry


@dataclass(frozen=True)
class ShownConfig:
    """Settings of a policy that plays the oracle's action."""

    unsteady: NonNegative = 0.0  # standard deviation of the noise on each action


class Shown(Script):
    """The action in the observation `privileged/demonstrator`; noise is added to it."""

    def __init__(self, config: ShownConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        self.width = spec.act.size
        if DEMONSTRATOR not in spec.obs:
            raise ConfigError(
                "this environment shows no oracle; OGBench's does with env.play=true, and the "
                "point's with env.env.play=true"
            )

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        return (obs[DEMONSTRATOR] + self.config.unsteady * noise).clamp(-1, 1)[:, None], carry


BEFORE = 0.42
BEHIND = 0.56
GAPS = (0.25, 0.75)
GOAL = (0.95, 0.5)


@dataclass(frozen=True)
class TwoGapConfig:
    """Settings of the demonstrator."""

    unsteady: NonNegative = 0.25  # standard deviation of the noise on its velocity
    gaps: tuple[Fraction, ...] = GAPS  # heights of the gaps


class TwoGapDemonstrator(Script):
    """Noise: the choice of the gap (once an episode), and what is added to x and y."""

    width = 3

    def __init__(self, config: TwoGapConfig, spec: Spec) -> None:
        super().__init__(config, spec)

    def initial(self, n: int) -> Tensors:
        return {"gap": torch.zeros(n)}

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        gaps = torch.tensor(self.config.gaps)
        choice = gaps[
            (torch.special.ndtr(-noise[:, 0]) * len(gaps)).long().clamp(max=len(gaps) - 1)
        ]
        gap = torch.where(carry["gap"] == 0, choice, carry["gap"])
        x, y = obs["state"].unbind(1)
        lined_up = (y - gap).abs() < 0.04
        entrance = torch.stack([torch.full_like(x, BEFORE), gap], 1)
        through = torch.stack([torch.full_like(x, BEHIND + 0.04), gap], 1)
        aim = torch.where((lined_up | (x > BEFORE + 0.02))[:, None], through, entrance)
        aim = torch.where((x > BEHIND)[:, None], torch.tensor(GOAL), aim)
        way = (aim - obs["state"]) / 0.05
        way = way / way.norm(dim=1, keepdim=True).clamp(min=1)
        return (way + self.config.unsteady * noise[:, 1:]).clamp(-1, 1)[:, None], {"gap": gap}


WHAT = ("goal", "tool", "lead")


@dataclass(frozen=True)
class FlyToConfig:
    """Settings of the flight to the goal."""

    gain: Positive = 4.0  # an action is gain times the distance, at most 1 (1/m)


class FlyTo(Script):
    """For actions vx, vy, vz and a `state` with the elements goal_x, tool_x, lead_x, ..."""

    def __init__(self, config: FlyToConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        if spec.act.names[:3] != ("vx", "vy", "vz") or spec.act.size != 3:
            raise ConfigError(
                f"FlyTo needs the actions vx, vy, vz, got {', '.join(spec.act.names)}"
            )
        names = spec.obs["state"].names if "state" in spec.obs else ()
        wanted = [f"{what}_{axis}" for what in WHAT for axis in "xyz"]
        for name in wanted:
            if name not in names:
                raise ConfigError(f"FlyTo needs the state element {name}{nearest(name, names)}")
        self.places = [names.index(name) for name in wanted]

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        goal, tool, lead = obs["state"][:, self.places].split(3, 1)
        way = self.config.gain * (goal - tool - lead)
        return (way / way.norm(dim=1, keepdim=True).clamp(min=1.0))[:, None], carry


@dataclass(frozen=True)
class LapConfig:
    """Settings of the lap driver."""

    throttle: Annotated[float, Bound(-1.0, 1.0)] = 0.0  # of the whole lap
    gain: NonNegative = 1.6  # steering per bearing of the goal, 1/rad
    unsteady: NonNegative = 0.1  # standard deviation of the noise on throttle and steering


class Lap(Script):
    """Drives towards the goal at constant speed. Noise is that of steering and throttle."""

    width = 2

    def __init__(self, config: LapConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        names = spec.obs["state"].names
        if not {"goal_ahead", "goal_left"} <= {*names}:
            raise ConfigError("Lap needs the state elements goal_ahead and goal_left; set env=race")
        self.index = [names.index(name) for name in ("goal_ahead", "goal_left")]

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        ahead, left = obs["state"][:, self.index].unbind(1)
        steer = self.config.gain * torch.atan2(left, ahead)
        action = torch.stack([steer, torch.full_like(steer, self.config.throttle)], 1)
        return (action + self.config.unsteady * noise).clamp(-1, 1)[:, None], carry


@dataclass(frozen=True)
class FreeConfig:
    """Recovery drives backwards at full throttle."""


class Free(Script):
    """Drives backwards at full throttle; the noise of its first step sets the steering."""

    width = 1
    uniform = True

    def __init__(self, config: FreeConfig, spec: Spec) -> None:
        super().__init__(config, spec)

    def initial(self, n: int) -> Tensors:
        return {"steer": torch.full((n,), torch.nan)}

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        drawn = 2 * noise[:, 0] - 1
        steer = torch.where(carry["steer"].isnan(), drawn, carry["steer"])
        return torch.stack([steer, -torch.ones_like(steer)], 1)[:, None], {"steer": steer}


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of a demonstrator from a run."""

    run: str  # a run or checkpoint folder
    explore: bool = False  # act with exploration noise
    noise: NonNegative = 0.0  # std of added noise, of half the action range
    random: Fraction = 0.0  # share of uniform decisions
    settings: Mapping[str, Any] = field(default_factory=dict)  # other settings of the policy


class CheckpointDemonstrator(Policy):
    """Noise [n, D]: the policy's own, flat; what is added to its actions; whether a decision is
    uniform, and if so which."""

    def __init__(self, config: CheckpointConfig, spec: Spec) -> None:
        super().__init__()
        if not spec.act.is_continuous and (config.noise or config.random):
            raise ConfigError("noise and random need continuous actions")
        base = checkpoint.load_policy(config.run, spec)
        settings = config.settings
        self.base = checkpoint.with_settings(base, settings, config.run) if settings else base
        self.spec = spec
        self.chunk = self.base.chunk
        self.config = config
        self.size = self.chunk * spec.act.size
        self.shape = self.base.sample_noise(1).shape[1:]

    def initial(self, n: int) -> Tensors:
        return self.base.initial(n)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        own = self.base.sample_noise(n, self.config.explore).flatten(1)
        added = torch.randn(n, self.size, device=own.device)
        uniform = torch.rand(n, self.size + 1, device=own.device)
        return torch.cat([own.float(), added, uniform], 1)

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        return self.base.observe(obs, carry, self._own(noise))

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        action, carry = self.base.act(obs, carry, self._own(noise))
        if not (self.config.noise or self.config.random):
            return action, carry
        added, uniform = noise[:, -2 * self.size - 1 :].split([self.size, self.size + 1], 1)
        noisy = (action + self.config.noise * added.view_as(action)).clamp(-1, 1)
        lost = uniform[:, 0] < self.config.random
        blind = (2 * uniform[:, 1:] - 1).view_as(action)
        return torch.where(lost.view(-1, *[1] * (action.ndim - 1)), blind, noisy), carry

    def _own(self, noise: Tensor) -> Tensor:
        return noise[:, : -2 * self.size - 1].view(-1, *self.shape)
