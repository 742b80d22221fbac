"""Teacher: base class of automatic curriculum learning; samples the task of each episode.

Many episodes run in parallel. Each has a ticket (its id), under which the teacher's memo (which
region, bound or goal it sampled) is kept until the outcome is known. A `TaskWrapper` starts the
episodes and reports their outcomes.

Unsupervised environment design (UED): where the task vector encodes a level (`spec.task.unit` is
"level"), the environment has an attribute `levels` (`core.env.HasLevels`), a `LevelSpace`, which
samples and edits such vectors for a `LevelTeacher`.
"""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.bounds import Fraction, Number
from embodied.core.build import ConfigError, nearest
from embodied.core.env import ExpectsGivenTasks, Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol

Floats = NDArray[np.float64]


class TaskSpace:
    """The elements of a task vector (each in [0, 1]) between `low` and `high` [D].

    A teacher works with the d elements that vary, scaled to [0, 1]^d, so that distances mean the
    same in every environment. `names` are those elements' names; the others keep their values.
    """

    def __init__(self, task: Leaf | None, box: Mapping[str, tuple[float, float]]) -> None:
        if task is None or not task.size:
            raise ConfigError("this environment has no task parameters that a teacher could vary")
        names = task.names or tuple(f"task{i}" for i in range(task.size))
        low, high = np.zeros(task.size), np.ones(task.size)
        for name, (bottom, top) in box.items():
            if name not in names:
                raise ConfigError(f'no task parameter "{name}"{nearest(name, names)}')
            if not 0 <= bottom <= top <= 1:
                raise ConfigError(
                    f"the box of {name} is [{bottom:g}, {top:g}]; it needs 0 <= low <= high <= 1"
                )
            low[names.index(name)], high[names.index(name)] = bottom, top
        self.low = low
        self.high = high
        self.moving = np.flatnonzero(high > low)
        if not len(self.moving):
            raise ConfigError("teacher.box fixes every task parameter: none is left to vary")
        self.names = tuple(names[i] for i in self.moving)

    def __len__(self) -> int:
        """d: the number of elements that vary."""
        return len(self.names)

    def to_env(self, cube: Floats) -> Floats:
        """Points [n, d] of the cube as task vectors [n, D]."""
        tasks = np.repeat(self.low[None], len(cube), 0)
        width = (self.high - self.low)[self.moving]
        tasks[:, self.moving] += np.clip(cube, 0, 1) * width
        return tasks


def named_task(
    space: TaskSpace, named: Mapping[str, float], default: float, setting: str
) -> Floats:
    """The point [d] of the unit cube at which task parameters have the `named` values.

    Values are those of the task vector, in [0, 1]; parameters that are not named get `default` (a
    share of their box). ConfigError names `setting` where a name or a value is not allowed.
    """
    point = np.full(len(space), default)
    for name, value in named.items():
        if name not in space.names:
            raise ConfigError(
                f'teacher.{setting}: "{name}" is no task parameter that varies'
                f"{nearest(name, space.names)}"
            )
        at = space.names.index(name)
        low, high = (end[space.moving[at]] for end in (space.low, space.high))
        if not low <= value <= high:
            raise ConfigError(
                f"teacher.{setting}: {name}={value:g} is outside its box [{low:g}, {high:g}]"
            )
        point[at] = (value - low) / (high - low)
    return point


FILE = "tasks.jsonl"


class EpisodeLog:
    """The task and the outcome of every training episode, a JSON line each in `file`; a resumed run
    truncates it to the length at its checkpoint."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, tickets: Sequence[int], tasks: Floats, columns: dict[str, Floats]) -> None:
        """Add finished episodes: tasks [n, D] in [0, 1] and named numbers [n] (NaN: unknown)."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for i, ticket in enumerate(tickets):
            values = {
                name: round(float(column[i]), 6) if np.isfinite(column[i]) else None
                for name, column in columns.items()
            }
            task = [round(float(value), 5) for value in tasks[i]]
            lines.append(json.dumps({"episode": ticket, "task": task, **values}))
        with self.file.open("a") as sink:
            sink.write("".join(f"{line}\n" for line in lines))

    def get_state(self) -> dict[str, Any]:
        return {"bytes": self.file.stat().st_size if self.file.exists() else 0}

    def set_state(self, state: dict[str, Any]) -> None:
        if self.file.exists() and self.file.stat().st_size > state["bytes"]:
            with self.file.open("r+b") as file:
                file.truncate(state["bytes"])


