"""Actor: executes a policy's action chunks step by step, in training, evaluation and deployment."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.cuda_graph import Captured
from embodied.core.device import device_of
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, remembered


class Actor:
    """Executes `execute` steps of each chunk, for n parallel environments with their own resets.

        step          0   1   2   3   4   5 ...        chunk = 4, execute = 2
        decide at 0  [a0  a1] .   .
        decide at 2          [a0  a1] .   .

    After a call, `decided` [n] (bool) marks the environments with a new decision in this step,
    `decision_obs` holds the observations of the running decisions, `stored_action` the action that
    a learner stores for them ([n, execute * A], or the policy's `row/action`), and `extras` the
    other values that the policy stores with each decision.

    Observations are moved to `device` (None: that of the policy's parameters), actions back. With
    `cuda_graph`, a decision of all environments together is one replayed CUDA graph (see
    `Captured` for which policies); decisions of only some environments run normally.
    """

    def __init__(
        self,
        policy: Policy,
        n: int,
        execute: int | None = None,
        explore: bool = False,
        cuda_graph: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.policy, self.n, self.explore = policy, n, explore
        self.execute = policy.chunk if execute is None else execute
        if not 1 <= self.execute <= policy.chunk:
            raise ValueError(f"execute={self.execute} is not in 1..{policy.chunk} (the chunk)")
        self.captured = Captured(policy) if cuda_graph else None
        self.device = device or device_of(policy)
        self.cursor = torch.full((n,), self.execute, device=self.device)
        self.every = torch.arange(n, device=self.device)
        self.carry: Tensors = self._initial()
        self.plan = torch.empty(0, device=self.device)
        self.decision_obs: Tensors = {}
        self.decided = torch.zeros(n, dtype=torch.bool, device=self.device)

    @torch.no_grad()
    def __call__(self, obs: Tensors, first: Tensor) -> Tensor:
        """Actions [n, A] for `obs`; `first` [n] (bool): a new episode starts, discard its plan."""
        home = first.device
        obs, first = tt.to(obs, self.device), first.to(self.device)
        self.decided = first | (self.cursor >= self.execute)
        if "executed_steps" in self.carry:
            self.carry = {**self.carry, "executed_steps": self.cursor}
        # With one decision per step every row decides: known without waiting for the device.
        if self.execute == 1 or self.decided.all():
            carry = tt.where(first, self._initial(), self.carry)
            self.decision_obs, self.carry, self.plan = self._decide(obs, carry)
            self.cursor = torch.zeros_like(self.cursor)
        elif self.decided.any():
            index = self.decided.nonzero().flatten()
            fresh = tt.where(first, self._initial(), self.carry) if first.any() else self.carry
            seen, carry, plan = self._decide(tt.take(obs, index), tt.take(fresh, index))
            self.decision_obs = {key: value.clone() for key, value in self.decision_obs.items()}
            self.plan = self.plan.index_copy(0, index, plan)
            self.carry = {key: value.clone() for key, value in fresh.items()}
            tt.put(self.decision_obs, index, seen)
            tt.put(self.carry, index, carry)
            self.cursor = self.cursor.index_fill(0, index, 0)
        self.carry = remembered(self.carry, obs)
        actions = self.plan[self.every, self.cursor]
        self.cursor = self.cursor + 1
        return actions.to(home)

    def _initial(self) -> Tensors:
        return tt.to(self.policy.initial(self.n), self.device)

    def _decide(self, obs: Tensors, carry: Tensors) -> tuple[Tensors, Tensors, Tensor]:
        noise = self.policy.sample_noise(tt.length(obs), self.explore)
        if self.captured is not None and len(noise) == self.n:
            seen, plan, carry = self.captured(obs, carry, noise)
            return seen, carry, plan
        decision_obs, carry = self.policy.observe(obs, carry, noise)
        plan, carry = self.policy.act(decision_obs, carry, noise)
        return decision_obs, carry, plan

    @property
    def stored_action(self) -> Tensor:
        """[n, D]: the action of each running decision that a learner stores."""
        if "row/action" in self.carry:
            return self.carry["row/action"]
        plan = self.plan[:, : self.execute]
        return plan.flatten(1) if plan.ndim > 2 else plan.squeeze(1)

    @property
    def extras(self) -> Tensors:
        """The other values stored with each running decision: the carry's `row/*`, by name."""
        return {key: value for key, value in tt.under(self.carry, "row").items() if key != "action"}

    @torch.no_grad()
    def preview(self, obs: Tensors) -> Tensors:
        """The observation of the next decision if it were made at `obs`; changes no state."""
        obs = tt.to(obs, self.device)
        noise = self.policy.sample_noise(self.n, self.explore)
        return self.policy.observe(obs, self.carry, noise)[0]

    def get_state(self) -> Tensors:
        return {
            "cursor": self.cursor,
            "plan": self.plan,
            **tt.nest(self.carry, "carry"),
            **tt.nest(self.decision_obs, "decision_obs"),
        }

    def set_state(self, state: Tensors) -> None:
        state = tt.to(state, self.device)
        self.cursor, self.plan = state["cursor"], state["plan"]
        self.carry, self.decision_obs = tt.under(state, "carry"), tt.under(state, "decision_obs")
