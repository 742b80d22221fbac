"""Learner: base class of training methods; `update` improves a policy from a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from embodied.core import checkpoint
from embodied.core.build import Node, build
from embodied.core.files import MALFORMED, reading
from embodied.core.policy import Policy
from embodied.core.saved_file import fitting
from embodied.core.saved_node import require_inside
from embodied.core.tensors import Tensors
from embodied.nn.optim import Adam, Optimizer


@dataclass(frozen=True)
class RunPlan:
    """What a learner may know of the run that it is built for; 0 where it is not known."""

    updates: int = 0
    """Updates of the whole run; not known in on-policy training, and where a schedule of
    `data.utd_ratio` decides."""
    decisions: int = 0
    """Decisions of the whole run, of all parallel environments of this process."""
    execute: int | None = None
    """Steps of each action chunk that are executed (None: all)."""


UNPLANNED = RunPlan()
SIZES = ("batch_size", "horizon", "segment", "gamma", "n_step")


class Learner(nn.Module):
    """A training method: losses, optimisers and one `update`.

    `data` says how it is trained: "offline" (a fixed dataset), "off_policy" (a replay buffer) or
    "on_policy" (a batch of the current policy's own steps). `rows` says how demonstrations are
    stored: transitions with rewards ("decisions"), action chunks to imitate ("chunks"), or labelled
    pairs of segments ("pairs": `obs/*`, `action` [n, 2, segment, ...], and `label` [n], the
    probability that the second one is preferred).
    `batch_size` is the number of transitions of one `update`; `gamma` and `n_step` are applied when
    transitions are stored; `columns` are further columns that need the rest of an episode
    ("returns", "next_action"; see embodied.buffers.pending). If a batch has a column
    `weight` (prioritised or weighted sampling), a learner that supports it multiplies its errors by
    it (`ReportsErrors`).

    An on-policy learner sets `horizon` instead of a batch size: decisions of each parallel
    environment per update. Its batch is in the order of time, with leading dimensions [T, B]:
    `obs/*`, `action` (the policy's `row/action` if there is one), the policy's other `row/*` by
    name, `reward` (discounted within a chunk), `discount` (gamma^k; 0 only after a termination),
    `next_obs/*` (the true next observation, also at a time limit: bootstrap from it), and bool:
    `ended` (the episode ended with this decision), `first` (it started with it), `valid` (false:
    padding, as environments finish different numbers of chunks). `carry/*` [B, ...] is the
    recurrent state before the first decision (not yet reset where that decision is `first`).
    Log-probabilities and values are not stored: `update` first computes them with the parameters
    that collected the batch.

    If a batch has `learn` [T, B] (bool), decisions where it is false get no gradient.
    """

    data: ClassVar[Literal["offline", "off_policy", "on_policy"]]
    rows: ClassVar[Literal["decisions", "chunks", "pairs"]] = "decisions"
    usual_policy: ClassVar[str] = ""
    """The option of `policy=` that is usual with this learner, for continuous actions."""
    policy: Any  # the Policy that is trained; constructors say of which kind
    batch_size: int
    horizon: int = 0
    segment: int = 0
    """With rows "pairs": steps of a segment."""
    keep_batches: int = 1
    """On-policy: how many of the newest batches an update sees, side by side along B, the newest
    first (`embodied.buffers.rollout`)."""
    adapt_every: int = 0
    """On-policy: decisions of each parallel environment between two calls of `adapt_behaviour`; 0:
    it is never called."""
    gamma: float = 0.99
    n_step: int = 1
    uses_executed_steps: ClassVar[bool] = False
    """Transitions of action chunks have `executed_steps` [n] (int64): how many steps of the chunk
    were executed before the episode ended."""
    columns: tuple[str, ...] = ()
    keeps_stale: ClassVar[bool] = False
    """On-policy: the batch has also decisions that were running at the last update."""
    counters: ClassVar[tuple[str, ...]] = ()
    """Attributes, numbers or tensors, saved and restored besides the module and the optimisers."""
    losses: ClassVar[tuple[str, ...]] = ("_loss",)
    """The methods that can be compiled (`embodied.learners.acceleration`)."""
    config: Any
    optims: dict[str, Adam]
    _step: Callable[..., Tensors]
    """The part of `update` that reads only its last argument, a batch, and tensors of the learner,
    which can be recorded as a CUDA graph."""
    node: dict[str, Any]

    def __init__(self, config: Any = None, policy: Policy | None = None) -> None:
        """Set `config`, `policy`, and what `config` has of the sizes that a run asks for."""
        super().__init__()
        self.config = config
        self.optims = {}
        if policy is not None:
            self.policy = policy
        for name in SIZES:
            if hasattr(config, name):
                setattr(self, name, getattr(config, name))

    @classmethod
    def imitates(cls) -> bool:
        """Whether it imitates a person's steps of demonstrations, and not a policy's."""
        return cls.rows == "chunks"

    def behaviour_policy(self) -> Policy:
        """The policy that collects the environment steps, asked for once before the first step. A
        learner with another one than `policy` makes it a submodule and changes its parameters in
        place; evaluation and checkpoints use `policy`."""
        return self.policy

    def adapt_behaviour(self, batch: Tensors) -> None:
        """Change the behaviour policy by what was collected: a batch of `update` that is not
        complete yet, and is empty or one of past decisions right after an update."""
        raise NotImplementedError(f"{type(self).__name__} does not implement adapt_behaviour")

    def refreshed(self, carry: Tensors) -> Tensors:
        """On-policy: with what the policy acts on after an update, in place of the `carry` [B, ...]
        that older parameters made."""
        return carry

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        """One update from `batch`; returns metrics as detached 0-d tensors on the device."""
        raise NotImplementedError(f"{type(self).__name__} does not implement update")

    def fit(self, transitions: Tensors) -> None:
        """Set the normalisers of the policy (and of the critics, if any) from data."""
        self.policy.fit(transitions)

    def descend(self, name: str, loss: Tensor) -> None:
        """One gradient step of the optimiser `name` on `loss`."""
        loss.backward()
        self.optims[name].step()

    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimisers by name, for saving and resuming."""
        return dict(self.optims)

    def get_state(self) -> dict[str, Any]:
        """Parameters, targets and optimiser states: all that an exact resume needs."""
        optimizers = {name: o.state_dict() for name, o in self.optimizers().items()}
        counted = {name: getattr(self, name) for name in self.counters}
        return {"module": self.state_dict(), "optimizers": optimizers, **counted}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned."""
        self.load_state_dict(state["module"])
        for name, optimizer in self.optimizers().items():
            optimizer.load_state_dict(state["optimizers"][name])
        for name in self.counters:
            setattr(self, name, state[name])


@runtime_checkable
class TakesDemonstrations(Protocol):
    """An on-policy learner that also learns from demonstrations."""

    def set_demonstrations(self, demonstrations: Tensors) -> None:
        """Set the demonstrations, as chunks: `obs/*` [N, ...], `action` [N, H, ...], `valid` [N, H]
        (bool)."""
        ...


@runtime_checkable
class ReportsErrors(Protocol):
    """A learner that reports the sizes of its errors, for prioritised sampling."""

    priority: Tensor | None
    """|error| [batch_size] of the last batch, unweighted; None before a batch with `weight`."""


@runtime_checkable
class HasCritic(Protocol):
    """A learner whose critic can be made anew while it trains."""

    critic: nn.Module

    def restart_critic(self) -> None:
        """Forget what was learned of values."""
        ...


@runtime_checkable
class HasStateValues(Protocol):
    """An on-policy learner that estimates values in units of environment rewards."""

    estimates: Tensors | None
    """`advantage` and `value` [T, B] of the last batch; None if their unit is another one."""

    def state_values(self, obs: Tensors) -> Tensor:
        """V [N] of observations [N, ...] at the start of episodes."""
        ...


@contextmanager
def frozen(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Freeze `parameters` (no gradients) inside the `with` block, also where it raises."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@torch.no_grad()
def soft_update(target: list[Tensor], online: list[Tensor], tau: float) -> None:
    """Polyak averaging in place: target <- target + tau (online - target)."""
    torch._foreach_lerp_(target, online, tau)  # pyright: ignore[reportPrivateImportUsage]


def load_learner(saved: Path, trained: Node, policy: Policy) -> Learner:
    """The learner in the checkpoint folder `saved` of a run with the settings `trained`, around the
    checkpoint's `policy`, for its critics. FileError if its state is not that learner's."""
    require_inside(trained["learner"], f"the learner of {saved}")
    part: Any = policy
    if trained.get("finetune"):
        part = part.trainable()  # the part that its learner trained
    plan = RunPlan(updates=1, execute=trained.get("execute"))
    state = checkpoint.load_state(saved, "learner")
    with fitting(state, saved.parent.parent / "run.yaml"):
        learner = build(trained["learner"], Learner, policy=part, spec=part.spec, run=plan)
    with reading(f"the learner of {saved}", *MALFORMED):
        learner.set_state(state)
    return learner
