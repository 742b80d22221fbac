"""What is no request is refused with a reason, whatever it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.real_robot.daemon.requests import (
    MOST_BYTES,
    PROTOCOL,
    STALE,
    Reply,
    Request,
    RequestError,
    Verb,
    parse,
    parse_reply,
)
from embodied.real_robot.ipc.messages import Command

GOOD: dict[str, Any] = {"version": 1, "number": 7, "time": 12.5, "verb": "stop"}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
calmly = settings(deadline=None, max_examples=200)  # machines may be busy


def line(**changed: Any) -> bytes:
    return json.dumps({**GOOD, **changed}).encode()


@calmly
@given(st.integers(1, 2**53), st.floats(-(2.0**53), 2.0**53), st.sampled_from(list(Verb)))
def test_a_request_comes_back_as_it_was(number: int, time: float, verb: Verb) -> None:
    request = Request(number, time, verb)
    assert parse(request.line()) == request


def test_what_a_verb_takes_comes_back_as_it_was() -> None:
    for request in (
        Request(1, 0.5, Verb.START, seconds=2.5, session="abc"),
        Request(2, 0.5, Verb.LOAD, policy="/a b"),
        Request(3, 0.5, Verb.ESTOP, session="abc"),
        Request(4, 0.5, Verb.RELEASE, supported=True),
    ):
        assert parse(request.line()) == request


def test_an_arm_that_falls_is_released_only_by_who_says_that_it_is_held() -> None:
    assert Request(1, 0.5, Verb.RELEASE).command == Command.RELEASE
    held = parse(line(verb="release", supported=True))
    assert held.command == Command.RELEASE_SUPPORTED
    with pytest.raises(RequestError, match="supported 1 should be true or false"):
        parse(line(verb="release", supported=1))
    with pytest.raises(RequestError, match="wrong: "):
        parse(line(verb="reset", supported=True))


def test_a_session_is_known_by_its_token() -> None:
    for token, foreign in (("abc", False), ("abd", True), ("", True)):
        assert Request(1, 0.5, Verb.STATUS, session="abc").foreign(token) == foreign
        assert not Request(1, 0.5, Verb.STATUS).foreign(token), "an operator's"


@calmly
@given(st.binary(max_size=6000))
def test_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse(data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@calmly
@given(json_values)
def test_json_that_is_no_request_is_refused(value: Any) -> None:
    with pytest.raises(RequestError):
        parse(json.dumps(value).encode())


@calmly
@given(st.sampled_from(sorted(GOOD)), json_values)
def test_one_wrong_value_is_refused_or_is_a_right_one(key: str, value: Any) -> None:
    try:
        request = parse(line(**{key: value}))
    except RequestError as error:
        assert "\n" not in str(error)
        return
    assert json.loads(request.line()) == {**GOOD, key: value}


@calmly
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_never_does_more_than_be_refused(at: int, byte: int) -> None:
    data = bytearray(Request(7, 12.5, Verb.STOP).line())
    data[at % len(data)] = byte
    try:
        request = parse(bytes(data))
    except RequestError:
        return
    assert request.verb == Verb.STOP, "one byte makes no other verb"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (line(verb="strat"), 'did you mean "start"'),
        (line(version=2), "version 2 is not supported, only 1"),
        (line(version=True), "version True"),
        (line(version=1.0), "version 1.0"),
        (line(number=0), "count up from 1"),
        (line(number=True), "count up from 1"),
        (line(number=2**53 + 1), "count up from 1"),
        (line(number=1.5), "count up from 1"),
        (line(time="now"), "should be s"),
        (line(time=10**400), "should be s"),
        (line(time=float("nan")), "NaN is no number"),
        (line(time=float("inf")), "Infinity is no number"),
        (line(wish=1), "'wish'"),
        (line(seconds=3), "'seconds'"),
        (line(verb="start", seconds=0), "above 0"),
        (line(verb="start", seconds=None), "above 0"),
        (line(verb="start", seconds="3"), "above 0"),
        (line(verb="start", seconds=True), "above 0"),
        (line(verb="start", seconds=1e400), "Infinity is no number"),
        (line(session=3), "should be a token"),
        (line(session="x" * 65), "should be a token"),
        (line(session="\ud800"), "should be a token"),
        (line(verb="load"), "'policy'"),
        (line(verb="load", policy="a\0b"), "a folder's name"),
        (line(verb="load", policy="\ud800"), "a folder's name"),
        (b'{"version": 1, "number": 1, "time": 0}', "'verb'"),
        (b'{"version": 1, "version": 1}', "twice"),
        (b"[" * 4000, "the line is not JSON"),
        (b"{" + b" " * MOST_BYTES + b"}", "too long"),
        (b"[]", "not a JSON object"),
        (b"", "the line is not JSON"),
        (b"\xff\xfe", "the line is not JSON"),
        (b"\x80\x04\x95\x05", "the line is not JSON"),
    ],
)
def test_the_reason_says_what_was_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(data)
    assert reason in str(caught.value)


def test_what_makes_an_arm_move_is_not_obeyed_late() -> None:
    for verb in (Verb.ARM, Verb.START, Verb.RESET):
        request = Request(1, 100.0, verb)
        assert not request.late(100.0 + STALE)
        assert "is 2.1 s old" in request.late(102.1)
        assert request.late(97.0), "nor from a clock that is ahead"
    for verb in (Verb.STOP, Verb.ESTOP, Verb.STATUS):
        assert not Request(1, 100.0, verb).late(900.0)


def test_a_reply_comes_back_as_it_was() -> None:
    reply = Reply(3, False, "it moves", {"mode": "RUNNING", "q": [0.5, None]})
    assert parse_reply(reply.line()) == reply
    for bad in (b"", b"[]", b'{"version": 9}', b'{"version": 1, "number": 1, "ok": 1}'):
        with pytest.raises(RequestError):
            parse_reply(bad)
    assert PROTOCOL == 1
