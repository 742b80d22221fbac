"""Append-only cache of language-model answers with their requests, one JSON line each.

CachedChat answers from such a file, without any server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.llm.append_log import AppendLog
from embodied.llm.chat import Answer, Chat, ChatError, Message
from embodied.llm.request import Request

logger = logging.getLogger(__name__)
Record = dict[
    str, Any
]  # key, request, text, data, error, served, fingerprint, time, usage, seconds


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
            if isinstance(record, dict) and isinstance(record.get("key"), str):
                self.records[record["key"]] = record
            else:
                wrong += 1
        if wrong:
            logger.warning("%s: %d lines are no answers and are ignored", self.path, wrong)


def answer_from(record: Record) -> Answer:
    """A cached answer; ChatError if the record is of a failure."""
    if record.get("error"):
        raise ChatError(f"{record['error']} (cached)")
    usage = record.get("usage") or {}
    return Answer(
        record["text"],
        record.get("data"),
        record.get("served") or record["request"]["model"],
        record["key"],
        cached=True,
        tokens=int(usage.get("total_tokens", 0)),
        seconds=float(record.get("seconds", 0.0)),
        logprobs=tuple(record.get("logprobs") or ()),
    )


def missing(question: Request, path: Path | str) -> ChatError:
    """The error for a request that is not in the cache."""
    return ChatError(
        f"{path} has no answer of {question.model} to {question.shown} ({question.key[:12]}); "
        "only cached answers are allowed here"
    )


@dataclass(frozen=True)
class Config:
    """Settings of a recorded language model; they have to be those of the original requests."""

    cache: str  # file written by a `ChatClient`
    model: str | None = None  # whose answers; null: the only model in the file
    max_tokens: Count = 1024  # most tokens of an answer
    extra: dict[str, Any] = field(default_factory=dict)  # further request fields


class CachedChat(Chat):
    """Raises ChatError for a request that is not in the cache."""

    def __init__(self, config: Config) -> None:
        if not Path(config.cache).is_file():
            raise ConfigError(f"chat.cache={config.cache} does not exist")
        self.config = config
        self.cache = Cache(config.cache)
        self.name = config.model or self._only_model()

    def _only_model(self) -> str:
        models = sorted({record["request"]["model"] for record in self.cache.records.values()})
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
        question = Request(self.name, messages, schema, temperature, seed, *limits, top_logprobs)
        record = self.cache.get(question.key)
        if record is None:
            raise missing(question, self.config.cache)
        return answer_from(record)
