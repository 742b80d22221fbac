"""A Gymnasium environment with one mistake each, as users make them; `Sound` has none."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Sound(gym.Env[Any, Any]):
    """A point that is pushed to the origin."""

    observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.age = self.np_random.uniform(-1, 1, 2), 0
        return self.observe(), {}

    def observe(self) -> Any:
        return self.place.astype(np.float32)

    def reward(self) -> Any:
        return -float(np.linalg.norm(self.place))

    def step(self, action: Any) -> Any:
        self.place = np.clip(self.place + 0.1 * action, -10, 10)
        self.age += 1
        return self.observe(), self.reward(), False, self.age >= 20, {}


def wrong(name: str, **parts: Any) -> type[Sound]:
    """`Sound` with a method of another kind."""
    return type(name, (Sound,), {"__module__": __name__, **parts})


RewardArray = wrong("RewardArray", reward=lambda self: np.array([-1.0]))
RewardColumn = wrong("RewardColumn", reward=lambda self: np.array([[-1.0]]))
RewardNan = wrong("RewardNan", reward=lambda self: float("nan"))
RewardNone = wrong("RewardNone", reward=lambda self: None)
RewardText = wrong("RewardText", reward=lambda self: "much")
ObsNan = wrong("ObsNan", observe=lambda self: np.array([np.nan, 0], np.float32))
ObsShape = wrong("ObsShape", observe=lambda self: np.zeros(3, np.float32))
ObsDouble = wrong("ObsDouble", observe=lambda self: self.place)
ObsWhole = wrong("ObsWhole", observe=lambda self: (10 * self.place).astype(np.int64))
# A picture in [0, 1] where bytes are declared: all of it would become 0.
ObsUnit = wrong(
    "ObsUnit",
    observation_space=gym.spaces.Box(0, 255, (20, 20, 3), np.uint8),
    observe=lambda self: np.full((20, 20, 3), 0.5),
)
ObsChoice = wrong(
    "ObsChoice",
    observation_space=gym.spaces.MultiDiscrete([3, 3]),
    observe=lambda self: np.array([7, 1]),
)
# A picture whose space does not tell that it is one.
Bright = wrong(
    "Bright",
    observation_space=gym.spaces.Box(-1, 1, (40, 40, 3), np.float32),
    observe=lambda self: np.clip(np.full((40, 40, 3), self.place[0], np.float32), -1, 1),
)


class OldStep(Sound):
    def step(self, action: Any) -> Any:
        obs, reward, _, ended, info = super().step(action)
        return obs, reward, ended, info


class OldReset(Sound):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class Unseeded(Sound):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.place, self.age = np.random.uniform(-1, 1, 2), 0
        return self.observe(), {}


class Random(Sound):
    """Draws from a generator that no seed reaches in each step."""

    def step(self, action: Any) -> Any:
        self.place = self.place + np.random.uniform(-0.1, 0.1, 2)
        return super().step(action)


class NoSpaces(gym.Env[Any, Any]):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}


class NoSeed(Sound):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


for _kind in (Sound, NoSpaces, *Sound.__subclasses__()):
    gym.register(f"{_kind.__name__}-v0", entry_point=f"{__name__}:{_kind.__name__}")
