"""An environment with one mistake each, as users make them; `Plane` itself is sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf, Spec


@dataclass(frozen=True)
class Config:
    num_envs: int = 4
    horizon: int = 10


class Plane(VecEnv):
    """Push a point to the origin; an episode ends after `horizon` steps."""

    act = Leaf((2,), low=-1.0, high=1.0)
    task: Leaf | None = None

    def __init__(self, config: Config) -> None:
        self.num_envs, self.horizon = config.num_envs, config.horizon
        self.spec = Spec({"state": Leaf((2,))}, self.act, dt=0.1, task=self.task)
        self.generators = [torch.Generator() for _ in range(self.num_envs)]
        self.age = torch.zeros(self.num_envs, dtype=torch.int64)
        self.position = torch.zeros(self.num_envs, 2)

    def begin(self, index: int) -> torch.Tensor:
        return torch.rand(2, generator=self.generators[index]) * 10 - 5

    def reset(self, seed: int | None = None, task: Any = None, mask: Any = None) -> Any:
        self.position, self.age = self.position.clone(), self.age.clone()
        for index in range(self.num_envs) if mask is None else mask.nonzero().flatten().tolist():
            if seed is not None:
                self.generators[index].manual_seed(seed * 10_007 + index)
            self.position[index], self.age[index] = self.begin(index), 0
        return {"state": self.position}

    def step(self, action: torch.Tensor) -> Step:
        following = self.position + 0.2 * self.bounded(action)
        self.age = self.age + 1
        over = self.age >= self.horizon
        self.position = self.after(following, over)
        obs, never = {"state": self.position}, torch.zeros_like(over)
        reward = -following.norm(dim=1)
        return self.changed(Step(obs, {"state": following}, reward, never, over, {}))

    def changed(self, step: Step) -> Step:
        """What a wrong one makes of a step."""
        return step

    def bounded(self, action: torch.Tensor) -> torch.Tensor:
        return action.clamp(-1, 1)

    def after(self, following: torch.Tensor, over: torch.Tensor) -> torch.Tensor:
        begun = following.clone()
        for index in over.nonzero().flatten().tolist():
            begun[index], self.age[index] = self.begin(index), 0
        return begun


class PlaneAndClock(Plane):
    """Sound, with an observation that has no dimensions of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.spec = self.spec.with_obs(clock=Leaf((), "int64", 0, 10))

    def reset(self, seed: int | None = None, task: Any = None, mask: Any = None) -> Any:
        return super().reset(seed, task, mask) | {"clock": self.age.clone()}

    def step(self, action: torch.Tensor) -> Step:
        age = self.age + 1
        step = super().step(action)
        obs, following = step.obs | {"clock": self.age.clone()}, step.next_obs | {"clock": age}
        return replace(step, obs=obs, next_obs=following)


def wrong(name: str, **parts: Any) -> type[Plane]:
    """`Plane` with other methods or attributes."""
    return type(name, (Plane,), {"__module__": __name__, **parts})


def changed(name: str, **leaves: Callable[[Step], Any]) -> type[Plane]:
    """`Plane` with steps that have other leaves."""

    def change(self: Plane, step: Step) -> Step:
        return replace(step, **{leaf: make(step) for leaf, make in leaves.items()})

    return wrong(name, changed=change)


def always(step: Step) -> torch.Tensor:
    return torch.ones_like(step.truncated)


RewardColumn = changed("RewardColumn", reward=lambda step: step.reward[:, None])
RewardDouble = changed("RewardDouble", reward=lambda step: step.reward.double())
ObsDouble = changed("ObsDouble", obs=lambda step: {"state": step.obs["state"].double()})
FlagsAsNumbers = changed("FlagsAsNumbers", truncated=lambda step: step.truncated.float())
NanReward = changed("NanReward", reward=lambda step: (step.reward - step.reward) / 0.0)
NoSuccessor = changed("NoSuccessor", next_obs=lambda step: step.obs)
Both = changed("Both", terminated=always, truncated=always)
NanObs = wrong("NanObs", begin=lambda self, index: torch.full((2,), torch.nan))
Unseeded = wrong("Unseeded", begin=lambda self, index: torch.rand(2) * 10 - 5)
OneEpisode = wrong("OneEpisode", begin=lambda self, index: torch.ones(2))
NoAutoreset = wrong("NoAutoreset", after=lambda self, following, over: following)
Unbounded = wrong("Unbounded", bounded=lambda self, action: action)
OwnUnits = wrong("OwnUnits", act=Leaf((2,), low=-2.0, high=2.0))
NoTask = wrong("NoTask", task=Leaf((2,), low=0.0, high=1.0))  # declares a task and ignores it
Raises = wrong("Raises", step=lambda self, action: Plane.step(self, action.view(-1, 7)))


class ResetDouble(Plane):
    def reset(self, seed: int | None = None, task: Any = None, mask: Any = None) -> Any:
        return {"state": super().reset(seed)["state"].double()}


class NoMask(Plane):
    """Begins new episodes everywhere."""

    def reset(self, seed: int | None = None, task: Any = None, mask: Any = None) -> Any:
        return super().reset(seed)


class ClocksUnmasked(Plane):
    """Sets the clocks of all envs back, which no observation shows."""

    def reset(self, seed: int | None = None, task: Any = None, mask: Any = None) -> Any:
        obs = super().reset(seed, task, mask)
        self.age = torch.zeros_like(self.age)
        return obs


class SeedsUnmasked(Plane):
    """Seeds nothing where only some envs begin anew."""

    def reset(self, seed: int | None = None, task: Any = None, mask: Any = None) -> Any:
        return super().reset(seed if mask is None else None, task, mask)


class Endless(Plane):
    def __init__(self, config: Config) -> None:
        super().__init__(replace(config, horizon=10**9))


class OtherName(Plane):
    def reset(self, seed: int | None = None, task: Any = None, mask: Any = None) -> Any:
        return {"observation": super().reset(seed)["state"]}


class SameBuffer(Plane):
    """Returns the same tensor at each step, changed in place."""

    def after(self, following: torch.Tensor, over: torch.Tensor) -> torch.Tensor:
        return self.position.copy_(super().after(following, over))
