"""Off-policy evaluation: what policies are worth, from recordings of another one, without acting.

With decisions t of E episodes, weights w_t = prod_{i<=t} pi(a_i|s_i) / mu(a_i|s_i), normalised over
the episodes, and D_t the product of the discounts before decision t:

    FQE    Q(s, a) <- r + d Q(s', a'), a' ~ pi (Le, Voloshin and Yue, 2019); J = mean V(s_0)
    PDIS   J = sum_i sum_t w_t D_t r_t (Precup, Sutton and Singh, 2000)
    DR     J = sum_i sum_t D_t (w_t (r_t - Q(s_t, a_t)) + w_{t-1} V(s_t))

(DR weighted, as in Thomas and Brunskill, 2016.) A time limit is not an end for FQE and DR, which
add the value of the last observation; PDIS sums what was recorded. V is the mean of Q over
`samples` of a policy's actions. Densities are kernels, as generative policies have none: pi(a|s) is
the mean of Gaussians of std `bandwidth` around these samples, and mu(a|s) a Gaussian around a
regression of the recorded actions, whose std is that of its errors and `bandwidth` together.
Weights of long episodes or chunks rest on few episodes: `effective` says on how many.

How good an estimator's choice of k policies is, where their true values are known, is said by
SharpeRatio@k (Kiyohara et al., 2024): of the k policies with the highest estimates, the behaviour
policy among them,

    SR@k = (max_i J_i - J_b) / std(J_i)

is the gain over the behaviour policy of value J_b that a trial of all k finds, over the spread that
it has to go through.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Annotated

import torch
from torch import Tensor, nn

from embodied.buffers.weighted import returns
from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.bounds import (
    Bound,
    Count,
    CountOrZero,
    Fraction,
    Positive,
    PositiveFraction,
    Units,
)
from embodied.core.build import ConfigError
from embodied.core.device import forked
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, take, under
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import transitions
from embodied.evaluation.loading import trained_with
from embodied.learners.critics import Critic, critic_loss
from embodied.learners.learner import soft_update
from embodied.nn.networks import mlp
from embodied.nn.optim import Adam, fit
from embodied.policies.networks.encoders import Encoder

ROWS = 2048  # decisions of one call of a policy
SAFE = 0.9  # share of the value of the behaviour policy, below which a policy is a bad one to try


@dataclass(frozen=True)
class Config:
    gamma: Fraction = 0.99  # discount per environment step
    updates: Count = 3000  # of the value function of each policy, and of the behaviour's regression
    batch_size: Count = 256  # decisions per update
    lr: PositiveFraction = 3e-4  # learning rate of both
    tau: PositiveFraction = 0.05  # step of the target network towards the trained one
    hidden: tuple[Units, ...] = (256, 256)  # units of the hidden layers of both
    samples: Count = 8  # of a policy's actions for each observation
    bandwidth: Positive = 0.2  # std of the kernel, of half the action range
    seed: CountOrZero = 0  # of networks and samples


@dataclass(frozen=True)
class Estimates:
    """Estimated discounted returns; `effective`: the episodes that PDIS and DR rest on."""

    fqe: float
    pdis: float
    dr: float
    effective: float


class Recorded:
    """The decisions of `episodes` for policies that execute `execute` steps of each chunk."""

    def __init__(self, episodes: Episodes, config: Config, execute: int) -> None:
        self.config = config
        self.spec = episodes.spec
        self.rows = load(transitions(episodes, config.gamma, execute))
        self.rows["action"] = self.rows["action"].flatten(1)
        step = torch.arange(tt.length(self.rows)) - episodes.start[self.rows["episode"]]
        self.index = (step % execute == 0).nonzero().flatten()  # decisions, of the rows [N]
        self.place = (self.rows["episode"][self.index], step[self.index] // execute)
        numbers = self.place[0]
        self.last = torch.cat([numbers[1:] != numbers[:-1], torch.ones(1, dtype=torch.bool)])
        self.first = episodes.start
        self.unit = returns(episodes, config.gamma).abs().mean().item() or 1.0  # of the values
        with forked(config.seed):
            self.density = self._behaviour()

    def table(self, values: Tensor) -> Tensor:
        """Values [N] of the decisions as [E, T], 0 after the end of an episode."""
        numbers, times = self.place
        made = torch.zeros(len(self.first), int(times.max()) + 1)
        made[numbers, times] = values.float()
        return made

    def _behaviour(self) -> Tensor:
        """log mu(a|s) of the decisions, [N]."""
        config, rows = self.config, take(self.rows, self.index)
        obs, action = under(rows, "obs"), rows["action"]
        encoder = Encoder(self.spec.obs)
        encoder.fit(rows)
        net = nn.Sequential(encoder, mlp(encoder.size, config.hidden, action.shape[1]))

        def loss() -> Tensor:
            some = torch.randint(len(action), (config.batch_size,))
            return (net(take(obs, some)) - action[some]).square().mean()

        fit(net.parameters(), loss, config.updates, config.lr, decreasing=True)
        with torch.no_grad():
            error = action - net(obs)
        return log_density(error, (error.square().mean(0) + config.bandwidth**2).sqrt())


def estimates(runs: Sequence[str], episodes: Episodes, config: Config) -> list[Estimates]:
    """The estimates of each run's policy, which executes as many steps of a chunk as in its run."""
    known: dict[int, Recorded] = {}
    found: list[Estimates] = []
    for path in runs:
        policy = checkpoint.load_policy(path, episodes.spec).eval()
        trained = trained_with(checkpoint.find(path), named=True)
        execute = trained.get("execute") or policy.chunk
        if execute not in known:
            known[execute] = Recorded(episodes, config, execute)
        found.append(estimate(policy, known[execute]))
    return found


