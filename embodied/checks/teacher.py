"""Checks of a teacher: tasks that can be played, outcomes in any order, own randomness, resume."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.checks.check import checks_of, from_file, require
from embodied.checks.teacher_envs import GAME, KINDS, Box, need, small
from embodied.core.build import Node, build
from embodied.core.remembered import pack, unpack
from embodied.teachers.teacher import Curriculum, Outcome, Teacher

EPISODES = 180
OWN_CLOCKS = ("pending", "issued", "dropped", "clock", "random")


@dataclass(frozen=True)
class TeacherSubject:
    """The node of a teacher; `learns` is false for one that outcomes do not change."""

    node: Node
    learns: bool | None = None


class Classroom:
    """A teacher's settings, made small, and the environment that it is checked in."""

    def __init__(self, subject: TeacherSubject, folder: Path) -> None:
        target = subject.node["_target_"]
        self.box: Box = KINDS[need(target)]
        self.node = self.box.node(small(target, subject.node), folder)

    def make(self, seed: int = 0) -> Teacher:
        return build(self.node, Curriculum, **self.box.context(), seed=seed)  # type: ignore[return-value]

    def require_playable(self, tasks: Tensor, teacher: Teacher) -> None:
        """ContractError unless such episodes can be played."""
        require(self.box.valid(tasks, teacher), f"it proposes tasks out of bounds: {tasks[:3]}")

    def require_finite_metrics(self, teacher: Teacher) -> None:
        bad = [name for name, value in teacher.metrics().items() if not np.isfinite(value)]
        require(not bad, f"metric {bad[0] if bad else ''} is not finite")


@contextmanager
def classroom(subject: TeacherSubject) -> Iterator[Classroom]:
    with tempfile.TemporaryDirectory() as folder:
        yield Classroom(subject, Path(folder))


def outcome(*scores: float) -> Outcome:
    """Episodes of five steps with such returns; the student expected half."""
    value = torch.tensor(scores)
    won = torch.where(value.isnan(), value, (value > 0.5).float())
    return Outcome(value, won, torch.full_like(value, 5), value, value, 0.5 * value)


def play(box: Box, teacher: Teacher, episodes: int, flight: int = 4, seed: int = 0) -> Tensor:
    """The tasks of `episodes`, `flight` at a time, which end in random order; the student gets
    better with time. A second one plays as many, and is about as good."""
    random = np.random.default_rng(seed)
    rival = getattr(teacher, "rival", None)
    air, seen = list[tuple[Tensor, Tensor]](), list[Tensor]()
    for played in range(episodes):
        air.append(teacher.sample(1))
        seen.append(air[-1][0])
        if len(air) == flight:
            task, ticket = air.pop(int(random.integers(flight)))
            ease = box.ease(task) - 0.5 * (played < episodes / 2)
            teacher.update(ticket, outcome(float(random.random() < ease)))
        if rival is not None:
            rival.update(rival.sample(1)[1], outcome(float(random.random() < 0.5)))
    return torch.cat(seen)


def alike(one: Any, other: Any) -> bool:
    """Whether packed states are the same, to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7))
    return one == other or (one != one and other != other)


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
        tasks = play(room.box, teacher, EPISODES)
        changed = not alike(before, learned(teacher))
        if subject.learns is not None:
            require(changed == subject.learns, f"outcomes change it: {changed}")
        require(
            tasks.shape == (EPISODES, *room.box.shape),
            f"sample(1) gives {list(tasks.shape[1:])}, should be {list(room.box.shape)}",
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
            require(tasks.shape == (8, *room.box.shape), f"sample(8) gives {list(tasks.shape)}")
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
        play(room.box, teacher, 60)
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
            tasks = play(room.box, teacher, 30)
        room.require_playable(tasks, teacher)


def an_episode_may_never_end(subject: TeacherSubject) -> None:
    """Episodes whose outcome never comes, or late, stop nothing."""
    with classroom(subject) as room:
        teacher = room.make()
        _, stuck = teacher.sample(3)
        room.require_playable(play(room.box, teacher, EPISODES, flight=1), teacher)
        pending = set(stuck.tolist()) == set(teacher.pending)
        require(pending, "it forgets episodes that have not ended")
        teacher.update(stuck, outcome(1.0, 1.0, 1.0))  # late, but known


def few_episodes_suffice(subject: TeacherSubject) -> None:
    """It proposes tasks after 0, 1 or 3 episodes."""
    for episodes in (0, 1, 3):
        with classroom(subject) as room:
            teacher = room.make()
            if episodes:
                play(room.box, teacher, episodes, flight=1)
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
        play(room.box, teacher, 110)
        state = unpack(from_file(pack(teacher.get_state())))
        first = play(room.box, teacher, 110, seed=1)
        for _ in range(2):  # the second time: what was saved has not moved
            resumed.set_state(state)
            kept = resumed.pending.keys() == state["pending"].keys()
            again = play(room.box, resumed, 110, seed=1)
            same = torch.equal(first, again) and alike(learned(teacher), learned(resumed))
            require(kept and same, "it does not resume exactly: name its state in `remembered`")


def only_the_seed_decides(subject: TeacherSubject) -> None:
    """Its random numbers come from self.random: global generators neither matter nor move."""
    with classroom(subject) as room:
        require_own_randomness(lambda seed: play(room.box, room.make(seed), 90))


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
        teacher, env = room.box.with_env(room.node)
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
