"""Steered: base class of policies with a frozen base policy and a small trainable inner policy.

A subclass defines the inner policy's spec (`inner_spec`) and maps its action to the robot's. To the
learner this is an ordinary environment with another action space.

Dsrl: reinforcement learning in the latent noise of a frozen diffusion or flow policy.

DSRL (Wagenmaker et al., 2025). The inner policy's action is u in [-1, 1]^d; the base maps it to a
chunk: a = base(o, w = bound * u). `bound` is the trust region: if too small, the inner policy
cannot leave a bad mode of the base; if too large, the noise is out of the base's training
distribution. The base must be deterministic given its noise.

DsrlFeatures: DSRL on the features of the frozen base's encoder instead of images.

The inner policy and its critics get the features of the base's encoder instead of the observations,
so no images are stored or encoded in updates (as DSRL does on large policies; Wagenmaker et al.,
2025). Critic-only observations are unchanged.

DsrlNa: noise-aliased DSRL, whose stored actions are the executed chunks.

Many noise vectors lead to the same action, so the
critic is trained on executed actions. Transitions hold no noise, so demonstrations and other
policies' data can be used too.

Residual: residual RL, per-step corrections of a frozen base policy with action chunks.

Residual reinforcement learning (Johannink et al., 2019); ResiP on chunked imitation policies
(Ankile et al., 2024). At every control step a = clip(a_base + scale * u), with u from the inner
policy, whose observations include the base's action of this step. The base's chunk is executed open
loop for `execute` steps before it plans again; the correction is closed loop. Of ResiP's code, the
distillation into a policy of images is not here.

An action a of somebody else (demonstrations) is u = clip((a - a_base) / scale), and what is beyond
the largest correction is taken for the base's: (a - scale * u, u) makes exactly a.

Ticket: a frozen generative policy that gets one searched noise vector for a whole episode.

Golden tickets (Patil et al., 2026; arXiv 2603.15757): a constant noise w_k, one of K that were
drawn at random, in place of new noise at every decision: a = base(o, w_k). The authors keep one
vector for all episodes; with `per_context` the first observation o_1 of an episode chooses,

    x = [1, P (f(o_1) - c)],    k = argmax_k  v_k . x + |S_k x| |z_k|,

with f the features of the base's encoder (the numbers observed, where it has none) and z = 0
without exploration. With one vector for all, x = [1]. No network is trained: v, S, P and c are set
by `embodied.learners.finetune.ticket`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Positive
from embodied.core.build import ConfigError, Node, build
from embodied.core.device import forked
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Leaf, Spec, hidden
from embodied.core.tensors import Tensors, is_history, nest, under, where, with_history
from embodied.policies.abilities import ProbesNoise
from embodied.policies.encoded import require_continuous


@dataclass(frozen=True)
class SteeredConfig:
    """Settings of a policy that steers another; complete nodes make a checkpoint self-contained."""

    base: Node  # node of the steered policy
    inner: Node  # node of the policy that steers


class Frozen(PolicyWrapper):
    """A frozen `base` policy, whose carry is under `base/`."""

    def __init__(self, config: Any, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.base = build(config.base, Policy, spec=spec).requires_grad_(False)

    def initial(self, n: int) -> Tensors:
        return nest(self.base.initial(n), "base")

    def base_act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        """One decision of `base`: its chunk [n, H, A] and its carry under `base/`."""
        seen, kept = self.base.observe(obs, under(carry, "base"), noise)
        actions, kept = self.base.act(seen, kept, noise)
        return actions, nest(kept, "base")


class Steered(Frozen):
    """A frozen `base` policy and a trainable `inner` policy."""

    def __init__(self, config: SteeredConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        self.inner = build(config.inner, Policy, spec=self.inner_spec(config, spec))

    @classmethod
    def wrap(
        cls, base: Policy, node: Mapping[str, Any], inner: Mapping[str, Any] | None = None
    ) -> Self:
        if inner is None:
            raise ConfigError(
                f"{cls.__name__} needs a small inner policy to train: policy=gaussian"
            )
        steered = build({**node, "base": base.node, "inner": inner}, cls, spec=base.spec)
        steered.load_base(base)
        return steered

    def inner_spec(self, config: Any, spec: Spec) -> Spec:
        """The inner policy's spec: its observations and its action."""
        raise NotImplementedError

    def trainable(self) -> Policy:
        return self.inner

    def with_trained(self, trained: Policy) -> Policy:
        self.inner = trained
        return self


