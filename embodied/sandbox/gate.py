"""Sandbox of reward programs: plain Python that runs in a locked process, in training too.

`gate` reads a program (`program`), loads it in a locked process of its own (`worker`, `lock`) and
tests it there. What passes stays in that process: nothing that a program computes, takes or breaks
happens in the training process. Threat model: docs/sandbox.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.sandbox.evaluate import ProgramOutput, require_sound
from embodied.sandbox.process import Limits, Worker, template
from embodied.sandbox.program import Program, Rejected, read

SLICE = 2048  # transitions of the gate's largest call, and of each later call


class DependsOnOthers(Rejected):
    """A program that mixes the transitions of a batch."""


@dataclass(frozen=True)
class Report:
    """Results of the gate: transitions tested, microseconds of CPU time per transition, minimum,
    mean and maximum of each component (the total is ""); `one_by_one`: the program takes one
    transition at a time, which is slow."""

    digest: str
    rows: int
    cost: float
    terms: dict[str, tuple[float, float, float]]
    lock: str
    one_by_one: bool = False


class Sandbox:
    """Starts locked processes for programs.

    `status` describes the protection in force. ConfigError if this system has no filter for system
    calls, or the self-test of a locked process fails; with `require_lock` false, programs run
    nevertheless, in a process of their own that is not locked.
    """

    def __init__(self, limits: Limits | None = None, require_lock: bool = True) -> None:
        self.limits = Limits() if limits is None else limits
        self.status = self._test(require_lock)

    def worker(self) -> Worker:
        """A new locked process."""
        return Worker(template(), self.limits)

    def gate(self, source: str, inputs: dict[str, Tensor], real: bool = True) -> Gated:
        """`source` as a reward function of `inputs` ([N, ...] by name); Rejected if it fails. For
        random inputs (`real` false) the size of rewards is not checked.

        It is called twice on these rows and once on SLICE rows sampled from them: the outputs must
        be valid, deterministic, and independent of the other rows.
        """
        program = read(source, inputs)
        try:
            return self._gated(program, inputs, real)
        except DependsOnOthers:
            if not program.attributes:
                raise
        # A norm without `axis=`, added to a number, has the shape of a batch by accident.
        return self._gated(program, inputs, real, one_by_one=True)

    def _gated(
        self,
        program: Program,
        inputs: dict[str, Tensor],
        real: bool,
        one_by_one: bool | None = None,
    ) -> Gated:
        worker = self.worker()
        try:
            worker.load(program.source, list(inputs), one_by_one)
            report = self._tested(program, worker, inputs, real)
        except BaseException:
            worker.close()
            raise
        return Gated(program, report, self.limits, worker)

    def _tested(
        self, program: Program, worker: Worker, inputs: dict[str, Tensor], real: bool
    ) -> Report:
        rows = [inputs[name].cpu() for name in program.inputs]
        count = len(next(iter(inputs.values())))
        first = worker.run(rows, count)
        if real:
            require_sound(first, self.limits.peak)
        again = worker.run(rows, count)
        if not _same(first.total, again.total, 0.0):
            raise Rejected("result", "it answers differently when asked again")
        # In another order and in other proportions.
        order = (count * (torch.arange(SLICE).flip(0) / SLICE).square()).long()
        many = worker.run([row[order] for row in rows], SLICE)
        if not _same(first.total[order], many.total, 1e-4):
            raise DependsOnOthers("result", "a transition's reward depends on other transitions")
        cost = 1e6 * worker.seconds / SLICE
        if cost > self.limits.cost:
            raise Rejected(
                "result",
                f"{cost:.0f} microseconds a transition; at most {self.limits.cost:g}: "
                "compute all transitions at once, on tensors [N, ...]",
            )
        terms = {
            name: (float(v.min()), float(v.mean()), float(v.max()))
            for name, v in {"": first.total, **first.components}.items()
        }
        return Report(program.digest, count, round(cost, 2), terms, self.status, worker.one_by_one)

    def _test(self, require_lock: bool) -> str:
        worker = self.worker()
        state = worker.state
        worker.close()
        left = state["test"]
        if require_lock and (state["seccomp"] != "on" or left):
            raise ConfigError(
                f"reward programs need a locked process; seccomp: {state['seccomp']}, still "
                f"possible: {', '.join(left) or 'nothing'}; for programs that you have read, set "
                "require_lock=false"
            )
        leaks = f"; still possible there: {', '.join(left)}" if left else ""
        return f"seccomp {state['seccomp']}, user {state['user']}{leaks}"


class Gated:
    """A program that passed the gate, in its locked process, which ends with this object;
    evaluates transitions in slices of at most SLICE."""

    def __init__(self, program: Program, report: Report, limits: Limits, worker: Worker) -> None:
        self.program = program
        self.report = report
        self.limits = limits
        self.worker = worker
        self.close = weakref.finalize(self, worker.close)

    def __call__(self, inputs: dict[str, Tensor]) -> ProgramOutput:
        """Output for `inputs` [N, ...], on their device; Rejected if it is invalid."""
        device = next(iter(inputs.values())).device
        values = [inputs[name].cpu() for name in self.program.inputs]
        count = len(next(iter(inputs.values())))
        parts = [
            self.worker.run([value[at : at + SLICE] for value in values], min(SLICE, count - at))
            for at in range(0, max(count, 1), SLICE)
        ]
        output = parts[0] if len(parts) == 1 else _joined(parts)
        require_sound(output, self.limits.peak)
        moved = {name: part.to(device) for name, part in output.components.items()}
        return ProgramOutput(output.total.to(device), moved)


def _same(one: Tensor, other: Tensor, within: float) -> bool:
    return torch.allclose(one, other, rtol=within, atol=within, equal_nan=True)


def _joined(parts: Sequence[ProgramOutput]) -> ProgramOutput:
    """The outputs of several slices; a component that a slice lacks is 0 there."""
    names: Iterable[str] = dict.fromkeys(name for part in parts for name in part.components)
    return ProgramOutput(
        torch.cat([part.total for part in parts]),
        {
            name: torch.cat(
                [part.components.get(name, torch.zeros_like(part.total)) for part in parts]
            )
            for name in names
        },
    )
