"""Chaos at the operator's terminal: the program that started the daemon and its episode hangs.

`python -m tests.real_robot.chaos_terminal FOLDER SECONDS` is that program: what `embodied deploy`
does once its questions are answered, for the deployment in FOLDER (SECONDS of 0: no time limit).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodied.deploy.session import Session
from embodied.real_robot.daemon.daemon import UNHEARD
from embodied.real_robot.deployment import Deployment
from tests.real_robot.blows import BRAKE, TURN
from tests.real_robot.chaos import Blow, Scene, Settings, ended, place
from tests.real_robot.test_daemon import PATIENT, Bridge, until

LIMIT = 4.0  # s of an episode with a time limit
POLLED = 0.3  # s between two requests of a session, and the daemon's poll


class Terminal(Bridge):
    """A session that runs one episode of `seconds` (0: no limit), with its daemon."""

    seconds = 0.0

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.real_robot.chaos_terminal"),
                *(str(self.folder), str(self.seconds)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=(self.folder / "daemon.err").open("wb"),
        )
        until(self._answers, "the daemon answers")

    def again(self, seconds: float) -> None:
        """The one before is killed, and another session starts."""
        self.end()
        self.seconds = seconds
        self.start()

    def end(self) -> None:
        """Its daemon goes with it."""
        self.process.kill()
        self.process.wait()
        until(lambda: not (self.folder / "state").exists(), "its daemon has ended")


class AtTerminal(Scene):
    """The scene of a session."""

    bridge: Terminal

    def bridged(self) -> Bridge:
        return Terminal(self.folder)

    def running(self) -> dict[str, Any]:
        return self.bridge.mode("RUNNING")

    def close(self) -> None:
        self.bridge.end()


@contextmanager
def terminal(settings: Settings) -> Iterator[Scene]:
    """A session whose episode has no time limit, on the simulated arm."""
    with place() as folder:
        yield from ended(AtTerminal(folder, settings))


def hang(scene: Scene) -> None:
    os.kill(scene.bridge.process.pid, signal.SIGSTOP)


def new_session(scene: Scene) -> None:
    assert isinstance(scene, AtTerminal)
    scene.bridge.again(LIMIT)


TERMINAL = (
    Blow(
        "the terminal of `embodied deploy` hangs (SIGSTOP), the episode has no time limit",
        "the daemon: it stops an episode whose session is silent",
        hang,
        lambda s: (UNHEARD + POLLED + BRAKE, 0.0),
        "rests",
        "was silent for",
        on="terminal",
        saved=False,
        mend=new_session,
    ),
    Blow(
        f"the same, in an episode of seconds={LIMIT:.0f}",
        "control: the episode's time limit",
        hang,
        lambda s: (LIMIT + TURN + BRAKE, 0.0),
        "rests",
        "TIME",
        on="terminal",
        saved=False,
        mend=lambda scene: None,
    ),
)
"""At the terminal, in this order."""


def main(folder: Path, seconds: float) -> None:
    """One episode of the deployment in `folder`."""
    output = folder / f"session-{os.getpid()}"
    output.mkdir()
    with Session(folder, Deployment.read(folder), output, lambda *_: None) as session:
        session.ready()
        session.run(1, seconds if seconds else None, home=False)
        time.sleep(PATIENT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