PROBES = 8  # noise samples of the test for an effect
LEAST = 1e-6  # the least effect


@dataclass(frozen=True)
class DsrlConfig(SteeredConfig):
    """Settings of DSRL.

    With `shared_noise` the inner policy chooses 32 numbers instead of 1,600 on pi0.
    """

    bound: Positive = 1.5  # largest noise per element (the authors: 1 to 2.5)
    shared_noise: bool = False  # choose one step's noise, repeated over the base's chunk


class Dsrl(Steered):
    """DSRL: a base policy whose noise the inner policy chooses; the learner's action is u."""

    def __init__(self, config: DsrlConfig, spec: Spec) -> None:
        self.bound = config.bound
        super().__init__(config, spec)
        if isinstance(self.base, ProbesNoise):
            self.base.require_noise()
        self.chunk = self.base.chunk
        self.noise_shape = self.base.sample_noise(1).shape[1:]
        self.shared_steps = shared_steps(self.base) if config.shared_noise else 1

    @classmethod
    def wrap(
        cls, base: Policy, node: Mapping[str, Any], inner: Mapping[str, Any] | None = None
    ) -> Self:
        """As in `Steered`; ConfigError for a base whose actions do not depend on its noise."""
        require_steerable(base)
        return super().wrap(base, node, inner)

    def inner_spec(self, config: DsrlConfig, spec: Spec) -> Spec:
        size = math.prod(self.base.sample_noise(1).shape[1:])
        if config.shared_noise:
            size //= shared_steps(self.base)
        return spec.with_act(Leaf((size,), low=-1.0, high=1.0))

    def base_noise(self, u: Tensor) -> Tensor:
        """The base's noise [n, *noise_shape] for the inner policy's actions `u` [n, d]."""
        w = self.bound * u
        if self.shared_steps > 1:
            w = w[:, None].expand(-1, self.shared_steps, -1)
        return w.reshape(-1, *self.noise_shape)

    def initial(self, n: int) -> Tensors:
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        return {**super().initial(n), "row/action": self.inner.spec.act.zeros(n, device)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.inner.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        u = self.inner.act(obs, {}, noise)[0].squeeze(1)
        actions, carry = self.base_act(obs, carry, self.base_noise(u))
        return actions, {**carry, "row/action": u}

    def warmup_policy(self) -> Policy:
        """The base policy with normal noise, clipped to the bound."""
        inner = {"_target_": "embodied.policies.encoded.Random", "clip": self.bound}
        other = build({**self.node, "inner": inner}, type(self), spec=self.spec)
        other.base = self.base
        return other


def shared_steps(base: Policy) -> int:
    """The number of time steps that the noise of `base` has; ConfigError if it has none."""
    shape = base.sample_noise(1).shape[1:]
    steps = base.noise_steps or (shape[0] if len(shape) == 2 else 0)
    if not steps or math.prod(shape) % steps:
        raise ConfigError(
            f"the noise {list(shape)} of {type(base).__name__} is not one vector for each time "
            "step: shared_noise=false"
        )
    return steps


@torch.no_grad()
def require_steerable(base: Policy) -> None:
    """ConfigError if the actions of `base` are the same for any noise, at random observations."""
    if isinstance(base, ProbesNoise):
        base.require_noise()
    device = next((p.device for p in base.parameters()), torch.device("cpu"))
    with forked(0):
        obs = {name: leaf.sample(1).to(device) for name, leaf in base.spec.obs.items()}
        noise = torch.randn(PROBES, *base.sample_noise(1).shape[1:], device=device)
    obs = {name: value.expand(PROBES, *value.shape[1:]) for name, value in obs.items()}
    seen, carry = base.observe(obs, base.initial(PROBES), noise)
    actions = base.act(seen, carry, noise)[0].float()
    if (actions - actions[:1]).abs().max() <= LEAST:
        raise ConfigError(
            f"the actions of {type(base).__name__} do not depend on its noise: there is nothing to "
            "steer; finetune=residual and finetune=expo work with it"
        )


class DsrlFeatures(Dsrl):
    """The carry passes the observations from `observe` to `act`."""

    def inner_spec(self, config: DsrlConfig, spec: Spec) -> Spec:
        size = self.base.feature_size
        if not size:
            raise ConfigError("the base policy has no encoder to share: use finetune=dsrl")
        kept = {name: leaf for name, leaf in spec.obs.items() if hidden(name)}
        return super().inner_spec(config, replace(spec, obs={"features": Leaf((size,)), **kept}))

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        kept = {name: value for name, value in obs.items() if hidden(name)}
        obs = with_history(obs, under(carry, "base"))
        return {"features": self.base.features(obs), **kept}, {**carry, **nest(obs, "sight")}

    def base_act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        return super().base_act(under(carry, "sight"), carry, noise)


class DsrlNa(Dsrl):
    """Acts as `Dsrl`; the learner gets the whole policy and executed chunks as actions."""

    def __init__(self, config: DsrlConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        carried = self.base.initial(1)
        if not all(is_history(key) for key in carried):
            raise ConfigError("DSRL-NA needs a base policy without memory: use finetune=dsrl")
        self.has_history = bool(carried)

    def initial(self, n: int) -> Tensors:
        return Steered.initial(self, n)

    @property
    def augments(self) -> bool:
        return self.has_history

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        """With the base's past observations, so that a stored decision can be made again."""
        return with_history(obs, under(carry, "base")), carry

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        actions, carry = super().act(obs, carry, noise)
        return actions, {key: value for key, value in carry.items() if key != "row/action"}

    def play(self, obs: Tensors, u: Tensor) -> Tensor:
        """The base's chunks [n, H, A] for noise `u` [n, d] in units of the bound."""
        return self.base_act(obs, {}, self.base_noise(u))[0]

    def warmup_policy(self) -> Policy:
        """The base policy with its own noise; stored actions need not be within the bound."""
        return self.base

    def trainable(self) -> Policy:
        return self

    def with_trained(self, trained: Policy) -> Policy:
        return trained


@dataclass(frozen=True)
class ResidualConfig(SteeredConfig):
    """Settings of a residual policy."""

    scale: Positive = 0.1  # largest correction in units of the action range
    execute: CountOrZero = 0  # executed actions of the chunk (0: the whole chunk)
    dims: tuple[CountOrZero, ...] | None = None  # action elements that are corrected (null: all)


class Residual(Steered):
    """Residual policy. The carry holds the base's plan and cursor; the learner's action is u."""

    chunk = 1
    picked: Tensor | None
    """[D, A]: one where an element of the correction is one of the action (None: all, in order)."""

    def __init__(self, config: ResidualConfig, spec: Spec) -> None:
        require_continuous(spec)
        super().__init__(config, spec)
        self.scale = config.scale
        picked = None if config.dims is None else torch.eye(spec.act.size)[list(config.dims)]
        self.register_buffer("picked", picked, persistent=False)
        self.execute = config.execute or self.base.chunk
        self.inner_noise = self.inner.sample_noise(1).flatten(1).shape[1]
        self.base_noise = self.base.sample_noise(1).shape[1:]

    def inner_spec(self, config: ResidualConfig, spec: Spec) -> Spec:
        size, dims = spec.act.size, config.dims
        if dims is not None and (not dims or len({*dims} & {*range(size)}) < len(dims)):
            raise ConfigError(
                f"finetune.dims={list(dims)} should be numbers of action elements, each once, from "
                f"0 to {size - 1}"
            )
        act = Leaf((size if dims is None else len(dims),), low=-1.0, high=1.0)
        return spec.with_obs(base_action=Leaf((size,), low=-1.0, high=1.0)).with_act(act)

    def initial(self, n: int) -> Tensors:
        device = next(self.base.parameters()).device
        size = self.spec.act.size
        return {
            **super().initial(n),
            "plan": torch.zeros(n, self.base.chunk, size, device=device),
            "cursor": torch.full((n,), self.execute, device=device),
            "row/action": self.inner.spec.act.zeros(n, device),
            **self.inner.initial(n),
        }

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        """[n, inner + base]: the inner policy's noise, then the base's (used when it plans)."""
        inner = self.inner.sample_noise(n, explore).flatten(1)
        return torch.cat([inner, self.base.sample_noise(n, explore).flatten(1)], 1)

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        done = carry["cursor"] >= self.execute
        if done.any():
            w = noise[:, self.inner_noise :].view(-1, *self.base_noise)
            plan, kept = self.base_act(obs, carry, w)
            planned = {**kept, "plan": plan, "cursor": torch.zeros_like(carry["cursor"])}
            carry = {**carry, **where(done, planned, {key: carry[key] for key in planned})}
        rows = torch.arange(len(done), device=done.device)
        return {**obs, "base_action": carry["plan"][rows, carry["cursor"]]}, carry

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        u, kept = self.inner.act(obs, {}, noise[:, : self.inner_noise])
        action = (obs["base_action"] + self.correction(u.squeeze(1))).clamp(-1, 1)
        # The inner policy's stored action (before clipping), or its executed action.
        kept = {"row/action": u.squeeze(1), **kept}
        return action[:, None], {**carry, "cursor": carry["cursor"] + 1, **kept}

    def correction(self, u: Tensor) -> Tensor:
        """What the inner policy's actions `u` [n, D] add to the base's, [n, A]."""
        return self.scale * u if self.picked is None else (self.scale * u) @ self.picked.to(u)

    def described(self, base_action: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """See `policies.abilities.Corrects`."""
        u = (action - base_action) / self.scale
        u = (u if self.picked is None else u @ self.picked.T.to(u)).clamp(-1, 1)
        return action - self.correction(u), u


WIDTH = 32  # most elements of x beside the 1


@dataclass(frozen=True, kw_only=True)
class TicketConfig:
    """Settings of a searched noise."""

    base: Node  # node of the policy whose noise is chosen
    candidates: Count = 64  # noise vectors to choose from
    per_context: bool = True  # choose by the first observation of an episode, not one for all


class Ticket(Frozen):
    """Noise [n, K] is z. The carry holds the number of the episode's vector [n] (int64; -1: none
    yet); `row/candidate` is the same, for the learner. A vector for all episodes has to be
    remembered for exploration only."""

    vectors: Tensor
    center: Tensor
    project: Tensor
    value: Tensor
    spread: Tensor

    def __init__(self, config: TicketConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        self.chunk = self.base.chunk
        self.per_context = config.per_context
        self.memory = "candidate" if config.per_context else "explore/candidate"
        self.numbers = [
            name
            for name, leaf in sorted(spec.obs.items())
            if not (leaf.is_picture or leaf.is_points or leaf.is_text or hidden(name))
        ]
        size = self.context_size() if config.per_context else 0
        width, count = min(size, WIDTH), config.candidates
        self.register_buffer("vectors", self.base.sample_noise(count, explore=True))
        self.register_buffer("center", torch.zeros(size))
        self.register_buffer("project", torch.zeros(size, width))
        self.register_buffer("value", torch.zeros(count, 1 + width))
        self.register_buffer("spread", torch.eye(1 + width).repeat(count, 1, 1))

    @classmethod
    def wrap(
        cls, base: Policy, node: Mapping[str, Any], inner: Mapping[str, Any] | None = None
    ) -> Self:
        """As in `PolicyWrapper`; ConfigError if the base's actions do not depend on its noise."""
        require_steerable(base)
        return super().wrap(base, node, inner)

    def context_size(self) -> int:
        """Elements of `context`; ConfigError if there are none."""
        numbers = sum(self.spec.obs[name].size for name in self.numbers)
        if not (self.base.feature_size or numbers):
            raise ConfigError(
                f"{type(self.base).__name__} offers no features of its pictures to choose the "
                "noise by: finetune.per_context=false"
            )
        return self.base.feature_size or numbers

    def context(self, obs: Tensors) -> Tensor:
        """f(o), [n, size]."""
        if self.base.feature_size:
            return self.base.features(obs).float()
        return torch.cat([obs[name].flatten(1).float() for name in self.numbers], 1)

    def regressors(self, context: Tensor) -> Tensor:
        """x, [n, 1 + width], of contexts [n, size]."""
        x = (context - self.center) @ self.project
        return torch.cat([torch.ones_like(x[:, :1]), x], 1)

    def initial(self, n: int) -> Tensors:
        none = torch.full((n,), -1, device=self.value.device)
        return {**super().initial(n), self.memory: none, "row/candidate": none}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        z = torch.zeros(n, len(self.vectors), device=self.value.device)
        return z.normal_() if explore else z

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        chosen = carry.get(self.memory)
        if chosen is None:
            chosen = self.choose(obs, noise)
        elif (chosen < 0).any():
            chosen = torch.where(chosen < 0, self.choose(obs, noise), chosen)
        actions, kept = self.base_act(obs, carry, self.vectors[chosen])
        return actions, {**kept, self.memory: chosen, "row/candidate": chosen}

    def choose(self, obs: Tensors, noise: Tensor) -> Tensor:
        """The candidates [n] (int64) of episodes that begin with `obs`."""
        x = torch.ones_like(noise[:, :1])
        if self.per_context:
            x = self.regressors(self.context(obs))
        apart = torch.einsum("kij,nj->nki", self.spread, x).square().sum(2).sqrt()
        return (x @ self.value.T + apart * noise.abs()).argmax(1)
