"""Rewards that make learning fast, designed for a finite MDP that is known: ExpRD and ExpAdaRD.

With Q_H(R) = sum_{h<=H} (gamma P)^h R, the value of an action and of H optimal steps (Q_inf: of all
steps) under the reward table R, the gap of an action is the optimal one's value minus its own:

    (A_H R)(s, a) = Q_H(s, pi*(s)) - Q_H(s, a)
    ExpRD     max_R  -1 / (|H| S) sum_{H, s} [ max_{a not in A*(s)} delta_s - (A_H R)(s, a) ]_+
    ExpAdaRD  max_R  sum_{s, a} mu_L(s, a) mu_T(s) pi_L(a|s) a_T(s, a) (R(s, a) - R(s, pi_L))
    both s.t. (A_inf R)(s, a) >= delta_s for a not in A*(s), >= 0 for a in A*(s), |R| <= `most`

A*(s) are the optimal actions of the original reward and delta_s its smallest gap, so that optimal
policies stay optimal, by as much. a_T(s, a) = A_T(s, a) - A_T(s, pi_L) is the advantage of the
teacher, mu_L and mu_T are visits of the learner and of the optimal policy. Both are linear programs
(HiGHS, by SciPy).

ExpRD: Devidze et al., "Explicable reward design for reinforcement learning agents" (2021).
ExpAdaRD: Devidze et al., "Informativeness of reward functions in reinforcement learning" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import needed
from embodied.core.errors import ConfigError

Table = NDArray[np.float64]
SAME = 1e-9  # relative difference of values below which actions are equally good
SLACK = 1e-7  # of the constraints, in units of the largest reward
HORIZONS = (1, 4, 8, 16, 32)


@dataclass(frozen=True)
class FiniteMdp:
    """`dynamics` [S, A, S]: probabilities of the next state; rows of zeros: the episode ended.
    `reward` [S, A]; `start` [S]: probabilities of the first state."""

    dynamics: Table
    reward: Table
    start: Table
    gamma: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.reward.shape[0], self.reward.shape[1]

    def values(self, reward: Table, policy: Table) -> Table:
        """Q [S, A] of `policy` [S, A] under `reward` [S, A], exactly."""
        states = len(reward)
        step = np.einsum("sa,sat->st", policy, self.dynamics)
        value = np.linalg.solve(np.eye(states) - self.gamma * step, (policy * reward).sum(1))
        return reward + self.gamma * self.dynamics @ value

    def visits(self, policy: Table) -> Table:
        """Discounted visits [S] of `policy` [S, A], which sum to at most 1."""
        step = np.einsum("sa,sat->st", policy, self.dynamics)
        system = np.eye(len(self.start)) - self.gamma * step.T
        return (1 - self.gamma) * np.linalg.solve(system, self.start)

    def solved(self, reward: Table) -> Table:
        """Q [S, A] of an optimal policy under `reward`, by policy iteration."""
        policy = one_hot(reward)
        while True:
            q = self.values(reward, policy)
            kept = (policy * q).sum(1) >= q.max(1) - SAME * max(1.0, float(np.abs(q).max()))
            if kept.all():
                return q
            policy = np.where(kept[:, None], policy, one_hot(q))


def one_hot(q: Table) -> Table:
    """The greedy policy [S, A] of values [S, A]; the first of several best actions."""
    return np.eye(q.shape[1])[q.argmax(1)]


class Designer:
    """Designs reward tables for `mdp` with its optimal policies; `most` is the largest reward."""

    def __init__(self, mdp: FiniteMdp, most: float = 10.0) -> None:
        self.mdp = mdp
        self.most = most
        self.q = mdp.solved(mdp.reward)
        self.policy = one_hot(self.q)
        gap = self.q.max(1, keepdims=True) - self.q
        self.good = gap <= SAME * max(1.0, float(np.abs(self.q).max()))
        self.delta = np.where(self.good, np.inf, gap).min(1)  # infinite: all actions are optimal
        self.known: dict[int | None, Table] = {}  # gaps by horizon

    @cached_property
    def moves(self) -> Table:
        """P under the optimal policy, [S A, S A]: probabilities of the next pair."""
        pairs = self.mdp.reward.size
        return (self.mdp.dynamics[..., None] * self.policy).reshape(pairs, pairs)

    def gaps(self, horizon: int | None) -> Table:
        """A_H [S A, S A]: gaps of H + 1 steps from a flattened reward table; None: of all."""
        if horizon not in self.known:
            step = self.mdp.gamma * self.moves
            if horizon is None:
                sums = np.linalg.inv(np.eye(len(step)) - step)
            else:
                power = sums = np.eye(len(step))
                for _ in range(horizon):
                    power = power @ step
                    sums = sums + power
            states, actions = self.mdp.shape
            best = np.arange(states) * actions + self.policy.argmax(1)
            self.known[horizon] = sums[np.repeat(best, actions)] - sums
        return self.known[horizon]

    def informativeness(self, reward: Table, horizons: Sequence[int] = HORIZONS) -> float:
        """I(R), at most 0: of ExpRD."""
        total = 0.0
        for horizon in horizons:
            gap = (self.gaps(horizon) @ reward.ravel()).reshape(self.good.shape)
            short = self.delta[:, None] - gap
            worst = np.where(self.good, -np.inf, short).max(1)
            total += float(worst[np.isfinite(self.delta)].clip(min=0).sum())
        return -total / (len(horizons) * len(self.delta))

    def keeps_optimal(self, reward: Table) -> bool:
        """Whether the optimal policy stays so under `reward`, and every action that was not optimal
        stays worse by `delta`, by policy iteration."""
        slack = 10 * SLACK * self.most
        q = self.mdp.solved(reward)
        gap = q.max(1, keepdims=True) - q
        worse = np.where(self.good, np.inf, gap).min(1)
        delta = np.where(np.isfinite(self.delta), self.delta, -np.inf)
        least = np.where(self.policy > 0, gap, 0.0).max()
        return bool((worse >= delta - slack).all()) and bool(least <= slack)

    def expert(self, states: Sequence[int], horizons: Sequence[int] = HORIZONS) -> Table:
        """ExpRD's table [S, A], which is zero outside of `states`."""
        columns = self._columns(states)
        bad = ~self.good.ravel()
        owner = np.repeat(np.arange(len(self.delta)), self.good.shape[1])[bad]
        slacks = len(horizons) * len(self.delta)
        rows: list[Table] = []
        for place, horizon in enumerate(horizons):
            short = np.zeros((int(bad.sum()), slacks))
            short[np.arange(len(owner)), place * len(self.delta) + owner] = -1.0
            rows.append(np.hstack([-self.gaps(horizon)[bad][:, columns], short]))
        cost = np.concatenate([np.zeros(len(columns)), np.full(slacks, 1 / slacks)])
        return self._solved(cost, columns, np.vstack(rows), -np.tile(self.delta[owner], len(rows)))

    def chosen(self, count: int, horizons: Sequence[int] = HORIZONS) -> list[int]:
        """States that pay: those that do under the original reward, and `count` more, each the one
        that adds most to the informativeness."""
        states = sorted({*np.flatnonzero(self.mdp.reward.any(1)).tolist()})
        for _ in range(count):
            others = [state for state in range(len(self.delta)) if state not in states]
            scores = [
                self.informativeness(self.expert([*states, other], horizons), horizons)
                for other in others
            ]
            states.append(others[int(np.argmax(scores))])
        return states

    def adaptive(self, learner: Table, states: Sequence[int]) -> Table:
        """ExpAdaRD's table [S, A] for a learner with the policy `learner` [S, A]."""
        mean = (learner * self.q).sum(1, keepdims=True)
        taught = self.mdp.visits(self.policy)[:, None]
        seen = self.mdp.visits(learner)[:, None] * learner
        weight = seen * taught * learner * (self.q - mean)
        worth = weight - learner * weight.sum(1, keepdims=True)
        columns = self._columns(states)
        return self._solved(-worth.ravel()[columns], columns)

    def _columns(self, states: Sequence[int]) -> NDArray[np.int64]:
        """The places of `states` in a flattened table."""
        actions = self.mdp.shape[1]
        return (np.asarray(states)[:, None] * actions + np.arange(actions)).ravel()

    def _solved(
        self,
        cost: Table,
        columns: NDArray[np.int64],
        rows: Table | None = None,
        limits: Table | None = None,
    ) -> Table:
        """The table of least `cost` that keeps the optimal actions, with further `rows` of slack
        variables; ConfigError if `columns` of it do not suffice."""
        optimize: Any = needed("scipy.optimize", "designing rewards needs SciPy", "offline")
        slacks = len(cost) - len(columns)
        keep = -self.gaps(None)[:, columns]
        # At equality, as of the original reward itself, a solver may find no solution.
        need = np.where(self.good, 0.0, self.delta[:, None]).ravel() - SLACK * self.most
        left = np.hstack([keep, np.zeros((len(keep), slacks))])
        right = -need
        if rows is not None and limits is not None:
            left, right = np.vstack([left, rows]), np.concatenate([right, limits])
        bounds = [(-self.most, self.most)] * len(columns) + [(0, None)] * slacks
        found = optimize.linprog(cost, A_ub=left, b_ub=right, bounds=bounds, method="highs")
        if found.status != 0:
            raise ConfigError(
                f"no reward in these states keeps the optimal actions: {found.message}"
            )
        table = np.zeros(self.mdp.reward.size)
        table[columns] = found.x[: len(columns)]
        return table.reshape(self.mdp.reward.shape)
