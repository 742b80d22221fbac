"""HttpClient: requests to an OpenAI-compatible server, with retries.

Rate limits (429), server errors and broken connections are retried after

    min(patience, backoff 2^attempt) u,   u ~ U(0.5, 1),

or after Retry-After, if that is longer. The deadline of an answer covers all its attempts, and
the pauses between them.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from embodied.core.build import ConfigError
from embodied.llm.budget import Budget, Deadline, Limits
from embodied.llm.chat import ChatError, ServerUnusable

logger = logging.getLogger(__name__)
SETUP = (401, 403, 404)
"""A wrong key, or a wrong model or address: no later request would succeed."""
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)


class HttpError(ChatError):
    """The server rejected the request; `status` is the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class HttpClient:
    """Posts JSON to `url`/PATH. `key` names the environment variable with the API key, which is
    never logged. Thread-safe."""

    def __init__(self, url: str, key: str | None, limits: Limits, budget: Budget) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url={url!r} must be an address such as http://127.0.0.1:8000/v1")
        self.url = url.rstrip("/")
        self.limits = limits
        self.budget = budget
        if key is not None and not os.environ.get(key):
            raise ConfigError(f"the environment variable {key} (key={key}) is not set")
        self.secret = "" if key is None else os.environ[key]
        bearer = {"Authorization": f"Bearer {self.secret}"} if self.secret else {}
        # No proxy for a server on this machine.
        outside = not _loopback(parts.hostname)
        pool = httpx.Limits(
            max_connections=limits.in_flight, max_keepalive_connections=limits.in_flight
        )
        self.client = httpx.Client(headers=bearer, limits=pool, trust_env=outside)
        self.slots = threading.BoundedSemaphore(limits.in_flight)
        self.lock = threading.Lock()
        self.free_at = 0.0
        self.random = random.Random()

    @contextmanager
    def slot(self) -> Iterator[Deadline]:
        """One of the answers in flight; the deadline begins once there is room."""
        with self.slots:
            yield Deadline(self.limits.deadline)

    def post(self, path: str, body: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """The JSON object of a successful response; HttpError for an invalid request, BudgetSpent,
        ServerUnusable for a wrong key, model or address, DeadlinePassed,
        or ChatError if all attempts failed."""
        problem, wait = "", 0.0
        for attempt in range(self.limits.retries + 1):
            deadline.require(self.url, problem, wait)
            if attempt:
                logger.info("%s; attempt %d in %.1f s", problem, attempt + 1, wait)
                time.sleep(wait)
            try:
                response = self._sent(path, body, deadline)
            except httpx.TransportError as error:
                silent, after = isinstance(error, httpx.ReadTimeout), 0.0
                before, problem = problem, self._failed(error)
                deadline.require(self.url, before if silent else problem)
            else:
                if response.status_code == 200 and (found := _object(response)) is not None:
                    self.budget.require_usage(found.get("usage"))
                    return found
                problem, after = self._error_text(response), retry_after(response.headers)
                if response.status_code in SETUP:
                    raise ServerUnusable(f"{problem}; check chat.url, chat.key and chat.model")
                if response.status_code not in (200, *RETRIED):
                    raise HttpError(response.status_code, problem)
            if after > self.limits.patience:
                raise ChatError(f"{problem}, and requests a wait of {after:.0f} s")
            wait = max(after, self.pause(attempt))
        raise ChatError(f"{problem} ({self.limits.retries + 1} attempts)")

    def _sent(self, path: str, body: Mapping[str, Any], deadline: Deadline) -> httpx.Response:
        """The response to one request, respecting rate limit and budget. An answer that was begun
        will be paid for, even if it does not arrive whole."""
        self.budget.reserve()
        usage: dict[str, Any] | None = None
        try:
            turn = self.turn(time.monotonic())
            deadline.extend(turn)
            time.sleep(turn)
            left = max(deadline.left, 0.001)
            timeout = httpx.Timeout(
                min(self.limits.read, left), connect=min(self.limits.connect, left)
            )
            with self.client.stream(
                "POST", f"{self.url}{path}", json=dict(body), timeout=timeout
            ) as response:
                usage = {} if response.status_code == 200 else None
                whole = self._read(response, deadline)
                usage = _usage(whole) if usage is not None else None
                return whole
        finally:
            self.budget.settle(usage)

    def _read(self, response: httpx.Response, deadline: Deadline) -> httpx.Response:
        """`response` with its content. A server may send its body in drops that never end, so that
        each read is quick: the deadline is checked at every one."""
        parts: list[bytes] = []
        for part in response.iter_bytes():
            deadline.require(self.url, f"its answer ({response.status_code}) is not complete")
            parts.append(part)
        coded = ("content-encoding", "transfer-encoding", "content-length")
        headers = {k: v for k, v in response.headers.items() if k not in coded}
        return httpx.Response(response.status_code, headers=headers, content=b"".join(parts))

    def pause(self, attempt: int) -> float:
        """Seconds to wait after attempt number `attempt` (from 0)."""
        longest = min(self.limits.patience, self.limits.backoff * 2**attempt)
        return longest * self.random.uniform(0.5, 1.0)

    def turn(self, now: float) -> float:
        """Seconds until a request at time `now` may be sent under `per_minute`; reserves that
        slot."""
        if self.limits.per_minute is None:
            return 0.0
        with self.lock:
            begin = max(now, self.free_at)
            self.free_at = begin + 60.0 / self.limits.per_minute
        return begin - now

    def _failed(self, error: httpx.TransportError) -> str:
        if isinstance(error, httpx.TimeoutException):
            within = self.limits.connect if isinstance(error, httpx.ConnectTimeout) else None
            return f"{self.url} did not answer within {within or self.limits.read:g} s"
        return f"no connection to {self.url} ({self._public(str(error)) or type(error).__name__})"

    def _error_text(self, response: httpx.Response) -> str:
        if response.status_code == 200:
            return f"{self.url} returned invalid JSON"
        return f"{self.url} answered {response.status_code}: {self._public(response.text)}"

    def _public(self, text: str) -> str:
        """One short line without the API key."""
        text = text.replace(self.secret, "***") if self.secret else text
        return " ".join(text.split())[:200]


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header, given as a number or a date; 0 without one."""
    text = headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _object(response: httpx.Response) -> dict[str, Any] | None:
    try:
        found = response.json()
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _usage(response: httpx.Response) -> dict[str, Any]:
    found = (_object(response) or {}).get("usage")
    return found if isinstance(found, dict) else {}


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
