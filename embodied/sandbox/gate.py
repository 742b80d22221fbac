"""Sandbox of reward programs: plain Python that runs in a locked process, in training too.

`gate` reads a program (`program`), loads it in a locked process of its own (`worker`) and tests it
there. What passes stays in that process: nothing that a program computes, takes or breaks
happens in the training process. Threat model: docs/sandbox.md.

`Template` and `Worker` are the training process's handles of the template process, and of one
locked process per program. Time and memory are limited per call. Time is the CPU
time of the locked process, read from outside, so that a busy machine stops no program.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Positive
from embodied.core.build import ConfigError
from embodied.core.children import module_command
from embodied.sandbox.program import (
    COMPONENTS,
    Program,
    ProgramOutput,
    Rejected,
    clean,
    read,
    require_sound,
)
from embodied.sandbox.worker import HEADER, pack, unpack

PIPE = 1 << 20  # bytes of a pipe's buffer, where the system allows it
TIMED = 5  # calls of a program that seems too slow, of which the fastest counts
LOOK = 0.05  # seconds between two looks at the CPU time of a slow call
REGAINED = 0.05  # of `Limits.wait`, with each call


@dataclass(frozen=True)
class Limits:
    """Limits of a program, per call unless stated."""

    cpu: Positive = 2.0  # seconds of computing
    wall: Positive = 30.0  # seconds in all
    wait: Positive = 2.0  # seconds without computing, in a call and in the last 1 / REGAINED calls
    memory: Count = 1 << 30  # bytes beyond the process's own
    output: CountOrZero = 64 << 10  # bytes printed
    peak: Positive = 1000.0  # largest |reward|
    cost: Positive = 200.0  # microseconds of CPU time per transition, in the largest call


class Template:
    """A process that has loaded torch, and forks a locked child for every program."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = ours
        self.lock = threading.Lock()
        paths = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            module_command("embodied.sandbox.worker", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # What Python needs to find its packages.
            env={"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        theirs.close()
        self.close = weakref.finalize(self, _end, ours, self.process)
        if not select.select([ours], [], [], 120)[0] or ours.recv(64) != b"ready":
            raise ConfigError("the sandbox process did not start")

    def order(self, handles: Sequence[int] = (), **words: Any) -> dict[str, Any]:
        """Send one order with open files; returns the answer."""
        with self.lock:
            socket.send_fds(self.link, [json.dumps(words).encode()], list(handles))
            return json.loads(self.link.recv(4096))


@cache
def template() -> Template:
    """The one template of this process: loading torch takes seconds."""
    return Template()


def _end(link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Stop a template, which ends with its link, and its children, which end with it."""
    link.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Worker:
    """One locked process; `state` is its report on its own lock. `seconds`: CPU time of the last
    call; `one_by_one`: whether the program is called once per transition."""

    def __init__(self, origin: Template, limits: Limits) -> None:
        self.origin = origin
        self.limits = limits
        (theirs_in, self.requests), (self.answers, theirs_out) = os.pipe(), os.pipe()
        self.printed, theirs_print = os.pipe()
        handles = [theirs_in, theirs_out, theirs_print]
        for handle in (self.requests, self.answers):
            with contextlib.suppress(OSError, AttributeError):  # Linux only, up to a limit
                fcntl.fcntl(handle, fcntl.F_SETPIPE_SZ, PIPE)
        self.pid: int | None = origin.order(handles, order="new", limits=asdict(limits))["pid"]
        for handle in handles:
            os.close(handle)
        self.heard = 0
        self.calls = 0
        self.patience = limits.wait  # seconds that it may still wait
        self.seconds = 0.0
        self.one_by_one = False
        os.set_blocking(self.requests, False)
        self._start()
        self.state, _ = self._answer(1 << 16)

    def load(self, source: str, known: Sequence[str], one_by_one: bool | None = None) -> None:
        """Load a program; Rejected if that fails or takes too long. `one_by_one` true: it gets one
        transition at a time; None: only if it cannot take batches."""
        self._ask({"source": source, "known": list(known), "one_by_one": one_by_one}, [], 0)

    def run(self, inputs: Sequence[Tensor], rows: int) -> ProgramOutput:
        """The loaded program's output for `inputs` [rows, ...]; Rejected at layer "process" if it
        exceeds a limit, in which case the process is gone."""
        most = (COMPONENTS + 1) * rows * 4
        header, arrays = self._ask({"rows": rows}, [value.numpy() for value in inputs], most)
        names: Any = header.get("names")
        good = (
            isinstance(names, list)
            and 0 < len(arrays) == len(names) + 1
            and all(a.shape == (rows,) and a.dtype == "float32" for a in arrays)
        )
        if not good:
            raise self._stopped("its answer is malformed")
        self.one_by_one = header.get("one_by_one") is True
        values = [torch.from_numpy(array.copy()) for array in arrays]
        labels = [clean(str(name))[:64] for name in names]
        return ProgramOutput(values[0], dict(zip(labels, values[1:], strict=True)))

    def close(self) -> str:
        """Kill the process and its children; returns how it had ended."""
        if self.pid is None:
            return ""
        pid = self.pid
        self.pid = None
        for handle in (self.requests, self.answers, self.printed):
            os.close(handle)
        status = self.origin.order(order="end", pid=pid)["status"]
        if os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status)).name
        return f"exit {os.WEXITSTATUS(status)}"

    def _ask(
        self, order: dict[str, Any], arrays: Sequence[Any], most: int
    ) -> tuple[dict[str, Any], list[Any]]:
        if self.pid is None:
            raise Rejected("process", "it was stopped before")
        self.calls += 1
        self._start()
        self._send(pack({**order, "call": self.calls}, arrays))
        header, found = self._answer(most)
        self.seconds = self._used() - self.begun
        self.patience -= self._waited()
        if "layer" in header:
            raise Rejected(clean(str(header["layer"]))[:16], clean(str(header.get("reason", ""))))
        if header.get("call") != self.calls:
            raise self._stopped("it answers another call than the last one")
        return header, found

    def _start(self) -> None:
        """Begin a call: its limits are counted from here."""
        self.until, self.begun, self.heard = time.monotonic() + self.limits.wall, self._used(), 0
        self.since, self.delay = time.monotonic(), self._delay()
        self.patience = min(self.limits.wait, self.patience + REGAINED * self.limits.wait)

    def _waited(self) -> float:
        """Seconds of this call in which the process had nothing to compute: those in which a busy
        machine let it wait, or this process, are not counted."""
        computed = self._used() - self.begun
        return max(0.0, time.monotonic() - self.since - computed - (self._delay() - self.delay))

    def _delay(self) -> float:
        """Seconds so far that the process and this thread were ready and not run (Linux)."""
        total = 0.0
        for task in ("thread-self", str(self.pid)):
            with contextlib.suppress(OSError, ValueError, IndexError):
                total += int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) / 1e9
        return total

    def _used(self) -> float:
        """CPU seconds of the process so far (elsewhere than on Linux: the wall clock's)."""
        if self.pid is None or sys.platform != "linux":
            return time.monotonic()
        with contextlib.suppress(OSError):  # it has just ended
            return time.clock_gettime((~self.pid << 3) | 2)  # as clock_getcpuclockid(3)
        return self.begun

    def _stopped(self, why: str) -> Rejected:
        self.close()
        return Rejected("process", why)

    def _send(self, frame: bytes) -> None:
        view = memoryview(frame)
        while view:
            self._wait([], [self.requests])
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                view = view[os.write(self.requests, view) :]
                continue
            if select.select([self.answers], [], [], 0)[0]:
                raise self._died()

    def _answer(self, most: int) -> tuple[dict[str, Any], list[Any]]:
        text, body = HEADER.unpack(self._receive(HEADER.size))
        if text > 1 << 16 or body > most:
            raise self._stopped("its answer is too long")
        try:
            return unpack(self._receive(text), self._receive(body))
        except Rejected:
            raise
        except ValueError as error:
            raise self._stopped("its answer cannot be read") from error

    def _receive(self, count: int) -> bytes:
        got = bytearray()
        while len(got) < count:
            self._wait([self.answers], [])
            part = os.read(self.answers, count - len(got))
            if not part:
                raise self._died()
            got += part
        return bytes(got)

    def _wait(self, read: list[int], write: list[int]) -> None:
        """Wait until a handle is ready; printed output is counted and discarded."""
        while True:
            ready, able, _ = select.select([*read, self.printed], write, [], LOOK)
            if self.printed in ready:
                self.heard += len(said := os.read(self.printed, 1 << 16))
                if self.heard > self.limits.output:
                    raise self._stopped(f"it prints more than {self.limits.output} bytes")
                if not said:
                    raise self._died()
            if able or [handle for handle in ready if handle != self.printed]:
                return
            if self._used() - self.begun > self.limits.cpu:
                raise self._stopped(f"it computes longer than {self.limits.cpu:g} s in one call")
            if self._waited() > self.patience:
                raise self._stopped(
                    f"it waits without computing, longer than {self.limits.wait:g} s in all"
                )
            if time.monotonic() > self.until:
                raise self._stopped(f"no answer within {self.limits.wall:g} s")

    def _died(self) -> Rejected:
        how = self.close()
        reasons = {
            "SIGKILL": "it was stopped by a limit, or stopped itself",
            "SIGSEGV": "it crashed (SIGSEGV)",
        }
        return Rejected("process", reasons.get(how, f"it ended early ({how})"))


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

        It is called twice on these rows, twice on the first of them, and once on SLICE rows sampled
        from them: the outputs must be valid, the same again, and independent of the other rows.
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
        few = max(1, count // 4)
        alone = worker.run([row[:few] for row in rows], few)
        first = worker.run(rows, count)
        if real:
            require_sound(first, self.limits.peak)
        again = worker.run([row[:few] for row in rows], few)  # with other rows in between
        kept = not _same(alone.total, again.total, 0.0)
        if kept or not _same(first.total, worker.run(rows, count).total, 0.0):
            raise Rejected(
                "result",
                "it answers differently when asked again: it must keep nothing between calls, and "
                "draw no random numbers",
            )
        # In another order and in other proportions.
        order = (count * (torch.arange(SLICE).flip(0) / SLICE).square()).long()
        many = worker.run([row[order] for row in rows], SLICE)
        same = _same(first.total[order], many.total, 1e-4)
        if not same or not _same(first.total[:few], alone.total, 1e-4):  # without the extremes too
            raise DependsOnOthers("result", "a transition's reward depends on other transitions")
        costs = [worker.seconds]
        # Beside busy processes the same call takes up to three times the CPU time.
        while (cost := 1e6 * min(costs) / SLICE) > self.limits.cost and len(costs) < TIMED:
            worker.run([row[order] for row in rows], SLICE)
            costs.append(worker.seconds)
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
        output = parts[0]
        if len(parts) > 1:  # a component that a slice lacks is 0 there
            names: Iterable[str] = dict.fromkeys(name for part in parts for name in part.components)
            slices = {
                name: [part.components.get(name, torch.zeros_like(part.total)) for part in parts]
                for name in names
            }
            total = torch.cat([part.total for part in parts])
            output = ProgramOutput(total, {name: torch.cat(s) for name, s in slices.items()})
        require_sound(output, self.limits.peak)
        moved = {name: part.to(device) for name, part in output.components.items()}
        return ProgramOutput(output.total.to(device), moved)


def _same(one: Tensor, other: Tensor, within: float) -> bool:
    return torch.allclose(one, other, rtol=within, atol=within, equal_nan=True)
