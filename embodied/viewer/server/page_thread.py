"""PageThread: a worker thread with a page of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeVar

from embodied.viewer.server.server import PageServer
from embodied.viewer.server.worker import WorkerThread


class PageThread(WorkerThread):
    """A page on `page_server`, updated by one thread; `close` stops both.

    Call `start` at the end of `__init__`; it closes everything if `setup` fails.
    """

    def __init__(self, page_server: PageServer) -> None:
        super().__init__()
        self.page_server, self.server, self.proxy = (
            page_server,
            page_server.server,
            page_server.proxy,
        )

    @property
    def url(self) -> str:
        """The address to open; for all interfaces, with this machine's host name."""
        return self.page_server.url

    def start(self) -> None:
        try:
            super().start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the thread and the server; safe to call twice."""
        self.stop()
        self.page_server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Page = TypeVar("Page", bound=PageThread)


def run_page(page_server: PageServer, make: Callable[[PageServer], Page], block: bool) -> Page:
    """Run the page that `make` builds on `page_server`, which is closed if that fails.

    With `block`, returns after Ctrl-C with the page closed; Ctrl-C while the page is built exits
    the program.
    """
    page: Page | None = None
    try:
        page = make(page_server)
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
            page_server.close()
        elif block:
            page.close()
