"""State machine of reset-free training: when episodes end, when to recover, when to ask for help.

FastRLAP (Stachowicz et al., 2023) keeps a car on its track: checkpoints are goals, and a stuck car
recovers by itself. SERL (Luo et al., 2024) has a backward task that undoes the forward one. Both
are

    LEARNING --- lap, goal reached ------------------------------------> LEARNING (next goal)
        |------- crashed (terminated), stuck or late (truncated) ------> RECOVERY
        |------- too many of those in a row, or an object is lost -----> ERRORED
    RECOVERY --- the primitive has finished its steps -----------------> LEARNING (same goal)
    ERRORED ---- a person has reset the scene -------------------------> LEARNING

FastRLAP's pre-trained image encoder and its state-dependent bound of actions are not here.
An episode ends only for the learner; the physical state is not reset. Steps in RECOVERY are not
used for learning. Stuck and late are truncations (the value is bootstrapped), a crash is a
termination.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, Positive
from embodied.core.tensors import Tensors


class Mode(IntEnum):
    """Who acts: the learner, the recovery primitive, or no one (waiting for a person)."""

    LEARNING = 0
    RECOVERY = 1
    ERRORED = 2


@dataclass(frozen=True)
class Config:
    """Settings of the state machine. SERL has `wins` "terminated", a race "truncated"."""

    lap: Count = 1  # goals per episode
    wins: Literal["terminated", "truncated"] = "terminated"  # what the last goal does
    window: Annotated[int, Bound(2)] = 30  # stuck: so many last positions are near the newest
    radius: Positive = 0.3  # stuck: distance that counts as near, m
    timeout: Count = 200  # late: steps without a goal
    recovery: Count = 10  # steps of the primitive
    tries: Count = 10  # recoveries in a row without a goal before a person is needed


@dataclass(slots=True)
class Facts:
    """Facts of n envs after a step: position `place` [n, d] (m) and, [n] (bool), goal `reached`,
    `crashed`, `lost` (an object is out of reach of the primitive, or not measured).
    """

    place: Tensor
    reached: Tensor
    crashed: Tensor
    lost: Tensor


class ResetFreeEnv(Protocol):
    """Protocol of a reset-free environment: a VecEnv whose episodes do not end by themselves
    (except after manual intervention), with a sequence of goals.
    """

    goal: Tensor
    """[B] (int64): the number of the goal that each row is on its way to."""

    def facts(self) -> Facts:
        """The current facts of all envs."""
        ...

    def advance(self, rows: Tensor) -> None:
        """Select the next goal of `rows` [B] (bool)."""
        ...

    def rehome(self, rows: Tensor) -> None:
        """Do what the robot can do by itself before the next episode (an arm moves home), in `rows`
        [B].
        """
        ...

    def look(self) -> Tensors:
        """The current observations of all envs."""
        ...


@dataclass(slots=True)
class Verdict:
    """[n] (bool) each; `won`: the lap is complete; at most one of `terminated` and `truncated` is
    true.
    """

    terminated: Tensor
    truncated: Tensor
    won: Tensor
    stuck: Tensor
    late: Tensor

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


class PracticeStates:
    """The state machine of n envs; its whole state is in `memory` [n, ...], for saving."""

    def __init__(self, config: Config, n: int, dims: int, memory: Tensors | None = None) -> None:
        self.config = config
        self.memory = {} if memory is None else memory
        count = torch.zeros(n, dtype=torch.int64)
        fresh = {name: count.clone() for name in ("mode", "age", "goals", "tries", "kept")}
        fresh["trail"] = torch.zeros(n, config.window, dims)
        self.memory.update(fresh)

    def begin(self, rows: Tensor) -> None:
        """Restart `rows` [n] (bool) after a reset of the scene."""
        for value in self.memory.values():
            value[rows] = 0

    def learn(self, facts: Facts) -> Verdict:
        """Update after a step of the learner in all envs."""
        memory = self.memory
        config = self.config
        trail = torch.cat([facts.place[:, None].to(memory["trail"]), memory["trail"][:, :-1]], 1)
        memory["trail"] = trail
        memory["kept"] = (memory["kept"] + 1).clamp(max=config.window)
        far = (trail - trail[:, :1]).norm(dim=2).amax(1)
        stuck = (memory["kept"] >= config.window) & (far < config.radius) & ~facts.reached
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
        for name in ("age", "goals", "kept"):
            memory[name] = memory[name].masked_fill(terminated | truncated, 0)
        return Verdict(terminated, truncated, won, stuck & fails, late & fails)

    def recovered(self) -> None:
        """Update after the primitive has finished its steps."""
        mode = self.memory["mode"]
        self.memory["mode"] = mode.masked_fill(mode == Mode.RECOVERY, int(Mode.LEARNING))

    def rows(self, mode: Mode) -> Tensor:
        """[n] (bool)."""
        return self.memory["mode"] == mode
