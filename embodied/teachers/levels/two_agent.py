"""TwoAgentTeacher: a teacher with a second agent, which the training loop trains beside the first.

A teacher that needs "rival" is one. It makes the environment of either agent (policy and learner of
the second are of the same kinds as the first's), and says after which steps of the first agent the
second one is stepped. Steps of both count as steps of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.teachers.episode_log import EpisodeLog


class StepSecondAgent(Protocol):
    """One step of all of the second agent's parallel envs, and an update where one is due.

    `obs`: what it observes, where the first agent has changed the environment since its last step.
    """

    def __call__(self, obs: Tensors | None = None) -> None: ...


class TwoAgentTeacher(Protocol):
    """A run calls `antagonist_env`, then `protagonist_env`, then `after_step` at each step."""

    def antagonist_env(self, env: VecEnv, make_env: Callable[[], VecEnv]) -> VecEnv:
        """The second agent's environment; `make_env` makes another one like `env`, the first's."""
        ...

    def protagonist_env(self, env: VecEnv, log: EpisodeLog | None) -> VecEnv:
        """The first agent's environment."""
        ...

    def after_step(self, step: Step, step_second: StepSecondAgent) -> Step:
        """The first agent made `step`: step the second one as often as is due, and return the step
        as the first agent is to learn from it."""
        ...

    def metrics(self) -> dict[str, float]: ...
