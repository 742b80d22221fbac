"""ChatClient: a client of language models behind an OpenAI-compatible server, also with images.

vLLM, llama.cpp, Ollama and hosted models implement this protocol: POST URL/chat/completions.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from embodied.core.bounds import Count
from embodied.core.build import ConfigError, Node, build
from embodied.datasets.lerobot.video import encode_png
from embodied.llm.budget import Budget, Deadline, Limits
from embodied.llm.cache import Cache, Record, answer_from, missing
from embodied.llm.chat import Answer, Chat, ChatError, Message, ServerUnusable
from embodied.llm.http import HttpClient, HttpError
from embodied.llm.request import Request, parse_json

logger = logging.getLogger(__name__)
ANSWER_TOKENS = 4  # of an answer whose log probabilities are requested


@dataclass(frozen=True)
class Config:
    """Settings of a language model behind a server."""

    url: str  # address of the server, up to and including /v1
    model: str  # name of the model
    key: str | None = None  # NAME of the environment variable with the API key; null: none
    cache: str | None = None  # file that stores every answer; null: none
    recorded: bool = False  # answer from the cache only
    structured: bool = True  # request output by a JSON schema from the server
    max_tokens: Count = 1024  # most tokens of an answer
    extra: dict[str, Any] = field(default_factory=dict)  # further request fields; null removes one
    limits: Limits = field(default_factory=Limits)  # time limits, retries and budgets


@dataclass
class Reply:
    """One or two responses of the server to one request; `schema`: whether JSON was requested."""

    text: str = ""
    data: Any = None
    served: str = ""
    fingerprint: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    repaired: bool = False
    schema: bool = False
    logprobs: tuple[dict[str, float], ...] = ()


class ChatClient(Chat):
    """An answer that violates the schema is returned to the model with the error, once; a second
    one, or a refusal, is a ChatError. The cache stores what the
    model said, refusals too, and no failures of the server. What was spent is kept in `folder`, of
    the run (None: in memory only)."""

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        if config.recorded and config.cache is None:
            raise ConfigError("recorded=true needs a cache: cache=FILE")
        self.config = config
        self.name = config.model
        self.structured = config.structured
        self.budget = Budget(config.limits, config.model, folder)
        self.http = None
        if not config.recorded:
            self.http = HttpClient(config.url, config.key, config.limits, self.budget)
        self.cache = None if config.cache is None else Cache(config.cache)

    def ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        top_logprobs: int = 0,
    ) -> Answer:
        """See `Chat`. BudgetSpent if a limit is reached; cached answers remain free."""
        config = self.config
        limits = (config.max_tokens, config.extra)
        request = Request(self.name, messages, schema, temperature, seed, *limits, top_logprobs)
        known = None if self.cache is None else self.cache.get(request.key)
        if known is not None:
            return answer_from(known)
        if self.http is None:
            raise missing(request, str(config.cache))
        with self.http.slot() as deadline:
            return self._fresh(self.http, request, deadline)

    def _fresh(self, http: HttpClient, request: Request, deadline: Deadline) -> Answer:
        began, reply = time.perf_counter(), Reply(schema=request.schema is not None)
        try:
            self._answer(http, request, reply, deadline)
        except InvalidReply as error:  # any other error is not caused by this request
            self._keep(request, reply, time.perf_counter() - began, str(error))
            raise ChatError(str(error)) from error
        seconds = time.perf_counter() - began
        self._keep(request, reply, seconds, None)
        tokens = reply.usage.get("total_tokens", 0)
        served = reply.served or self.name
        said = (reply.text, reply.data, served, request.key)
        return Answer(*said, False, tokens, seconds, reply.logprobs)

    def _answer(self, http: HttpClient, request: Request, reply: Reply, deadline: Deadline) -> None:
        """Fill `reply`; InvalidReply if the model returns nothing usable."""
        messages = _protocol_messages(request)
        answer = self._post(http, request, messages, deadline)
        self._read(answer, reply)
        if request.top_logprobs:
            reply.logprobs = _logprobs(answer, self.name)
        if request.schema is None:
            return
        try:
            reply.data = parse_json(reply.text, request.schema)
            return
        except ChatError as error:
            wrong = f"That cannot be used: {error}. Answer again, with JSON by the schema only."
        messages.append({"role": "assistant", "content": reply.text})
        messages.append({"role": "user", "content": wrong})
        reply.repaired = True
        self._read(self._post(http, request, messages, deadline), reply)
        try:
            reply.data = parse_json(reply.text, request.schema)
        except ChatError as error:
            said = " ".join(reply.text.split())[:120]
            raise InvalidReply(
                f'{self.name} did not answer by the schema: {error}; "{said}"'
            ) from error

    def _post(
        self,
        http: HttpClient,
        request: Request,
        messages: list[dict[str, Any]],
        deadline: Deadline,
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
        if request.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
            body["max_tokens"] = min(request.max_tokens, ANSWER_TOKENS)
        body = {name: value for name, value in body.items() if value is not None}
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

    def _read(self, answer: Mapping[str, Any], reply: Reply) -> None:
        """Store one response of the server in `reply`."""
        reply.served = str(answer.get("model") or "")
        reply.fingerprint = answer.get("system_fingerprint")
        for name, count in (answer.get("usage") or {}).items():
            if isinstance(count, int):
                reply.usage[name] = reply.usage.get(name, 0) + count
        choices: Any = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            why = " ".join(str(answer.get("error") or "").split())[:200]
            raise ServerError(f"{self.name} answered without choices{why and f': {why}'}")
        choice: dict[str, Any] = choices[0]
        message: dict[str, Any] = choice.get("message") or {}
        if message.get("refusal") or choice.get("finish_reason") == "content_filter":
            why = " ".join(str(message.get("refusal") or "content filter").split())[:120]
            raise InvalidReply(f"{self.name} refused: {why}")
        text = _text(message.get("content"))
        if not text.strip():
            raise ServerError(f"{self.name} answered with nothing")
        if choice.get("finish_reason") == "length" and reply.schema:
            raise InvalidReply(f"{self.name} did not end its answer: raise max_tokens")
        reply.text = text

    def _keep(self, request: Request, reply: Reply, seconds: float, error: str | None) -> None:
        if self.cache is None:
            return
        record: Record = {
            "key": request.key,
            "request": request.record(),
            "text": reply.text,
            "data": reply.data,
            "error": error,
            "repaired": reply.repaired,
            "served": reply.served,
            "fingerprint": reply.fingerprint,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "usage": reply.usage,
            "seconds": round(seconds, 3),
            **({"logprobs": list(reply.logprobs)} if reply.logprobs else {}),
        }
        self.cache.put(record)


class ServerError(ChatError):
    """The server answered without an answer; it is not cached."""


class InvalidReply(ChatError):
    """The model answered unusably, and repeating the request would not help."""


def _protocol_messages(request: Request) -> list[dict[str, Any]]:
    """The messages in the protocol's format; a schema is repeated in the prompt."""
    messages = [*request.messages]
    if request.schema is not None:
        # In the last message: many chat templates require alternating roles.
        order = f"Answer with JSON only, by this JSON schema: {json.dumps(request.schema)}"
        messages[-1] = replace(messages[-1], text=f"{messages[-1].text}\n\n{order}")
    return [{"role": m.role, "content": _content(m)} for m in messages]


def _logprobs(answer: Mapping[str, Any], model: str) -> tuple[dict[str, float], ...]:
    """The alternatives of each token of a response; ServerUnusable if it has none."""
    tokens = (answer["choices"][0].get("logprobs") or {}).get("content") or ()
    found = tuple(
        {str(one["token"]): float(one["logprob"]) for one in token.get("top_logprobs") or ()}
        for token in tokens
    )
    if not any(found):
        raise ServerUnusable(
            f"the server of {model} reports no log probabilities of tokens: choose a question "
            "that does not need them (reward.ask=score), or another server"
        )
    return found


def _text(content: Any) -> str:
    """The text of a response, which some servers give as a list of parts."""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return "".join(str(part.get("text") or "") for part in parts)
    return content if isinstance(content, str) else ""


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
