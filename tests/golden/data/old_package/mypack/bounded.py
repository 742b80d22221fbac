"""A policy that is one of the project's with a change."""

from dataclasses import dataclass

from embodied.core.spec import Spec
from embodied.policies import gaussian


@dataclass(frozen=True)
class Config(gaussian.Config):
    largest: float = 0.8


class Bounded(gaussian.Gaussian):
    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.largest = config.largest

    def act(self, obs, carry, noise):
        actions, carry = super().act(obs, carry, noise)
        return self.largest * actions, carry
