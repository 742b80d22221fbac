"""Hindsight experience replay (HER, Andrychowicz et al., 2017) with the strategy "future".

A transition of an episode with goal g also tells what the step would have been worth with another
goal. In `share` of a batch g is replaced by a goal that the same episode has reached later (or in
this very step), drawn evenly; reward and termination are asked for again:

    (s, a, r(s', g), s')  ->  (s, a, r(s', g'), s'),   g' reached in s' or later

A transition is stored once, its goal is replaced when it is sampled. With `share` 0.8 there are
four replaced goals for each original one (k = 4 of the paper).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.core import tensors as tt
from embodied.core.bounds import Fraction
from embodied.core.build import ConfigError
from embodied.core.env import GoalSpace, HasGoals, Step, VecEnv, require_finite
from embodied.core.env_contract import called, warn
from embodied.core.errors import ContractError
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol

RUNNING = -1  # in the place of the steps to the end of an episode
CHECKED = 1000  # transitions whose rewards are compared with those of their goals
TOLERANCE = 1e-4  # of that comparison, absolute and relative


@dataclass(frozen=True)
class Config:
    share: Fraction = 0.8  # of a batch whose goals are replaced (0.8: four of five)


class HindsightReplayBuffer(ReplayBuffer):
    """A ReplayBuffer of the single steps of `env`, an environment with goals (`core.env.HasGoals`).
    The B transitions of a step lie side by side, so that an episode is every B-th position. Where a
    step terminated for another reason than its goal (a fall), it terminates with every goal."""

    needs_steps: ClassVar[bool] = True
    extra_bytes: ClassVar[int] = 5

    def __init__(
        self,
        config: Config,
        capacity: int,
        env: VecEnv,
        gamma: float,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(capacity, device)
        if capacity < env.num_envs:
            raise ConfigError(
                f"hindsight needs a transition of each parallel env: data.replay_size={capacity} "
                f"should be at least {env.num_envs}"
            )
        self.share, self.gamma = config.share, gamma
        self.name = called(env)
        self.home = env.device
        self.goals = goals_of(env)
        self.num_envs = env.num_envs
        self.envs = torch.arange(env.num_envs, device=self.device)
        self.length = torch.zeros_like(self.envs)  # steps of the running episodes
        self.steps_left = torch.empty(0)  # of the episode after each transition; or RUNNING
        self.ends_anyway = torch.empty(0)  # whether a transition terminates with every goal
        self.checked = self.different = 0  # transitions, and those whose reward was another one

    def follow(self, step: Step) -> None:
        newest = self._newest()
        self.steps_left[newest] = RUNNING
        self.ends_anyway[newest] = self._terminated_anyway(step)
        self.length += 1
        self.end_episodes(step.ended)

    def end_episodes(self, ended: Tensor) -> None:
        who = ended.nonzero().flatten()
        if not len(who) or not self.size:
            return
        # The capacity may be no multiple of B: some envs then have one more transition in it.
        length = torch.minimum(self.length[who], (self.capacity + who) // self.num_envs)
        back = torch.arange(int(length.max()), device=self.device).expand(len(who), -1)
        own = back < length[:, None]
        at = (self._newest()[who, None] - back * self.num_envs) % self.capacity
        self.steps_left[at[own]] = back[own].int()
        self.length[who] = 0

    def sample(self, n: int) -> Tensors:
        index = self.drawn(n)
        rows = self.take(index)
        chosen = evenly(n, self.share).to(self.device)
        if len(chosen):
            self._replace(rows, index[chosen], chosen)
        return rows

    def later(self, index: Tensor) -> Tensor:
        """For each storage position of `index` [n] the one of a step of the same episode that is
        not before it, drawn evenly."""
        running = (self.cursor - 1 - index) % self.capacity // self.num_envs
        left = self.steps_left[index]
        left = torch.where(left == RUNNING, running, left)
        # float64: the product stays below `left + 1`.
        ahead = torch.rand(len(index), dtype=torch.float64, device=self.device) * (left + 1)
        return (index + ahead.long() * self.num_envs) % self.capacity

    def _replace(self, rows: Tensors, index: Tensor, chosen: Tensor) -> None:
        """Replace the goals of the places `chosen` [m] of the batch `rows`, which come from the
        storage positions `index` [m]."""
        later = self.later(index)
        there = {name: self.leaf(f"next_obs/{name}", later) for name in self.goals.leaves}
        goals = self.goals.reached(tt.to(there, self.home))
        seen: Tensors = {}
        for when in ("obs", "next_obs"):
            before = {name: rows[f"{when}/{name}"][chosen] for name in self.goals.leaves}
            seen = self.goals.replaced(tt.to(before, self.home), goals)
            for name, value in seen.items():
                rows[f"{when}/{name}"][chosen] = value.to(self.device)
        reward, reached = self.goals.outcome(seen)
        require_finite(reward, {}, f"{self.name}: with another goal", "transitions")
        ends = self.ends_anyway[index]
        if reached is not None:
            ends = ends | reached.to(self.device)
        rows["reward"][chosen] = reward.to(self.device)
        rows["discount"][chosen] = self.gamma * (~ends).float()

    def _newest(self) -> Tensor:
        """The storage positions [B] of the newest transition of each parallel env."""
        return (self.cursor - self.num_envs + self.envs) % self.capacity

    def _terminated_anyway(self, step: Step) -> Tensor:
        """Which transitions [B] (bool) of `step` terminate with every goal."""
        checking = self.checked < CHECKED
        which = self.envs if checking else step.terminated.nonzero().flatten()
        anyway = torch.zeros_like(step.terminated)
        if not len(which):
            return anyway
        seen = {name: step.next_obs[name][which] for name in self.goals.leaves}
        reward, reached = self.goals.outcome(tt.to(seen, self.home))
        ended = step.terminated[which]
        if reached is not None:
            reached = reached.to(self.device)
        if reached is None and not self.checked:
            warn(
                f"{self.name} has no compute_terminated(achieved_goal, desired_goal, info): this "
                "run stops if a step with success terminates an episode"
            )
        if checking:
            self._require_same_reward(step.reward, reward.to(self.device))
            if reached is not None and bool((reached & ~ended).any()):
                raise ContractError(
                    f"{self.name}: a step whose goal terminates the episode (compute_terminated) "
                    "did not terminate: return the same terminated in step"
                )
        if reached is None:
            self._require_no_success(step)
            anyway[which] = ended
        else:
            anyway[which] = ended & ~reached
        return anyway

    def _require_same_reward(self, had: Tensor, asked: Tensor) -> None:
        """ContractError where rewards [B] of steps are not those of their goals; a few may differ,
        as goals are rounded to float32."""
        wrong = ~torch.isclose(had, asked, TOLERANCE, TOLERANCE)
        self.checked += len(had)
        self.different += int(wrong.sum())
        if self.different > max(1, self.checked // 100):
            at = int(wrong.nonzero()[0]) if wrong.any() else 0
            raise ContractError(
                f"{self.name}: a step had the reward {float(had[at]):g}, and its goal gives "
                f"{float(asked[at]):g} when it is asked for again (compute_reward): hindsight "
                "needs a reward that depends on achieved_goal and desired_goal only, and no "
                "wrapper that changes it"
            )

    def _require_no_success(self, step: Step) -> None:
        """ContractError if a termination could be that of the goal."""
        success = step.log.get("success", torch.ones_like(step.terminated))
        if bool((step.terminated & success).any()):
            raise ContractError(
                f"{self.name}: a step terminated, and the environment does not say whether it "
                "would with another goal: write compute_terminated(achieved_goal, desired_goal, "
                'info), in it or a wrapper, or info["is_success"] = False where no goal did it'
            )

    def get_state(self) -> dict[str, Any]:
        own = {"steps_left": self.steps_left, "ends_anyway": self.ends_anyway}
        kept = {key: value[: self.size].clone() for key, value in own.items()}
        return {**super().get_state(), **kept, "length": self.length.clone()}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.steps_left[: self.size] = state["steps_left"].to(self.device)
        self.ends_anyway[: self.size] = state["ends_anyway"].to(self.device)
        self.length = state["length"].to(self.device)

    def _allocate(self, rows: Tensors) -> None:
        super()._allocate(rows)
        shape = (self.capacity,)
        self.steps_left = torch.full(shape, RUNNING, dtype=torch.int32, device=self.device)
        self.ends_anyway = torch.zeros(shape, dtype=torch.bool, device=self.device)


def goals_of(env: VecEnv) -> GoalSpace:
    """The goals of `env`; ConfigError if it has none, or if a wrapper changes what shows them."""
    inner = find_protocol(env, HasGoals)
    if inner is None:
        raise ConfigError(
            f"{called(env)} has no goals that could be replaced: replay=hindsight is for Gymnasium "
            "environments with achieved_goal, desired_goal and compute_reward, and for those with "
            "core.env.HasGoals (docs/runs.md)"
        )
    goals = inner.goal_space()
    changed: list[str] = []
    around = env
    while isinstance(around, Wrapper) and not hasattr(type(around), "goal_space"):
        here, inside = around.spec.obs, around.env.spec.obs
        changed += [f"the observation {n}" for n in goals.leaves if here.get(n) != inside.get(n)]
        changed += ["terminations"] if around.hides_terminations else []
        around = around.env
    if changed:
        raise ConfigError(
            f"{called(env)}: a wrapper changes {changed[-1]}, which replay=hindsight asks the "
            "environment about: leave the wrapper out"
        )
    return goals


def evenly(n: int, share: float) -> Tensor:
    """`share` of the places 0 to n - 1 (int64), the same share of every slice."""
    count = torch.arange(n + 1, dtype=torch.float64) * share + 1e-9
    return count.floor().diff().nonzero().flatten()
