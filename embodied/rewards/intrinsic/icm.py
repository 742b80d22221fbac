"""ICM, intrinsic curiosity module. Applied when transitions are sampled; every stored transition
updates its statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, Fraction, Number, PositiveFraction, Units
from embodied.core.build import ConfigError
from embodied.core.choices import Choices
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
class IcmConfig:
    """Settings of ICM. The networks are trained on every sampled batch, in minibatches."""

    weight: Number = 1.0  # weight of the bonus
    env_weight: Number = 1.0  # weight of the environment's reward
    leaves: tuple[str, ...] | None = None  # observations to predict; null: all of the policy's
    hidden: tuple[Units, ...] = (256,)  # units of the hidden layers
    features: Units = 32  # size of phi
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
