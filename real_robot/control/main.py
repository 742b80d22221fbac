"""Control process: `python -m embodied.real_robot.control.main FOLDER`, started by the daemon.

It ends when an operator quits, or when its standard input closes: without the daemon no operator
can stop the arm, so the arm is brought to rest and held.
"""

from __future__ import annotations

import fcntl
import os
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
from embodied.real_robot.drivers.driver import DriverError
from embodied.real_robot.kernel.mailbox import MailboxError
from embodied.real_robot.kernel.messages import DAEMON_GONE, TERMINATED
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


def on_daemon_exit(do: Callable[[str], None], told: Callable[[], None] = lambda: None) -> None:
    """Call `do` with a reason when the daemon is gone or wants this process to go, and `told` when
    it says anything else."""

    def watch() -> None:
        while os.read(0, 256):
            told()
        do(DAEMON_GONE)

    def on_signal(number: int, frame: FrameType | None) -> None:
        do(f"{TERMINATED} ({signal.Signals(number).name})")

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path) -> None:
    """Run the control loop until it ends; DriverError, MailboxError, ConfigError."""
    lock = lock_arm(folder)
    deployment = Deployment.read(folder).allow_packages()
    control = build_control(deployment, folder)

    def leave(reason: str) -> None:
        control.quit_reason = control.quit_reason or reason

    on_daemon_exit(leave)
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
