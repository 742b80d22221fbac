"""Connection: asks a policy server, and waits for one that is lost."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from embodied.core.build import ConfigError
from embodied.core.errors import RemoteError, ServerLost
from embodied.serve.protocol import Message, Offer, RequestError, find_token

if TYPE_CHECKING:
    from embodied.serve.client import Client

PAUSE = 0.5  # s, between two tries to reach a server that is lost


class Connection:
    """`ask` sends requests again after a loss: a server keeps nothing between two of them, so none
    counts twice. `wait`: s to wait for a lost server (0: raise ServerLost at once). Copies of a
    policy share one connection: make it with `to`. `same` tells of a server that is back whether it
    is the former one, where its offer does not."""

    known: ClassVar[WeakValueDictionary[tuple[Any, ...], Connection]] = WeakValueDictionary()

    @classmethod
    def to(cls, url: str, token_file: str | None, timeout: float, wait: float) -> Connection:
        """The connection of this process with these settings, opened if there is none."""
        key = (url, token_file, timeout, wait)
        found = cls.known.get(key)
        if found is None:
            found = cls.known[key] = cls(*key)
        return found

    def __init__(self, url: str, token_file: str | None, timeout: float, wait: float) -> None:
        from embodied.serve.client import Client

        self.url = url
        self.token_file = token_file
        self.timeout = timeout
        self.wait = wait
        self._connect = Client
        self._lock = threading.Lock()
        self._client: Client | None = None
        self.offer = self._open()
        self.same: Callable[[Client], bool] | None = None

    def ask(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The answers to `messages`. ServerLost if the server stays away; RemoteError if it refuses
        one, or another policy is served there now."""
        with self._lock:
            try:
                return self._ask(messages)
            except ServerLost as error:
                if not self.wait:
                    raise
                return self._wait_for_server(messages, error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Connection:
        return self

    def __del__(self) -> None:
        # At the end of the interpreter its threads are gone; `close_all` came before.
        if getattr(self, "_client", None) is not None and not sys.is_finalizing():
            self._close()

    def _ask(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if self._client is None:
            self._open_again()
        assert self._client is not None
        try:
            return self._client.request_many(messages)
        except RemoteError:
            self._close()
            raise

    def _open_again(self) -> None:
        """Connect to a server that was lost; RemoteError if it serves another policy now."""
        offer = self._open()
        assert self._client is not None
        try:
            if _identity(offer) != _identity(self.offer) or (
                self.same is not None and not self.same(self._client)
            ):
                raise RemoteError(
                    f"{self.url} serves another policy than before: serve the former one again"
                )
        except RemoteError:
            self._close()
            raise

    def _wait_for_server(
        self, messages: Sequence[Message], error: ServerLost
    ) -> list[dict[str, Any]]:
        """The answers of the server when it is back."""
        began = time.monotonic()
        print(
            f"embodied: {error}; waiting for it (at most {self.wait:g} s; Ctrl-C twice: stop)",
            file=sys.stderr,
            flush=True,
        )
        while time.monotonic() < began + self.wait:
            try:
                time.sleep(PAUSE)
                answers = self._ask(messages)
            except ServerLost as again:
                error = again
            except KeyboardInterrupt as stop:
                raise ServerLost(f"stopped while waiting for {self.url}") from stop
            else:
                gone = time.monotonic() - began
                line = f"embodied: the policy server {self.url} is back after {gone:.0f} s"
                print(line, file=sys.stderr, flush=True)
                return answers
        raise ServerLost(f"{error} (waited {self.wait:g} s)") from error

    def _open(self) -> Offer:
        self._client = self._connect(
            self.url, find_token(self.url, self.token_file), timeout=self.timeout
        )
        try:
            return Offer.from_metadata(self._client.metadata)
        except RequestError as error:
            self._close()
            raise ConfigError(f"{self.url}: {error}") from error

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None


def _identity(offer: Offer) -> tuple[Any, ...]:
    """The facts that tell one served policy from another."""
    return offer.policy, offer.chunk, offer.noise, offer.features, sorted(offer.carry)


@atexit.register
def close_all() -> None:
    """Close the connections that are left when a program ends, while their threads still run."""
    for connection in list(Connection.known.values()):
        connection._close()
