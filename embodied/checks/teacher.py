"""Checks of a teacher: tasks that can be played, outcomes in any order, own randomness, resume.

First, by what teachers need: task spaces, environments and simulated students.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.checks.check import alike, checks_of, from_file, require
from embodied.core.build import Node, build, resolve
from embodied.core.config_fields import complete
from embodied.core.env import Step, VecEnv
from embodied.core.remembered import pack, unpack
from embodied.core.spec import Leaf, Spec
from embodied.core.wrapper import Wrapper
from embodied.envs.fr3.env import Config, Fr3
from embodied.envs.maze.env import Config as MazeConfig
from embodied.envs.maze.env import Maze
from embodied.teachers.resets.reset_distribution import DEFAULT_RESET, ResetStateWrapper
from embodied.teachers.teacher import (
    Curriculum,
    Need,
    Outcome,
    StudentEstimates,
    TaskWrapper,
    Teacher,
    TwoAgentTeacher,
)

PLAYER = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "reach", "quality": 1.0}
FILL = "none"  # the mode that fills the archive


def ready(node: Mapping[str, Any], spec: Spec, folder: Path) -> dict[str, Any]:
    """`node` with what users must provide: an archive of two past students, or a second agent."""
    node = complete(node)
    if "archive" not in node:
        return {**node, "player": PLAYER} if "player" in node else dict(node)
    room = folder / "archive"
    if not room.exists():
        for seed in (1, 2):
            past = {**node, "archive": str(room), "stepping": FILL, "epoch": 600}
            student = build(past, Teacher, spec=spec, seed=seed)
            play(
                lambda task: 1.5 - float(task.mean()), student, 700, flight=16
            )  # some are in flight
    return {**node, "archive": str(room), "epoch": 600, "lively": 0.02}


SMALL: dict[str, Any] = {
    **{"every": 60, "iterations": 10, "pretrain": 10, "steps": 5, "warmup": 40, "most": 30},
    **{"size": 10, "batch": 16, "episodes": 3, "pool": 64, "latent": 4},
}


def need(target: str) -> Need:
    """What teacher `target` needs of an environment."""
    return resolve(target, Curriculum).needs


def small(target: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` of sizes with which a teacher has learned something after a few dozen episodes."""
    config = typing.get_type_hints(resolve(target, Curriculum).__init__)["config"]
    return {"_target_": target, **_shrunk(config, settings)}


def _shrunk(config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Whole numbers no larger than those of SMALL, in configurations within it too."""
    kinds, out = typing.get_type_hints(config), dict(settings)
    out.pop("_target_", None)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(kinds[field.name]):
            out[field.name] = _shrunk(kinds[field.name], out.get(field.name, {}))
        elif field.name in SMALL:
            out[field.name] = min(SMALL[field.name], settings.get(field.name, field.default))
    return out


@dataclass(frozen=True)
class TeacherSubject:
    """The node of a teacher; `learns` is false for one that outcomes do not change."""

    node: Node
    learns: bool | None = None


class Classroom:
    """A teacher's settings, made small, and what it is checked with: three task parameters, one
    without width, one narrowed."""

    names = ("goal_x", "goal_y", "goal_z")
    low, high = torch.tensor([0.2, 0.5, 0.0]), torch.tensor([0.6, 0.5, 1.0])
    shape: tuple[int, ...] = (3,)

    def __init__(self, node: Node, folder: Path) -> None:
        self.node = self.completed(small(node["_target_"], node), folder)

    def completed(self, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        """A YAML's `settings`, ready to be built."""
        box = {self.names[0]: [0.2, 0.6], self.names[1]: [0.5, 0.5]}
        return ready(settings, self.spec, folder) | {"box": box}

    @property
    def spec(self) -> Spec:
        task = Leaf((3,), low=0.0, high=1.0, names=self.names)
        return Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), 0.1, task)

    def context(self) -> dict[str, Any]:
        """What a teacher is built with."""
        return {"spec": self.spec}

    def make(self, seed: int = 0) -> Any:
        return build(self.node, Curriculum, **self.context(), seed=seed)

    def valid(self, tasks: Tensor, teacher: Any) -> bool:
        """Whether such episodes can be played."""
        inside = (tasks >= self.low - 1e-6) & (tasks <= self.high + 1e-6)
        return tasks.dtype == torch.float32 and bool(inside.all())

    def require_playable(self, tasks: Tensor, teacher: Teacher) -> None:
        """ContractError unless such episodes can be played."""
        require(self.valid(tasks, teacher), f"it proposes tasks out of bounds: {tasks[:3]}")

    def require_finite_metrics(self, teacher: Teacher) -> None:
        bad = [name for name, value in teacher.metrics().items() if not np.isfinite(value)]
        require(not bad, f"metric {bad[0] if bad else ''} is not finite")

    def ease(self, task: Tensor) -> float:
        """How likely a student is to succeed, in the end."""
        return 1.5 - float(task.mean())

    def with_env(self) -> tuple[Any, VecEnv]:
        """A teacher and an environment whose episodes are those that it chooses: FR3 reach."""
        env = Fr3(Config(task="reach", num_envs=2, threads=1, horizon=2))
        node = {**self.node, "signal": "success"}
        teacher: Any = build(node, Curriculum, spec=env.spec, seed=0)
        return teacher, TaskWrapper(env, teacher)


