"""RND, random network distillation. Applied when transitions are sampled; every stored transition
updates its statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count, Fraction, Number, Units
from embodied.core.device import forked
from embodied.core.env import Step
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.networks import mlp
from embodied.nn.normalizers import RunningMeanStd
from embodied.nn.optim import Adam, gradient_step, minibatches
from embodied.rewards.intrinsic.features import ObservationFeatures


@dataclass(frozen=True)
class RndConfig:
    """Settings of RND. The predictor is trained on every sampled batch, in minibatches."""

    weight: Number = 1.0  # weight of the bonus
    env_weight: Number = 1.0  # weight of the environment's reward
    leaves: tuple[str, ...] | None = None  # observations whose novelty counts; null: the policy's
    hidden: tuple[Units, ...] = (256, 256)  # units of the predictor's hidden layers
    features: Units = 64  # outputs of both networks
    lr: Fraction = 1e-4  # Adam's learning rate; 0: the predictor stays as it is
    batch_size: Count = 256  # transitions per gradient step
    memory: Count | None = 4096  # recent transitions for the bonus's standard deviation; null: all


class Rnd(Remembered, SummedReward):
    """RND, random network distillation: a bonus for novel observations.

        e(s') = mean_j (f_j(s'; theta) - g_j(s'))^2
        r' = env_weight r + weight e(s') / std(returns of e)

    Burda, Edwards, Storkey and Klimov, "Exploration by random network distillation" (2018).
    Observations are normalised and clipped at 5 standard deviations; errors are divided by the
    running standard deviation of their discounted sums, which continue across episode ends. Two
    differences from the paper: one value function learns both rewards, and the standard deviation
    covers recent transitions only (`memory`). Over all transitions it keeps the scale of the first
    errors, and with low-dimensional observations the bonus vanishes.
    """

    frozen = False
    remembered = ("target", "predictor", "adam", "generator", "returns", "scale", "features")

    def __init__(
        self,
        config: RndConfig,
        spec: Spec,
        gamma: float,
        num_envs: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.config = config
        self.gamma = gamma
        self.features = ObservationFeatures(spec.obs, config.leaves, device)
        with forked(seed):
            self.target = mlp(self.features.size, config.hidden[:1], config.features).to(device)
            self.predictor = mlp(self.features.size, config.hidden, config.features).to(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        for layer in [*self.target, *self.predictor]:
            if isinstance(layer, nn.Linear):  # large random features differ more
                nn.init.orthogonal_(layer.weight, 2**0.5, self.generator)
        self.adam = Adam(self.predictor.parameters(), lr=config.lr, local=True)
        self.returns = torch.zeros(num_envs, device=device)
        self.scale = RunningMeanStd(1, device, config.memory)

    @torch.no_grad()
    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        self.features.update(transitions, "next_obs")
        self.returns[env_ids] = self.gamma * self.returns[env_ids] + self.errors(transitions)
        self.scale.update(self.returns[env_ids][:, None])

    @torch.no_grad()
    def components(self, transitions: Tensors) -> Tensors:
        bonus = self.config.weight * self.errors(transitions) / self.scale.std
        return {"env": self.config.env_weight * transitions["reward"], "novelty": bonus}

    def errors(self, transitions: Tensors) -> Tensor:
        """Mean squared error [N] of the predictor."""
        x = self.features(transitions, "next_obs")
        with torch.no_grad():
            goal = self.target(x)
        return (self.predictor(x) - goal).square().mean(1)

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        used = {key: value for key, value in transitions.items() if key.startswith("next_obs/")}
        return minibatches(self._learn, used, self.config.batch_size, self.generator)

    def _learn(self, transitions: Tensors) -> dict[str, Tensor]:
        loss = self.errors(transitions).mean()
        gradient_step(self.adam, loss)
        return {"loss": loss.detach(), "bonus": (loss.detach() / self.scale.std).squeeze()}
