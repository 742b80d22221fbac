"""AuthProxy: an HTTP and WebSocket proxy that checks every request before it reaches the page.

The page itself listens on this machine only. From other machines a token is required: once in the
address, then in a cookie.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

MAX_HEAD = 16_384
"""Largest size of a request's head, bytes."""
TIMEOUT = 20.0
"""Time in which a request's head must arrive, s."""
HOST = "127.0.0.1"
"""The default address to listen on: this machine only."""
LOCAL = ("127.0.0.1", "localhost", "::1")
COOKIE = "embodied_view"
SECRET = "Authorization"  # the header with what only the proxy knows
SILENT = (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError)
REASONS = {303: "See Other", 400: "Bad Request", 403: "Forbidden", 405: "Method Not Allowed"}


@dataclass(frozen=True)
class Request:
    """The head of an HTTP request; header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]

    @property
    def upgrades(self) -> bool:
        return self.headers.get("upgrade", "").lower() == "websocket"


class Refused(Exception):
    """A refused request: HTTP `status` and the reason in one line."""

    def __init__(self, status: int, why: str, header: str = "") -> None:
        super().__init__(why)
        self.status, self.why, self.header = status, why, header


def read_head(head: bytes) -> Request:
    """Parse the head of a request; Refused if it is malformed."""
    try:
        lines = head.decode("ascii").split("\r\n")
        method, target, version = lines[0].split(" ")
        pairs = [line.split(":", 1) for line in lines[1:] if line]
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
    except ValueError as error:
        raise Refused(400, "not an HTTP request") from error
    if version not in ("HTTP/1.0", "HTTP/1.1") or not target.startswith("/"):
        raise Refused(400, "not an HTTP request")
    return Request(method, target, headers)


def check(request: Request, local: bool, token: str | None) -> None:
    """Refuse other methods, path traversal, foreign host names and origins, and missing or wrong
    tokens."""
    if request.method not in ("GET", "HEAD"):
        raise Refused(405, "only GET and HEAD are allowed")
    path = unquote(urlsplit(request.target).path)
    if ".." in path.replace("\\", "/").split("/") or "\0" in path:
        raise Refused(400, "invalid path")
    host = request.headers.get("host", "")
    if local and name_of(f"//{host}") not in LOCAL:
        # DNS rebinding: another site's name may resolve to this machine.
        raise Refused(403, "this page is served to localhost and 127.0.0.1 only")
    origin = request.headers.get("origin")
    if request.upgrades and origin is not None and urlsplit(origin).netloc != host:
        raise Refused(403, "cross-origin connections are refused")
    if token is not None:
        require_token(request, token)


def require_token(request: Request, token: str) -> None:
    """Refuse a request without the token; one with the token in its address is redirected with a
    cookie."""
    given = parse_qs(urlsplit(request.target).query).get("token", [""])[0]
    if given and hmac.compare_digest(given.encode(), token.encode()):
        cookie = f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"
        raise Refused(303, "welcome", f"Location: /\r\nSet-Cookie: {cookie}\r\n")
    pairs = [part.strip().partition("=") for part in request.headers.get("cookie", "").split(";")]
    known = next((value for name, _, value in pairs if name == COOKIE), "")
    if given or not hmac.compare_digest(known.encode(), token.encode()):
        raise Refused(403, "missing or wrong token: open the address that embodied view printed")


def name_of(address: str) -> str:
    """The host name in an address; empty if there is none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


class AuthProxy:
    """Listens on `host` and `port` (0: any free port) and forwards allowed requests to port `inner`
    of this machine, which asks for `secret`. `port` is then the port in use."""

    def __init__(
        self, host: str, port: int, inner: int, secret: str, token: str | None = None
    ) -> None:
        self.host = host
        self.inner = inner
        self.secret = secret
        self.token = token
        self.local = host in LOCAL
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(
            asyncio.start_server(self._accept, host, port, limit=MAX_HEAD)
        )
        self.port: int = self.server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="auth-proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        self.loop.run_forever()
        self.server.close()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # Browsers open connections that they do not use; these end without a message, as all
            # connections do when the proxy is closed.
            with contextlib.suppress(*SILENT):
                await self._serve(reader, writer)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = read_head(await self._head(reader))
            check(request, self.local, self.token)
        except Refused as refusal:
            writer.write(answer(refusal))
            await writer.drain()
            return
        within, out = await asyncio.open_connection("127.0.0.1", self.inner)
        try:
            out.write(passed_on(request, self.secret))
            await asyncio.gather(pipe(reader, out), pipe(within, writer))
        finally:
            out.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT)
        except asyncio.LimitOverrunError as error:
            raise Refused(400, "the request head is too long") from error


def passed_on(request: Request, secret: str) -> bytes:
    """The head as it is forwarded: one request per connection, so that every request is checked."""
    headers = {**request.headers, SECRET.lower(): secret}
    if not request.upgrades:
        headers["connection"] = "close"
    lines = [f"{request.method} {request.target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def answer(refusal: Refused) -> bytes:
    body = f"{refusal.why}\n".encode()
    head = (
        f"HTTP/1.1 {refusal.status} {REASONS[refusal.status]}\r\n{refusal.header}"
        f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy data until `source` ends."""
    try:
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
    finally:
        with contextlib.suppress(ConnectionError):
            sink.close()
