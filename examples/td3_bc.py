"""TD3+BC: TD3 with imitation in the policy's loss, in one file (Fujimoto and Gu, 2021), offline.

    a~   = clip(mu'(s') + clip(sigma e, -c, c), -1, 1),    e ~ N(0, I)
    y    = r + d min_i Q'_i(s', a~)
    L_Q  = sum_i E (Q_i(s, a) - y)^2
    L_mu = beta E |mu(s) - a|^2 - E Q_1(s, mu(s)) / E |Q_1(s, mu(s))|

The paper multiplies the term of Q by 2.5, which with Adam is the same as beta = 1 / 2.5. |.|^2 is
the mean over the elements of an action. The policy and all targets are updated at every second
update (TD3; Fujimoto et al., 2018). d is gamma, and 0 where the environment terminated.

    embodied demos collect env=two_gap "env.gaps=[0.75]" success_only=false episodes=200 \
        out=outputs/gap_demos
    python examples/td3_bc.py demos=outputs/gap_demos gamma=0.95 tau=0.02 batch_size=128 \
        actor_lr=2e-3 critic_lr=2e-3 "hidden=[64,64]" steps=4000
    embodied eval outputs/td3_bc
"""

from __future__ import annotations

import copy
import math
import time
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
from embodied.core.spec import require_same
from embodied.core.tensors import Tensors, under
from embodied.datasets.lerobot.reader import read_episodes
from embodied.datasets.transitions import Dataset, transitions
from embodied.evaluation.evaluate import evaluate
from embodied.learners.critics import Critic
from embodied.policies.deterministic import Config as PolicyConfig
from embodied.policies.deterministic import Deterministic


@dataclass(frozen=True)
class Settings:
    demos: str = "outputs/gap_demos"  # folder of a LeRobot dataset with rewards
    # Environment of the evaluations: name, Gymnasium id, or {name: NAME, SETTING: VALUE}
    env: Any = field(default_factory=lambda: {"name": "two_gap", "gaps": [0.75]})
    out: str = "outputs/td3_bc"  # folder of the checkpoint
    seed: int = 0  # of networks, noise and batches
    steps: int = 5_000  # updates
    batch_size: int = 256  # transitions of an update
    gamma: float = 0.99  # discount per environment step
    beta: float = 0.4  # weight of the imitation
    tau: float = 0.005  # step of the targets towards the trained networks
    target_noise: float = 0.2  # sigma, of the target's action, in units of half the action range
    noise_clip: float = 0.5  # c, largest size of that noise, in the same unit
    delay: int = 2  # updates per step of the policy and of the targets
    actor_lr: float = 3e-4  # Adam's learning rate of the policy
    critic_lr: float = 3e-4  # Adam's learning rate of the critics
    hidden: tuple[int, ...] = (256, 256)  # units of the hidden layers of policy and critics
    log_every: int = 500  # updates between two lines of progress
    eval_every: int = 2_500  # updates between two evaluations
    eval_episodes: int = 100  # episodes of an evaluation


class Td3Bc(nn.Module):
    """Networks, optimisers and one `update`."""

    def __init__(self, settings: Settings, policy: Deterministic) -> None:
        super().__init__()
        self.settings = settings
        self.policy = policy
        self.target_policy = copy.deepcopy(policy).requires_grad_(False)
        self.critic = Critic(policy.spec, policy.size, 2, settings.hidden)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.done = 0  # updates
        adam = torch.optim.Adam
        self.actor_adam = adam(policy.parameters(), settings.actor_lr, fused=True)
        self.critic_adam = adam(self.critic.parameters(), settings.critic_lr, fused=True)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        """One step of the critics and, if it is due, of the policy and the targets. `batch`:
        `obs/*` and `next_obs/*` [N, ...], `action` [N, size], `reward` and `discount` [N]. Returns
        metrics, 0-d tensors."""
        settings = self.settings
        self.done += 1
        obs = under(batch, "obs")
        next_obs = under(batch, "next_obs")

        with torch.no_grad():
            next_action = self.target_policy(next_obs)
            noise = settings.target_noise * torch.randn_like(next_action)
            noise = noise.clamp(-settings.noise_clip, settings.noise_clip)
            next_action = (next_action + noise).clamp(-1, 1)
            next_value = self.target(next_obs, next_action).amin(0)
            backup = batch["reward"] + batch["discount"] * next_value
        q = self.critic(obs, batch["action"])  # [2, N]
        critic_loss = (q - backup).square().mean(1).sum()
        self.critic_adam.zero_grad()
        critic_loss.backward()
        self.critic_adam.step()
        metrics = {"critic_loss": critic_loss.detach(), "q_mean": q.detach().mean()}
        if self.done % settings.delay:
            return metrics

        action = self.policy(obs)
        value = self.critic(obs, action, first=1)[0]  # of the first critic, [N]
        imitation = (action - batch["action"]).square().mean(1).mean()
        actor_loss = settings.beta * imitation - value.mean() / value.detach().abs().mean()
        self.actor_adam.zero_grad()
        actor_loss.backward()
        self.actor_adam.step()
        self.move(self.target, self.critic)
        self.move(self.target_policy, self.policy)
        return {**metrics, "actor_loss": actor_loss.detach()}

    @torch.no_grad()
    def move(self, target: nn.Module, online: nn.Module) -> None:
        """target <- target + tau (online - target), for each parameter."""
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.lerp_(fast, self.settings.tau)

    def fit(self, data: Tensors) -> None:
        """Fit the normalisers of observations, which are the identity until then."""
        policies = (self.policy, self.target_policy)
        for network in (*policies, self.critic.encoder, self.target.encoder):
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
    agent = Td3Bc(settings, policy)
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
    train(parse(Settings, plain(OmegaConf.to_container(OmegaConf.from_cli())), "td3_bc.py"))
