"""A client against a real HTTP server that behaves as servers do; deadlines, answers in flight."""

from __future__ import annotations

import base64
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.files import TEXT
from embodied.datasets.lerobot.video import decode_image
from embodied.llm.budget import Budget, DeadlinePassed, Limits
from embodied.llm.chat import BudgetSpent, ChatError, Message, object_schema, parse_json
from embodied.llm.client import CachedChat, ChatClient, Config, HttpClient, open_chat, retry_after
from embodied.llm.client import CachedConfig as RecordedConfig
from tests.llm.server import Server, Told, says, serving

ASK = [Message("user", "which one?")]
SCHEMA = object_schema({"better": {"enum": [0, 1, -1]}})
BUSY = Told({"error": "overloaded"}, 503)
QUICK = Limits(connect=1.0, read=5.0, retries=2, backoff=0.001, patience=5.0)


def chat(
    server: Server, limits: Limits = QUICK, cache: Path | None = None, **more: Any
) -> ChatClient:
    """A client of a server; with `more` limits, and answers that it remembers in `cache`."""
    kept = None if cache is None else str(cache)
    return ChatClient(Config(server.url, "asked-model", cache=kept, limits=replace(limits, **more)))


@contextmanager
def waiting(*script: Told) -> Iterator[tuple[Server, threading.Event]]:
    """A server whose last answer waits for an event, which is set at the end."""
    event = threading.Event()
    with serving(*script[:-1], replace(script[-1], event=event)) as server:
        try:
            yield server, event
        finally:
            event.set()


def test_an_answer_comes_with_its_provenance(tmp_path: Path) -> None:
    """And the record of it; and content in parts is joined."""
    told, file = says(None), tmp_path / "cache.jsonl"
    parts = [{"type": "text", "text": text} for text in ("the left ", "one")]
    told.body["choices"][0]["message"]["content"] = parts
    with serving(told) as server:
        answer = chat(server, cache=file).ask(ASK, temperature=0.5, seed=3)
    assert (answer.text, answer.data, answer.model) == ("the left one", None, "served-model")
    assert (answer.tokens, answer.cached) == (10, False)
    (sent,) = server.asked
    assert sent["messages"] == [{"role": "user", "content": "which one?"}]
    assert (sent["model"], sent["temperature"], sent["seed"]) == ("asked-model", 0.5, 3)
    assert "response_format" not in sent
    record = json.loads(file.read_text())
    assert record["request"]["messages"] == [{"role": "user", "text": "which one?", "images": []}]
    assert (record["request"]["model"], record["served"]) == ("asked-model", "served-model")
    assert (record["fingerprint"], record["usage"]["total_tokens"]) == ("fp7", 10)
    assert record["request"]["temperature"] == 0.5
    assert datetime.fromisoformat(record["time"]).tzinfo is not None


def test_pictures_arrive_pixel_for_pixel() -> None:
    image = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8)
    with serving(says("ok")) as server:
        chat(server).ask([Message("user", "look", (image,))])
    text, picture = server.asked[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "look"}
    kind, data = picture["image_url"]["url"].split(",")
    assert kind == "data:image/png;base64"
    assert decode_image(base64.b64decode(data)).equal(image)


@pytest.mark.parametrize(
    "text",
    [
        '{"better": 1}',
        'Sure!\n```json\n{"better": 1}\n```\nHope that helps.',
        'An example is {"better": 0}, but here the answer is {"better": 1}.',
        '<think>perhaps {"better": 0}</think> {"better": 1}',
        'Of [the two] I say {"better": 1} {',
    ],
)
def test_json_is_found_in_prose(text: str) -> None:
    with serving(says(text)) as server:
        answer = chat(server).ask(ASK, SCHEMA)
    assert answer.data == {"better": 1}
    assert len(server.asked) == 1
    assert server.asked[0]["response_format"]["json_schema"]["schema"] == SCHEMA


