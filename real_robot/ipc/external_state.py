"""External state: object poses and other values that another process measures, in shared memory.

A pose tracker, a camera's detector or a simulated table writes; the control process reads and never
waits. A measurement that is too old is an error, not a value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.mailbox import Mailbox, MailboxError

VERSION = 1
RENEW = np.dtype([("number", "<u8")])


def record(count: int) -> np.dtype[Any]:
    """A message of `count` values, measured at `t` (s, monotonic clock of this machine), after
    `renewed` renewals."""
    return np.dtype([("t", "<f8"), ("renewed", "<u8"), ("values", "<f8", (count,))])


class ExternalStateWriter:
    """The writer's side, in a `folder` of its own that is private to the user."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._values_mailbox = Mailbox(folder / "seen", record(len(names)), VERSION, create=True)
        self._renew = Mailbox(folder / "renew", RENEW, VERSION, create=True)

    def publish(self, values: Floats, t: float) -> None:
        """Values [names] that were true at `t` (s, monotonic)."""
        fields = self._values_mailbox.fields
        fields["t"] = t
        fields["values"] = values
        self._values_mailbox.send()

    def renew_requested(self) -> bool:
        """Whether the reader wants things laid out again (it has not asked before)."""
        return self._renew.receive()

    def acknowledge_renew(self) -> None:
        """Confirm the renewal: all later values were measured after it."""
        self._values_mailbox.fields["renewed"] = self._renew.fields["number"]


@dataclass(frozen=True)
class Config:
    """Settings of measurements that another process writes."""

    folder: str  # folder that the writer made
    names: tuple[str, ...]  # of its values
    age: Annotated[float, Bound(above=0.0, high=600.0)] = 0.5  # s: older ones are none any more

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("external state needs names")


class ExternalStateReader:
    """The reader's side: `names`, `read`, `renew`. DriverError where nothing is measured."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.names = config.names
        self._values = np.zeros(len(config.names))
        self._values_mailbox: Mailbox | None = None
        self._renew: Mailbox | None = None

    def connect(self) -> None:
        """Open what the writer made."""
        folder, size = Path(self.config.folder), len(self.names)
        try:
            self._values_mailbox = Mailbox(folder / "seen", record(size), VERSION, create=False)
            self._renew = Mailbox(folder / "renew", RENEW, VERSION, False, write=True)
        except (MailboxError, OSError) as error:
            reason = f"no process measures {self.names[0]} in {folder}: {error}"
            raise DriverError(reason) from error

    def read(self) -> Floats:
        """The newest values [names]."""
        assert self._values_mailbox is not None
        self._values_mailbox.receive()
        fields = self._values_mailbox.fields[0]
        age = self.clock() - float(fields["t"])
        if age > self.config.age:
            raise DriverError(
                f"{self.names[0]} was last measured {age:.1f} s ago: look at what measures it"
            )
        np.copyto(self._values, fields["values"])
        return self._values

    def renew(self) -> None:
        """Ask that things are laid out again."""
        assert self._renew is not None
        self._renew.fields["number"] += 1
        self._renew.send()
