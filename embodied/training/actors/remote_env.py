"""RemoteEnv: what a learner knows of the parallel envs that actor processes step."""

from __future__ import annotations

from abc import abstractmethod
from typing import NoReturn

from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors


class RemoteEnv(VecEnv):
    """Has a Spec and a number of parallel envs; `reset` and `step` are the actors' own."""

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        self._refuse()

    def step(self, action: Tensor) -> Step:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("these parallel envs are stepped by actor processes")

    @abstractmethod
    def augmented(self, gamma: float) -> VecEnv:
        """The same envs with the observations that the run's reward adds (discount `gamma`)."""
