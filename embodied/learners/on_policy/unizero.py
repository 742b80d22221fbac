"""UniZero: a transformer model of the environment, learned with what searching in it finds.

Pu et al., 2024. On sequences of the newest `batches` batches, with the outputs h of the transformer
(`policy=unizero`) and a target network of averaged weights,

    L = 10 |z(h_{a_t}) - sg z_bar(o_{t+1})|^2 + (r(h_{a_t}) - r_t)^2 + BCE(goes on)
        + 0.5 CE(v(h_{z_t}), G_t) - sum_a visits_t(a) log pi(a | h_{z_t})

G_t is the return of `steps` steps and the target network's value after them; `visits` are those of
the search that decided. After each update the past that acting remembers is forgotten, because its
keys are of older parameters.

ScaleZero (2025), for several tasks in one environment (`Tasks`): a task whose mean return has come
to its target in `targets` is not trained any more; and training has stages, each with new adapters
in the policy's layers (`policy.stages`). A stage ends when ceil(unsolved / stages left) tasks were
solved in it, or after `stage_updates` updates.

Differences from the published code: steps of solved tasks are still collected; adapters are in the
transformer, everything else is trained in all stages; returns of training episodes, which explore,
decide what is solved.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core import distributed
from embodied.core.bounds import Count, Fraction, NonNegative, Number, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import TASK_NUMBER
from embodied.core.tensors import Tensors, each, nest, state_to, under
from embodied.learners.critics import Support
from embodied.learners.finetune.ticket import finished_episodes
from embodied.learners.learner import Learner, soft_update
from embodied.nn.optim import Adam
from embodied.policies.networks.mixture import staged_in
from embodied.policies.unizero import UniZero

COUNTED = 20  # episodes of a task that its mean return is of


@dataclass(frozen=True)
class Config:
    """Settings of UniZero, and of ScaleZero's stages."""

    horizon: Count = 16  # steps of each parallel environment per update
    batches: Count = 32  # newest batches that sequences are of
    batch_size: Count = 32  # sequences of `horizon` steps per gradient step
    gradient_steps: Count = 32  # per update
    steps: Count = 5  # of rewards in the target of a value
    lr: PositiveFraction = 1e-3  # AdamW's learning rate
    weight_decay: NonNegative = 1e-4  # of AdamW
    grad_clip: Positive = 5.0  # largest norm of the gradient
    tau: PositiveFraction = 0.05  # share of the weights in the target network, per gradient step
    latent_weight: NonNegative = 10.0  # of the error of the next latent
    value_weight: NonNegative = 0.5  # of the values' cross entropy
    entropy: Fraction = 0.0  # weight of the policy's entropy
    targets: tuple[Number, ...] = ()  # mean returns at which each task is solved; none: never
    stage_updates: Count = 500  # updates of a stage, at most


