"""Observation history: samplers that observe the last `obs_steps` steps, as Diffusion Policy does.

The past observations are in the carry (`core.tensors`). Diffusion Policy (Chi et al., 2023) uses 2
steps, DPPO, ReinFlow and Q-chunking 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodied.core.tensors import FRESH, HISTORY, Tensors, with_history
from embodied.policies.wrappers.real_time_chunking import GuidedSampler


class ObservesHistory(GuidedSampler):
    """A sampler whose decisions use the `past` observations `names` before the present one."""

    past: int = 0
    names: Sequence[str] = ()

    def initial(self, n: int) -> Tensors:
        if not self.past:
            return {}
        device = next(self.parameters()).device
        kept = {HISTORY + name: self._zeros(name, n, device) for name in self.names}
        return {**kept, FRESH: torch.ones(n, dtype=torch.bool, device=device)}

    def _zeros(self, name: str, n: int, device: torch.device) -> Tensor:
        leaf = self.spec.obs[name]
        zeros = leaf.zeros(n, device)[:, None]
        return zeros.repeat(1, self.past, *[1] * len(leaf.shape))

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        return with_history(obs, carry), carry

    @property
    def augments(self) -> bool:
        return self.past > 0
