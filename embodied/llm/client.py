"""Endpoint: a language model behind any OpenAI-compatible server, with pictures if it sees.

vLLM, llama.cpp, Ollama and hosted models speak this protocol: POST URL/chat/completions.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from embodied.core.build import ConfigError, Node, build
from embodied.datasets.lerobot.video import encode_png
from embodied.llm.cache import Cache, Record, answer_from, missing
from embodied.llm.chat import Answer, BudgetSpent, Chat, ChatError, Message
from embodied.llm.http import HttpClient, HttpError, Limits
from embodied.llm.request import Request, parse_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """`url` up to and with /v1; `key`: the NAME of the environment variable that holds the secret
    (null: none is sent); `cache`: the file that remembers every answer (null: nothing does);
    `recorded`: answer from it only; `structured`: ask the server to keep to the schema; `extra`:
    further fields of the request (null takes one out)."""

    url: str
    model: str
    key: str | None = None
    cache: str | None = None
    recorded: bool = False
    structured: bool = True
    max_tokens: int = 1024
    extra: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


@dataclass
class Reply:
    """One or two answers of the server to one question."""

    text: str = ""
    data: Any = None
    served: str = ""
    fingerprint: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    repaired: bool = False


class ChatClient:
    """A wrong answer is shown to the model with what is wrong with it, once; a second one, or a
    refusal, is a ChatError. The cache remembers those too."""

    def __init__(self, config: Config) -> None:
        if config.recorded and config.cache is None:
            raise ConfigError("recorded=true needs the file of recorded answers: cache=FILE")
        self.config, self.name = config, config.model
        self.structured = config.structured
        self.wire = None if config.recorded else HttpClient(config.url, config.key, config.limits)
        self.cache = None if config.cache is None else Cache(config.cache)

    def ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Answer:
        """See `Chat`. BudgetSpent where a limit is reached; what is remembered is still free."""
        config = self.config
        limits = (config.max_tokens, config.extra)
        question = Request(self.name, messages, schema, temperature, seed, *limits)
        known = None if self.cache is None else self.cache.get(question.key)
        if known is not None:
            return answer_from(known)
        if self.wire is None:
            raise missing(question, str(config.cache))
        return self._fresh(self.wire, question)

    def _fresh(self, wire: HttpClient, question: Request) -> Answer:
        began, reply = time.perf_counter(), Reply()
        try:
            self._answer(wire, question, reply)
        except (BudgetSpent, HttpError):
            raise  # nothing of the question itself
        except InvalidReply as error:
            self._keep(question, reply, time.perf_counter() - began, str(error))
            raise ChatError(str(error)) from error
        seconds = time.perf_counter() - began
        self._keep(question, reply, seconds, None)
        tokens = reply.usage.get("total_tokens", 0)
        served = reply.served or self.name
        return Answer(reply.text, reply.data, served, question.key, False, tokens, seconds)

    def _answer(self, wire: HttpClient, question: Request, reply: Reply) -> None:
        """Fill `reply`; Unusable when the model gives nothing that can be used."""
        messages = _wired(question)
        self._read(self._post(wire, question, messages), reply)
        if question.schema is None:
            return
        try:
            reply.data = parse_json(reply.text, question.schema)
            return
        except ChatError as error:
            wrong = f"That cannot be used: {error}. Answer again, with JSON by the schema only."
        messages.append({"role": "assistant", "content": reply.text})
        messages.append({"role": "user", "content": wrong})
        reply.repaired = True
        self._read(self._post(wire, question, messages), reply)
        try:
            reply.data = parse_json(reply.text, question.schema)
        except ChatError as error:
            said = " ".join(reply.text.split())[:120]
            raise InvalidReply(
                f'{self.name} did not answer by the schema: {error}; "{said}"'
            ) from error

    def _post(
        self, wire: HttpClient, question: Request, messages: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The server's answer; a server that knows no schemas is asked in words only."""
        body: dict[str, Any] = {
            "model": question.model,
            "messages": messages,
            "temperature": question.temperature,
            "seed": question.seed,
            "max_tokens": question.max_tokens,
            **question.extra,
        }
        body = {name: value for name, value in body.items() if value is not None}
        if question.schema is None or not self.structured:
            return wire.post("/chat/completions", body)
        form = {"name": "answer", "schema": dict(question.schema)}
        kept = {"response_format": {"type": "json_schema", "json_schema": form}}
        try:
            return wire.post("/chat/completions", {**body, **kept})
        except HttpError as error:
            if error.status not in (400, 422):
                raise
            answer = wire.post("/chat/completions", body)
            logger.warning(
                "%s takes no JSON schema (%s): asked in words from now on", wire.url, error
            )
            self.structured = False
            return answer

    def _read(self, answer: Mapping[str, Any], reply: Reply) -> None:
        """Take one answer of the server into `reply`."""
        reply.served = str(answer.get("model") or "")
        reply.fingerprint = answer.get("system_fingerprint")
        for name, count in (answer.get("usage") or {}).items():
            if isinstance(count, int):
                reply.usage[name] = reply.usage.get(name, 0) + count
        choices: Any = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise InvalidReply(f"{self.name} answered without choices")
        choice: dict[str, Any] = choices[0]
        message: dict[str, Any] = choice.get("message") or {}
        if message.get("refusal") or choice.get("finish_reason") == "content_filter":
            why = " ".join(str(message.get("refusal") or "content filter").split())[:120]
            raise InvalidReply(f"{self.name} refused: {why}")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise InvalidReply(f"{self.name} answered with nothing")
        reply.text = message["content"]

    def _keep(self, question: Request, reply: Reply, seconds: float, error: str | None) -> None:
        if self.cache is None:
            return
        record: Record = {
            "key": question.key,
            "request": question.record(),
            "text": reply.text,
            "data": reply.data,
            "error": error,
            "repaired": reply.repaired,
            "served": reply.served,
            "fingerprint": reply.fingerprint,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "usage": reply.usage,
            "seconds": round(seconds, 3),
        }
        self.cache.put(record)


class InvalidReply(ChatError):
    """The model answered, and asking the same again would not help."""


def _wired(question: Request) -> list[dict[str, Any]]:
    """The messages as the protocol has them; a schema is asked for in words, too."""
    messages = [*question.messages]
    if question.schema is not None:
        # In the last message: many templates want user and assistant to take turns.
        order = f"Answer with JSON only, by this JSON schema: {json.dumps(question.schema)}"
        messages[-1] = replace(messages[-1], text=f"{messages[-1].text}\n\n{order}")
    return [{"role": m.role, "content": _content(m)} for m in messages]


def _content(message: Message) -> str | list[dict[str, Any]]:
    """The text, with pictures as PNG data URLs after it."""
    if not message.images:
        return message.text
    parts: list[dict[str, Any]] = [{"type": "text", "text": message.text}]
    for image in message.images:
        data = base64.b64encode(encode_png(image)).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    return parts


def open_chat(node: Node) -> Chat:
    """The language model that a node describes: this file's `ChatClient`, `recorded.Recorded`, or a
    class of one's own; ConfigError where the settings are wrong."""
    return build(node)
