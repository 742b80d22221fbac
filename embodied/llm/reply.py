"""Reply: what is used of a chat completion, read from whatever JSON a server sends.

An optional field of another kind than the protocol's counts as absent; without a usable answer the
reply is a ServerError. Numbers are finite and bounded, so that no later step has to check them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodied.llm.chat import ChatError

COUNT = 2**53  # tokens: larger numbers are no counts
NAME = 200  # characters of a model's name and of a fingerprint
WHY = 120  # characters of a refusal
ROUNDING = 1e-2  # by which a log probability may exceed 0
LISTED = 1000  # tokens, and alternatives of each, that are read


class ServerError(ChatError):
    """The server answered without an answer; it is not cached."""


class InvalidReply(ChatError):
    """The model answered unusably, and repeating the request would not help."""


@dataclass(frozen=True)
class Reply:
    """`text` is not blank. `logprobs`: of each token its alternatives with their log probabilities;
    empty where the server reports none."""

    text: str
    served: str  # the model that answered, as the server calls it
    fingerprint: str | None
    usage: Mapping[str, int]
    complete: bool  # it ended by itself, not at `max_tokens`
    logprobs: tuple[dict[str, float], ...]


def read_reply(answer: Mapping[str, Any], model: str) -> Reply:
    """The reply of `model`; ServerError if there is none, InvalidReply if the model refuses."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        why = one_line(answer.get("error"), NAME)
        raise ServerError(f"{model} answered without choices{why and f': {why}'}")
    message = mapping(choice.get("message"))
    finish = choice.get("finish_reason")
    if message.get("refusal") or finish == "content_filter":
        why = one_line(message.get("refusal") or "content filter", WHY)
        raise InvalidReply(f"{model} refused: {why}")
    text = _text(message.get("content"))
    if not text.strip():
        raise ServerError(f"{model} answered with nothing")
    fingerprint = answer.get("system_fingerprint")
    return Reply(
        text,
        served=one_line(answer.get("model"), NAME),
        fingerprint=fingerprint[:NAME] if isinstance(fingerprint, str) else None,
        usage=usage_of(answer),
        complete=finish != "length",
        logprobs=_logprobs(choice, model),
    )


def usage_of(answer: Mapping[str, Any]) -> dict[str, int]:
    """Counts of tokens that the server reports, by their names."""
    counts = mapping(answer.get("usage")).items()
    return {name: count for name, value in counts if (count := count_of(value))}


def count_of(value: Any) -> int:
    """A number of tokens; 0 for what is no such number."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 < value < COUNT else 0


def mapping(value: Any) -> dict[str, Any]:
    """`value`, or an empty one where it is no JSON object."""
    return value if isinstance(value, dict) else {}


def one_line(value: Any, most: int) -> str:
    """The first `most` characters of a value, printable in one line; "" for null."""
    text = "" if value is None else value if isinstance(value, str) else repr(value)
    return _encodable(" ".join(text.split())[:most])


def _encodable(text: str) -> str:
    """`text` without half characters, which JSON can hold and no request can."""
    return text.encode("utf-8", "replace").decode()


def _text(content: Any) -> str:
    """The text of a message, which some servers give as a list of parts."""
    if isinstance(content, list):
        parts = [mapping(part).get("text") for part in content]
        content = "".join(part for part in parts if isinstance(part, str))
    return _encodable(content) if isinstance(content, str) else ""


def _logprobs(choice: Mapping[str, Any], model: str) -> tuple[dict[str, float], ...]:
    """Log probabilities of a choice; ServerError where a value is none."""
    tokens = mapping(choice.get("logprobs")).get("content")
    if not isinstance(tokens, list):
        return ()
    return tuple(_alternatives(mapping(token), model) for token in tokens[:LISTED])


def _alternatives(token: Mapping[str, Any], model: str) -> dict[str, float]:
    listed = token.get("top_logprobs")
    found: dict[str, float] = {}
    for one in listed[:LISTED] if isinstance(listed, list) else ():
        word, value = mapping(one).get("token"), mapping(one).get("logprob")
        if not isinstance(word, str) or not isinstance(value, int | float):
            continue
        if not value <= ROUNDING:  # also NaN
            raise ServerError(f"{model} reports a log probability that is none: {value!r:.40}")
        if value > -math.inf:
            found[_encodable(word)] = min(float(max(value, -COUNT)), 0.0)
    return found
