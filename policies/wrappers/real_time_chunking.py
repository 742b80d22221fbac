"""RealTimeChunking: real-time chunking (RTC), smooth action chunks despite inference latency.

RTC (Black, Galliker and Levine, 2025). The next chunk is requested after s of H actions and arrives
`delay` = d control steps later. Its first d actions are frozen to the previous chunk Y; the
remaining overlap is guided towards Y with decaying weights,

    W_i = 1 for i < d,   0 for i >= H - s,   between   c (e^c - 1) / (e - 1),
    c = (H - s - i) / (H - s - d + 1),

by guidance of every sampler step (PiGDM; Song et al., 2023): with x = keep x_1 + remain z and the
network's predicted chunk x_1(x),

    x_1 <- x_1 + min(beta remain, (keep^2 + remain^2) / keep) (W (Y - x_1)) dx_1/dx.

For flow matching (keep = tau, remain = 1 - tau) this is the paper's rule. `Actor(execute=s)`
simulates the delay exactly: the first d actions of a new plan are those of the previous plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from embodied.core.bounds import Chunk, CountOrZero, NonNegative
from embodied.core.build import ConfigError, Node
from embodied.core.device import device_of
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, nest, under
from embodied.policies.encoded import build_with_chunk, require_continuous


class SamplerStep(NamedTuple):
    """One sampler step, in a form that guidance can modify.

    At a level with x = keep x_1 + remain z, chunk x_1 and noise z. `clean(x)`: the predicted chunk
    [n, D], differentiable; `onward(x, x_1)`: x at the next level. A policy with `strides(obs,
    noise) -> (x, strides)` and `range` (its action normaliser) supports guidance: x [n, D] is the
    initial sample, and each step predicts the final normalised chunk.
    """

    keep: float
    remain: float
    clean: Callable[[Tensor], Tensor]
    onward: Callable[[Tensor, Tensor], Tensor]


def sample(x: Tensor, strides: list[SamplerStep]) -> Tensor:
    """Run the sampler without guidance; returns the normalised chunk [n, D], not clipped."""
    for stride in strides:
        x = stride.onward(x, stride.clean(x))
    return x


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of real-time chunking.

    `mode`: `guided`: as above; `hard`: guidance of the first `delay` actions only; `naive`: no
    guidance, switch to the new chunk when it arrives; `wait`: zero actions until it arrives, then
    the whole chunk (for delta actions). `beta` is limited to the number of sampler steps, above
    which it would overshoot.
    """

    base: Node  # node of the wrapped policy
    delay: CountOrZero = 1  # inference latency in control steps
    mode: Literal["guided", "hard", "naive", "wait"] = "guided"  # until the new chunk arrives
    beta: NonNegative = 5.0  # largest guidance weight, at most the number of sampler steps
    chunk: Chunk | None = None  # actions of one decision (null: the base's)


class PreviousPlan(NamedTuple):
    """The previous plan of every environment: `plan` [n, H, A], its remaining actions (the last one
    repeated), `delay` [n, 1]: steps for which it is still executed, `left` [n, 1]: number of its
    remaining actions, `fresh` [n, 1] (bool): there is no previous plan."""

    plan: Tensor
    delay: Tensor
    left: Tensor
    fresh: Tensor


