"""Residual SAC in one file: per-step corrections of a frozen policy (Johannink et al., 2019).

The base plans chunks of actions and its weights stay as they are. SAC's actor (Haarnoja et al.,
2018) sees the observation and the base's action a_b of this step, and adds a small correction:

    a       = clip(a_b + scale u, -1, 1),    u ~ pi(.|s, a_b) in [-1, 1]^A
    y       = r + d min_i Q'_i(s', a_b', u'),                          u' ~ pi(.|s', a_b')
    L_Q     = sum_i E (Q_i(s, a_b, u) - y)^2
    L_pi    = E (alpha log pi(u~|s, a_b) - min_i Q_i(s, a_b, u~)),     u~ ~ pi(.|s, a_b)
    L_alpha = -log alpha E (log pi(u~|s, a_b) + H)

To SAC this is an environment with one more observation, a_b, and the actions u. The actor's head
begins at zero, so that training begins with the base's actions. The target has no entropy bonus:
one for each of many steps would outweigh one reward at the end. d is gamma, 0 at a termination.

    embodied demos collect env=two_gap episodes=100 out=outputs/demos
    embodied train experiment=two_gap_flow demos=outputs/demos out=outputs/base
    python examples/residual_sac.py init=outputs/base
    embodied eval outputs/residual_sac
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
from embodied.buffers.replay import ReplayBuffer
from embodied.core import checkpoint
from embodied.core.build import parse, plain
from embodied.core.device import seed_everything
from embodied.core.policy import Policy
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors, under
from embodied.evaluation.evaluate import EpisodeMeans, evaluate
from embodied.learners.critics import Critic
from embodied.policies.gaussian import Config as ActorConfig
from embodied.policies.gaussian import Gaussian
from embodied.policies.steering.residual import Residual as SavedPolicy
from embodied.training.collector import Collector


@dataclass(frozen=True)
class Settings:
    init: str = "outputs/base"  # run of the frozen policy, without memory
    # Name, Gymnasium id, or {name: NAME, SETTING: VALUE}; the demonstrations use two gaps
    env: Any = field(default_factory=lambda: {"name": "two_gap", "gaps": [0.75]})
    out: str = "outputs/residual_sac"  # folder of the checkpoint
    seed: int = 0  # of networks, noise and initial states
    num_envs: int = 8  # parallel environments
    steps: int = 12_000  # environment steps, of all parallel environments together
    warmup_steps: int = 2_000  # of them before the first update
    buffer_size: int = 100_000  # transitions
    scale: float = 1.0  # largest correction, in units of half the action range
    utd: float = 0.5  # updates per transition
    batch_size: int = 256  # transitions of an update
    gamma: float = 0.97  # discount per environment step
    tau: float = 0.005  # step of the target critics towards the trained ones
    actor_lr: float = 3e-4  # Adam's learning rate of the actor
    critic_lr: float = 3e-4  # Adam's learning rate of the critics
    temperature_lr: float = 3e-4  # Adam's learning rate of log alpha
    initial_temperature: float = 0.005  # alpha at the start, in units of the reward
    target_entropy: float = -1.0  # entropy that alpha is tuned to, per element of u (nats)
    critics: int = 2  # number of critics, with layer normalisation
    hidden: tuple[int, ...] = (256, 256)  # units of the hidden layers of actor and critics
    eval_every: int = 3_000  # environment steps between two evaluations
    eval_episodes: int = 100  # episodes of an evaluation


class Corrected(Policy):
    """The frozen `base`, whose chunk is executed open loop, with `actor`'s correction of each step;
    the stored action is u. The carry holds the base's plan and the place in it."""

    chunk = 1

    def __init__(self, base: Policy, actor: Gaussian, scale: float) -> None:
        super().__init__()
        assert not base.initial(1), "this file is for a base without memory (obs_steps=1)"
        self.spec = base.spec
        self.base = base.requires_grad_(False)
        self.actor = actor
        self.scale = scale
        self.shape = base.sample_noise(1).shape[1:]

    def initial(self, n: int) -> Tensors:
        return {
            "plan": torch.zeros(n, self.base.chunk, self.spec.act.size),
            "cursor": torch.full((n,), self.base.chunk),  # at its end: plan first
            "row/action": torch.zeros(n, self.actor.size),
        }

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        """The actor's noise, then the base's, [n, A + ...]."""
        own = self.actor.sample_noise(n, explore)
        return torch.cat([own, self.base.sample_noise(n, explore).flatten(1)], 1)

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        ended = carry["cursor"] >= self.base.chunk
        if ended.any():
            fresh = self.base.act(obs, {}, noise[:, self.actor.size :].view(-1, *self.shape))[0]
            plan = torch.where(ended[:, None, None], fresh, carry["plan"])
            carry = {**carry, "plan": plan, "cursor": carry["cursor"] * ~ended}
        step = carry["plan"][torch.arange(len(ended)), carry["cursor"]]
        return {**obs, "base_action": step}, carry

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        u = self.actor.act(obs, {}, noise[:, : self.actor.size])[0].squeeze(1)
        action = (obs["base_action"] + self.scale * u).clamp(-1, 1)
        return action[:, None], {**carry, "cursor": carry["cursor"] + 1, "row/action": u}


