"""A thread of the operator's terminal: looks at a device and writes into the daemon's folder."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from embodied.real_robot.ipc.mailbox import Mailbox, MailboxError
from embodied.real_robot.ipc.messages import VERSION


class OperatorThread(ABC):
    """The device is opened at once (the error of `_open` is raised), and looked at from `start` on.
    As a context: until its end. One thread opens and reads it: a gamepad's library insists on
    that."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.problem: Exception | None = None
        self._folder: Path | None = None
        self._opened = threading.Event()
        self._go = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._opened.wait()
        if self.problem is not None:
            raise self.problem

    def start(self, folder: Path) -> None:
        """Start for the daemon in `folder`; raises the error of `_begin`."""
        self._folder = folder
        self._opened.clear()
        self._go.set()
        self._opened.wait()
        if self.problem is not None:
            raise self.problem

    @abstractmethod
    def _open(self) -> None:
        """Open the device. ConfigError."""

    @abstractmethod
    def _begin(self, folder: Path) -> None:
        """Begin to read the device. ConfigError."""

    @abstractmethod
    def _look(self) -> None:
        """Look once, and wait a moment."""

    @abstractmethod
    def _close(self) -> None:
        """Close what `_open` opened."""

    def _run(self) -> None:
        try:
            self._open()
        except Exception as error:  # it is raised in the thread that waits
            self.problem = error
            return
        finally:
            self._opened.set()
        try:
            self._go.wait()
            if self._folder is not None and not self._done.is_set() and self._begun(self._folder):
                while not self._done.is_set():
                    self._look()
        finally:
            self._close()

    def _begun(self, folder: Path) -> bool:
        try:
            self._begin(folder)
        except Exception as error:
            self.problem = error
        finally:
            self._opened.set()
        return self.problem is None

    def close(self) -> None:
        """Safe to call twice."""
        self._done.set()
        self._go.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DaemonMailbox:
    """A mailbox of the daemon's folder, which a daemon that starts again makes anew."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path = path
        self.dtype = dtype
        self.file = -1
        self.mailbox: Mailbox | None = None

    def newest(self) -> Mailbox | None:
        """The one that is there now; None where no daemon runs."""
        with suppress(OSError, MailboxError):
            file = os.stat(self.path).st_ino
            if self.mailbox is None or file != self.file:
                self.close()
                self.mailbox = Mailbox(self.path, self.dtype, VERSION, create=False)
                self.mailbox.receive()  # its count goes on
                self.file = file
            return self.mailbox
        return None

    def close(self) -> None:
        if self.mailbox is not None:
            self.mailbox.close()
        self.mailbox = None
