"""Journal of a reward design: every program, its provenance, checks and training results.

`design.jsonl` is append-only, one event per line; a search resumes from it alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

FILE = "design.jsonl"


@dataclass(frozen=True)
class Candidate:
    """One program of a round.

    `origin`: provenance (designer, model, cache key, reply, parents, ...). `problem`: why it is not
    trained ("": it can be). `report`: results of the checks. `scores`: the environment's own
    measure at each evaluation [[step, value], ...]; `terms`: statistics of the components.
    """

    id: int
    round: int
    source: str | None
    digest: str
    origin: dict[str, Any]
    problem: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    scores: list[tuple[int, float]] = field(default_factory=list)
    terms: list[dict[str, Any]] = field(default_factory=list)
    trained: bool = False

    @property
    def returned(self) -> list[str]:
        """The reasons for which earlier versions went back to the model."""
        return list(self.origin.get("refused") or self.origin.get("reviews") or [])

    @property
    def fitness(self) -> float | None:
        """The best evaluation; None if it was never trained."""
        return max((value for _, value in self.scores), default=None)

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: the best evaluation, then the mean of all."""
        if not self.scores:
            return (float("-inf"), float("-inf"))
        values = [value for _, value in self.scores]
        return (max(values), sum(values) / len(values))


class Journal:
    """Candidates by number, and the final scores, stored in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.candidates: dict[int, Candidate] = {}
        self.finals: dict[int, float] = {}
        self.said: dict[int, str] = {}
        self.rounds: set[int] = set()
        for event in _read(folder / FILE):
            self._take(event)

    def put(self, candidate: Candidate) -> None:
        """Add or update a candidate."""
        self._write({"event": "candidate", **asdict(candidate)})

    def close_round(self, number: int, said: str = "") -> None:
        """Mark a round as done; `said`: the designer's comment on it."""
        self._write({"event": "round", "round": number, "said": said})

    def final(self, seed: int, score: float) -> None:
        """Add the score of the best program retrained with a fresh seed."""
        self._write({"event": "final", "seed": seed, "score": score})

    def of_round(self, number: int) -> list[Candidate]:
        return [c for c in self.candidates.values() if c.round == number]

    @property
    def best(self) -> Candidate | None:
        """The best candidate over all rounds."""
        tried = [c for c in self.candidates.values() if c.scores]
        return max(tried, key=lambda c: c.order, default=None)

    def update(self, number: int, **changes: Any) -> Candidate:
        changed = replace(self.candidates[number], **changes)
        self.put(changed)
        return changed

    def _write(self, event: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / FILE).open("a") as sink:
            sink.write(json.dumps(event) + "\n")
        self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "candidate":
            fields = {key: value for key, value in event.items() if key != "event"}
            fields["scores"] = [(int(step), float(value)) for step, value in fields["scores"]]
            self.candidates[fields["id"]] = Candidate(**fields)
        elif kind == "round":
            self.rounds.add(event["round"])
            self.said[event["round"]] = event["said"]
        elif kind == "final":
            self.finals[event["seed"]] = event["score"]


def _read(file: Path) -> list[dict[str, Any]]:
    """All complete lines: a killed process may have left a partial one."""
    if not file.exists():
        return []
    data = file.read_bytes()
    if data and not data.endswith(b"\n"):
        data = data[: data.rfind(b"\n") + 1]
        file.write_bytes(data)
    return [json.loads(line) for line in data.splitlines()]
