"""RunEvaluation: evaluates a run's policy on held-out initial states or tasks.

In a model's environment success is imagined: `imagined_success`, where the run's reward detects it.
With `eval.env` the policy is evaluated in the real environment too, and `parted` says where the two
success rates differ by more than chance: there the policy exploits errors of the model.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.atomic_write import write_json
from embodied.core.build import ConfigError, build
from embodied.core.device import device_of, forked
from embodied.core.env import HasModel, VecEnv
from embodied.core.policy import Policy
from embodied.core.reward import AugmentsEnv, HasComponents, Reward
from embodied.core.spec import require_same
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.training.collector import Collector
from embodied.training.config import RunConfig

if TYPE_CHECKING:
    from embodied.evaluation.task_grid import TaskGridEval


class RunEvaluation:
    """Builds the evaluation's environment when it is first used, unless it is shared; `env` is the
    training one, `reward` (None: none) the run's."""

    def __init__(self, config: RunConfig, env: VecEnv, reward: Reward | None = None) -> None:
        self.config, self.training_env, self.reward = config, env, reward
        self.imagined = find_protocol(env, HasModel)
        self._real: VecEnv | None = None
        if config.eval.env is not None:
            if self.imagined is None:
                raise ConfigError(
                    "eval.env is the real environment beside env=imagined, and env= is no model: "
                    "leave eval.env out"
                )
            rows = min(config.eval.num_envs, config.eval.episodes)
            self._real = build(config.eval.env | {"num_envs": rows}, VecEnv)
            theirs = self.imagined.real_spec
            require_same(self._real.spec, theirs, "eval.env", "the model's environment")
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
        env = build(self.config.environment | {"num_envs": rows}, VecEnv)
        if self.imagined is not None and isinstance(self.reward, AugmentsEnv):
            return self.reward.augment_env(env)  # which may detect success
        return env

    def close(self) -> None:
        if self._env is not None and not self.config.eval.shared:
            self._env.close()
        if self._real is not None:
            self._real.close()

    def __call__(self, policy: Policy, step: int) -> dict[str, float]:
        """Success rate and return of `policy`; `step` names the file of a grid's tasks."""
        policy.eval()
        settings = self.config.eval
        env = self.env
        episodes = settings.episodes if self.grid is None else len(self.grid.tasks)
        from embodied.evaluation.evaluate import evaluate

        result = evaluate(policy, env, episodes, settings.seed, self.config.execute)
        metrics = result.metrics()
        if self.imagined is not None:
            metrics = self._beside_real(metrics, self.imagined.deployed(policy.inference_policy()))
        policy.train()
        if self.grid is not None:
            self.grid.write(Path(self.config.out), step, result)
        return metrics

    def _beside_real(self, imagined: dict[str, float], policy: Policy) -> dict[str, float]:
        """The metrics of `policy` in the real environment with the success and return of those in
        the model; without `eval.env` those in the model, whose success is called imagined."""
        settings = self.config.eval
        own = {f"imagined_{k}": imagined[k] for k in ("success", "return") if k in imagined}
        if self._real is None:
            return {k: v for k, v in imagined.items() if k != "success"} | own
        from embodied.evaluation.evaluate import evaluate

        args = settings.episodes, settings.seed, self.config.execute
        return evaluate(policy.eval(), self._real, *args).metrics() | own


LONGEST = 1000  # steps of the episode whose reward components are written, at most
TERMS = "terms.json"


@torch.no_grad()
def write_terms(
    folder: Path,
    reward: HasComponents,
    policy: Policy,
    env: VecEnv,
    gamma: float,
    seed: int,
    execute: int | None = None,
) -> None:
    """Run the first evaluation episode of parallel env 0 and write the reward's components, one
    number per decision, to FOLDER/terms.json."""
    if isinstance(reward, AugmentsEnv):
        env = reward.augment_env(env)
    # The transitions of env 0's first episode, without exploration, and whether it succeeded.
    with forked(seed):
        rollout = Collector(env, policy, gamma, 1, execute, seed)
        rollout.actor = Actor(policy, env.num_envs, execute)
        kept: list[Tensors] = []
        won: bool | None = None
        for _ in range(LONGEST):
            rows, step = rollout.step()
            finished = rollout.finished
            at = [0] if finished is None else (finished == 0).nonzero().flatten().tolist()
            if rows and at:  # env 0 finished a decision
                kept.append({key: value[at[0] : at[0] + 1] for key, value in rows.items()})
            if "success" in step.log:
                won = bool(won) or bool(step.log["success"][0])
            if bool(step.ended[0]):
                break
    rows = tt.to(tt.cat(kept), device_of(policy))
    parts = {name: value.tolist() for name, value in reward.components(rows).items()}
    write_json(folder / TERMS, {"terms": parts, "success": won})
