"""RolloutBuffer: the on-policy batch of PPO, the newest decisions of every parallel env in order.

          env 0   env 1   env 2
slot 0      d       d       d         T = 3: the largest number of finished decisions of any env
slot 1      d       d       d
slot 2      d       -       d         -: not valid, this env finished fewer decisions

With `keep` above 1 a batch is the newest `keep` ones side by side, the newest first: [T, keep * B],
fewer columns until there are as many. Each column is one stretch of one env, so advantages along T
never cross from one batch into another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.tensors import Tensors


class RolloutBuffer:
    """Decisions [T, B, ...] of `rows` parallel envs; memory is reused from batch to batch.
    `horizon` decisions per env are expected. The buffer grows where there are more, because the end
    of an episode cuts action chunks short. `keep`: how many of the newest batches it holds."""

    def __init__(
        self, rows: int, horizon: int, device: torch.device | str = "cpu", keep: int = 1
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} should be at least 1")
        self.keep = keep
        self.newest: Tensors = {}  # the batch that was asked for last; only with keep > 1
        self.past: list[Tensors] = []  # the batches before it, the newest first
        self.rows, self.horizon = rows, horizon
        self.held: Tensors = {}
        self.every = torch.arange(rows, device=device)
        self.count = torch.zeros(rows, dtype=torch.int64, device=device)
        self.length = 0  # the largest count
        self.uneven = False  # whether envs may have different counts; without a look at them

    def add(self, rows: Tensors, closed: Tensor | None) -> None:
        """Append one decision to each of the parallel envs `closed` [n] (None: all, in order)."""
        if not self.held:
            self.held = {
                key: value.new_zeros(self.horizon, self.rows, *value.shape[1:])
                for key, value in rows.items()
            }
        if closed is None:
            self._room(self.length)
            for key, value in rows.items():
                self.held[key][self.length].copy_(value)
            self.count += 1
            self.length += 1
        elif len(closed):
            self.uneven = True
            slots = self.count[closed]
            most = int(slots.max())
            self._room(most)
            for key, value in rows.items():
                self.held[key][slots, closed] = value
            self.count[closed] += 1
            self.length = max(self.length, most + 1)

    def _room(self, slot: int) -> None:
        if slot < len(next(iter(self.held.values()))):
            return
        for key, value in self.held.items():
            self.held[key] = torch.cat([value, torch.zeros_like(value)])

    def batch(self, carry: Tensors | None = None) -> Tensors:
        """All decisions [T, B, ...], `valid` [T, B] (bool), and `carry` [B, ...] as `carry/*`;
        views that `clear` overwrites. With `keep` > 1: of the kept batches, B of each."""
        slots = torch.arange(self.length, device=self.count.device)
        held = {key: value[: self.length] for key, value in self.held.items()}
        newest = {**held, "valid": slots[:, None] < self.count, **tt.nest(carry or {}, "carry")}
        if self.keep == 1:
            return newest
        self.newest = tt.each(newest, torch.clone)
        # Batches side by side along B; shorter ones are padded with slots that are not valid.
        parts = [self.newest, *self.past]
        length = max(len(part["valid"]) for part in parts)

        def padded(value: Tensor) -> Tensor:
            return torch.cat([value, value.new_zeros(length - len(value), *value.shape[1:])])

        def column(key: str) -> Tensor:
            if key.startswith("carry/"):
                return torch.cat([part[key] for part in parts])
            return torch.cat([padded(part[key]) for part in parts], 1)

        return {key: column(key) for key in parts[0]}

    def clear(self) -> None:
        """Start the next batch; with `keep` > 1 the last one that was asked for is kept."""
        if self.newest:
            self.past = [self.newest, *self.past][: self.keep - 1]
            self.newest = {}
        if self.uneven:
            for value in self.held.values():  # invalid slots are zero, not old decisions
                value.zero_()
        self.count.zero_()
        self.length, self.uneven = 0, False

    def get_state(self) -> dict[str, Any]:
        held = {key: value[: self.length].clone() for key, value in self.held.items()}
        state: dict[str, Any] = {"rows": held, "count": self.count.clone()}
        return state | {"past": list(self.past)} if self.keep > 1 else state

    def set_state(self, state: dict[str, Any]) -> None:
        self.held, self.length, self.uneven = {}, 0, True
        self.count.copy_(state["count"])
        self.past = [tt.to(part, self.count.device) for part in state.get("past", [])]
        for key, value in state["rows"].items():
            self.length = len(value)
            room = max(self.horizon, self.length)
            here = value.to(self.count.device)
            self.held[key] = here.new_zeros(room, *here.shape[1:])
            self.held[key][: self.length] = here