class RealTimeChunking(PolicyWrapper):
    """A base policy with real-time chunking; noise and observations are the base's. The first plan
    of an episode has no delay.

    The carry holds the last `plan`, `executed_steps`, how many of its steps were executed (set by
    the caller; -1: no plan), and `delay`, which the caller may also set.
    """

    for_evaluation = True
    base: Any  # a Policy; guided, also `strides`, `range` and `to_actions`

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.base = build_with_chunk(config.base, config.chunk, spec)
        self.spec = spec
        self.chunk = self.base.chunk
        self.config = config
        self.noise_steps = self.base.noise_steps
        kind = type(self.base).__name__
        require_continuous(spec)
        if config.delay >= self.chunk:
            raise ConfigError(f"delay={config.delay} is not in 0..{self.chunk - 1} (the chunk)")
        self.guides = config.mode in ("guided", "hard")
        if self.guides and not hasattr(self.base, "strides"):
            raise ConfigError(
                f"{kind} has no sampler that could be guided (flow and diffusion policies have): "
                "set mode=naive or mode=wait, which work with any policy"
            )

    def with_real_time_chunking(self, mode: str) -> Policy:
        """This policy, which already uses real-time chunking."""
        return self

    def initial(self, n: int) -> Tensors:
        device = device_of(self)
        return {
            "plan": torch.zeros(n, self.chunk, *self.spec.act.shape, device=device),
            "executed_steps": torch.full((n,), -1, device=device),
            "delay": torch.full((n,), self.config.delay, device=device),
            **nest(self.base.initial(n), "base"),
        }

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.base.sample_noise(n, explore)

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        seen, kept = self.base.observe(obs, under(carry, "base"), noise)
        return seen, {**carry, **nest(kept, "base")}

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        past = previous_plan(carry, self.chunk)
        kept = under(carry, "base")
        if self.guides:
            plan = self.guided_plan(obs, noise, past)
        else:
            plan, kept = self.base.act(obs, kept, noise)
        plan = self.executed_plan(plan, past)
        return plan, {**carry, "plan": plan, **nest(kept, "base")}

    def guided_plan(self, obs: Tensors, noise: Tensor, past: PreviousPlan) -> Tensor:
        """The base's chunks [n, H, A], guided towards the previous plans."""
        shape = past.plan.shape
        wide = weights(past, self.config.mode == "guided").view(*shape[:2], *[1] * len(shape[2:]))
        # Works in inference mode too, where tensors have no gradients.
        with torch.inference_mode(False), torch.no_grad():
            obs = each(obs, without_inference_mode)
            noise = without_inference_mode(noise)
            goal, weight = self.base.goal(
                without_inference_mode(past.plan), without_inference_mode(wide).expand(shape)
            )
            x, strides = self.base.strides(obs, noise)
            beta = min(self.config.beta, len(strides))
            guided = [guided_step(stride, goal, weight, beta) for stride in strides]
            return self.base.to_actions(sample(x, guided))

    def executed_plan(self, plan: Tensor, past: PreviousPlan) -> Tensor:
        """Plans [n, H, A] that begin with `delay` steps of the previous plan (mode=wait: zeros)."""
        steps = torch.arange(self.chunk, device=plan.device)
        begins = past.delay
        instead = past.plan
        if self.config.mode == "wait":
            index = (steps - begins * ~past.fresh).clamp(min=0)
            wide = index.view(*index.shape, *[1] * (plan.ndim - 2)).expand_as(plan)
            plan, instead = plan.gather(1, wide), torch.zeros_like(plan)
        known = (steps < begins) & ~past.fresh
        return torch.where(known.view(*known.shape, *[1] * (plan.ndim - 2)), instead, plan)

    def loss(self, batch: Tensors) -> Tensor:
        """The base's imitation loss."""
        return self.base.loss(batch)

    def fit(self, rows: Tensors) -> None:
        self.base.fit(rows)


class GuidedSampler(Policy):
    """Base class of policies whose sampler can be guided: `strides`, `range` and `to_actions`."""

    range: Any  # from actions to the sampler's units

    def goal(self, plan: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A plan and its guidance weights [n, H, A] as samples [n, D] of the sampler."""
        return self.range(plan).flatten(1), weight.flatten(1)

    def with_real_time_chunking(self, mode: str) -> Policy:
        target = f"{RealTimeChunking.__module__}.{RealTimeChunking.__qualname__}"
        return RealTimeChunking.wrap(self, {"_target_": target, "mode": mode, "delay": 0})


def previous_plan(carry: Tensors, chunk: int) -> PreviousPlan:
    """The previous plans in a carry, shifted by their executed steps."""
    plan = carry["plan"]
    followed = carry["executed_steps"][:, None]
    steps = torch.arange(chunk, device=plan.device)
    index = (steps + followed.clamp(min=0)).clamp(max=chunk - 1)
    wide = index.view(*index.shape, *[1] * (plan.ndim - 2)).expand_as(plan)
    left = (chunk - followed).clamp(min=0)
    return PreviousPlan(plan.gather(1, wide), carry["delay"][:, None], left, followed < 0)


def weights(past: PreviousPlan, soft: bool) -> Tensor:
    """Guidance weights W [n, H] of the previous plan's steps; after the delay only if `soft`."""
    steps = torch.arange(past.plan.shape[1], device=past.plan.device)
    c = (past.left - steps) / (past.left - past.delay + 1).clamp(min=1)
    fading = c * torch.expm1(c) / math.expm1(1)
    weight = torch.where(steps < past.delay, 1.0, fading if soft else torch.zeros_like(c))
    return weight * ((steps < past.left) & ~past.fresh)


def guided_step(stride: SamplerStep, goal: Tensor, weight: Tensor, beta: float) -> SamplerStep:
    """`stride` with its predicted chunk guided towards `goal` [n, D] with `weight` [n, D]."""
    most = math.inf if stride.keep == 0 else (stride.keep**2 + stride.remain**2) / stride.keep
    gain = min(beta * stride.remain, most)

    def clean(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            chunk = stride.clean(x)
            error = (weight * (goal - chunk)).detach()
            (pull,) = torch.autograd.grad(chunk, x, error)
        return chunk.detach() + gain * pull

    return stride._replace(clean=clean)


def without_inference_mode(value: Tensor) -> Tensor:
    """`value` as a normal tensor, if it is an inference-mode tensor, so that autograd works."""
    return value.clone() if value.is_inference() else value
