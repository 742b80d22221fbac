"""Actuators: actions arrive turned, scaled and shifted, by numbers that only simulation knows.

    applied = R(turn) (gain * a) + offset,     gain, offset and turn constant for an episode

Domain randomization (Tobin et al., 2017; Peng et al., 2018) of what is between a policy and what
it moves: weak motors, a push, a frame that is not aligned. `privileged/actuators` has the numbers,
for critics, for teachers and for what learns to read them from the past (`learner=hib`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Number
from embodied.core.build import ConfigError
from embodied.core.env import StateRoles, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.envs.batched import turned_by
from embodied.envs.row_rng import RowRng
from embodied.envs.wrappers.stack import EpisodeWrapper

Range = tuple[Number, Number]  # lowest and highest, of a uniform distribution
LEAF = "privileged/actuators"


@dataclass(frozen=True)
class Config:
    """Ranges of the numbers that are drawn for each episode."""

    gain: Range = (1.0, 1.0)  # factor of each element of the action
    offset: Range = (0.0, 0.0)  # added to each element
    turn: Range = (0.0, 0.0)  # angle by which the first two elements are turned, rad


class Actuators(EpisodeWrapper):
    """`memory["drawn"]` [B, 2 A + 1]: gain and offset of each element, and the angle."""

    memory_roles = StateRoles(generators={"generator": None})

    def __init__(self, config: Config, env: VecEnv) -> None:
        act = env.spec.act
        size = act.size
        if not act.is_continuous:
            raise ConfigError("Actuators needs continuous actions")
        if size < 2 and any(config.turn):
            raise ConfigError("Actuators: actions of one element cannot be turned; leave turn out")
        for name, (low, high) in vars(config).items():
            if low > high:
                raise ConfigError(f"Actuators: {name}=[{low:g}, {high:g}] needs low <= high")
        each = [f"{name}_{i}" for name in ("gain", "offset") for i in range(size)]
        names = (*each, "cos_turn", "sin_turn")
        super().__init__(env, env.spec.with_obs(**{LEAF: Leaf((len(names),), names=names)}))
        ranges = torch.tensor([config.gain] * size + [config.offset] * size + [config.turn])
        self.low, high = ranges.to(env.device).unbind(1)
        self.span = high - self.low
        self.size = size
        self.streams = RowRng(self.depth << 40, env.num_envs, env.device)
        self.memory["generator"] = self.streams.state
        self.memory["drawn"] = self.low.repeat(env.num_envs, 1)

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        index = rows.nonzero().flatten()
        self.streams.state = self.memory["generator"]
        lots = self.streams.uniform(len(self.low), index).T
        self.memory["drawn"][index] = self.low + self.span * lots

    def send(self, action: Tensor) -> Tensor:
        gain, offset, turn = self.memory["drawn"].split([self.size, self.size, 1], 1)
        sent = gain * self.spec.act.bounded(action).view_as(gain)
        if self.size > 1:
            sent = torch.cat([turned_by(sent[:, :2], turn[:, 0]), sent[:, 2:]], 1)
        return (sent + offset).view_as(action)

    def transform_obs(self, obs: Tensors) -> Tensors:
        drawn = self.memory["drawn"]
        turn = drawn[:, -1:]
        return {**obs, LEAF: torch.cat([drawn[:, :-1], turn.cos(), turn.sin()], 1)}
