"""IQL: implicit Q-learning in one file (Kostrikov, Nair and Levine, 2022), from recorded episodes.

    L_V  = E |tau - 1[u < 0]| u^2,             u = min_i Q'_i(s, a) - V(s)
    L_Q  = sum_i E (r + d V(s') - Q_i(s, a))^2
    L_pi = E min(exp(beta u), 100) |mu(s) - a|^2
    Q'  <- Q' + eta (Q - Q')

Q is never evaluated at actions that are not in the data: V is its upper expectile over those that
are, and the policy imitates them, weighted by their advantage u. |.|^2 is the mean over the
elements of an action. d is gamma, and 0 where the environment terminated.

    embodied demos collect env=two_gap "env.gaps=[0.75]" success_only=false episodes=200 \
        out=outputs/gap_demos
    python examples/iql.py demos=outputs/gap_demos gamma=0.95 beta=10 expectile=0.9 eta=0.02 \
        batch_size=128 actor_lr=2e-3 critic_lr=2e-3 value_lr=2e-3 "hidden=[64,64]" steps=4000
    embodied eval outputs/iql
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn

import embodied as em
from embodied.core import checkpoint
from embodied.core.build import parse, plain
from embodied.core.device import seed_everything
from embodied.core.spec import Spec, require_same
from embodied.core.tensors import Tensors, under
from embodied.datasets.lerobot.reader import read_episodes
from embodied.datasets.transitions import Dataset, transitions
from embodied.evaluation.evaluate import evaluate
from embodied.learners.critics import Critic
from embodied.nn.networks import Ensemble
from embodied.policies.deterministic import Config as PolicyConfig
from embodied.policies.deterministic import Deterministic
from embodied.policies.networks.encoders import Encoder


@dataclass(frozen=True)
class Settings:
    demos: str = "outputs/gap_demos"  # folder of a LeRobot dataset with rewards
    # Environment of the evaluations: name, Gymnasium id, or {name: NAME, SETTING: VALUE}
    env: Any = field(default_factory=lambda: {"name": "two_gap", "gaps": [0.75]})
    out: str = "outputs/iql"  # folder of the checkpoint
    seed: int = 0  # of networks and batches
    steps: int = 5_000  # updates
    batch_size: int = 256  # transitions of an update
    gamma: float = 0.99  # discount per environment step
    expectile: float = 0.7  # tau; 0.5: the mean of Q, to 1: its maximum over the data's actions
    beta: float = 3.0  # inverse temperature, in units of 1 / value; 0: plain imitation
    clip: float = 100.0  # largest weight of a transition in the policy's loss
    eta: float = 0.005  # step of the target critics towards the trained ones
    actor_lr: float = 3e-4  # Adam's learning rate of the policy; falls to 0 along a cosine
    critic_lr: float = 3e-4  # Adam's learning rate of the critics
    value_lr: float = 3e-4  # Adam's learning rate of the value function
    critics: int = 2  # number of critics
    hidden: tuple[int, ...] = (256, 256)  # units of the hidden layers of all networks
    log_every: int = 500  # updates between two lines of progress
    eval_every: int = 2_500  # updates between two evaluations
    eval_episodes: int = 100  # episodes of an evaluation


class Value(nn.Module):
    """State-value function: V [N] of observations [N, ...]."""

    def __init__(self, spec: Spec, hidden: Sequence[int]) -> None:
        super().__init__()
        self.encoder = Encoder(spec.obs, asymmetric=True)
        self.net = Ensemble(1, self.encoder.size, hidden)

    def forward(self, obs: Tensors) -> Tensor:
        return self.net(self.encoder(obs)).flatten()


class Iql(nn.Module):
    """Networks, optimisers and one `update`."""

    def __init__(self, settings: Settings, policy: Deterministic) -> None:
        super().__init__()
        self.settings = settings
        self.policy = policy
        self.critic = Critic(policy.spec, policy.size, settings.critics, settings.hidden)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.value = Value(policy.spec, settings.hidden)
        self.done = 0  # updates
        adam = torch.optim.Adam
        self.actor_adam = adam(policy.parameters(), settings.actor_lr, fused=True)
        self.critic_adam = adam(self.critic.parameters(), settings.critic_lr, fused=True)
        self.value_adam = adam(self.value.parameters(), settings.value_lr, fused=True)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        """One step of value function, policy and critics. `batch`: `obs/*` and `next_obs/*`
        [N, ...], `action` [N, size], `reward` and `discount` [N]. Returns metrics, 0-d tensors."""
        settings = self.settings
        obs = under(batch, "obs")
        action = batch["action"]

        with torch.no_grad():
            best = self.target(obs, action).amin(0)
            backup = batch["reward"] + batch["discount"] * self.value(under(batch, "next_obs"))
        value = self.value(obs)
        gap = best - value
        side = torch.where(gap < 0, 1 - settings.expectile, settings.expectile)
        value_loss = (side * gap.square()).mean()

        q = self.critic(obs, action)  # [critics, N]
        critic_loss = (q - backup).square().mean(1).sum()

        advantage = gap.detach()
        weight = (settings.beta * advantage).clamp(max=math.log(settings.clip)).exp()
        actor_loss = (weight * (self.policy(obs) - action).square().mean(1)).mean()

        progress = min(self.done / max(settings.steps, 1), 1.0)
        self.actor_adam.param_groups[0]["lr"] = (
            settings.actor_lr * (1 + math.cos(math.pi * progress)) / 2
        )
        adams = (self.value_adam, self.critic_adam, self.actor_adam)
        for adam, loss in zip(adams, (value_loss, critic_loss, actor_loss), strict=True):
            adam.zero_grad()
            loss.backward()
            adam.step()
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.critic.parameters(), strict=True)
            for target, online in pairs:
                target.lerp_(online, settings.eta)
        self.done += 1
        return {
            "value_loss": value_loss.detach(),
            "critic_loss": critic_loss.detach(),
            "actor_loss": actor_loss.detach(),
            "q_mean": q.detach().mean(),
            "advantage": advantage.mean(),
            "weight": weight.mean(),
        }

    def fit(self, data: Tensors) -> None:
        """Fit the normalisers of observations, which are the identity until then."""
        for network in (self.policy, self.critic.encoder, self.target.encoder, self.value.encoder):
            network.fit(data)


def train(settings: Settings) -> float:
    """Train and save a checkpoint; returns the mean return of the last evaluation."""
    seed_everything(settings.seed)
    env = em.make_env(settings.env, num_envs=10)
    episodes = read_episodes(settings.demos)
    require_same(env.spec, episodes.spec, "environment", settings.demos)
    data = transitions(episodes, settings.gamma)
    source = Dataset(data)
    policy = Deterministic(PolicyConfig(hidden=settings.hidden), env.spec)
    agent = Iql(settings, policy)
    agent.fit(data)
    score = math.nan
    begin = time.monotonic()

    for now in range(1, settings.steps + 1):
        metrics = agent.update(source.sample(settings.batch_size))
        if now % settings.log_every == 0:
            rate = now / (time.monotonic() - begin)
            print(f"{now:>8} {rate:.0f}/s", *(f"{name}={v:.4g}" for name, v in metrics.items()))
        if now == settings.steps or now % settings.eval_every == 0:
            result = evaluate(policy, env, settings.eval_episodes, seed=10_000)
            score = result.metrics()["return"]
            print(f"{now:>8} evaluation: {result}", flush=True)

    folder = Path(settings.out)
    checkpoint.save(folder / "checkpoints" / f"{settings.steps:08d}", policy, settings.steps)
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": env.node}))  # for eval and view
    return score


if __name__ == "__main__":
    train(parse(Settings, plain(OmegaConf.to_container(OmegaConf.from_cli())), "iql.py"))
