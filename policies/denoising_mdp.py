"""PartialFinetune: a diffusion policy with frozen first and fine-tuned last denoising steps.

The result of fine-tuning with DPPO (Ren et al., 2024): the frozen `base` does the first steps and
`tuned` the `last` steps of the same schedule. Denoising is deterministic (DDIM, eta 0).

DenoisingMDP: a generative policy whose denoising steps are the actions of an MDP.

The actions of a diffusion or flow policy have no tractable density, but its denoising steps, with
added noise, are Gaussian (DPPO, Ren et al., 2024; ReinFlow, Zhang et al., 2025):

    x_{k+1} = mean_k(x_k, o) + std_k(x_k, o) z_k,   z_k ~ N(0, I), clipped,   k = 0 .. K-1
    log p(x_0 .. x_K) = log N(x_0; 0, I) + sum_k log N(x_{k+1}; mean_k, diag std_k^2)

The learner's action is the whole chain; the robot executes x_K, unnormalised and clipped to
[-1, 1]. The density is that of the samples before clipping.

NoisyDiffusion: a diffusion policy whose last denoising steps are stochastic and trainable.

DPPO (Ren et al., 2024). The frozen base policy does the first denoising steps deterministically; a
trainable copy does the `last` steps as DDIM with eta = 1, so that each is a normal distribution:

    mean_k = sqrt(abar_s) x_0 + sqrt(1 - abar_s - sigma_k^2) e,   std_k = max(sigma_k, floor),
    sigma_k^2 = (1 - abar_s) / (1 - abar_t) (1 - abar_t / abar_s),   s the level after t

With z = 0 it is the base policy's own sampler (eta = 0) with the copy in the last steps.

NoisyFlow: a flow or shortcut policy with learned noise on each of its Euler steps.

ReinFlow (Zhang et al., 2025). With the flow's own grid t_k = k / K,

    mean_k = clip(x_k + v(x_k, t_k, o) / K),   log std_k^2 = between log low^2 and log high^2,
                                               by a tanh network of (t_k, o)

The noise network is used in training only; the flow without noise is deployed. Gradients of the
noise network do not reach the features that it shares with the flow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import Count, Levels, Positive
from embodied.core.build import ConfigError, Node, build, resolve
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.networks import mlp
from embodied.policies.generative.chunk_sampler import ObservesHistory
from embodied.policies.generative.diffusion import Step
from embodied.policies.generative.flow import Flow
from embodied.policies.networks.encoders import Encoder
from embodied.policies.wrappers.real_time_chunking import SamplerStep


@dataclass(frozen=True)
class PartialFinetuneConfig:
    """Settings of a diffusion policy of which a copy of the last steps is trained."""

    base: Node  # node of a diffusion policy
    last: Count = 4  # denoising steps of the fine-tuned copy


class PartialFinetune(ObservesHistory):
    """Partially fine-tuned diffusion policy. Noise [n, size] is the initial sample."""

    base: Any  # a Policy with `ddim_steps`, `embedded`, `split`, `past` and `names`
    tuned: Any  # the same

    def __init__(self, config: PartialFinetuneConfig, spec: Spec) -> None:
        super().__init__()
        base: Any = build(config.base, Policy, spec=spec)
        tuned = build(config.base, Policy, spec=spec)
        if not hasattr(base, "ddim_steps"):
            raise ConfigError(
                "only the denoising steps of a diffusion policy (init=RUN, trained with env=) can "
                f"be fine-tuned, not {type(base).__name__}"
            )
        self.spec = spec
        self.chunk = base.chunk
        self.size = base.size
        self.first = getattr(base, "first", 0)
        self.base = base.requires_grad_(False)
        self.tuned = tuned
        self.past = self.base.past
        self.names = self.base.names
        self.grid = base.ddim_steps()
        if config.last > len(self.grid):
            raise ConfigError(f"last={config.last} is not in 1..{len(self.grid)} (its steps)")
        self.last = config.last

    @property
    def encoder(self) -> Encoder | None:
        return getattr(self.tuned, "encoder", None)

    @property
    def feature_size(self) -> int:
        return self.tuned.feature_size

    def features(self, obs: Tensors) -> Tensor:
        """Features [n, feature_size] by the encoder of the fine-tuned copy."""
        return self.tuned.features(obs)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.size, device=next(self.parameters()).device)

    def begin(self, obs: Tensors, x: Tensor) -> Tensor:
        """The base's denoising steps: from noise to the input [n, size] of the fine-tuned copy."""
        if self.last == len(self.grid):
            return x
        return self._denoise(self.base, obs, x, slice(None, -self.last))

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        x = self.begin(obs, noise)
        x = self._denoise(self.tuned, obs, x, slice(-self.last, None))
        return self.to_actions(x), carry

    def acts_as(self) -> Policy:
        """The fine-tuned copy; ConfigError if the base makes the first denoising steps."""
        if self.last < len(self.grid):
            raise ConfigError(
                f"the base makes the first {len(self.grid) - self.last} of {len(self.grid)} "
                "denoising steps and its copy the others, so this is no single policy; train with "
                f"finetune.last={len(self.grid)} for one"
            )
        return self.tuned

    def _denoise(self, policy: Any, obs: Tensors, x: Tensor, some: slice) -> Tensor:
        features = policy.features(obs)
        for step, time in zip(self.grid[some], policy.embedded()[some], strict=True):
            x0, e = policy.split(x, step, time, features)
            x = step.next_keep * x0 + step.next_remain * e
        return x

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        parts = [(self.base, slice(None, -self.last)), (self.tuned, slice(-self.last, None))]
        strides: list[SamplerStep] = []
        for policy, some in parts:
            features = policy.features(obs)
            times = policy.embedded()[some]
            strides += [
                policy.stride(step, time, features)
                for step, time in zip(self.grid[some], times, strict=True)
            ]
        return noise, strides

    @property
    def range(self) -> Callable[[Tensor], Tensor]:
        return self.base.range

    def goal(self, plan: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.base.goal(plan, weight)

    def to_actions(self, x: Tensor) -> Tensor:
        return self.base.to_actions(x)

    def fit(self, rows: Tensors) -> None:
        self.base.fit(rows)
        self.tuned.fit(rows)


HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings that all fine-tuned denoising policies share."""

    base: Node  # node of the policy whose denoising steps become stochastic
    chunk: Count | None = None  # actions of one decision (null: the base's)
    cut: Positive = 3.0  # noise is clipped to so many standard deviations


class DenoisingMDP(PolicyWrapper):
    """Base class of policies with stochastic denoising steps (`links`). Noise [n, (1 + K) * size]:
    x_0 and the z of each of K links.

    `inner` is the policy without exploration, which is deployed. With z = 0 the actions are exactly
    those of `inner`.
    """

    requires_base = True
    inner: Any  # Policy; also `size` and `to_actions`; `first`: elements before the first action
    links: int

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        if spec.act.is_normalized:
            raise ConfigError("the denoising steps of a policy in physical units cannot be tuned")
        chunk = {} if config.chunk is None else {"chunk": config.chunk}
        self.inner = self.inside(config, {**config.base, **chunk})
        self.chunk = self.inner.chunk
        self.size = self.inner.size
        self.first = getattr(self.inner, "first", 0)

    def inside(self, config: Any, base: Node) -> Policy:
        """Build `inner`; ConfigError if `base` is not a policy of the right kind."""
        raise NotImplementedError

    def load_base(self, base: Policy) -> None:
        """Copy the weights and normalisers of a trained policy of the base's kind."""
        raise NotImplementedError

    def begin(self, obs: Tensors, x: Tensor) -> Tensor:
        """x_0 [n, size] of the chain, made of noise `x` by the frozen denoising steps, if any."""
        return x

    def times(self) -> Tensor:
        """The network's time embeddings [K, time_dim] of the links."""
        raise NotImplementedError

    def link(
        self, x: Tensor, k: int | Tensor, time: Tensor, seen: Tensor, explores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [n, size] of x_{k+1} given `x`; `k`: one index or [n]
        (int64), `time`: its embedding, `seen` [n, F]: features of the observation.

        `explores` [n, 1] (bool, None: all): which samples explore.
        """
        raise NotImplementedError

    @property
    def encoder(self) -> Encoder | None:
        return getattr(self.inner, "encoder", None)

    @property
    def feature_size(self) -> int:
        return self.inner.feature_size

    def features(self, obs: Tensors) -> Tensor:
        return self.inner.features(obs)

    @property
    def augments(self) -> bool:
        return self.inner.augments

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        return self.inner.observe(obs, carry, noise)

    def inference_policy(self) -> Policy:
        return self.inner

    def initial(self, n: int) -> Tensors:
        chain = torch.zeros(n, self.links + 1, self.size, device=next(self.parameters()).device)
        return {**self.inner.initial(n), "row/action": chain}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        start = self.inner.sample_noise(n)
        make = torch.randn if explore else torch.zeros
        return torch.cat([start, make(n, self.links * self.size, device=start.device)], 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        start, *drawn = noise.split(self.size, 1)
        explores = noise[:, self.size :].any(1, keepdim=True)
        seen = self.features(obs)
        x = self.begin(obs, start)
        chain = [x]
        for k, (time, z) in enumerate(zip(self.times(), drawn, strict=True)):
            mean, std = self.link(x, k, time, seen, explores)
            x = mean + std * z.clamp(-self.config.cut, self.config.cut)
            chain.append(x)
        return self.inner.to_actions(x), {**carry, "row/action": torch.stack(chain, 1)}

    def log_prob(self, obs: Tensors, x: Tensor, following: Tensor, k: Tensor) -> Tensor:
        """Log-density [n, size] of `following`, the result of link `k` [n] on `x`, by element."""
        return log_normal(following, *self.link(x, k, self.times()[k], self.features(obs)))

    def evaluate_actions(
        self, obs: Tensors, chain: Tensor, played: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-density and entropy [n] of whole chains [n, K + 1, size], averaged over the K + 1
        samples and over the elements of the first `played` of an action chunk (None: all)."""
        n, draws = chain.shape[:2]
        k = torch.arange(self.links, device=chain.device).repeat(n)
        seen = self.features(obs).repeat_interleave(self.links, 0)
        mean, std = self.link(chain[:, :-1].flatten(0, 1), k, self.times()[k], seen)
        log_prob = log_normal(chain[:, 1:].flatten(0, 1), mean, std).view(n, self.links, -1)
        first = -0.5 * chain[:, 0].square() - HALF_LOG_2PI
        total = log_prob.sum(1) + first
        spread = std.log().expand_as(mean).view(n, self.links, -1).sum(1)
        entropy = spread + draws * (HALF_LOG_2PI + 0.5)
        part = self.executed(played)
        return total[:, part].mean(1) / draws, entropy[:, part].mean(1) / draws

    def executed(self, played: int | None) -> slice:
        """The elements of a sample that are the first `played` of an action chunk (None: all)."""
        count = self.chunk * self.spec.act.size if played is None else played
        return slice(self.first, self.first + count)

    def fit(self, rows: Tensors) -> None:
        self.inner.fit(rows)


def log_normal(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return log N(x; mean, std^2) of each element."""
    return -0.5 * ((x - mean) / std).square() - std.log() - HALF_LOG_2PI


@dataclass(frozen=True, kw_only=True)
class NoisyDiffusionConfig(Config):
    """Settings of noisy last steps; std in units of the normalised action."""

    last: Count = 4  # trainable denoising steps K'
    steps: Levels | None = None  # all denoising steps (null: the base's; fewer are noisier)
    floor: Positive = 0.1  # smallest std of a step


class NoisyDiffusion(DenoisingMDP):
    """Diffusion policy whose last denoising steps are links; the earlier ones are frozen."""

    inner: PartialFinetune
    numbers: Tensor
    deviation: Tensor

    def __init__(self, config: NoisyDiffusionConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        self.links = config.last
        self.calm = self.inner.grid[-self.links :]
        self.noisy = self.inner.base.ddim_steps(eta=1.0)[-self.links :]
        sigma = torch.tensor([step.sigma for step in self.noisy])
        self.register_buffer("numbers", torch.tensor(self.noisy), persistent=False)
        self.register_buffer("deviation", sigma.clamp(min=config.floor), persistent=False)

    def inside(self, config: NoisyDiffusionConfig, base: Node) -> Policy:
        denoises = hasattr(resolve(base["_target_"], Policy), "ddim_steps")  # others are refused
        steps = {"steps": config.steps} if denoises and config.steps is not None else {}
        node = {
            "_target_": "embodied.policies.denoising_mdp.PartialFinetune",
            "base": {**base, **steps},
            "last": config.last,
        }
        return build(node, Policy, spec=self.spec)

    def load_base(self, base: Policy) -> None:
        self.inner.base.load_state_dict(base.state_dict())
        self.inner.tuned.load_state_dict(base.state_dict())

    def begin(self, obs: Tensors, x: Tensor) -> Tensor:
        return self.inner.begin(obs, x)

    def times(self) -> Tensor:
        return self.inner.tuned.embedded()[-self.links :]

    def link(
        self, x: Tensor, k: int | Tensor, time: Tensor, seen: Tensor, explores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(k, int):  # another step for each sample
            each = Step._make(self.numbers[k][..., None].unbind(1))
            x0, e = self.inner.tuned.split(x, each, time, seen)
            return each.next_keep * x0 + each.next_remain * e, self.deviation[k][:, None]
        step = self.noisy[k]
        x0, e = self.inner.tuned.split(x, step, time, seen)
        remain = step.next_remain
        if explores is not None:
            remain = torch.where(explores, remain, self.calm[k].next_remain)
        return step.next_keep * x0 + remain * e, self.deviation[k]


@dataclass(frozen=True, kw_only=True)
class NoisyFlowConfig(Config):
    """Settings of a flow policy with noisy steps; std in units of the normalised action.

    `low` and `high` matter most: too small, probability ratios explode; too large, actions lose
    precision.
    """

    low: Positive = 0.08  # smallest std of a step
    high: Positive = 0.16  # largest std of a step
    hidden: tuple[Count, ...] = (64, 64)  # units of each hidden layer
    clip: Positive = 3.0  # bound of the means while exploring (of the last one: [-1, 1])


class NoisyFlow(DenoisingMDP):
    """Flow policy whose Euler steps are all trainable links with learned noise."""

    config: NoisyFlowConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    high: Tensor
    limits: Tensor

    def __init__(self, config: NoisyFlowConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        if config.low > config.high:
            raise ConfigError(f"low={config.low} must be at most high={config.high}")
        self.links = self.inner.steps
        size = self.inner.embedded().shape[1] + self.inner.feature_size
        self.noise = mlp(size, config.hidden, self.size, "tanh")
        self.register_buffer("high", torch.tensor(config.high))  # may be annealed during training
        limits = torch.tensor([config.clip] * (self.links - 1) + [1.0])
        self.register_buffer("limits", limits[:, None], persistent=False)

    def inside(self, config: NoisyFlowConfig, base: Node) -> Policy:
        inner = build(base, Policy, spec=self.spec)
        if not isinstance(inner, Flow):
            raise ConfigError(
                "policy=noisy_flow needs a flow or shortcut base policy (init=RUN), not "
                f"{type(inner).__name__}; finetune=dppo trains diffusion policies"
            )
        return inner

    def load_base(self, base: Policy) -> None:
        self.inner.load_state_dict(base.state_dict())

    def times(self) -> Tensor:
        return self.inner.embedded()

    def link(
        self, x: Tensor, k: int | Tensor, time: Tensor, seen: Tensor, explores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        mean = x + self.inner.velocity_at(x, time, seen) / self.links
        limit = self.limits[k]
        if explores is not None:
            limit = torch.where(explores, limit, torch.inf)
        return mean.clamp(-limit, limit), self.std(time, seen)

    def std(self, time: Tensor, seen: Tensor) -> Tensor:
        """Standard deviation [n, size] at embedded times [time_dim] or [n, time_dim]."""
        times = time.detach().expand(seen.shape[0], -1)
        share = (1 + torch.tanh(self.noise(torch.cat([times, seen.detach()], 1)))) / 2
        low, high = torch.full_like(self.high, self.config.low).log(), self.high.log()
        return torch.exp(low + share * (high - low))

    def narrow(self, share: float) -> None:
        """Set the upper bound of the std to low + share (high - low)."""
        low, high = self.config.low, self.config.high
        self.high.fill_(low + share * (high - low))
