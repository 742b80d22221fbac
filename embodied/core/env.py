"""VecEnv: many copies of one world, stepped together, with the true successor at every reset."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, to


class NotSavable(RuntimeError):
    """This environment cannot save its rows exactly; episodes in flight restart on resume."""


class NotFinite(RuntimeError):
    """An environment returned a number that is not finite."""


@dataclass(slots=True)
class Step:
    """What one control step of B rows produced.

    `obs` is what to act on next: rows that ended are already reset in it. `next_obs` is the true
    successor of the action, also for rows that ended: bootstrap only from it. The two share memory
    where no row ended. `terminated` means that the future is worth nothing (failure, success, a
    fall); `truncated` means that the clock ran out, and the value of `next_obs` still counts. At
    most one of them is true. `log` holds [B] tensors for people and evaluation; `log["success"]`
    (bool) is true in the step in which the task is achieved, where the world knows it.
    """

    obs: Tensors
    next_obs: Tensors
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    log: Tensors

    def to(self, device: torch.device) -> Step:
        """The same step on another device."""
        obs = to(self.obs, device)
        following = obs if self.next_obs is self.obs else to(self.next_obs, device)
        flags = (self.terminated.to(device), self.truncated.to(device))
        return Step(obs, following, self.reward.to(device), *flags, to(self.log, device))

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


class VecEnv(ABC):
    """B copies of a world, behind tensors on `device`.

    Rows reset themselves inside `step` when they end (a new start, a new task, from the row's own
    random generator), so that the caller never waits for one row. Every row has its own generator:
    a row's episodes depend on the seed and the row number only, not on what other rows do.
    Asymmetric worlds add `critic/...` and `privileged/...` names to the observations.
    """

    spec: Spec
    num_envs: int
    device: torch.device = torch.device("cpu")
    _watchers: tuple[Callable[[Tensor], None], ...] = ()

    @abstractmethod
    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """Begin new episodes in rows `mask` [B] (None: all) and return the observations of all.

        `seed` re-seeds the reset rows (row i from (seed, i)); `task` [B, D] in [0, 1] fixes their
        task vector for this one episode (None: drawn from the row's generator).
        """

    @abstractmethod
    def step(self, action: Tensor) -> Step:
        """Apply `action` [B, A] (float32 in [-1, 1]; int64 [B] where discrete) for `dt` seconds."""

    def get_state(self) -> Tensors:
        """Everything needed to continue every row exactly, [B, ...] leaves, random state included.

        Rows can be picked and copied with `tensors.take`. Raises NotSavable where it cannot.
        """
        raise NotSavable(f"{type(self).__name__} cannot save its state")

    def set_state(self, state: Tensors) -> Tensors:
        """Continue from what `get_state` returned; returns the observations of all rows."""
        raise NotSavable(f"{type(self).__name__} cannot load a state")

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """A picture of one row, uint8 [height, width, 3]."""
        raise NotImplementedError(f"{type(self).__name__} has no camera")

    @property
    def views(self) -> int:
        """V: how many cameras' pictures stand side by side in a photograph."""
        return 1

    def photographs(self, rows: Tensor, size: int) -> Tensor:
        """Pictures of `rows` [n] (int64), as cheap as the world can draw them, uint8
        [n, size, V size, 3]; `render` unless the world knows better."""
        shots = [self.render(int(row), size, size) for row in rows]
        return torch.stack(shots) if shots else torch.empty(0, size, size, 3, dtype=torch.uint8)

    def describe(self, row: int = 0) -> str:
        """One row's state in words, for language models and people."""
        raise NotImplementedError(f"{type(self).__name__} has no text description")

    def before_reset(self, call: Callable[[Tensor], None]) -> None:
        """From now on `step` calls `call(rows)` with the rows [B] (bool) that ended, before it
        begins them again: the last moment in which they can be drawn and described."""
        self._watchers = (*self._watchers, call)

    def leaving(self, rows: Tensor) -> None:
        """For `step`: rows [B] (bool) are about to begin again. Worlds in other processes can't."""
        for call in self._watchers:
            call(rows)

    def close(self) -> None:  # noqa: B027  (most worlds hold nothing)
        """Release threads, processes and windows."""


def require_finite(reward: Tensor, obs: Tensors, name: str) -> None:
    """Raise NotFinite with the row and the leaf when anything that leaves an environment is NaN."""
    for key, value in {"reward": reward, **obs}.items():
        # A sum is NaN or infinite if any element is: one cheap reduction instead of a mask.
        if value.is_floating_point() and not math.isfinite(value.sum().item()):
            bad = ~torch.isfinite(value.flatten(1) if value.ndim > 1 else value[:, None]).all(1)
            if bad.any():
                rows = [int(row) for row in bad.nonzero().flatten()[:5]]
                raise NotFinite(f"{name}: {key} is not finite in rows {rows}; the run stops here")