@dataclass(frozen=True)
class Outcome:
    """Outcomes of n episodes: undiscounted return `ret` [n], `success` [n] (1, 0 or NaN if
    unknown), `length` [n] in steps.

    For teachers with `uses_estimates`, also means over the steps of an episode of the student's
    positive advantages (`gain` [n]), absolute advantages (`error` [n]) and values (`value` [n]);
    NaN if unknown.
    """

    ret: Tensor
    success: Tensor
    length: Tensor
    gain: Tensor | None = None
    error: Tensor | None = None
    value: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings that all teachers of tasks have."""

    box: Mapping[str, tuple[Fraction, Fraction]] = field(default_factory=dict)  # ranges by name
    signal: Literal["success", "return"] = "success"  # score of an episode
    returns: tuple[Number, Number] = (0.0, 1.0)  # returns that have the scores 0 and 1


Need = Literal["tasks", "levels", "states", "help", "counts"]


class Curriculum:
    """The role of `teacher=`: a `Teacher`, a distribution of initial states, or a second agent."""

    needs: ClassVar[Need] = "tasks"
    """What the environment must have: a task vector, `levels` (`HasLevels`), `states` that can be
    saved, `help` (privileged assistance in the task vector), or an episodic density of observations
    (`counts`)."""
    uses_estimates: ClassVar[bool] = False
    """Whether outcomes come with the student's estimates, after the end of the episode, and
    `trains` selects the episodes to learn from."""

    def metrics(self) -> dict[str, float]:
        return {}


PATIENCE = 100  # episodes begun per running one, after which an older one is not waited for


class EpisodeTeacher(Remembered, Curriculum, ABC):
    """Keeps what it chose for each running episode under its ticket, until the outcome is known.

    Subclasses take random numbers from `self.random` only and name their state in `remembered`, so
    that a run resumes exactly.
    """

    in_order: ClassVar[bool] = False
    """Whether `learn` gets episodes in the order in which they began. Of many parallel ones the
    short ones end first: a mean of the first scores after a change would be that of these alone."""
    remembered = ("random", "pending", "unlearned", "issued", "dropped")

    def __init__(self, config: Any, seed: int) -> None:
        self.config = config
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.pending: dict[int, tuple[Any, Any]] = {}
        self.unlearned: dict[int, tuple[Any, Any, Any]] = {}  # with the scores, by ticket
        self.issued = 0
        self.dropped = 0

    def _tickets(self, chosen: list[tuple[Any, Any]]) -> Tensor:
        """Tickets [n] (int64) of new episodes, under which what was `chosen` is kept."""
        tickets = torch.arange(self.issued, self.issued + len(chosen))
        self.issued += len(chosen)
        self.pending |= dict(zip(tickets.tolist(), chosen, strict=True))
        return tickets

    def _due(self, ended: dict[int, tuple[Any, Any, Any]]) -> list[tuple[Any, Any, Any]]:
        """What to learn from now, after the episodes `ended`: choices, memos and scores. With
        `in_order` these wait for all that began before."""
        self.unlearned |= ended
        numbers = list(self.unlearned)
        if self.in_order:
            oldest = self.issued - PATIENCE * len(self.pending)
            first = next((number for number in self.pending if number >= oldest), self.issued)
            numbers = sorted(number for number in numbers if number < first)
        return [self.unlearned.pop(number) for number in numbers]

    def forget(self) -> None:
        """Drop the running episodes: they were interrupted."""
        self.pending.clear()
        self.unlearned.clear()

    def _ignore(self, count: int) -> None:
        """Count episodes that are ignored; warn of the first."""
        if count and not self.dropped:
            warnings.warn(
                f"teacher: the {self.config.signal} of an episode is NaN; such episodes are "
                "ignored (teacher.signal=return if the environment reports no success)",
                stacklevel=3,
            )
        self.dropped += count


class Teacher(EpisodeTeacher):
    """Subclasses sample tasks (`propose`, or `one` at a time) and learn from outcomes (`learn`)."""

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        if config.returns[0] >= config.returns[1]:
            raise ConfigError(
                f"teacher.returns={list(config.returns)} should be [low, high] with low < high"
            )
        super().__init__(config, seed)
        self.space = TaskSpace(spec.task, config.box)

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        """For `n` episodes: a point [d] of the unit cube and a memo for `learn`."""
        return [self.one() for _ in range(n)]

    def one(self) -> tuple[Floats, Any]:
        """A point and a memo for one episode."""
        raise NotImplementedError(f"{type(self).__name__} proposes nothing")

    @abstractmethod
    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        """Update from finished episodes at `points` [n, d] with `scores` [n] in [0, 1]."""

    def sample(self, n: int) -> tuple[Tensor, Tensor]:
        """Task vectors [n, D] (float32) for `n` episodes, and their tickets [n] (int64)."""
        return self.issue(self.propose(n))

    def issue(self, proposed: list[tuple[Floats, Any]]) -> tuple[Tensor, Tensor]:
        """Task vectors and tickets of proposed points; stores their memos."""
        points = np.stack([point for point, _ in proposed])
        return torch.from_numpy(self.space.to_env(points)).float(), self._tickets(proposed)

    def update(self, ticket: Tensor, outcome: Outcome) -> None:
        """Report the outcomes of episodes `ticket` [n]. Episodes with a NaN score are ignored."""
        known = [self.pending.pop(number) for number in ticket.tolist()]
        scores = self.scores(outcome)
        fine = np.atleast_1d(np.isfinite(scores).reshape(len(scores), -1).all(axis=1))
        self._ignore(int((~fine).sum()))
        each = zip(ticket.tolist(), known, scores, fine, strict=True)
        if due := self._due({number: (*its, score) for number, its, score, good in each if good}):
            points, memos, learned = zip(*due, strict=True)
            self.learn(np.stack(points), np.array(learned), list(memos))

    def trains(self, ticket: Tensor) -> Tensor:
        """[n] (bool): whether the student trains on episodes `ticket` [n]."""
        return torch.ones(len(ticket), dtype=torch.bool)

    def scores(self, outcome: Outcome) -> Floats:
        """[n] in [0, 1] (some teachers: [n, k]); NaN if unknown."""
        if self.config.signal == "success":
            return bounded(outcome.success.double().cpu().numpy())
        low, high = self.config.returns
        return bounded((outcome.ret.double().cpu().numpy() - low) / (high - low))


def bounded(scores: Floats) -> Floats:
    """Scores [n] clipped to [0, 1]; NaN where they are infinite."""
    return np.where(np.isfinite(scores), scores, np.nan).clip(0, 1)


LEVEL = "level"  # `Leaf.unit` of task vectors that encode levels
RECENT = 64  # newest levels, whose traits are logged


class LevelSpace(Protocol):
    """Levels as vectors [n, D] in [0, 1]. Sampled and edited levels are solvable and never among
    those held out for evaluation."""

    size: int  # D
    held_out: Floats

    def random(self, n: int, random: np.random.Generator) -> Floats:
        """n random levels."""
        ...

    def plain(self, n: int, random: np.random.Generator) -> Floats:
        """n of the simplest levels (for example, without walls)."""
        ...

    def mutate(self, levels: Floats, edits: int, random: np.random.Generator) -> Floats:
        """A copy of each level with `edits` small random edits (ACCEL)."""
        ...

    def solvable(self, levels: Floats) -> NDArray[np.bool_]:
        """[n]: whether the level can be solved."""
        ...

    def picture(self, level: Floats) -> NDArray[np.uint8]:
        """An image of one level [D], uint8 [h, w, 3]."""
        ...

    def traits(self, levels: Floats) -> dict[str, float]:
        """Means of named properties over levels, to log."""
        ...


@runtime_checkable
class TokenizedLevelSpace(LevelSpace, Protocol):
    """Levels that can be encoded as `length` tokens in [0, `words`). The first `marks` tokens
    each have a meaning of their own; the order of the others does not matter, and the last token
    value means nothing."""

    words: int
    length: int
    marks: int

    def spell(self, levels: Floats) -> NDArray[np.int64]:
        """Tokens [n, length] of levels [n, D], those after the marks in ascending order."""
        ...

    def built(self, words: NDArray[np.int64], random: np.random.Generator) -> Floats:
        """Levels [n, D] from tokens [n, length], in order; a token that would make the level
        unsolvable is skipped. What the tokens do not determine is sampled."""
        ...


class LevelTeacher(Teacher):
    """Subclasses choose levels (`choose`), whole: `box` has to stay empty."""

    needs = "levels"
    remembered = ("recent",)

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        if levels is None:
            raise ConfigError("this teacher needs an environment with levels (env=maze)")
        if config.box:
            raise ConfigError("teacher.box applies to task parameters; levels are chosen whole")
        super().__init__(config, spec, seed)
        if len(self.space) != levels.size:
            raise ConfigError(
                f"the task vector has {len(self.space)} elements, a level has {levels.size}"
            )
        self.levels = levels
        self.recent: list[Floats] = []

    @abstractmethod
    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        """For `n` episodes: a level [D] and a memo for `learn`."""

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        chosen = self.choose(n)
        self.recent = [*self.recent, *(level for level, _ in chosen)][-RECENT:]
        return chosen

    def metrics(self) -> dict[str, float]:
        return self.levels.traits(np.stack(self.recent)) if self.recent else {}


class StepSecondAgent(Protocol):
    """Steps all parallel envs of the second agent once, and updates it if an update is due.

    `obs`: its current observation; needed if the environment has changed since its last step.
    """

    def __call__(self, obs: Tensors | None = None) -> None: ...


@runtime_checkable
class TwoAgentTeacher(Protocol):
    """Protocol of teachers with a second agent, which the training loop trains too.

    The teacher makes the environments of both agents and decides after which steps of the first
    agent the second one is stepped. The second agent has the same kind of policy and learner as the
    first. Steps of both agents count as steps of the run. A run calls `antagonist_env`, then
    `protagonist_env`, and `after_step` after each step.
    """

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


SUMS = 4  # steps, gain, error, value


class StudentEstimates(Remembered):
    """Combines outcomes (`episodes_ended`) with means of the student's advantages and values over
    the steps of an episode (`add_steps`). An on-policy learner computes these per batch, which may
    hold parts of several episodes: sums are kept by ticket until an episode has ended and all of
    its steps are known. The scores of prioritized level replay (Jiang et al., 2021):

        gain = 1/T sum_t max(A_t, 0),   error = 1/T sum_t |A_t|,   value = 1/T sum_t V(s_t)
    """

    remembered = ("sums", "ended")

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.sums: dict[int, list[float]] = {}
        self.ended: dict[int, list[float]] = {}

    def episodes_ended(self, ticket: Tensor, outcome: Outcome) -> None:
        """Episodes `ticket` [n] have ended; estimates of their last steps follow."""
        columns = (outcome.ret, outcome.success, outcome.length)
        rows = torch.stack([column.double().cpu() for column in columns], 1).tolist()
        self.ended |= dict(zip(ticket.tolist(), rows, strict=True))

    def add_steps(self, ticket: Tensor, advantage: Tensor, value: Tensor) -> None:
        """Add estimates [N] of all steps since the last call, of episodes `ticket` [N]; then report
        the episodes that have ended to the teacher."""
        known, at = np.unique(ticket.cpu().numpy(), return_inverse=True)
        gap, worth = (part.double().cpu().numpy() for part in (advantage, value))
        columns = (np.ones_like(gap), gap.clip(0), abs(gap), worth)
        sums = np.stack([np.bincount(at, column, len(known)) for column in columns], 1)
        for number, row in zip(known.tolist(), sums.tolist(), strict=True):
            before = self.sums.get(number, [0.0] * SUMS)
            self.sums[number] = [a + b for a, b in zip(before, row, strict=True)]
        if not self.ended:
            return
        tickets = torch.tensor(list(self.ended))
        ends = torch.tensor(list(self.ended.values()), dtype=torch.float64)
        none = [0.0] * SUMS  # 0 / 0: NaN, unknown
        closed = torch.tensor([self.sums.pop(number, none) for number in self.ended]).double()
        self.ended = {}
        self.teacher.update(tickets, Outcome(*ends.T, *(closed[:, 1:] / closed[:, :1]).T))

    def clear(self) -> None:
        """Forget the running episodes: they were interrupted."""
        self.sums = {}
        self.ended = {}


class TaskSampler(Protocol):
    """Samples tasks and learns from outcomes: a teacher, or its queue for one of two agents."""

    def sample(self, n: int) -> tuple[Tensor, Tensor]: ...
    def update(self, ticket: Tensor, outcome: Outcome) -> None: ...
    def trains(self, ticket: Tensor) -> Tensor: ...
    def forget(self) -> None: ...


class EpisodeWrapper(Wrapper):
    """Counts the return, success and length of episodes; `log["ticket"]` [B] is their id."""

    def __init__(self, env: VecEnv, episode_log: EpisodeLog | None) -> None:
        super().__init__(env)
        self.episode_log = episode_log
        zeros = torch.zeros(self.num_envs, device=self.device)
        self.memory = {
            "ticket": zeros.long() - 1,
            **{name: zeros.clone() for name in ("return", "won", "length")},
        }

    def _count(self, step: Step) -> None:
        memory, success = self.memory, step.log.get("success")
        won = torch.full_like(memory["won"], torch.nan) if success is None else success.float()
        memory["return"] = memory["return"] + step.reward
        memory["won"] = torch.maximum(memory["won"], won)
        memory["length"] = memory["length"] + 1

    def _outcomes(self, at: Tensor) -> tuple[Tensor, Outcome]:
        """The tickets [n] and outcomes of the episodes in the envs `at` [n], on the CPU, where
        teachers compute."""
        outcome = Outcome(*(self.memory[key][at].cpu() for key in ("return", "won", "length")))
        return self.memory["ticket"][at].cpu(), outcome

    def _log_episodes(self, ticket: Tensor, outcome: Outcome, task: Tensor) -> None:
        if self.episode_log is not None:
            columns = {"return": outcome.ret, "success": outcome.success, "length": outcome.length}
            numbers = {name: value.numpy() for name, value in columns.items()}
            self.episode_log.add(ticket.tolist(), task.cpu().numpy(), numbers)

    def _begin_episodes(self, rows: Tensor, ticket: Tensor) -> None:
        """Episodes `ticket` [n] begin in the envs `rows` [B] (bool)."""
        for key in ("return", "won", "length"):
            self.memory[key] = self.memory[key].masked_fill(rows, 0)
        self._remember("ticket", rows, ticket)

    def _remember(self, key: str, rows: Tensor, values: Tensor) -> None:
        """Set a leaf of the memory to `values` [n] in the envs `rows` [B] (bool)."""
        at = rows.nonzero().flatten()
        self.memory[key] = self.memory[key].index_copy(0, at, values.to(self.device))


class TaskWrapper(EpisodeWrapper):
    """Resets finished envs with a task from `teacher.sample` and reports outcomes to the teacher.

    With `estimates`, outcomes are passed to it, where they wait for the student's value estimates;
    `log["learn"]` [B] (bool) then says whether the student trains on the step.
    """

    def __init__(
        self,
        env: VecEnv,
        teacher: TaskSampler,
        episode_log: EpisodeLog | None = None,
        estimates: StudentEstimates | None = None,
    ) -> None:
        super().__init__(env, episode_log)
        self.teacher = teacher
        self.estimates = estimates
        drawing = find_protocol(env, ExpectsGivenTasks)
        if drawing is not None:
            drawing.expect_given_tasks()
        size = env.spec.task.size if env.spec.task else 0
        self.memory["task"] = torch.zeros(self.num_envs, size, device=self.device)
        if estimates is not None:
            self.memory["learn"] = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """Interrupted episodes are not reported to the teacher."""
        if mask is None:
            self.teacher.forget()
            if self.estimates is not None:
                self.estimates.clear()
        return self._begin(self.rows(mask), seed)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        self._count(step)
        log = step.log | {k: self.memory[k] for k in ("ticket", "learn") if k in self.memory}
        if not step.ended.any():
            return replace(step, log=log)
        following = {key: value.clone() for key, value in step.next_obs.items()}
        at = step.ended.nonzero().flatten()
        ticket, outcome = self._outcomes(at)
        report = self.teacher.update if self.estimates is None else self.estimates.episodes_ended
        report(ticket, outcome)
        self._log_episodes(ticket, outcome, self.memory["task"][at])
        return replace(step, obs=self._begin(step.ended, None), next_obs=following, log=log)

    def _begin(self, rows: Tensor, seed: int | None) -> Tensors:
        task, ticket = self.teacher.sample(int(rows.sum()))
        self._begin_episodes(rows, ticket)
        if self.estimates is not None:
            self._remember("learn", rows, self.teacher.trains(ticket))
        self._remember("task", rows, task)
        return self.env.reset(seed, self.memory["task"], None if rows.all() else rows)
