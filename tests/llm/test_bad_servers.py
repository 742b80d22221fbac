"""Whatever a server answers is an answer, no answer (ChatError), or one line that says what to do
(ConfigError): every field of a response replaced by every kind of value, and bodies as bytes."""

from __future__ import annotations

import copy
import gzip
import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.llm.budget import Limits, Price
from embodied.llm.chat import ChatError, Message, object_schema, parse_json
from embodied.llm.client import ChatClient, Config
from embodied.rewards.vision_language.vlm_success import probability, score
from tests.llm.server import Server, Told, says, serving

NUMBER = object_schema({"score": {"type": "number", "minimum": 0, "maximum": 1}})
FILM = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)

WRONG: tuple[Any, ...] = (
    *(None, True, 0, -1, 3.5, 1e6, -1e999, math.nan, 10**4000, "", "text", "\ud800 \x00\u202e"),
    *([], [1], [[]], ["True"], [None], {}, {"a": 1}, [{"token": 1, "logprob": "x"}]),
    json.loads("[" * 400 + "]" * 400),
)
BODIES: tuple[bytes, ...] = (
    *(b"", b"null", b"[]", b"3", b'"text"', b"{", b'{"choices": [{"mess', b"\xff\xfe", b"\x00"),
    *(b"<html>busy</html>", b"[" * 100_000, b'{"a":' * 100_000, b"NaN"),
)


def answered() -> dict[str, Any]:
    """A whole response: text that is JSON, usage, and log probabilities."""
    body = says('{"score": 1}').body
    top = [{"token": "True", "logprob": -0.2}, {"token": "False", "logprob": -1.8}]
    body["choices"][0]["logprobs"] = {"content": [{"token": "True", "top_logprobs": top}]}
    return body


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a JSON value, itself included."""
    yield path
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places(value[key], (*path, key))


def replaced(path: tuple[Any, ...], by: Any) -> Any:
    body: Any = answered()
    if not path:
        return by
    *way, last = path
    at = body
    for key in way:
        at = at[key]
    at[last] = copy.deepcopy(by)
    return body


def tried(client: ChatClient) -> None:
    """Four questions, each of which ends as documented."""
    ask = [Message("user", "which?")]
    for question in (
        lambda: client.ask(ask),
        lambda: client.ask(ask, NUMBER),
        lambda: score(client, "lift", FILM),
        lambda: probability(client, "lift", FILM),
    ):
        try:
            found: Any = question()
        except (ChatError, ConfigError) as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            continue
        if isinstance(found, float):
            assert math.isfinite(found) and 0 <= found <= 1
        else:
            found.text.encode()
            assert 0 <= found.tokens < 2**60


def client_of(server: Server, **settings: Any) -> ChatClient:
    limits = Limits(connect=1.0, read=5.0, retries=0, cost=1e9, price=Price(1.0, 1.0))
    return ChatClient(Config(server.url, "m", limits=limits, **settings))


def test_every_field_may_hold_every_kind_of_value() -> None:
    cases = [replaced(path, by) for path, by in product(places(answered()), WRONG)]
    bodies = [json.dumps(case).encode() for case in cases if depth(case) < 900]
    with serving(Told(b"")) as server:
        client = client_of(server)
        for body in [*bodies, *BODIES]:
            server.script[:] = [Told(body)]
            tried(client)


def test_what_is_kept_of_a_bad_answer_can_be_read(tmp_path: Path) -> None:
    ways = (("choices", 0, "message", "content"), ("model",), ("usage", "prompt_tokens"))
    for number, path in enumerate(ways):
        for by in WRONG[:12]:
            with serving(Told(json.dumps(replaced(path, by)).encode())) as server:
                cache = str(tmp_path / f"{number}.jsonl")
                tried(client_of(server, cache=cache))
                tried(client_of(server, cache=cache))


def depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, parts), default=0)


def test_a_log_probability_that_is_none_is_no_answer() -> None:
    where = ("choices", 0, "logprobs", "content", 0, "top_logprobs", 0, "logprob")
    for wrong in (math.nan, math.inf, 1e6, 0.5):
        told = Told(replaced(where, wrong))
        with (
            serving(told) as server,
            pytest.raises(ChatError, match="log probability that is none"),
        ):
            probability(client_of(server), "lift", FILM)
    told = Told(replaced(where, -math.inf))  # it is not among the alternatives
    with serving(told) as server, pytest.raises(ChatError, match="only"):
        probability(client_of(server), "lift", FILM)


def test_numbers_of_a_model_are_finite() -> None:
    for text in (
        '{"score": NaN}',
        '{"score": Infinity}',
        '{"score": -1e999}',
        'so: {"score": NaN}',
    ):
        with pytest.raises(ChatError, match="no JSON"):
            parse_json(text, object_schema({"score": {"type": "number"}}))


@pytest.mark.parametrize("coding", ["zstd", "gzip, gzip", "br"])
def test_an_answer_that_could_inflate_without_bound_is_not_read(coding: str) -> None:
    bomb = gzip.compress(gzip.compress(b" " * 2**26))
    told = Told(bomb, headers={"Content-Encoding": coding})
    with serving(told) as server, pytest.raises(ChatError, match="has the coding"):
        client_of(server).ask([Message("user", "?")])
    assert server.headers[0]["Accept-Encoding"] == "gzip, deflate"


def test_a_gzip_bomb_is_left() -> None:
    bomb = gzip.compress(b" " * 2**27)
    told = Told(bomb, headers={"Content-Encoding": "gzip"})
    with serving(told) as server, pytest.raises(ChatError, match="more than 33,554,432 bytes"):
        client_of(server).ask([Message("user", "?")])


def test_one_answer_without_log_probabilities_does_not_end_a_run() -> None:
    """The server has shown that it can; a server that never could ends it."""
    with serving(Told(answered()), says("True")) as server:
        client = client_of(server)
        assert probability(client, "lift", FILM) == pytest.approx(0.832, abs=1e-3)
        with pytest.raises(ChatError, match="no log probabilities of tokens in this answer"):
            probability(client, "lift", FILM)
        with pytest.raises(ConfigError, match=r"reward\.ask=score"):
            probability(client_of(server), "lift", FILM)


def test_a_server_with_five_alternatives_is_asked_for_five() -> None:
    def answer(request: dict[str, Any]) -> Any:
        return answered()

    no = Told({"error": "top_logprobs must be at most 5"}, 400)
    with serving(no, Told(answer)) as server:
        client = client_of(server)
        for goal in ("lift", "push"):
            probability(client, goal, FILM)
    assert [asked["top_logprobs"] for asked in server.asked] == [20, 5, 5]
