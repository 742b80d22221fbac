"""Robot and Filter: what has a wire, and what stands between a policy and it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from torch import Tensor

from embodied.core.spec import Spec
from embodied.core.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Reading:
    """Observations of one robot ([1, ...] leaves) and when they were true (s, monotonic clock)."""

    obs: Tensors
    t: float


class Robot(ABC):
    """An arm behind the Spec of its simulation; leaving the context stops the arm."""

    spec: Spec

    @abstractmethod
    def read(self) -> Reading:
        """The newest observation, with the time at which it was measured."""

    @abstractmethod
    def write(self, action: Tensor, t: float) -> Tensor:
        """Send `action` [A] in [-1, 1] to take effect at time `t`; returns what was really sent."""

    @abstractmethod
    def stop(self) -> None:
        """Stop moving, now, from any state and any thread; safe to call twice."""

    def __enter__(self) -> Robot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Filter(Protocol):
    """Total: defined for every input, never raises, and reports how much it changed."""

    changed: float

    def __call__(self, action: Tensor, reading: Reading) -> Tensor: ...
