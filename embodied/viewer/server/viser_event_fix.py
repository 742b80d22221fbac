"""Fix for viser 1.1.1: a thread-safe event for its message buffers.

viser sets an `asyncio.Event` from the sending thread, which iterates over the event's waiters while
the server's thread changes them: with many browsers open, sending occasionally fails with "deque
mutated during iteration".
"""

from __future__ import annotations

import asyncio
from typing import Any

from viser import ViserServer


class ThreadSafeEvent(asyncio.Event):
    """An `asyncio.Event` that other threads may set. Set from another thread it only sets the flag;
    the caller then schedules `set` in the event loop, as viser does."""

    def __init__(self, _flag: bool = False) -> None:
        super().__init__()
        self._flag = _flag

    def set(self) -> None:
        self._flag = True
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        super().set()

    def is_set(self) -> bool:
        return self._flag

    def clear(self) -> None:
        self._flag = False
        super().clear()

    async def wait(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._flag or await super().wait()


def patch_message_events(server: ViserServer) -> None:
    """Replace the events of the broadcast buffer and of every client's buffer."""
    inner = server._websock_server

    async def on_connect(connection: Any) -> None:
        buffer = connection.get_message_buffer()
        buffer.message_event = ThreadSafeEvent(buffer.message_event.is_set())

    inner._broadcast_buffer.message_event = ThreadSafeEvent(
        inner._broadcast_buffer.message_event.is_set()
    )
    inner.on_client_connect(on_connect)
