"""Checks of a teacher that chooses no tasks, but has two policies act in alternating turns."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.checks.check import alike, checks_of, from_file, require
from embodied.checks.teacher import TeacherSubject, require_own_randomness
from embodied.core.build import build
from embodied.core.env import Step
from embodied.core.remembered import pack, unpack
from embodied.core.wrapper import Wrapper
from embodied.envs.toy.rooms import Config as RoomsConfig
from embodied.envs.toy.rooms import Rooms
from embodied.envs.wrappers.episodic_density import Config as DensityConfig
from embodied.envs.wrappers.episodic_density import EpisodicDensity
from embodied.teachers.teacher import Curriculum

TURN = {"steps": 3, "free": 0.34}


class NanRewards(Wrapper):
    """Rewards that are no numbers."""

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        step.reward.fill_(torch.nan)
        return step


class Game:
    """A game of turns of three steps in small rooms; both policies act at random."""

    def __init__(
        self, subject: TeacherSubject, seed: int = 0, inner: type[Wrapper] = Wrapper
    ) -> None:
        self.env, self.random = rooms(inner), np.random.default_rng(seed)
        node = subject.node | TURN
        self.teacher: Any = build(node, Curriculum, spec=self.env.spec, env=self.env, seed=seed)
        self.control = self.teacher.antagonist_env(self.env, lambda: rooms(inner))
        self.explore = self.teacher.protagonist_env(self.env, None)
        self.explore.reset(seed)

    def move(self, obs: Any = None) -> None:
        """The second policy's step."""
        self.control.step(self.actions())

    def actions(self) -> Tensor:
        high = int(self.env.spec.act.high)  # type: ignore[arg-type]
        return torch.from_numpy(self.random.integers(high + 1, size=2))

    def play(self, steps: int) -> list[Tensor]:
        """The first policy's rewards, ends and observations."""
        seen = list[Tensor]()
        for _ in range(steps):
            step = self.teacher.after_step(self.explore.step(self.actions()), self.move)
            seen += [step.reward, step.ended, *step.obs.values()]
        return seen


def rooms(inner: type[Wrapper]) -> EpisodicDensity:
    """Two parallel envs with an episodic density of observations."""
    inside = Rooms(RoomsConfig(num_envs=2, noisy=2, dark=1, horizon=50))
    return EpisodicDensity(DensityConfig(horizon=50), inner(inside))


def it_rewards_at_the_end_of_a_turn(subject: TeacherSubject) -> None:
    """Turns of three steps; rewards are finite, and come when a turn is over."""
    game = Game(subject)
    seen = game.play(12)
    width = len(seen) // 12
    rewards, ends = torch.stack(seen[::width]), torch.stack(seen[1::width])
    require(rewards.isfinite().all(), "its rewards are not finite")
    require(ends[2::3].all() and ends.sum() == 8, "a turn of three steps does not end after three")
    late = (rewards[2::3] != 0).all() and rewards.count_nonzero() == 8
    require(late, "rewards should come at the end of a turn only")
    require(game.teacher.metrics()["games"] == 2, "12 steps are two games")


def rewards_that_are_no_numbers_change_nothing(subject: TeacherSubject) -> None:
    """NaN rewards of the environment change nothing, and are warned of once."""
    sound, broken = Game(subject), Game(subject, inner=NanRewards)
    require(alike(sound.play(4), broken.play(4)), "NaN rewards of the environment change it")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        require(alike(sound.play(10), broken.play(10)), "NaN rewards of the environment change it")
    lines = [str(each.message) for each in warned if "not finite" in str(each.message)]
    require(len(lines) == 1, f"{len(lines)} warnings about rewards that are not finite")
    require(broken.teacher.dropped == 2 and sound.teacher.dropped == 0, "dropped should be 2")
    finite = all(np.isfinite(value) for value in broken.teacher.metrics().values())
    require(finite, "a metric is not finite")


def a_game_may_be_broken_off(subject: TeacherSubject) -> None:
    """After a reset a new game begins, as if there had been none."""
    game, other = Game(subject), Game(subject)
    game.play(4)
    unfinished = game.teacher.metrics()
    require(unfinished["games"] == 0, "a game that is not over is counted")
    require(all(np.isfinite(v) for v in unfinished.values()), "a metric is not finite")
    game.explore.reset(3)
    other.explore.reset(3)
    game.random = np.random.default_rng(4)
    first = game.play(7)
    other.random = np.random.default_rng(4)
    same = alike(first, other.play(7)) and game.teacher.games == 1
    require(same, "after a reset, the game before still matters")


def it_resumes_exactly(subject: TeacherSubject) -> None:
    """As a checkpoint keeps it, into a game of another seed."""
    game, resumed = Game(subject), Game(subject, seed=5)
    game.play(10)
    kept = {"teacher": pack(game.teacher.get_state()), "env": game.explore.get_state()}
    state = from_file(kept)
    game.random = np.random.default_rng(1)
    first = game.play(15)
    for _ in range(2):
        resumed.teacher.set_state(unpack(state["teacher"]))
        resumed.explore.set_state(state["env"])
        resumed.random = np.random.default_rng(1)
        same = alike(first, resumed.play(15))
        same &= resumed.teacher.metrics() == game.teacher.metrics()
        require(same, "it does not resume exactly")


def only_the_seed_decides(subject: TeacherSubject) -> None:
    """Global generators neither matter nor move."""
    require_own_randomness(lambda seed: Game(subject, seed=seed).play(13))


CHECKS = checks_of(__name__)
