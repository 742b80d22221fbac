"""Rivals: a second student, which a teacher lets play beside the first.

A teacher that needs "rival" is a `Duel`: it says in which world the second student plays (a policy
and a learner of the same kinds as the first's, made by the run), and gets a function by which that
student plays one step of all its rows, and learns when it has a batch. Its steps are counted as
steps of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.teachers.episode_log import Diary
from embodied.teachers.task_wrapper import Chooser, Taught


class Play(Protocol):
    """A step of all of the second student's rows; `obs` where it does not see what its last step
    showed, as somebody else moved since."""

    def __call__(self, obs: Tensors | None = None) -> None: ...


class Duel(Protocol):
    """What the run asks of such a teacher, in this order."""

    def against(self, env: VecEnv, fresh: Callable[[], VecEnv]) -> VecEnv:
        """The world of the second student; `fresh` makes another one like `env`, the first's."""
        ...

    def beside(self, env: VecEnv, play: Play, diary: Diary | None) -> VecEnv:
        """The world of the first student; `play` is a step of the second."""
        ...


class Beside(Taught):
    """After each step of this world the second student makes one in its own."""

    def __init__(self, env: VecEnv, teacher: Chooser, play: Play, diary: Diary | None) -> None:
        super().__init__(env, teacher, diary)
        self.play = play

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        self.play()
        return step
