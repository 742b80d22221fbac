"""ResetDistribution: chooses the saved simulator states from which coming episodes begin.

Somebody who can already do something (a trained policy, a script) plays, and the states that it
passes through are kept. As with tasks, every episode has a ticket, and what the distribution meant
by it waits there for the outcome.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError, Node, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.teachers.episode_log import Diary
from embodied.teachers.resets.state_library import Trajectories, play
from embodied.teachers.task_space import Floats
from embodied.teachers.teacher import Outcome, bounded

TRAINED = "policies.scripted.checkpoint.CheckpointDemonstrator"
GAMMA = 0.99
"""Of the return that is expected to follow a state."""
AS_USUAL = -1
"""Instead of a state's number: begin as the world begins."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Who plays: the policy of the trained `run`, or `player`, a demonstrator's node. `episodes` of
    it are played, and every `every`-th state kept.

    `usual`: share of episodes that begin as the world begins; after `steps` environment steps all
    of them do (0: never). `limit`: steps of an episode from a saved state, then it is truncated
    (0: the world's own). `signal`: what an outcome's score is, its success, or its return as a
    share of what the player's was from there on.
    """

    run: str | None = None
    player: Node | None = None
    episodes: int = 10
    every: int = 10
    usual: float = 0.0
    steps: int = 0
    limit: int = 0
    signal: Literal["success", "return"] = "success"


class ResetDistribution(ABC):
    """Subclasses say what to keep of the trajectories (`keep`), which states to begin from
    (`propose`) and what they learn from it (`learn`).

    What they remember is in the attributes named by `remembered`; the trajectories are kept too, so
    that a resumed run goes on exactly, whatever became of the player.
    """

    remembered: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset({"states"})

    def __init__(self, config: Any, spec: Spec, env: VecEnv, seed: int = 0) -> None:
        _check(config)
        self.config, self.spec = config, spec
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.clock, self.issued, self.dropped = 0, 0, 0
        self.pending: dict[int, tuple[int, Any]] = {}
        player: Policy = build(_player(config), spec=spec).eval()
        self.paths = self.keep(play(player, env, config.episodes, config.every, seed, GAMMA))
        self.begin()

    @abstractmethod
    def keep(self, paths: Trajectories) -> Trajectories:
        """Those of the player's trajectories that are worth beginning from."""

    def begin(self) -> None:  # noqa: B027  (not all have more to set up)
        """Set up what follows from `paths`; called again after a resume."""

    @abstractmethod
    def propose(self, n: int) -> list[tuple[int, Any]]:
        """For `n` episodes, the state that each begins from, and what to remember of it."""

    @abstractmethod
    def learn(self, states: list[int], scores: Floats, memos: list[Any]) -> None:
        """Episodes from `states` ended with `scores` [n] in [0, 1]."""

    def sample(self, n: int) -> tuple[Tensor, Tensor]:
        """Numbers of the states that `n` episodes begin from [n] (AS_USUAL: none), and their
        tickets [n] (int64)."""
        tickets = list(range(self.issued, self.issued + n))
        self.issued += n
        over = bool(self.config.steps) and self.clock >= self.config.steps
        usual = self.random.random(n) < (1.0 if over else self.config.usual)
        proposed = iter(self.propose(int((~usual).sum())))
        drawn = [(AS_USUAL, None) if plain else next(proposed) for plain in usual]
        self.pending |= dict(zip(tickets, drawn, strict=True))
        return torch.tensor([state for state, _ in drawn]), torch.tensor(tickets)

    def update(self, ticket: Tensor, outcome: Outcome) -> None:
        """Episodes `ticket` [n] have ended. One whose score is not a number teaches nothing, nor
        does one that began as the world begins."""
        known = [self.pending.pop(number) for number in ticket.tolist()]
        began = np.array([state for state, _ in known], np.intp)
        scores = self.scores(began, outcome)
        placed = began != AS_USUAL
        lost = placed & ~np.isfinite(scores)
        if lost.any() and not self.dropped:
            warnings.warn(
                f"teacher: an episode's {self.config.signal} is not a number; such episodes teach "
                "nothing (teacher.signal=return, if this world knows no success)",
                stacklevel=2,
            )
        self.dropped += int(lost.sum())
        kept = np.flatnonzero(placed & ~lost)
        if len(kept):
            memos = [known[i][1] for i in kept]
            self.learn(began[kept].tolist(), scores[kept], memos)

    def scores(self, began: Any, outcome: Outcome) -> Floats:
        """[n] in [0, 1]; NaN where there is no number."""
        if self.config.signal == "success":
            return bounded(outcome.success.double().cpu().numpy())
        ahead = self.paths.after[began].double().numpy()
        ret = outcome.ret.double().cpu().numpy()
        share = np.where(ahead > 0, ret / np.where(ahead > 0, ahead, 1), ret >= ahead)
        return bounded(np.where(np.isfinite(ret), share, np.nan))

    def passed(self, steps: int) -> None:
        """So many more environment steps are done."""
        self.clock += steps

    def around(self, env: VecEnv, diary: Diary | None) -> VecEnv:
        """The same world, its episodes beginning where this says."""
        from embodied.teachers.resets.reset_wrapper import Placed

        return Placed(env, self, diary)

    def metrics(self) -> dict[str, float]:
        """What to log of it."""
        return {}

    def get_state(self) -> dict[str, Any]:
        own = {name: copy.deepcopy(getattr(self, name)) for name in self.remembered}
        return {
            "own": own,
            "paths": dict(vars(self.paths)),
            "random": self.random.bit_generator.state,
            "pending": dict(self.pending),
            "counts": (self.clock, self.issued, self.dropped),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on exactly from `get_state`."""
        self.paths = Trajectories(**state["paths"])
        self.begin()
        for name in self.remembered:
            setattr(self, name, copy.deepcopy(state["own"][name]))
        self.random.bit_generator.state = state["random"]
        self.pending = dict(state["pending"])
        self.clock, self.issued, self.dropped = state["counts"]


def _player(config: Config) -> Node:
    if config.player is not None:
        return config.player
    return {"_target_": TRAINED, "run": config.run}


def _check(config: Config) -> None:
    if config.run is not None and config.player is not None:
        raise ConfigError("who plays: teacher.run or teacher.player, not both")
    if config.run is None and config.player is None:
        raise ConfigError(
            "this teacher needs one who plays: teacher.run=RUN (a trained policy), or "
            "teacher.player={_target_: policies.scripted.fr3.Scripted, task: lift}"
        )
    for name in ("episodes", "every"):
        if getattr(config, name) < 1:
            raise ConfigError(f"teacher.{name} has to be at least 1")
    if not 0 <= config.usual <= 1:
        raise ConfigError(f"teacher.usual={config.usual:g} should be between 0 and 1")
