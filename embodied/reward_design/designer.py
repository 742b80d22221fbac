"""Designer: who writes reward programs; all share one loop (`embodied.reward_design.search`).

What a designer knows is on the board. It keeps nothing of its own, so that a search goes on from
its ledger alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from embodied.core.spec import Spec
from embodied.reward_design.experience import Experience, Verdict
from embodied.reward_design.journal import Candidate, Journal
from embodied.rewards.handcrafted.variables import Variable


@dataclass(frozen=True)
class Board:
    """`sentence` is the task in the user's words, `about` the world's; `judge` takes a source
    through the gates; `seed` is the search's; `run` the folder of a candidate's training."""

    sentence: str
    about: str
    spec: Spec
    variables: dict[str, Variable]
    ledger: Journal
    experience: Experience
    judge: Callable[[str], Verdict]
    seed: int
    run: Callable[[Candidate], Path]


@dataclass(frozen=True)
class Proposal:
    """A program, or why there is none; `origin` says who wrote it and from what."""

    source: str | None
    origin: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class Designer(Protocol):
    def propose(self, board: Board, number: int, count: int) -> list[Proposal]:
        """`count` proposals for round `number`, each in its own place."""
        ...

    def say(self, board: Board, number: int) -> str | None:
        """After a round: what is to be remembered of it ("" where nothing is); None ends the
        search."""
        ...
