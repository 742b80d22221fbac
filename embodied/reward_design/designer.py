"""Designer: protocol of reward designers, which propose reward programs.

All designers share one search (`embodied.reward_design.run`). A designer gets all information
from the `Board` and has no state of its own, so that a search can resume from its journal.

Journal of a reward design: every program, its provenance, checks and training results.

`design.jsonl` is append-only, one event per line; a search resumes from it alone.

Sampled transitions with the environment's success signal, to check programs before training.

Transitions are of random actions and, if given, of a demonstrator. Checks (after Eureka) that a
program must pass to be trained:

    finite, not constant, components within a factor of 1000 in scale,
    AUC = P(r(success) > r(random)) > 0.8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.choices import Choices
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.llm.budget import AppendLog
from embodied.nn.statistics import auc_of_samples
from embodied.rewards.handcrafted.program import ACTION, NEXT, Variable, inputs
from embodied.sandbox.gate import Gated, Sandbox
from embodied.sandbox.program import MEMORY, WIDTH, Rejected

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
        self.log = AppendLog(folder / FILE)
        for event in self.log.read():
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

    def folder_of(self, candidate: Candidate) -> Path:
        """The folder of a candidate's program and of its training (`run`)."""
        return self.folder / "candidates" / f"{candidate.id:03d}"

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
        self.log.append(event)
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


GATE = 256  # transitions for the sandbox's gate
ENOUGH = 8  # successes needed for the AUC
LEAST_AUC, LARGEST_RATIO = 0.8, 1000.0


