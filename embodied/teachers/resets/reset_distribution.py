"""ResetDistribution: base class of teachers that choose the initial state of each episode.

A player (a trained policy or a scripted demonstrator) records trajectories; their simulator states
are the candidates. As with tasks, every episode has a ticket (its id), under which the choice is
kept until the outcome is known.

`Trajectories` are the states saved along the episodes of a player policy; `ResetStateWrapper`
starts episodes from the states that the teacher chooses.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.bounds import Count, CountOrZero, Fraction
from embodied.core.build import ConfigError, Node, build
from embodied.core.device import forked
from embodied.core.env import NotSavable, Step, VecEnv, require_finite, restored
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.teachers.teacher import (
    EpisodeLog,
    EpisodeTeacher,
    EpisodeWrapper,
    Floats,
    Outcome,
    bounded,
)


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
        actor = Actor(player, env.num_envs)
        first = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        running = [_Episode() for _ in range(env.num_envs)]
        turn = [0] * env.num_envs
        played: dict[int, _Episode] = {}
        while min(turn) < -(-episodes // env.num_envs):
            due = [row for row, each in enumerate(running) if len(each.rewards) % every == 0]
            state = with_obs(env.get_state(), obs) if due else {}
            for row in due:
                one = {key: value[row].cpu().clone() for key, value in state.items()}
                running[row].states.append((len(running[row].rewards), one))
            step = env.step(actor(obs, first))
            require_finite(step.reward, step.next_obs, type(env).__name__)
            success = step.log.get("success")
            for row, each in enumerate(running):
                each.rewards.append(float(step.reward[row]))
                if success is not None:
                    each.won = float(each.won == 1.0 or bool(success[row]))
                if step.ended[row]:
                    played[turn[row] * env.num_envs + row] = each
                    running[row] = _Episode()
                    turn[row] += 1
            obs, first = step.obs, step.ended
    return _trajectories([played[number] for number in range(episodes)], gamma)


@dataclass
class _Episode:
    """`states`: (time, state); `won` is NaN while success is unknown."""

    states: list[tuple[int, Tensors]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    won: float = math.nan


def _trajectories(played: list[_Episode], gamma: float) -> Trajectories:
    rows: list[tuple[int, int, int, float, float]] = []
    for number, each in enumerate(played):
        discounted, plain = _ahead(each.rewards, gamma), _ahead(each.rewards, 1.0)
        for at, _ in each.states:
            rows.append((number, at, len(each.rewards) - at, discounted[at], plain[at]))
    episode, time, left, togo, after = zip(*rows, strict=True)
    return Trajectories(
        tt.stack([state for each in played for _, state in each.states]),
        torch.tensor(episode),
        torch.tensor(time),
        torch.tensor(left),
        torch.tensor(togo, dtype=torch.float64),
        torch.tensor(after, dtype=torch.float64),
        torch.tensor([sum(each.rewards) for each in played], dtype=torch.float64),
        torch.tensor([len(each.rewards) for each in played]),
        torch.tensor([each.won for each in played]),
    )


def _ahead(rewards: list[float], gamma: float) -> list[float]:
    sums = [0.0] * (len(rewards) + 1)
    for at in reversed(range(len(rewards))):
        sums[at] = rewards[at] + gamma * sums[at + 1]
    return sums[:-1]


def with_obs(state: Tensors, obs: Tensors) -> Tensors:
    """A state and the observations in it; not every environment saves them."""
    return {**{f"obs/{name}": value for name, value in obs.items()}, **state}


NEVER = 1 << 40
DEFAULT_RESET = -1
"""Instead of the index of a saved state: the environment's own initial state."""


class ResetStateWrapper(EpisodeWrapper):
    """Starts each new episode from the state that `resets` samples. Episodes from a saved state are
    truncated after `resets.config.limit` steps.

    In `episode_log`, an episode's task is the time of its initial state as a share of the longest
    trajectory (0: the environment's own reset).
    """

    def __init__(
        self, env: VecEnv, resets: ResetDistribution, episode_log: EpisodeLog | None = None
    ) -> None:
        super().__init__(env, episode_log)
        self.resets = resets
        self.memory["left"] = torch.full_like(self.memory["ticket"], NEVER)
        self.memory["began"] = torch.full_like(self.memory["ticket"], DEFAULT_RESET)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """Interrupted episodes are not reported to the teacher."""
        if mask is None:
            self.resets.forget()
        return self._place(self.env.reset(seed, task, mask), self.rows(mask))

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        self.resets.clock += self.num_envs
        self._count(step)
        self.memory["left"] = self.memory["left"] - 1
        late = (self.memory["left"] <= 0) & ~step.ended  # at the time limit
        log = {**step.log, "ticket": self.memory["ticket"]}
        over = step.ended | late
        if not over.any():
            return replace(step, log=log)
        step = self.begun_anew(step, late)
        following = {key: value.clone() for key, value in step.next_obs.items()}
        at = over.nonzero().flatten()
        ticket, outcome = self._outcomes(at)
        self.resets.update(ticket, outcome)
        began, paths = self.memory["began"][at].cpu(), self.resets.paths
        along = torch.where(began == DEFAULT_RESET, 0, paths.time[began]) / paths.lengths.max()
        self._log_episodes(ticket, outcome, along[:, None].double())
        obs = self._place(step.obs, over)
        return replace(step, obs=obs, next_obs=following, truncated=step.truncated | late, log=log)

    def _place(self, obs: Tensors, rows: Tensor) -> Tensors:
        """Load the sampled states into the envs `rows` [B] (bool), which have just been reset."""
        at = rows.nonzero().flatten()
        index, ticket = self.resets.sample(len(at))
        self._begin_episodes(rows, ticket)
        self._remember("began", rows, index)
        limit = self.resets.config.limit
        bounded = (index != DEFAULT_RESET) & bool(limit)
        self._remember("left", rows, torch.where(bounded, limit, torch.full_like(index, NEVER)))
        placed = (index != DEFAULT_RESET).nonzero().flatten()
        if not len(placed):
            return obs
        state = self.env.get_state()
        saved = self.resets.paths.states
        roles = self.env.state_roles
        rows_placed = at[placed.to(self.device)]
        return self.env.set_state(restored(state, rows_placed, saved, index[placed], roles))


