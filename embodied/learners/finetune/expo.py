"""EXPO: improve an expressive policy without differentiating through it (Dong et al., 2025).

The base (a flow) goes on imitating every stored action; a small edit policy climbs the critics;
what acts, and what the target follows, is the best of N proposals of the base and their N edits:

    a*  = argmax min_{M} Q'(s', .) over {a_i, clip(a_i + scale u_i)},   a_i ~ base, u_i ~ edit
    y   = r + d min_{M'} Q'(s', a*),           M, M' independent random subsets of the E critics
    L_Q = sum_i E (Q_i(s, a) - y)^2,           L_base = imitation of a
    L_e = E (alpha log pi_e(scale u | s, a) - mean_i Q_i(s, clip(a + scale u))),   a from the row
    L_alpha = -alpha E (log pi_e + D (h + log scale))

The density is that of the scaled edit, log p(u) - D log scale, and the target entropy is scaled
with it, or the temperature would run away. Acting uses a slow average of the base.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, each, under
from embodied.learners.critics import critic_loss
from embodied.learners.gradient_learner import GradientLearner, frozen, soft_update
from embodied.learners.imitation.bc_rows import behaviour
from embodied.learners.off_policy.sac import actor_loss, temperature_slope
from embodied.nn.optim import Adam
from policies.wrappers.best_of_n import select_by_q
from policies.wrappers.edit import Edit


@dataclass(frozen=True)
class Config:
    """`utd` critic steps an update, each on its own `batch_size` rows; `subset` of the policy's
    critics in the target; `base_tau`: how fast the base that acts follows the one that learns;
    `target_entropy`: of an edit in units of its scale, per element. `compile` and `cuda_graph`
    change speed only and are for GPUs."""

    batch_size: int = 256
    utd: int = 1
    gamma: float = 0.99
    tau: float = 0.005
    subset: int = 2
    base_tau: float = 0.001
    base_lr: float = 3e-4
    edit_lr: float = 3e-4
    critic_lr: float = 3e-4
    temperature_lr: float = 3e-4
    initial_temperature: float = 0.01
    target_entropy: float = -0.5
    compile: bool = False
    cuda_graph: bool = False


class Expo(GradientLearner):
    """`update` takes utd * batch_size rows: utd critic steps on slices, then base, edit policy and
    temperature once, on the last one. `online` learns; `policy`, which acts, shares its edit policy
    and critics and follows its base."""

    data = "off_policy"
    policy: Edit  # pyright: ignore[reportIncompatibleVariableOverride]
    online: Edit

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__()
        if not isinstance(policy, Edit):
            raise ConfigError("this learner edits what a policy proposes: policy=edit")
        critics = policy.critic.ensemble.n
        if not 1 <= config.subset <= critics:
            raise ConfigError(f"subset={config.subset} is not in 1..{critics} (critics)")
        self.config = config
        self.gamma, self.batch_size = config.gamma, config.utd * config.batch_size
        self.online = policy.requires_grad_(True)
        self.policy = twin(policy)
        self.critic = policy.critic
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.initial_temperature)))
        self.entropy = (config.target_entropy + math.log(policy.scale)) * policy.size
        self.critic_params: list[Tensor] = list(self.critic.parameters())
        self.target_params: list[Tensor] = list(self.target.parameters())
        self.base_params: list[Tensor] = list(policy.base.parameters())
        self.ema_base_params: list[Tensor] = list(self.policy.base.parameters())
        self.optims = {
            "critic": Adam(self.critic_params, config.critic_lr),
            "base": Adam(self.base_params, config.base_lr),
            "edit": Adam(policy.edit.parameters(), config.edit_lr),
            "temperature": Adam([self.log_alpha], config.temperature_lr),
        }
        # The one place where the same code becomes faster code.
        self._critic_loss_fn = self.compiled(self._critic_loss)
        self._actor_loss_fn = self.compiled(self._edit_loss)
        self.steps = self.recorded(self._steps)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        return self.steps(batch)

    def _steps(self, batch: Tensors) -> dict[str, Tensor]:
        size, metrics = self.config.batch_size, {}
        for at in range(0, self.batch_size, size):
            part = batch if self.config.utd == 1 else each(batch, lambda v: v[at : at + size])  # noqa: B023
            metrics |= self._critic_step(part)
        return metrics | self._base_step(part) | self._edit_step(part)

    def _critic_step(self, batch: Tensors) -> dict[str, Tensor]:
        loss, q_mean = self._critic_loss_fn(batch)
        self.descend("critic", loss)
        soft_update(self.target_params, self.critic_params, self.config.tau)
        return {"critic_loss": loss.detach(), "q_mean": q_mean}

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        q = self.critic(under(batch, "obs"), batch["action"])
        following = under(batch, "next_obs")
        loss = critic_loss(q, self._backup(batch["reward"], batch["discount"], following))
        return loss, q.detach().mean()

    @torch.no_grad()
    def _backup(self, reward: Tensor, discount: Tensor, following: Tensors) -> Tensor:
        """The base that learns proposes; one subset of the targets chooses, another one values."""
        proposals = self.online.proposals(
            following, self.online.sample_noise(reward.shape[0], True)
        )
        action, _ = select_by_q(self._least, following, proposals)
        return torch.addcmul(reward, discount, self._least(following, action[:, None])[:, 0])

    def _least(self, obs: Tensors, actions: Tensor) -> Tensor:
        """The minimum [N, K] over `subset` random target critics."""
        # Not randperm: it waits for the device, and a CUDA graph would replay one draw.
        scores = torch.rand(self.target.ensemble.n, device=actions.device)
        index = scores.topk(self.config.subset).indices
        return self.target.each(obs, actions, index).amin(0)

    def _base_step(self, batch: Tensors) -> dict[str, Tensor]:
        loss = self.online.base.loss(behaviour(batch, self.online)).mean()
        self.descend("base", loss)
        soft_update(self.ema_base_params, self.base_params, self.config.base_tau)
        return {"base_loss": loss.detach()}

    def _edit_step(self, batch: Tensors) -> dict[str, Tensor]:
        with frozen(self.critic_params):
            loss, log_prob = self._actor_loss_fn(batch)
            self.descend("edit", loss)
        self.log_alpha.grad = temperature_slope(log_prob, self.entropy)
        self.optims["temperature"].step()
        return {
            "edit_loss": loss.detach(),
            "entropy": -log_prob.mean(),
            "temperature": self.log_alpha.detach().exp(),
        }

    def _edit_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        obs, action = under(batch, "obs"), batch["action"]
        edited, log_prob = self.online.revise(obs, action, torch.randn_like(action))
        value = self.critic(obs, edited).mean(0)
        return actor_loss(value, log_prob, self.log_alpha.detach().exp()), log_prob.detach()

    def fit(self, rows: Tensors) -> None:
        for part in (self.online, self.policy, self.target.encoder):
            part.fit(rows)


def twin(policy: Edit) -> Edit:
    """A policy around the same edit policy and critics, with a copy of the base that is fixed."""
    other: Edit = build(policy.node, spec=policy.spec)
    other.edit, other.critic, other.fresh = policy.edit, policy.critic, policy.fresh
    other.base = copy.deepcopy(policy.base).requires_grad_(False)
    return other
