"""A teacher: tasks around the middle."""

from dataclasses import dataclass

from embodied.core.spec import Spec
from embodied.teachers import teacher


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    width: float = 0.5


class Middle(teacher.Teacher):
    remembered = ("seen",)

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        self.seen = 0

    def propose(self, n):
        spread = self.random.random((n, len(self.space))) - 0.5
        return [(0.5 + self.config.width * point, None) for point in spread]

    def learn(self, points, scores, memos):
        self.seen += len(points)

    def metrics(self):
        return {"seen": float(self.seen)}
