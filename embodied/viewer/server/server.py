"""PageServer: viser's server, every request of which is checked; the thread that owns a page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import logging
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from viser import GuiMarkdownHandle, ViserServer
from viser._messages import ShareUrlRequest
from websockets.asyncio import server as websockets
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from embodied.viewer.run_folder import HOST

LOCAL = (HOST, "localhost", "::1")
COOKIE = "embodied_view"


# Fix for viser 1.1.1: a thread-safe event for its message buffers. viser sets an `asyncio.Event`
# from the sending thread, which iterates over the event's waiters while the server's thread
# changes them: with many browsers open, sending occasionally fails with "deque mutated during
# iteration".
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


class Refused(Exception):
    """A refused request: HTTP `status`, the reason in one line, and more headers of the answer."""

    def __init__(self, status: HTTPStatus, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status, self.headers = status, headers


def check(request: Request, local: bool, token: str | None) -> None:
    """Refuse path traversal, foreign host names and origins, and missing or wrong tokens."""
    address = urlsplit(request.path)
    path = unquote(address.path)
    if ".." in path.replace("\\", "/").split("/") or "\0" in path:
        raise Refused(HTTPStatus.BAD_REQUEST, "invalid path")
    host, origin, cookies = (
        ",".join(request.headers.get_all(name)) for name in ("Host", "Origin", "Cookie")
    )
    if local and name_of(f"//{host}") not in LOCAL:
        # DNS rebinding: another site's name may resolve to this machine.
        raise Refused(HTTPStatus.FORBIDDEN, "this page is served to localhost and 127.0.0.1 only")
    if origin and urlsplit(origin).netloc != host:
        raise Refused(HTTPStatus.FORBIDDEN, "cross-origin connections are refused")
    if token is None:
        return
    given = parse_qs(address.query).get("token", [""])[0]
    if given and is_same(given, token):  # once in the address, then in a cookie
        cookie = {"Set-Cookie": f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"}
        raise Refused(HTTPStatus.SEE_OTHER, "welcome", Location="/", **cookie)
    pairs = [part.strip().partition("=") for part in cookies.split(";")]
    known = next((value for name, _, value in pairs if name == COOKIE), "")
    if given or not is_same(known, token):
        line = "missing or wrong token: open the address that embodied view printed"
        raise Refused(HTTPStatus.FORBIDDEN, line)


def is_same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


def name_of(address: str) -> str:
    """The host name in an address; empty if there is none, or its port is no number, as where two
    Host headers are joined."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(address)
        if parts.port != 0:
            return parts.hostname or ""
    return ""


Admit = Callable[[ServerConnection, Request], Response | None]
BUILDING = threading.Lock()


def checking_server(host: str, port: int, token: str | None) -> ViserServer:
    """viser's server, every request of which is checked. RuntimeError where viser does not take
    that."""
    # Fix for viser 1.1.1: it has no setting for this. It calls websockets' `serve`, which is
    # another function meanwhile.
    guarded: list[int] = []

    def serve_guarded(*where: Any, process_request: Admit, **settings: Any) -> websockets.serve:
        def checked(connection: ServerConnection, request: Request) -> Response | None:
            try:
                check(request, host in LOCAL, token)
            except Refused as refusal:
                answer = connection.respond(refusal.status, f"{refusal}\n")
                answer.headers.update(refusal.headers)
                return answer
            return process_request(connection, request)

        guarded.append(1)
        return original(*where, process_request=checked, **settings)

    with BUILDING:
        original = websockets.serve
        websockets.serve = serve_guarded  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                server = ViserServer(host, port, label="embodied", verbose=False)
        finally:
            websockets.serve = original
    if not guarded:
        server.stop()
        raise RuntimeError("this version of viser cannot be guarded: pip install viser==1.1.1")
    return server


Command = tuple[Callable[[], None], "Future[None]"]
CLOSED = "the viewer is closed"


