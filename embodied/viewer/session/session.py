"""One episode after another, looked at moment by moment, alone or beside a rival."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from embodied.viewer.run_folder import ViewerError
from embodied.viewer.scene.types import Array
from embodied.viewer.session.episode import Moment
from embodied.viewer.session.player import Player


class Session(Player):
    """One episode after another: each from a seed of its own, the one after the last.

    `now` is the moment that is looked at, number `at` of the episode's; `advance` goes through what
    is kept, and then on. A `rival` begins with it, from the same start, and goes along, until both
    have ended.
    """

    rival: Session | None = None

    @property
    def now(self) -> Moment:
        moments = self.episode.moments
        return moments[min(self.at, len(moments) - 1)]

    @property
    def both(self) -> list[Session]:
        """Itself, and its rival."""
        return [self] if self.rival is None else [self, self.rival]

    @property
    def length(self) -> int:
        """How many moments are kept, of the longer episode."""
        return max(len(each.episode.moments) for each in self.both)

    @property
    def live(self) -> bool:
        """Whether nothing is kept after the moment that is looked at."""
        return self.at >= self.length - 1

    @property
    def over(self) -> bool:
        """Whether every episode has ended."""
        return all(each.episode.end for each in self.both)

    def face(self, rival: Session) -> None:
        """Play beside `rival`, in a world of the same kind."""
        self.rival = rival

    def meet_judge(self) -> None:
        """Make what judges the steps, in both worlds."""
        super().meet_judge()
        if self.rival is not None:
            self.rival.meet_judge()

    def begin(self, seed: int) -> None:
        """Start the episode that `seed` (and `task`, where it is fixed) gives."""
        for each in self.both:
            each.task = self.task
            each.start(seed)
        self._look(0)

    def advance(self) -> None:
        """On by one moment: a kept one, else a control step; after the end, the next start."""
        if self.live and self.over:
            return self.begin(self.episode.seed + 1)
        if self.live:
            for each in self.both:
                if not each.episode.end:
                    each.step()
        self._look(self.at + 1)

    def seek(self, at: int) -> None:
        """Look at the kept moment number `at`, counted from the oldest."""
        self._look(at)

    def branch(self) -> None:
        """Forget what came after the moment that is looked at, and go on from there: with another
        policy, or other luck. ViewerError where the world cannot go back."""
        if self.live:
            return
        later = [each for each in self.both if self.at < len(each.episode.moments) - 1]
        if any(each.now.state is None for each in later):
            raise ViewerError("this world cannot go on from an earlier moment; press Restart")
        for each in later:
            each.go_back(self.at)

    def set_task(self, task: Sequence[float] | None) -> None:
        """Fix the task vector [D] of the episodes to come; None: drawn anew for each. ValueError
        where it is not one of this world."""
        leaf, size = self.spec.task, 0 if self.spec.task is None else self.spec.task.size
        if task is not None and (leaf is None or len(task) != size):
            raise ValueError(f"the task has {len(task)} elements, this environment's has {size}")
        if task is not None and not all(0.0 <= value <= 1.0 for value in task):
            raise ValueError("the elements of a task should be in [0, 1]")
        self.task = None if task is None else torch.tensor(task, dtype=torch.float32)

    def push_all(self, name: str, strength: float) -> None:
        """Push something, at the newest moment, in every world whose episode goes on."""
        self.seek(self.length - 1)
        for each in self.both:
            if not each.episode.end or self.over:
                each.push(name, strength)

    def push_one(self, player: Player, name: str, strength: float, way: Array) -> None:
        """Push a link of the robot along `way` [3] in one world, at the newest moment."""
        self.seek(self.length - 1)
        player.push(name, strength, way)

    def blind(self, late: int, off: set[str]) -> None:
        """Let whoever acts see the world `late` steps ago, nothing of the observations `off`."""
        for each in self.both:
            each.senses.late, each.senses.off = late, off

    def venture(self, on: bool) -> None:
        """Whether whoever acts adds the noise that it explores with."""
        for each in self.both:
            each.explore = on

    def _look(self, at: int) -> None:
        at = min(max(at, 0), self.length - 1)
        for each in self.both:
            each.at = at

    def ahead(self) -> list[Array]:
        """Where the plan leads that is followed at the moment that is looked at, and where other
        draws of the noise would have led; paths [H + 1, 3] (m)."""
        number = self.deciding
        return [] if number is None else self.ahead_of(number)

    @property
    def deciding(self) -> int | None:
        """Number of the moment that the decision led to which is followed at the one that is looked
        at, or was last; None before there was one."""
        moments, at = self.episode.moments, min(self.at, len(self.episode.moments) - 1)
        for number in range(min(at + 1, len(moments) - 1), 0, -1):
            if moments[number].fresh:
                return number
        return None

    def close(self) -> None:
        """Let go of the world."""
        for each in self.both:
            each.env.close()
            if each.foresight is not None:
                each.foresight.close()
