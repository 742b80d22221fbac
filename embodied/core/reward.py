"""Reward: a number for every row, from anything that can look at rows."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors


class Reward(Protocol):
    """Applied by `Relabel` only: at storing time if `frozen`, at sampling time if it learns.

    One that looks at more than the policy does is `Watching` too, one that needs to know of every
    step `Noting`, one that depends on how far training is `Clocked`, one that has something to
    remember for a resume `Kept`, and one whose parts are worth a plot each `Termed`.
    """

    frozen: bool

    def __call__(self, rows: Tensors) -> Tensor:
        """Rewards [N] (float32) of rows with `obs/*`, `action`, `next_obs/*`, `reward`."""
        ...

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """Learn from rows; returns metrics."""
        ...


@runtime_checkable
class Watching(Protocol):
    """A reward that looks at what policies do not: pictures or sentences of a world of states."""

    def watch(self, env: VecEnv) -> VecEnv:
        """The same world with what it looks at as further `privileged/*` observations. Training
        runs in it; policy and learner are made for the world as it was."""
        ...


@runtime_checkable
class Noting(Protocol):
    """A reward that keeps experience of its own: what to compare, to label, to learn from."""

    def note(self, rows: Tensors, who: Tensor, step: Step) -> None:
        """`rows` [n] that became complete in `step`, before they are rewarded and stored; `who` [n]
        (int64) are their environments, so that `step.ended[who]` says which are an episode's last
        and `step.log["success"][who]` which succeeded."""
        ...


@runtime_checkable
class Clocked(Protocol):
    """A reward that changes with the steps of training."""

    def at(self, step: int) -> None:
        """`step` environment steps are done; told before rows are stored or sampled."""
        ...


@runtime_checkable
class Kept(Protocol):
    """A reward with a state of its own, for an exact resume."""

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Termed(Protocol):
    """A reward made of parts that are worth a look of their own."""

    def terms(self, rows: Tensors) -> dict[str, Tensor]:
        """Each part by name, [N] (float32) of the same rows, as it counts: weighted."""
        ...
