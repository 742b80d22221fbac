"""A subprocess of the daemon, with its log and the reason of its death."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class Child:
    """`python -m module folder words...`; what it prints goes to `folder/LOG.log` (its name). It
    ends when its standard input does, and so also when the daemon is gone."""

    def __init__(
        self, name: str, module: str, folder: Path, words: Sequence[str] = (), log: str = ""
    ) -> None:
        self.name, self.module, self.folder, self.words = name, module, folder, tuple(words)
        self.log = folder / f"{log if log else name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.died = ""
        """How, once it did; empty while it lives, and after an `end` that was wanted."""

    def start(self) -> None:
        """A new one; the one before should be dead."""
        self.died = ""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(self.folder), *self.words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the daemon, which ends it in order
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """0 where it does not live."""
        return self.process.pid if self.process is not None and self.alive else 0

    def has_died(self) -> bool:
        """Whether it has died since the last look; `died` says how."""
        if self.process is None or self.died or self.process.poll() is None:
            return False
        code, words = self.process.returncode, last_words(self.log)
        how = _signal(-code) if code < 0 else f"exit status {code}"
        self.died = f"the {self.name} process died ({how}){': ' + words if words else ''}"
        return True

    def send(self, word: bytes) -> None:
        """Write a few bytes to its standard input; one that is gone hears nothing."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.write(word)
                self.process.stdin.flush()

    def stop(self, patience: float) -> None:
        """Ask it to go, and kill it after `patience` s."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


def last_words(path: Path) -> str:
    """The last line of a log, as far as it can be shown."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 2000))
        lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
