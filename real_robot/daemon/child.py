"""A subprocess of the daemon, with its log and the reason of its death."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from embodied.core.children import module_command

LOOK = 0.005  # s


class Child:
    """`python -m module folder words...`; what it prints goes to `folder/LOG.log` (its name). It
    ends when its standard input does, and so also when the daemon is gone."""

    def __init__(
        self, name: str, module: str, folder: Path, words: Sequence[str] = (), log: str = ""
    ) -> None:
        self.name = name
        self.module = module
        self.folder = folder
        self.words = tuple(words)
        self.log = folder / f"{log if log else name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._kill_at = float("inf")
        self._ending = False
        self.died = ""  # how, once it did; empty while it lives, and after an `end` that was wanted

    def start(self) -> None:
        """A new one; the one before should be dead."""
        self.died = ""
        self._ending = False
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                module_command(self.module, str(self.folder), *self.words),
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
        return self.process.pid if self.process is not None and self.alive else 0

    def has_died(self) -> bool:
        """Whether it has died since the last look; `died` says how."""
        if self.process is None or self.died or self._ending or self.process.poll() is None:
            return False
        code, words = self.process.returncode, last_words(self.log)
        self.died = (
            f"the {self.name} process died ({how_ended(code)}){': ' + words if words else ''}"
        )
        return True

    def send(self, word: bytes) -> None:
        """Write a few bytes to its standard input; one that is gone hears nothing."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.write(word)
                self.process.stdin.flush()

    def end(self, patience: float) -> None:
        """Ask it to go; `ended` kills it after `patience` s. Neither waits."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        self._ending = True
        self._kill_at = time.monotonic() + patience

    def ended(self) -> bool:
        """Whether it is gone; call often after `end`."""
        if self.process is None:
            return True
        if self.process.poll() is None:
            if time.monotonic() >= self._kill_at:
                self.process.kill()
            return False
        self.process = None
        return True

    def abandon(self) -> None:
        if self.process is not None:
            self.process.kill()
            threading.Thread(target=self.process.wait, daemon=True).start()
        self.process = None

    def stop(self, patience: float) -> None:
        self.end(patience)
        while not self.ended():
            time.sleep(LOOK)


def last_words(path: Path) -> str:
    """The last line of a log before the warnings of ruckig's binding, which come at exit."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 4000))
        text = log.read().decode(errors="replace")
    lines = text.split("nanobind: leaked")[0].strip().splitlines()
    return lines[-1][:300] if lines else ""


def how_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
