"""TwoAgentTeacher: protocol of teachers with a second agent, which the training loop trains too.

The teacher makes the environments of both agents and
decides after which steps of the first agent the second one is stepped. The second agent has the
same kind of policy and learner as the first. Steps of both agents count as steps of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.teachers.episode_log import EpisodeLog


class StepSecondAgent(Protocol):
    """Steps all parallel envs of the second agent once, and updates it if an update is due.

    `obs`: its current observation; needed if the environment has changed since its last step.
    """

    def __call__(self, obs: Tensors | None = None) -> None: ...


@runtime_checkable
class TwoAgentTeacher(Protocol):
    """A run calls `antagonist_env`, then `protagonist_env`, and `after_step` after each step."""

    def antagonist_env(self, env: VecEnv, make_env: Callable[[], VecEnv]) -> VecEnv:
        """The second agent's environment. `env` is the run's environment; `make_env` makes another
        one like it."""
        ...

    def protagonist_env(self, env: VecEnv, log: EpisodeLog | None) -> VecEnv:
        """The first agent's environment."""
        ...

    def after_step(self, step: Step, step_second: StepSecondAgent) -> Step:
        """Called after `step` of the first agent: steps the second agent as often as is due, and
        returns the step that the first agent is trained on (with a changed reward, for example)."""
        ...

    def metrics(self) -> dict[str, float]: ...
