"""Program: a reward written as Python code, by a person or a language model, run in the sandbox.

    def reward(next_goal_from_tool, action):
        near = torch.exp(-torch.norm(next_goal_from_tool, dim=-1) / 0.1)
        cost = 0.01 * action.square().sum(dim=-1)
        return near - cost, {"near": near, "cost": -cost}

Reward as code: Eureka (Ma et al., 2023), Text2Reward (Xie et al., 2023). The parameters' names
select parts of the observation (`variables`), as does `self.NAME` in a
method. The program returns the total [N], or the total and its named components. It runs in a
locked process (`embodied.sandbox.gate`), which tests it every time it is loaded.

Variables: the parts of a transition that a reward program can use, by name.

An observation `state` with named elements is split into its parts: tool_x, tool_y, tool_z are the
vector `tool` [N, 3], q1 ... q7 the vector `q` [N, 7], any other name a scalar such as `width` [N].
Each exists before (`tool`) and after the step (`next_tool`). The environment's reward, success and
the time are not available.

A program that asks for `memory` [N, 8] returns `total, components, memory`. Each env's memory is
passed on to its next step, and is zeros where an episode begins. The environment is wrapped
(`ProgramMemory`), so that a transition holds the memory that belongs to it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import Count, Positive
from embodied.core.build import ConfigError
from embodied.core.env import NotFinite, Step, VecEnv
from embodied.core.reward import Reward
from embodied.core.saved_file import load_tensors
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, nest
from embodied.rewards.wrappers.added_observations import ObservationWrapper
from embodied.sandbox.gate import Limits, Sandbox
from embodied.sandbox.program import MEMORY, WIDTH, ProgramOutput, Rejected

AXES = re.compile(r"(.+)_([xyz])")
NUMBERED = re.compile(r"([A-Za-z]+(?:_[A-Za-z]+)*?)_?(\d+)")
ACTION = "action"
NEXT = "next_"
KEPT = f"privileged/{MEMORY}"


@dataclass(frozen=True)
class Variable:
    """A named part of a transition: the elements `at` of observation `leaf` (None: all), of `shape`
    per transition."""

    name: str
    leaf: str
    shape: tuple[int, ...]
    at: tuple[int, ...] | None
    unit: str
    names: tuple[str, ...] = ()
    low: object = None
    high: object = None
    dtype: str = "float32"

    @property
    def is_point(self) -> bool:
        """Whether it is a position or a displacement in space."""
        return self.shape == (3,) and len(self.names) == 3 and self.names[0].endswith("_x")

    def of(self, transitions: Tensors, end: str) -> Tensor:
        """Its values [N, *shape] in transitions; `end` is "obs" or "next_obs"."""
        value = transitions[ACTION] if self.leaf == ACTION else transitions[f"{end}/{self.leaf}"]
        if self.at is None:
            return value
        if not self.shape:
            return value[:, self.at[0]]
        first, last = self.at[0], self.at[-1] + 1
        if last - first == len(self.at):
            return value[:, first:last]
        return value[:, list(self.at)]


def variables(spec: Spec) -> dict[str, Variable]:
    """All variables by name, without the `next_` ones; the action is `action`."""
    found: dict[str, Variable] = {}
    for name, leaf in spec.obs.items():
        whole = _identifier(name)
        found.setdefault(whole, _whole(whole, name, leaf))
        for part in _parts(name, leaf):
            found.setdefault(part.name, part)
    found[ACTION] = _whole(ACTION, ACTION, spec.act)
    found.pop(MEMORY, None)  # the word stands for what the program itself keeps
    return found


def known(spec: Spec) -> list[str]:
    names = list(variables(spec))
    return names + [NEXT + name for name in names if name != ACTION]


def inputs(found: Mapping[str, Variable], names: tuple[str, ...], transitions: Tensors) -> Tensors:
    """The values of a program's parameters `names`, without its memory."""
    return {name: value(found, name, transitions) for name in names if name != MEMORY}


def value(found: Mapping[str, Variable], name: str, transitions: Tensors) -> Tensor:
    """One variable [N, ...]; names starting with `next_` are taken after the step."""
    if name in found:
        return found[name].of(transitions, "obs")
    return found[name.removeprefix(NEXT)].of(transitions, "next_obs")


def random_transitions(spec: Spec, count: int, seed: int = 0) -> Tensors:
    """Random transitions within the bounds of `spec`, to test a program without an environment."""
    generator = torch.Generator().manual_seed(seed)
    rows: Tensors = {ACTION: _sample(spec.act, count, generator)}
    for name, leaf in spec.obs.items():
        rows[f"obs/{name}"] = _sample(leaf, count, generator)
        rows[f"next_obs/{name}"] = _sample(leaf, count, generator)
    return rows


