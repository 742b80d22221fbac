"""ChatClient: a client of language models behind an OpenAI-compatible server, also with images.

vLLM, llama.cpp, Ollama and hosted models implement this protocol: POST URL/chat/completions.

Append-only cache of language-model answers with their requests, one JSON line each.

CachedChat answers from such a file, without any server.

HttpClient: requests to an OpenAI-compatible server, with retries.

Rate limits (429), server errors and broken connections are retried after

    min(patience, backoff 2^attempt) u,   u ~ U(0.5, 1),

or after Retry-After, if that is longer. The deadline of an answer covers all its attempts, and
the pauses between them.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from embodied.core.bounds import Count
from embodied.core.build import ConfigError, Node, build
from embodied.core.files import TEXT
from embodied.datasets.lerobot.video import encode_png
from embodied.llm.budget import AppendLog, Budget, Deadline, Limits
from embodied.llm.chat import Answer, Chat, ChatError, Message, Request, ServerUnusable, parse_json
from embodied.llm.reply import InvalidReply, Reply, ServerError, mapping, read_reply, usage_of

logger = logging.getLogger(__name__)
# key, request, text, data, error, served, fingerprint, time, usage, seconds
Record = dict[str, Any]


class Cache:
    """Records by the key of their request; the newest counts. The first `put` creates the file."""

    def __init__(self, path: Path | str) -> None:
        self.log = AppendLog(path)
        self.path = self.log.path
        self.records: dict[str, Record] = {}
        self.lock = threading.Lock()
        self._read()

    def __len__(self) -> int:
        return len(self.records)

    def get(self, key: str) -> Record | None:
        """The record of a request, also if another process has just added it."""
        with self.lock:
            if key not in self.records:
                self._read()
            return self.records.get(key)

    def put(self, record: Record) -> None:
        """Append a record and sync it to disk. ChatError if it cannot be written."""
        with self.lock:
            self.log.append(record)
            self.records[record["key"]] = record

    def _read(self) -> None:
        """Take in the lines that were appended since the last call."""
        wrong = 0
        for record in self.log.read():
            if _is_record(record):
                self.records[record["key"]] = record
            else:
                wrong += 1
        if wrong:
            logger.warning("%s: %d lines are no answers and are ignored", self.path, wrong)


def _is_record(value: Any) -> bool:
    """Whether a line of a cache holds what an answer needs."""
    record, request = mapping(value), mapping(mapping(value).get("request"))
    texts = (record.get("key"), record.get("text"), request.get("model"))
    usage = mapping(record.get("usage") or {}).get("total_tokens", 0)
    seconds = record.get("seconds", 0.0)
    return all(isinstance(each, str) for each in texts) and all(
        isinstance(each, int | float) and abs(each) < math.inf for each in (usage, seconds)
    )


def answer_from(record: Record, cached: bool = True) -> Answer:
    """The answer of a record; ChatError if it is of a failure."""
    if record.get("error"):
        raise ChatError(f"{record['error']}{' (cached)' if cached else ''}")
    return Answer(
        record["text"],
        record.get("data"),
        record.get("served") or record["request"]["model"],
        record["key"],
        cached=cached,
        tokens=int(mapping(record.get("usage")).get("total_tokens", 0)),
        seconds=float(record.get("seconds", 0.0)),
        logprobs=tuple(record.get("logprobs") or ()),
    )


@dataclass(frozen=True)
class CachedConfig:
    """Settings of a recorded language model; they have to be those of the original requests."""

    cache: str  # file written by a `ChatClient`
    model: str | None = None  # whose answers; null: the only model in the file
    max_tokens: Count = 1024  # most tokens of an answer
    extra: dict[str, Any] = field(default_factory=dict)  # further request fields


class CachedChat(Chat):
    """Raises ChatError for a request that is not in the cache."""

    config: CachedConfig | Config
    cache: Cache | None

    def __init__(self, config: CachedConfig) -> None:
        if not Path(config.cache).is_file():
            raise ConfigError(f"chat.cache={config.cache} does not exist")
        self.config = config
        self.cache = Cache(config.cache)
        self.name = config.model or self._only_model(self.cache)

    def _only_model(self, cache: Cache) -> str:
        models = sorted({record["request"]["model"] for record in cache.records.values()})
        if len(models) != 1:
            raise ConfigError(
                f"{self.config.cache} holds answers of {', '.join(models) or 'no model'}; "
                "choose one: model=NAME"
            )
        return models[0]

    def ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        top_logprobs: int = 0,
    ) -> Answer:
        limits = (self.config.max_tokens, self.config.extra)
        request = Request(self.name, messages, schema, temperature, seed, *limits, top_logprobs)
        record = None if self.cache is None else self.cache.get(request.key)
        return self._not_cached(request) if record is None else answer_from(record)

    def _not_cached(self, request: Request) -> Answer:
        raise ChatError(
            f"{self.config.cache} has no answer of {request.model} to {request.shown} "
            f"({request.key[:12]}); only cached answers are allowed here"
        )


SETUP = (401, 403, 404)
"""A wrong key, or a wrong model or address: no later request would succeed."""
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
CODINGS = ("gzip", "deflate")
"""They inflate a part of 64 KB to 64 MB at most; others, and several of them, to any size."""


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
        headers = {"Accept-Encoding": ", ".join(CODINGS)}
        if self.secret:
            headers["Authorization"] = f"Bearer {self.secret}"
        # No proxy for a server on this machine.
        outside = not _loopback(parts.hostname)
        pool = httpx.Limits(
            max_connections=limits.in_flight, max_keepalive_connections=limits.in_flight
        )
        self.client = httpx.Client(headers=headers, limits=pool, trust_env=outside)
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
                usage = usage_of(_object(whole) or {}) if usage is not None else None
                return whole
        finally:
            self.budget.settle(usage)

    def _read(self, response: httpx.Response, deadline: Deadline) -> httpx.Response:
        """`response` with its content. A server may send its body in drops that never end, so that
        each read is quick: the deadline is checked at every one."""
        coding = response.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", *CODINGS):
            raise ChatError(f"the answer of {self.url} has the coding {coding!r:.40}")
        parts: list[bytes] = []
        size = 0
        for part in response.iter_bytes():
            deadline.require(self.url, f"its answer ({response.status_code}) is not complete")
            parts.append(part)
            size += len(part)
            if size > TEXT:
                raise ChatError(f"the answer of {self.url} has more than {TEXT:,} bytes")
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
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


ANSWER_TOKENS = 4  # of an answer whose log probabilities are requested
FEW = 5  # alternatives of a token that every server with log probabilities reports


@dataclass(frozen=True)
class Config:
    """Settings of a language model behind a server."""

    url: str  # address of the server, up to and including /v1
    model: str  # name of the model
    key: str | None = None  # NAME of the environment variable with the API key; null: none
    cache: str | None = None  # file that stores every answer; null: none
    recorded: bool = False  # answer from the cache only
    max_tokens: Count = 1024  # most tokens of an answer
    extra: dict[str, Any] = field(default_factory=dict)  # further request fields; null removes one
    limits: Limits = field(default_factory=Limits)  # time limits, retries and budgets


class ChatClient(CachedChat):
    """An answer that violates the schema is returned to the model with the error, once; a second
    one, or a refusal, is a ChatError. The cache stores what the model said, refusals too, and no
    failures of the server. `ask` raises BudgetSpent if a limit is reached; cached answers remain
    free. What was spent is kept in `folder`, of the run (None: in memory only)."""

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        if config.recorded and config.cache is None:
            raise ConfigError("recorded=true needs a cache: cache=FILE")
        self.config = config
        self.name = config.model
        self.structured = True  # until the server turns out not to know JSON schemas
        self.alternatives: int | None = None  # of a token, which the server reports at most
        self.has_logprobs = False  # it has reported log probabilities
        self.budget = Budget(config.limits, config.model, folder)
        self.http = None
        if not config.recorded:
            self.http = HttpClient(config.url, config.key, config.limits, self.budget)
        self.cache = None if config.cache is None else Cache(config.cache)

    def _not_cached(self, request: Request) -> Answer:
        if self.http is None:
            return super()._not_cached(request)
        with self.http.slot() as deadline:
            return self._fresh(self.http, request, deadline)

    def _fresh(self, http: HttpClient, request: Request, deadline: Deadline) -> Answer:
        record: Record = {
            "key": request.key,
            "request": request.record(),
            "text": "",
            "data": None,
            "error": None,
            "repaired": False,
            "served": "",
            "fingerprint": None,
            "time": "",
            "usage": {},
            "seconds": 0.0,
        }
        began = time.perf_counter()
        try:
            self._answer(http, request, record, deadline)
        except InvalidReply as error:  # any other error is not caused by this request
            record["error"] = str(error)
        record["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        record["seconds"] = round(time.perf_counter() - began, 3)
        if self.cache is not None:
            self.cache.put(record)
        return answer_from(record, cached=False)

    def _answer(
        self, http: HttpClient, request: Request, record: Record, deadline: Deadline
    ) -> None:
        """Fill `record`; InvalidReply if the model returns nothing usable."""
        messages = _protocol_messages(request)
        answer = self._post(http, request, messages, deadline)
        reply = self._read(answer, request, record)
        if request.top_logprobs:
            record["logprobs"] = list(self._require_logprobs(reply))
        if request.schema is None:
            return
        try:
            record["data"] = parse_json(record["text"], request.schema)
            return
        except ChatError as error:
            wrong = f"That cannot be used: {error}. Answer again, with JSON by the schema only."
        messages.append({"role": "assistant", "content": record["text"]})
        messages.append({"role": "user", "content": wrong})
        record["repaired"] = True
        self._read(self._post(http, request, messages, deadline), request, record)
        try:
            record["data"] = parse_json(record["text"], request.schema)
        except ChatError as error:
            said = " ".join(record["text"].split())[:120]
            raise InvalidReply(
                f'{self.name} did not answer by the schema: {error}; "{said}"'
            ) from error

    def _post(
        self, http: HttpClient, request: Request, messages: list[dict[str, Any]], deadline: Deadline
    ) -> dict[str, Any]:
        """The server's response; a server without JSON-schema support gets the schema in the prompt
        only."""
        body: dict[str, Any] = {
            "model": request.model,
            "messages": messages,
            "temperature": request.temperature,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            **request.extra,
        }
        body = {name: value for name, value in body.items() if value is not None}
        if request.top_logprobs:
            return self._post_for_logprobs(http, request, body, deadline)
        if request.schema is None or not self.structured:
            return http.post("/chat/completions", body, deadline)
        form = {"name": "answer", "schema": dict(request.schema)}
        kept = {"response_format": {"type": "json_schema", "json_schema": form}}
        try:
            return http.post("/chat/completions", {**body, **kept}, deadline)
        except HttpError as error:
            if error.status not in (400, 422):
                raise
            answer = http.post("/chat/completions", body, deadline)
            logger.warning(
                "%s does not support JSON schemas (%s): using the prompt only", http.url, error
            )
            self.structured = False
            return answer

    def _post_for_logprobs(
        self, http: HttpClient, request: Request, body: dict[str, Any], deadline: Deadline
    ) -> dict[str, Any]:
        """The server's response with log probabilities of a few tokens; a server that rejects the
        number of alternatives is asked for FEW."""
        most = self.alternatives or request.top_logprobs
        body |= {"logprobs": True, "top_logprobs": min(request.top_logprobs, most)}
        body["max_tokens"] = min(request.max_tokens, ANSWER_TOKENS)
        try:
            return http.post("/chat/completions", body, deadline)
        except HttpError as error:
            if error.status not in (400, 422) or body["top_logprobs"] <= FEW:
                raise
            answer = http.post("/chat/completions", {**body, "top_logprobs": FEW}, deadline)
            logger.warning("%s: only %d alternatives of a token (%s)", http.url, FEW, error)
            self.alternatives = FEW
            return answer

    def _require_logprobs(self, reply: Reply) -> tuple[dict[str, float], ...]:
        """The reply's log probabilities. Without any, ServerUnusable; ServerError of a server that
        has reported some before."""
        if any(reply.logprobs):
            self.has_logprobs = True
            return reply.logprobs
        problem = f"the server of {self.name} reports no log probabilities of tokens"
        if self.has_logprobs:
            raise ServerError(f"{problem} in this answer")
        raise ServerUnusable(
            f"{problem}: choose a question that does not need them (reward.ask=score), or another "
            "server"
        )

    def _read(self, answer: Mapping[str, Any], request: Request, record: Record) -> Reply:
        """The reply of one response of the server, which is stored in `record`."""
        for name, count in usage_of(answer).items():
            record["usage"][name] = record["usage"].get(name, 0) + count
        reply = read_reply(answer, self.name)
        record["served"] = reply.served
        record["fingerprint"] = reply.fingerprint
        if not reply.complete and request.schema is not None:
            raise InvalidReply(f"{self.name} did not end its answer: raise max_tokens")
        record["text"] = reply.text
        return reply


def _protocol_messages(request: Request) -> list[dict[str, Any]]:
    """The messages in the protocol's format; a schema is repeated in the prompt."""
    messages = [*request.messages]
    if request.schema is not None:
        # In the last message: many chat templates require alternating roles.
        order = f"Answer with JSON only, by this JSON schema: {json.dumps(request.schema)}"
        messages[-1] = replace(messages[-1], text=f"{messages[-1].text}\n\n{order}")
    return [{"role": m.role, "content": _content(m)} for m in messages]


def _content(message: Message) -> str | list[dict[str, Any]]:
    """The text, followed by images as PNG data URLs."""
    if not message.images:
        return message.text
    parts: list[dict[str, Any]] = [{"type": "text", "text": message.text}]
    for image in message.images:
        data = base64.b64encode(encode_png(image)).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    return parts


def open_chat(node: Node, folder: Path | None) -> Chat:
    """The language model that a node describes: `ChatClient`, `CachedChat`, or a custom class;
    ConfigError for wrong settings. What it spends is kept in `folder`, of the run."""
    return build(node, Chat, folder=folder)
