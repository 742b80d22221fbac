"""Served: a thread with a page of its own, and what all of them do from the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeVar

from embodied.viewer.server.server import Door
from embodied.viewer.server.worker import Worker


class Served(Worker):
    """A page behind `door`, kept in time by one thread; `close` ends both.

    `start` it where everything that the thread needs is there: it closes what cannot begin.
    """

    def __init__(self, door: Door) -> None:
        super().__init__()
        self.door, self.server, self.guard = door, door.server, door.guard

    @property
    def url(self) -> str:
        """The address to open; off this machine, with this machine's name in place of `host`."""
        return self.door.url

    def start(self) -> None:
        try:
            super().start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the thread, the server and what is shown; safe to call twice."""
        self.stop()
        self.door.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Page = TypeVar("Page", bound=Served)


def shown(door: Door, make: Callable[[Door], Page], block: bool) -> Page:
    """The page that `make` puts behind `door`, which is let go of where it cannot. With `block`, it
    returns after Ctrl-C, with the page closed; a Ctrl-C before there is a page ends the program."""
    page: Page | None = None
    try:
        page = make(door)
        if block:
            page.wait()
        return page
    except KeyboardInterrupt:
        if not block:
            raise
        # After the ^C that the terminal shows.
        print("\nviewer closed", flush=True)
        if page is None:
            raise SystemExit(0) from None
        return page
    finally:
        if page is None:
            door.close()
        elif block:
            page.close()