class UniZeroLearner(Learner):
    """An update is `gradient_steps` steps of AdamW on sequences [T, B] of recent batches.

    `recent` [tasks, COUNTED] are the returns of each task's last episodes, on the CPU; `solved`
    [tasks] (bool); `stage`, and since it began: `updates` and `solved_before`.
    """

    data = "on_policy"
    usual_policy = "unizero"
    counters = ("running", "recent", "solved", "stage", "updates", "solved_before", "parallel")

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__(config, policy)
        if not isinstance(policy, UniZero):
            raise ConfigError(
                "this learner trains the model that a policy searches in: policy=unizero"
            )
        self.keep_batches = config.batches
        self.gamma = policy.config.gamma
        tasks = 1
        if TASK_NUMBER in policy.spec.obs:
            tasks = policy.spec.obs[TASK_NUMBER].symbols[0]
        if config.targets and len(config.targets) != tasks:
            raise ConfigError(f"learner.targets={list(config.targets)} is for {tasks} tasks")
        low, high = policy.config.values
        self.support = Support(low, high, policy.config.atoms)
        self.target = copy.deepcopy(policy).requires_grad_(False)
        self.optims["adam"] = Adam(
            policy.parameters(),
            config.lr,
            weight_decay=config.weight_decay,
            decoupled=True,
            local=True,
        )
        self.running: Tensors = {}
        self.recent = torch.full((tasks, COUNTED), -torch.inf)
        self.solved = torch.zeros(tasks, dtype=torch.bool)
        self.solved_before = 0
        self.stage = 0
        self.updates = 0
        self.parallel = 0  # environments, known from the first batch
        self._begin_stage(0)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self._follow(batch)
        seen = self.sequences(batch)
        count = seen["first"].shape[1]
        total: Tensors = {}
        for _ in range(self.config.gradient_steps):
            index = torch.randint(count, (self.config.batch_size,), device=seen["first"].device)
            parts = self.losses({key: leaf[:, index] for key, leaf in seen.items()})
            self._descend(torch.stack([*parts.values()]).sum())
            total = {name: total.get(name, 0.0) + part.detach() for name, part in parts.items()}
        metrics = {name: part / self.config.gradient_steps for name, part in total.items()}
        return metrics | self._advance_stage()

    def refreshed(self, carry: Tensors) -> Tensors:
        return self.policy.forgotten(carry)

    def sequences(self, batch: Tensors) -> Tensors:
        """What is learned from a batch [T, B]; `valid` is false in solved tasks."""
        names = ("action", "reward", "discount", "ended", "first", "visits", "valid")
        seen = {name: batch[name] for name in names}
        for kind in ("obs", "next_obs"):
            seen |= nest(under(batch, kind), kind)
        if TASK_NUMBER in self.policy.spec.obs:
            task = batch[f"obs/{TASK_NUMBER}"].flatten(2)[..., 0].long()
            seen["valid"] = seen["valid"] & ~self.solved.to(task.device)[task]
        return seen

    def losses(self, seen: Tensors) -> Tensors:
        """The terms of the loss, weighted, means over the valid steps of sequences [T, B]."""
        policy, config = self.policy, self.config
        latent, following = (_flat(under(seen, kind)) for kind in ("obs", "next_obs"))
        shape = seen["first"].shape
        tokens = policy.latent(latent).unflatten(0, shape)
        at_latent, at_action = policy.along(tokens, seen["action"], seen["first"])
        with torch.no_grad():
            wanted = self.target.latent(following).unflatten(0, shape)
            returns, known = self.returns(seen, self.target.latent(latent).unflatten(0, shape))
            atoms = self.support.project(
                torch.ones_like(returns).flatten()[:, None], returns.flatten()[:, None]
            )
        valid = seen["valid"].float()
        goes_on = (seen["discount"] > 0).float()
        log_pi = policy.policy_head(at_latent).log_softmax(2)
        log_v = policy.value_head(at_latent).log_softmax(2)
        entropy = -(log_pi.exp() * log_pi).sum(2)
        errors = {
            "latent": config.latent_weight
            * (policy.next_head(at_action) - wanted).square().mean(2),
            "reward": (policy.reward_head(at_action)[..., 0] - seen["reward"]).square(),
            "end": functional.binary_cross_entropy_with_logits(
                policy.goes_on_head(at_action)[..., 0], goes_on, reduction="none"
            ),
            "value": -config.value_weight * known * (atoms.unflatten(0, shape) * log_v).sum(2),
            "policy": -(seen["visits"] * log_pi).sum(2) - config.entropy * entropy,
        }
        count = valid.sum().clamp(min=1)
        return {name: (error * valid).sum() / count for name, error in errors.items()}

    def returns(self, seen: Tensors, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [T, B] of `steps` steps and the target network's value behind them, and whether
        there are any (float): not at the last step of a sequence, nor at the cut of an episode."""
        output, _ = self.target.along(latent, seen["action"], seen["first"])
        value = self.target.mean(self.target.value_head(output))
        cut = seen["ended"] & (seen["discount"] > 0)
        found = value
        for _ in range(self.config.steps):
            later = seen["reward"][:-1] + seen["discount"][:-1] * found[1:]
            found = torch.cat([torch.where(cut[:-1], value[:-1], later), value[-1:]])
        known = (~cut).float()
        known[-1] = 0
        return found, known

    def _descend(self, loss: Tensor) -> None:
        loss.backward()
        weights = [p for p in self.policy.parameters() if p.grad is not None]
        distributed.average_gradients(weights)
        torch.nn.utils.clip_grad_norm_(weights, self.config.grad_clip)
        self.optims["adam"].step()
        soft_update(list(self.target.parameters()), list(self.policy.parameters()), self.config.tau)

    def _follow(self, batch: Tensors) -> None:
        """Add the newest decisions to the running episodes, and the returns of those that ended to
        `recent`."""
        self.parallel = self.parallel or batch["first"].shape[1]
        names = ("valid", "first", "ended", "reward")
        newest = {name: batch[name][:, : self.parallel] for name in names}
        newest["discount"] = torch.ones_like(newest["reward"])
        task = torch.zeros(newest["first"].shape, dtype=torch.int64)
        if TASK_NUMBER in self.policy.spec.obs:
            task = batch[f"obs/{TASK_NUMBER}"][:, : self.parallel].flatten(2)[..., 0].long().cpu()
        self.running, finished = finished_episodes(self.running, newest, {"task": task})
        for ended in finished:
            for number, value in zip(ended["task"].tolist(), ended["returns"], strict=True):
                self.recent[number] = torch.cat([self.recent[number, 1:], value[None]])

    def _advance_stage(self) -> Tensors:
        """Note what is solved, and begin the next stage if it is due; metrics."""
        mean = self.recent.mean(1)
        if self.config.targets:
            self.solved = self.solved | (mean >= torch.tensor(self.config.targets))
        self.updates += 1
        left = self.policy.config.stages - self.stage
        unsolved = len(self.solved) - self.solved_before
        newly = int(self.solved.sum()) - self.solved_before
        due = newly > 0 and newly >= math.ceil(unsolved / left)
        if left > 1 and (due or self.updates >= self.config.stage_updates):
            self._begin_stage(self.stage + 1)
            self.updates = 0
            self.solved_before = int(self.solved.sum())
        returns = {f"return_{i}": value for i, value in enumerate(mean) if value > -torch.inf}
        numbers = {"stage": float(self.stage), "solved": float(self.solved.sum())}
        return returns | {name: torch.tensor(value) for name, value in numbers.items()}

    def _begin_stage(self, stage: int) -> None:
        self.stage = stage
        for layer in staged_in(self.policy):
            layer.train_stage(stage)

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        for name in ("running", "recent", "solved"):  # on the CPU
            setattr(self, name, state_to(state[name], "cpu"))
        self._begin_stage(self.stage)

    def fit(self, transitions: Tensors) -> None:
        super().fit(transitions)
        self.target.fit(transitions)


def _flat(obs: Tensors) -> Tensors:
    """Observations [T, B, ...] as [T * B, ...]."""
    return each(obs, lambda leaf: leaf.flatten(0, 1))
