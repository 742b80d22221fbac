"""RunEvaluation: evaluates a run's policy on held-out initial states or tasks."""

from __future__ import annotations

from pathlib import Path

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.evaluation.evaluate import evaluate
from embodied.evaluation.task_grid import TaskGridEval, grid, held_out
from embodied.training.config import RunConfig


class RunEvaluation:
    """Builds the evaluation's environment when it is first used; `env` is the training one."""

    def __init__(self, config: RunConfig, env: VecEnv) -> None:
        self.config, self.training_env = config, env
        self._env: VecEnv | None = None

    @property
    def env(self) -> VecEnv:
        env = self._env
        if env is None:
            settings, spec = self.config.eval, self.training_env.spec
            tasks = grid(spec, settings.grid) if settings.grid else held_out(self.training_env)
            tasks = tasks if tasks is None or settings.grid else tasks[: settings.episodes]
            episodes = settings.episodes if tasks is None else len(tasks)
            rows = min(settings.num_envs, episodes)
            env = build(self.config.environment | {"num_envs": rows}, VecEnv)
            env = self._env = env if tasks is None else TaskGridEval(env, tasks)
        return env

    def __call__(self, policy: Policy, step: int) -> dict[str, float]:
        """Success rate and return of `policy`; `step` names the file of a grid's tasks."""
        policy.eval()
        settings, env = self.config.eval, self.env
        episodes = len(env.tasks) if isinstance(env, TaskGridEval) else settings.episodes
        result = evaluate(policy, env, episodes, settings.seed, self.config.execute)
        policy.train()
        if isinstance(env, TaskGridEval):
            env.write(Path(self.config.out), step, result)
        return result.metrics()
