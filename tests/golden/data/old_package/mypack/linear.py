"""A policy of one's own out of the project's parts."""

from dataclasses import dataclass

import torch

from embodied.core.nets import mlp, orthogonal, per_row
from embodied.core.norm import Standard
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import under
from policies.encoders import Encoder, ImageConfig


@dataclass(frozen=True)
class Config:
    std: float = 0.5


class Linear(Policy):
    """A linear map of the state."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec, self.std = spec, config.std
        self.encoder = Encoder(spec.obs, ImageConfig())
        assert isinstance(self.encoder.norm, Standard)
        self.map = mlp(self.encoder.size, (), spec.act.size)
        orthogonal(self.map, last=0.1)

    def draw(self, n, explore=False):
        return torch.randn(n, self.spec.act.size) * self.std * explore

    def act(self, obs, carry, noise):
        return (self.map(self.encoder(obs)) + noise).clamp(-1, 1)[:, None], carry

    def loss(self, batch):
        action = self.map(self.encoder(under(batch, "obs")))[:, None]
        return per_row((action - batch["action"]).square(), batch["valid"])

    def fit(self, rows):
        self.encoder.fit(rows)
