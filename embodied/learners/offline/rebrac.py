"""ReBRAC and PRDC: TD3 that is held near the data; offline and online.

**ReBRAC** (Tarasov, Kurenkov, Nikulin and Kolesnikov, 2023): separate penalties of actor and
critic, after BRAC (Wu et al., 2019). TD3+BC (Fujimoto and Gu, 2021) is a special case
(td3_bc.yaml). With a' the dataset's next action and a~' the target policy's noisy action:

    y    = r + d (min_i Q'_i(s', a~') - beta_c |a~' - a'|^2)
    L_Q  = sum_i E (Q_i(s, a) - y)^2
    L_mu = E beta_a |mu(s) - a|^2 - E min_i Q_i(s, mu(s)) / mean |Q|

Where the dataset has no next action (the last transition before a time limit), the critic's penalty
is omitted. With `atoms` the critics are categorical (as in FastTD3), and the penalty is taken from
the reward: bounded values of a sparse success, of which GR-RL (2025) makes progress.

**PRDC**, policy regularisation with dataset constraint (Ran et al., 2023), holds the policy near
the action of the dataset's nearest transition, and not near the data's action at the same state:

    L_mu = beta_a |mu(s) - a_i|^2 - E Q_1(s, mu(s)) / mean |Q_1|
    i    = argmin_j |(beta s_j, a_j) - (beta s, mu(s))|,   states standardised

With `beta` 0 the policy may take any action of the data; with a large one it is TD3+BC, unless the
data have a state twice. An exact search: a k-d tree, on a GPU a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.off_policy import td3


@dataclass(frozen=True)
class Config(td3.Config):
    """Settings of ReBRAC and TD3+BC: those of TD3 and of the penalties."""

    layer_norm: bool = True  # layer normalisation in the critics
    actor_bc: NonNegative = 0.01  # beta_a, weight of the distance to the data's action
    critic_bc: NonNegative = 0.01  # beta_c, weight of the distance to the data's next action
    distance: Literal["sum", "mean"] = "sum"  # of the squares over the action's elements
    value: Literal["min", "first"] = "min"  # of the critics; the policy maximises it


class Rebrac(td3.Td3):
    """`update` as in TD3; with `critic_bc` > 0, transitions need the column `next_action`."""

    data = "offline"
    usual_policy = "deterministic"

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.columns = ("next_action",) if config.critic_bc else ()

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        q = self.critic(under(batch, "obs"), batch["action"])
        with torch.no_grad():
            following = under(batch, "next_obs")
            action = self.target_policy(following)
            action = self.target_noise(action).add_(action).clamp_(-1, 1)
            reward, discount = batch["reward"], batch["discount"]
            penalty: Tensor | float = 0.0
            if self.config.critic_bc:
                # Unknown next actions are NaN: no penalty there.
                apart = self._distance(action, batch["next_action"]).nan_to_num(0.0)
                penalty = self.config.critic_bc * apart
            value = self.target(following, action)
            if self.support is None:
                backup = torch.addcmul(reward, discount, value.amin(0) - penalty)
            else:
                lowest = self.support.lowest(value)
                backup = self.support.back_up(lowest, reward - discount * penalty, discount)
        return self.critic_error(batch, q, backup)

    def _actor_loss(self, batch: Tensors) -> Tensor:
        obs = under(batch, "obs")
        action = self.policy(obs)
        q = self.critic(obs, action, 1 if self.config.value == "first" else None)
        return behaved_loss(
            self.values(q).amin(0) + self.prior(obs, action), self.actor_penalty(batch, action)
        )

    def actor_penalty(self, batch: Tensors, action: Tensor) -> Tensor:
        """What holds the policy's `action` [N, size] near the data, a scalar: beta_a times the mean
        distance to the data's actions. Subclasses may measure it otherwise."""
        return self.config.actor_bc * self._distance(action, batch["action"]).mean()

    def _distance(self, one: Tensor, other: Tensor) -> Tensor:
        apart = (one - other).square()
        return apart.sum(1) if self.config.distance == "sum" else apart.mean(1)


def behaved_loss(q: Tensor, penalty: Tensor) -> Tensor:
    """penalty - mean(q / mean |q|), `q` [N]; the division makes the penalty's weight independent of
    the reward scale."""
    return penalty - q.mean() / q.detach().abs().mean()


@dataclass(frozen=True)
class PrdcConfig(Config):
    """Settings of PRDC: those of ReBRAC, whose `actor_bc` weighs the distance, and `beta`."""

    beta: NonNegative = 2.0  # weight of the standardised state against the action in the search


class Prdc(Rebrac):
    """`update` as in TD3; `fit` is given the transitions that are searched."""

    points: Tensor

    def __init__(self, config: PrdcConfig, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.policy.encoder.only_vectors()
        self.register_buffer("points", torch.empty(0), persistent=False)
        self.tree: Any = None

    def fit(self, transitions: Tensors) -> None:
        super().fit(transitions)
        device = self.points.device
        names = self.policy.encoder.vectors
        obs = {name: transitions[f"obs/{name}"].to(device) for name in names}
        self.points = self._points(obs, transitions["action"].to(device))
        if self.points.device.type == "cpu":
            self.tree = tree_of(self.points)

    def actor_penalty(self, batch: Tensors, action: Tensor) -> Tensor:
        if not len(self.points):
            raise ConfigError("learner=prdc searches a dataset: demos=DIR")
        index = nearest(self._points(under(batch, "obs"), action.detach()), self.points, self.tree)
        taken = self.points[index, -action.shape[1] :]
        return self.config.actor_bc * self._distance(action, taken).mean()

    def _points(self, obs: Tensors, action: Tensor) -> Tensor:
        encoder = self.policy.encoder
        return torch.cat([self.config.beta * encoder.norm(encoder.flat(obs)), action], 1)


def tree_of(points: Tensor) -> Any:
    """A k-d tree of `points` [N, size]."""
    try:
        from scipy.spatial import KDTree
    except ImportError as error:
        advice = 'pip install "embodied-rl[offline]"'
        raise ConfigError(f"learner=prdc needs SciPy to search: {advice}") from error
    return KDTree(points.numpy())


def nearest(query: Tensor, points: Tensor, tree: Any = None) -> Tensor:
    """The index [n] of the nearest of `points` [N, size] to each `query` [n, size]; by their `tree`
    if there is one and this is the CPU, else by products."""
    if tree is not None and query.device.type == "cpu":
        return torch.from_numpy(tree.query(query.numpy())[1])
    return torch.addmm(points.square().sum(1) / 2, query, points.T, alpha=-1).argmin(1)
