"""Program: a reward that is written down, by a person or a language model, and runs in the sandbox.

    def reward(next_goal_from_tool, action):
        near = torch.exp(-torch.norm(next_goal_from_tool, dim=-1) / 0.1)
        cost = 0.01 * action.square().sum(dim=-1)
        return near - cost, {"near": near, "cost": -cost}

Reward as code is Eureka's (Ma et al., 2023) and Text2Reward's (Xie et al., 2023). A program asks by
the names of its parameters for parts of the observation (`embodied.rewards.handcrafted.variables`)
and answers
`total` [N], or `total` and its named components. It passes the sandbox's gate each time it is
loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.env import NotFinite
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.handcrafted import variables as vs
from embodied.sandbox.allow_list import Rejected, check
from embodied.sandbox.evaluate import ProgramOutput
from embodied.sandbox.gate import Limits, Mode, Sandbox

TRIED = 256  # made-up rows at the gate


@dataclass(frozen=True)
class Config:
    """`file`, or else `code`, holds the program; `mode` "strict" keeps it in its locked process
    while it trains. `rows`: a safetensors file of rows of this world to try it on when it is loaded
    (None: made-up ones). `peak`: the largest |reward|. `every` steps, the means of the components
    go to `components.jsonl` in the run's reward folder."""

    file: str | None = None
    code: str | None = None
    mode: Mode = "trusted"
    rows: str | None = None
    peak: float = 1000.0
    every: int = 1000


class Program:
    """Frozen: asked when rows are stored."""

    frozen = True

    def __init__(self, config: Config, spec: Spec, folder: Path | None = None) -> None:
        self.config, self.folder, self.step = config, folder, 0
        self.source = _source(config)
        self.variables = vs.variables(spec)
        names = vs.known(spec)
        rows = vs.made_up(spec, TRIED) if config.rows is None else load_file(config.rows)
        try:
            checked = check(self.source, names)
            self.sandbox = Sandbox(Limits(peak=config.peak), config.mode)
            self.gated = self.sandbox.gate(
                self.source, self._inputs(checked.inputs, rows), config.rows is not None
            )
        except Rejected as error:
            raise ConfigError(f"the reward program is refused, {error}") from error
        if config.mode == "trusted":
            self.sandbox.close()
        self.sums: dict[str, list[float]] = {}
        self.written = 0

    def __call__(self, rows: Tensors) -> Tensor:
        paid = self._paid(rows)
        if self.folder is not None:
            self._count(paid)
        return paid.total

    def components(self, rows: Tensors) -> Tensors:
        """The components [N] as the program names them."""
        return self._paid(rows).components

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """There is nothing to learn."""
        return {}

    def set_step(self, step: int) -> None:
        """Write down what the components came to since the last time."""
        self.step = step
        if self.folder is not None and step >= self.written + self.config.every:
            self._write()
            self.written = step

    def get_state(self) -> dict[str, Any]:
        return {"digest": self.gated.checked.digest, "step": self.step, "written": self.written}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["digest"] != self.gated.checked.digest:
            raise ConfigError("the reward program is not the one that this run began with")
        self.step, self.written = state["step"], state["written"]
        if self.folder is not None:
            kept = [line for line in statistics(self.folder) if line["step"] <= self.step]
            _rewrite(self.folder, kept)

    def _inputs(self, names: tuple[str, ...], rows: Tensors) -> Tensors:
        found = vs.inputs(self.variables, names, rows)
        return found or {vs.ACTION: rows[vs.ACTION]}  # a constant has as many rows as these

    def _paid(self, rows: Tensors) -> ProgramOutput:
        try:
            return self.gated(self._inputs(self.gated.checked.inputs, rows))
        except Rejected as error:
            raise NotFinite(f"the reward program fails on rows of this world, {error}") from error

    def _count(self, paid: ProgramOutput) -> None:
        for name, part in {"total": paid.total, **paid.components}.items():
            low, mean, high = (float(x) for x in (part.min(), part.sum(), part.max()))
            sums = self.sums.setdefault(name, [0.0, 0.0, low, high])
            sums[0] += len(part)
            sums[1] += mean
            sums[2], sums[3] = min(sums[2], low), max(sums[3], high)

    def _write(self) -> None:
        if self.folder is None or not self.sums:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        terms = {name: [s / n, low, high] for name, (n, s, low, high) in self.sums.items()}
        with (self.folder / "components.jsonl").open("a") as sink:
            sink.write(json.dumps({"step": self.step, "terms": terms}) + "\n")
        self.sums = {}


def statistics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `components.jsonl`: step, and mean, minimum, maximum of each term since
    the line before; [] where there are none."""
    file = folder / "components.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _rewrite(folder: Path, lines: list[dict[str, Any]]) -> None:
    file = folder / "components.jsonl"
    if file.exists():
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _source(config: Config) -> str:
    if config.file is None:
        if config.code is None:
            raise ConfigError("a reward program is given by reward.file=FILE or reward.code")
        return config.code
    path = Path(config.file)
    if not path.is_file():
        raise ConfigError(f"reward.file: there is no {path}")
    return path.read_text(errors="replace")
