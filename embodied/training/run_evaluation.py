"""RunEvaluation: evaluates a run's policy on held-out initial states or tasks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.training.config import RunConfig

if TYPE_CHECKING:
    from embodied.evaluation.task_grid import TaskGridEval


class RunEvaluation:
    """Builds the evaluation's environment when it is first used, unless it is shared; `env` is the
    training one."""

    def __init__(self, config: RunConfig, env: VecEnv) -> None:
        self.config, self.training_env = config, env
        if config.eval.shared and config.eval.num_envs != env.num_envs:
            raise ConfigError(
                f"eval.shared evaluates in the environment of the training, which has "
                f"{env.num_envs} parallel env(s): eval.num_envs={env.num_envs}"
            )
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
            env = self._make(rows)
            if tasks is not None:
                env = self.grid = TaskGridEval(env, tasks)
            self._env = env
        return env

    @contextmanager
    def another(self, rows: int) -> Generator[VecEnv]:
        """`rows` parallel envs to play in, closed afterwards; all of the training's if shared."""
        env = self._make(rows)
        try:
            yield env
        finally:
            if not self.config.eval.shared:
                env.close()

    def _make(self, rows: int) -> VecEnv:
        if self.config.eval.shared:
            return self.training_env
        return build(self.config.environment | {"num_envs": rows}, VecEnv)

    def close(self) -> None:
        """Close its environment, if it was used and is its own."""
        if self._env is not None and not self.config.eval.shared:
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
