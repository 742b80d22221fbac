"""Saves black boxes without keeping the daemon's main loop waiting for a disk."""

from __future__ import annotations

from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from embodied.real_robot.ipc.blackbox_files import BlackBoxFiles
from embodied.real_robot.ipc.ring_buffer import BlackBox, BlackBoxError


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
