"""DPT: decision-pretrained transformer, in-context learning by supervision (Lee et al., 2023).

A policy with memory sees lifetimes (`Trials`) in which a random policy acts in a random task, and
is taught what an expert who knows the task would have done at each step,

    minimise  E_task E_random sum_t  -log pi(a*(s_t; task) | s_0 a_0 r_0 ... s_t),

so it learns the posterior over optimal actions given all that was seen. To sample from it in a new
task is posterior (Thompson) sampling: it explores while the task is in doubt, without having been
trained to. Deploy with a sampled policy, whose own steps are the context. Labels are the
actions of `expert`, or the observation `privileged/best_action`.

Differences from the published code: the state that is asked about is the next one of the lifetime,
not one of its own, so that the keys and values of the context are used again in each step; contexts
are collected anew for each update, not a dataset of 100,000; a step is in the context at once, not
after its episode; the context keeps its order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.bounds import Count, NonNegative, Positive, PositiveFraction
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import BEST_ACTION, Spec
from embodied.core.tensors import Tensors, each, nest, under
from embodied.learners.learner import Learner
from embodied.learners.on_policy.ppo_parts import RecurrentPolicy
from embodied.nn.optim import Adam


@dataclass(frozen=True)
class Config:
    """Settings of DPT. A batch is `horizon` steps of every parallel environment: make it a whole
    number of lifetimes."""

    behaviour: Node  # node of the policy that collects the contexts
    expert: Node | None = None  # node of the policy that knows the task; null: the best action seen
    horizon: Count = 40  # steps of each parallel environment per update
    batch_size: Count = 64  # lifetimes per gradient step
    epochs: Count = 1  # passes over a batch
    lr: PositiveFraction = 1e-3  # AdamW's learning rate
    weight_decay: NonNegative = 1e-4  # of AdamW
    grad_clip: Positive = 10.0  # largest norm of the gradient


class Dpt(Learner):
    """Each update is one or more AdamW steps on lifetimes that the behaviour policy collected."""

    data = "on_policy"
    usual_policy = "transformer"

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy)
        if not isinstance(policy, RecurrentPolicy):
            raise ConfigError(
                "DPT needs a policy with memory and densities: policy=transformer, "
                "policy=transformer_categorical or a recurrent one"
            )
        if policy.chunk != 1:
            raise ConfigError(f"DPT teaches single actions: policy.chunk=1, not {policy.chunk}")
        if config.expert is None and BEST_ACTION not in spec.obs:
            raise ConfigError(
                f"DPT needs labels: learner.expert, or an environment that observes {BEST_ACTION}"
            )
        self.expert = (
            None
            if config.expert is None
            else build(config.expert, Policy, spec=spec).requires_grad_(False)
        )
        self.behaviour = build(config.behaviour, Policy, spec=spec).requires_grad_(False)
        weights, decay = policy.parameters(), config.weight_decay
        self.optims["adam"] = Adam(weights, config.lr, weight_decay=decay, decoupled=True)

    def behaviour_policy(self) -> Policy:
        return self.behaviour

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        obs = under(batch, "obs")
        data = {**nest(obs, "obs"), "label": self.labels(obs)}
        data |= {"first": batch["first"], "valid": batch["valid"]}
        count = batch["first"].shape[1]
        size = min(self.batch_size, count)
        losses: list[Tensor] = []
        for _ in range(self.config.epochs):
            order = torch.randperm(count, device=batch["first"].device)
            for at in range(0, count - size + 1, size):
                index = order[at : at + size]
                loss = self.loss({key: leaf[:, index] for key, leaf in data.items()})
                loss.backward()
                distributed.average_gradients(self.policy.parameters())
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.grad_clip)
                self.optims["adam"].step()
                losses.append(loss.detach())
        return {"loss": torch.stack(losses).mean()}

    def loss(self, data: Tensors) -> Tensor:
        """Mean negative log-probability of `label` at all `valid` steps of lifetimes [T, B, ...],
        whose contexts begin with the batch."""
        obs, first, valid = under(data, "obs"), data["first"], data["valid"]
        carry = self.policy.initial(first.shape[1])
        log_prob, _ = self.policy.evaluate_sequence(obs, data["label"], carry, first)
        return -(log_prob * valid).sum() / valid.sum().clamp(min=1)

    @torch.no_grad()
    def labels(self, obs: Tensors) -> Tensor:
        """The expert's actions [T, B, ...] at `obs` [T, B, ...]."""
        if self.expert is None:
            return obs[BEST_ACTION].squeeze(2)
        steps, rows = next(iter(obs.values())).shape[:2]
        flat = each(obs, lambda leaf: leaf.flatten(0, 1))
        carry = self.expert.initial(steps * rows)
        action, _ = self.expert.act(flat, carry, self.expert.sample_noise(steps * rows))
        return action[:, 0].unflatten(0, (steps, rows))

    def fit(self, transitions: Tensors) -> None:
        self.policy.fit(nest(under(transitions, "obs"), "obs"))
