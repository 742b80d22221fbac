"""Evaluation on chosen tasks: a fixed grid with one episode each, and the worst case for a policy.

    psi* = argmin_psi J(pi, psi),      psi the named elements of the task vector, in [0, 1]

First a grid that includes the ends of every range, then differential evolution (Storn and Price,
1997; scipy) that begins with the worst points of the grid. Each point is evaluated on the same
initial states, in which the other elements of the task vector are drawn uniformly. The least mean
of many noisy ones is too low, so the worst point is evaluated again, in episodes of its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.atomic_write import write_durably
from embodied.core.bounds import Bound, Count, CountOrZero
from embodied.core.build import ConfigError, nearest
from embodied.core.env import (
    HasHeldOutNames,
    HasHeldOutTasks,
    HasLevels,
    HasTaskParameters,
    Step,
    VecEnv,
)
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from embodied.evaluation.evaluate import Evaluation, evaluate
from embodied.evaluation.statistics import bootstrap_interval

FILE = "exam.jsonl"
"""The per-task results in a run folder."""
MAX_TASKS = 10_000


def grid(spec: Spec, each: int) -> Tensor:
    """The centres of `each` ** D cells of the task space, [N, D] (float32), the last element
    fastest."""
    if spec.task is None or not spec.task.size:
        raise ConfigError("eval.grid needs an environment with task parameters; this one has none")
    if each**spec.task.size > MAX_TASKS:
        raise ConfigError(
            f"eval.grid={each} with {spec.task.size} task parameters is {each**spec.task.size:,} "
            f"episodes; at most {MAX_TASKS:,}"
        )
    middles = [(i + 0.5) / each for i in range(each)]
    return torch.tensor(list(itertools.product(middles, repeat=spec.task.size)))


def held_out(env: VecEnv) -> Tensor | None:
    """The task vectors [N, D] that the environment reserves for evaluation; None if it has none."""
    keeper = find_protocol(env, HasHeldOutTasks)
    return None if keeper is None else keeper.held_out


def exam(env: VecEnv, episodes: int) -> tuple[VecEnv, int]:
    """`env` with its held-out tasks as episodes, if it has some, and how many of `episodes`."""
    tasks = held_out(env)
    if tasks is None:
        return env, episodes
    return TaskGridEval(env, tasks[:episodes]), len(tasks[:episodes])


class TaskGridEval(Wrapper):
    """Parallel env i of B runs tasks i, i + B, i + 2B, ... of `tasks` [N, D], cyclically: the order
    in which `evaluate` lists episodes."""

    def __init__(self, env: VecEnv, tasks: Tensor) -> None:
        super().__init__(env)
        self.tasks = tasks
        self.memory = {"begun": torch.arange(self.num_envs, device=self.device)}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        every = torch.arange(self.num_envs, device=self.device)
        self.memory["begun"] = torch.where(self.rows(mask), every, self.memory["begun"])
        return self.env.reset(seed, self._next_tasks(), mask)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        if not step.ended.any():
            return step
        following = {key: value.clone() for key, value in step.next_obs.items()}
        self.memory["begun"] = self.memory["begun"] + self.num_envs * step.ended
        obs = self.env.reset(None, self._next_tasks(), step.ended)
        return replace(step, obs=obs, next_obs=following)

    @property
    def names(self) -> list[dict[str, str]]:
        """`name` of each held-out task; nothing for a grid."""
        named = find_protocol(self.env, HasHeldOutNames)
        tasks, n = held_out(self.env), len(self.tasks)
        if named is None or tasks is None or not torch.equal(tasks[:n], self.tasks):
            return [{}] * n
        return [{"name": name} for name in named.held_out_names[:n]]

    def _next_tasks(self) -> Tensor:
        return self.tasks[self.memory["begun"].cpu() % len(self.tasks)].to(self.device)

    def write(self, folder: Path, step: int, result: Evaluation) -> None:
        """Append each task's result to the run's `exam.jsonl`; results of this step or later, from
        an interrupted run, are replaced."""
        won = [None] * len(self.tasks) if result.success is None else result.success.tolist()
        outcomes = zip(self.names, self.tasks, won, result.returns, result.lengths, strict=True)
        lines = [
            json.dumps(
                {
                    "step": step,
                    **name,
                    "task": [round(float(value), 5) for value in task],
                    "success": success,
                    "return": round(float(ret), 4),
                    "length": int(length),
                }
            )
            for name, task, success, ret, length in outcomes
        ]
        file = folder / FILE
        before = file.read_text().splitlines() if file.exists() else []
        kept = [line for line in before if json.loads(line)["step"] < step]
        write_durably(file, lambda sink: sink.write("\n".join([*kept, *lines, ""]).encode()))


Floats = NDArray[np.float64]
Score = Callable[[Floats], float]
WORST = "worst_case.json"
"""What `embodied eval RUN worst_case=true` writes, and `teacher.fixed` reads."""
MAX_POINTS = 2000  # of the grid


@dataclass(frozen=True)
class Config:
    names: tuple[str, ...] | None = None  # parameters that are searched (null: all)
    cells: Annotated[int, Bound(2)] = 4  # grid points of each parameter, both ends included
    episodes: Count = 20  # of each point that is tried
    generations: CountOrZero = 6  # of differential evolution after the grid (0: the grid only)
    population: Annotated[int, Bound(5)] = 10  # points of a generation
    metric: Literal["return", "success"] = "return"  # what the worst point has the least of
    seed: CountOrZero = 20_000  # of the initial states of the search


@dataclass
class Found:
    """The searched `names` [d], the `points` [n, d] that were tried in order, and their `scores`
    [n]. `worst` [d] has the least score, the first of equal ones."""

    names: tuple[str, ...]
    points: list[list[float]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    @property
    def worst(self) -> list[float]:
        return self.points[int(np.argmin(self.scores))]


def searched(env: VecEnv, names: Sequence[str] | None) -> tuple[tuple[str, ...], list[int]]:
    """The names of the parameters to search, and their places in the task vector. ConfigError."""
    task = env.spec.task
    if task is None or not task.size or find_protocol(env, HasLevels) is not None:
        raise ConfigError("worst_case needs an environment whose task vector has parameters")
    known = task.names or tuple(f"task{i}" for i in range(task.size))
    chosen = known if names is None else tuple(names)
    for name in chosen:
        if name not in known:
            raise ConfigError(f'search.names: no task parameter "{name}"{nearest(name, known)}')
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigError("search.names should list parameters, each once")
    return chosen, [known.index(name) for name in chosen]


def points_of(env: VecEnv, config: Config) -> int:
    """How many points a search tries at most. ConfigError as in `searched`."""
    names, _ = searched(env, config.names)
    return config.cells ** len(names) + config.generations * config.population


def search(names: tuple[str, ...], config: Config, score: Score) -> Found:
    """Minimise `score` over the unit cube of the parameters `names` [d]. ConfigError."""
    count = config.cells ** len(names)
    if count > MAX_POINTS:
        raise ConfigError(
            f"search.cells={config.cells} of {len(names)} parameters are {count:,} points; at most "
            f"{MAX_POINTS:,}: fewer cells, or search.names=[...] of {', '.join(names)}"
        )
    found = Found(names)
    known: dict[bytes, float] = {}

    def tried(point: Floats) -> float:
        key = point.tobytes()
        if key not in known:
            known[key] = score(point)
            found.points.append(point.tolist())
            found.scores.append(known[key])
        return known[key]

    ends = np.linspace(0, 1, config.cells)
    points = np.array(list(itertools.product(ends, repeat=len(names))))
    scores = [tried(point) for point in points]
    if config.generations:
        first = points[np.argsort(scores, kind="stable")[: config.population]]
        _evolve(first, config, tried)
    return found


def _evolve(first: Floats, config: Config, tried: Score) -> None:
    try:
        from scipy.optimize import differential_evolution
    except ModuleNotFoundError as error:
        advice = 'pip install "embodied-rl[offline]", or search.generations=0'
        raise ConfigError(f"the search after the grid needs scipy: {advice}") from error
    missing = config.population - len(first)
    random = np.random.default_rng(config.seed)
    begin: Any = np.concatenate([first, random.random((missing, first.shape[1]))])
    differential_evolution(
        tried,
        [(0.0, 1.0)] * first.shape[1],
        init=begin,
        maxiter=config.generations,
        polish=False,
        rng=random,
    )


@dataclass(frozen=True)
class WorstCase:
    """The searched points and the result at the worst one, in episodes of its own."""

    found: Found
    result: Evaluation
    values: dict[str, tuple[float, str]]  # of the worst parameters in their units, and these

    def metrics(self) -> dict[str, float]:
        """`worst_return` and `worst_success`, without the `eval/` prefix, as far as known."""
        means = self.result.metrics()
        known = [name for name in ("return", "success", "return_cvar10") if name in means]
        return {f"worst_{name}": means[name] for name in known}

    def __str__(self) -> str:
        each = self.values.items()
        at = ", ".join(f"{name} {value:.4g} {unit}".rstrip() for name, (value, unit) in each)
        low, high = self.interval
        mean = self.result.returns.mean().item()
        return (
            f"worst of {len(self.found.points)} points: {at}; return there {mean:,.2f} "
            f"[{low:,.2f}, {high:,.2f}]"
        )

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% bootstrap interval of the mean return at the worst point."""
        return bootstrap_interval(self.result.returns, lambda drawn: drawn.mean(1), samples=2000)

    def to_json(self) -> dict[str, Any]:
        """What `worst_case.json` has."""
        found, returns = self.found, self.result.returns
        won = {} if self.result.success is None else {"successes": int(self.result.success.sum())}
        return {
            "worst": dict(zip(found.names, found.worst, strict=True)),
            "values": {name: [value, unit] for name, (value, unit) in self.values.items()},
            "episodes": len(returns),
            "return": returns.mean().item(),
            "interval": [*self.interval],
            **won,
            "names": list(found.names),
            "points": found.points,
            "scores": found.scores,
        }


