"""A point on a line that has to be pushed to one side, and policies whose remedy is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors

FAR = 3.0


@dataclass(frozen=True)
class SidesConfig:
    """`sides`: the goal is on the side that is observed, else always above."""

    num_envs: int = 4
    horizon: int = 10
    sides: bool = False
    success: bool = True


class Sides(VecEnv):
    """Reaching 3 on the goal's side is a success with reward 1; 3 on the other side ends the
    episode too. Observed: the side (-1, 1), and a number in [0, 1] that means nothing here."""

    def __init__(self, config: SidesConfig) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.spec = Spec(
            {"state": Leaf((2,), names=("side", "number"))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1
        )
        self.generators = [torch.Generator() for _ in range(config.num_envs)]
        self.state = torch.zeros(config.num_envs, 2)
        self.place = torch.zeros(config.num_envs)
        self.age = torch.zeros(config.num_envs, dtype=torch.int64)

    def begin(self, mask: Tensor) -> None:
        self.state = self.state.clone()
        self.place = self.place * ~mask
        self.age = self.age * ~mask
        for i in mask.nonzero().flatten().tolist():
            side, number = torch.rand(2, generator=self.generators[i])
            self.state[i, 0] = -1.0 if self.config.sides and side < 0.5 else 1.0
            self.state[i, 1] = number

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        chosen = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        if seed is not None:
            for i in chosen.nonzero().flatten().tolist():
                self.generators[i].manual_seed(1000 * seed + i)
        self.begin(chosen)
        return {"state": self.state}

    def step(self, action: Tensor) -> Step:
        self.place = self.place + action[:, 0]
        self.age = self.age + 1
        reached = self.place * self.state[:, 0]
        won = reached >= FAR
        over = won | (reached <= -FAR)
        late = (self.age >= self.config.horizon) & ~over
        following = {"state": self.state}
        if (over | late).any():
            self._notify_before_reset(over | late)
            self.begin(over | late)
        log = {"success": won} if self.config.success else {}
        return Step({"state": self.state}, following, won.float(), over, late, log)

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        level = int(20 * (self.place[row] + 6))
        return torch.full((height, width, 3), level, dtype=torch.uint8)


@dataclass(frozen=True)
class PusherConfig:
    """`kind`: how it chooses its push; `chunk`: steps of one push."""

    kind: Literal["coin", "number", "wrong", "slow", "dice"]
    chunk: int = 4


class Pusher(Policy):
    """`coin` pushes by the sign of its noise, `dice` in the same way but by noise that it does not
    offer, `number` upwards where the number is above 1/2, `wrong` downwards, `slow` up slowly."""

    def __init__(self, config: PusherConfig, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.kind = config.kind
        self.chunk = config.chunk

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, 1) if self.kind == "coin" else torch.zeros(n, 0)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        number = obs["state"][:, 1]
        push = {
            "coin": lambda: noise[:, 0].sign(),
            "dice": lambda: torch.randn(len(number)).sign(),
            "number": lambda: (number > 0.5).float(),
            "wrong": lambda: -torch.ones_like(number),
            "slow": lambda: torch.full_like(number, 0.25),
        }[self.kind]()
        return push[:, None, None].expand(-1, self.chunk, 1), carry
