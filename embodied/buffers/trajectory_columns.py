"""TrajectoryColumns: transition columns that need the rest of the episode.

    returns      R_t = r_t + d_t R_{t+1}: the Monte Carlo return-to-go
    next_action  the action of the next decision in the episode (as in SARSA)

Where a time limit truncated the episode, the last reward r is assumed to continue forever,
r / (1 - d): 0 for a sparse reward that was not reached, -1 / (1 - gamma) where every step costs 1.
`next_action` is NaN in the last transition of an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.tensors import Tensors
from embodied.datasets.transitions import return_ends

if TYPE_CHECKING:
    from embodied.datasets.lerobot.reader import Episodes

COLUMNS = ("returns", "next_action")


def returns_to_go(reward: Tensor, discount: Tensor, length: Tensor) -> Tensor:
    """Returns-to-go [N] of E concatenated episodes of `length` [E] transitions each."""
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
    """The action `width` transitions later in the same episode (NaN: none); shaped as `action`."""
    last = torch.repeat_interleave(length.cumsum(0) - 1, length)
    index = torch.arange(len(action), device=action.device) + width
    known = index <= last
    later = action[index.clamp(max=len(action) - 1)]
    return torch.where(known.view(-1, *[1] * (action.ndim - 1)), later, torch.nan)


def columns_of_episodes(
    episodes: Episodes, rows: Tensors, columns: Sequence[str], gamma: float, width: int
) -> Tensors:
    """`columns` of the transitions of `episodes`: one per step, each spanning `width` steps."""
    made: Tensors = {}
    if "returns" in columns:
        discount = gamma * (~return_ends(episodes)).float()
        made["returns"] = returns_to_go(episodes.steps["reward"], discount, episodes.length)
    if "next_action" in columns:
        made["next_action"] = next_actions(rows["action"], episodes.length, width)
    return made


class TrajectoryColumns:
    """Keeps the transitions of running episodes; returns them with `columns` when these end."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns
        self.forget()

    def forget(self, env_ids: Tensor | None = None) -> None:
        """Drop the transitions of running episodes, of parallel envs `env_ids` [n] (None: all)."""
        if env_ids is None:
            self.held: list[Tensors] = []
            self.who: list[Tensor] = []
            return
        kept = [(~torch.isin(who, env_ids)).nonzero().flatten() for who in self.who]
        self.held = [tt.take(rows, at) for rows, at in zip(self.held, kept, strict=True)]
        self.who = [who[at] for who, at in zip(self.who, kept, strict=True)]

    def push(self, rows: Tensors, closed: Tensor | None, ended: Tensor) -> Tensors:
        """Add transitions `rows` that finished in parallel envs `closed` (None: all).

        Returns, episode by episode, the completed transitions of parallel envs that `ended` [B]
        (bool); possibly none.
        """
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
        rows, length = tt.take(rows, order), length[length > 0]
        if "returns" in self.columns:
            rows["returns"] = returns_to_go(rows["reward"], rows["discount"], length)
        if "next_action" in self.columns:
            rows["next_action"] = next_actions(rows["action"], length)
        return rows

    def get_state(self) -> dict[str, Any]:
        if not self.held:
            return {"rows": {}, "env": None}
        return {"rows": tt.cat(self.held), "env": torch.cat(self.who)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.forget()
        if state["env"] is not None:
            self.held, self.who = [state["rows"]], [state["env"]]
