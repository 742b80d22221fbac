"""Transitions that wait for what follows: n-step returns, columns and successes of episodes.

    returns      R_t = r_t + d_t R_{t+1}: the Monte Carlo return-to-go
    next_action  the action of the next decision in the episode (as in SARSA)

Where a time limit truncated the episode, the last reward r is assumed to continue forever,
r / (1 - d): 0 for a sparse reward that was not reached, -1 / (1 - gamma) where every step costs 1.
`next_action` is NaN in the last transition of an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.buffers.source import Source
from embodied.core import tensors as tt
from embodied.core.tensors import Tensors

if TYPE_CHECKING:
    from embodied.datasets.lerobot.reader import Episodes


@runtime_checkable
class KeepsSingle(Protocol):
    """A learner whose n-step transitions may also need the columns of their first decision."""

    keep_single: bool
    """Whether they do (see `NStepBuffer`)."""


class NStepBuffer:
    """n-step returns over the last `n` decisions of every environment; a decision may be a chunk of
    several steps, so that parallel envs finish theirs at different times.

    `held` [n, B, ...] keeps the pending decisions of B envs; the discounted reward of each new
    decision is added to all of its env's. A decision is returned after n decisions, or when its
    episode ends. With `keep_single`, a transition also has the columns of its own decision alone:
    `single/next_obs/*` and `single/discount`.
    """

    def __init__(self, n: int, keep_single: bool = False) -> None:
        self.n, self.keep_single = n, keep_single
        self.held: Tensors = {}
        self.used = torch.empty(0)
        self.slot = torch.empty(0, dtype=torch.int64)  # [B]: where each env's next decision is put

    def push(self, rows: Tensors, closed: Tensor | None, ended: Tensor) -> Tensors:
        """Add the decisions `rows` that finished in parallel envs `closed` (None: all) [k]. Returns
        the transitions whose n-step returns are complete. `ended` [B] (bool): the episodes that end
        now, whose decisions are finished."""
        if not rows:
            return rows
        kept = {k: v for k, v in rows.items() if not k.startswith("next_obs/")}
        if self.keep_single:
            single = (k for k in rows if k.startswith("next_obs/") or k == "discount")
            kept |= {f"single/{k}": rows[k] for k in single}
        count = len(ended)
        if not self.held:
            self.held = {k: v.new_zeros(self.n, count, *v.shape[1:]) for k, v in kept.items()}
            self.used = torch.zeros(self.n, count, dtype=torch.bool, device=ended.device)
            self.slot = torch.zeros(count, dtype=torch.int64, device=ended.device)
        envs = torch.arange(count, device=ended.device) if closed is None else closed
        reward, discount = self.held["reward"], self.held["discount"]
        reward[:, envs] += self.used[:, envs] * discount[:, envs] * rows["reward"]
        discount[:, envs] *= rows["discount"]
        slot = self.slot[envs]
        for key, value in kept.items():
            self.held[key][slot, envs] = value
        self.used[slot, envs] = True
        slot = (slot + 1) % self.n
        self.slot[envs] = slot
        leaving = self.used[:, envs] & ended[envs]
        every = torch.arange(len(envs), device=ended.device)
        leaving[slot, every] |= self.used[slot, envs]  # the oldest: n decisions have passed
        at, row = leaving.nonzero(as_tuple=True)
        if not len(row):
            return {}
        self.used[at, envs[row]] = False
        out = {key: value[at, envs[row]] for key, value in self.held.items()}
        return out | {k: rows[k].index_select(0, row) for k in rows if k.startswith("next_obs/")}

    def get_state(self) -> dict[str, Any]:
        own = {"used": self.used.clone(), "slot": self.slot.clone()}
        return {"pending": tt.each(self.held, torch.clone), **own}

    def set_state(self, state: dict[str, Any]) -> None:
        self.held, self.used, self.slot = state["pending"], state["used"], state["slot"]


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
    from embodied.datasets.transitions import return_ends

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
        """Add transitions `rows` that finished in parallel envs `closed` (None: all). Returns,
        episode by episode, the completed transitions of parallel envs that `ended` [B] (bool);
        possibly none."""
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


class SuccessBuffer:
    """A Source of the newest `capacity` transitions of successful episodes, to be oversampled: with
    sparse rewards they are the ones with a signal (after self-imitation, Oh et al., 2018).

    It samples from `otherwise` until there is a success. Transitions are added when their episode
    has ended.
    """

    def __init__(
        self, capacity: int, otherwise: Source, device: torch.device | str = "cpu"
    ) -> None:
        self.kept = ReplayBuffer(capacity, device)
        self.otherwise = otherwise
        self.held: Tensors = {}  # transitions of running episodes, [longest so far, B, ...]
        self.count = self.won = torch.empty(0)
        self.most = 0  # upper bound of count, kept on the host to avoid a device sync

    def __len__(self) -> int:
        return len(self.kept)

    def sample(self, n: int) -> Tensors:
        return self.kept.sample(n) if len(self.kept) else self.otherwise.sample(n)

    def push(self, rows: Tensors, closed: Tensor | None, success: Tensor, ended: Tensor) -> None:
        """Add the transitions that one step of B parallel envs finished. `rows`: transitions
        (possibly none) of parallel envs `closed` (None: all, in order). `success` [B], `ended` [B]
        (bool): whether the goal was reached, and the episode ended."""
        if len(self.count) != len(ended):
            self.count = torch.zeros(len(ended), dtype=torch.int64, device=ended.device)
            self.won = torch.zeros_like(ended)
        if rows:
            who = torch.arange(len(ended), device=ended.device) if closed is None else closed
            self._hold(rows, who)
        self.won = self.won | success
        leaving = self.won & ended
        if self.held and leaving.any():
            times = torch.arange(len(next(iter(self.held.values()))), device=ended.device)
            row, at = ((times < self.count[:, None]) & leaving[:, None]).nonzero(as_tuple=True)
            if len(row):
                self.kept.add({key: value[at, row] for key, value in self.held.items()})
        self.count, self.won = self.count * ~ended, self.won & ~ended

    def _hold(self, rows: Tensors, who: Tensor) -> None:
        room = len(next(iter(self.held.values()))) if self.held else 0
        if not self.held:
            shape = (16, len(self.count))
            self.held = tt.each(rows, lambda leaf: leaf.new_zeros(*shape, *leaf.shape[1:]))
        elif self.most >= room:
            self.most = int(self.count.max())
            if self.most >= room:
                double = tt.each(self.held, torch.zeros_like)
                self.held = {k: torch.cat([leaf, double[k]]) for k, leaf in self.held.items()}
        for key, value in rows.items():
            self.held[key][self.count[who], who] = value
        self.count[who] += 1
        self.most += 1

    def forget(self, env_ids: Tensor) -> None:
        """Drop the transitions of the running episodes of parallel envs `env_ids` [n]."""
        if len(self.count):
            self.count[env_ids], self.won[env_ids] = 0, False

    def get_state(self) -> dict[str, Any]:
        return {
            "replay": self.kept.get_state(),
            "running": tt.each(self.held, torch.clone),
            "count": self.count.clone(),
            "succeeded": self.won,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.kept.set_state(state["replay"])
        self.held, self.count, self.won = state["running"], state["count"], state["succeeded"]
        self.most = int(self.count.max()) if len(self.count) else 0