def estimate(policy: Policy, recorded: Recorded) -> Estimates:
    """What `policy` is worth. ConfigError if it has a memory, or acts by choices."""
    config, rows, index = recorded.config, recorded.rows, recorded.index
    if policy.initial(1) or not policy.spec.act.is_continuous:
        raise ConfigError("scores are of policies without memory, whose actions are numbers")
    size = rows["action"].shape[1]
    with forked(config.seed):
        own = proposals(policy, under(rows, "obs"), config.samples, size)  # [N, samples, size]
        later = proposals(policy, under(rows, "next_obs"), config.samples, size)
        in_units = {**rows, "reward": rows["reward"] / recorded.unit}
        critic = evaluated_critic(recorded.spec, in_units, later, config)
    with torch.no_grad():
        value = recorded.unit * critic.each(under(rows, "obs"), own).mean((0, 2))
        following = recorded.unit * critic.each(under(rows, "next_obs"), later).mean((0, 2))
        q = recorded.unit * critic(under(rows, "obs"), rows["action"]).mean(0)
    error = rows["action"][index, None] - own[index]
    width = torch.full((size,), config.bandwidth)
    log_pi = log_density(error, width).logsumexp(1) - math.log(config.samples)
    weight = weights(recorded.table(log_pi - recorded.density))
    reward, discount, q, v = (
        recorded.table(each[index]) for each in (rows["reward"], rows["discount"], q, value)
    )
    cut = recorded.table((rows["discount"] * following)[index] * recorded.last)
    return Estimates(
        fqe=value[recorded.first].mean().item(),
        pdis=pdis(weight, reward, discount),
        dr=doubly_robust(weight, reward + cut, discount, q, v),
        effective=1 / weight[:, -1].square().sum().item(),
    )


@torch.no_grad()
def proposals(policy: Policy, obs: Tensors, samples: int, size: int) -> Tensor:
    """Actions [N, samples, size] of a policy for observations [N, ...]: the first `size` numbers of
    each chunk."""
    parts: list[Tensor] = []
    for begin in range(0, tt.length(obs), ROWS):
        some = tt.each(obs, lambda value, begin=begin: value[begin : begin + ROWS])
        n, drawn = tt.length(some), list[Tensor]()
        for _ in range(samples):
            noise = policy.sample_noise(n, explore=False)
            seen, carry = policy.observe(some, policy.initial(n), noise)
            drawn.append(policy.act(seen, carry, noise)[0].flatten(1)[:, :size])
        parts.append(torch.stack(drawn, 1))
    return torch.cat(parts)


