"""A policy that turns on the robot's processes, and what it tries.

`python -m tests.real_robot.hostile FOLDER PID HOW` prints which attempts succeed in a process of
its own, after a lock (`locked`) or without (`free`).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.real_robot.ipc.channels import EmergencyStop
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import REQUEST, VERSION
from embodied.real_robot.policy.lockdown import lock

LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206


def call(name: str, *arguments: object) -> None:
    """A function of the C library; OSError."""
    if getattr(LIBC, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)


def signalled_by_a_pipe(victim: int) -> None:
    ours, _ = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETOWN, victim)
    os.close(ours)


def asks_the_daemon(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as line, suppress(FileNotFoundError, ConnectionRefusedError):
        line.connect(str(folder / "control.sock"))  # nobody hears it, but it was allowed to ask


def shortens(path: Path) -> None:
    """A file that is open: whoever reads it in shared memory would die. (It keeps its length.)"""
    for each in Path("/proc/self/fd").iterdir():
        if each.exists() and each.readlink() == path:
            return os.ftruncate(int(each.name), path.stat().st_size)
    raise OSError("it is not open")


def reads_memory(victim: int) -> None:
    """Of the other process, one byte where its program is; a wrong address would be allowed."""
    start = int(Path(f"/proc/{victim}/maps").read_text().partition("-")[0], 16)
    with Path(f"/proc/{victim}/mem").open("r+b") as memory:
        memory.seek(start)
        memory.read(1)


def mailbox(path: Path) -> Mailbox:
    return Mailbox(path, REQUEST, VERSION, create=False, write=True)


def attempts(folder: Path, victim: int) -> dict[str, Callable[[], object]]:
    """What must not succeed in a locked process; all is put back where it does."""
    file, pages = folder / "mine", mmap.PAGESIZE
    return {
        "write a request": lambda: mailbox(folder / "request"),
        "press the stop": lambda: EmergencyStop(folder / "estop", write=True),
        "write a file": lambda: (Path.home() / ".hostile").write_text("here"),
        "make a folder": lambda: (folder / "made").mkdir(),
        "make a link": lambda: (folder / "link").symlink_to("/etc"),
        "move a file": lambda: file.rename(folder / "moved").rename(file),
        "remove a file": lambda: (folder / "gone").unlink(),
        "shorten the chunk": lambda: shortens(folder / "chunk"),
        "shorten a file": lambda: os.truncate(file, 0),
        "open it to all": lambda: file.chmod(0o644),
        "date it back": lambda: os.utime(file, (0, 0)),
        "signal it": lambda: os.kill(victim, 0),
        "signal it by a pipe": lambda: signalled_by_a_pipe(victim),
        "trace it": lambda: call("ptrace", PTRACE_SEIZE, victim, 0, 0),
        "read its memory": lambda: reads_memory(victim),
        "slow it down": lambda: os.sched_setaffinity(victim, os.sched_getaffinity(victim)),
        "limit it": lambda: call("prlimit", victim, 7, None, None),
        "execute": lambda: subprocess.run(["true"], check=True),
        "ask the daemon": lambda: asks_the_daemon(folder),
        "listen": lambda: socket.create_server(("127.0.0.1", 0)).close(),
        "mount": lambda: call("unshare", 0),
        "make memory a program's": lambda: call("syscall", 425, 0, pages),
    }


def succeeded(folder: Path, victim: int) -> list[str]:
    """The attempts that succeed here; each in a thread of its own."""
    done: list[str] = []

    def attempt(name: str, do: Callable[[], object]) -> None:
        with suppress(OSError, subprocess.SubprocessError):
            do()
            done.append(name)

    for name, do in attempts(folder, victim).items():
        thread = threading.Thread(target=attempt, args=(name, do))
        thread.start()
        thread.join()
    return done


@dataclass(frozen=True)
class Config:
    folder: str
    after: int = 10  # decisions


class Hostile(Policy):
    """It behaves, `after` decisions long; then it prints what it can do, and behaves again."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.decisions = 0

    def initial(self, n: int) -> Tensors:
        return {}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 0)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        self.decisions += 1
        if self.decisions == self.config.after:
            print("hostile:", json.dumps(succeeded(Path(self.config.folder), os.getppid())))
            sys.stdout.flush()
        return torch.zeros(len(noise), 1, self.spec.act.size), carry


if __name__ == "__main__":
    place = Path(sys.argv[1])
    shared = mailbox(place / "chunk")
    # One that is there before the lock.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    missing = lock(network=False) if sys.argv[3] == "locked" else ""
    shared.fields["number"] = 7
    shared.send()
    os.kill(os.getpid(), 0)
    signal.raise_signal(signal.SIGCHLD)
    Path(os.devnull).write_text("x")
    found = succeeded(place, int(sys.argv[2]))
    with suppress(OSError):
        socket.socket().close()
        found.append("open a socket")
    print(json.dumps({"missing": missing, "found": found, "read": len(Path(__file__).read_text())}))
