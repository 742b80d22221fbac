"""Session: episodes that are played and browsed step by step, one policy or two side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from embodied.viewer.run_folder import ViewerError
from embodied.viewer.scene.types import Array
from embodied.viewer.session.episode import Moment
from embodied.viewer.session.player import Player


class Session(Player):
    """Plays one episode after another; each has a seed, and the next episode has the next seed.

    `at` is the index of the displayed step, `now` its record. `advance` goes through the stored
    steps and then simulates new ones. An `other` session, if there is one, plays the same seeds
    beside this one; an episode pair is over when both have ended.
    """

    other: Session | None = None

    @property
    def now(self) -> Moment:
        """The record of the displayed step."""
        moments = self.episode.moments
        return moments[min(self.at, len(moments) - 1)]

    @property
    def sessions(self) -> list[Session]:
        """This session and, if there is one, the other."""
        return [self] if self.other is None else [self, self.other]

    @property
    def length(self) -> int:
        """How many steps are stored, of the longer episode (the initial state counts)."""
        return max(len(each.episode.moments) for each in self.sessions)

    @property
    def live(self) -> bool:
        """Whether the displayed step is the newest."""
        return self.at >= self.length - 1

    @property
    def over(self) -> bool:
        """Whether the episodes of all sessions have ended."""
        return all(each.episode.end for each in self.sessions)

    def compare_with(self, other: Session) -> None:
        """Play `other`, a session in an environment of the same kind, beside this one."""
        self.other = other

    def load_critic(self) -> None:
        """Load the critic and the reward of each session's run."""
        super().load_critic()
        if self.other is not None:
            self.other.load_critic()

    def reset(self, seed: int) -> None:
        """Start the episode of `seed` (and of `task`, if it is fixed) in every session."""
        for each in self.sessions:
            each.task = self.task
            each.start_episode(seed)
            while each.counts == "episode" and not each.episode.end:
                each.step()  # a recording is on the time line at once
        self._set_index(0)

    def advance(self) -> None:
        """Go on by one step: a stored one, else a new control step; after the end, the next
        episode."""
        if self.live and self.over:
            return self.reset(self.episode.seed + 1)
        if self.live:
            for each in self.sessions:
                if not each.episode.end:
                    each.step()
        self._set_index(self.at + 1)

    def seek(self, at: int) -> None:
        """Display the stored step with index `at`, counted from the oldest."""
        self._set_index(at)

    def branch(self) -> None:
        """Discard the steps after the displayed one and continue from there, with another policy or
        other noise. ViewerError if the environment's state was not saved."""
        if self.live:
            return
        later = [each for each in self.sessions if self.at < len(each.episode.moments) - 1]
        if any(each.now.state is None for each in later):
            raise ViewerError(
                "this environment cannot continue from an earlier step; press Restart"
            )
        for each in later:
            each.go_back(self.at)

    def set_task(self, task: Sequence[float] | None) -> None:
        """Fix the task vector [D] (in [0, 1]) of the episodes to come; None: sampled for each
        episode. ValueError if it does not fit this environment."""
        leaf, size = self.spec.task, 0 if self.spec.task is None else self.spec.task.size
        if task is not None and (leaf is None or len(task) != size):
            raise ValueError(
                f"the task vector has {len(task)} elements; this environment needs {size}"
            )
        if task is not None and not all(0.0 <= value <= 1.0 for value in task):
            raise ValueError("the elements of the task vector must be in [0, 1]")
        self.task = None if task is None else torch.tensor(task, dtype=torch.float32)

    def push_all(self, name: str, strength: float) -> None:
        """Push a body at the newest step, in every environment whose episode is running."""
        self.seek(self.length - 1)
        for each in self.sessions:
            if not each.episode.end or self.over:
                each.push(name, strength)

    def push_one(self, player: Player, name: str, strength: float, way: Array) -> None:
        """Push a link of the robot along `way` [3] in one environment, at the newest step."""
        self.seek(self.length - 1)
        player.push(name, strength, way)

    def disturb_observations(self, late: int, off: set[str]) -> None:
        """Give policies observations that are `late` steps old and zeros for the observations
        `off`."""
        for each in self.sessions:
            each.disturbance.late, each.disturbance.off = late, off

    def set_exploration(self, on: bool) -> None:
        """Whether the policies add their exploration noise."""
        for each in self.sessions:
            each.explore = on

    def _set_index(self, at: int) -> None:
        at = min(max(at, 0), self.length - 1)
        for each in self.sessions:
            each.at = at

    def plan_paths(self) -> list[Array]:
        """Paths [H + 1, 3] (m) of the tool at the displayed step: of the chunk that is executed
        first, then of chunks for other noise samples."""
        number = self.decision_index
        return [] if number is None else self.plan_paths_at(number)

    @property
    def decision_index(self) -> int | None:
        """Index of the step that the running action chunk started with (or the last one before it);
        None if there was none."""
        moments, at = self.episode.moments, min(self.at, len(self.episode.moments) - 1)
        for number in range(min(at + 1, len(moments) - 1), 0, -1):
            if moments[number].is_decision:
                return number
        return None

    def close(self) -> None:
        """Close the environments."""
        for each in self.sessions:
            each.env.close()
            if each.plan_preview is not None:
                each.plan_preview.close()
