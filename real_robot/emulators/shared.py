"""SharedEmulator: an emulator that several environments of one process use."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from embodied.core.build import Node, build
from embodied.real_robot.emulators.process import Emulator


class SharedEmulator:
    """Runs from the first `at` of its node to the `close` of its last user. `settings`: for the
    driver."""

    known: ClassVar[dict[str, SharedEmulator]] = {}

    @classmethod
    def at(cls, node: Node) -> SharedEmulator:
        """The emulator of `node`, running. DriverError where it does not come up."""
        key = json.dumps(node, sort_keys=True)
        if key not in cls.known:
            cls.known[key] = cls(key, build(node, Emulator))
        shared = cls.known[key]
        shared.users += 1
        return shared

    def __init__(self, key: str, emulator: Emulator) -> None:
        self.key, self.emulator, self.users = key, emulator, 0
        self.settings: dict[str, Any] = emulator.start()

    def close(self) -> None:
        self.users -= 1
        if not self.users:
            del self.known[self.key]
            self.emulator.stop()
