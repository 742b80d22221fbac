"""Bell: an event that any thread may set, in place of the one that viser's message buffers have.

viser (1.1.1) sets an `asyncio.Event` from the thread that sends, which goes through its list of
waiting connections while the server's own thread changes it: with many browsers open, sending fails
now and then with "deque mutated during iteration".
"""

from __future__ import annotations

import asyncio
from typing import Any

from viser import ViserServer


class Bell(asyncio.Event):
    """As `asyncio.Event`; set from another thread, it wakes nobody: whoever sets it there has the
    loop set it as well, as viser does."""

    def __init__(self, rung: bool = False) -> None:
        super().__init__()
        self._rung = rung

    def set(self) -> None:
        self._rung = True
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        super().set()

    def is_set(self) -> bool:
        return self._rung

    def clear(self) -> None:
        self._rung = False
        super().clear()

    async def wait(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._rung or await super().wait()


def hang(server: ViserServer) -> None:
    """Give one to the buffer of all pages, and to that of each page that is opened."""
    inner = server._websock_server

    async def met(connection: Any) -> None:
        buffer = connection.get_message_buffer()
        buffer.message_event = Bell(buffer.message_event.is_set())

    inner._broadcast_buffer.message_event = Bell(inner._broadcast_buffer.message_event.is_set())
    inner.on_client_connect(met)
