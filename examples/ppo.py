"""PPO: proximal policy optimisation in one file (Schulman et al., 2017; GAE: 2016).

    delta_t = r_t + d_t V(s'_t) - V(s_t),    A_t = delta_t + lambda d_t A_{t+1},    R_t = A_t + V_t
    L = E[-min(rho A, clip(rho, 1 - eps, 1 + eps) A)] + c_v E[(V(s) - R)^2] / 2 - c_h E[H(pi)]

rho = pi(a|s) / pi_old(a|s). d is gamma, and 0 where the environment terminated; s' is the true next
observation, so a time limit is bootstrapped, and the sum over later steps ends with the episode.
Observations are normalised by running statistics, advantages within each minibatch.

    python examples/ppo.py env=cartpole steps=60000
    embodied eval outputs/ppo
"""

from __future__ import annotations

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
from embodied.buffers.rollout import RolloutBuffer
from embodied.core import checkpoint
from embodied.core.build import parse, plain
from embodied.core.device import seed_everything
from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors, each, nest, take, under
from embodied.evaluation.evaluate import EpisodeMeans, evaluate
from embodied.learners.critics import Value, ValueConfig
from embodied.nn.normalizers import RunningMeanStd
from embodied.policies.categorical import Categorical
from embodied.policies.diagonal_gaussian import DiagonalGaussian


@dataclass(frozen=True)
class Settings:
    env: Any = "cartpole"  # name, Gymnasium id, or {name: NAME, SETTING: VALUE}
    out: str = "outputs/ppo"  # folder of the checkpoint
    seed: int = 0  # of networks, noise and initial states
    num_envs: int = 8  # parallel environments
    steps: int = 60_000  # environment steps, of all parallel environments together
    horizon: int = 256  # steps of each parallel environment per update
    epochs: int = 10  # passes over a batch
    batch_size: int = 256  # steps of a minibatch
    gamma: float = 0.99  # discount per environment step
    lam: float = 0.95  # lambda of generalised advantage estimation
    clip: float = 0.2  # eps, largest change of the probability ratio that is rewarded
    value_weight: float = 0.5  # c_v, weight of the value function's loss
    entropy: float = 0.0  # c_h, weight of the entropy bonus
    lr: float = 3e-4  # Adam's learning rate
    grad_clip: float = 0.5  # largest norm of the gradient
    hidden: tuple[int, ...] = (64, 64)  # units of the hidden layers of policy and value function
    eval_every: int = 10  # updates between two evaluations
    eval_episodes: int = 20  # episodes of an evaluation


