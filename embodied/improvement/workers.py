"""Processes in which parts of an improvement run: they are asked and answer through pipes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from embodied.core.children import interrupt_with_parent

STOPPED = (-signal.SIGINT, 130, 0)  # exit statuses of a process that was interrupted (0: idle)


class Workers:
    """Calls methods of an object in other processes, one for each thread that asks. `command`
    starts one, which calls `answer`; `log` has what they said."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command = command
        self.log = log
        self.own = threading.local()
        self.every: list[subprocess.Popen[bytes]] = []

    def __call__(self, method: str, *given: Any) -> Any:
        """What the method returns; KeyboardInterrupt if the process was interrupted."""
        process = self._process()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump((method, given), process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            if code in STOPPED:
                raise KeyboardInterrupt from None
            raise RuntimeError(f"{method} ended with {code}; see {self.log}") from None

    def _process(self) -> subprocess.Popen[bytes]:
        if not hasattr(self.own, "process"):
            with self.log.open("a") as log:
                self.own.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    preexec_fn=interrupt_with_parent,
                )
            self.every.append(self.own.process)
        return self.own.process

    def close(self) -> None:
        for process in self.every:
            process.communicate()


def answers_of_this_process() -> IO[bytes]:
    """The pipe of the answers; what is printed from here on goes to the log."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def answer(make: Callable[[], object], answers: IO[bytes]) -> None:
    """Call what `Workers` ask for on a new object of `make` each time, until nothing more comes."""
    while True:
        try:
            method, given = pickle.load(sys.stdin.buffer)
        except (EOFError, KeyboardInterrupt):  # there is nothing more to do
            return
        pickle.dump(getattr(make(), method)(*given), answers)
        answers.flush()
