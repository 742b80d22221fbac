"""Collector: steps a vector environment with a policy and returns completed transitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied.buffers.pending import NStepBuffer
from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.env import REAL, FiniteCheck, NotSavable, Step, VecEnv
from embodied.core.env_contract import FirstSteps, called, is_users
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors

if TYPE_CHECKING:
    from embodied.learners.learner import Learner

# Flags (bool) that `Step.log` may contain; they are stored with each transition: a person took over
# the action; a constraint was violated.
EXTRA_FLAGS = ("intervened", "violated", REAL)


def behaviour_of(learner: Learner, policy: Policy) -> Policy:
    """The policy that collects for `learner`: its behaviour policy, or the run's `policy` where
    that is the policy it trains, or contains it."""
    chosen = learner.behaviour_policy()
    return policy if chosen is learner.policy else chosen


class Collector:
    """A running environment and its pending decisions.

    A decision lasts from the step in which the policy made it until its chunk is executed or the
    episode ends. Its transition has `obs/*` as the policy observed them, `action`, the discounted
    `reward` of its k steps, `discount` = gamma^k (0 where the environment terminated) and
    `next_obs/*`. With `n_step` > 1 a transition spans up to that many decisions of one episode;
    `keep_single` is that of `NStepBuffer`. With `executed_steps`, a transition of a chunk has that
    column (int64), its k. `flags`: further ones of `Step.log` (bool) that are stored. Transitions
    are on `device` (None: the policy's).

    After a step, `finished` holds the parallel envs whose decisions were completed (int64; None:
    all, in order), and `is_first` [B] (bool) tells whether an env's pending decision is the first
    one of its episode.
    """

    behind = False  # whether environment steps wait for the learner
    restarted: Tensor | None = None  # envs whose running episodes were lost in the last step

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        gamma: float,
        n_step: int = 1,
        execute: int | None = None,
        seed: int | None = None,
        keep_single: bool = False,
        device: torch.device | None = None,
        executed_steps: bool = False,
        flags: Sequence[str] = (),
    ) -> None:
        self.env, self.gamma, self.execute, self.device = env, gamma, execute, device
        self.n_step = NStepBuffer(n_step, keep_single) if n_step > 1 else None
        self.executed_steps = executed_steps
        self.flags = dict.fromkeys((*EXTRA_FLAGS, *flags))
        self.finite = FiniteCheck(called(env))
        self.obs = env.reset(seed)
        self.check = FirstSteps(env) if is_users(env) else None
        self.first = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        self.act_with(policy)

    def act_with(self, policy: Policy) -> None:
        """Switch to another policy; pending decisions are dropped."""
        self.actor = Actor(policy, self.env.num_envs, self.execute, True, device=self.device)
        self.augments = policy.augments
        self.pending: Tensors = {}
        self.finished: Tensor | None = None
        self.is_first = torch.ones(self.env.num_envs, dtype=torch.bool, device=self.actor.device)
        if self.n_step is not None:
            self.n_step = NStepBuffer(self.n_step.n, self.n_step.keep_single)

    def step(self) -> tuple[Tensors, Step]:
        """One control step of all parallel envs: `act`, then `complete`."""
        return self.complete(self.act())

    def act(self) -> Step:
        action = self.actor(self.obs, self.first)
        return self.env.step(action.to(self.env.device))

    def complete(self, step: Step) -> tuple[Tensors, Step]:
        """Transitions that `step` completed (or none), and `step` on the actor's device."""
        if self.check is not None:
            self.check.saw(tt.to(self.obs, self.env.device), step)
            self.check = None if self.check.done else self.check
        self.finite.add(step.reward, step.next_obs)
        if self.actor.device != self.env.device:
            step = step.to(self.actor.device)
        first = self.first.to(self.actor.device)
        if self.actor.execute == 1:
            self.is_first = first
            rows, self.finished = self._single(step)
        else:
            self.is_first = torch.where(self.actor.decided, first, self.is_first)
            rows, self.finished = self._chunked(step)
        if self.n_step is not None:
            rows = self.n_step.push(rows, self.finished, step.ended)
        self.obs, self.first = step.obs, step.ended
        return rows, step

    def _next(self, step: Step) -> Tensors:
        seen = self.actor.preview(step.next_obs) if self.augments else step.next_obs
        return tt.nest(seen, "next_obs")

    def _begun(self) -> Tensors:
        return {
            **tt.nest(self.actor.decision_obs, "obs"),
            "action": self.actor.stored_action,
            **self.actor.extras,
        }

    def _single(self, step: Step) -> tuple[Tensors, Tensor | None]:
        rows = {
            **self._begun(),
            **self._done(step),
            "reward": step.reward,
            "discount": self.gamma * (~step.terminated).float(),
            **self._next(step),
            **{key: step.log[key] for key in self.flags if key in step.log},
        }
        return rows, None

    def _chunked(self, step: Step) -> tuple[Tensors, Tensor | None]:
        begun = self._begun() | self._done(step)
        fresh = {"reward": torch.zeros_like(step.reward), "discount": torch.ones_like(step.reward)}
        marks = {key: step.log[key] for key in self.flags if key in step.log}
        fresh |= tt.each(marks, torch.zeros_like)
        self.pending = tt.where(self.actor.decided, begun | fresh, self.pending or begun | fresh)
        self.pending |= {key: self.pending[key] | mark for key, mark in marks.items()}
        self.pending["reward"] = self.pending["reward"] + self.pending["discount"] * step.reward
        self.pending["discount"] = (
            self.pending["discount"] * self.gamma * (~step.terminated).float()
        )
        closing = step.ended | (self.actor.cursor >= self.actor.execute)
        closed = closing.nonzero().flatten()
        if not len(closed):
            return {}, closed
        rows = self.pending | self._next(step)
        if self.executed_steps:
            rows["executed_steps"] = self.actor.cursor
        return tt.take(rows, closed), closed

    def _done(self, step: Step) -> Tensors:
        """The executed action, where it differs from the one that the policy chose."""
        if "executed" not in step.log:
            return {}
        if self.actor.execute > 1:
            raise ConfigError("human interventions need one decision per step: execute=1")
        return {"action": step.log["executed"]}

    def require_finite(self) -> None:
        """NotFinite if a step since the last call was not; a checkpoint holds only finite ones."""
        self.finite.read()

    def metrics(self) -> dict[str, Tensor]:
        """Of collecting; none where it is done by the process that learns."""
        return {}

    @property
    def savable(self) -> bool:
        try:
            self.env.get_state()
        except NotSavable:
            return False
        return True

    def restart(self, seed: int | None = None) -> None:
        """Reset all parallel envs and drop pending decisions: after a resume without the
        environment's saved state, or where the environment was used for something else."""
        self.obs = self.env.reset(seed)
        self.first = torch.ones_like(self.first)
        self.act_with(self.actor.policy)

    def get_state(self) -> dict[str, Any]:
        """State of environment, actor and pending decisions; NotSavable if the env cannot save."""
        return {
            "env": self.env.get_state(),
            "actor": self.actor.get_state(),
            "obs": self.obs,
            "first": self.first,
            "pending": self.pending,
            "is_first": self.is_first,
            "n_step": None if self.n_step is None else self.n_step.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.env.set_state(state["env"])
        self.actor.set_state(state["actor"])
        here, there = self.actor.device, self.env.device
        self.obs, self.first = tt.to(state["obs"], there), state["first"].to(there)
        self.pending, self.is_first = tt.to(state["pending"], here), state["is_first"].to(here)
        if self.n_step is not None:
            self.n_step.set_state(tt.state_to(state["n_step"], here))
