"""The private folders of daemons: one for each robot, in memory, below one of this user."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from embodied.real_robot.daemon.server import SOCKET, private
from embodied.real_robot.ipc.mailbox import memory_folder


class FolderError(RuntimeError):
    """Several daemons may be meant: one line that lists them."""


def robots_folder() -> Path:
    """This user's; the default folder of each robot is in it, never on a disk."""
    return memory_folder() / f"embodied-robot-{os.geteuid()}"


def default_folder(robot: str) -> Path:
    """The default folder of the daemon of `robot`, by the name that `deploy robot=` got."""
    return robots_folder() / robot.replace(os.sep, ".").lstrip(".")


def make_private(folder: Path) -> Path:
    """Create the folder of a daemon, for this user alone. RpcServerError."""
    if folder.parent == robots_folder():
        private(folder.parent)
    return private(folder)


def running() -> list[Path]:
    """The default folders in which a daemon listens, also one that hangs."""
    place = robots_folder()
    return sorted(each for each in place.glob("*") if listens(each)) if place.is_dir() else []


def listens(folder: Path) -> bool:
    """Whether a process listens at the daemon's socket there. The kernel answers, not the daemon,
    and the daemon's lock is not touched: a daemon that starts just then would be refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.setblocking(False)
        try:
            line.connect(str(folder / SOCKET))
        except BlockingIOError:
            return True  # many wait for it
        except OSError:
            return False
    return True


def find(robot: str | None = None) -> Path:
    """The folder of the daemon of `robot`; without a name, of the only one that there is.

    FolderError where there are several. Where there is none, the folder where one was looked for.
    """
    if robot is not None:
        return default_folder(robot)
    found = running()
    if len(found) > 1:
        names = ", ".join(f"robot={each.name}" for each in found)
        raise FolderError(f"several robots run; say which: {names}")
    return found[0] if found else robots_folder()