def worst_case(
    policy: Policy,
    env: VecEnv,
    config: Config,
    episodes: int,
    seed: int,
    execute: int | None = None,
    each_point: Callable[[int], None] | None = None,
) -> WorstCase:
    """The worst parameters of `env` for a policy, and its result there in `episodes` episodes with
    initial states of `seed`; `each_point` hears how many points were tried. ConfigError."""
    names, places = searched(env, config.names)
    tried = itertools.count(1)

    def played(point: Floats, count: int, number: int) -> Evaluation:
        fixed = TaskGridEval(env, tasks_at(env.spec, places, point, count, number))
        return evaluate(policy, fixed, count, number, execute)

    def score(point: Floats) -> float:
        result = played(point, config.episodes, config.seed)
        if each_point is not None:
            each_point(next(tried))
        if config.metric == "return":
            return result.returns.double().mean().item()
        if result.success is None:
            raise ConfigError("search.metric=success: the environment reports no success")
        return result.success.double().mean().item()

    found = search(names, config, score)
    worst = np.array(found.worst)
    return WorstCase(found, played(worst, episodes, seed), native(env, names, places, worst))


def tasks_at(spec: Spec, places: list[int], point: Floats, n: int, seed: int) -> Tensor:
    """n task vectors [n, D] (float32) with the elements `places` at `point`; the others are drawn
    uniformly, the same for every point."""
    assert spec.task is not None
    random = torch.Generator().manual_seed(seed)
    tasks = torch.rand(n, spec.task.size, generator=random)
    tasks[:, places] = torch.from_numpy(point).float()
    return tasks


def native(
    env: VecEnv, names: tuple[str, ...], places: list[int], point: Floats
) -> dict[str, tuple[float, str]]:
    """The parameters at `point` in their own units, with these; in [0, 1] where the environment
    does not say."""
    described = find_protocol(env, HasTaskParameters)
    if described is None:
        return {name: (float(value), "") for name, value in zip(names, point, strict=True)}
    own = [described.parameters[place] for place in places]
    ends = [(each.low, each.high - each.low, each.unit) for each in own]
    pairs = zip(names, point, ends, strict=True)
    return {name: (low + float(at) * width, unit) for name, at, (low, width, unit) in pairs}
