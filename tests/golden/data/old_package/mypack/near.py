"""Rewards."""

from dataclasses import dataclass

from embodied.core.reward import Kept, Reward
from embodied.core.spec import Spec


@dataclass(frozen=True)
class Config:
    scale: float = 1.0


class Near(Reward):
    """Minus the distance to the origin."""

    frozen = True

    def __init__(self, config: Config, spec: Spec) -> None:
        self.scale = config.scale

    def __call__(self, rows):
        return -self.scale * rows["next_obs/state"].norm(dim=1)

    def update(self, rows):
        return {}


class Counted(Near):
    """One that has something to remember."""

    frozen = False

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.count = 0
        own: Reward = self
        assert isinstance(own, Kept)

    def update(self, rows):
        self.count += len(rows["reward"])
        return {"count": rows["reward"].new_tensor(float(self.count))}

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]