class ResidualSac(nn.Module):
    """Actor, critics, optimisers and one `update`: SAC with actions u."""

    def __init__(self, settings: Settings, policy: Gaussian) -> None:
        super().__init__()
        self.settings = settings
        self.policy = policy
        size = (policy.size, settings.critics, settings.hidden)
        self.critic = Critic(policy.spec, *size, layer_norm=True)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(settings.initial_temperature)))
        self.entropy = settings.target_entropy * policy.size  # H, of a whole u
        adam = torch.optim.Adam
        self.actor_adam = adam(policy.parameters(), settings.actor_lr, fused=True)
        self.critic_adam = adam(self.critic.parameters(), settings.critic_lr, fused=True)
        self.alpha_adam = adam([self.log_alpha], settings.temperature_lr, fused=True)

    def sample(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """u [N, A] of the actor, with log-densities [N]; differentiable."""
        noise = self.policy.sample_noise(len(obs["base_action"]), explore=True)
        return self.policy.sample(obs, noise)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        """One step of critics, actor and temperature. `batch`: `obs/*` and `next_obs/*` [N, ...],
        each with `base_action`, `action` [N, A] (u), `reward` and `discount` [N]. Returns metrics,
        0-d tensors."""
        obs = under(batch, "obs")
        next_obs = under(batch, "next_obs")

        with torch.no_grad():
            next_u, _ = self.sample(next_obs)
            backup = batch["reward"] + batch["discount"] * self.target(next_obs, next_u).amin(0)
        q = self.critic(obs, batch["action"])  # [critics, N]
        critic_loss = (q - backup).square().mean(1).sum()
        self.critic_adam.zero_grad()
        critic_loss.backward()
        self.critic_adam.step()
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.critic.parameters(), strict=True)
            for target, online in pairs:
                target.lerp_(online, self.settings.tau)

        u, log_prob = self.sample(obs)
        alpha = self.log_alpha.detach().exp()
        actor_loss = (alpha * log_prob - self.critic(obs, u).amin(0)).mean()
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


def saved_policy(policy: Corrected) -> SavedPolicy:
    """The same policy as a class of the library, which commands and robots can load."""
    node = {"_target_": "embodied.policies.steering.residual.Residual", "scale": policy.scale}
    saved = SavedPolicy.wrap(policy.base, node, policy.actor.node)
    saved.inner.load_state_dict(policy.actor.state_dict())
    return saved


def train(settings: Settings) -> float:
    """Train and save a checkpoint; returns the mean return of the last evaluation."""
    seed_everything(settings.seed)
    env = em.make_env(settings.env, num_envs=settings.num_envs)
    eval_env = em.make_env(settings.env, num_envs=50)
    base = checkpoint.load_policy(settings.init, env.spec)
    print(f"{0:>8} the base: {evaluate(base, eval_env, settings.eval_episodes, seed=10_000)}")
    unit = Leaf((env.spec.act.size,), low=-1.0, high=1.0)
    spec = env.spec.with_obs(base_action=unit).with_act(unit)
    actor = Gaussian(ActorConfig(hidden=settings.hidden, zero_head=True), spec)
    policy = Corrected(base, actor, settings.scale)
    agent = ResidualSac(settings, actor)
    buffer = ReplayBuffer(settings.buffer_size)
    collector = Collector(env, policy, settings.gamma, seed=settings.seed)
    episodes = EpisodeMeans()
    score = math.nan
    metrics: dict[str, Tensor] = {}
    credit = 0.0  # updates that are due
    begin = time.monotonic()

    for now in range(env.num_envs, settings.steps + 1, env.num_envs):
        learning = now > settings.warmup_steps
        if learning and not metrics and len(buffer):
            for network in (actor, agent.critic.encoder, agent.target.encoder):
                network.fit(buffer.sample(len(buffer)))
        transitions, step = collector.step()
        episodes.add(step)
        buffer.add(transitions)
        if learning:
            credit += settings.utd * env.num_envs
            for _ in range(int(credit)):
                metrics = agent.update(buffer.sample(settings.batch_size))
            credit -= int(credit)

        last = now + env.num_envs > settings.steps
        if last or now // settings.eval_every > (now - env.num_envs) // settings.eval_every:
            shown = {**episodes.drain(), **{name: float(value) for name, value in metrics.items()}}
            rate = now / (time.monotonic() - begin)
            print(f"{now:>8} {rate:.0f}/s", *(f"{name}={v:.4g}" for name, v in shown.items()))
            result = evaluate(policy, eval_env, settings.eval_episodes, seed=10_000)
            score = result.metrics()["return"]
            print(f"{now:>8} evaluation: {result}", flush=True)

    folder = Path(settings.out) / "checkpoints" / f"{settings.steps:08d}"
    checkpoint.save(folder, saved_policy(policy), settings.steps)
    run = {"env": eval_env.node}  # for `embodied eval` and `embodied view`
    (Path(settings.out) / "run.yaml").write_text(yaml.safe_dump(run))
    return score


if __name__ == "__main__":
    train(parse(Settings, plain(OmegaConf.to_container(OmegaConf.from_cli())), "residual_sac.py"))
