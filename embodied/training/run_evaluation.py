"""RunEvaluation: evaluates a run's policy on held-out initial states or tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.training.config import RunConfig

if TYPE_CHECKING:
    from embodied.evaluation.task_grid import TaskGridEval


class RunEvaluation:
    """Builds the evaluation's environment when it is first used; `env` is the training one."""

    def __init__(self, config: RunConfig, env: VecEnv) -> None:
        self.config, self.training_env = config, env
        self._env: VecEnv | None = None
        self.grid: TaskGridEval | None = None  # where each episode has a task of its own

    @property
    def env(self) -> VecEnv:
        env = self._env
        if env is None:
            settings, spec = self.config.eval, self.training_env.spec
            from embodied.evaluation.task_grid import TaskGridEval, grid, held_out

            tasks = grid(spec, settings.grid) if settings.grid else held_out(self.training_env)
            tasks = tasks if tasks is None or settings.grid else tasks[: settings.episodes]
            episodes = settings.episodes if tasks is None else len(tasks)
            rows = min(settings.num_envs, episodes)
            env = build(self.config.environment | {"num_envs": rows}, VecEnv)
            if tasks is not None:
                env = self.grid = TaskGridEval(env, tasks)
            self._env = env
        return env

    def close(self) -> None:
        """Close its environment, if it was used."""
        if self._env is not None:
            self._env.close()

    def __call__(self, policy: Policy, step: int) -> dict[str, float]:
        """Success rate and return of `policy`; `step` names the file of a grid's tasks."""
        policy.eval()
        settings = self.config.eval
        env = self.env
        episodes = settings.episodes if self.grid is None else len(self.grid.tasks)
        from embodied.evaluation.evaluate import evaluate

        result = evaluate(policy, env, episodes, settings.seed, self.config.execute)
        policy.train()
        if self.grid is not None:
            self.grid.write(Path(self.config.out), step, result)
        return result.metrics()
