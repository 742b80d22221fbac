"""DSRL: RL in the latent noise of a frozen policy, in one file (Wagenmaker et al., 2025).

A flow or diffusion policy maps noise w to a chunk of actions. Its weights stay as they are; SAC's
actor (Haarnoja et al., 2018) chooses w = bound u, and u in [-1, 1]^D is the action of the MDP:

    a       = base(s, w = bound u),    u ~ pi(.|s)                    (a chunk of k actions)
    y       = r + d min_i Q'_i(s', u'),                               u' ~ pi(.|s')
    L_Q     = sum_i E (Q_i(s, u) - y)^2
    L_pi    = E (alpha log pi(u~|s) - min_i Q_i(s, u~)),              u~ ~ pi(.|s)
    L_alpha = -log alpha E (log pi(u~|s) + H)

r is the discounted reward of a chunk, d = gamma^k, 0 if the environment terminated in it. The
target has no entropy bonus, and alpha starts well below the reward: a bonus for each of many
decisions would outweigh one reward at the end.

    embodied demos collect env=two_gap episodes=100 out=outputs/demos
    embodied train experiment=two_gap_flow demos=outputs/demos out=outputs/base
    python examples/dsrl.py init=outputs/base
    embodied eval outputs/dsrl
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
from embodied.policies.steering.dsrl import Dsrl as SavedPolicy
from embodied.training.collector import Collector


@dataclass(frozen=True)
class Settings:
    init: str = "outputs/base"  # run of the frozen policy: flow or diffusion, without memory
    # Name, Gymnasium id, or {name: NAME, SETTING: VALUE}; the demonstrations use two gaps
    env: Any = field(default_factory=lambda: {"name": "two_gap", "gaps": [0.75]})
    out: str = "outputs/dsrl"  # folder of the checkpoint
    seed: int = 0  # of networks, noise and initial states
    num_envs: int = 8  # parallel environments
    steps: int = 2_400  # environment steps, of all parallel environments together
    warmup_steps: int = 800  # of them with normal noise, before the first update
    buffer_size: int = 100_000  # decisions
    bound: float = 1.5  # largest noise per element: large leaves the base's training distribution
    utd: float = 2.5  # updates per decision
    batch_size: int = 256  # decisions of an update
    gamma: float = 0.97  # discount per environment step
    tau: float = 0.005  # step of the target critics towards the trained ones
    actor_lr: float = 3e-4  # Adam's learning rate of the actor
    critic_lr: float = 3e-4  # Adam's learning rate of the critics
    temperature_lr: float = 3e-4  # Adam's learning rate of log alpha
    initial_temperature: float = 0.005  # alpha at the start, in units of the reward
    target_entropy: float = 0.0  # entropy that alpha is tuned to, per element of u (nats)
    critics: int = 2  # number of critics
    hidden: tuple[int, ...] = (128, 128)  # units of the hidden layers, with layer normalisation
    eval_every: int = 800  # environment steps between two evaluations
    eval_episodes: int = 100  # episodes of an evaluation


class Steered(Policy):
    """The frozen `base` with the noise that `actor` chooses; the stored action is u."""

    def __init__(self, base: Policy, actor: Gaussian, bound: float) -> None:
        super().__init__()
        assert not base.initial(1), "this file is for a base without memory (obs_steps=1)"
        self.spec = base.spec
        self.chunk = base.chunk
        self.base = base.requires_grad_(False)
        self.actor = actor
        self.bound = bound
        self.shape = base.sample_noise(1).shape
        self.warm_up = False  # whether u is normal noise, as the base knows it

    def initial(self, n: int) -> Tensors:
        return {"row/action": torch.zeros(n, self.actor.size)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.actor.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        u = self.actor.act(obs, {}, noise)[0].squeeze(1)
        if self.warm_up:
            u = noise.clamp(-self.bound, self.bound) / self.bound
        w = self.bound * u.view(-1, *self.shape[1:])
        return self.base.act(obs, {}, w)[0], {"row/action": u}


class Dsrl(nn.Module):
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
        """u [N, D] of the actor, with log-densities [N]; differentiable."""
        noise = self.policy.sample_noise(len(next(iter(obs.values()))), explore=True)
        return self.policy.sample(obs, noise)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        """One step of critics, actor and temperature. `batch`: `obs/*` and `next_obs/*` [N, ...],
        `action` [N, D] (u), `reward` and `discount` [N]. Returns metrics, 0-d tensors."""
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

    def fit(self, transitions: Tensors) -> None:
        """Fit the normalisers of observations, which are the identity until then."""
        for network in (self.policy, self.critic.encoder, self.target.encoder):
            network.fit(transitions)


def saved_policy(policy: Steered) -> SavedPolicy:
    """The same policy as a class of the library, which commands and robots can load."""
    node = {"_target_": "embodied.policies.steering.dsrl.Dsrl", "bound": policy.bound}
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
    size = base.sample_noise(1).numel()
    spec = env.spec.with_act(Leaf((size,), low=-1.0, high=1.0))
    shape = ActorConfig(hidden=settings.hidden, activation="tanh", layer_norm=True)
    policy = Steered(base, Gaussian(shape, spec), settings.bound)
    agent = Dsrl(settings, policy.actor)
    buffer = ReplayBuffer(settings.buffer_size)
    collector = Collector(env, policy, settings.gamma, seed=settings.seed)
    episodes = EpisodeMeans()
    score = math.nan
    metrics: dict[str, Tensor] = {}
    policy.warm_up = settings.warmup_steps > 0
    credit = 0.0  # updates that are due
    begin = time.monotonic()

    for now in range(env.num_envs, settings.steps + 1, env.num_envs):
        if policy.warm_up and now > settings.warmup_steps:
            policy.warm_up = False
            agent.fit(buffer.sample(len(buffer)))
        transitions, step = collector.step()  # of the decisions that were completed; may be none
        episodes.add(step)
        if transitions:
            buffer.add(transitions)
        if transitions and not policy.warm_up:
            credit += settings.utd * len(transitions["reward"])
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
    train(parse(Settings, plain(OmegaConf.to_container(OmegaConf.from_cli())), "dsrl.py"))
