"""Small worlds with arithmetic that can be done by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import Tensor

from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.native import NestedAction, nested
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.spaces import action_of


@dataclass(frozen=True)
class Config:
    """Row i starts at i * 100; `ends[i]` (counted in steps) and whether that is a termination."""

    num_envs: int = 2
    ends: tuple[int, ...] = (3, 5)
    terminates: tuple[bool, ...] = (True, False)


class Counter(VecEnv):
    """Observation: a number that grows by one a step; reward: that number before the step."""

    def __init__(self, config: Config) -> None:
        self.num_envs = config.num_envs
        pick = torch.arange(config.num_envs) % len(config.ends)
        self.ends = torch.tensor(config.ends)[pick]
        self.terminates = torch.tensor(config.terminates)[pick]
        act = Leaf((1,), low=-1.0, high=1.0)
        self.spec = Spec({"state": Leaf((1,))}, act, dt=0.1, text="count")
        self.start = 100.0 * torch.arange(config.num_envs)
        self.age = torch.zeros(config.num_envs, dtype=torch.int64)

    def _obs(self) -> Tensors:
        return {"state": (self.start + self.age)[:, None]}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        self.age = self.age * 0 if mask is None else self.age * ~mask
        return self._obs()

    def step(self, action: Tensor) -> Step:
        reward = (self.start + self.age).float()
        self.age = self.age + 1
        following = self._obs()
        ended = self.age >= self.ends
        self.age = self.age * ~ended
        over = ended & self.terminates
        return Step(self._obs(), following, reward, over, ended & ~over, {"success": over})

    def get_state(self) -> Tensors:
        return {"age": self.age.clone()}

    def set_state(self, state: Tensors) -> Tensors:
        self.age = state["age"].clone()
        return self._obs()


class Reach(VecEnv):
    """A point on a plane is pushed towards the origin; reward minus its distance, 20 steps."""

    def __init__(self, num_envs: int = 4) -> None:
        self.num_envs = num_envs
        act = Leaf((2,), low=-1.0, high=1.0)
        self.spec = Spec({"state": Leaf((2,))}, act, dt=0.1, text="go to the origin")
        self.generators = [torch.Generator().manual_seed(i) for i in range(num_envs)]
        self.place = torch.zeros(num_envs, 2)
        self.age = torch.zeros(num_envs, dtype=torch.int64)

    def _draw(self, row: int) -> Tensor:
        return torch.rand(2, generator=self.generators[row]) * 2 - 1

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        rows = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        if seed is not None:
            for row in rows.nonzero().flatten().tolist():
                self.generators[row].manual_seed(seed * 1000 + row)
        self._begin(rows)
        return {"state": self.place}

    def _begin(self, rows: Tensor) -> None:
        self.place, self.age = self.place.clone(), self.age * ~rows
        for row in rows.nonzero().flatten().tolist():
            self.place[row] = self._draw(row)

    def step(self, action: Tensor) -> Step:
        self.place = (self.place + 0.2 * action.clamp(-1, 1)).clamp(-2, 2)
        self.age = self.age + 1
        following, distance = {"state": self.place}, self.place.norm(dim=1)
        ended = self.age >= 20
        if ended.any():
            self._begin(ended)
        never = torch.zeros_like(ended)
        log = {"success": distance < 0.1}
        return Step({"state": self.place}, following, -distance, never, ended, log)

    def get_state(self) -> Tensors:
        states = torch.stack([g.get_state() for g in self.generators])
        return {"place": self.place.clone(), "age": self.age.clone(), "generator": states}

    def set_state(self, state: Tensors) -> Tensors:
        self.place, self.age = state["place"].clone(), state["age"].clone()
        for generator, words in zip(self.generators, state["generator"], strict=True):
            generator.set_state(words.clone())
        return {"state": self.place}


class Forbidden(Exception):
    """A class was chosen that the mask forbids."""


def batched(space: spaces.Space[Any], actions: list[Any]) -> Any:
    """Actions of `space` as one batch, as Gymnasium's vector environments have them."""
    return concatenate(space, actions, create_empty_array(space, len(actions)))