def test_a_wrong_answer_is_repaired_once(tmp_path: Path) -> None:
    file = tmp_path / "cache.jsonl"
    with serving(says('{"better": 5}'), says('{"better": 0}')) as server:
        answer = chat(server, cache=file).ask(ASK, SCHEMA)
    assert (answer.data, answer.tokens) == ({"better": 0}, 20)
    messages = server.asked[1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert "5 is not one of [0, 1, -1]" in messages[2]["content"]
    record = json.loads(file.read_text())
    assert record["repaired"] is True and record["usage"]["total_tokens"] == 20


def cut(text: str) -> Told:
    """An answer that max_tokens ended."""
    told = says(text)
    told.body["choices"][0]["finish_reason"] = "length"
    return told


@pytest.mark.parametrize(
    ("told", "why", "calls"),
    [
        (says('{"better": '), "no JSON", 2),
        (says("The first picture, I think."), "no JSON", 2),
        (says('{"best": 1}'), "better", 2),
        (says('<think>Perhaps {"better": 1} but wait'), "no JSON", 2),
        (says('Perhaps {"better": 1} </think> I cannot tell.'), "no JSON", 2),
        (cut('{"better": 1}'), "max_tokens", 1),
        (says(None, refusal="I will not\nlook at that"), "refused: I will not look at that", 1),
        (Told({"choices": [], "usage": {"total_tokens": 1}}), "without choices", 1),
        (Told({"usage": {"total_tokens": 1}}), "without choices", 1),
        (says(""), "with nothing", 1),
        (says(None), "with nothing", 1),
    ],
)
def test_no_answer_is_one_clear_line(told: Told, why: str, calls: int) -> None:
    with serving(told) as server, pytest.raises(ChatError, match=why) as caught:
        chat(server).ask(ASK, SCHEMA)
    assert len(server.asked) == calls
    assert "\n" not in str(caught.value)


def test_a_server_without_schemas_is_asked_in_words(caplog: pytest.LogCaptureFixture) -> None:
    no = Told({"error": {"message": "response_format is not supported"}}, 400)
    with serving(no, says('{"better": 1}')) as server:
        model = chat(server)
        with caplog.at_level(logging.WARNING):
            assert model.ask(ASK, SCHEMA).data == {"better": 1}
        assert "using the prompt only" in caplog.text
        model.ask(ASK, SCHEMA, seed=1)
    formats = ["response_format" in sent for sent in server.asked]
    assert formats == [True, False, False]
    assert json.dumps(SCHEMA) in server.asked[2]["messages"][0]["content"]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_ends_the_run(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "sk-secret")
    why = f"{status}.*check chat.url, chat.key and chat.model"
    with serving(Told({"error": "no key sk-secret here"}, status)) as server:
        client = ChatClient(Config(server.url, "m", key="THE_KEY", limits=QUICK))
        with pytest.raises(ConfigError, match=why) as caught:
            client.ask(ASK)
    assert [sent["Authorization"] for sent in server.headers] == ["Bearer sk-secret"]
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("trouble", "calls"),
    [
        (Told({"error": "overloaded"}, 500), 1),
        (Told({"error": "slow down"}, 429, {"Retry-After": "0"}), 1),
        (Told(b'{"choices": [{"mess'), 3),  # those were answered, and will be paid for
        (Told(b"[1, 2]"), 3),
    ],
)
def test_trouble_passes(trouble: Told, calls: int) -> None:
    with serving(trouble, trouble, says("fine")) as server:
        model = chat(server)
        assert model.ask(ASK).text == "fine"
        assert model.budget.calls == calls
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("trouble", "why", "calls"),
    [
        (Told({"error": "overloaded"}, 503), r"503.*overloaded.*\(3 attempts\)", 3),
        (Told({}, 429, {"Retry-After": "3600"}), "requests a wait of 3600 s", 1),
    ],
)
def test_trouble_that_stays_is_one_clear_line(trouble: Told, why: str, calls: int) -> None:
    with serving(trouble) as server, pytest.raises(ChatError, match=why):
        chat(server).ask(ASK)
    assert len(server.asked) == calls


def test_an_endpoint_that_is_down_is_one_clear_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(ChatError, match="no connection to"):
        ChatClient(Config(url, "m", limits=QUICK)).ask(ASK)


