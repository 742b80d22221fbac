"""Designer: protocol of reward designers, which propose reward programs.

All designers share one search (`embodied.reward_design.search`). A designer gets all information
from the `Board` and has no state of its own, so that a search can resume from its journal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from embodied.core.spec import Spec
from embodied.reward_design.experience import Experience, Verdict
from embodied.reward_design.journal import Candidate, Journal
from embodied.rewards.handcrafted.program import Variable


@dataclass(frozen=True)
class Board:
    """The information for a designer. `sentence`: the task in the user's words; `about`: the
    environment's description; `check` tests a program; `seed`: of the search; `run`: the folder of
    a candidate's training."""

    sentence: str
    about: str
    spec: Spec
    variables: dict[str, Variable]
    ledger: Journal
    experience: Experience
    check: Callable[[str], Verdict]
    seed: int
    run: Callable[[Candidate], Path]


@dataclass(frozen=True)
class Proposal:
    """A program, or the `problem` because of which there is none; `origin`: its provenance."""

    source: str | None
    origin: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class Designer(Protocol):
    """Proposes programs, round by round."""

    def propose(self, board: Board, number: int, count: int) -> list[Proposal]:
        """`count` proposals for round `number`."""
        ...

    def say(self, board: Board, number: int) -> str | None:
        """Called after a round: a comment to store for the next one ("": none), or None to end the
        search."""
        ...
