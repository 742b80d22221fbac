"""Files that the flight recorder is saved to, in a thread, also after a daemon was killed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from numpy.typing import NDArray

from embodied.real_robot.control.main import lock_arm
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import DriverError
from embodied.real_robot.ipc.mailbox import MailboxError
from embodied.real_robot.ipc.ring_buffer import BlackBox, BlackBoxError, keep_newest, write_records

KILLED = "-of-a-killed-daemon"


class BlackBoxFiles:
    """Flight records of the daemon in `folder`; the newest `keep` files of the deployment stay."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self.folder = folder
        self.newest = deployment.keep
        self.place = Path(deployment.records) if deployment.records else folder / "blackbox"

    def new_path(self, name: str = "") -> Path:
        """A file that is named by the present time, with `name` behind it."""
        return self.place / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}{name}.npz"

    def write(self, records: NDArray[Any], path: Path) -> None:
        """BlackBoxError, OSError."""
        write_records(records, path)
        keep_newest(self.place, self.newest)

    def rescue(self) -> str:
        """Keep the black box of a daemon before this one that could not; what to note of it."""
        file = self.folder / "ring"
        if not file.exists():
            return ""
        with suppress(DriverError):  # its control process may still be bringing the arm to rest
            os.close(lock_arm(self.folder))
        try:
            ring = BlackBox.left(file)
            records, path = ring.records(), self.new_path(KILLED)
            self.write(records, path)
            ring.close()
        except (MailboxError, BlackBoxError, OSError) as error:
            aside = file.rename(file.with_name(f"ring{KILLED}-{time.time_ns()}"))
            return f"a daemon before this one was killed; its black box stays in {aside}: {error}"
        return f"a daemon before this one was killed; its last {len(records)} records are in {path}"


class BlackBoxSaver:
    """`save` copies the ring at once and writes it when those before it are written; both happen in
    a thread. `results` are one line each, in the order of `save`."""

    def __init__(self, files: BlackBoxFiles) -> None:
        self.files = files
        self._last: Thread | None = None
        self._results: SimpleQueue[str] = SimpleQueue()

    def save(self, ring: BlackBox) -> None:
        """Begin; `ring` must not be closed."""
        arguments = (ring, self.files.new_path(), self._last)
        # A thread each: a disk that hangs must not delay the copy of what the next fault left.
        self._last = Thread(target=self._save, args=arguments, daemon=True)
        self._last.start()

    def results(self) -> list[str]:
        """Notes about the records that were saved since the last call."""
        found: list[str] = []
        while True:
            try:
                found.append(self._results.get_nowait())
            except Empty:
                return found

    def close(self, patience: float) -> bool:
        """Wait up to `patience` s for what is being saved; whether all of it was."""
        if self._last is not None:
            self._last.join(patience)
        return self._last is None or not self._last.is_alive()

    def _save(self, ring: BlackBox, path: Path, before: Thread | None) -> None:
        try:
            records = ring.records()
            if before is not None:
                before.join()
            self.files.write(records, path)
            self._results.put(f"the last {len(records)} records are in {path}")
        except (BlackBoxError, OSError, ValueError, MemoryError) as error:
            self._results.put(str(error) or f"the black box could not be saved to {path}")
