"""The sandbox: programs that were written by a model become rewards only after three layers.

(1) the language (`sandbox_language`), (2) the gate: a locked process of its own for every new
program (`sandbox_worker`, `sandbox_lock`), (3) what it answers. "trusted" then evaluates the
translated program here, in slices of no more rows than the gate ran: a program is straight-line, so
that its time and memory depend on the number of rows alone and were measured at the gate. "strict"
keeps it in its process. Threat model: docs/sandbox.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.rewards.sandbox_language import Checked, Rejected, check
from embodied.rewards.sandbox_run import (
    COMPONENTS,
    Compiled,
    Paid,
    call,
    clean,
    compiled,
    require_sound,
)
from embodied.rewards.sandbox_worker import HEADER, pack, unpack

SLICE = 2048  # rows of the gate's largest call, and of a call afterwards
Mode = Literal["trusted", "strict"]


@dataclass(frozen=True)
class Limits:
    """`wall` s an answer may take, `cpu` s a program may compute in all, `memory` bytes beyond what
    the worker has, `output` bytes it may print, `peak`: the largest |reward|, `cost`: the most
    microseconds a row in large batches."""

    wall: float = 2.0
    cpu: int = 5
    memory: int = 1 << 30
    output: int = 64 << 10
    peak: float = 1000.0
    cost: float = 200.0


@dataclass(frozen=True)
class Report:
    """What the gate saw: rows tried, microseconds a row, and of each term (the reward is "")
    minimum, mean and maximum."""

    digest: str
    rows: int
    cost: float
    terms: dict[str, tuple[float, float, float]]
    lock: str


class Sandbox:
    """A template process from which a locked child is forked for every program.

    Use it as a context manager. `status` says what protects. ConfigError from "strict" where the
    system has no filter for system calls, or the child's test of itself fails. `raw` (tests only)
    runs plain Python in the child, without the language.
    """

    def __init__(self, limits: Limits | None = None, mode: Mode = "trusted", raw: bool = False):
        self.limits = Limits() if limits is None else limits
        self.mode: Mode = mode
        self.raw = raw
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-m", "embodied.rewards.sandbox_worker", str(theirs.fileno())]
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
        """End the template; its children end with it."""
        self.link.close()
        try:
            self.template.wait(5)
        except subprocess.TimeoutExpired:
            self.template.kill()
            self.template.wait()

    def worker(self) -> Worker:
        """A fresh locked process."""
        return Worker(self)

    def gate(self, source: str, inputs: dict[str, Tensor], real: bool = True) -> Gated:
        """`source` as a reward of `inputs` ([N, ...] by name), or Rejected. What is made up and not
        of the world (`real` false) says nothing about how large or finite rewards are.

        Asked twice for these rows, and once for SLICE rows made of them: the answers must be sound,
        the same both times, and those of a row must not depend on the other rows.
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
            # Other rows first, and in other shares.
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
            raise ConfigError("the sandbox's process did not start")
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


