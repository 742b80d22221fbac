"""Control process: `python -m embodied.real_robot.control.main FOLDER`, started by the daemon.

It ends when an operator quits, or when its standard input closes: without the daemon no operator
can stop the arm, so the arm is brought to rest and held.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from embodied.core.build import ConfigError
from embodied.real_robot.assemble import build_control
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import DAEMON_GONE, TERMINATED
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.mailbox import MailboxError
from embodied.real_robot.kernel.rate import Rate, ahead_of_others
from embodied.real_robot.watchdog.client import Watchdog

PATIENCE = 5.0  # s to wait for another control process to let go of the arm


def lock_arm(folder: Path) -> int:
    """Become the only control process of `folder`; the handle to keep. DriverError."""
    handle = os.open(folder / "arm.lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise DriverError("another control process still has this arm; end it") from error
            time.sleep(0.05)


class DaemonWatch:
    """Calls `do` with a reason when the daemon is gone or wants this process to go, and `told` when
    it says anything else."""

    def __init__(self, do: Callable[[str], None], told: Callable[[], None] = lambda: None) -> None:
        self.do = do
        self.told = told
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._begin()

    def renew(self) -> None:
        """Let a new thread watch, which is held by whatever the calling thread is held by."""
        os.close(self._ends)
        self._thread.join()
        self._begin()

    def _begin(self) -> None:
        ended, self._ends = os.pipe()
        self._thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        self._thread.start()

    def _watch(self, ended: int) -> None:
        while ended not in (ready := select.select([0, ended], [], [])[0]) or 0 in ready:
            if not os.read(0, 256):
                self.do(DAEMON_GONE)
                break
            self.told()
        os.close(ended)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.do(f"{TERMINATED} ({signal.Signals(number).name})")


def main(folder: Path) -> None:
    """Run the control loop until it ends; DriverError, MailboxError, ConfigError."""
    lock = lock_arm(folder)
    deployment = Deployment.read(folder).allow_packages()
    control = build_control(deployment, folder)

    def leave(reason: str) -> None:
        control.quit_reason = control.quit_reason or reason

    DaemonWatch(leave)
    watched = deployment.watchdog
    watchdog = None if watched is None else Watchdog(watched, deployment.hertz)
    try:
        if watchdog is not None:
            watchdog.connect(lambda: bool(control.quit_reason))
            watchdog.wait()
            control.watchdog = watchdog
        control.connect()
        with ahead_of_others() as granted:
            if not granted:
                print("no real-time priority (allow it: ulimit -r 50): a busy machine delays ticks")
            control.run(Rate(deployment.hertz, deployment.spin))
    finally:
        control.driver.close()
        if watchdog is not None:
            watchdog.close()
        os.close(lock)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (DriverError, MailboxError, ConfigError) as error:
        sys.exit(f"control: {error}")
