"""SubgoalObservation: the observation `subgoal`, which a reward fills with the active subgoal.

    position   the cell relative to the agent: (dx, dy); without a subgoal (0, 0)
    object     its kind, colour and state; without a subgoal (-1, -1, -1)
    language   the vector [384] of its sentence (`embodied.nn.sentences`); without a subgoal zeros

The encodings of Words as Beacons (Ruiz-Gonzalez et al., 2024). The environment by itself never
names a subgoal, so that a policy is evaluated and deployed without one; `reward=subgoal_bonus`
names them while it trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from embodied.core.env import SUBGOAL, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.envs.wrappers.stack import EpisodeWrapper
from embodied.nn.sentences import SIZE

WIDTH = {"position": 2, "object": 3, "language": SIZE}
NULL = {"position": 0.0, "object": -1.0, "language": 0.0}


@dataclass(frozen=True)
class Config:
    """Settings of the subgoal's observation."""

    kind: Literal["position", "object", "language"] = "language"  # encoding; the reward's kind


class SubgoalObservation(EpisodeWrapper):
    """Adds `subgoal` [B, n] (float32), the null code of its kind."""

    def __init__(self, config: Config, env: VecEnv) -> None:
        width = WIDTH[config.kind]
        super().__init__(env, env.spec.with_obs(**{SUBGOAL: Leaf((width,))}))
        self.subgoal_kind = config.kind
        self.null = torch.full((env.num_envs, width), NULL[config.kind], device=env.device)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**obs, SUBGOAL: self.null}
