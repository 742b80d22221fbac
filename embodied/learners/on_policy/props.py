"""PROPS: proximal robust on-policy sampling (Corrado and Hanna, 2023), for PPO.

A batch of a policy pi is small: some actions are in it more often than pi takes them. PROPS
collects with a behaviour policy phi that takes those less often which the data have too many of, so
that the data together are more like data of pi, and can be used for several updates. Every k
decisions phi starts again as pi and descends, on all data that are kept,

    L = E[ -min(-g, -clip(g, 1 - eps, 1 + eps)) ] + c E_s[ KL(pi(.|s) || phi(.|s)) ],   g = phi / pi

until that KL is above delta. PPO then treats the newest b batches as data of pi. The metric
`sampling_error` is E[ log q - log pi ] over the data, q being pi with its last layer fitted to them
by maximum likelihood; it is 0 where they are as pi would choose.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.bounds import Count, CountOrZero, NonNegative, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, nest, take, under
from embodied.learners.learner import RunPlan, frozen
from embodied.learners.on_policy import ppo
from embodied.learners.on_policy.ppo_parts import clip_loss, require_divergence
from embodied.nn.optim import Adam
from embodied.policies.encoded import MlpPolicy

FIT_LR = 0.05  # Adam's, for the fit of the sampling error


@dataclass(frozen=True)
class Config(ppo.Config):
    batches: Count = 2  # b: newest batches that an update learns from
    every: Count = 32  # k: decisions of each parallel environment between two adaptations
    behaviour_epochs: CountOrZero = 16  # passes of an adaptation over the data; 0: phi stays pi
    behaviour_minibatches: Count = 16  # gradient steps of such a pass
    behaviour_lr: PositiveFraction = 1e-3  # Adam's learning rate of an adaptation
    behaviour_clip: Positive = 0.3  # eps: largest change of the ratio that an adaptation seeks
    behaviour_kl: Positive = 0.1  # delta: KL divergence above which an adaptation ends
    behaviour_weight: NonNegative = 0.1  # c: weight of the KL divergence
    fit_steps: Count = 50  # gradient steps of the fit for the metric sampling_error


class Props(ppo.Ppo):
    """As Ppo, with a behaviour policy that takes what is under-sampled."""

    counters = ("parallel",)

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)
        require_divergence(policy)
        if not isinstance(policy, MlpPolicy):
            raise ConfigError("learner=props fits the last layer of an MLP")
        policy.layers()  # ConfigError without those that the sampling error needs
        self.keep_batches = config.batches
        self.adapt_every = config.every
        self.behaviour = copy.deepcopy(policy)  # phi
        self.actor_params = [p for p in policy.parameters() if p.requires_grad]
        self.parallel = 0  # environments, known from the first batch

    def behaviour_policy(self) -> Policy:
        self.behaviour.load_state_dict(self.policy.state_dict())
        return self.behaviour

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self.parallel = self.parallel or batch["valid"].shape[1]
        flat = self._decisions(batch)
        own = {
            "sampling_error": sampling_error(self.policy, flat, self.config.fit_steps),
            "behaviour_kl": self._divergence(flat).detach(),
        }
        metrics = super().update(batch) | own
        self.done -= batch["valid"][:, self.parallel :].numel()  # they were counted when new
        self.behaviour.load_state_dict(self.policy.state_dict())
        return metrics

    def _decisions(self, batch: Tensors) -> Tensors:
        """Observations, actions and `valid` of a batch, [N, ...] each."""
        kept = {**nest(under(batch, "obs"), "obs"), "action": batch["action"]}
        flat = each(kept | {"valid": batch["valid"]}, lambda leaf: leaf.flatten(0, 1))
        if self.played is not None and flat["action"].ndim > 1:
            flat["action"] = flat["action"][:, : self.played]
        return flat

    def _divergence(self, decisions: Tensors) -> Tensor:
        """The mean KL(pi || phi) of valid decisions."""
        kl = self.policy.kl(under(decisions, "obs"), self.behaviour)
        return (kl * decisions["valid"]).sum() / decisions["valid"].sum().clamp(min=1)

    def adapt_behaviour(self, batch: Tensors) -> None:
        self.behaviour.load_state_dict(self.policy.state_dict())
        flat = self._decisions(batch)
        data = take(flat, flat["valid"].nonzero().flatten())
        count = distributed.all_min(len(data["action"]))
        if not count:
            return
        with torch.no_grad():
            data["old"] = self.policy.evaluate_actions(under(data, "obs"), data["action"])[0]
        weights = [p for p in self.behaviour.parameters() if p.requires_grad]
        adam = Adam(weights, self.config.behaviour_lr)
        size = max(count // self.config.behaviour_minibatches, 1)
        for _ in range(self.config.behaviour_epochs):
            order = torch.randperm(count, device=data["old"].device)
            for at in range(0, count - size + 1, size):
                loss, kl = self._behaviour_loss(take(data, ppo.piece(at, size, order)))
                distributed.average([kl])
                if kl > self.config.behaviour_kl:
                    return
                loss.backward()
                adam.step()

    def _behaviour_loss(self, minibatch: Tensors) -> tuple[Tensor, Tensor]:
        """The loss of phi, and the mean KL(pi || phi)."""
        behaviour: Any = self.behaviour
        log_prob, _ = behaviour.evaluate_actions(under(minibatch, "obs"), minibatch["action"])
        less = torch.full_like(log_prob, -1.0)  # every action in the data becomes less likely
        loss, _ = clip_loss(log_prob, minibatch["old"], less, self.config.behaviour_clip)
        with frozen(self.actor_params):
            kl = self._divergence(minibatch)
        return loss.mean() + self.config.behaviour_weight * kl, kl.detach()

    def fit(self, transitions: Tensors) -> None:
        super().fit(transitions)
        self.behaviour.fit(transitions)


def sampling_error(policy: Any, decisions: Tensors, steps: int) -> Tensor:
    """E[ log q - log pi ] in nats, over the decisions `obs/*`, `action` that are `valid`, [N, ...]
    each; q is the MLP `policy` with its last layer, and its std, fitted to them by `steps` steps of
    Adam."""
    fitted = copy.deepcopy(policy).requires_grad_(False)
    last = list(fitted.layers()[-1].parameters())
    if getattr(policy, "log_std", None) is not None and policy.log_std.requires_grad:
        last.append(fitted.log_std)
    for weight in last:
        weight.requires_grad_(True)
    adam = Adam(last, FIT_LR)
    share = decisions["valid"] / decisions["valid"].sum().clamp(min=1)
    evaluate = partial(fitted.evaluate_actions, under(decisions, "obs"), decisions["action"])
    with torch.no_grad():
        before = (evaluate()[0] * share).sum()
    for step in range(steps):
        adam.param_groups[0]["lr"] = FIT_LR * (1 - step / steps)
        (-(evaluate()[0] * share).sum()).backward()
        adam.step()
    with torch.no_grad():
        return (evaluate()[0] * share).sum() - before
