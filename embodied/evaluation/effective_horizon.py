"""Effective horizon: how far random exploration has to look ahead in an environment.

Laidlaw et al., "Bridging RL Theory and Practice with the Effective Horizon" (2023). GORP, greedy
over random policy: in every step, each sequence of k actions is followed by m continuations of
uniformly random actions; the first action of the sequence with the highest mean return is taken.

    H = min_k [ k + log_A m(k) ],   m(k): the fewest with which half of the episodes succeed

for A actions and m in powers of two. An episode of T steps takes GORP about T^2 A^H steps, and deep
RL needs few samples where H is small. The measure is for deterministic environments, from given
initial states. Continuous actions have `levels` values of each element: H then compares rewards of
one task only. Without a discount, shaping by a potential that is 0 at the end changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Bound, Count, CountOrZero, Fraction, Number
from embodied.core.build import ConfigError
from embodied.core.env import NotSavable, VecEnv, restored
from embodied.core.env_contract import called
from embodied.core.spec import MASK, Spec
from embodied.core.tensors import Tensors

MOST_ACTIONS = 1000
MOST_DOUBLINGS = 20  # of m
CHECKED = 200  # steps in which an environment has to be deterministic
SAME = 1e-5


@dataclass(frozen=True)
class Config:
    depth: Count = 3  # largest k
    tries: Count = 5  # episodes, each with its own initial state
    steps: Count = 1_000_000  # environment steps after which the measure ends
    target: Number | None = None  # return of a success; null: the environment logs success
    gamma: Fraction = 1.0  # discount per step, of the returns that are compared
    levels: Annotated[int, Bound(2)] = 3  # values of each element of a continuous action
    repeat: Count = 1  # steps that each action is held
    num_envs: Annotated[int, Bound(2)] = 64  # parallel environments
    seed: CountOrZero = 0  # of the initial states and of the random actions


@dataclass(frozen=True)
class Attempt:
    """How many of the episodes GORP solved with `depth` k and `completions` m; `horizon` is
    k + log_A m."""

    depth: int
    completions: int
    horizon: float
    solved: int


class Gorp:
    """GORP in `env`, whose state it saves and restores. ConfigError for what cannot be measured."""

    def __init__(self, config: Config, env: VecEnv) -> None:
        self.config = config
        self.env = env
        self.actions = every_action(env.spec, config.levels).to(env.device)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.every = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self.used = 0  # environment steps
        self.length = 0  # decisions of the longest episode
        try:
            self.starts: list[Tensors] = []
            for seed in range(config.seed, config.seed + config.tries):
                env.reset(seed)
                self.starts.append(tt.take(env.get_state(), self.every[:1]))
            self._require_deterministic(self.starts[0])
        except NotSavable as error:
            raise ConfigError(f"the effective horizon needs saved states: {error}") from error

    def attempts(self) -> Iterator[Attempt]:
        """Attempts with increasing horizon, until one succeeds or the steps are used."""
        width = math.log(len(self.actions))
        order = sorted(
            (k + j * math.log(2) / width, k, 2**j)
            for k in range(1, self.config.depth + 1)
            for j in range(MOST_DOUBLINGS + 1)
        )
        for horizon, depth, completions in order:
            solved = 0
            for start in self.starts:
                if self.used >= self.config.steps:
                    return
                solved += self.solves(start, depth, completions)
            yield Attempt(depth, completions, horizon, solved)
            if 2 * solved >= len(self.starts):
                return

    def meaning(self, tried: Sequence[Attempt]) -> str:
        """What the attempts say, in one sentence."""
        count = len(self.actions)
        if not tried or 2 * tried[-1].solved < self.config.tries:
            least = f"above {tried[-1].horizon:.2f}" if tried else "not known"
            return (
                f"effective horizon {least}: {self.used:,} steps did not suffice (steps=N for more)"
            )
        cost = self.length**2 * count ** tried[-1].horizon
        return (
            f"effective horizon {tried[-1].horizon:.2f}: {count} actions, episodes of up to "
            f"{self.length} decisions, about {cost:,.0f} steps of random exploration"
        )

    def solves(self, state: Tensors, depth: int, completions: int) -> bool:
        """Whether an episode from the saved `state` [1, ...] succeeds."""
        every = torch.arange(len(self.actions))
        sequences = torch.cartesian_prod(*[every] * depth).view(-1, depth)
        total, age, won, ended = 0.0, 0, False, False
        while not ended:
            if self.used >= self.config.steps:
                return False
            values = self.returns(state, sequences.repeat_interleave(completions, 0))
            means = values.view(-1, completions).mean(1)
            best = (means >= means.max() - SAME).nonzero().flatten()
            lot = torch.randint(len(best), (1,), generator=self.generator)
            state, reward, won, ended = self._take(state, sequences[best[lot], 0])
            total += reward
            age += 1
            if won:
                break
        self.length = max(self.length, age)
        return won if self.config.target is None else total >= self.config.target

    def returns(self, state: Tensors, plans: Tensor) -> Tensor:
        """Discounted returns [n] of episodes that go on from `state` with the actions `plans`
        [n, k] (numbers of actions) and then with random ones."""
        found: list[Tensor] = []
        for plan in plans.split(self.env.num_envs):
            self.env.set_state(tt.take(state, self.every))
            runs = torch.arange(self.env.num_envs) < len(plan)
            total, discount, age = torch.zeros(self.env.num_envs), 1.0, 0
            while runs.any():
                count = (self.env.num_envs,)
                index = torch.randint(len(self.actions), count, generator=self.generator)
                if age < plan.shape[1]:
                    index[: len(plan)] = plan[:, age]
                for _ in range(self.config.repeat):
                    step = self.env.step(self.actions[index])
                    self.used += int(runs.sum())
                    total += discount * step.reward.cpu() * runs
                    runs &= ~step.ended.cpu()
                    discount *= self.config.gamma
                age += 1
            found.append(total[: len(plan)])
        return torch.cat(found)

    def _take(self, state: Tensors, action: Tensor) -> tuple[Tensors, float, bool, bool]:
        """The state [1, ...] after an action [1] (its number), the reward, success, and the end."""
        self.env.set_state(tt.take(state, self.every))
        total, won = 0.0, False
        for _ in range(self.config.repeat):
            step = self.env.step(self.actions[action.expand(self.env.num_envs)])
            self.used += 1
            total += step.reward[0].item()
            if self.config.target is None:  # else it is known when the episode has ended
                if "success" not in step.log:
                    raise ConfigError(
                        f"{called(self.env)} does not say what a success is: give the return of "
                        "one, target=NUMBER"
                    )
                won = bool(step.log["success"][0])
            ended = bool(step.ended[0])
            if ended:
                break
        return tt.take(self.env.get_state(), self.every[:1]), total, won, ended

    def _require_deterministic(self, start: Tensors) -> None:
        """ConfigError if copies of a state with other random generators part on the same way."""
        env = self.env
        rows = torch.arange(env.num_envs)
        self.env.set_state(restored(env.get_state(), rows, start, self.every, env.state_roles))
        for _ in range(CHECKED):
            index = torch.randint(len(self.actions), (1,), generator=self.generator)
            step = env.step(self.actions[index.expand(env.num_envs)])
            seen = {**step.next_obs, "reward": step.reward}
            apart = [(leaf.double() - leaf[:1].double()).abs().max() for leaf in seen.values()]
            if max(apart) > SAME:
                raise ConfigError(
                    f"{called(env)} is random: the same actions have different outcomes, and the "
                    "effective horizon is that of a deterministic environment"
                )
            if step.ended.any():
                return


def every_action(spec: Spec, levels: int) -> Tensor:
    """All actions [A, ...]: each class of every choice, `levels` values of every number.
    ConfigError for too many, or a mask of choices."""
    if MASK in spec.obs:
        raise ConfigError(f"the effective horizon needs a fixed set of actions, without {MASK}")
    values = [
        torch.arange(float(count)) if count else torch.linspace(-1, 1, levels)
        for count in spec.act.choices
    ]
    count = math.prod(map(len, values))
    if not 2 <= count <= MOST_ACTIONS:
        raise ConfigError(
            f"there are {count:,} combinations of actions, and the effective horizon is measured "
            f"with 2 to {MOST_ACTIONS:,}: fewer levels=, or a task with fewer action elements"
        )
    grid = torch.cartesian_prod(*values).view(count, *spec.act.shape)
    return grid.to(getattr(torch, spec.act.dtype))
