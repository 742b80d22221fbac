"""GymGoals: the goals of a Gymnasium environment with the interface GoalEnv.

Source: the robotics environments of Plappert et al. (2018), Gymnasium-Robotics. The observation is
a Dict with `achieved_goal` and `desired_goal`, and the environment has

    compute_reward(achieved_goal, desired_goal, info)      a number for each pair of goals
    compute_terminated(achieved_goal, desired_goal, info)  optional: whether the episode ends there

Both may be written for one pair of goals, or for arrays [n, ...] of them. The infos of steps are
not stored: `info` is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.errors import ContractError
from embodied.core.native import NativeLeaf, nested
from embodied.core.tensors import Tensors

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
Parts = list[tuple[tuple[str | int, ...], NDArray[Any]]]
"""Arrays [n, ...] by their path below `achieved_goal` or `desired_goal`."""


class GymGoals:
    """A GoalSpace that asks `env`, whose observations are `entries`; `name` is for messages."""

    def __init__(self, env: gymnasium.Env[Any, Any], entries: Sequence[NativeLeaf], name: str):
        found = {
            key: {entry.path[1:]: entry for entry in entries if entry.path[:1] == (key,)}
            for key in (ACHIEVED, DESIRED)
        }
        for key, parts in found.items():
            if not parts:
                raise ConfigError(
                    f"{name} has no goals that could be replaced: its observation has no {key} "
                    "(a Dict with observation, achieved_goal and desired_goal)"
                )
        achieved, desired = found.values()
        if {path: _kind(entry) for path, entry in achieved.items()} != {
            path: _kind(entry) for path, entry in desired.items()
        }:
            raise ConfigError(
                f"{name} has no goals that could be replaced: the spaces of achieved_goal and "
                "desired_goal differ"
            )
        self.pairs = [(entry, desired[path]) for path, entry in achieved.items()]
        self.leaves = tuple(entry.name for pair in self.pairs for entry in pair)
        reward = _Asked.of(env, "compute_reward", name)
        if reward is None:
            raise ConfigError(
                f"{name} has no goals that could be replaced: it has no "
                "compute_reward(achieved_goal, desired_goal, info)"
            )
        self.reward = reward
        self.terminated = _Asked.of(env, "compute_terminated", name)

    def reached(self, obs: Tensors) -> Tensors:
        return {desired.name: obs[achieved.name] for achieved, desired in self.pairs}

    def replaced(self, obs: Tensors, goals: Tensors) -> Tensors:
        return {**obs, **goals}

    def outcome(self, next_obs: Tensors) -> tuple[Tensor, Tensor | None]:
        achieved, desired = (
            [(entry.path[1:], entry.restored(next_obs[entry.name].numpy())) for entry in entries]
            for entries in zip(*self.pairs, strict=True)
        )
        reward = torch.from_numpy(self.reward(achieved, desired)).float()
        if self.terminated is None:
            return reward, None
        return reward, torch.from_numpy(self.terminated(achieved, desired)) != 0


def _kind(entry: NativeLeaf) -> tuple[Any, ...]:
    return entry.shape, entry.leaf.dtype, entry.axes, entry.scale, entry.offset


class _Asked:
    """`function(achieved_goal, desired_goal, info)` of an environment, for n pairs of goals.

    The first pairs are asked for one by one and all at once; where the answers agree, later ones
    are asked for at once.
    """

    def __init__(self, function: Callable[..., Any], called: str) -> None:
        self.function = function
        self.called = called  # the function in messages
        self.takes_all: bool | None = None  # whether it takes arrays of goals; None: not known

    @classmethod
    def of(cls, env: gymnasium.Env[Any, Any], method: str, name: str) -> _Asked | None:
        """The method of `env`, which may be inside of wrappers; None if there is none."""
        try:
            return cls(env.get_wrapper_attr(method), f"{name}: {method}")
        except AttributeError:
            return None

    def __call__(self, achieved: Parts, desired: Parts) -> NDArray[np.float64]:
        count = len(achieved[0][1])
        if self.takes_all:
            answer = self._all(achieved, desired, count)
            if answer is not None:
                return answer
        pairs = ((_at(achieved, place), _at(desired, place)) for place in range(count))
        answers = np.array([self._one(*pair) for pair in pairs])
        if self.takes_all is None and count > 1:
            answer = self._all(achieved, desired, count)
            self.takes_all = answer is not None and np.allclose(answer, answers, equal_nan=True)
            if answer is not None and self.takes_all:
                return answer  # rounded as all later ones: a resumed run is the same
        return answers

    def _one(self, achieved: Any, desired: Any) -> float:
        try:
            answer = self.function(achieved, desired, {})
        except Exception as error:  # the code is the user's
            text = " ".join(str(error).split())
            raise ContractError(
                f"{self.called} raised {type(error).__name__}: {text} (achieved_goal is "
                f"{_shape(achieved)}, desired_goal {_shape(desired)}, info empty: it is asked "
                "about stored steps)"
            ) from error
        if np.size(answer) != 1:
            raise ContractError(
                f"{self.called} returned {_shape(answer)} for one pair of goals, should be a number"
            )
        return float(np.asarray(answer, np.float64).reshape(()))

    def _all(self, achieved: Parts, desired: Parts, count: int) -> NDArray[np.float64] | None:
        """The answers for all pairs at once; None where it is written for one."""
        infos: list[dict[str, Any]] = [{} for _ in range(count)]
        try:
            answer = np.asarray(self.function(nested(achieved), nested(desired), infos), np.float64)
        except Exception:  # any, of code that does not expect arrays
            return None
        return answer if answer.shape == (count,) else None


def _at(parts: Parts, place: int) -> Any:
    return nested([(path, values[place]) for path, values in parts])


def _shape(value: Any) -> str:
    return f"an array {list(np.shape(value))}" if np.ndim(value) else type(value).__name__
