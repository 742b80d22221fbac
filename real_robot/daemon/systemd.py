"""systemd notifications: ready, watchdog and stopping messages (sd_notify(3)).

One datagram of `KEY=value` to the socket in NOTIFY_SOCKET. With WATCHDOG_USEC set, systemd expects
WATCHDOG=1 at least that often and restarts the service otherwise.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress


class Notifier:
    """Says nothing without a listener, and never waits. `environment` is the process's own."""

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.next = -float("inf")
        place = environment.get("NOTIFY_SOCKET", "")
        self.place = f"\0{place[1:]}" if place.startswith("@") else place
        mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        period = environment.get("WATCHDOG_USEC", "") if mine else ""
        self.period = int(period) / 1e6 if period.isdecimal() else None

    def ready(self) -> None:
        """The service is there."""
        self._say("READY=1")

    def alive(self) -> None:
        """Tell systemd that the loop runs. Call it often; a message goes out four times in the
        time that systemd waits."""
        now = self.clock()
        if self.period is not None and now >= self.next:
            self.next = now + self.period / 4
            self._say("WATCHDOG=1")

    def ending(self) -> None:
        """Tell systemd that the daemon ends in order."""
        self._say("STOPPING=1")

    def _say(self, words: str) -> None:
        if not self.place:
            return
        # A systemd that cannot be told acts as if nothing had been said: that is its business.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            line.sendto(words.encode(), self.place)
