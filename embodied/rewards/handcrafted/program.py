"""Program: a reward written as Python code, by a person or a language model, run in the sandbox.

    def reward(next_goal_from_tool, action):
        near = torch.exp(-torch.norm(next_goal_from_tool, dim=-1) / 0.1)
        cost = 0.01 * action.square().sum(dim=-1)
        return near - cost, {"near": near, "cost": -cost}

Reward as code: Eureka (Ma et al., 2023), Text2Reward (Xie et al., 2023). The parameters' names
select parts of the observation (`embodied.rewards.handcrafted.variables`), as does `self.NAME` in a
method. The program returns the total [N], or the total and its named components. It runs in a
locked process (`embodied.sandbox.gate`), which tests it every time it is loaded.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from embodied.core.bounds import Count, Positive
from embodied.core.build import ConfigError
from embodied.core.env import NotFinite
from embodied.core.reward import Reward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.handcrafted import variables as vs
from embodied.sandbox.evaluate import ProgramOutput
from embodied.sandbox.gate import Sandbox
from embodied.sandbox.process import Limits
from embodied.sandbox.program import Rejected

logger = logging.getLogger(__name__)
TRIED = 256  # random transitions for the gate
SLOW = 20.0  # microseconds per transition that are worth a warning


@dataclass(frozen=True)
class Config:
    """Settings of a reward program; one of `file` and `code` holds it."""

    file: str | None = None  # file with the program; null: `code`
    code: str | None = None  # the program's text; null: `file`
    require_lock: bool = True  # false: run programs you have read without a lock, too
    rows: str | None = None  # safetensors file of transitions to test it on; null: random ones
    peak: Positive = 1000.0  # bound of |reward|
    every: Count = 1000  # steps between lines of `components.jsonl` in the run's reward folder


class Program(Reward):
    """Frozen: applied when transitions are stored."""

    frozen = True

    def __init__(self, config: Config, spec: Spec, folder: Path | None = None) -> None:
        self.config = config
        self.folder = folder
        self.step = 0
        self.source = _source(config)
        self.variables = vs.variables(spec)
        names = vs.known(spec)
        rows = vs.random_transitions(spec, TRIED) if config.rows is None else load_file(config.rows)
        try:
            sandbox = Sandbox(Limits(peak=config.peak), config.require_lock)
            given = vs.inputs(self.variables, tuple(names), rows)
            self.gated = sandbox.gate(self.source, given, config.rows is not None)
        except Rejected as error:
            raise ConfigError(f"the reward program is rejected: {error}") from error
        report = self.gated.report
        if report.cost > SLOW:
            how = ", one transition at a time" if report.one_by_one else ""
            logger.warning(
                "the reward program takes %.0f microseconds per transition%s; on tensors [N, ...] "
                "it is faster",
                *(report.cost, how),
            )
        self.sums: dict[str, list[float]] = {}
        self.written = 0

    def __call__(self, transitions: Tensors) -> Tensor:
        output = self._output(transitions)
        if self.folder is None:
            return output.total
        for name, part in {"total": output.total, **output.components}.items():
            low, mean, high = (float(x) for x in (part.min(), part.sum(), part.max()))
            sums = self.sums.setdefault(name, [0.0, 0.0, low, high])
            sums[0] += len(part)
            sums[1] += mean
            sums[2], sums[3] = min(sums[2], low), max(sums[3], high)
        return output.total

    def components(self, transitions: Tensors) -> Tensors:
        """The components [N], named by the program."""
        return self._output(transitions).components

    def set_step(self, step: int) -> None:
        """Write the components' statistics since the last call."""
        self.step = step
        if self.folder is not None and step >= self.written + self.config.every:
            self.written = step
            if not self.sums:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            terms = {name: [s / n, low, high] for name, (n, s, low, high) in self.sums.items()}
            with (self.folder / "components.jsonl").open("a") as sink:
                sink.write(json.dumps({"step": self.step, "terms": terms}) + "\n")
            self.sums = {}

    def get_state(self) -> dict[str, Any]:
        return {"digest": self.gated.program.digest, "step": self.step, "written": self.written}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["digest"] != self.gated.program.digest:
            raise ConfigError("the reward program changed since this run was started")
        self.step = state["step"]
        self.written = state["written"]
        if self.folder is not None:
            kept = [line for line in statistics(self.folder) if line["step"] <= self.step]
            file = self.folder / "components.jsonl"
            if file.exists():
                file.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def _output(self, transitions: Tensors) -> ProgramOutput:
        try:
            found = vs.inputs(self.variables, self.gated.program.inputs, transitions)
            # An action gives constants their batch size.
            return self.gated(found or {vs.ACTION: transitions[vs.ACTION]})
        except Rejected as error:
            raise NotFinite(f"the reward program failed in this environment: {error}") from error


def statistics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `components.jsonl`: the step, and mean, minimum and maximum of each
    component since the line before; [] if there is no file."""
    file = folder / "components.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _source(config: Config) -> str:
    if config.file is None:
        if config.code is None:
            raise ConfigError("no reward program: set reward.file=FILE or reward.code")
        return config.code
    path = Path(config.file)
    if not path.is_file():
        raise ConfigError(f"reward.file={path} does not exist")
    return path.read_text(errors="replace")
