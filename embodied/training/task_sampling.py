"""Task sampling: connects a teacher (curriculum) to the training environment and the learner.

The second agent of a two-agent teacher (PAIRED's antagonist) has a policy, a learner and a
collector of its own, of the same kinds as the first agent's. The training loop steps it; its
environment steps count as steps of the run, and its state is part of the loop's checkpoint. The
first agent's policy is the one that is evaluated and deployed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, build
from embodied.core.env import HasLevels, Step, VecEnv
from embodied.core.reward import Stateful
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.learners.learner import HasStateValues, Learner
from embodied.teachers.resets.reset_distribution import ResetDistribution
from embodied.teachers.teacher import (
    FILE,
    Curriculum,
    EpisodeLog,
    Floats,
    StudentEstimates,
    TaskWrapper,
    Teacher,
    TwoAgentTeacher,
)
from embodied.training.config import OnPolicy, RunConfig


class SecondAgent:
    """An agent that the OnPolicyLoop `loop` steps and updates, when `teacher` decides."""

    def __init__(self, teacher: TwoAgentTeacher, learner: Learner, loop: Any) -> None:
        self.teacher, self.learner, self.loop = teacher, learner, loop
        self.new_steps = 0
        self.metrics: dict[str, Tensor] = {}

    def after_step(self, step: Step) -> Step:
        """The step from which the first agent learns, which made `step`; the second one is stepped
        as often as the teacher decides."""
        return self.teacher.after_step(step, self.step)

    def step(self, obs: Tensors | None = None) -> None:
        """One step of all parallel envs, and an update where one is due. `obs`: the current
        observations, if the first agent changed the environment since the last step (None: those of
        the last step)."""
        if obs is not None:
            self.loop.collector.obs = obs
        metrics, step = self.loop.advance()
        self.new_steps += len(step.reward)
        if metrics:
            self.metrics = {f"rival_{key}": value for key, value in metrics.items()}

    def drain(self) -> int:
        """The number of environment steps since the last call."""
        steps, self.new_steps = self.new_steps, 0
        return steps

    def get_state(self) -> dict[str, Any]:
        return {"learner": self.learner.get_state(), "loop": self.loop.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.learner.set_state(tt.state_to(state["learner"], self.loop.collector.actor.device))
        self.loop.set_state(state["loop"])
        if state["loop"]["collector"] is None:
            self.loop.collector.restart()


SEED = 20_000  # of the randomness in initial states; the same in every call


class TaskValueEstimator:
    """Resets an environment of its own (`node`) to tasks and evaluates the learner's values."""

    def __init__(self, node: dict[str, Any], learner: Learner, device: torch.device) -> None:
        self.node, self.learner, self.device = node, learner, device
        self.env: VecEnv | None = None

    def values(self, tasks: Floats) -> Floats:
        """Values [n] of episodes with `tasks` [n, D]."""
        env = build(self.node, VecEnv) if self.env is None else self.env
        self.env, size = env, env.num_envs
        parts = [self._some(env, tasks[at : at + size]) for at in range(0, len(tasks), size)]
        return np.concatenate(parts)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    @torch.no_grad()
    def _some(self, env: VecEnv, tasks: Floats) -> Floats:
        learner = self.learner
        assert isinstance(learner, HasStateValues)
        rows = np.resize(tasks, (env.num_envs, tasks.shape[1]))  # fills the last batch
        obs = env.reset(SEED, torch.from_numpy(rows).float().to(env.device))
        return learner.state_values(tt.to(obs, self.device))[: len(tasks)].double().cpu().numpy()


def task_value_estimator(
    node: dict[str, Any], learner: Learner, device: torch.device
) -> TaskValueEstimator | None:
    """The estimator; None if the learner has no values in units of the environment's reward."""
    if not isinstance(learner, HasStateValues) or learner.estimates is None:
        return None
    return TaskValueEstimator(node, learner, device)


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


def build_task_sampling(
    config: RunConfig,
    env: VecEnv,
    learner: Learner,
    device: torch.device,
    build_second_agent: Callable[..., SecondAgent] | None = None,
) -> TaskSampling:
    """The environment, with the tasks of `config.teacher` if it is set. `build_second_agent`: None
    where the training regime has no two-agent teachers."""
    if config.teacher is None:
        return TaskSampling(env)
    assert config.teacher is not None
    levelled = find_protocol(env, HasLevels)
    teacher = build(
        config.teacher,
        Curriculum,
        spec=env.spec,
        env=env,
        seed=distributed.own_seed(config.seed),
        folder=Path(config.out),
        levels=None if levelled is None else levelled.levels,
        student=task_value_estimator(config.environment, learner, device),
    )
    log = EpisodeLog(Path(config.out) / FILE) if distributed.rank() == 0 else None
    estimates: StudentEstimates | None = None
    second: SecondAgent | None = None
    if teacher.uses_estimates and isinstance(teacher, Teacher):
        gives = isinstance(learner, HasStateValues) and learner.estimates is not None
        if not isinstance(config.data, OnPolicy) or not gives:
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