def test_a_slow_answer_is_tried_again_and_then_given_up() -> None:
    with waiting(says("late")) as (server, _):
        with pytest.raises(ChatError, match=r"did not answer within 0.1 s \(2 attempts\)"):
            chat(server, read=0.1, retries=1).ask(ASK)
        assert len(server.asked) == 2


def test_retry_after_is_a_number_or_a_date() -> None:
    soon = datetime.now(UTC) + timedelta(seconds=100)
    assert retry_after({"retry-after": "7"}) == 7
    wait = retry_after({"retry-after": soon.strftime("%a, %d %b %Y %H:%M:%S GMT")})
    assert 90 < wait <= 100
    assert retry_after({}) == retry_after({"retry-after": "tomorrow"}) == 0


def test_back_off_doubles_and_is_bounded_and_requests_keep_their_pace() -> None:
    limits = Limits(backoff=1.0, patience=5.0, per_minute=30)
    client = HttpClient("http://127.0.0.1:9/v1", None, limits, Budget(limits, "m"))
    for attempt, longest in enumerate([1, 2, 4, 5, 5]):
        assert longest / 2 <= client.pause(attempt) <= longest
    assert [client.turn(now) for now in (10.0, 10.5, 11.0, 30.0)] == [0.0, 1.5, 3.0, 0.0]


def test_threads_keep_to_one_budget() -> None:
    with waiting(says("yes")) as (server, event):
        model = chat(server, calls=3)

        def ask(seed: int) -> bool:
            try:
                return bool(model.ask(ASK, seed=seed).text)
            except BudgetSpent:
                event.set()  # only once three are on their way is anyone refused
                return False

        with ThreadPoolExecutor(6) as pool:
            answered = list(pool.map(ask, range(6)))
    assert sum(answered) == len(server.asked) == 3


def test_answers_are_remembered_and_replayed(tmp_path: Path) -> None:
    file = tmp_path / "cache.jsonl"
    image = torch.zeros(4, 4, 3, dtype=torch.uint8)
    seen, other = ([Message("user", "look", (each,))] for each in (image, image + 1))
    with serving(says('{"better": 1}'), says(None, refusal="no")) as server:
        model = chat(server, cache=file, calls=2)
        first = model.ask(seen, SCHEMA)
        with pytest.raises(ChatError, match="refused"):
            model.ask(ASK)
        for client in (model, chat(server, cache=file)):  # what is known costs nothing
            again = client.ask(seen, SCHEMA)
            assert (again.cached, again.data, again.key) == (True, first.data, first.key)
        assert len(server.asked) == 2
    replay = CachedChat(RecordedConfig(str(file)))
    silent = ChatClient(Config(server.url, "asked-model", cache=str(file), recorded=True))
    for client, why in ((replay, 'no answer of asked-model to "look"'), (silent, "only cached")):
        assert client.name == "asked-model"
        assert client.ask(seen, SCHEMA).data == {"better": 1}
        with pytest.raises(ChatError, match="refused: no"):
            client.ask(ASK)
        for messages, seed in ((other, 0), (seen, 1)):
            with pytest.raises(ChatError, match=why):
                client.ask(messages, SCHEMA, seed=seed)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("ChatClient", {"url": "http://127.0.0.1:9/v1", "key": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ("ChatClient", {"url": "127.0.0.1:9"}, "must be an address"),
        ("CachedChat", {"cache": "nowhere.jsonl"}, "does not exist"),
    ],
)
def test_what_cannot_be_opened_is_named(kind: str, settings: dict[str, str], why: str) -> None:
    more = {"model": "m"} if kind == "ChatClient" else {}
    with pytest.raises(ConfigError, match=why):
        open_chat({"_target_": f"embodied.llm.client.{kind}", **more, **settings}, None)


@pytest.mark.parametrize(
    ("trouble", "why"),
    [({"error": {"message": "upstream"}}, "upstream"), ({"choices": []}, "without choices")],
)
def test_an_error_of_the_server_is_not_cached(trouble: Any, why: str, tmp_path: Path) -> None:
    with serving(Told(trouble), says("fine")) as server:
        model = chat(server, cache=tmp_path / "c.jsonl")
        with pytest.raises(ChatError, match=why):
            model.ask(ASK)
        assert model.ask(ASK).text == "fine"


