"""Trajectories: simulator states saved along the episodes of a player policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.env import NotSavable, VecEnv, require_finite
from embodied.core.policy import Policy
from embodied.core.seeding import forked
from embodied.core.tensors import Tensors
from embodied.moved import attributes

OWN = ("generator", "stream")
"""State leaves that an env keeps when it loads a saved state: its random generator."""
CLOCKS = ("count", "elapsed", "age")
"""State leaves that are set to 0 when an env loads a saved state."""


@dataclass(frozen=True)
class Trajectories:
    """M saved states of E episodes, in the order of (episode, time).

    `states`: from `get_state` [M, ...]; `episode` [M] (int64); `time` [M]: steps since the start of
    the episode; `left` [M]: steps to its end; `togo`, `after` [M]: discounted and undiscounted
    return to go (float64). Per episode: `returns`, `lengths`, `won` [E] (NaN: success unknown).
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
        except NotSavable as error:
            raise ConfigError(f"this environment cannot load saved states: {error}") from error
        recorder = _Recorder(env.num_envs, episodes, every, gamma)
        actor = Actor(player, env.num_envs)
        first = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        while not recorder.full:
            recorder.save(env)
            step = env.step(actor(obs, first))
            require_finite(step.reward, step.next_obs, type(env).__name__)
            recorder.add(step.reward, step.log.get("success"), step.ended)
            obs, first = step.obs, step.ended
    return recorder.trajectories()


class _Recorder:
    """Records all envs until each has contributed its share of the episodes."""

    def __init__(self, rows: int, episodes: int, every: int, gamma: float) -> None:
        self.rows, self.episodes, self.every, self.gamma = rows, episodes, every, gamma
        self.quota = -(-episodes // rows)
        self.turn = [0] * rows
        self.kept: list[list[tuple[int, Tensors]]] = [[] for _ in range(rows)]
        self.rewards: list[list[float]] = [[] for _ in range(rows)]
        self.won = [float("nan")] * rows
        self.done: dict[int, tuple[list[tuple[int, Tensors]], list[float], float]] = {}

    @property
    def full(self) -> bool:
        return min(self.turn) >= self.quota

    def save(self, env: VecEnv) -> None:
        """Save the state of each env whose step number is a multiple of `every`."""
        due = [row for row in range(self.rows) if len(self.rewards[row]) % self.every == 0]
        if not due:
            return
        state = env.get_state()
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
            self.kept[row], self.rewards[row], self.won[row] = [], [], float("nan")
            self.turn[row] += 1

    def trajectories(self) -> Trajectories:
        episode, time, left, togo, after, states = [], [], [], [], [], []
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


def restored(state: Tensors, rows: Tensor, saved: Tensors, index: Tensor) -> Tensors:
    """`state` [B, ...] with the envs `rows` [n] in the states `index` [n] of `saved` [M, ...].

    Their random generators are kept; their clocks are set to 0.
    """
    new = tt.each(state, torch.clone)
    for key, value in new.items():
        kind = key.rsplit("/", 1)[-1]
        if kind in CLOCKS:
            value[rows] = 0
        elif kind not in OWN:
            value[rows] = saved[key][index].to(value)
    return new


__getattr__ = attributes(__name__)
