"""SAC: soft actor-critic in one file (Haarnoja et al., 2018), with a tuned temperature.

    y       = r + d (min_i Q'_i(s', a') - alpha log pi(a'|s')),    a' ~ pi(.|s')
    L_Q     = sum_i E (Q_i(s, a) - y)^2
    L_pi    = E (alpha log pi(a~|s) - min_i Q_i(s, a~)),           a~ ~ pi(.|s)
    L_alpha = -log alpha E (log pi(a~|s) + H)
    Q'     <- Q' + tau (Q - Q')

d is gamma, and 0 where the environment terminated. At a time limit the target bootstraps from the
true next observation.

    python examples/sac.py env=pendulum gamma=0.98 batch_size=128 actor_lr=1e-3 critic_lr=1e-3 \
        temperature_lr=1e-3 "hidden=[64,64]" steps=5000
    embodied eval outputs/sac
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn

import embodied as em
from embodied.buffers.replay import ReplayBuffer
from embodied.core import checkpoint
from embodied.core.build import parse, plain
from embodied.core.device import seed_everything
from embodied.core.tensors import Tensors, nest, under
from embodied.evaluation.evaluate import EpisodeMeans, evaluate
from embodied.learners.critics import Critic
from embodied.policies.gaussian import Config as PolicyConfig
from embodied.policies.gaussian import Gaussian


@dataclass(frozen=True)
class Settings:
    env: Any = "pendulum"  # name, Gymnasium id, or {name: NAME, SETTING: VALUE}
    out: str = "outputs/sac"  # folder of the checkpoint
    seed: int = 0  # of networks, noise and initial states
    num_envs: int = 1  # parallel environments
    steps: int = 10_000  # environment steps, of all parallel environments together
    warmup_steps: int = 500  # of them with random actions, before the first update
    buffer_size: int = 1_000_000  # transitions
    normalize: bool = True  # fit the normalisers of observations to the warm-up
    batch_size: int = 256  # transitions of an update; there is one update per transition
    gamma: float = 0.99  # discount per environment step
    tau: float = 0.005  # step of the target critics towards the trained ones
    actor_lr: float = 3e-4  # Adam's learning rate of the policy
    critic_lr: float = 3e-4  # Adam's learning rate of the critics
    temperature_lr: float = 3e-4  # Adam's learning rate of log alpha
    initial_temperature: float = 1.0  # alpha at the start, in units of the reward
    target_entropy: float = -1.0  # entropy that alpha is tuned to, per action element (nats)
    critics: int = 2  # number of critics
    hidden: tuple[int, ...] = (256, 256)  # units of the hidden layers of policy and critics
    log_every: int = 1_000  # environment steps between two lines of progress
    eval_every: int = 2_500  # environment steps between two evaluations
    eval_episodes: int = 20  # episodes of an evaluation


class Sac(nn.Module):
    """Networks, optimisers and one `update`."""

    def __init__(self, settings: Settings, policy: Gaussian) -> None:
        super().__init__()
        self.settings = settings
        self.policy = policy
        self.critic = Critic(policy.spec, policy.size, settings.critics, settings.hidden)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(settings.initial_temperature)))
        self.entropy = settings.target_entropy * policy.size  # H, of a whole action
        adam = torch.optim.Adam
        self.actor_adam = adam(policy.parameters(), settings.actor_lr, fused=True)
        self.critic_adam = adam(self.critic.parameters(), settings.critic_lr, fused=True)
        self.alpha_adam = adam([self.log_alpha], settings.temperature_lr, fused=True)

    def sample(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Actions [N, size] of the policy, with their log-densities [N]; differentiable."""
        noise = self.policy.sample_noise(len(next(iter(obs.values()))), explore=True)
        return self.policy.sample(obs, noise)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        """One step of critics, policy and temperature. `batch`: `obs/*` and `next_obs/*` [N, ...],
        `action` [N, size], `reward` and `discount` [N]. Returns metrics, 0-d tensors."""
        obs = under(batch, "obs")
        next_obs = under(batch, "next_obs")
        alpha = self.log_alpha.detach().exp()

        with torch.no_grad():
            next_action, next_log_prob = self.sample(next_obs)
            next_value = self.target(next_obs, next_action).amin(0) - alpha * next_log_prob
            backup = batch["reward"] + batch["discount"] * next_value
        q = self.critic(obs, batch["action"])  # [critics, N]
        critic_loss = (q - backup).square().mean(1).sum()
        self.critic_adam.zero_grad()
        critic_loss.backward()
        self.critic_adam.step()
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.critic.parameters(), strict=True)
            for target, online in pairs:
                target.lerp_(online, self.settings.tau)

        action, log_prob = self.sample(obs)
        actor_loss = (alpha * log_prob - self.critic(obs, action).amin(0)).mean()
        self.actor_adam.zero_grad()
        actor_loss.backward()
        self.actor_adam.step()

        alpha_loss = -(self.log_alpha * (log_prob.detach() + self.entropy)).mean()
        self.alpha_adam.zero_grad()
        alpha_loss.backward()
        self.alpha_adam.step()
        return {
            "critic_loss": critic_loss.detach(),
            "actor_loss": actor_loss.detach(),
            "q_mean": q.detach().mean(),
            "entropy": -log_prob.detach().mean(),
            "temperature": self.log_alpha.detach().exp(),
        }

    def fit(self, transitions: Tensors) -> None:
        """Fit the normalisers of observations, which are the identity until then."""
        for network in (self.policy, self.critic.encoder, self.target.encoder):
            network.fit(transitions)


