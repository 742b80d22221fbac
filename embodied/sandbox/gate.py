"""Sandbox for reward programs that were written by a model, with three layers.

(1) the allow-list of the language (`allow_list`), (2) the gate: every new program first runs in its
own locked process (`worker`, `lock`), (3) validation of its output. "trusted" then evaluates the
translated program in this process, in slices of no more transitions than the gate used: programs
are straight-line, so their time and memory depend on the number of transitions alone, and the gate
has measured them. "strict" keeps the program in its process. Threat model: docs/sandbox.md.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.sandbox.allow_list import Checked, Rejected, check
from embodied.sandbox.evaluate import (
    Compiled,
    ProgramOutput,
    call,
    compiled,
    require_sound,
)
from embodied.sandbox.process import Limits, Worker

SLICE = 2048  # transitions of the gate's largest call, and of each later call
Mode = Literal["trusted", "strict"]


@dataclass(frozen=True)
class Report:
    """Results of the gate: rows tested, microseconds per row, and minimum, mean and maximum of each
    component (the total is "")."""

    digest: str
    rows: int
    cost: float
    terms: dict[str, tuple[float, float, float]]
    lock: str


class Sandbox:
    """A template process that forks a locked child for every program.

    A context manager. `status` describes the protection in force. ConfigError for "strict" if the
    system has no system-call filter, or the child's self-test fails. `raw` (tests only) runs plain
    Python in the child, without the language.
    """

    def __init__(self, limits: Limits | None = None, mode: Mode = "trusted", raw: bool = False):
        self.limits = Limits() if limits is None else limits
        self.mode: Mode = mode
        self.raw = raw
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-m", "embodied.sandbox.worker", str(theirs.fileno())]
        self.template = subprocess.Popen(
            [*words, *(["raw"] if raw else [])],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(),
        )
        theirs.close()
        self.link = ours
        self.status = self._test()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the template and its children."""
        self.link.close()
        try:
            self.template.wait(5)
        except subprocess.TimeoutExpired:
            self.template.kill()
            self.template.wait()

    def worker(self) -> Worker:
        """A new locked process."""
        return Worker(self.link, self.limits)

    def gate(self, source: str, inputs: dict[str, Tensor], real: bool = True) -> Gated:
        """`source` as a reward function of `inputs` ([N, ...] by name); Rejected if it fails. For
        random inputs (`real` false) the size of rewards is not checked.

        It is called twice on these rows and once on SLICE rows sampled from them: the outputs must
        be valid, deterministic, and independent of the other rows.
        """
        checked = check(source, inputs)
        rows = [inputs[name].cpu() for name in checked.inputs]
        count = len(next(iter(inputs.values())))
        worker = self.worker()
        try:
            first = worker.ask(source, rows, count)
            if real:
                require_sound(first, self.limits.peak)
            _require_same(
                "it answers differently when asked again", first, worker.ask(source, rows, count)
            )
            # In another order and in other proportions.
            order = (count * (torch.arange(SLICE).flip(0) / SLICE).square()).long()
            began = time.perf_counter()
            many = worker.ask(source, [row[order] for row in rows], SLICE)
            cost = 1e6 * (time.perf_counter() - began) / SLICE
            _require_same("a row's reward depends on other rows", _taken(first, order), many, 1e-4)
            if cost > self.limits.cost:
                raise Rejected(
                    "result", f"{cost:.0f} microseconds a row; at most {self.limits.cost:g}"
                )
        except BaseException:
            worker.close()
            raise
        report = Report(checked.digest, count, round(cost, 2), _statistics(first), self.status)
        if self.mode == "strict":
            return Gated(checked, report, self.limits, worker=worker)
        worker.close()
        return Gated(checked, report, self.limits)

    def _test(self) -> str:
        if not _readable(self.link, 60) or self.link.recv(64) != b"ready":
            raise ConfigError("the sandbox process did not start")
        worker = self.worker()
        state = worker.state
        worker.close()
        holds = state["seccomp"] == "on" and not state["test"]
        if self.mode == "strict" and not holds:
            raise ConfigError(
                f"strict mode needs a locked process; seccomp: {state['seccomp']}, still possible: "
                f"{', '.join(state['test']) or 'nothing'}; use mode=trusted or another machine"
            )
        leaks = f"; still possible there: {', '.join(state['test'])}" if state["test"] else ""
        return f"seccomp {state['seccomp']}, user {state['user']}{leaks}"


class Gated:
    """A program that passed the gate; evaluates rows in slices of at most SLICE."""

    def __init__(
        self, checked: Checked, report: Report, limits: Limits, worker: Worker | None = None
    ) -> None:
        self.checked, self.report, self.limits, self.held = checked, report, limits, worker
        self.made: dict[torch.device, Compiled] = {}

    def __call__(self, inputs: dict[str, Tensor]) -> ProgramOutput:
        """Output for `inputs` [N, ...], on their device; Rejected if it is invalid."""
        values = [inputs[name] for name in self.checked.inputs]
        count = len(values[0]) if values else len(next(iter(inputs.values())))
        parts = [
            self._slice([value[at : at + SLICE] for value in values], min(SLICE, count - at))
            for at in range(0, max(count, 1), SLICE)
        ]
        output = parts[0] if len(parts) == 1 else _joined(parts)
        require_sound(output, self.limits.peak)
        return output

    def _slice(self, values: list[Tensor], count: int) -> ProgramOutput:
        if self.held is None:
            device = values[0].device if values else torch.device("cpu")
            if device not in self.made:
                self.made[device] = compiled(self.checked, device)
            return call(self.made[device], values, count)
        device = values[0].device if values else torch.device("cpu")
        output = self.held.ask(self.checked.source, [v.cpu() for v in values], count)
        parts = {name: part.to(device) for name, part in output.components.items()}
        return ProgramOutput(output.total.to(device), parts)

    def close(self) -> None:
        if self.held is not None:
            self.held.close()


def _environment() -> dict[str, str]:
    """Environment variables of the template: what Python needs to find its packages."""
    paths = os.pathsep.join(filter(None, sys.path))
    return {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _readable(link: socket.socket, seconds: float) -> bool:
    return bool(select.select([link], [], [], seconds)[0])


def _require_same(reason: str, a: ProgramOutput, b: ProgramOutput, within: float = 0.0) -> None:
    pairs: Iterable[tuple[Tensor, Tensor]] = [
        (a.total, b.total),
        *(
            (value, b.components.get(name, value.new_empty(0)))
            for name, value in a.components.items()
        ),
    ]
    for one, other in pairs:
        same = one.shape == other.shape and torch.allclose(
            one, other, rtol=within, atol=within, equal_nan=True
        )
        if not same:
            raise Rejected("result", reason)


def _taken(output: ProgramOutput, order: Tensor) -> ProgramOutput:
    return ProgramOutput(
        output.total[order], {name: part[order] for name, part in output.components.items()}
    )


def _joined(parts: Sequence[ProgramOutput]) -> ProgramOutput:
    names = parts[0].components
    return ProgramOutput(
        torch.cat([part.total for part in parts]),
        {name: torch.cat([part.components[name] for part in parts]) for name in names},
    )


def _statistics(output: ProgramOutput) -> dict[str, tuple[float, float, float]]:
    return {
        name: (float(v.min()), float(v.mean()), float(v.max()))
        for name, v in {"": output.total, **output.components}.items()
    }