class PageThread:
    """A page on `page_server` and the thread that updates it: `setup`, then `run_loop`, then
    `teardown`. `close` stops both.

    Call `start` at the end of `__init__`; it raises the errors of `setup` and closes everything.
    """

    def __init__(self, page_server: PageServer) -> None:
        self.page_server = page_server
        self.server = page_server.server
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closing, self._ended = threading.Event(), threading.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="viewer", daemon=True)

    def setup(self) -> None:
        raise NotImplementedError

    def run_loop(self) -> None:
        """Until `closing`; it calls `run_commands` regularly."""
        raise NotImplementedError

    def teardown(self) -> None:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return self.page_server.url

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def start(self) -> None:
        """Start the thread; returns when `setup` is done."""
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    def submit(self, command: Callable[[], None]) -> Future[None]:
        answer: Future[None] = Future()
        self._commands.put((command, answer))
        return answer

    def call(self, command: Callable[[], None]) -> None:
        """Run `command` in the thread and wait for it; raises its errors."""
        if self._thread is threading.current_thread():
            return command()
        answer = self.submit(command)
        while not wait([answer], timeout=0.5).done:
            if not self._thread.is_alive():
                raise RuntimeError(CLOSED)
        answer.result()

    def wait(self) -> None:
        """Wait until the thread is stopped, or Ctrl-C is pressed."""
        # Not `Thread.join`: Ctrl-C inside it can leave a running thread marked as ended (3.11).
        while not self._ended.wait(0.5):
            pass

    def run_commands(self, timeout: float) -> None:
        """Run the submitted commands, waiting up to `timeout` s for the first."""
        with contextlib.suppress(queue.Empty):
            command, answer = self._commands.get(timeout > 0, timeout)
            while True:
                try:
                    command()
                except Exception as error:  # raised again by `call`
                    answer.set_exception(error)
                else:
                    answer.set_result(None)
                command, answer = self._commands.get_nowait()

    def _run(self) -> None:
        try:
            self.setup()
        except BaseException as error:  # raised by `start`
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)
            self.run_loop()
        finally:
            with contextlib.suppress(queue.Empty):
                while True:  # no caller waits for a stopped thread
                    self._commands.get_nowait()[1].set_exception(RuntimeError(CLOSED))
            self.teardown()
            self._ended.set()

    def close(self) -> None:
        """Stop the thread and the server; safe to call twice."""
        self._closing.set()
        self.submit(lambda: None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
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


ANYWHERE = ("0.0.0.0", "::")
WIDTH = 388  # px of the controls; pair.css says it too
STYLE = f"<style>{Path(__file__).with_name('page.css').read_text()}</style>"


class PageServer:
    """`server` is the viser server that pages are built on; browsers reach it at `url`.

    From other machines a token is required, a new one unless it is given. It accepts connections
    before the viewer is loaded; until then the page shows `show_loading`'s text.
    """

    def __init__(self, host: str = HOST, port: int = 8080, token: str | None = None) -> None:
        # Browsers open connections that they do not use; each would log a traceback.
        logging.getLogger("websockets.server").setLevel(logging.CRITICAL)
        if token is None and host not in LOCAL:
            token = secrets.token_urlsafe(16)
        self.host, self.token = host, token
        self.second: PageServer | None = None
        self.server = checking_server(host, port, self.token)
        patch_message_events(self.server)
        # Otherwise the page could request a public share URL.
        self.server._websock_server.unregister_handler(ShareUrlRequest)
        self.server.gui.configure_theme(
            show_logo=False,
            show_share_button=False,
            brand_color=(37, 99, 235),
        )
        self.server.gui.main_panel.dock_right()
        self.server.gui.main_panel.set_width(WIDTH)
        self.server.gui.add_html(STYLE)
        self._loading: GuiMarkdownHandle | None = None

    @property
    def url(self) -> str:
        """The address to open; for all interfaces, with this machine's host name."""
        name = socket.gethostname() if self.host in ANYWHERE else self.host
        return f"http://{name}{self.address}"

    @property
    def address(self) -> str:
        """What follows the host name in `url`."""
        token = "" if self.token is None else f"/?token={self.token}"
        return f":{self.server.get_port()}{token}"

    def beside(self) -> PageServer:
        """Another server at the next free port, with the same token; it is closed with this one."""
        self.second = PageServer(self.host, self.server.get_port() + 1, self.token)
        return self.second

    def show_loading(self, words: str) -> None:
        if self._loading is None:
            self._loading = self.server.gui.add_markdown("")
        self._loading.content = f"**Loading** · {words} ..."

    def clear_loading(self) -> None:
        if self._loading is not None:
            self._loading.remove()
            self._loading = None

    def close(self) -> None:
        """Stop serving; safe to call twice."""
        if self.second is not None:
            self.second.close()
        # The server prints when it stops, even if it is not verbose.
        with contextlib.redirect_stdout(io.StringIO()):
            self.server.stop()
