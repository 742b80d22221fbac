"""FlashSAC: soft actor-critic on networks, values and returns whose norms are bounded.

Kim et al., "FlashSAC: fast and stable off-policy reinforcement learning for high-dimensional robot
control" (2026): normalised residual blocks, weights of unit norm, a categorical critic, rewards
scaled so that returns fit its support, exploration noise that is held, few updates on big batches.

    p   = distribution of (r / s + d (z - alpha log pi(a'|s'))),   z from target critic j(s', a')
    L_Q = sum_i CE(p, Z_i(s, a)),   j: the target critic of the smaller mean
    L_pi = E (alpha log pi(a~|s) - min_i E Z_i(s, a~))

The critics judge (s, a) and (s', a') in one pass, so that batch statistics are those of both
(CrossQ); the policy and the temperature learn at every second update. The entropy sought is that of
a normal of deviation `target_std`: log(target_std sqrt(2 pi e)) per action element.

Ours, where the paper has it otherwise: s is a running maximum over batches of
headroom E|r| / (1 - E d) / high, an estimate of the return that needs rows only (the authors follow
each episode's return); critics start as a normal of deviation high / 5 around 0, not uniform, which
halves the noise of their first thousand updates; learning rates are constant; no mixed precision.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.cuda_graph import Update
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.distributional import Support, cross_entropy
from embodied.learners.gradient_learner import GradientLearner, frozen, soft_update
from embodied.learners.off_policy.sac import actor_loss, temperature_slope
from embodied.nn.optim import Adam
from policies.block_gaussian import BlockGaussian
from policies.networks.encoders import Encoder
from policies.networks.residual_blocks import Blocks


@dataclass(frozen=True)
class Config:
    """`width`, `depth`, `expansion`: of the critics' blocks; `atoms` from -`high` to `high`;
    `headroom`: how many mean returns the support holds; `scale`: s, or None to estimate it.
    `target_std`: see above; `target_entropy` per action element instead, where given. `compile` and
    `cuda_graph` change speed only and are for GPUs."""

    batch_size: int = 512
    gamma: float = 0.99
    n_step: int = 1
    tau: float = 0.01
    width: int = 256
    depth: int = 2
    expansion: int = 4
    atoms: int = 101
    high: float = 5.0
    headroom: float = 2.0
    scale: float | None = None
    actor_lr: float = 3e-4
    critic_lr: float = 3e-4
    temperature_lr: float = 3e-4
    initial_temperature: float = 0.01
    target_std: float = 0.15
    target_entropy: float | None = None
    policy_delay: int = 2
    compile: bool = False
    cuda_graph: bool = False


class BlockCritic(nn.Module):
    """Logits [n, N, atoms] of the return, from every observation and actions [N, size]."""

    def __init__(self, spec: Spec, size: int, n: int, config: Config) -> None:
        super().__init__()
        self.encoder = Encoder(spec.obs, asymmetric=True)
        self.net = Blocks(
            n,
            self.encoder.size + size,
            config.width,
            config.depth,
            config.atoms,
            config.expansion,
        )
        with torch.no_grad():
            z = torch.linspace(-5, 5, config.atoms)  # deviations
            self.net.bias.copy_((-z.square() / 2).expand_as(self.net.bias))

    def forward(self, obs: Tensors, action: Tensor, fresh: bool) -> Tensor:
        return self.net(torch.cat([self.encoder(obs), action], 1), fresh)


class Flashsac(GradientLearner):
    """`update` is one critic step and, when it is due, one policy step on the same rows."""

    data = "off_policy"
    policy: BlockGaussian  # pyright: ignore[reportIncompatibleVariableOverride]
    critic: BlockCritic
    target: BlockCritic
    scale: Tensor

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__()
        if not isinstance(policy, BlockGaussian):
            raise ConfigError("this learner needs a policy of blocks: policy=block_gaussian")
        if config.policy_delay < 1:
            raise ConfigError("policy_delay should be at least 1 (every update)")
        self.config, self.policy = config, policy
        self.batch_size, self.gamma, self.n_step = config.batch_size, config.gamma, config.n_step
        self.support = Support(-config.high, config.high, config.atoms)
        self.critic = BlockCritic(spec, policy.size, 2, config)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        start = 0.0 if config.scale is None else config.scale  # 0 until the first batch
        self.register_buffer("scale", torch.tensor(start))
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.initial_temperature)))
        self.entropy = policy.size * target_entropy(config)
        self.critic_params: list[Tensor] = list(self.critic.parameters())
        self.target_params: list[Tensor] = list(self.target.parameters())
        self.optims = {
            "critic": Adam(self.critic_params, config.critic_lr),
            "actor": Adam(policy.parameters(), config.actor_lr),
            "temperature": Adam([self.log_alpha], config.temperature_lr),
        }
        self.updates = 0
        self.improved: Tensors = {}  # metrics of the newest policy step
        # The one place where the same code becomes faster code.
        self._critic_loss_fn = self.compiled(self._critic_loss)
        self._actor_loss_fn = self.compiled(self._actor_loss)
        self.steps = {act: self._plan(act) for act in (False, True)}

    def _plan(self, act: bool) -> Update:
        return self.recorded(partial(self._step, act))

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self.updates += 1
        act = self.updates % self.config.policy_delay == 0
        metrics = self.steps[act](batch)
        if act:
            self.improved = {key: metrics[key] for key in IMPROVED}
        return metrics | self.improved

    def _step(self, act: bool, batch: Tensors) -> dict[str, Tensor]:
        self._rescale(batch)
        loss, q_mean = self._critic_loss_fn(batch)
        self.descend("critic", loss)
        self.critic.net.project()
        metrics = {"critic_loss": loss.detach(), "q_mean": q_mean, "scale": self.scale.clone()}
        if act:
            metrics |= self._actor_step(batch)
        soft_update(self.target_params, self.critic_params, self.config.tau)
        return metrics

    @torch.no_grad()
    def _rescale(self, batch: Tensors) -> None:
        if self.config.scale is None:
            steps = 1 / (1 - batch["discount"].mean()).clamp(min=1e-4)
            seen = self.config.headroom * batch["reward"].abs().mean() * steps / self.config.high
            self.scale.copy_(torch.maximum(self.scale, seen))

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        n, following = len(batch["reward"]), under(batch, "next_obs")
        with torch.no_grad():
            action, log_prob = self.policy.sample(following, self.policy.sample_noise(n, True))
        obs = {
            key: torch.cat([value, following[key]]) for key, value in under(batch, "obs").items()
        }
        actions = torch.cat([batch["action"], action])
        target = self._backup(batch["reward"], batch["discount"], log_prob, obs, actions)
        logits = self.critic(obs, actions, fresh=True)[:, :n]
        q = self.support.mean(logits.detach()).mean() * self.scale
        return cross_entropy(logits, target), q

    @torch.no_grad()
    def _backup(
        self, reward: Tensor, discount: Tensor, log_prob: Tensor, obs: Tensors, actions: Tensor
    ) -> Tensor:
        """What the critics should answer [N, K]; the second halves of `obs` and `actions` follow
        on the first."""
        logits = self.target(obs, actions, fresh=True)[:, len(reward) :]
        entropy = self.log_alpha.exp() * log_prob
        reward = reward / self.scale.clamp(min=1e-6) - discount * entropy
        return self.support.back_up(self.support.lowest(logits), reward, discount)

    def _actor_step(self, batch: Tensors) -> dict[str, Tensor]:
        with frozen(self.critic_params):
            loss, log_prob = self._actor_loss_fn(batch)
            self.descend("actor", loss)
            self.policy.project()
        self.log_alpha.grad = temperature_slope(log_prob, self.entropy)
        self.optims["temperature"].step()
        temperature = self.log_alpha.detach().exp()
        return dict(zip(IMPROVED, (loss.detach(), -log_prob.mean(), temperature), strict=True))

    def _actor_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        obs = under(batch, "obs")
        action, log_prob = self.policy.sample(
            obs, self.policy.sample_noise(len(batch["reward"]), True)
        )
        q = self.support.mean(self.critic(obs, action, fresh=False)).amin(0)
        return actor_loss(q, log_prob, self.log_alpha.detach().exp()), log_prob.detach()

    def fit(self, rows: Tensors) -> None:
        for part in (self.policy, self.critic.encoder, self.target.encoder):
            part.fit(rows)

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"updates": self.updates}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.updates = state["updates"]


IMPROVED = ("actor_loss", "entropy", "temperature")


def target_entropy(config: Config) -> float:
    """The entropy sought per action element."""
    if config.target_entropy is not None:
        return config.target_entropy
    return math.log(config.target_std * math.sqrt(2 * math.pi * math.e))
