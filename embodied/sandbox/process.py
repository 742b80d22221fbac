"""Worker: the training process's handle of one locked process, over pipes with timeouts."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.sandbox.allow_list import Rejected
from embodied.sandbox.evaluate import COMPONENTS, ProgramOutput, clean
from embodied.sandbox.worker import HEADER, pack, unpack


@dataclass(frozen=True)
class Limits:
    """Limits of a program. `wall`: seconds per answer; `cpu`: seconds in total; `memory`: bytes
    beyond the worker's own; `output`: bytes printed; `peak`: largest |reward|; `cost`: microseconds
    per row in large batches."""

    wall: float = 2.0
    cpu: int = 5
    memory: int = 1 << 30
    output: int = 64 << 10
    peak: float = 1000.0
    cost: float = 200.0


class Worker:
    """One locked process; `state` is its report on its own lock."""

    def __init__(self, link: socket.socket, limits: Limits) -> None:
        self.link, self.limits = link, limits
        (theirs_in, self.requests), (self.answers, theirs_out) = os.pipe(), os.pipe()
        self.printed, theirs_print = os.pipe()
        handles = [theirs_in, theirs_out, theirs_print]
        order = json.dumps({"order": "new", "limits": asdict(self.limits)}).encode()
        socket.send_fds(link, [order], handles)
        for handle in handles:
            os.close(handle)
        self.pid: int | None = json.loads(link.recv(4096))["pid"]
        self.heard = 0
        os.set_blocking(self.requests, False)
        self.state, _ = self._answer(time.monotonic() + 10 * self.limits.wall, 1 << 16)

    def ask(self, source: str, inputs: Sequence[Tensor], rows: int) -> ProgramOutput:
        """The program's output for `inputs` [rows, ...]; Rejected at layer "process" if it exceeds
        a limit, in which case the process is gone."""
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
        return ProgramOutput(values[0], dict(zip(names, values[1:], strict=True)))

    def close(self) -> str:
        """Kill the process and its children; returns how it had ended."""
        if self.pid is None:
            return ""
        order = json.dumps({"order": "end", "pid": self.pid}).encode()
        self.pid = None
        for handle in (self.requests, self.answers, self.printed):
            os.close(handle)
        self.link.send(order)
        status = json.loads(self.link.recv(4096))["status"]
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
        """Wait until a handle is ready; printed output is counted and discarded."""
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
