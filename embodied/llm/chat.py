"""Chat: the interface of language models, with optional images and JSON output.

Request: everything that identifies a request to a language model; JSON parsing of answers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
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


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with these properties, all of them and no others."""
    exactly = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": dict(properties), **exactly}


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


TAG = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
OPENING = re.compile(r"[{\[]")
ATTEMPTS = 1000  # places in an answer where JSON may begin
FENCE = re.compile(r"```[\w-]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Request:
    """Everything that an answer depends on; `extra` are further request fields. With
    `top_logprobs`, that many alternatives of each token are requested."""

    model: str
    messages: Sequence[Message]
    schema: Mapping[str, Any] | None = None
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 1024
    extra: Mapping[str, Any] = field(default_factory=dict)
    top_logprobs: int = 0

    def record(self) -> dict[str, Any]:
        """The request as JSON; images as digests of their shape and bytes."""
        messages = [
            {"role": m.role, "text": m.text, "images": [digest_of(image) for image in m.images]}
            for m in self.messages
        ]
        return {
            "model": self.model,
            "messages": messages,
            "schema": None if self.schema is None else dict(self.schema),
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "extra": dict(self.extra),
            # Left out without them: the keys of answers that were recorded before stay.
            **({"top_logprobs": self.top_logprobs} if self.top_logprobs else {}),
        }

    @property
    def key(self) -> str:
        """sha256 of the canonical JSON record."""
        text = json.dumps(self.record(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def shown(self) -> str:
        """The start of its last message, for error messages."""
        text = " ".join(self.messages[-1].text.split()) if self.messages else ""
        return f'"{text[:80]}..."' if len(text) > 80 else f'"{text}"'


def digest_of(image: Tensor) -> str:
    """sha256 of an image's shape and bytes."""
    pixels = image.cpu().contiguous().numpy()
    return hashlib.sha256(f"{list(image.shape)} ".encode() + pixels.tobytes()).hexdigest()


def parse_json(text: str, schema: Mapping[str, Any]) -> Any:
    """The JSON value in `text` that conforms to `schema`: the whole text, a fenced block, or the
    last object or list within prose. ChatError if there is none."""
    problem = "there is no JSON in it"
    checker = validator_for(schema)(schema)
    for value in _values(without_reasoning(text)):
        error = best_match(checker.iter_errors(value))
        if error is None:
            return value
        problem = f"{error.json_path}: {error.message}"[:300]
    raise ChatError(problem)


def _finite(number: str) -> float:
    """A JSON number; ValueError for what no number is: NaN, Infinity, 1e999."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not finite")
    return value


DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _values(text: str) -> Iterator[Any]:
    """JSON values in order of likelihood; truncated ones are skipped."""
    for part in [text, *reversed(FENCE.findall(text))]:
        try:
            yield DECODER.decode(part)
        except (ValueError, RecursionError):
            continue
    yield from reversed(_embedded(text))


def _embedded(text: str) -> list[Any]:
    """Outermost objects and lists within prose, in order; after ATTEMPTS failures it gives up, as
    each may read to the end of the text."""
    found = []
    place = 0
    failed = 0
    while failed < ATTEMPTS and (match := OPENING.search(text, place)):
        try:
            value, place = DECODER.raw_decode(text, match.start())
            found.append(value)
        except (ValueError, RecursionError):
            place, failed = match.start() + 1, failed + 1
    return found


def without_reasoning(text: str) -> str:
    """`text` without what a model wrote between `<think>` and `</think>`, stripped. Reasoning that
    is not closed lasts to the end; what is before a closing tag alone is reasoning, as some servers
    drop the opening tag."""
    kept = ""
    depth = 0
    at = 0
    for tag in TAG.finditer(text):
        if depth == 0:
            kept += text[at : tag.start()]
        if tag[1]:
            kept = "" if depth == 0 else kept
            depth = max(0, depth - 1)
        else:
            depth += 1
        at = tag.end()
    return (kept if depth else kept + text[at:]).strip()
