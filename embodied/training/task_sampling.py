"""Task sampling: connects a teacher (curriculum) to the training environment and the learner."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from embodied.core import distributed
from embodied.core.build import ConfigError, build
from embodied.core.env import HasLevels, VecEnv
from embodied.core.reward import Stateful
from embodied.core.wrapper import find_protocol
from embodied.learners.learner import HasStateValues, Learner
from embodied.teachers.resets.reset_distribution import ResetDistribution
from embodied.teachers.teacher import (
    FILE,
    Curriculum,
    EpisodeLog,
    StudentEstimates,
    TaskWrapper,
    Teacher,
    TwoAgentTeacher,
)
from embodied.training.config import OnPolicy, RunConfig
from embodied.training.second_agent import SecondAgent
from embodied.training.value_query import task_value_estimator


@dataclass(frozen=True)
class TaskSampling:
    """`env`: the training environment, in which the teacher chooses the tasks of episodes.

    `stateful`: parts whose state a checkpoint stores, by name. `estimates`: receives the learner's
    advantages and values, for teachers that need them. `second_agent`: the second agent of a
    two-agent teacher, stepped by the training loop.
    """

    env: VecEnv
    stateful: dict[str, Stateful] = field(default_factory=dict[str, Stateful])
    estimates: StudentEstimates | None = None
    second_agent: SecondAgent | None = None


class SecondAgentBuilder(Protocol):
    """Builds the second agent of a two-agent teacher."""

    def __call__(
        self, config: RunConfig, teacher: TwoAgentTeacher, env: VecEnv, device: torch.device
    ) -> SecondAgent: ...


def build_task_sampling(
    config: RunConfig,
    env: VecEnv,
    learner: Learner,
    device: torch.device,
    build_second_agent: SecondAgentBuilder | None = None,
) -> TaskSampling:
    """The environment, with the tasks of `config.teacher` if it is set.

    `build_second_agent`: None where the training regime has no two-agent teachers.
    """
    if config.teacher is None:
        return TaskSampling(env)
    teacher = _teacher(config, env, learner, device)
    log = EpisodeLog(Path(config.out) / FILE) if distributed.rank() == 0 else None
    estimates: StudentEstimates | None = None
    second: SecondAgent | None = None
    if teacher.uses_estimates and isinstance(teacher, Teacher):
        if not isinstance(config.data, OnPolicy) or not gives_estimates(learner):
            raise ConfigError(
                "this teacher needs advantages and values in units of the environment's reward: an "
                "on-policy learner that provides them (where it scales rewards, turn that off)"
            )
        estimates = StudentEstimates(teacher)
    if isinstance(teacher, TwoAgentTeacher):
        if build_second_agent is None or config.finetune or config.init or config.reward:
            raise ConfigError(
                "this teacher trains a second agent from scratch with the environment's reward: it "
                "needs an on-policy learner, without init, finetune and reward"
            )
        second = build_second_agent(config, teacher, env, device)
        env = teacher.protagonist_env(env, log)
    elif isinstance(teacher, ResetDistribution):
        env = teacher.wrap(env, log)
    elif isinstance(teacher, Teacher):
        env = TaskWrapper(env, teacher, log, estimates)
    else:
        raise ConfigError(
            f"a {type(teacher).__name__} is no teacher of tasks (Teacher), of initial states "
            "(ResetDistribution), or with a second agent (TwoAgentTeacher)"
        )
    parts = {"teacher": teacher, "episode_log": log, "estimates": estimates, "second_agent": second}
    stateful = {name: part for name, part in parts.items() if part is not None}
    return TaskSampling(env, stateful, estimates, second)


def _teacher(config: RunConfig, env: VecEnv, learner: Learner, device: torch.device) -> Curriculum:
    assert config.teacher is not None
    levelled = find_protocol(env, HasLevels)
    return build(
        config.teacher,
        Curriculum,
        spec=env.spec,
        env=env,
        seed=distributed.own_seed(config.seed),
        folder=Path(config.out),
        levels=None if levelled is None else levelled.levels,
        student=task_value_estimator(config.environment, learner, device),
    )


def gives_estimates(learner: Learner) -> bool:
    """Whether the learner estimates advantages and values in units of the environment's reward."""
    return isinstance(learner, HasStateValues) and learner.estimates is not None