@dataclass(frozen=True)
class Verdict:
    """`problem`: "" if the program may be trained; `layer`: the check that failed."""

    problem: str = ""
    layer: str = ""
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class Experience:
    """`rows` [N]: transitions of T steps of B envs, in the order of time; `success` [N] (None: the
    environment has no such signal); `random` [N]: whether they are of random actions; `first`
    [T, B]: whether an episode begins."""

    rows: Tensors
    success: Tensor | None
    random: Tensor
    first: Tensor

    def save(self, folder: Path) -> None:
        more = {} if self.success is None else {"success": self.success}
        more |= {"random": self.random, "first": self.first}
        save_file(self.rows | more, folder / "experience.safetensors")
        picked = tt.take(self.rows, self._tried())
        save_file({k: v.contiguous() for k, v in picked.items()}, folder / "rows.safetensors")

    @classmethod
    def load(cls, folder: Path) -> Experience:
        rows = load_file(folder / "experience.safetensors")
        return cls(rows, rows.pop("success", None), rows.pop("random"), rows.pop("first"))

    def check(self, sandbox: Sandbox, variables: dict[str, Variable], source: str) -> Verdict:
        """Check a program in the sandbox and on the transitions."""
        try:
            names = (*variables, *(NEXT + name for name in variables if name != ACTION))
            given = inputs(variables, names, self.rows)
            gated = sandbox.gate(source, tt.take(given, self._tried()))
            if gated.program.stateful:
                given[MEMORY] = self._memories(gated, given)
            output = gated(given)
            gated.close()
        except Rejected as error:
            return Verdict(error.reason, error.layer)
        facts, total, auc = gated.report, output.total, None
        if self.success is not None and int(self.success.sum()) >= ENOUGH:
            failures = total[self.random & ~self.success]
            auc = round(auc_of_samples(total[self.success], failures), 4)
        report: dict[str, Any] = {"cost": facts.cost, "terms": facts.terms, "lock": facts.lock}
        report |= {"one_by_one": facts.one_by_one, "auc": auc}
        report["shares"] = {
            name: [float((part > 0).float().mean()), float((part < 0).float().mean())]
            for name, part in output.components.items()
        }
        return Verdict(*_gates(report, output.total, output.components), report)

    def _memories(self, gated: Gated, given: Tensors) -> Tensor:
        """The memories [N, WIDTH] before the transitions, of a program that follows them."""
        names = [name for name in gated.program.inputs if name != MEMORY]
        steps = {name: given[name].unflatten(0, tuple(self.first.shape)) for name in names}
        memory = torch.zeros(self.first.shape[1], WIDTH)
        kept: list[Tensor] = []
        for at, first in enumerate(self.first):
            kept.append(memory.masked_fill(first[:, None], 0.0))
            now = {name: value[at] for name, value in steps.items()}
            memory = gated({**now, MEMORY: kept[-1]}).memory
        return torch.cat(kept)

    def _tried(self) -> Tensor:
        """Indices of GATE transitions, up to a quarter of them successes."""
        order = torch.randperm(len(self.random), generator=torch.Generator().manual_seed(0))
        if self.success is None:
            return order[:GATE]
        won = order[self.success[order]][: GATE // 4]
        return torch.cat([won, order[~self.success[order]]])[:GATE]


def gather(
    env: VecEnv, count: int, seed: int, demonstrator: Policy | None = None, shown: int = 0
) -> Experience:
    """About `count` transitions of random actions and `shown` of the demonstrator."""
    parts = [_play(env, count, seed, None)]
    if demonstrator is not None and shown:
        parts.append(_play(env, shown, seed + 1, demonstrator))
    rows = tt.cat([rows for rows, _, _ in parts])
    flags = [won for _, won, _ in parts]
    success = None if flags[0] is None else torch.cat([won for won in flags if won is not None])
    random = torch.zeros(tt.length(rows), dtype=torch.bool)
    random[: tt.length(parts[0][0])] = True
    return Experience(rows, success, random, torch.cat([first for _, _, first in parts]))


@torch.no_grad()
def _play(
    env: VecEnv, count: int, seed: int, policy: Policy | None
) -> tuple[Tensors, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    actor = None if policy is None else Actor(policy, env.num_envs, explore=True)
    obs, first = env.reset(seed), torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    parts: list[Tensors] = []
    flags: list[Tensor] = []
    begins: list[Tensor] = []
    for _ in range(-(-count // env.num_envs)):
        action = actor(obs, first) if actor is not None else _random(env, obs, generator)
        step = env.step(action.to(env.device))
        row = {**tt.nest(obs, "obs"), ACTION: action, **tt.nest(step.next_obs, "next_obs")}
        parts.append({key: value.clone().cpu() for key, value in row.items()})
        if "success" in step.log:
            flags.append(step.log["success"].clone().cpu())
        begins.append(first.cpu())
        obs, first = step.obs, step.ended.clone()
    return tt.cat(parts), torch.cat(flags) if flags else None, torch.stack(begins)


def _random(env: VecEnv, obs: Tensors, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(env.num_envs, 1, *env.spec.act.shape, generator=generator)
    return Choices(env.spec).random(uniform, tt.to(obs, uniform.device))[:, 0]


def _gates(report: dict[str, Any], total: Tensor, parts: Tensors) -> tuple[str, str]:
    """(problem, layer), both "" if all checks are passed."""
    if float(total.max() - total.min()) < 1e-6:
        return "the reward is the same in every row", "constant"
    sizes = [float(p.abs().mean()) for p in parts.values() if float(p.abs().mean()) > 0]
    if sizes and max(sizes) > LARGEST_RATIO * min(sizes):
        return f"components differ {max(sizes) / min(sizes):.0f}-fold in size", "scale"
    if report["auc"] is not None and report["auc"] <= LEAST_AUC:
        word = f"success is rewarded more than random in {report['auc']:.0%} of pairs"
        return f"{word}; more than {LEAST_AUC:.0%} is required", "auc"
    return "", ""


@dataclass(frozen=True)
class Board:
    """The information for a designer. `sentence`: the task in the user's words; `about`: the
    environment's description; `check` tests a program; `seed`: of the search."""

    sentence: str
    about: str
    spec: Spec
    variables: dict[str, Variable]
    ledger: Journal
    experience: Experience
    check: Callable[[str], Verdict]
    seed: int


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
