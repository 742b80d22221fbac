"""DPPO: PPO on the denoising steps of a diffusion policy, in one file (Ren et al., 2024).

The last K denoising steps of a trained policy become stochastic; each is an action of its own MDP:

    x_{k+1} = mean_k(x_k, s) + std_k z_k,     z_k ~ N(0, I),      k = 0 .. K-1;   x_K is the chunk
    rho_k   = exp(mean over elements of log p(x_{k+1}|x_k, s) - log p_old(x_{k+1}|x_k, s))
    A_k     = g^(K-1-k) A,    eps_k = e_0 + (e_1 - e_0) (exp(c k / (K-1)) - 1) / (exp(c) - 1)
    L       = E[-min(rho_k A_k, clip(rho_k, 1 - eps_k, 1 + eps_k) A_k)] + c_v E[(V(s) - R)^2] / 2

A and R are of whole chunks, by GAE with d = gamma^steps, 0 at a termination; A is normalised over
the batch. Rewards are divided by the running std of the discounted return.

    embodied demos collect env=two_gap episodes=100 out=outputs/demos
    embodied train experiment=two_gap_diffusion demos=outputs/demos out=outputs/diffusion
    python examples/dppo.py init=outputs/diffusion denoising_steps=5 horizon=8 clip=0.05 \
        first_clip=0.05 lr=2e-4 steps=60000
    embodied eval outputs/dppo
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributions import Normal

import embodied as em
from embodied.buffers.rollout import RolloutBuffer
from embodied.core import checkpoint
from embodied.core.build import parse, plain
from embodied.core.device import seed_everything
from embodied.core.tensors import Tensors, each, take, under
from embodied.evaluation.evaluate import EpisodeMeans, evaluate
from embodied.learners.critics import Value, ValueConfig
from embodied.nn.normalizers import RunningMeanStd
from embodied.policies.denoising_mdp.noisy_diffusion import NoisyDiffusion
from embodied.training.collector import Collector

NODE = "embodied.policies.denoising_mdp.noisy_diffusion.NoisyDiffusion"


@dataclass(frozen=True)
class Settings:
    init: str = "outputs/diffusion"  # run of a diffusion policy
    # Name, Gymnasium id, or {name: NAME, SETTING: VALUE}; the demonstrations use two gaps
    env: Any = field(default_factory=lambda: {"name": "two_gap", "gaps": [0.75]})
    out: str = "outputs/dppo"  # folder of the checkpoint
    seed: int = 0  # of networks, noise and initial states
    num_envs: int = 64  # parallel environments
    steps: int = 100_000  # environment steps, of all parallel environments together
    last: int = 4  # K, denoising steps that are trained, at least 2
    denoising_steps: int | None = None  # of the policy (null: the base's)
    horizon: int = 16  # chunks of each parallel environment per update
    epochs: int = 5  # passes over them
    batch_size: int = 512  # denoising steps of a minibatch
    gamma: float = 0.99  # discount per environment step
    lam: float = 0.95  # lambda of generalised advantage estimation
    first_clip: float = 0.01  # e_0, clip range of the first denoising step
    clip: float = 0.01  # e_1, clip range of the last one
    growth: float = 3.0  # c, how late the clip range grows
    fade: float = 0.99  # g, discount of the advantage per earlier denoising step
    limits: tuple[float, float] = (-5.0, 2.0)  # bounds of the log-density of each element
    value_weight: float = 0.5  # c_v, weight of the value function's loss
    lr: float = 1e-4  # Adam's learning rate of the policy
    critic_lr: float = 1e-3  # Adam's learning rate of the value function
    grad_clip: float = 25.0  # largest norm of the gradient
    warm_up: int = 1  # updates of the value function alone, at the start
    hidden: tuple[int, ...] = (256, 256)  # units of the value function's layers
    eval_every: int = 5  # updates between two evaluations
    eval_episodes: int = 100  # episodes of an evaluation


class Dppo(nn.Module):
    """Networks, optimisers and one `update`. `policy`: a base with K stochastic steps (`link`)."""

    def __init__(self, settings: Settings, policy: NoisyDiffusion) -> None:
        super().__init__()
        norm = policy.inner.tuned.encoder.norm
        self.settings = settings
        self.policy = policy
        self.value = Value(ValueConfig(settings.hidden, "mish"), policy.spec)
        self.value.encoder.norm.load_state_dict(norm.state_dict())
        self.stats = RunningMeanStd(len(norm.mean))  # of observations; the base's: 10,000 samples
        self.stats.count.fill_(10_000)
        self.stats.mean.copy_(norm.mean)
        self.stats.squares.copy_(10_000 * norm.std.double().square())
        self.returns = RunningMeanStd(1)
        self.running = torch.zeros(())  # discounted return of each running episode, [B]
        actor = {"params": [weight for weight in policy.parameters() if weight.requires_grad]}
        critic = {"params": [*self.value.parameters()], "lr": settings.critic_lr}
        self.weights = [*actor["params"], *critic["params"]]
        self.adam = torch.optim.Adam([actor, critic], settings.lr, eps=1e-5, fused=True)
        k = torch.arange(policy.links)
        share = torch.expm1(settings.growth * k / k.max()) / math.expm1(settings.growth)
        self.clips = settings.first_clip + (settings.clip - settings.first_clip) * share
        self.fades = settings.fade ** (policy.links - 1.0 - k)
        self.done = 0  # updates

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        """Some epochs of minibatches. `batch` [T, B, ...] of chunks in the order of time: `obs/*`,
        `action` (chains [K + 1, size]), `reward`, `discount`, `next_obs/*`, `ended` and `valid`
        (bool; false: padding). Returns mean metrics, 0-d tensors."""
        settings = self.settings
        steps = self.prepare(batch)
        count = len(steps["k"])
        size = min(settings.batch_size, settings.horizon * batch["reward"].shape[1], count)
        self.adam.param_groups[0]["lr"] = settings.lr if self.done >= settings.warm_up else 0.0
        seen: list[dict[str, Tensor]] = []
        for _ in range(settings.epochs):
            order = torch.randperm(count)
            for start in range(0, count - size + 1, size):
                loss, metrics = self.loss(take(steps, order[start : start + size]))
                self.adam.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.weights, settings.grad_clip)
                self.adam.step()
                seen.append(metrics)
        self.observe(batch)
        self.done += 1
        return {name: torch.stack([metrics[name] for metrics in seen]).mean() for name in seen[0]}

    @torch.no_grad()
    def prepare(self, batch: Tensors) -> Tensors:
        """The denoising steps [N * K, ...] of all valid chunks: `obs/*`, `x`, `following`, `k`,
        `old` log-densities by the parameters that acted, `advantage` and value `target`."""
        valid = batch["valid"]
        flat = each(batch, lambda leaf: leaf.flatten(0, 1))
        value = self.value(under(flat, "obs")).view_as(valid)
        next_value = self.value(under(flat, "next_obs")).view_as(valid)
        delta = (self.scaled(batch) + batch["discount"] * next_value - value) * valid
        decay = self.settings.lam * batch["discount"] * (valid & ~batch["ended"])
        advantage = torch.empty_like(delta)
        following = torch.zeros_like(delta[0])
        for t in reversed(range(len(delta))):
            following = delta[t] + decay[t] * following
            advantage[t] = following
        keep = valid.flatten()
        chunks = {name: leaf[keep] for name, leaf in flat.items() if name.startswith("obs/")}
        chunks["target"] = (advantage + value).flatten()[keep]
        known = advantage.flatten()[keep]
        chunks["advantage"] = (known - known.mean()) / known.std(correction=0).clamp(min=1e-8)
        chain = flat["action"][keep]
        steps = each(chunks, lambda leaf: leaf.repeat_interleave(self.policy.links, 0))
        steps["x"] = chain[:, :-1].flatten(0, 1)
        steps["following"] = chain[:, 1:].flatten(0, 1)
        steps["k"] = torch.arange(self.policy.links).repeat(len(chain))
        return {**steps, "old": self.log_prob(steps)}

    def scaled(self, batch: Tensors) -> Tensor:
        """Rewards [T, B] divided by the running std of the discounted return, and clipped."""
        returns = torch.empty_like(batch["reward"])
        goes_on = batch["discount"] * ~batch["ended"]
        for t, valid in enumerate(batch["valid"]):
            returns[t] = self.running + batch["reward"][t] * valid
            self.running = torch.where(valid, goes_on[t] * returns[t], self.running)
        self.returns.update(returns[batch["valid"]][:, None])
        std = (self.returns.squares / self.returns.count + 1e-8).sqrt().to(returns)
        return (batch["reward"] / std).clamp(-10, 10)

    def log_prob(self, steps: Tensors) -> Tensor:
        """log p(x_{k+1}|x_k, s) [N] of denoising steps, averaged over elements."""
        seen = self.policy.features(under(steps, "obs"))
        time = self.policy.times()[steps["k"]]
        step = Normal(*self.policy.link(steps["x"], steps["k"], time, seen))
        return step.log_prob(steps["following"]).clamp(*self.settings.limits).mean(1)

    def loss(self, steps: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a minibatch of denoising steps, and metrics."""
        clip = self.clips[steps["k"]]
        advantage = self.fades[steps["k"]] * steps["advantage"]
        log_ratio = self.log_prob(steps) - steps["old"]
        ratio = log_ratio.exp()
        clipped = torch.minimum(torch.maximum(ratio, 1 - clip), 1 + clip)
        policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        value_loss = 0.5 * (self.value(under(steps, "obs")) - steps["target"]).square().mean()
        kl = (ratio - 1 - log_ratio).mean()
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "kl": kl}
        loss = policy_loss + self.settings.value_weight * value_loss
        return loss, {name: value.detach() for name, value in metrics.items()}

    def observe(self, batch: Tensors) -> None:
        """Update the value function's normaliser; the policy keeps that of its base."""
        obs = {name: leaf[batch["valid"]] for name, leaf in under(batch, "obs").items()}
        self.stats.update(self.value.encoder.flat(obs))
        std = (self.stats.squares / self.stats.count).sqrt().float()
        norm = self.value.encoder.norm
        norm.mean.copy_(self.stats.mean)
        norm.std.copy_(torch.where(std < 1e-4, torch.ones_like(std), std))


