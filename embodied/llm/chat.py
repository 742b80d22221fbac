"""Chat: the interface of language models, with optional images and JSON output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from embodied.core.build import ConfigError


@dataclass(frozen=True)
class Message:
    """A message; `images` (uint8 [H, W, 3] each) follow the text."""

    role: Literal["system", "user", "assistant"]
    text: str
    images: tuple[Tensor, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Answer:
    """`data`: parsed JSON if a schema was given; `key`: hash of request, model and settings (the
    key in a cache); `logprobs`, if requested: for each token of the answer, its most likely
    alternatives (itself included) with their log probabilities; the rest is provenance and cost."""

    text: str
    data: Any
    model: str
    key: str
    cached: bool = False
    tokens: int = 0
    seconds: float = 0.0
    logprobs: tuple[Mapping[str, float], ...] = ()


class ChatError(RuntimeError):
    """No usable answer; the message is one line."""


class BudgetSpent(ChatError):
    """The allowed number of calls or tokens is used up."""


class ServerUnusable(ConfigError):
    """No later request would succeed: a wrong key, model or address, no log probabilities, or a
    spent budget where all answers are needed."""


class Chat(Protocol):
    """A language model. `name` identifies it, for provenance."""

    name: str

    def ask(
        self,
        messages: Sequence[Message],
        schema: dict[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        top_logprobs: int = 0,
    ) -> Answer:
        """Request one answer; with a JSON `schema`, `data` conforms to it. ChatError if there is
        none. With `top_logprobs`, the answer is a few tokens with that many alternatives each;
        ConfigError if the model does not report them."""
        ...
