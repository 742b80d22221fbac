"""RAMP: PPO and a planner that help each other, on facts and amounts (2025).

From the steps of masked PPO a safe model of the actions is learned (NSAM,
`embodied.models.nsam`), in which a planner looks for a shorter way to the goal than the one that is
known. Some of the parallel environments follow the plan; PPO learns from their decisions as from
its own, with its own log-probabilities, so that its clip is what limits the imitation.

Differences from the paper: trajectories are not shortened by themselves, as all of their steps are
in the model, where a shortest plan is at most as long; a fixed share of the environments follows
the plan, in place of one episode for each new plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Fraction, Number, Positive
from embodied.core.build import ConfigError, unknown
from embodied.core.policy import Policy
from embodied.core.spec import MASK, Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy import ppo
from embodied.models.nsam import Nsam
from embodied.models.numeric_planner import Plan, State, breadth_first, enhsp, reached

FACTS, AMOUNTS = "facts", "amounts"  # the observations that the models are about
SAME = 1e-4  # difference of what was expected and what is observed, of numbers up to 1


@dataclass(frozen=True)
class Config(ppo.Config):
    """Settings of RAMP: those of PPO, the goal and the planner."""

    goal: Mapping[str, Number] = field(
        default_factory=dict[str, float]
    )  # by name: the value of a fact, the least of an amount
    planner: Literal["breadth_first", "enhsp"] = "breadth_first"  # enhsp needs Java
    seconds: Positive = 60.0  # for a plan by enhsp
    states: Count = 20_000  # for a plan by breadth_first
    guided: Fraction = 0.25  # share of the parallel environments that follow the plan
    longest: Count = 200  # steps of a plan at most
    shortest: CountOrZero = 5  # a plan of so few steps is not improved


class PlanFollower(Policy):
    """`base`, but rows of the first `share` of the parallel environments follow the plan as long as
    they observe what it expects."""

    plan: Tensor
    expected: Tensor
    steps: Tensor

    def __init__(self, base: Policy, share: float, longest: int) -> None:
        super().__init__()
        self.spec = base.spec
        self.base = base
        self.share = share
        size = sum(base.spec.obs[name].size for name in (FACTS, AMOUNTS))
        self.register_buffer("plan", torch.zeros(longest, dtype=torch.int64))
        self.register_buffer("expected", torch.zeros(longest, size))
        self.register_buffer("steps", torch.tensor(0))

    def initial(self, n: int) -> Tensors:
        guided = torch.arange(n, device=self.plan.device) < round(self.share * n)
        return {"cursor": torch.where(guided, 0, len(self.plan))}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.base.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        own, _ = self.base.act(obs, {}, noise)
        at = carry["cursor"]
        place = at.clamp(max=len(self.plan) - 1)
        seen = torch.cat([obs[FACTS], obs[AMOUNTS]], 1)
        same = ((self.expected[place] - seen).abs() < SAME * seen.abs().clamp(min=1)).all(1)
        follows = (at < self.steps) & same
        action = torch.where(follows[:, None], self.plan[place][:, None], own)
        return action, {"cursor": torch.where(follows, at + 1, len(self.plan))}

    @torch.no_grad()
    def follow(self, plan: Plan, states: list[State]) -> None:
        """Set the plan, and the state that each of its steps begins in."""
        rows = np.stack([np.concatenate(state) for state in states[: len(plan)]])
        self.plan[: len(plan)] = torch.tensor(plan)
        self.expected[: len(plan)] = torch.from_numpy(rows).float()
        self.steps.fill_(len(plan))


class Ramp(ppo.Ppo):
    """`update` as in PPO; before it, the models learn from the batch, and the planner is asked
    where one of them has changed. Metrics: `plan`, its steps (0: none), and `known`, how many
    actions have a model."""

    usual_policy = "categorical"
    takes_memory = False

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        for name in (FACTS, AMOUNTS, MASK):
            if name not in spec.obs:
                raise ConfigError(f"learner=ramp needs the observation {name}: env=craft")
        if spec.act.shape or policy.chunk > 1:
            raise ConfigError("learner=ramp needs actions that are one choice, one at a time")
        facts, amounts = spec.obs[FACTS].names or (), spec.obs[AMOUNTS].names or ()
        if not config.goal:
            known = ", ".join([*facts, *amounts])
            raise ConfigError(f"learner=ramp needs a goal, learner.goal={{NAME: VALUE}}: {known}")
        for name in config.goal:
            if name not in (*facts, *amounts):
                raise unknown("learner.goal", name, [*facts, *amounts])
        super().__init__(config, policy, spec, run)
        self.goal = (
            {facts.index(name): v > 0 for name, v in config.goal.items() if name in facts},
            {amounts.index(name): v for name, v in config.goal.items() if name in amounts},
        )
        self.models = Nsam(spec.act.choices[0])
        self.follower = PlanFollower(policy, config.guided, config.longest)
        self.start: State | None = None

    def behaviour_policy(self) -> Policy:
        return self.follower

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        changed = self._learn_models(batch)
        if changed and self._may_improve():
            self._plan()
        metrics = super().update(batch)
        known = sum(model is not None for model in self.models.models)
        return metrics | {
            "plan": self.follower.steps.float(),
            "known": self.follower.steps.new_tensor(known).float(),
        }

    def _may_improve(self) -> bool:
        steps = int(self.follower.steps)
        return not steps or steps > self.config.shortest

    def _learn_models(self, batch: Tensors) -> bool:
        """Add the allowed steps of a batch to the models; whether one of them changed."""
        obs, following = under(batch, "obs"), under(batch, "next_obs")
        allowed = obs[MASK].gather(2, batch["action"][..., None]).squeeze(2) > 0
        chosen = batch["valid"] & allowed
        first = (batch["first"] & batch["valid"]).nonzero()
        if len(first):
            now = self._states(obs, tuple(first[0].tolist()))
            self.start = (now[0][0], now[1][0])
        action = batch["action"][chosen].cpu().numpy()
        return self.models.add(action, self._states(obs, chosen), self._states(following, chosen))

    def _states(self, obs: Tensors, where: Any) -> State:
        """Facts [n, F] and amounts [n, K] of observations [T, B, ...] at the places `where`."""
        facts = obs[FACTS][where].cpu().numpy() > 0.5
        amounts = obs[AMOUNTS][where].cpu().double().numpy()
        return np.atleast_2d(facts), np.atleast_2d(amounts)

    def _plan(self) -> None:
        """Ask the planner, and follow its plan where that is the first or shorter than before."""
        if self.start is None:
            return
        models = self.models.models
        if self.config.planner == "enhsp":
            plan = enhsp(models, self.start, self.goal, self.config.seconds)
        else:
            plan = breadth_first(models, self.start, self.goal, self.config.states)
        best = int(self.follower.steps) or self.config.longest + 1
        if plan and len(plan) < best:
            states = self._run(plan)
            if states is not None:
                self.follower.follow(plan, states)

    def _run(self, plan: Plan) -> list[State] | None:
        """The states of a plan, from the first to the goal; None if a model does not allow it."""
        assert self.start is not None
        states = [self.start]
        for number in plan:
            model = self.models.models[number]
            facts, amounts = states[-1][0][None], states[-1][1][None]
            if model is None or not model.applicable(facts, amounts)[0]:
                return None
            after = model.after(facts, amounts)
            states.append((after[0][0], after[1][0]))
        return states if reached(states[-1], self.goal) else None

    def get_state(self) -> dict[str, Any]:
        steps = [torch.from_numpy(each) for each in self.models.steps]
        start = None if self.start is None else [torch.from_numpy(part) for part in self.start]
        return super().get_state() | {"steps": steps, "start": start}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        facts = self.follower.spec.obs[FACTS].size
        self.models.restore([each.cpu().numpy() for each in state["steps"]], facts)
        self.start = None
        if state["start"] is not None:
            true, amounts = state["start"]
            self.start = (true.cpu().numpy(), amounts.cpu().numpy())
