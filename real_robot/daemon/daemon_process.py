"""Starts a daemon that ends with its starter and serves no other session."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from embodied.core.children import module_command
from embodied.real_robot.daemon.child import how_ended
from embodied.real_robot.daemon.client import call
from embodied.real_robot.daemon.requests import Reply, Verb
from embodied.real_robot.daemon.server import make_private
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.mailbox import memory_folder


class DaemonEnded(RuntimeError):
    """The daemon's process has ended; the message is what it wrote to its standard error."""


class DaemonProcess:
    """A daemon in `folder` that ends when this process does (`tied`), or at `stop`.

    It has a token that only this object knows: `call` carries it, and a daemon of another session
    refuses it. RpcServerError where the folder is not this user's alone.
    """

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self.folder = make_private(folder)
        self.token = secrets.token_hex(16)
        # Not a file in the folder: another daemon may live there.
        self._errors = tempfile.TemporaryFile(dir=memory_folder())  # noqa: SIM115
        self._process = subprocess.Popen(
            module_command("embodied.real_robot.daemon.daemon", str(folder), "tied"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for this process, which stops it in order
        )
        # Through its standard input: `ps` shows arguments to everyone, and the environment goes on
        # to every child of the daemon
        about = {"session": self.token, "deployment": asdict(deployment)}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and `error` says why
            self._process.stdin.write(json.dumps(about).encode() + b"\n")
            self._process.stdin.flush()

    def call(self, verb: Verb | str, timeout: float = 5.0, seconds: float | None = None) -> Reply:
        """Ask this daemon, and no other that may live in the folder. ClientError, RequestError."""
        return call(self.folder, verb, timeout, seconds=seconds, session=self.token)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def cause(self) -> str:
        """A few words about how the process ended, once it has."""
        how, last = how_ended(self.returncode), self.error().splitlines()[-1:]
        return f"the daemon died ({how}){': ' + last[0][:300] if last else ''}"

    def error(self) -> str:
        """Text that the process wrote to its standard error."""
        size = os.fstat(self._errors.fileno()).st_size  # its own position is that of the writer
        return os.pread(self._errors.fileno(), size, 0).decode(errors="replace").strip()

    def wait_until(
        self, so: Callable[[], bool], patience: float, look: float, late: Callable[[], Exception]
    ) -> None:
        """Call `so` every `look` s until it returns True. DaemonEnded where the daemon has ended;
        the error that `late` makes where it takes longer than `patience` s."""
        deadline = time.monotonic() + patience
        while True:
            if so():
                return
            if self.returncode is not None:
                raise DaemonEnded(self.error())
            if time.monotonic() > deadline:
                raise late()
            time.sleep(look)

    def stop(self, patience: float) -> None:
        """Let it bring the arm to rest and end, or kill it after `patience` s."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
