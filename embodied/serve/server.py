"""Server: answers the requests of several clients with one policy, in openpi's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, Self

from embodied.core.build import ConfigError
from embodied.core.errors import RemoteError
from embodied.serve.protocol import (
    HEADER,
    MAX_MESSAGE,
    PORT,
    SCHEME,
    CodecError,
    RequestError,
    decode,
    encode,
    is_loopback,
)

try:
    from websockets.asyncio.server import ServerConnection, serve
    from websockets.exceptions import ConnectionClosed
    from websockets.http11 import Request, Response
except ImportError as error:
    raise ConfigError('a policy server needs websockets: pip install "embodied-rl[remote]"') from (
        error
    )

LOG = logging.getLogger(__name__)
HEALTH = "/healthz"  # as openpi's servers
SILENT = 20.0  # s, between pings, and until a client that answers none is let go


class Service(Protocol):
    """What a server offers. `infer` is called from one thread, one request after the other."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def infer(self, request: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; RequestError for one that cannot be answered. `memory`: of its
        connection, empty at first."""
        ...


class Server:
    """A websocket server in a thread of its own, from `start` to `close` (or as a context).

    `token`: what clients have to show (None: nothing, on a loopback address only). `port` 0: any
    that is free; `url` says which. A client without the token, a web page, and one client more
    than `connections` are refused before anything that they sent is read. `message`: bytes of a
    request at most.
    """

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = PORT,
        token: str | None = None,
        message: int = MAX_MESSAGE,
        connections: int = 16,
    ) -> None:
        if token is None and not is_loopback(host):
            raise ConfigError(f"a server at {host} needs a token: other machines reach it")
        self.service = service
        self.host = host
        self.port = port
        self.token = token
        self.message = message
        self.connections = connections
        self.connected = 0
        self._worker = ThreadPoolExecutor(1, "policy")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ws://{host}:{self.port}"

    def start(self) -> Self:
        """Listen; RemoteError if the address cannot be used."""
        ready, problem = threading.Event(), list[OSError]()

        def run() -> None:
            try:
                asyncio.run(self._serve(ready))
            except OSError as error:
                problem.append(error)
                ready.set()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        ready.wait()
        if problem:
            self._thread.join()
            why = problem[0].strerror or problem[0]
            raise RemoteError(f"cannot listen at {self.url} ({why}): port=OTHER")
        return self

    def close(self) -> None:
        loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(self._stop.set)
            thread.join(5.0)
        self._worker.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._stop = asyncio.Event()
        quiet = logging.getLogger(f"{__name__}.wire")
        quiet.setLevel(logging.CRITICAL)  # a port scan is no news
        async with serve(
            self._talk,
            self.host,
            self.port,
            compression=None,
            max_size=self.message,
            max_queue=4,
            process_request=self._admit,
            ping_interval=SILENT,
            ping_timeout=SILENT,
            close_timeout=1.0,
            logger=quiet,
        ) as listening:
            self._loop = asyncio.get_running_loop()
            self.port = next(iter(listening.sockets)).getsockname()[1]
            ready.set()
            await self._stop.wait()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Refuse a client by its HTTP headers; None: it may speak."""
        if request.path == HEALTH:
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if "Origin" in request.headers:  # a web page in a browser of this machine
            return connection.respond(http.HTTPStatus.FORBIDDEN, "no web pages\n")
        shown = ",".join(request.headers.get_all(HEADER)).encode(errors="surrogateescape")
        wanted = None if self.token is None else f"{SCHEME} {self.token}".encode()
        if wanted is not None and not hmac.compare_digest(shown, wanted):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "unknown token\n")
        if self.connected >= self.connections:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many clients\n")
        return None

    async def _talk(self, connection: ServerConnection) -> None:
        self.connected += 1
        memory: dict[str, Any] = {}
        try:
            await connection.send(encode(self.service.metadata))
            async for message in connection:
                started = time.perf_counter()
                answer: bytes | str = "a request is one binary message"
                if not isinstance(message, str):
                    loop = asyncio.get_running_loop()
                    asked = (self._infer, message, started, memory)
                    answer = await loop.run_in_executor(self._worker, *asked)
                await connection.send(answer)
        except ConnectionClosed:
            pass
        finally:
            self.connected -= 1

    def _infer(self, message: bytes, started: float, memory: dict[str, Any]) -> bytes | str:
        """The answer to one message, or one line that says why there is none."""
        try:
            request = decode(message)
            if not isinstance(request, dict):
                raise RequestError("a request is a map of observations")
            before = time.perf_counter()
            answer = self.service.infer(request, memory)
            now = time.perf_counter()
            timing = {"infer_ms": 1e3 * (now - before), "total_ms": 1e3 * (now - started)}
            return encode({**answer, "server_timing": timing})
        except (RequestError, CodecError) as error:
            return " ".join(str(error).split())
        except Exception as error:
            LOG.exception("the policy failed")
            return f"the policy failed: {' '.join(str(error).split())[:300]}"