def test_many_brackets_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening bracket may read the text to its end."""
    decode = Mock(wraps=json.JSONDecoder().raw_decode)
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", decode)
    with pytest.raises(ChatError, match="no JSON"):
        parse_json("{" * 300_000, SCHEMA)
    assert 0 < decode.call_count < 2000


def test_retries_end_at_the_deadline(tmp_path: Path) -> None:
    """A million retries of a server that is overloaded; the next run may get an answer."""
    limits = {"retries": 1_000_000, "deadline": 0.2, "backoff": 0.01, "patience": 0.02}
    with serving(BUSY) as server:
        with pytest.raises(DeadlinePassed, match=r"within 0\.2 s \(chat\.limits\.deadline\).*503"):
            chat(server, cache=tmp_path / "c.jsonl", **limits).ask(ASK)
        assert server.asked
        server.script[:] = [says("fine")]
        assert chat(server, cache=tmp_path / "c.jsonl").ask(ASK).text == "fine"


def test_the_deadline_names_the_problem_before_a_silence() -> None:
    """The server is overloaded once, and then says nothing."""
    with waiting(BUSY, Told({})) as (server, _):
        with pytest.raises(DeadlinePassed, match=r"within 1 s \(chat\.limits\.deadline\).*503"):
            chat(server, deadline=1.0, backoff=0.01).ask(ASK)
        assert len(server.asked) == 2


def test_a_pause_that_is_longer_than_the_deadline_is_not_begun() -> None:
    busy = Told({"error": "quota"}, 429, {"Retry-After": "30"})
    with serving(busy) as server, pytest.raises(DeadlinePassed, match="429"):
        chat(server, deadline=20.0, patience=60.0).ask(ASK)
    assert len(server.asked) == 1


@pytest.mark.parametrize("drops", [False, True])
def test_a_server_that_does_not_end_its_answer_is_left_at_the_deadline(drops: bool) -> None:
    """Each read of the drops is far quicker than the read timeout; within it they are an answer."""
    with waiting(replace(says("late"), drops=drops)) as (server, event):
        with pytest.raises(DeadlinePassed, match=r"within 0\.2 s"):
            chat(server, deadline=0.2).ask(ASK)
        assert len(server.asked) == 1
        threading.Timer(0.1, event.set).start()
        assert chat(server).ask(ASK).text == "late"


def test_an_endless_answer_is_left() -> None:
    with serving(Told(b" " * (TEXT + 2**20))) as server, pytest.raises(ChatError, match="has more"):
        chat(server).ask(ASK)


def test_the_repair_of_an_answer_is_within_its_deadline() -> None:
    with waiting(says("prose"), says('{"better": 1}')) as (server, _):
        with pytest.raises(DeadlinePassed):
            chat(server, deadline=1.0).ask(ASK, SCHEMA)
        assert len(server.asked) == 2


@pytest.mark.parametrize(("given", "most"), [({}, 32), ({"in_flight": 3}, 3)])
def test_so_many_answers_are_in_flight_and_no_more(given: dict[str, Any], most: int) -> None:
    with serving(replace(says("yes"), full=most)) as server:
        model = chat(server, **given)
        with ThreadPoolExecutor(48) as pool:
            answers = list(pool.map(lambda seed: model.ask(ASK, seed=seed).text, range(48)))
    assert answers == ["yes"] * 48
    assert server.most == most


def test_waiting_for_room_is_not_counted_by_the_deadline() -> None:
    """The one slot is taken for longer than a deadline; the answer after it still comes."""
    with serving(says("yes")) as server:
        model = chat(server, in_flight=1, deadline=0.2)
        assert model.http is not None
        with ThreadPoolExecutor(1) as pool, model.http.slot():
            later = pool.submit(model.ask, ASK)
            time.sleep(0.4)
            assert not later.done()
        assert later.result(10).text == "yes"


def test_a_failed_answer_gives_its_room_back() -> None:
    with serving(Told({"error": "bad"}, 400), says("yes")) as server:
        model = chat(server, in_flight=1)
        with pytest.raises(ChatError, match="400"):
            model.ask(ASK)
        assert model.ask(ASK).text == "yes"
