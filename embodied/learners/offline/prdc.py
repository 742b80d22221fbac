"""PRDC: TD3 that is held near the data's nearest transition; offline and online.

Policy regularisation with dataset constraint (Ran et al., 2023) holds the policy near the action of
the dataset's nearest transition, and not near the data's action at the same state:

    L_mu = beta_a |mu(s) - a_i|^2 - E Q_1(s, mu(s)) / mean |Q_1|
    i    = argmin_j |(beta s_j, a_j) - (beta s, mu(s))|,   states standardised

With `beta` 0 the policy may take any action of the data; with a large one it is TD3+BC, unless the
data have a state twice. An exact search: a k-d tree, on a GPU a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.offline import rebrac


@dataclass(frozen=True)
class Config(rebrac.Config):
    """Settings of PRDC: those of ReBRAC, whose `actor_bc` weighs the distance, and `beta`."""

    beta: NonNegative = 2.0  # weight of the standardised state against the action in the search


class Prdc(rebrac.Rebrac):
    """`update` as in TD3; `fit` is given the transitions that are searched."""

    points: Tensor

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
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
            raise ConfigError("learner=prdc searches a dataset: demos=DIR data.normalize=true")
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
