"""Channel: starts a worker under another Python and exchanges requests with it.

Answers are JSON and arrays of sizes that were agreed on before: nothing that the worker sends can
run code here.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.envs.process.worker.memory import Layout, mapped, total

HERE = Path(__file__).parent
# Only the package `worker` is found there: other names would hide modules of the other Python.
START = """
import sys
sys.path.insert(0, sys.argv.pop())
import worker.main
del sys.path[0]
worker.main.main()
"""
LONGEST = 1 << 20  # bytes of an answer
SHARED = Path("/dev/shm")


class WorkerError(RuntimeError):
    """The worker process failed, ended, did not answer in time, or answered nonsense."""


class Channel:
    """One worker process. `timeout` (s) is how long an answer may take."""

    def __init__(self, python: str, timeout: float) -> None:
        self.python = python
        self.timeout = timeout
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        command = [python, "-I", "-c", START, str(HERE)]
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._said)
        except OSError as error:
            raise ConfigError(
                f"env.python: cannot start {python} ({error.strerror}); env.python=PATH"
            ) from error
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self.process.stdout, selectors.EVENT_READ)
        self._rest = b""
        self._file: str | None = None

    def share(self, layout: Layout) -> dict[str, NDArray[Any]]:
        """Map arrays of `layout` into both processes."""
        folder = SHARED if SHARED.is_dir() else Path(tempfile.gettempdir())
        handle, path = tempfile.mkstemp(prefix="embodied_env_", dir=folder)
        self._file = path
        os.truncate(handle, total(layout))
        os.close(handle)
        self.ask({"memory": path, "layout": [list(each) for each in layout]})
        arrays = mapped(path, layout)
        self._unlink()  # both have it open; the memory goes with the processes
        return arrays

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer; WorkerError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            if len(self._rest) > LONGEST:
                raise WorkerError("the worker's answer is too long")
            if not self._ready.select(self.timeout):
                raise WorkerError(f"the worker did not answer in {self.timeout:g} s; env.timeout=")
            part = self.process.stdout.read(LONGEST)
            if part == b"":
                raise self._ended()
            self._rest += part or b""
        line, _, self._rest = self._rest.partition(b"\n")
        answer = self._parsed(line)
        if "error" in answer:
            raise WorkerError(str(answer["error"])[:2000])
        return answer

    def close(self) -> None:
        """End the worker; it is killed after 5 s."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                # A worker that has died leaves a request that cannot be flushed.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._ready.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._said.close()
        self._unlink()

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkerError(f"the worker answered no JSON: {line[:100]!r}") from error
        if not isinstance(answer, dict):
            raise WorkerError(f"the worker answered no JSON object: {line[:100]!r}")
        return answer

    def _ended(self) -> WorkerError:
        code = self.process.wait()
        self._said.seek(0)
        lines = self._said.read()[-4000:].decode(errors="replace").strip().splitlines()
        last = f"; it said: {lines[-1]}" if lines else ""
        return WorkerError(f"the worker process ended (exit code {code}){last}")

    def _unlink(self) -> None:
        if self._file is not None:
            Path(self._file).unlink(missing_ok=True)
            self._file = None
