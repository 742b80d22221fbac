"""A wrapper: wind that pushes the action, and a leaf that shows it to critics."""

from dataclasses import dataclass, replace

import torch

from embodied.core.build import ConfigError
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf
from embodied.core.wrapper import Wrapper
from envs.wrapper import chosen


@dataclass(frozen=True)
class Config:
    force: float = 0.1


class Gusts(Wrapper):
    def __init__(self, config: Config, env: VecEnv) -> None:
        if config.force < 0:
            raise ConfigError("force should be at least 0")
        wind = Leaf((env.spec.act.size,))
        super().__init__(env, env.spec.with_obs(**{"privileged/wind": wind}))
        self.names = chosen(env.spec, None, "Gusts")
        self.force = config.force
        self.memory["age"] = torch.zeros(env.num_envs, dtype=torch.int64)

    def reset(self, seed=None, task=None, mask=None):
        self.memory["age"][self.rows(mask)] = 0
        return self.seen(self.env.reset(seed, task, mask))

    def step(self, action):
        step = self.env.step((action + self._wind()).clamp(-1, 1))
        self.memory["age"] = self.memory["age"] + 1
        following = self.seen(step.next_obs)
        self.memory["age"] = self.memory["age"] * ~step.ended
        return replace(step, obs=self.seen(step.obs), next_obs=following)

    def seen(self, obs):
        return {**{name: obs[name] for name in self.names}, "privileged/wind": self._wind()}

    def _wind(self):
        return self.force * torch.sin(self.memory["age"].float())[:, None].repeat(1, 2)