TRAINED = "embodied.policies.scripted.simple.CheckpointDemonstrator"
GAMMA = 0.99
"""Discount of the return that followed a state."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of initial states. The player is the policy of `run`, or the demonstrator `player`;
    its states are recorded. The return of an episode is scored as a share of the player's from the
    same state."""

    run: str | None = None  # folder of a trained run, whose policy plays
    player: Node | None = None  # or a demonstrator
    episodes: Count = 10  # episodes that are recorded
    every: Count = 10  # steps between saved states
    usual: Fraction = 0.0  # share of episodes that start with the environment's own reset
    steps: CountOrZero = 0  # environment steps after which all episodes do; 0: never
    limit: CountOrZero = 0  # steps of episodes from a saved state; 0: the environment's limit
    signal: Literal["success", "return"] = "success"  # score of an episode


class ResetDistribution(EpisodeTeacher):
    """Subclasses select trajectories (`select`), propose initial states (`propose`) and learn from
    the outcomes (`learn`).

    The trajectories are saved too, so that a run resumes exactly even if the player is gone.
    """

    remembered = ("paths", "clock")
    needs = "states"

    def __init__(self, config: Any, spec: Spec, env: VecEnv, seed: int = 0) -> None:
        if (config.run is None) == (config.player is None):
            raise ConfigError(
                "this teacher needs one policy to record: teacher.run=RUN (a trained policy) or "
                "teacher.player={_target_: embodied.policies.scripted.fr3.Scripted, task: lift}"
            )
        super().__init__(config, seed)
        self.clock = 0
        trained: Node = {"_target_": TRAINED, "run": config.run}
        node: Node = trained if config.player is None else config.player
        player = build(node, Policy, spec=spec).eval()
        recorded = record_trajectories(player, env, config.episodes, config.every, seed, GAMMA)
        self.paths = self.select(recorded)
        self.set_up()

    @abstractmethod
    def select(self, paths: Trajectories) -> Trajectories:
        """The trajectories whose states are used as initial states."""

    def set_up(self) -> None:
        """Compute what depends on `paths`; called again after a resume."""

    @abstractmethod
    def propose(self, n: int) -> list[tuple[int, Any]]:
        """For `n` episodes: the index of the initial state, and a memo for `learn`."""

    @abstractmethod
    def learn(self, states: list[int], scores: Floats, memos: list[Any]) -> None:
        """Episodes from the states with these indices ended with `scores` [n] in [0, 1]."""

    def sample(self, n: int) -> tuple[Tensor, Tensor]:
        """Indices of the initial states of `n` episodes [n] (or DEFAULT_RESET), and their tickets
        [n] (int64)."""
        over = bool(self.config.steps) and self.clock >= self.config.steps
        usual = self.random.random(n) < (1.0 if over else self.config.usual)
        proposed = iter(self.propose(int((~usual).sum())))
        drawn = [(DEFAULT_RESET, None) if plain else next(proposed) for plain in usual]
        return torch.tensor([state for state, _ in drawn]), self._tickets(drawn)

    def update(self, ticket: Tensor, outcome: Outcome) -> None:
        """Report the outcomes of episodes `ticket` [n]. Episodes with a score that is NaN and those
        that started with the environment's own reset are not learned from."""
        known = [self.pending.pop(number) for number in ticket.tolist()]
        began = np.array([state for state, _ in known], np.intp)
        scores = self.scores(began, outcome)
        placed = began != DEFAULT_RESET
        lost = placed & ~np.isfinite(scores)
        self._ignore(int(lost.sum()))
        kept = np.flatnonzero(placed & ~lost).tolist()
        if due := self._due({int(ticket[i]): (*known[i], scores[i]) for i in kept}):
            states, memos, learned = zip(*due, strict=True)
            self.learn(list(states), np.array(learned), list(memos))

    def scores(self, began: Any, outcome: Outcome) -> Floats:
        """[n] in [0, 1]; NaN where unknown."""
        if self.config.signal == "success":
            return bounded(outcome.success.double().cpu().numpy())
        ahead = self.paths.after[began].double().numpy()
        ret = outcome.ret.double().cpu().numpy()
        share = np.where(ahead > 0, ret / np.where(ahead > 0, ahead, 1), ret >= ahead)
        return bounded(np.where(np.isfinite(ret), share, np.nan))

    def wrap(self, env: VecEnv, episode_log: EpisodeLog | None) -> VecEnv:
        return ResetStateWrapper(env, self, episode_log)

    def set_state(self, state: dict[str, Any]) -> None:
        self.paths = Trajectories(**state["paths"])
        self.set_up()
        super().set_state(state)
