"""Runner: the part of `sweep` that runs on a machine of a Ray cluster; imports no torch."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from embodied.core.build import ConfigError
from embodied.core.children import interrupt_with_parent
from embodied.study.study import program

SHARED = 10.0  # s for a file to be found on another machine


class Runner:
    """The actor: runs a training on its machine. Ray calls its methods in two threads."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.asked = False  # to interrupt it

    def run(self, words: Sequence[str], folder: str, at: str, mark: str) -> int | str:
        """Run `words` in the directory `at` to the end; the exit code, or why it did not begin.
        The file FOLDER.ray has to hold `mark`."""
        try:
            require_shared(Path(f"{folder}.ray"), mark)
            with Path(f"{folder}.log").open("a") as log:
                self.process = subprocess.Popen(
                    program(words),
                    cwd=at,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is the sweep's, which interrupts
                    preexec_fn=interrupt_with_parent,
                )
        except (ConfigError, OSError) as error:
            return f"{socket.gethostname()}: {error}"
        if self.asked:
            self.interrupt()
        return self.process.wait()

    def interrupt(self) -> None:
        """SIGINT, also to a training that begins later."""
        self.asked = True
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)


def require_shared(file: Path, mark: str) -> None:
    """ConfigError unless `file` holds `mark`, which the sweep's machine wrote into it."""
    end = time.monotonic() + SHARED
    while not file.exists() or file.read_text() != mark:
        if time.monotonic() > end:
            raise ConfigError(
                f"{file} of the sweep's machine is not here, so no metrics would be seen: "
                "out=DIR should be a folder that all machines of the cluster share"
            )
        time.sleep(0.1)
