"""PARL: a reward learned from preferences over what the policy does that it itself leads to.

    max over nu of  G(nu, theta*(nu)) = E over pairs of pi_theta*(nu) [ log P_nu(label) ]

Chakraborty et al., "PARL: A Unified Framework for Policy Alignment in Reinforcement Learning from
Human Feedback" (2024). A fit to the labels alone (`reward=preference`, as PEBBLE does) ascends
dG/dnu and leaves out that another reward leads to other behaviour, and so to other pairs. Here
theta*(nu) is one step of policy gradient ahead of the policy,

    theta*(nu) = theta + eta dV/dtheta,   V = E[ sum_t gamma^t r_nu(s_{t+1}) ]
    dG/dnu += eta dG/dtheta d^2 V / dtheta dnu
    dG/dtheta = E[ log P_nu(label) grad log pi(both actions) ]

estimated by labelled pairs and by the newest steps, with mean values as baselines. The
addition is clipped to the length 1 before it is weighed: it grows with 1 / std^2 of a Gaussian, and
outweighed the labels five times. Here a pair is of two steps, and r_nu is the score of the
observation after a step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core import tensors as tt
from embodied.core.bounds import Count, NonNegative
from embodied.core.build import ConfigError
from embodied.core.env import Step
from embodied.core.policy import Policy
from embodied.core.spec import Spec, hidden
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.nn.implicit_gradient import dot, implicit_gradient, neumann
from embodied.policies.abilities import HasLogProb
from embodied.rewards.bilevel.ascent import centred, objective, require_log_prob, returns
from embodied.rewards.preferences.labellers import Labels
from embodied.rewards.preferences.preference import IMAGE_INDEX, Config, Preference
from embodied.rewards.preferences.ranker import Scores


@dataclass(frozen=True)
class ParlConfig(Config):
    """Settings of PARL, beside those of preference learning."""

    policy_weight: NonNegative = 0.03  # of the policy's term, whose eta is 1; 0: PEBBLE
    window: Count = 16  # newest steps of each parallel environment that V is a mean of
    draw: Count = 64  # labelled pairs that a step of the fit takes for dG/dtheta


class Parl(Preference):
    """Labels are of single steps. Their observations and actions are kept, for the policy."""

    remembered = ("acted", "compared", "recent")
    config: ParlConfig

    def __init__(
        self,
        config: ParlConfig,
        spec: Spec,
        gamma: float,
        num_envs: int,
        device: torch.device,
        seed: int = 0,
        folder: Path | None = None,
    ) -> None:
        super().__init__(config, spec, device, seed, folder)
        self.device = device
        self.gamma = gamma
        self.num_envs = num_envs
        self.kept = (*(f"obs/{name}" for name in spec.obs if not hidden(name)), "action")
        # Each of the newest, and of those before them in a segment, may follow an episode's first.
        self.room = 2 * config.recent + (2 * config.segment - 1) * num_envs
        self.acted: Tensors = {}  # of the steps that led to the newest observations
        self.compared: Tensors = {}  # steps of all labelled pairs, [n, 2 segment, ...]
        self.recent: deque[Tensors] = deque(maxlen=config.window)
        self.policy: HasLogProb | None = None

    def follow(self, policy: Policy) -> None:
        self.policy = require_log_prob(policy, "parl")

    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        rows = {key: transitions[key].cpu().clone() for key in self.kept}
        numbers = transitions[f"next_obs/{IMAGE_INDEX}"].cpu()
        if not self.acted:
            self.acted = tt.each(rows, lambda v: v.new_zeros(self.room, *v.shape[1:]))
        tt.put(self.acted, numbers % self.room, rows)
        if len(numbers) == self.num_envs:
            ended = step.ended.cpu()[env_ids.cpu()]
            self.recent.append({**rows, "number": numbers, "ended": ended})
        super().observe_step(transitions, env_ids, step)

    def take(self, numbers: Tensor) -> Tensors:
        return {**super().take(numbers), **tt.take(self.acted, numbers % self.room)}

    def labelled(self, sides: list[Tensors], target: Tensor) -> Labels:
        new = {key: torch.cat([side[key] for side in sides], 1) for key in self.kept}
        self.compared = tt.cat([self.compared, new]) if self.compared else new
        return super().labelled(sides, target)

    def policy_term(self, net: Scores) -> Tensor:
        """A loss whose gradient in the scores `net` is that of -G by way of the policy."""
        if not self.config.policy_weight or not self.recent:
            return torch.zeros(())
        assert self.policy is not None, "a reward on two levels was not given its policy"
        theta = [p for p in self.policy.parameters() if p.requires_grad]
        pairs = self.upper(net)
        slopes = torch.autograd.grad(pairs, theta, materialize_grads=True)
        nu = list(net.parameters())
        gains = implicit_gradient(self.lower(net), slopes, theta, nu, neumann(1, 1.0))
        weight = self.config.policy_weight / dot(gains, gains).sqrt().clamp(min=1)
        return -weight * torch.stack([(g * p).sum() for g, p in zip(gains, nu, strict=True)]).sum()

    def upper(self, net: Scores) -> Tensor:
        """A scalar whose gradient in the policy is dG/dtheta, of labelled pairs."""
        count = len(self.ranker)
        drawn = torch.arange(count)
        if count > self.config.draw:
            drawn = torch.randint(count, (self.config.draw,), generator=self.ranker.random)
        one, other, target = (part[drawn].to(self.device) for part in self.ranker.labels)
        with torch.no_grad():
            scores = net(torch.cat([one, other], 1).flatten(0, 1)).mean(0)
            first, second = scores.view(len(drawn), 2, -1).sum(2).unbind(1)
            gap = second - first
            known = -functional.binary_cross_entropy_with_logits(gap, target, reduction="none")
        steps = tt.to(tt.take(self.compared, drawn), self.device)
        count = 2 * one.shape[1]  # steps of a pair, of both sides
        valid = torch.ones(len(drawn), count, dtype=torch.bool, device=self.device)
        both = {**steps, "reward": known[:, None].expand(-1, count), "valid": valid}
        # The log-probability of a pair is the sum of that of its steps, not their mean.
        assert self.policy is not None
        return count * objective(self.policy, both, centred(both["reward"], valid))

    def lower(self, net: Scores) -> Tensor:
        """A scalar whose gradient in the policy is dV/dtheta, differentiable in the scores."""
        steps = tt.stack(list(self.recent))
        numbers = steps.pop("number")
        images = self.view(self.store.take(numbers.flatten())[self.scored]).to(self.device)
        steps = tt.to(steps, self.device)
        reward = net(images).mean(0).view(numbers.shape)
        valid = torch.ones_like(steps["ended"])
        discount = torch.full_like(reward, self.gamma)
        gain = returns(reward, discount, steps["ended"])
        assert self.policy is not None
        run = {**steps, "reward": reward, "valid": valid}
        return objective(self.policy, run, centred(gain, valid))

    def fit_from(self, episodes: Episodes, held_out: float = 0.2) -> dict[str, float]:
        raise ConfigError(
            "reward=parl learns while a policy trains: for a dataset take reward=preference"
        )
