"""HeldOut: evaluates a policy on episodes of a dataset that it is not trained on.

    loss           the policy's imitation loss
    action_error   mean |a - a_data| in half ranges (1% to 99%) of each element of the action
    error_NAME     the same of one element, in its physical unit

The loss ranks policies: it is lowest for the distribution of the data. The error of one action is
not: where the data do one thing or another, the mean of both has a smaller error than either.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.device import forked
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.datasets.mapping import measured

MOST = 2048  # decisions that are evaluated, evenly spread
BATCH = 256
SHOWN = 32  # elements of the action that have a metric of their own, at most


def held_out_episodes(usable: Tensor, share: float) -> Tensor:
    """Which of the episodes [E] (bool) are not trained on: `share` of those that are `usable` [E]
    (bool), at least one and not all; none of a single one, or where `share` is 0. The same for
    every seed."""
    chosen = usable.nonzero().flatten()
    count = len(chosen)
    some = min(count - 1, max(1, round(share * count))) if share > 0 else 0
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    held = torch.zeros_like(usable)
    held[chosen[order[:some]]] = True
    return held


class HeldOut:
    """The decisions `index` [M] of `rows`: `obs/*`, `action` [N, H, A], `valid` [N, H]."""

    def __init__(self, rows: Tensors, index: Tensor, names: tuple[str, ...] = ()) -> None:
        spread = torch.linspace(0, len(index) - 1, min(MOST, len(index))).round().long()
        self.rows, self.index = rows, index[spread]
        size = rows["action"][0, 0].numel()
        self.names = names if len(names) == size else tuple(str(i) for i in range(size))
        ends = measured(rows["action"][self.index].flatten(0, 1))
        pairs = zip(ends.low, ends.high, strict=True)
        self.radius = torch.tensor([(high - low) / 2 for low, high in pairs])

    @torch.no_grad()
    def evaluate(self, policy: Policy, seed: int, device: torch.device) -> Mapping[str, float]:
        """Metrics of `policy`, with noise that depends on `seed` only; random states are kept."""
        with forked(seed):
            losses, errors, weights = zip(
                *(self._batch(policy, part, device) for part in self.index.split(BATCH)),
                strict=True,
            )
        error = torch.stack(errors).sum(0) / torch.stack(weights).sum()
        each = zip(self.names[:SHOWN], error.tolist(), strict=False)
        return {
            "loss": torch.cat(losses).mean().item(),
            "action_error": float((error / self.radius).mean()),
            "decisions": float(len(self.index)),
            **{f"error_{name}": value for name, value in each},
        }

    def _batch(
        self, policy: Policy, index: Tensor, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses [n], the sum of absolute errors [A], and the number of steps they are of."""
        batch = tt.to(tt.take(self.rows, index.to(self.rows["action"].device)), device)
        loss, n = policy.loss(batch), len(index)
        actions, _ = policy.act(tt.under(batch, "obs"), policy.initial(n), policy.sample_noise(n))
        steps = min(actions.shape[1], batch["action"].shape[1])
        valid = batch["valid"][:, :steps].flatten()
        error = (actions[:, :steps] - batch["action"][:, :steps]).abs().reshape(len(valid), -1)
        return loss.cpu(), error[valid].sum(0).cpu(), valid.sum().cpu()
