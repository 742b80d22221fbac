"""Client: a connection to a policy server that speaks openpi's websocket protocol."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Any, Self, cast

from embodied.core.build import ConfigError
from embodied.core.errors import RemoteError, ServerLost
from embodied.core.files import TEXT
from embodied.serve.protocol import (
    HEADER,
    MAX_MESSAGE,
    SCHEME,
    CodecError,
    Message,
    address,
    decode,
    encode,
)

try:
    from websockets import exceptions as ws
    from websockets.sync.client import ClientConnection, connect
except ImportError as error:
    raise ConfigError('remote policies need websockets: pip install "embodied-rl[remote]"') from (
        error
    )

IN_FLIGHT = 8  # requests that wait for an answer; more could fill both sides' buffers
LOST = (ws.ConnectionClosed, OSError, TimeoutError, EOFError)


class Client:
    """One connection, opened at once; `metadata` is what the server sent first.

    `timeout`: s, for connecting and for each answer. ServerLost if nothing listens there or it
    falls silent (make another `Client`); RemoteError if it refuses the token or is none."""

    def __init__(self, url: str, token: str | None = None, timeout: float = 10.0) -> None:
        self.url, self.timeout = url, timeout
        self._connection = self._connect(token)
        try:
            self.metadata = self._receive("metadata")
        except (RemoteError, CodecError) as error:
            self.close()
            if isinstance(error, ServerLost):
                raise
            raise RemoteError(f"{url} is no policy server: {error}") from error

    def request(self, message: Message) -> dict[str, Any]:
        """The answer to one request; RemoteError with the server's own line if it cannot answer."""
        return self.request_many([message])[0]

    def request_many(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The answers to several requests, which are sent without waiting for each answer."""
        answers: list[dict[str, Any]] = []
        for sent, message in enumerate(messages):
            if sent - len(answers) == IN_FLIGHT:
                answers.append(self._answer(last=False))
            data = encode(message)
            if len(data) > MAX_MESSAGE:
                raise RemoteError(f"a request of {len(data):,} bytes is too large: fewer num_envs")
            try:
                self._connection.send(data)
            except LOST as error:
                raise self._lost(error) from error
        while len(answers) < len(messages):
            answers.append(self._answer(last=len(answers) == len(messages) - 1))
        return answers

    def close(self) -> None:
        self._connection.close_timeout = 0.2
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, last: bool) -> dict[str, Any]:
        try:
            return self._receive("answer")
        except CodecError as error:
            self.close()
            raise RemoteError(f"{self.url} sent an answer that cannot be read: {error}") from error
        except RemoteError:
            if not last:  # answers that belong to no later request
                self.close()
            raise

    def _receive(self, what: str) -> dict[str, Any]:
        try:
            message = self._connection.recv(self.timeout)
        except LOST as error:
            raise self._lost(error) from error
        if isinstance(message, str):
            last = message.strip().splitlines()[-1:] or [""]
            raise RemoteError(f"{self.url} says: {last[0][:300]}")
        value = decode(message)
        if not isinstance(value, dict):
            raise CodecError(f"its {what} is no map")
        return cast(dict[str, Any], value)

    def _lost(self, error: BaseException) -> ServerLost:
        self.close()
        silent = isinstance(error, TimeoutError | BlockingIOError)
        why = f"no answer within {self.timeout:g} s" if silent else "the connection was closed"
        if isinstance(error, ws.ConnectionClosedError) and error.rcvd is not None:
            why = f"it closed the connection ({error.rcvd.code} {error.rcvd.reason})"
        return ServerLost(f"the policy server {self.url} is lost: {why}")

    def _connect(self, token: str | None) -> ClientConnection:
        host, port = address(self.url)
        headers = {} if token is None else {HEADER: f"{SCHEME} {token}"}
        try:
            wire = socket.create_connection((host, port), timeout=self.timeout)
        except OSError as error:
            raise ServerLost(
                f"nothing answers at {self.url} ({error.strerror or error}): start the server "
                f"(embodied serve RUN port={port}), or correct the address"
            ) from error
        # Let a send fail that the other side does not take, which otherwise would wait for ever.
        limit = struct.pack("ll", int(self.timeout), int(self.timeout % 1 * 1e6))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        wire.settimeout(None)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return connect(
                self.url,
                sock=wire,
                additional_headers=headers,
                compression=None,
                max_size=TEXT,
                open_timeout=self.timeout,
                proxy=None,
                close_timeout=1.0,
            )
        except ws.InvalidStatus as error:
            wire.close()
            raise self._refused(error.response.status_code) from error
        except (ws.InvalidHandshake, ws.InvalidURI, ssl.SSLError, EOFError) as error:
            wire.close()
            raise RemoteError(
                f"{self.url} is no policy server: it does not speak websocket"
            ) from error
        except OSError as error:  # TimeoutError too
            wire.close()
            raise ServerLost(f"{self.url} accepts connections and does not answer") from error

    def _refused(self, status: int) -> RemoteError:
        if status == 401:
            return RemoteError(
                f"{self.url} refuses the token: give that of the server, token_file=FILE "
                "(embodied serve says which file) or EMBODIED_TOKEN"
            )
        if status == 503:
            return ServerLost(f"{self.url} has as many clients as it allows (connections=N)")
        return RemoteError(f"{self.url} is no policy server: it answers HTTP {status}")
