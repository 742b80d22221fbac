"""The rollout loop: act for a while, learn from that alone, throw it away."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from embodied.buffers.rollout import Segment
from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.env import Step
from embodied.core.reward import ObservesSteps, Reward, Scheduled, Stateful
from embodied.core.state_codec import pack, unpack
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner
from embodied.teachers.student_estimates import Estimates
from embodied.training import reward_hacking
from embodied.training.collector import Rollout
from embodied.training.trainer import Keeper


class Companion(Protocol):
    """Another student, whom the world lets play."""

    def told(self, metrics: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
        """How many steps it made since the last time; an update's metrics (perhaps none), with what
        there is to tell of it."""
        ...


class RolloutLoop:
    """`steps` counts environment steps, of all rows (and processes) together.

    One update follows every `learner.horizon` decisions' worth of steps: horizon x execute of each
    row. A decision still running then was made by older parameters, and is left out of the next
    batch. A reward is asked when the batch is complete, and learns from it afterwards.
    """

    def __init__(self, rollout: Rollout, learner: Learner, reward: Reward | None = None) -> None:
        self.rollout, self.learner, self.reward = rollout, learner, reward
        device, rows = rollout.actor.device, rollout.env.num_envs
        self.every = torch.arange(rows, device=device)
        self.steps = learner.horizon * rollout.actor.execute
        self.segment = Segment(rows, learner.horizon, device)
        self.kept: dict[str, Stateful] = {}  # what else a resumed run goes on with
        self.estimates: Estimates | None = None  # the learner's, for a teacher that needs them
        self.rival: Companion | None = None
        self.stale = torch.zeros(rows, dtype=torch.bool, device=device)
        self.age = 0
        self.newest: tuple[Tensors, Tensor] | None = None  # the last batch and what it was paid
        self._open()

    def run(self, keeper: Keeper) -> None:
        stride = self.rollout.env.num_envs * distributed.world()
        while keeper.running:
            metrics, step = self.advance(keeper.step + stride)
            more = 0
            if self.rival is not None:
                more, metrics = self.rival.told(metrics)
            keeper.advance(stride + more, metrics, step)

    def advance(self, step: int = 0) -> tuple[dict[str, Tensor], Step]:
        """One step of every row, which is the run's `step`, and an update where one is due; its
        metrics (perhaps none) and the world's step."""
        rows, played = self.rollout.step()
        if rows and isinstance(self.reward, ObservesSteps):
            closed = self.rollout.closed
            self.reward.observe_step(rows, self.every if closed is None else closed, played)
        if rows:
            self._store(rows, played)
        self.age += 1
        return self._update(step) if self.age == self.steps else {}, played

    def _open(self) -> None:
        """Begin a segment: what the policy remembers now is what its first decisions saw."""
        actor = self.rollout.actor
        carry = {k: v for k, v in actor.carry.items() if not k.startswith("row/")}
        self.carry = tt.each(carry, torch.clone)
        running = ~self.rollout.first.to(actor.device) & (actor.cursor < actor.execute)
        self.stale = running if actor.execute > 1 else torch.zeros_like(running)
        self.segment.clear()
        self.age = 0

    def _store(self, rows: Tensors, step: Step) -> None:
        closed, marks = self.rollout.closed, {"ended": step.ended, "first": self.rollout.began}
        if self.estimates is not None:
            marks |= {key: step.log[key] for key in ("ticket", "learn")}
        if closed is None:
            self.segment.add({**rows, **marks}, None)
            return
        rows = {**rows, **tt.take(marks, closed)}
        fresh = (~self.stale[closed]).nonzero().flatten()
        self.stale[closed] = False
        self.segment.add(tt.take(rows, fresh), closed[fresh])

    def _update(self, step: int) -> dict[str, Tensor]:
        batch = {**self.segment.batch(), **tt.nest(self.carry, "carry")}
        metrics = self._rewarded(batch, step)
        metrics = self.learner.update(batch) | metrics | self._tell(batch)
        self._open()
        return metrics

    def _tell(self, batch: Tensors) -> dict[str, Tensor]:
        """What the learner made of the batch goes to the teacher that needs it; how it goes."""
        if self.estimates is None or self.learner.estimates is None:
            return {}
        parts = {"ticket": batch["ticket"], **self.learner.estimates}
        self.estimates.tell(**{key: part[batch["valid"]] for key, part in parts.items()})
        how = self.estimates.teacher.metrics()
        return {f"teacher_{key}": torch.tensor(value) for key, value in how.items()}

    def _rewarded(self, batch: Tensors, step: int) -> dict[str, Tensor]:
        """Put the reward's own numbers into `batch`; what it learned from them."""
        reward = self.reward
        if reward is None:
            return {}
        if isinstance(reward, Scheduled):
            reward.set_step(step)
        at = batch["valid"].flatten().nonzero().flatten()
        grid = {k: v for k, v in batch.items() if not k.startswith("carry/")}
        rows = tt.each(grid, lambda value: value.flatten(0, 1)[at])
        paid = torch.zeros_like(batch["reward"]).flatten()
        paid[at] = reward(rows).to(paid.dtype)
        self.newest = rows, paid[at]
        batch["reward"] = paid.view_as(batch["reward"])
        if reward.frozen:
            return {}
        return {f"reward_{key}": value for key, value in reward.update(rows).items()}

    def paid(self) -> dict[str, Tensor]:
        """Mean rewards of the last batch that was learned from."""
        if self.reward is None or self.newest is None:
            return {}
        return reward_hacking.describe(self.reward, *self.newest)

    def get_state(self) -> dict[str, Any]:
        """Everything but the learner; where the environment cannot save its rows, the segment
        begins again with them."""
        reward = self.reward.get_state() if isinstance(self.reward, Stateful) else None
        kept = {name: pack(part.get_state()) for name, part in self.kept.items()}
        if not self.rollout.savable:
            return {"rollout": None, "reward": reward, "kept": kept}
        return {
            "rollout": self.rollout.get_state(),
            "reward": reward,
            "kept": kept,
            "segment": self.segment.get_state(),
            "carry": self.carry,
            "stale": self.stale,
            "age": self.age,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        if isinstance(self.reward, Stateful):
            self.reward.set_state(state["reward"])
        for name, part in self.kept.items():
            part.set_state(unpack(state["kept"][name]))
        if state["rollout"] is None:
            if self.kept:
                self.rollout.restart()
            return
        self.rollout.set_state(state["rollout"])
        self.segment.set_state(state["segment"])
        self.carry, self.stale, self.age = state["carry"], state["stale"], state["age"]
