"""The replay loop: act, store what closed, update in proportion."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.buffers.mixture import OWN
from embodied.buffers.replay import Replay
from embodied.buffers.source import Source
from embodied.buffers.success import Successes
from embodied.buffers.trajectory_columns import Hindsight
from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.build import ConfigError
from embodied.core.env import Step
from embodied.core.policy import Policy
from embodied.core.reward import HasComponents, ObservesSteps, Reward, Scheduled, Stateful
from embodied.core.state_codec import pack, unpack
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner
from embodied.training import reward_hacking
from embodied.training.collector import Rollout
from embodied.training.trainer import Keeper

TAIL = 16  # steps of which a frozen reward's parts can be shown


@dataclass(frozen=True)
class Schedule:
    """`start`: environment steps of `policy.warmup_policy()` before learning; `ratio`: updates per
    stored row; `normalize`: set the normalisers from the rows of the warm-up; `pretrain`: updates
    from the demonstrations before the first environment step."""

    start: int
    ratio: float
    normalize: bool
    pretrain: int = 0


class ReplayLoop:
    """`steps` counts updates from `demos` (Schedule.pretrain of them), then environment steps, of
    all rows (and processes) together."""

    def __init__(
        self,
        rollout: Rollout,
        policy: Policy,
        learner: Learner,
        replay: Replay,
        source: Source,
        reward: Reward | None,
        schedule: Schedule,
        demos: Source | None = None,
    ) -> None:
        self.rollout, self.policy, self.learner = rollout, policy, learner
        self.replay, self.source, self.reward = replay, source, reward
        self.schedule, self.demos = schedule, demos
        self.hindsight: Hindsight | None = None  # completes rows whose columns need the future
        self.successes: Successes | None = None  # gets the rows of what went well
        self.kept: dict[str, Stateful] = {}  # what else a resumed run goes on with
        self.unseen: frozenset[str] = frozenset()  # what rows hold for a frozen reward only
        self.every = torch.arange(rollout.env.num_envs, device=rollout.actor.device)
        self.stride = rollout.env.num_envs * distributed.world()
        self.warm = schedule.start == 0
        self.debt = 0.0
        self.fresh = 0  # rows stored since `paid` was asked
        self.tail: deque[Tensors] = deque(maxlen=TAIL)  # the newest rows as the world paid them

    def run(self, keeper: Keeper) -> None:
        before = self.schedule.pretrain
        while keeper.running and keeper.step < before:
            assert self.demos is not None, "pretraining needs demonstrations"
            keeper.advance(1, self._update(self.demos))
        while keeper.running:
            if not self.warm and keeper.step >= before + self.schedule.start:
                self._begin()
            rows, step = self._step()
            if isinstance(self.reward, Scheduled):
                self.reward.set_step(keeper.step - before + self.stride)
            if rows:
                self.replay.add(rows)
                self.fresh += len(rows["reward"])
            metrics: dict[str, Any] = {}
            # Processes that learn together make the same updates, whatever closed in which.
            closed = distributed.mean(len(rows["reward"]) if rows else 0)
            if self.warm and closed and distributed.all_min(len(self.replay)):
                self.debt += self.schedule.ratio * closed
                while self.debt >= 1:
                    metrics = self._update(self.source)
                    self.debt -= 1
            keeper.advance(self.stride, metrics, step)

    @torch.no_grad()
    def paid(self) -> dict[str, Tensor]:
        """Mean rewards of the rows that were stored since this was last asked, by now's reward."""
        count, self.fresh = min(self.fresh, reward_hacking.NEWEST, len(self.replay)), 0
        if self.reward is None or not count:
            return {}
        back = torch.arange(count, device=self.replay.device) + 1
        rows = self.replay.take((self.replay.cursor - back) % self.replay.capacity)
        if not self.reward.frozen:
            return reward_hacking.describe(self.reward, rows, self.reward(rows))
        parts = reward_hacking.describe(self.reward, tt.cat(self.tail)) if self.tail else {}
        return {**parts, reward_hacking.PROXY: rows["reward"].mean()}

    def _begin(self) -> None:
        if self.schedule.normalize and len(self.replay):
            self.learner.fit(self.replay.sample(min(len(self.replay), 10_000)))
            distributed.broadcast(self.learner)
        self.rollout.act_with(self.policy)
        if self.hindsight is not None:
            self.hindsight.forget()
        self.warm = True

    def _step(self) -> tuple[Tensors, Step]:
        """One control step; returns the rows that are complete with it."""
        rows, step = self.rollout.step()
        if rows and isinstance(self.reward, ObservesSteps):
            closed = self.rollout.closed
            self.reward.observe_step(rows, self.every if closed is None else closed, step)
        if rows and self.reward is not None and self.reward.frozen:
            if isinstance(self.reward, HasComponents):
                self.tail.append(tt.each(rows, torch.clone))
            kept = {k: v for k, v in rows.items() if k not in self.unseen}
            rows = {**kept, "reward": self.reward(rows)}
        if self.successes is not None:
            if "success" not in step.log:
                raise ConfigError("this world knows no success: success_fraction=0")
            self.successes.push(rows, self.rollout.closed, step.log["success"], step.ended)
        if self.hindsight is not None:
            device = self.rollout.actor.device
            rows = self.hindsight.push(rows, self.rollout.closed, step.ended.to(device))
        return rows, step

    def _update(self, source: Source) -> dict[str, Any]:
        batch = source.sample(self.learner.batch_size)
        own = batch.pop(OWN, None)
        metrics = self.learner.update(batch)
        if "index" in batch:
            self._settle(batch["index"])
        if self.reward is not None and not self.reward.frozen:
            learned = self.reward.update(batch if own is None else {**batch, "reward": own})
            metrics |= {f"reward_{key}": value for key, value in learned.items()}
        return metrics

    def _settle(self, index: Tensor) -> None:
        if self.learner.priority is None:
            raise ConfigError("this learner does not say how far off it was: replay=uniform")
        self.replay.settle(index, self.learner.priority)

    def get_state(self) -> dict[str, Any]:
        """Everything but the learner; the rollout is missing where its environment cannot save."""
        return {
            "rollout": self.rollout.get_state() if self.rollout.savable else None,
            "replay": self.replay.get_state(),
            "successes": None if self.successes is None else self.successes.get_state(),
            "held": None if self.hindsight is None else self.hindsight.get_state(),
            "warm": self.warm,
            "debt": self.debt,
            "reward": self.reward.get_state() if isinstance(self.reward, Stateful) else None,
            "kept": {name: pack(part.get_state()) for name, part in self.kept.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        if state["warm"]:
            self.rollout.act_with(self.policy)
        for name, part in self.kept.items():
            part.set_state(unpack(state["kept"][name]))
        if state["rollout"] is None and self.kept:
            self.rollout.restart()
        if state["rollout"] is not None:
            self.rollout.set_state(state["rollout"])
            if self.hindsight is not None:
                self.hindsight.set_state(state["held"])
        self.replay.set_state(state["replay"])
        if self.successes is not None:
            self.successes.set_state(state["successes"])
        self.warm, self.debt = state["warm"], state["debt"]
        if isinstance(self.reward, Stateful):
            self.reward.set_state(state["reward"])