def evaluated_critic(spec: Spec, rows: Tensors, later: Tensor, config: Config) -> Critic:
    """Q of the policy whose actions in the next observations of `rows` are `later` [N, samples,
    size] (fitted Q evaluation with a target network)."""
    critic = Critic(spec, later.shape[2], 1, config.hidden, layer_norm=True)
    critic.encoder.fit(rows)
    target = copy.deepcopy(critic).requires_grad_(False)
    adam = Adam(critic.parameters(), config.lr)
    trained: list[Tensor] = list(critic.parameters())
    followed: list[Tensor] = list(target.parameters())
    for _ in range(config.updates):
        some = torch.randint(len(later), (config.batch_size,))
        batch = take(rows, some)
        action = later[some, torch.randint(config.samples, (config.batch_size,))]
        with torch.no_grad():
            following = target(under(batch, "next_obs"), action).squeeze(0)
        backup = batch["reward"] + batch["discount"] * following
        critic_loss(critic(under(batch, "obs"), batch["action"]), backup).backward()
        adam.step()
        soft_update(followed, trained, config.tau)
    return critic


def log_density(error: Tensor, std: Tensor) -> Tensor:
    """Log-densities [...] of `error` [..., D] under a Gaussian of standard deviations `std` [D]."""
    squares = (error / std).square().sum(-1)
    return -0.5 * (squares + error.shape[-1] * math.log(2 * math.pi)) - std.log().sum()


def weights(log_ratio: Tensor) -> Tensor:
    """w_t [E, T], normalised over the episodes, of log(pi / mu) [E, T]: 0 after an episode's end,
    which keeps its last weight."""
    return log_ratio.cumsum(1).softmax(0)


def pdis(weight: Tensor, reward: Tensor, discount: Tensor) -> float:
    """Per-decision importance sampling, all [E, T]."""
    return (weight * _before(discount) * reward).sum().item()


def doubly_robust(weight: Tensor, reward: Tensor, discount: Tensor, q: Tensor, v: Tensor) -> float:
    """Weighted doubly robust estimate, all [E, T]; `q` and `v` are 0 after an episode's end."""
    earlier = torch.cat([torch.full_like(weight[:, :1], 1 / len(weight)), weight[:, :-1]], 1)
    return (_before(discount) * (weight * (reward - q) + earlier * v)).sum().item()


def _before(discount: Tensor) -> Tensor:
    """D_t [E, T]: the product of the discounts of the decisions before t."""
    return torch.cat([torch.ones_like(discount[:, :1]), discount[:, :-1]], 1).cumprod(1)


@dataclass(frozen=True)
class PortfolioConfig:
    k: Annotated[int, Bound(2)] = 2  # policies that are chosen
    truth: CountOrZero = 0  # episodes in which each policy is played, for its true value (0: none)


@dataclass(frozen=True)
class Portfolio:
    """True values of the chosen k policies; `regret` of the best of them, of the range of all;
    `unsafe`: the share that is worth less than 90% of the behaviour policy."""

    best: float
    worst: float
    mean: float
    std: float
    gain: float
    regret: float
    unsafe: float

    @property
    def sharpe(self) -> float:
        """0 where both terms are 0, infinite where only the spread is."""
        if self.std:
            return self.gain / self.std
        return 0.0 if not self.gain else float("inf") * self.gain


def choice(estimates: Sequence[float], behaviour: float, k: int) -> list[int]:
    """The numbers of the k policies with the highest estimates, the best first. The last number is
    the behaviour policy, estimated by its value. ConfigError for more than there are."""
    values = [*estimates, behaviour]
    if k > len(values):
        raise ConfigError(f"k={k}: there are {len(values)} policies, the behaviour policy included")
    return sorted(range(len(values)), key=lambda i: -values[i])[:k]


def portfolio(
    estimates: Sequence[float], true: Sequence[float], behaviour: float, k: int
) -> Portfolio:
    """The choice of k policies by their `estimates`, of the `true` values."""
    values = [*true, behaviour]
    chosen = [values[i] for i in choice(estimates, behaviour, k)]
    spread = max(values) - min(values)
    least = behaviour - (1 - SAFE) * abs(behaviour)
    return Portfolio(
        best=max(chosen),
        worst=min(chosen),
        mean=fmean(chosen),
        std=pstdev(chosen),
        gain=max(chosen) - behaviour,
        regret=(max(values) - max(chosen)) / spread if spread else 0.0,
        unsafe=sum(value < least for value in chosen) / k,
    )