class Ppo(nn.Module):
    """Networks, optimiser and one `update`. `policy`: has `evaluate_actions`, `encoder`."""

    def __init__(self, settings: Settings, policy: DiagonalGaussian | Categorical) -> None:
        super().__init__()
        self.settings = settings
        self.policy = policy
        self.value = Value(ValueConfig(hidden=settings.hidden), policy.spec)
        self.stats = RunningMeanStd(policy.encoder.size)
        self.weights = [*policy.parameters(), *self.value.parameters()]
        self.adam = torch.optim.Adam(self.weights, settings.lr, eps=1e-5, fused=True)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        """Some epochs of minibatches. `batch` [T, B, ...] in the order of time: `obs/*`, `action`,
        `reward`, `discount`, `next_obs/*`, `ended` (bool). Returns mean metrics, 0-d tensors."""
        new = self.stats.count == 0
        if new:  # a new policy hardly depends on observations: the ratios stay near 1
            self.observe(batch)
        decisions = self.prepare(batch)
        count = len(decisions["reward"])
        size = min(self.settings.batch_size, count)
        seen: list[dict[str, Tensor]] = []
        for _ in range(self.settings.epochs):
            order = torch.randperm(count)
            for start in range(0, count - size + 1, size):
                minibatch = take(decisions, order[start : start + size])
                loss, metrics = self.loss(minibatch)
                self.adam.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.weights, self.settings.grad_clip)
                self.adam.step()
                seen.append(metrics)
        if not new:
            self.observe(batch)
        return {name: torch.stack([metrics[name] for metrics in seen]).mean() for name in seen[0]}

    @torch.no_grad()
    def prepare(self, batch: Tensors) -> Tensors:
        """The steps [T * B, ...] with `old` log-probabilities, `advantage` and value `target`, all
        by the parameters that acted."""
        horizon, envs = batch["reward"].shape
        flat = each(batch, lambda leaf: leaf.flatten(0, 1))
        old = self.policy.evaluate_actions(under(flat, "obs"), flat["action"])[0]
        value = self.value(under(flat, "obs")).view(horizon, envs)
        next_value = self.value(under(flat, "next_obs")).view(horizon, envs)
        delta = batch["reward"] + batch["discount"] * next_value - value
        decay = self.settings.lam * batch["discount"] * ~batch["ended"]
        advantage = torch.empty_like(delta)
        following = torch.zeros(envs)
        for t in reversed(range(horizon)):
            following = delta[t] + decay[t] * following
            advantage[t] = following
        target = advantage + value
        return {**flat, "old": old, "advantage": advantage.flatten(), "target": target.flatten()}

    def loss(self, minibatch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a minibatch, and metrics."""
        settings = self.settings
        obs = under(minibatch, "obs")
        log_prob, entropy = self.policy.evaluate_actions(obs, minibatch["action"])
        advantage = minibatch["advantage"] - minibatch["advantage"].mean()
        advantage = advantage / (advantage.square().mean() + 1e-16).sqrt()
        log_ratio = log_prob - minibatch["old"]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        value_loss = 0.5 * (self.value(obs) - minibatch["target"]).square().mean()
        loss = policy_loss + settings.value_weight * value_loss - settings.entropy * entropy.mean()
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy.mean(),
            "kl": (ratio - 1 - log_ratio).mean(),
            "clipped": ((ratio - 1).abs() > settings.clip).float().mean(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def observe(self, batch: Tensors) -> None:
        """Add observations to the running statistics and set both normalisers from them."""
        obs = each(under(batch, "obs"), lambda leaf: leaf.flatten(0, 1))
        self.stats.update(self.policy.encoder.flat(obs))
        std = (self.stats.squares / self.stats.count).sqrt().float()
        for norm in (self.policy.encoder.norm, self.value.encoder.norm):
            norm.mean.copy_(self.stats.mean)
            norm.std.copy_(torch.where(std < 1e-4, torch.ones_like(std), std))
            norm.limit.fill_(norm.clip)


def collect(
    env: VecEnv, agent: Ppo, buffer: RolloutBuffer, obs: Tensors, episodes: EpisodeMeans
) -> Tensors:
    """Fill `buffer` with `horizon` steps of each parallel environment from `obs` on; returns the
    observations to go on from."""
    buffer.clear()
    policy = agent.policy
    for _ in range(buffer.horizon):
        noise = policy.sample_noise(env.num_envs, explore=True)
        with torch.no_grad():
            chunk, carry = policy.act(obs, policy.initial(env.num_envs), noise)
        step = env.step(chunk[:, 0])
        discount = agent.settings.gamma * (~step.terminated).float()
        transitions = {
            **nest(obs, "obs"),
            "action": carry.get("row/action", chunk[:, 0]),  # of a Gaussian: before it is clipped
            "reward": step.reward,
            "discount": discount,
            "ended": step.ended,
            **nest(step.next_obs, "next_obs"),
        }
        buffer.add(transitions, None)
        episodes.add(step)
        obs = step.obs  # where an episode ended, the first observation of the next one
    return obs


def train(settings: Settings) -> float:
    """Train and save a checkpoint; returns the mean return of the last evaluation."""
    seed_everything(settings.seed)
    env = em.make_env(settings.env, num_envs=settings.num_envs)
    eval_env = em.make_env(settings.env, num_envs=10)
    name = "diagonal_gaussian" if env.spec.act.is_continuous else "categorical"
    policy = em.make_policy(name, env, hidden=settings.hidden, activation="tanh", head=0.01)
    assert isinstance(policy, DiagonalGaussian | Categorical)
    agent = Ppo(settings, policy)
    buffer = RolloutBuffer(env.num_envs, settings.horizon)
    episodes = EpisodeMeans()
    score = math.nan
    begin = time.monotonic()

    obs = env.reset(settings.seed)
    per_update = settings.horizon * env.num_envs
    updates = max(settings.steps // per_update, 1)
    for update in range(1, updates + 1):
        obs = collect(env, agent, buffer, obs, episodes)
        metrics = agent.update(buffer.batch())
        shown = {**episodes.drain(), **{name: float(value) for name, value in metrics.items()}}
        now = update * per_update
        rate = now / (time.monotonic() - begin)
        print(f"{now:>8} {rate:.0f}/s", *(f"{name}={v:.4g}" for name, v in shown.items()))
        if update == updates or update % settings.eval_every == 0:
            result = evaluate(policy, eval_env, settings.eval_episodes, seed=10_000)
            score = result.metrics()["return"]
            print(f"{now:>8} evaluation: {result}", flush=True)

    folder = Path(settings.out)
    checkpoint.save(folder / "checkpoints" / f"{now:08d}", policy, now)
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": eval_env.node}))  # for eval and view
    return score


if __name__ == "__main__":
    train(parse(Settings, plain(OmegaConf.to_container(OmegaConf.from_cli())), "ppo.py"))