class Worker:
    """One locked process; `state` is what it said of itself."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.limits = sandbox, sandbox.limits
        (theirs_in, self.requests), (self.answers, theirs_out) = os.pipe(), os.pipe()
        self.printed, theirs_print = os.pipe()
        handles = [theirs_in, theirs_out, theirs_print]
        order = json.dumps({"order": "new", "limits": asdict(self.limits)}).encode()
        socket.send_fds(sandbox.link, [order], handles)
        for handle in handles:
            os.close(handle)
        self.pid: int | None = json.loads(sandbox.link.recv(4096))["pid"]
        self.heard = 0
        os.set_blocking(self.requests, False)
        self.state, _ = self._answer(time.monotonic() + 10 * self.limits.wall, 1 << 16)

    def ask(self, source: str, inputs: Sequence[Tensor], rows: int) -> Paid:
        """The program's answer for `inputs` [rows, ...]; Rejected at layer "process" where it
        breaks a limit (the process is gone then)."""
        if self.pid is None:
            raise Rejected("process", "it was stopped before")
        until = time.monotonic() + self.limits.wall
        frame = pack({"source": source, "rows": rows}, [value.numpy() for value in inputs])
        self._send(frame, until)
        header, arrays = self._answer(until, (COMPONENTS + 1) * rows * 4)
        if "layer" in header:
            raise Rejected(str(header["layer"])[:16], clean(str(header["reason"])))
        names = [clean(str(name))[:64] for name in header["names"]]
        good = len(arrays) == len(names) + 1 and all(
            a.shape == (rows,) and a.dtype == "float32" for a in arrays
        )
        if not good:
            raise self._stopped("its answer is malformed")
        values = [torch.from_numpy(array.copy()) for array in arrays]
        return Paid(values[0], dict(zip(names, values[1:], strict=True)))

    def close(self) -> str:
        """Kill the process and all it started; says how it had ended."""
        if self.pid is None:
            return ""
        order = json.dumps({"order": "end", "pid": self.pid}).encode()
        self.pid = None
        for handle in (self.requests, self.answers, self.printed):
            os.close(handle)
        self.sandbox.link.send(order)
        status = json.loads(self.sandbox.link.recv(4096))["status"]
        if os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status)).name
        return f"exit {os.WEXITSTATUS(status)}"

    def _stopped(self, why: str) -> Rejected:
        self.close()
        return Rejected("process", why)

    def _send(self, frame: bytes, until: float) -> None:
        view = memoryview(frame)
        while view:
            self._wait([], [self.requests], until)
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                view = view[os.write(self.requests, view) :]
                continue
            if self._ended():
                raise self._died()

    def _answer(self, until: float, most: int) -> tuple[dict[str, Any], list[Any]]:
        text, body = HEADER.unpack(self._receive(HEADER.size, until))
        if text > 1 << 16 or body > most:
            raise self._stopped("its answer is too long")
        try:
            header, arrays = unpack(self._receive(text, until), self._receive(body, until))
        except (ValueError, KeyError, TypeError) as error:
            raise self._stopped("its answer cannot be read") from error
        return header, arrays

    def _receive(self, count: int, until: float) -> bytes:
        got = bytearray()
        while len(got) < count:
            self._wait([self.answers], [], until)
            part = os.read(self.answers, count - len(got))
            if not part:
                raise self._died()
            got += part
        return bytes(got)

    def _wait(self, read: list[int], write: list[int], until: float) -> None:
        """Until one is ready; what the program prints is counted and thrown away."""
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise self._stopped(f"no answer within {self.limits.wall:g} s")
            ready, able, _ = select.select([*read, self.printed], write, [], left)
            if self.printed in ready:
                self.heard += len(said := os.read(self.printed, 1 << 16))
                if self.heard > self.limits.output:
                    raise self._stopped(f"it prints more than {self.limits.output} bytes")
                if not said:
                    raise self._died()
            if able or [handle for handle in ready if handle != self.printed]:
                return

    def _ended(self) -> bool:
        return bool(select.select([self.answers], [], [], 0)[0])

    def _died(self) -> Rejected:
        how = self.close()
        reasons = {
            "SIGXCPU": f"it computes longer than {self.limits.cpu} s",
            "SIGKILL": "it was stopped by a limit, or stopped itself",
            "SIGSEGV": "it crashed (SIGSEGV)",
        }
        return Rejected("process", reasons.get(how, f"it ended early ({how})"))


class Gated:
    """A program that passed the gate: rewards of rows, in slices of at most SLICE."""

    def __init__(
        self, checked: Checked, report: Report, limits: Limits, worker: Worker | None = None
    ) -> None:
        self.checked, self.report, self.limits, self.held = checked, report, limits, worker
        self.made: dict[torch.device, Compiled] = {}

    def __call__(self, inputs: dict[str, Tensor]) -> Paid:
        """Rewards of `inputs` [N, ...] on their device; Rejected where they are not sound."""
        values = [inputs[name] for name in self.checked.inputs]
        count = len(values[0]) if values else len(next(iter(inputs.values())))
        parts = [
            self._slice([value[at : at + SLICE] for value in values], min(SLICE, count - at))
            for at in range(0, max(count, 1), SLICE)
        ]
        paid = parts[0] if len(parts) == 1 else _joined(parts)
        require_sound(paid, self.limits.peak)
        return paid

    def _slice(self, values: list[Tensor], count: int) -> Paid:
        if self.held is None:
            device = values[0].device if values else torch.device("cpu")
            if device not in self.made:
                self.made[device] = compiled(self.checked, device)
            return call(self.made[device], values, count)
        device = values[0].device if values else torch.device("cpu")
        paid = self.held.ask(self.checked.source, [v.cpu() for v in values], count)
        parts = {name: part.to(device) for name, part in paid.components.items()}
        return Paid(paid.total.to(device), parts)

    def close(self) -> None:
        if self.held is not None:
            self.held.close()


def _environment() -> dict[str, str]:
    """What the template needs to find Python's packages, and nothing else."""
    paths = os.pathsep.join(filter(None, sys.path))
    return {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _readable(link: socket.socket, seconds: float) -> bool:
    return bool(select.select([link], [], [], seconds)[0])


def _require_same(reason: str, a: Paid, b: Paid, within: float = 0.0) -> None:
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


def _taken(paid: Paid, order: Tensor) -> Paid:
    return Paid(paid.total[order], {name: part[order] for name, part in paid.components.items()})


def _joined(parts: Sequence[Paid]) -> Paid:
    names = parts[0].components
    return Paid(
        torch.cat([part.total for part in parts]),
        {name: torch.cat([part.components[name] for part in parts]) for name in names},
    )


def _statistics(paid: Paid) -> dict[str, tuple[float, float, float]]:
    return {
        name: (float(v.min()), float(v.mean()), float(v.max()))
        for name, v in {"": paid.total, **paid.components}.items()
    }
