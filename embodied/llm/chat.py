"""Chat: ask a language model, with pictures if it sees, and get words or data back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Message:
    """`images` (uint8 [H, W, 3] each) follow the text."""

    role: Literal["system", "user", "assistant"]
    text: str
    images: tuple[Tensor, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Answer:
    """`data` is what a schema asked for (None without one); `key` names question, model and
    settings together (the content address in a cache); the rest is provenance and cost."""

    text: str
    data: Any
    model: str
    key: str
    cached: bool = False
    tokens: int = 0
    seconds: float = 0.0


class ChatError(RuntimeError):
    """No usable answer: one line that says why. Nothing is made up in its place."""


class BudgetSpent(ChatError):
    """The calls or tokens that were allowed are used up."""


class Chat(Protocol):
    """A language model. `name` says which one, for provenance."""

    name: str

    def ask(
        self,
        messages: Sequence[Message],
        schema: dict[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Answer:
        """One answer; with a JSON `schema`, `data` obeys it. ChatError where there is none."""
        ...
