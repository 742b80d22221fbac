"""Actor: the only queue of action chunks; training, evaluation, viewer and robot use it."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.cuda_graph_decision import Captured
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors


class Actor:
    """Plays a policy's chunks, `execute` steps of each, for n rows that restart independently.

        step          0   1   2   3   4   5 ...        chunk = 4, execute = 2
        decide at 0  [a0  a1] .   .
        decide at 2          [a0  a1] .   .

    After a call, `decided` [n] (bool) says which rows made a new decision in it, `seen` holds what
    those decisions saw, `choice` the action that a learner stores for them ([n, execute * A], or
    the policy's `row/action`), and `rows` what else the policy wants stored.

    With `cuda_graph`, decisions of all rows together are one replayed graph (`Captured`, which says
    for which policies); those of some rows only are made as ever.
    """

    def __init__(
        self,
        policy: Policy,
        n: int,
        execute: int | None = None,
        explore: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        self.policy, self.n, self.explore = policy, n, explore
        self.execute = policy.chunk if execute is None else execute
        if not 1 <= self.execute <= policy.chunk:
            raise ValueError(f"execute={self.execute} is not in 1..{policy.chunk} (the chunk)")
        self.captured = Captured(policy) if cuda_graph else None
        self.device = next((p.device for p in policy.parameters()), torch.device("cpu"))
        self.cursor = torch.full((n,), self.execute, device=self.device)
        self.every = torch.arange(n, device=self.device)
        self.carry: Tensors = policy.initial(n)
        self.plan = torch.empty(0)
        self.seen: Tensors = {}
        self.decided = torch.zeros(n, dtype=torch.bool, device=self.device)

    @torch.no_grad()
    def __call__(self, obs: Tensors, first: Tensor) -> Tensor:
        """Actions [n, A] for `obs`; rows `first` [n] (bool) begin an episode, planless."""
        home = first.device
        obs, first = tt.to(obs, self.device), first.to(self.device)
        self.decided = first | (self.cursor >= self.execute)
        if "followed" in self.carry:
            self.carry = {**self.carry, "followed": self.cursor}
        if self.decided.all():
            carry = tt.where(first, self.policy.initial(self.n), self.carry)
            self.seen, self.carry, self.plan = self._decide(obs, carry)
            self.cursor = torch.zeros_like(self.cursor)
        elif self.decided.any():
            self._decide_some(obs, first)
        actions = self.plan[self.every, self.cursor]
        self.cursor = self.cursor + 1
        return actions.to(home)

    def _decide(self, obs: Tensors, carry: Tensors) -> tuple[Tensors, Tensors, Tensor]:
        noise = self.policy.draw(tt.length(obs), self.explore)
        if self.captured is not None and len(noise) == self.n:
            seen, plan, carry = self.captured(obs, carry, noise)
            return seen, carry, plan
        seen, carry = self.policy.observe(obs, carry, noise)
        plan, carry = self.policy.act(seen, carry, noise)
        return seen, carry, plan

    def _decide_some(self, obs: Tensors, first: Tensor) -> None:
        index = self.decided.nonzero().flatten()
        fresh = (
            tt.where(first, self.policy.initial(self.n), self.carry) if first.any() else self.carry
        )
        seen, carry, plan = self._decide(tt.take(obs, index), tt.take(fresh, index))
        self.seen = {key: value.clone() for key, value in self.seen.items()}
        self.plan = self.plan.index_copy(0, index, plan)
        self.carry = {key: value.clone() for key, value in fresh.items()}
        tt.put(self.seen, index, seen)
        tt.put(self.carry, index, carry)
        self.cursor = self.cursor.index_fill(0, index, 0)

    @property
    def choice(self) -> Tensor:
        """[n, D]: what a learner stores as the action of each row's running decision."""
        if "row/action" in self.carry:
            return self.carry["row/action"]
        plan = self.plan[:, : self.execute]
        return plan.flatten(1) if plan.ndim > 2 else plan.squeeze(1)

    @property
    def rows(self) -> Tensors:
        """What else the policy wants stored with each row's running decision, without `row/`."""
        return {key: value for key, value in tt.under(self.carry, "row").items() if key != "action"}

    @torch.no_grad()
    def peek(self, obs: Tensors) -> Tensors:
        """`obs` as the policy would see it at its next decision, changing nothing."""
        obs = tt.to(obs, self.device)
        return self.policy.observe(obs, self.carry, self.policy.draw(self.n, self.explore))[0]

    def get_state(self) -> Tensors:
        """Plan, carry and cursor, to go on exactly."""
        return {
            "cursor": self.cursor,
            "plan": self.plan,
            **tt.nest(self.carry, "carry"),
            **tt.nest(self.seen, "seen"),
        }

    def set_state(self, state: Tensors) -> None:
        """Go on from `get_state`."""
        self.cursor, self.plan = state["cursor"], state["plan"]
        self.carry, self.seen = tt.under(state, "carry"), tt.under(state, "seen")