def train(settings: Settings) -> float:
    """Train and save a checkpoint; returns the mean return of the last evaluation."""
    seed_everything(settings.seed)
    env = em.make_env(settings.env, num_envs=settings.num_envs)
    eval_env = em.make_env(settings.env, num_envs=10)
    policy = Gaussian(PolicyConfig(hidden=settings.hidden), env.spec)
    agent = Sac(settings, policy)
    buffer = ReplayBuffer(settings.buffer_size)
    episodes = EpisodeMeans()
    score = math.nan
    metrics: dict[str, Tensor] = {}
    begin = time.monotonic()

    obs = env.reset(settings.seed)
    for now in range(env.num_envs, settings.steps + 1, env.num_envs):
        learning = now > settings.warmup_steps
        if learning and not metrics and settings.normalize and len(buffer):
            agent.fit(buffer.sample(len(buffer)))
        with torch.no_grad():
            action = agent.sample(obs)[0] if learning else env.spec.act.sample(env.num_envs)
        step = env.step(action)
        transitions = {
            **nest(obs, "obs"),
            "action": action,
            "reward": step.reward,
            "discount": settings.gamma * (~step.terminated).float(),
            **nest(step.next_obs, "next_obs"),
        }
        buffer.add(transitions)
        obs = step.obs  # where an episode ended, the first observation of the next one
        episodes.add(step)
        if learning:
            for _ in range(env.num_envs):
                metrics = agent.update(buffer.sample(settings.batch_size))

        if now // settings.log_every > (now - env.num_envs) // settings.log_every:
            shown = {**episodes.drain(), **{name: float(value) for name, value in metrics.items()}}
            rate = now / (time.monotonic() - begin)
            print(f"{now:>8} {rate:.0f}/s", *(f"{name}={v:.4g}" for name, v in shown.items()))
        last = now + env.num_envs > settings.steps
        if last or now // settings.eval_every > (now - env.num_envs) // settings.eval_every:
            result = evaluate(policy, eval_env, settings.eval_episodes, seed=10_000)
            score = result.metrics()["return"]
            print(f"{now:>8} evaluation: {result}", flush=True)

    folder = Path(settings.out)
    checkpoint.save(folder / "checkpoints" / f"{settings.steps:08d}", policy, settings.steps)
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": eval_env.node}))  # for eval and view
    return score


if __name__ == "__main__":
    train(parse(Settings, plain(OmegaConf.to_container(OmegaConf.from_cli())), "sac.py"))
