"""Runner: the part of `ray_launcher` that runs on a machine of the cluster; imports no torch."""

from __future__ import annotations

import ctypes
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Runner:
    """The actor: runs a training on its machine. Ray calls its methods in two threads."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.asked = False  # to interrupt it

    def run(self, words: Sequence[str], log: str, folder: str) -> int | None:
        """Run `words` in `folder` to the end; the exit code, None where it did not begin."""
        if self.asked:
            return None
        with Path(log).open("a") as said:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the sweep's, which interrupts
                preexec_fn=hear_interrupts,
            )
        if self.asked:
            self.interrupt()
        return self.process.wait()

    def interrupt(self) -> None:
        """SIGINT, also to one that begins later."""
        self.asked = True
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)


def hear_interrupts() -> None:
    """In the training's process before it begins: it hears SIGINT, which the threads of an actor
    block, and is sent one when its actor is killed, as Ray does when the sweep itself is."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGINT))