def _sample(leaf: Leaf, count: int, generator: torch.Generator) -> Tensor:
    shape = (count, *leaf.shape)
    if leaf.dtype == "float32":
        low, high = (_bound(bound, leaf, sign) for bound, sign in ((leaf.low, -1), (leaf.high, 1)))
        return low + (high - low) * torch.rand(shape, generator=generator)
    highs = leaf.high if isinstance(leaf.high, tuple) else (leaf.high,)
    most = 1 if None in highs else int(min(h for h in highs if h is not None))
    return torch.randint(0, most + 1, shape, generator=generator).to(getattr(torch, leaf.dtype))


def _bound(bound: object, leaf: Leaf, sign: int) -> Tensor:
    numbers = torch.tensor(float(sign) if bound is None else bound, dtype=torch.float32)
    return numbers.clamp(-10, 10).expand(leaf.size).reshape(leaf.shape)


def _whole(name: str, leaf_name: str, leaf: Leaf) -> Variable:
    return Variable(
        name, leaf_name, leaf.shape, None, leaf.unit, leaf.names, leaf.low, leaf.high, leaf.dtype
    )


def _parts(name: str, leaf: Leaf) -> list[Variable]:
    """The named parts of a vector, in the order of their first elements."""
    if len(leaf.shape) != 1 or len(leaf.names) != leaf.size:
        return []
    groups: dict[str, list[int]] = {}
    for at, element in enumerate(leaf.names):
        axes, numbered = AXES.fullmatch(element), NUMBERED.fullmatch(element)
        stem = axes[1] if axes else numbered[1] if numbered else element
        groups.setdefault(_identifier(stem), []).append(at)
    return [
        Variable(
            stem,
            name,
            () if len(at) == 1 and stem == _identifier(leaf.names[at[0]]) else (len(at),),
            tuple(at),
            leaf.unit,
            tuple(leaf.names[i] for i in at),
            dtype=leaf.dtype,
        )
        for stem, at in groups.items()
    ]


def _identifier(name: str) -> str:
    plain = re.sub(r"\W", "_", name).lstrip("_")
    return plain if plain and not plain[0].isdigit() else f"leaf_{plain}"


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
        self.variables = variables(spec)
        names = known(spec)
        rows = random_transitions(spec, TRIED)
        if config.rows is not None:
            rows = load_tensors(Path(config.rows))
        try:
            sandbox = Sandbox(Limits(peak=config.peak), config.require_lock)
            given = inputs(self.variables, tuple(names), rows)
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

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with the memory of the program, if it has one."""
        stateful = self.gated.program.stateful
        return ProgramMemory(env, lambda rows: self._output(rows).memory) if stateful else env

    def components(self, transitions: Tensors) -> Tensors:
        return self._output(transitions).components

    def set_step(self, step: int) -> None:
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
            found = inputs(self.variables, self.gated.program.inputs, transitions)
            if self.gated.program.stateful:
                if f"obs/{KEPT}" not in transitions:
                    raise ConfigError(
                        "this program has a memory, which recordings lack: it rewards only what "
                        "an environment does now"
                    )
                found[MEMORY] = transitions[f"obs/{KEPT}"]
            # An action gives constants their batch size.
            return self.gated(found or {ACTION: transitions[ACTION]})
        except Rejected as error:
            raise NotFinite(f"the reward program failed in this environment: {error}") from error


class ProgramMemory(ObservationWrapper):
    """Adds `privileged/memory` [WIDTH]: what `remember` (transitions to memories [N, WIDTH]) made
    of the step that led to an observation; zeros where an episode begins."""

    newest = "memory"

    def __init__(self, env: VecEnv, remember: Callable[[Tensors], Tensor]) -> None:
        super().__init__(env, KEPT, Leaf((WIDTH,)))
        self.remember = remember
        self.before: Tensors = {}
        self.action = torch.zeros(0)

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        zero = torch.zeros(self.num_envs, WIDTH, device=self.device)
        kept = self.memory.get("memory", zero)
        self.memory = {"memory": kept.masked_fill(rows[:, None], 0.0)}

    def step(self, action: Tensor) -> Step:
        self.action = action
        return super().step(action)

    def observe(self, following: Tensors) -> Tensor:
        ends = {**nest(self.before, "obs"), **nest(following, "next_obs")}
        self.memory = {"memory": self.remember({**ends, ACTION: self.action})}
        return self.memory["memory"]

    def transform_obs(self, obs: Tensors) -> Tensors:
        self.before = super().transform_obs(obs)
        return self.before


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