def collect(collector: Collector, agent: Dppo, episodes: EpisodeMeans) -> Tensors:
    """A batch [T, B] of chunks by the present parameters; T >= `horizon`."""
    buffer = RolloutBuffer(collector.env.num_envs, agent.settings.horizon)
    actor = collector.actor
    stale = ~collector.first & (actor.cursor < actor.execute)  # decided by older parameters
    for _ in range(agent.settings.horizon * actor.execute):
        transitions, step = collector.step()
        episodes.add(step)
        finished = collector.finished
        assert finished is not None, "this file is for a policy with chunks"
        fresh = (~stale[finished]).nonzero().flatten()
        stale[finished] = False
        if len(fresh):
            row = {**transitions, "ended": step.ended[finished]}
            buffer.add(take(row, fresh), finished[fresh])
    return buffer.batch()


def train(settings: Settings) -> float:
    """Train and save a checkpoint; returns the mean return of the last evaluation."""
    seed_everything(settings.seed)
    env = em.make_env(settings.env, num_envs=settings.num_envs)
    eval_env = em.make_env(settings.env, num_envs=50)
    base = checkpoint.load_policy(settings.init, env.spec)
    print(f"{0:>8} the base: {evaluate(base, eval_env, settings.eval_episodes, seed=10_000)}")
    shape = {"last": settings.last, "steps": settings.denoising_steps}
    policy = NoisyDiffusion.build_around(base, {"_target_": NODE, **shape})
    agent = Dppo(settings, policy)
    collector = Collector(env, policy, settings.gamma, seed=settings.seed)
    episodes = EpisodeMeans()
    score = math.nan
    begin = time.monotonic()
    per_update = settings.horizon * policy.chunk * env.num_envs
    updates = max(settings.steps // per_update, 1)
    for update in range(1, updates + 1):
        metrics = agent.update(collect(collector, agent, episodes))
        shown = {**episodes.drain(), **{name: float(value) for name, value in metrics.items()}}
        now = update * per_update
        rate = now / (time.monotonic() - begin)
        print(f"{now:>8} {rate:.0f}/s", *(f"{name}={v:.4g}" for name, v in shown.items()))
        if update == updates or update % settings.eval_every == 0:
            result = evaluate(policy, eval_env, settings.eval_episodes, seed=10_000)
            score = result.metrics()["return"]
            print(f"{now:>8} evaluation: {result}", flush=True)

    folder = Path(settings.out)
    checkpoint.save(folder / "checkpoints" / f"{now:08d}", policy.inference_policy(), now)
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": eval_env.node}))  # for eval and view
    return score


if __name__ == "__main__":
    train(parse(Settings, plain(OmegaConf.to_container(OmegaConf.from_cli())), "dppo.py"))
