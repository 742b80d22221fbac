"""Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019), one fused kernel per step.

Results and saved state equal those of `torch.optim.Adam(fused=True)`, but `torch.optim.Optimizer`
imports `torch._dynamo` when used (1.5 to 2.5 s and 70 MB per process) and has more overhead.

Fitting a small model: a gradient step, loops over batches and minibatches, held-out indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from embodied.core import distributed
from embodied.core.tensors import Tensors, length, take

STATE = ("step", "exp_avg", "exp_avg_sq")


class Optimizer(Protocol):
    """The interface of optimisers; torch's optimisers have it."""

    def zero_grad(self) -> None: ...
    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Adam:
    """Adam with one parameter group. `weight_decay` is L2, added to the gradient; `decoupled`: it
    shrinks the parameters instead, as AdamW's.

    `partial`: parameters without a gradient stay as they are. `local`: the same, and gradients are
    taken as they are, without a mean over processes.
    `step` sets the gradients to None, so `zero_grad` is not needed; with several processes it uses
    the mean gradient. It never synchronises with the device, so a CUDA graph can record it.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        local: bool = False,
        partial: bool = False,
    ) -> None:
        self.decoupled = decoupled
        self.local = local
        self.partial = partial or local
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), **settings}]
        self.state: dict[int, dict[str, Tensor]] = {}  # by place in `params`; made at first use

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients; RuntimeError if a parameter has none, unless `partial`."""
        group = self.param_groups[0]
        parameters: list[Tensor] = group["params"]
        grads = [p.grad for p in parameters if p.grad is not None]
        self.prepare()
        states = list(self.state.values())
        if len(grads) < len(parameters):
            if not self.partial:
                raise RuntimeError(
                    "Adam got a parameter without a gradient: pass only parameters that the loss "
                    "uses"
                )
            used = [p.grad is not None for p in parameters]
            parameters = [*compress(parameters, used)]
            states = [*compress(states, used)]
        if not self.local:
            distributed.average(grads)
        steps, means, squares = ([state[name] for state in states] for name in STATE)
        self.state[0]["step"].add_(1)  # one count for all
        fused = torch._fused_adamw_ if self.decoupled else torch._fused_adam_  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        fused(
            parameters,
            grads,
            means,
            squares,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        for p in parameters:
            p.grad = None

    def zero_grad(self) -> None:
        """Forget the gradients of a loss that was not stepped on."""
        for p in self.param_groups[0]["params"]:
            p.grad = None

    def prepare(self) -> None:
        """Make the moments, if this is the first step."""
        if self.state:
            return
        parameters: list[Tensor] = self.param_groups[0]["params"]
        count = torch.zeros((), device=parameters[0].device)
        for i, p in enumerate(parameters):
            moments = (torch.zeros_like(p, requires_grad=False) for _ in STATE[1:])
            self.state[i] = dict(zip(STATE, (count, *moments), strict=True))

    def moments(self) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Each parameter with its mean and mean square of gradients, after `prepare`."""
        states = [self.state[i] for i in range(len(self.state))]
        found = [(state["exp_avg"], state["exp_avg_sq"]) for state in states]
        return list(zip(self.param_groups[0]["params"], found, strict=True))

    @property
    def count(self) -> int:
        """Steps made, after `prepare`."""
        return int(self.state[0]["step"])

    def advance(self, steps: int) -> None:
        """Count `steps` that native code made on the parameters and moments."""
        self.state[0]["step"].add_(steps)  # one count for all

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of `torch.optim.Adam`: tensors by parameter index."""
        group = self.param_groups[0]
        return {
            "state": {i: dict(state) for i, state in self.state.items()},
            "param_groups": [{**group, "fused": True, "params": list(range(len(group["params"])))}],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of this class or of `torch.optim.Adam`."""
        group = self.param_groups[0]
        saved = state_dict["param_groups"][0]
        if len(saved["params"]) != len(group["params"]):
            raise ValueError("the saved Adam state has a different number of parameters")
        for key in group.keys() & saved.keys() - {"params"}:
            value = saved[key]
            group[key] = value.clone() if isinstance(value, Tensor) else value
        places = {old: i for i, old in enumerate(saved["params"])}
        self.state = {}
        count = None
        for old, state in state_dict["state"].items():
            p = group["params"][places[old]]
            count = state["step"].clone().to(p.device) if count is None else count
            moments = [state[name].clone().to(p.device) for name in STATE[1:]]
            self.state[places[old]] = dict(zip(STATE, (count, *moments), strict=True))


def gradient_step(optimizer: Optimizer, loss: Tensor) -> None:
    """Minimise `loss` by one step of the optimiser."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def fit(
    parameters: Iterable[nn.Parameter],
    loss_of_batch: Callable[[], Tensor],
    updates: int,
    lr: float,
    decreasing: bool = False,
) -> float:
    """Take `updates` steps of AdamW on the losses of new batches; `decreasing`: the learning rate
    falls from `lr` to 0 as a cosine. Returns the mean loss of the last tenth of the updates."""
    adam = Adam(parameters, lr, weight_decay=1e-3, decoupled=True, local=True)
    late: list[float] = []
    for update in range(updates):
        if decreasing:
            adam.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * update / updates)) / 2
        loss = loss_of_batch()
        gradient_step(adam, loss)
        if update >= int(0.9 * updates):
            late.append(loss.item())
    return sum(late) / len(late)


def held_out(count: int, share: float, random: torch.Generator) -> Tensor:
    """Random indices of about `share` of `count` items, at least one; none of no items."""
    return torch.randperm(count, generator=random)[: max(1, round(share * count))]


def minibatches(
    learn: Callable[[Tensors], dict[str, Tensor]],
    transitions: Tensors,
    size: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Call `learn` on random minibatches of `size` transitions and average its metrics.

    Uses each transition once. The batch of an on-policy learner is too large for a single gradient
    step.
    """
    count = length(transitions)
    order = torch.randperm(count, generator=generator, device=generator.device)
    seen = [learn(take(transitions, part)) for part in order.split(size)]
    return {key: torch.stack([each[key] for each in seen]).mean() for key in seen[0]}
