"""Exploration bonuses: RND and ICM. Both are applied when transitions are sampled; every stored
transition updates their statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, Fraction, Number, PositiveFraction
from embodied.core.build import ConfigError, nearest
from embodied.core.choices import Choices
from embodied.core.device import forked
from embodied.core.env import Step
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import Leaf, Spec, hidden
from embodied.core.tensors import Tensors, under
from embodied.nn.fit import gradient_step, minibatches
from embodied.nn.networks import mlp
from embodied.nn.normalizers import RunningMeanStd
from embodied.nn.optim import Adam
from embodied.policies.networks.encoders import OneHot

BLOCKS = 16  # side of a pooled image, pixels


class ObservationFeatures:
    """The observations `leaves` (None: all of the policy's) as one flat feature vector.

    Vectors are normalised by running statistics and clipped at 5 standard deviations; images are
    average-pooled and scaled to [0, 1]; discrete observations are one-hot.
    """

    def __init__(
        self,
        obs: Mapping[str, Leaf],
        leaves: tuple[str, ...] | None,
        device: torch.device | str = "cpu",
    ) -> None:
        names = sorted(name for name in obs if not hidden(name)) if leaves is None else leaves
        for name in names:
            if name not in obs:
                raise ConfigError(f"reward.leaves: no observation {name}{nearest(name, obs)}")
        symbols = {name: obs[name] for name in names if obs[name].is_symbol}
        self.pictures = [name for name in names if obs[name].is_image]
        self.vectors = [n for n in names if n not in symbols and n not in self.pictures]
        self.symbols = OneHot(symbols).to(device) if symbols else None
        flat = sum(obs[name].size for name in self.vectors)
        self.moments = RunningMeanStd(flat, device)
        channels = sum(obs[name].shape[2] for name in self.pictures)
        named = 0 if self.symbols is None else self.symbols.size
        self.size = flat + channels * BLOCKS * BLOCKS + named
        if not self.size:
            raise ConfigError("no observation to compute the reward from: set reward.leaves=[...]")

    def __call__(self, transitions: Tensors, end: str) -> Tensor:
        """Features [N, size] (float32) of the observations `end` ("obs" or "next_obs") of
        transitions."""
        obs = under(transitions, end)
        parts = [self.moments.normalize(self._flat(obs))] if self.vectors else []
        for name in self.pictures:  # uint8 [N, H, W, C] to [N, C * BLOCKS^2] in [0, 1]
            chw = obs[name].permute(0, 3, 1, 2).float()
            parts.append(functional.adaptive_avg_pool2d(chw, BLOCKS).flatten(1) / 255)
        if self.symbols is not None:
            parts.append(self.symbols(obs))
        return torch.cat(parts, 1)

    def update(self, transitions: Tensors, end: str) -> None:
        if self.vectors:
            self.moments.update(self._flat(under(transitions, end)))

    def _flat(self, obs: Tensors) -> Tensor:
        return torch.cat([obs[n].float().reshape(len(obs[n]), -1) for n in self.vectors], 1)

    def get_state(self) -> dict[str, Any]:
        return self.moments.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self.moments.set_state(state)


@dataclass(frozen=True)
class RndConfig:
    """Settings of RND. The predictor is trained on every sampled batch, in minibatches."""

    weight: Number = 1.0  # weight of the bonus
    env_weight: Number = 1.0  # weight of the environment's reward
    leaves: tuple[str, ...] | None = None  # observations whose novelty counts; null: the policy's
    hidden: tuple[Count, ...] = (256, 256)  # units of the predictor's hidden layers
    features: Count = 64  # outputs of both networks
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


@dataclass(frozen=True)
class IcmConfig:
    """Settings of ICM. The networks are trained on every sampled batch, in minibatches."""

    weight: Number = 1.0  # weight of the bonus
    env_weight: Number = 1.0  # weight of the environment's reward
    leaves: tuple[str, ...] | None = None  # observations to predict; null: all of the policy's
    hidden: tuple[Count, ...] = (256,)  # units of the hidden layers
    features: Count = 32  # size of phi
    beta: Fraction = 0.2  # weight of the forward model's loss
    lr: PositiveFraction = 1e-3  # Adam's learning rate
    batch_size: Count = 256  # transitions per gradient step
    memory: Count | None = 4096  # recent transitions for the bonus's standard deviation; null: all


class Icm(Remembered, SummedReward):
    """ICM, intrinsic curiosity module: a bonus for unpredictable outcomes of actions.

        a^ = h(phi(s), phi(s')),  phi^' = f(phi(s), a),  loss = (1 - beta) L_h(a^, a) + beta L_f
        r' = env_weight r + weight / 2 |phi^' - phi(s')|^2 / std

    Pathak, Agrawal, Efros and Darrell, "Curiosity-driven exploration by self-supervised prediction"
    (2017). phi is trained by the inverse model alone, so that changes which no action can cause do
    not count. The bonus is divided by its recent standard deviation, so that `weight` means the
    same in every environment and throughout training.
    """

    frozen = False
    remembered = ("nets", "adam", "generator", "scale", "features")

    def __init__(self, config: IcmConfig, spec: Spec, device: torch.device, seed: int) -> None:
        self.config = config
        self.features = ObservationFeatures(spec.obs, config.leaves, device)
        self.act = spec.act
        self.choices = Choices(spec).to(device)
        self.width = self.choices.width
        with forked(seed):
            size, hidden = config.features, config.hidden
            self.nets = nn.ModuleDict(
                {
                    "phi": mlp(self.features.size, hidden, size),
                    "inverse": mlp(2 * size, hidden, self.width),
                    "forward_model": mlp(size + self.width, hidden, size),
                }
            ).to(device)
        self.adam = Adam(self.nets.parameters(), lr=config.lr, local=True)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.scale = RunningMeanStd(1, device, config.memory)

    @torch.no_grad()
    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        self.features.update(transitions, "next_obs")
        self.scale.update(self._parts(transitions)[1][:, None])

    @torch.no_grad()
    def components(self, transitions: Tensors) -> Tensors:
        bonus = self.config.weight * self._parts(transitions)[1] / self.scale.std
        return {"env": self.config.env_weight * transitions["reward"], "surprise": bonus}

    def _parts(self, transitions: Tensors) -> tuple[Tensor, Tensor]:
        """The inverse model's prediction, and half the squared error [N] of the forward model (its
        gradient trains the forward model only)."""
        before = self.nets["phi"](self.features(transitions, "obs"))
        after = self.nets["phi"](self.features(transitions, "next_obs"))
        guess = self.nets["inverse"](torch.cat([before, after], 1))
        action = self.choices.one_hot(self._steps(transitions))
        given = torch.cat([before.detach(), action], 1)
        predicted = self.nets["forward_model"](given)
        return guess, 0.5 * (predicted - after.detach()).square().sum(1)

    def _steps(self, transitions: Tensors) -> Tensor:
        """Actions of single steps, [N, A] ([N] if discrete)."""
        action = transitions["action"]
        size = action.shape[1:].numel()
        if size != self.act.size:
            raise ConfigError(
                f"ICM predicts single steps, but actions have {size} values instead of "
                f"{self.act.size}: set policy.chunk=1"
            )
        return action.reshape(len(action), *self.act.shape)

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        used = {key: transitions[key] for key in transitions if key == "action" or "obs/" in key}
        return minibatches(self._learn, used, self.config.batch_size, self.generator)

    def _learn(self, transitions: Tensors) -> dict[str, Tensor]:
        guess, wrong = self._parts(transitions)
        choice, numbers = self.choices.split(self._steps(transitions))
        *logits, means = guess.split([*self.choices.counts, self.choices.numbers], 1)
        errors = [functional.cross_entropy(each, choice[:, i]) for i, each in enumerate(logits)]
        if self.choices.numbers:
            errors.append(functional.mse_loss(means, numbers))
        inverse = torch.stack(errors).sum()
        forward = wrong.mean()
        gradient_step(self.adam, (1 - self.config.beta) * inverse + self.config.beta * forward)
        return {"inverse_loss": inverse.detach(), "forward_loss": forward.detach()}