class Help(Classroom):
    """One of the task parameters is how much help there is."""

    names = ("cube_x", "cube_y", "help")

    def with_env(self) -> tuple[Any, VecEnv]:
        """FR3 lift with a magnet."""
        inner = {
            "_target_": "embodied.envs.fr3.env.Fr3",
            "task": "lift",
            "threads": 1,
            "horizon": 2,
        }
        magnet = {"_target_": "embodied.envs.fr3.assist_force.AssistForce", "body": "cube"}
        wrapped = {"_target_": "embodied.envs.wrappers.stack.Wrapped", "num_envs": 2}
        env = build({**wrapped, "env": inner, "wrappers": [magnet]}, VecEnv)
        teacher: Any = build(self.node, Curriculum, spec=env.spec, seed=0)
        return teacher, TaskWrapper(env, teacher)


@functools.cache
def small_mazes() -> Maze:
    return Maze(MazeConfig(side=5, blocks=8, num_envs=2, horizon=2))


class Levels(Classroom):
    """Small mazes."""

    shape = (28,)

    def completed(self, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        return settings

    def context(self) -> dict[str, Any]:
        return {"spec": small_mazes().spec, "levels": small_mazes().levels}

    def valid(self, tasks: Tensor, teacher: Any) -> bool:
        """They can be solved, and are not held out."""
        fit = small_mazes().levels.fit(tasks.double().numpy())
        return tasks.dtype == torch.float32 and bool(fit.all())

    def ease(self, task: Tensor) -> float:
        return 0.7

    def with_env(self) -> tuple[Any, VecEnv]:
        """With a second student that stands still, or a first that learns at once."""
        maze, teacher = small_mazes(), self.make()
        if isinstance(teacher, TwoAgentTeacher):
            other = teacher.antagonist_env(maze, lambda: Maze(maze.config))
            other.reset(1)
            still = torch.zeros(2, dtype=torch.int64)
            env = teacher.protagonist_env(maze, None)
            return teacher, TwoAgents(env, teacher, lambda obs=None: other.step(still))
        if not teacher.uses_estimates:
            return teacher, TaskWrapper(maze, teacher)
        return teacher, _Estimated(maze, teacher, None, StudentEstimates(teacher))


class TwoAgents(Wrapper):
    """After each step the teacher steps the second agent."""

    def __init__(self, env: VecEnv, teacher: Any, step_second: Any) -> None:
        super().__init__(env)
        self.teacher, self.step_second = teacher, step_second

    def step(self, action: Tensor) -> Step:
        return self.teacher.after_step(self.env.step(action), self.step_second)


class _Estimated(TaskWrapper):
    """The student gives its estimates of every step."""

    def step(self, action: Tensor) -> Any:
        step = super().step(action)
        assert self.estimates is not None
        self.estimates.add_steps(step.log["ticket"], torch.ones(2), torch.zeros(2))
        return step


@functools.cache
def reach() -> Fr3:
    return Fr3(Config(task="reach", num_envs=2, threads=1, horizon=20))


class States(Classroom):
    """FR3 reach, whose states can be saved; a script plays."""

    shape = ()

    def completed(self, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        return ready(settings, self.spec, folder) | {"every": 2}

    def context(self) -> dict[str, Any]:
        return {"spec": reach().spec, "env": reach()}

    def valid(self, tasks: Tensor, teacher: Any) -> bool:
        """A saved state's number, or the environment's own initial state."""
        known = (tasks == DEFAULT_RESET) | ((tasks >= 0) & (tasks < len(teacher.paths)))
        return tasks.dtype == torch.int64 and bool(known.all())

    def ease(self, task: Tensor) -> float:
        return 0.7

    def with_env(self) -> tuple[Any, VecEnv]:
        node = {**self.node, "limit": 2, "usual": 0.0, "steps": 0}
        teacher: Any = build(node, Curriculum, **self.context(), seed=0)
        return teacher, ResetStateWrapper(reach(), teacher)


KINDS = {"tasks": Classroom, "help": Help, "levels": Levels, "states": States}
GAME = "counts"
"""What the teachers need that choose no tasks, but have two policies act in turns."""
EPISODES = 180
OWN_CLOCKS = ("pending", "issued", "dropped", "clock", "random")


@contextmanager
def classroom(subject: TeacherSubject) -> Iterator[Classroom]:
    with tempfile.TemporaryDirectory() as folder:
        yield KINDS[need(subject.node["_target_"])](subject.node, Path(folder))


def outcome(*scores: float) -> Outcome:
    """Episodes of five steps with such returns; the student expected half."""
    value = torch.tensor(scores)
    won = torch.where(value.isnan(), value, (value > 0.5).float())
    return Outcome(value, won, torch.full_like(value, 5), value, value, 0.5 * value)


def play(
    ease: Callable[[Tensor], float], teacher: Teacher, episodes: int, flight: int = 4, seed: int = 0
) -> Tensor:
    """The tasks of `episodes`, `flight` at a time, which end in random order; the student succeeds
    as a task's `ease` says, and gets better with time. A second one plays as many, and is about as
    good."""
    random = np.random.default_rng(seed)
    rival = getattr(teacher, "rival", None)
    air, seen = list[tuple[Tensor, Tensor]](), list[Tensor]()
    for played in range(episodes):
        air.append(teacher.sample(1))
        seen.append(air[-1][0])
        if len(air) == flight:
            task, ticket = air.pop(int(random.integers(flight)))
            likely = ease(task) - 0.5 * (played < episodes / 2)
            teacher.update(ticket, outcome(float(random.random() < likely)))
        if rival is not None:
            rival.update(rival.sample(1)[1], outcome(float(random.random() < 0.5)))
    return torch.cat(seen)


def learned(teacher: Teacher) -> dict[str, Any]:
    """All that it remembers but which episodes there were."""
    state = pack(teacher.get_state())
    state.pop("recent", None)  # what the log describes
    return {key: value for key, value in state.items() if key not in OWN_CLOCKS}


def it_can_be_built(subject: TeacherSubject) -> None:
    """It can be built, and needs what an environment can have."""
    if need(subject.node["_target_"]) != GAME:
        with classroom(subject) as room:
            room.make()


def its_tasks_can_be_played(subject: TeacherSubject) -> None:
    """Its tasks are within bounds and not always the same, before and after it learns."""
    with classroom(subject) as room:
        teacher = room.make()
        before = learned(teacher)
        tasks = play(room.ease, teacher, EPISODES)
        changed = not alike(before, learned(teacher))
        if subject.learns is not None:
            require(changed == subject.learns, f"outcomes change it: {changed}")
        require(
            tasks.shape == (EPISODES, *room.shape),
            f"sample(1) gives {list(tasks.shape[1:])}, should be {list(room.shape)}",
        )
        room.require_playable(tasks, teacher)
        require(len(tasks.unique(dim=0)) > 3, "it proposes fewer than four different tasks")
        room.require_finite_metrics(teacher)


def outcomes_come_in_any_order(subject: TeacherSubject) -> None:
    """Several episodes at once, which end in any order; each ends once."""
    with classroom(subject) as room:
        teacher, tickets = room.make(), torch.empty(0)
        for turn in range(20):
            tasks, tickets = teacher.sample(8)
            require(tasks.shape == (8, *room.shape), f"sample(8) gives {list(tasks.shape)}")
            room.require_playable(tasks, teacher)
            fine = tickets.shape == (8,) and tickets.dtype == torch.int64
            require(fine and len(set(tickets.tolist())) == 8, "tickets should be int64 [n], unique")
            order = torch.from_numpy(np.random.default_rng(turn).permutation(8))
            for part in order.split(4):
                teacher.update(tickets[part], outcome(0.1, 0.9, 0.5, 0.2))
        require(not teacher.pending, "finished episodes are still pending")
        try:
            teacher.update(tickets[:1], outcome(1.0))
        except KeyError:
            return
        require(False, "an episode ends twice: update should raise KeyError")


def outcomes_that_are_no_numbers_change_nothing(subject: TeacherSubject) -> None:
    """NaN and infinite outcomes are ignored with one warning; finite ones beside them count."""
    with classroom(subject) as room:
        teacher = room.make()
        play(room.ease, teacher, 60)
        _, tickets = teacher.sample(12)
        before = learned(teacher)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for part, bad in zip(tickets.split(4), (np.nan, np.inf, -np.inf), strict=True):
                teacher.update(part, Outcome(*(torch.full((4,), bad),) * 6))
        lines = [str(each.message) for each in warned if "is NaN" in str(each.message)]
        require(len(lines) == 1, f"{len(lines)} warnings about NaN, should be one")
        require(alike(before, learned(teacher)), "outcomes that are NaN change it")
        # Episodes in the environment's own initial states are not counted.
        require(3 <= teacher.dropped <= 12, f"dropped={teacher.dropped} of 12 NaN outcomes")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            teacher.update(teacher.sample(2)[1], outcome(np.nan, 1.0))
            tasks = play(room.ease, teacher, 30)
        room.require_playable(tasks, teacher)


def an_episode_may_never_end(subject: TeacherSubject) -> None:
    """Episodes whose outcome never comes, or late, stop nothing."""
    with classroom(subject) as room:
        teacher = room.make()
        _, stuck = teacher.sample(3)
        room.require_playable(play(room.ease, teacher, EPISODES, flight=1), teacher)
        pending = set(stuck.tolist()) == set(teacher.pending)
        require(pending, "it forgets episodes that have not ended")
        teacher.update(stuck, outcome(1.0, 1.0, 1.0))  # late, but known


def few_episodes_suffice(subject: TeacherSubject) -> None:
    """It proposes tasks after 0, 1 or 3 episodes."""
    for episodes in (0, 1, 3):
        with classroom(subject) as room:
            teacher = room.make()
            if episodes:
                play(room.ease, teacher, episodes, flight=1)
            room.require_playable(teacher.sample(5)[0], teacher)
            room.require_finite_metrics(teacher)


def equal_scores_are_no_problem(subject: TeacherSubject) -> None:
    """It proposes tasks where all outcomes are 0, or all are 1."""
    for score in (0.0, 1.0):
        with classroom(subject) as room:
            teacher = room.make()
            for _ in range(12):
                teacher.update(teacher.sample(10)[1], outcome(*[score] * 10))
            room.require_playable(teacher.sample(20)[0], teacher)
            room.require_finite_metrics(teacher)


def it_resumes_exactly(subject: TeacherSubject) -> None:
    """As a checkpoint keeps it, with episodes running, into a teacher of another seed."""
    with classroom(subject) as room:
        teacher, resumed = room.make(), room.make(seed=5)
        play(room.ease, teacher, 110)
        state = unpack(from_file(pack(teacher.get_state())))
        first = play(room.ease, teacher, 110, seed=1)
        for _ in range(2):  # the second time: what was saved has not moved
            resumed.set_state(state)
            kept = resumed.pending.keys() == state["pending"].keys()
            again = play(room.ease, resumed, 110, seed=1)
            same = torch.equal(first, again) and alike(learned(teacher), learned(resumed))
            require(kept and same, "it does not resume exactly: name its state in `remembered`")


def only_the_seed_decides(subject: TeacherSubject) -> None:
    """Its random numbers come from self.random: global generators neither matter nor move."""
    with classroom(subject) as room:
        require_own_randomness(lambda seed: play(room.ease, room.make(seed), 90))


def require_own_randomness(played: Callable[[int], Any]) -> None:
    """ContractError if global generators matter to `played(seed)`, or are moved by it."""
    seen = list[Any]()
    for seed, other in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(other)
        np.random.seed(other)
        before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore
        seen.append(played(seed))
        still = torch.equal(before, torch.get_rng_state())
        still &= np.array_equal(legacy, np.random.get_state()[1])  # type: ignore
        require(still, "it draws from torch's or numpy's global generator: use self.random")
    require(alike(seen[0], seen[1]), "global generators change its tasks: use self.random")
    require(not alike(seen[0], seen[2]), "its seed changes nothing")


def it_chooses_the_episodes_of_an_environment(subject: TeacherSubject) -> None:
    """In an environment each episode, of two steps, is the one that it chose."""
    with classroom(subject) as room:
        teacher, env = room.with_env()
        env.reset(0)
        leaf = env.spec.act
        dtype = torch.int64 if leaf.dtype == "int64" else torch.float32
        tickets = list[int]()
        for _ in range(6):
            step = env.step(torch.zeros((2, *leaf.shape), dtype=dtype))
            tickets += step.log["ticket"].tolist()
            finite = all(value.float().isfinite().all() for value in step.obs.values())
            require(finite, "its tasks lead to observations that are not finite")
        chosen = teacher.issued >= 2 + 6 and len(set(tickets)) >= 6
        require(chosen and teacher.dropped == 0, f"{teacher.issued} tasks for 8 episodes")
        once = all(tickets.count(each) <= 2 for each in tickets)
        require(once, "an episode of two steps has its ticket more than twice")


CHECKS = checks_of(__name__)
