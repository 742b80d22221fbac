"""Trajectories: simulator states saved along the episodes of a player policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.device import forked
from embodied.core.env import NotSavable, StateRoles, VecEnv, require_finite
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class Trajectories:
    """M saved states of E episodes, in the order of (episode, time).

    `states`: from `get_state` [M, ...], and the observations `obs/*` even if that has none;
    `episode` [M] (int64); `time` [M]: steps since the start of the episode; `left` [M]: steps to
    its end; `togo`, `after` [M]: discounted and undiscounted return to go (float64). Per episode:
    `returns`, `lengths`, `won` [E] (NaN: success unknown).
    """

    states: Tensors
    episode: Tensor
    time: Tensor
    left: Tensor
    togo: Tensor
    after: Tensor
    returns: Tensor
    lengths: Tensor
    won: Tensor

    def __len__(self) -> int:
        return len(self.episode)

    def only(self, episodes: Tensor) -> Trajectories:
        """The trajectories of `episodes` [k] (int64), in that order."""
        rows = torch.cat([(self.episode == each).nonzero().flatten() for each in episodes])
        number = torch.full((len(self.returns),), -1)
        number[episodes] = torch.arange(len(episodes))
        each = {key: getattr(self, key)[rows] for key in ("time", "left", "togo", "after")}
        whole = {key: getattr(self, key)[episodes] for key in ("returns", "lengths", "won")}
        places = number[self.episode[rows]]
        return replace(self, states=tt.take(self.states, rows), episode=places, **each, **whole)

    def successful(self) -> Trajectories:
        """The trajectories that are not known to have failed; ConfigError if there are none."""
        good = (~(self.won == 0)).nonzero().flatten()
        if not len(good):
            raise ConfigError(
                "this teacher needs a successful demonstration; none of the recorded ones succeeded"
            )
        return self.only(good)


@torch.no_grad()
def record_trajectories(
    player: Policy, env: VecEnv, episodes: int, every: int, seed: int, gamma: float
) -> Trajectories:
    """Play `episodes` of `player` without exploration and save the state at every `every`-th step.

    Each env contributes its first episodes, so that short ones are not favoured. ConfigError if the
    environment cannot load saved states. Torch's global generator is left unchanged.
    """
    with forked(seed):
        obs = env.reset(seed)
        try:
            env.set_state(env.get_state())
            _ = env.state_roles
        except NotSavable as error:
            raise ConfigError(f"this environment cannot begin in saved states: {error}") from error
        recorder = _Recorder(env.num_envs, episodes, every, gamma)
        actor = Actor(player, env.num_envs)
        first = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        while not recorder.full:
            recorder.save(env, obs)
            step = env.step(actor(obs, first))
            require_finite(step.reward, step.next_obs, type(env).__name__)
            recorder.add(step.reward, step.log.get("success"), step.ended)
            obs, first = step.obs, step.ended
    return recorder.trajectories()


class _Recorder:
    """Records all envs until each has contributed its share of the episodes."""

    def __init__(self, rows: int, episodes: int, every: int, gamma: float) -> None:
        self.rows = rows
        self.episodes = episodes
        self.every = every
        self.gamma = gamma
        self.quota = -(-episodes // rows)
        self.turn = [0] * rows
        self.kept: list[list[tuple[int, Tensors]]] = [[] for _ in range(rows)]
        self.rewards: list[list[float]] = [[] for _ in range(rows)]
        self.won = [float("nan")] * rows
        self.done: dict[int, tuple[list[tuple[int, Tensors]], list[float], float]] = {}

    @property
    def full(self) -> bool:
        return min(self.turn) >= self.quota

    def save(self, env: VecEnv, obs: Tensors) -> None:
        """Save the state of each env whose step number is a multiple of `every`."""
        due = [row for row in range(self.rows) if len(self.rewards[row]) % self.every == 0]
        if not due:
            return
        state = with_obs(env.get_state(), obs)
        for row in due:
            part = {key: value[row].cpu().clone() for key, value in state.items()}
            self.kept[row].append((len(self.rewards[row]), part))

    def add(self, reward: Tensor, success: Tensor | None, ended: Tensor) -> None:
        for row, gain in enumerate(reward.tolist()):
            self.rewards[row].append(gain)
            if success is not None:
                self.won[row] = float(self.won[row] == 1.0 or bool(success[row]))
        for row in ended.nonzero().flatten().tolist():
            number = self.turn[row] * self.rows + row
            if number < self.episodes:
                self.done[number] = (self.kept[row], self.rewards[row], self.won[row])
            self.kept[row] = []
            self.rewards[row] = []
            self.won[row] = float("nan")
            self.turn[row] += 1

    def trajectories(self) -> Trajectories:
        episode = []
        time = []
        left = []
        togo = []
        after = []
        states = []
        for number in sorted(self.done):
            kept, rewards, _ = self.done[number]
            discounted, plain = _ahead(rewards, self.gamma), _ahead(rewards, 1.0)
            for at, state in kept:
                episode.append(number)
                time.append(at)
                left.append(len(rewards) - at)
                togo.append(discounted[at])
                after.append(plain[at])
                states.append(state)
        played = [self.done[number] for number in sorted(self.done)]
        return Trajectories(
            tt.stack(states),
            torch.tensor(episode),
            torch.tensor(time),
            torch.tensor(left),
            torch.tensor(togo, dtype=torch.float64),
            torch.tensor(after, dtype=torch.float64),
            torch.tensor([sum(rewards) for _, rewards, _ in played], dtype=torch.float64),
            torch.tensor([len(rewards) for _, rewards, _ in played]),
            torch.tensor([won for _, _, won in played]),
        )


def _ahead(rewards: list[float], gamma: float) -> list[float]:
    """The discounted return to go at each step."""
    sums = [0.0] * (len(rewards) + 1)
    for at in reversed(range(len(rewards))):
        sums[at] = rewards[at] + gamma * sums[at + 1]
    return sums[:-1]


def with_obs(state: Tensors, obs: Tensors) -> Tensors:
    """A state and the observations in it; not every environment saves them."""
    return {**{f"obs/{name}": value for name, value in obs.items()}, **state}


def restored(
    state: Tensors, rows: Tensor, saved: Tensors, index: Tensor, roles: StateRoles
) -> Tensors:
    """`state` [B, ...] with the envs `rows` [n] in the states `index` [n] of `saved` [M, ...].

    Their random generators are kept; their clocks are set to 0, and the times on them moved.
    """
    new = tt.each(state, torch.clone)
    taken = {key: saved[key][index].to(value) for key, value in new.items()}
    since = _elapsed(taken, roles)
    for key, columns in roles.times.items():
        _change(taken, key, columns, lambda flat: flat - since.to(flat)[:, None])
    for key, columns in roles.clocks.items():
        _change(taken, key, columns, torch.zeros_like)
    for key, columns in roles.generators.items():
        own = _rows(state[key][rows])
        kept = own if columns is None else own[:, list(columns)]
        _change(taken, key, columns, lambda _, kept=kept: kept)
    for key, value in taken.items():
        new[key][rows] = value
    return new


def _elapsed(taken: Tensors, roles: StateRoles) -> Tensor:
    """[n]: the first clock of the saved states."""
    key, columns = next(iter(roles.clocks.items()), ("", None))
    if not key:
        return torch.zeros(())
    return _rows(taken[key])[:, 0 if columns is None else columns[0]].clone()


def _change(
    taken: Tensors, key: str, columns: Sequence[int] | None, change: Callable[[Tensor], Tensor]
) -> None:
    """Replace columns of a leaf (None: all) by what `change` makes of them."""
    flat = _rows(taken[key]).clone()
    at = list(range(flat.shape[1]) if columns is None else columns)
    flat[:, at] = change(flat[:, at])
    taken[key] = flat.view_as(taken[key])


def _rows(leaf: Tensor) -> Tensor:
    """[n, k], also of a leaf [n]."""
    return leaf.reshape(leaf.shape[0], -1)
