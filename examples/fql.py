"""FQL: flow Q-learning in one file (Park, Li and Levine, 2025), from recorded episodes.

A flow policy v imitates the data; a one-step policy mu is distilled from it and maximises Q, so
that no gradient passes through the integration. With z, z' ~ N(0, I), x_0 ~ N(0, I), t ~ U(0, 1):

    y      = r + d mean_i Q'_i(s', clip mu(s', z'))
    L_Q    = sum_i E (Q_i(s, a) - y)^2
    L_flow = E |v(x_t, t, s) - (a - x_0)|^2,        x_t = (1 - t) x_0 + t a
    L_mu   = alpha E |mu(s, z) - sg ODE_v(s, z)|^2 - E Q(s, clip mu(s, z)) / E |Q(s, clip mu(s, z))|

Q = mean_i Q_i; ODE_v takes a few Euler steps from z. a is a chunk of actions, r its discounted
reward and d = gamma^k after k steps, 0 if the environment terminated in them (Q-chunking, Li et
al., 2025); of a chunk that the end of its episode cut short, the flow imitates what was executed.

    embodied demos collect env=two_gap "env.gaps=[0.75]" success_only=false episodes=200 \
        out=outputs/gap_demos
    python examples/fql.py demos=outputs/gap_demos gamma=0.95 tau=0.02 batch_size=128 \
        actor_lr=2e-3 critic_lr=2e-3 "hidden=[64,64]" "policy_hidden=[64,64,64]" steps=2000
    embodied eval outputs/fql
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
from embodied.policies.generative.flow import Flow
from embodied.policies.generative.one_step import OneStep


@dataclass(frozen=True)
class Settings:
    demos: str = "outputs/gap_demos"  # folder of a LeRobot dataset with rewards
    # Environment of the evaluations: name, Gymnasium id, or {name: NAME, SETTING: VALUE}
    env: Any = field(default_factory=lambda: {"name": "two_gap", "gaps": [0.75]})
    out: str = "outputs/fql"  # folder of the checkpoint
    seed: int = 0  # of networks, noise and batches
    steps: int = 5_000  # updates
    batch_size: int = 256  # chunks of an update
    gamma: float = 0.99  # discount per environment step
    alpha: float = 1.0  # weight of the distillation: 0.03 (far from the data) to 10 (near)
    tau: float = 0.005  # step of the target critics towards the trained ones
    actor_lr: float = 3e-4  # Adam's learning rate of flow and one-step policy
    critic_lr: float = 3e-4  # Adam's learning rate of the critics
    critics: int = 2  # number of critics, with layer normalisation
    chunk: int = 4  # actions of a decision
    hidden: tuple[int, ...] = (256, 256)  # units of the critics' hidden layers
    policy_hidden: tuple[int, ...] = (256, 256, 256)  # units of the one-step policy's
    log_every: int = 500  # updates between two lines of progress
    eval_every: int = 2_500  # updates between two evaluations
    eval_episodes: int = 100  # episodes of an evaluation


class Fql(nn.Module):
    """Networks, optimisers and one `update`. `policy`: mu, with the flow v as `policy.flow`."""

    def __init__(self, settings: Settings, policy: OneStep) -> None:
        super().__init__()
        self.settings = settings
        self.policy = policy
        size = (policy.size, settings.critics, settings.hidden)
        self.critic = Critic(policy.spec, *size, layer_norm=True)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        adam = torch.optim.Adam
        self.actor_adam = adam(policy.parameters(), settings.actor_lr, fused=True)
        self.critic_adam = adam(self.critic.parameters(), settings.critic_lr, fused=True)

    @property
    def flow(self) -> Flow:
        assert isinstance(self.policy.flow, Flow)
        return self.policy.flow

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        """One step of the critics, and one of flow and one-step policy. `batch`: `obs/*` and
        `next_obs/*` [N, ...], `action` [N, chunk * A], `reward`, `discount` and `executed_steps`
        [N]. Returns metrics, 0-d tensors."""
        settings = self.settings
        obs = under(batch, "obs")
        next_obs = under(batch, "next_obs")
        count = len(batch["reward"])

        with torch.no_grad():
            next_noise = torch.randn(count, self.policy.size)
            next_action = self.policy(next_obs, next_noise).clamp(-1, 1)
            next_value = self.target(next_obs, next_action).mean(0)
            backup = batch["reward"] + batch["discount"] * next_value
        q = self.critic(obs, batch["action"])  # [critics, N]
        critic_loss = (q - backup).square().mean(1).sum()
        self.critic_adam.zero_grad()
        critic_loss.backward()
        self.critic_adam.step()

        noise = torch.randn(count, self.policy.size)
        action = self.policy(obs, noise)  # not clipped yet
        value = self.critic(obs, action.clamp(-1, 1)).mean(0)
        value_loss = -value.mean() / value.detach().abs().mean().clamp(min=1e-6)
        distil_loss = (action - self.integrated(obs, noise)).square().mean()
        flow_loss = self.flow_loss(obs, batch)
        self.actor_adam.zero_grad()
        (flow_loss + settings.alpha * distil_loss + value_loss).backward()
        self.actor_adam.step()

        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.critic.parameters(), strict=True)
            for target, online in pairs:
                target.lerp_(online, settings.tau)
        return {
            "critic_loss": critic_loss.detach(),
            "q_mean": q.detach().mean(),
            "flow_loss": flow_loss.detach(),
            "distil_loss": distil_loss.detach(),
            "value_loss": value_loss.detach(),
        }

    def flow_loss(self, obs: Tensors, batch: Tensors) -> Tensor:
        """The flow-matching loss over the steps that were executed, a scalar."""
        flow = self.flow
        shape = (-1, flow.chunk, flow.spec.act.size)
        target = flow.range(batch["action"].reshape(shape)).flatten(1)  # the data's range: [-1, 1]
        start = torch.randn_like(target)
        time = torch.rand(len(target))
        x = torch.lerp(start, target, time[:, None])
        velocity = flow.net(x, time, flow.features(obs))
        error = (velocity - (target - start)).square().view(shape).mean(2)  # [N, chunk]
        executed = torch.arange(flow.chunk) < batch["executed_steps"][:, None]
        return ((error * executed).sum(1) / executed.sum(1)).mean()

    @torch.no_grad()
    def integrated(self, obs: Tensors, noise: Tensor) -> Tensor:
        """The flow's chunks [N, chunk * A] in [-1, 1] from `noise`, by Euler steps."""
        flow = self.flow
        features = flow.features(obs)
        x = noise
        for k in range(flow.steps):
            time = torch.full((len(x),), k / flow.steps)
            x = x + flow.net(x, time, features) / flow.steps
        return flow.to_actions(x).flatten(1)

    def fit(self, data: Tensors) -> None:
        """Fit the normalisers of observations and of the flow's actions."""
        for network in (self.policy, self.critic.encoder, self.target.encoder):
            network.fit(data)


def train(settings: Settings) -> float:
    """Train and save a checkpoint; returns the mean return of the last evaluation."""
    seed_everything(settings.seed)
    env = em.make_env(settings.env, num_envs=10)
    episodes = read_episodes(settings.demos)
    require_same(env.spec, episodes.spec, "environment", settings.demos)
    data = transitions(episodes, settings.gamma, settings.chunk)
    source = Dataset(data)
    policy = em.make_policy("one_step", env, chunk=settings.chunk, hidden=settings.policy_hidden)
    assert isinstance(policy, OneStep)
    agent = Fql(settings, policy)
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
    train(parse(Settings, plain(OmegaConf.to_container(OmegaConf.from_cli())), "fql.py"))
