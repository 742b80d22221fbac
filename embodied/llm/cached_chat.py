"""CachedChat: a language model's answers from a cache file, without any server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.llm.cache import Cache, answer_from, missing
from embodied.llm.chat import Answer, Chat, Message
from embodied.llm.request import Request


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
