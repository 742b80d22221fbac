"""Hindsight: columns of a row that only the rest of its episode can say.

    returns      R_t = r_t + d_t R_{t+1}: the return to go that was really seen
    next_action  the action of the decision after this one

Where a time limit cut the episode its last reward is taken to go on for ever, r / (1 - d): 0 for a
sparse reward that was not reached, -1 / (1 - gamma) where every step costs 1. There is no next
action then, nor where the world ended: it is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes

COLUMNS = ("returns", "next_action")


def returns_to_go(reward: Tensor, discount: Tensor, length: Tensor) -> Tensor:
    """[N] of the rows of E episodes one after the other, `length` [E] of them each."""
    end = length.cumsum(0) - 1
    forever = torch.where(discount < 1, reward / (1 - discount), reward)
    result, after = torch.empty_like(reward), torch.zeros_like(reward[end])
    for back in range(int(length.max())):
        live = (back < length).nonzero().flatten()
        at = end[live] - back
        if back == 0:
            now = torch.where(discount[at] > 0, forever[at], reward[at])
        else:
            now = reward[at] + discount[at] * after[live]
        result[at], after[live] = now, now
    return result


def next_actions(action: Tensor, length: Tensor, width: int = 1) -> Tensor:
    """The action `width` rows later in the same episode, NaN where there is none; as `action`."""
    last = torch.repeat_interleave(length.cumsum(0) - 1, length)
    index = torch.arange(len(action), device=action.device) + width
    known = index <= last
    later = action[index.clamp(max=len(action) - 1)]
    return torch.where(known.view(-1, *[1] * (action.ndim - 1)), later, torch.nan)


def columns_of_episodes(
    episodes: Episodes, rows: Tensors, columns: Sequence[str], gamma: float, width: int
) -> Tensors:
    """`columns` of the decision rows of `episodes`, one for every step, `width` steps long."""
    steps = episodes.steps
    made: Tensors = {}
    if "returns" in columns:
        discount = gamma * (~steps["terminated"]).float()
        made["returns"] = returns_to_go(steps["reward"], discount, episodes.length)
    if "next_action" in columns:
        made["next_action"] = next_actions(rows["action"], episodes.length, width)
    return made


class TrajectoryColumns:
    """Holds the rows of running episodes and hands them out, completed, when these end."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns
        self.forget()

    def forget(self) -> None:
        """Drop what is held: its episodes will not be finished."""
        self.held: list[Tensors] = []
        self.who: list[Tensor] = []

    def push(self, rows: Tensors, closed: Tensor | None, ended: Tensor) -> Tensors:
        """Take rows that closed in environments `closed` (None: all); return, episode by episode,
        those of environments that `ended` [B] (bool), perhaps none."""
        if rows:
            every = torch.arange(len(ended), device=ended.device)
            self.held.append(rows)
            self.who.append(every if closed is None else closed)
        if not self.held or not ended.any():
            return {}
        rows, who = tt.cat(self.held), torch.cat(self.who)
        over = ended[who]
        self.held, self.who = [tt.take(rows, (~over).nonzero().flatten())], [who[~over]]
        mine = over.nonzero().flatten()
        order = mine[who[mine].argsort(stable=True)]  # by environment, then by time
        length = who[mine].bincount(minlength=len(ended))
        return self._completed(tt.take(rows, order), length[length > 0])

    def _completed(self, rows: Tensors, length: Tensor) -> Tensors:
        if "returns" in self.columns:
            rows["returns"] = returns_to_go(rows["reward"], rows["discount"], length)
        if "next_action" in self.columns:
            rows["next_action"] = next_actions(rows["action"], length)
        return rows

    def get_state(self) -> dict[str, Any]:
        if not self.held:
            return {"rows": {}, "who": None}
        return {"rows": tt.cat(self.held), "who": torch.cat(self.who)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.forget()
        if state["who"] is not None:
            self.held, self.who = [state["rows"]], [state["who"]]
