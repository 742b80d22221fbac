"""State machine of reset-free training: when episodes end, when to recover, when to ask for help.

FastRLAP (Stachowicz et al., 2023) keeps a car on its track: checkpoints are goals, and a stuck car
recovers by itself. SERL (Luo et al., 2024) has a backward task that undoes the forward one. Both
are

    LEARNING --- lap, goal reached ------------------------------------> LEARNING (next goal)
        |------- crashed (terminated), stuck or late (truncated) ------> RECOVERY
        |------- too many of those in a row, or an object is lost -----> ERRORED
    RECOVERY --- the primitive has finished its steps -----------------> LEARNING (same goal)
    ERRORED ---- a person has reset the scene -------------------------> LEARNING

An episode ends only for the learner; the physical state is not reset. Steps in RECOVERY are not
used for learning. Stuck and late are truncations (the value is bootstrapped), a crash is a
termination.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.moved import attributes


class Mode(IntEnum):
    """Who acts: the learner, the primitive, nobody."""

    LEARNING = 0
    RECOVERY = 1
    ERRORED = 2


@dataclass(frozen=True)
class Config:
    """`lap`: goals of an episode, and whether the last of them is its true end (`wins`
    "terminated", as in SERL) or only a line to cross ("truncated", in a race). Stuck: the last
    `window` places all within `radius` m of the newest. Late: `timeout` steps without a goal.
    `recovery`: steps of the primitive. `tries`: recoveries in a row, without a goal between them,
    after which somebody has to come."""

    lap: int = 1
    wins: Literal["terminated", "truncated"] = "terminated"
    window: int = 30
    radius: float = 0.3
    timeout: int = 200
    recovery: int = 10
    tries: int = 10

    def __post_init__(self) -> None:
        if min(self.lap, self.timeout, self.recovery, self.tries) < 1 or self.window < 2:
            raise ConfigError(
                "reset-free: lap, timeout, recovery and tries must be at least 1, window at least 2"
            )
        if not self.radius > 0:
            raise ConfigError("reset-free: radius (m) must be above 0")


@dataclass(slots=True)
class Facts:
    """Of n rows after a step: `place` [n, d] (m), and, [n] (bool), `reached` the goal, `crashed`,
    `lost`: something is where no primitive can get at it, or not measured."""

    place: Tensor
    reached: Tensor
    crashed: Tensor
    lost: Tensor


class ResetFreeEnv(Protocol):
    """What is practised on: a VecEnv whose rows never end by themselves (or only because somebody
    had to come), with goals to go to one after the other."""

    goal: Tensor
    """[B] (int64): the number of the goal that each row is on its way to."""

    def facts(self) -> Facts:
        """Of all rows, as they are now."""
        ...

    def advance(self, rows: Tensor) -> None:
        """From now on `rows` [B] (bool) are on their way to their next goals."""
        ...

    def rehome(self, rows: Tensor) -> None:
        """What the robot can do by itself before another episode (an arm goes home), `rows` [B]."""
        ...

    def look(self) -> Tensors:
        """The observations of all rows as they are now."""
        ...


@dataclass(slots=True)
class Verdict:
    """[n] (bool) each; `won`: the lap is complete; at most one of `terminated` and `truncated`."""

    terminated: Tensor
    truncated: Tensor
    won: Tensor
    stuck: Tensor
    late: Tensor

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


class PracticeStates:
    """The machine of n rows; all that it remembers is in `memory` [n, ...], to be saved."""

    def __init__(self, config: Config, n: int, dims: int, memory: Tensors | None = None) -> None:
        self.config = config
        self.memory = {} if memory is None else memory
        count = torch.zeros(n, dtype=torch.int64)
        fresh = {name: count.clone() for name in ("mode", "age", "goals", "tries", "kept")}
        fresh["trail"] = torch.zeros(n, config.window, dims)
        self.memory.update(fresh)

    def begin(self, rows: Tensor) -> None:
        """Things are right in `rows` [n] (bool)."""
        for value in self.memory.values():
            value[rows] = 0

    def learn(self, facts: Facts) -> Verdict:
        """After a step of the learner in all rows."""
        memory, config = self.memory, self.config
        stuck = self._stuck(facts.place) & ~facts.reached
        memory["age"] = torch.where(facts.reached, 0, memory["age"] + 1)
        memory["goals"] = memory["goals"] + facts.reached
        memory["tries"] = memory["tries"].masked_fill(facts.reached, 0)
        crashed = facts.crashed & ~facts.lost
        won = (memory["goals"] >= config.lap) & ~crashed & ~facts.lost
        late = (memory["age"] >= config.timeout) & ~won
        fails = crashed | ((stuck | late) & ~won & ~facts.lost)
        terminated = crashed | (won if config.wins == "terminated" else torch.zeros_like(won))
        truncated = ~terminated & (won | fails | facts.lost)
        memory["tries"] = memory["tries"] + fails
        hopeless = facts.lost | (fails & (memory["tries"] > config.tries))
        mode = torch.where(fails, int(Mode.RECOVERY), int(Mode.LEARNING))
        memory["mode"] = mode.masked_fill(hopeless, int(Mode.ERRORED))
        self._forget(terminated | truncated)
        return Verdict(terminated, truncated, won, stuck & fails, late & fails)

    def recovered(self) -> None:
        """The primitive has had its steps in the rows that it was for."""
        mode = self.memory["mode"]
        self.memory["mode"] = mode.masked_fill(mode == Mode.RECOVERY, int(Mode.LEARNING))

    def rows(self, mode: Mode) -> Tensor:
        """[n] (bool)."""
        return self.memory["mode"] == mode

    def _stuck(self, place: Tensor) -> Tensor:
        memory, window = self.memory, self.config.window
        trail = torch.cat([place[:, None].to(memory["trail"]), memory["trail"][:, :-1]], 1)
        memory["trail"] = trail
        memory["kept"] = (memory["kept"] + 1).clamp(max=window)
        far = (trail - trail[:, :1]).norm(dim=2).amax(1)
        return (memory["kept"] >= window) & (far < self.config.radius)

    def _forget(self, rows: Tensor) -> None:
        """Of the episode that is over."""
        for name in ("age", "goals", "kept"):
            self.memory[name] = self.memory[name].masked_fill(rows, 0)


__getattr__ = attributes(__name__)