class Lock(gymnasium.Env[Any, Any]):
    """One action of `action_space`, `right`, opens it; the reward is minus the distance to it.

    With `mask`, `action_mask` is in the observation or in the info, one mask for each choice: in
    each step other wrong classes are forbidden, half of them, and choosing one raises Forbidden.
    An episode has 5 steps.
    """

    def __init__(self, space: spaces.Space[Any], mask: Literal["", "obs", "info"] = "") -> None:
        space.seed(1)
        self.action_space, self.mask, self.right = space, mask, space.sample()
        self.act = action_of(space, "lock")
        self.counts = [count for count in self.act.leaf.choices if count]
        parts: dict[str, spaces.Space[Any]] = {"state": spaces.Box(-1, 1, (1,), np.float32)}
        if mask == "obs":
            parts["action_mask"] = spaces.Box(0, 1, (sum(self.counts),), np.int8)
        self.observation_space = spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.age = 0
        return self._shown()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in self.action_space, action
        if self.mask and not self.allowed[self._classes(action)].all():
            raise Forbidden(action)
        self.age += 1
        ours, right = (spaces.flatten(self.action_space, each) for each in (action, self.right))
        obs, info = self._shown()
        return obs, -float(np.abs(ours - right).mean()), False, self.age == 5, info

    def _classes(self, action: Any) -> list[int]:
        """The places of an action's classes in the mask."""
        unit = self.act.unit(batched(self.action_space, [action])).reshape(-1).tolist()
        chosen = [int(k) for k, n in zip(unit, self.act.leaf.choices, strict=True) if n]
        return [k + sum(self.counts[:i]) for i, k in enumerate(chosen)]

    def _shown(self) -> tuple[Any, dict[str, Any]]:
        self.allowed = self.np_random.random(sum(self.counts)) < 0.5
        self.allowed[self._classes(self.right)] = True
        obs: dict[str, Any] = {"state": self.np_random.uniform(-1, 1, 1).astype(np.float32)}
        flat = self.allowed.astype(np.int8)
        if self.mask == "obs":
            obs["action_mask"] = flat
        if self.mask != "info":
            return obs, {}
        if not isinstance(self.act, NestedAction):
            return obs, {"action_mask": tuple(np.split(flat, np.cumsum(self.counts)[:-1]))}
        parts = [(path, sum(part.classes)) for path, part in self.act.parts if part.discrete]
        each = np.split(flat, np.cumsum([size for _, size in parts])[:-1])
        masks = zip([path for path, _ in parts], each, strict=True)
        return obs, {"action_mask": nested(list(masks))}


@dataclass(frozen=True)
class TreeConfig:
    """`rewards`: of sequences of actions, as text ("01"), where the last of them is taken."""

    rewards: dict[str, float]
    length: int = 2
    actions: int = 2
    goal: str = ""
    noise: float = 0.0  # size of a random part of the rewards
    num_envs: int = 8


class Tree(VecEnv):
    """The state is the sequence of actions so far, of `length` at the end; success is the goal."""

    def __init__(self, config: TreeConfig) -> None:
        self.config, self.num_envs = config, config.num_envs
        self.nodes = sum(config.actions**i for i in range(config.length + 1))
        act = Leaf((), "int64", 0, config.actions - 1)
        self.spec = Spec({"state": Leaf((self.nodes,))}, act, dt=0.1, text="find the branch")
        self.node = torch.zeros(self.num_envs, dtype=torch.int64)
        self.age = torch.zeros(self.num_envs, dtype=torch.int64)
        self.random = torch.arange(self.num_envs, dtype=torch.int64)
        self.gains = torch.zeros(self.nodes)
        for path, reward in config.rewards.items():
            self.gains[self._place(path)] = reward

    def _place(self, path: str) -> int:
        node = 0
        for action in path:
            node = node * self.config.actions + int(action) + 1
        return node

    def _obs(self) -> Tensors:
        return {"state": torch.nn.functional.one_hot(self.node, self.nodes).float()}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        kept = torch.zeros_like(self.node, dtype=torch.bool) if mask is None else ~mask
        self.node, self.age = self.node * kept, self.age * kept
        return self._obs()

    def step(self, action: Tensor) -> Step:
        self.node = self.node * self.config.actions + action + 1
        self.age = self.age + 1
        self.random = (self.random * 5 + 1) % 16
        reward = self.gains[self.node] + self.config.noise * self.random
        following, ended = self._obs(), self.age >= self.config.length
        won = ended & (self.node == self._place(self.config.goal))
        self.node, self.age = self.node * ~ended, self.age * ~ended
        return Step(self._obs(), following, reward, ended, ended & False, {"success": won})

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"random": None})

    def get_state(self) -> Tensors:
        return {key: getattr(self, key).clone() for key in ("node", "age", "random")}

    def set_state(self, state: Tensors) -> Tensors:
        self.node, self.age, self.random = (state[k].clone() for k in ("node", "age", "random"))
        return self._obs()
