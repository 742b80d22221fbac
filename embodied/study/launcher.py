"""Launcher: what a sweep asks of the place where its trainings run (`launchers`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Training(Protocol):
    """A training that runs somewhere, as `subprocess.Popen` has it."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended. subprocess.TimeoutExpired."""
        ...


class Launcher(ABC):
    """Starts trainings and asks them to save and end. `terminal`: whether Ctrl-C in the sweep's
    terminal reaches them without `interrupt`."""

    terminal = False

    @abstractmethod
    def start(self, words: Sequence[str], folder: Path) -> Training:
        """Begin the training `words`. FOLDER.log has what it prints."""

    @abstractmethod
    def interrupt(self, process: Training, folder: Path) -> None:
        """SIGINT: the training of `folder` saves a checkpoint and ends."""

    def close(self) -> None:  # noqa: B027  most have nothing to end
        """After the sweep."""
