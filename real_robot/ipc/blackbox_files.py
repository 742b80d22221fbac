"""Files that the flight recorder is saved to, also after a daemon was killed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
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
