"""A client against a real HTTP server that behaves as servers do; deadlines, answers in flight."""

from __future__ import annotations

import base64
import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

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
QUICK = Limits(connect=1.0, read=5.0, retries=2, backoff=0.001, patience=5.0)


def chat(server: Server, limits: Limits = QUICK, **more: Any) -> ChatClient:
    return ChatClient(Config(server.url, "asked-model", limits=limits, **more))


def test_an_answer_comes_with_its_provenance() -> None:
    with serving(says("the left one")) as server:
        answer = chat(server).ask(ASK, temperature=0.5, seed=3)
    assert (answer.text, answer.data, answer.model) == ("the left one", None, "served-model")
    assert (answer.tokens, answer.cached) == (10, False)
    sent = server.asked[0]
    assert sent["messages"] == [{"role": "user", "content": "which one?"}]
    assert (sent["model"], sent["temperature"], sent["seed"]) == ("asked-model", 0.5, 3)
    assert "response_format" not in sent


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


def test_a_wrong_answer_is_repaired_once() -> None:
    with serving(says('{"better": 5}'), says('{"better": 0}')) as server:
        answer = chat(server).ask(ASK, SCHEMA)
    assert (answer.data, answer.tokens) == ({"better": 0}, 20)
    roles = [message["role"] for message in server.asked[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert "5 is not one of [0, 1, -1]" in server.asked[1]["messages"][2]["content"]


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
        with pytest.raises(ConfigError, match=why) as caught:
            chat(server, key="THE_KEY").ask(ASK)
        assert len(server.asked) == 1
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
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
    event = threading.Event()
    slow, limits = replace(says("late"), event=event), replace(QUICK, read=0.1, retries=1)
    with serving(slow) as server:
        with pytest.raises(ChatError, match=r"did not answer within 0.1 s \(2 attempts\)"):
            chat(server, limits).ask(ASK)
        event.set()
        assert len(server.asked) == 2


def test_retry_after_is_a_number_or_a_date() -> None:
    soon = datetime.now(UTC) + timedelta(seconds=100)
    assert retry_after({"retry-after": "7"}) == 7
    wait = retry_after({"retry-after": soon.strftime("%a, %d %b %Y %H:%M:%S GMT")})
    assert 90 < wait <= 100
    assert retry_after({}) == retry_after({"retry-after": "tomorrow"}) == 0


def wire(limits: Limits) -> HttpClient:
    return HttpClient("http://127.0.0.1:9/v1", None, limits, Budget(limits, "m"))


def test_back_off_doubles_and_is_bounded() -> None:
    client = wire(Limits(backoff=1.0, patience=5.0))
    for attempt, longest in enumerate([1, 2, 4, 5, 5]):
        assert longest / 2 <= client.pause(attempt) <= longest


def test_requests_keep_their_pace() -> None:
    client = wire(Limits(per_minute=30))  # one every 2 s
    assert [client.turn(now) for now in (10.0, 10.5, 11.0, 30.0)] == [0.0, 1.5, 3.0, 0.0]


@pytest.mark.parametrize("limit", [{"calls": 2}, {"tokens": 15}])
def test_a_budget_ends_with_its_own_error(limit: dict[str, int], tmp_path: Path) -> None:
    with serving(says("yes")) as server:
        model = chat(server, replace(QUICK, **limit), cache=str(tmp_path / "c.jsonl"))
        for seed in range(2):
            model.ask(ASK, seed=seed)
        with pytest.raises(BudgetSpent, match="is spent"):
            model.ask(ASK, seed=2)
        assert model.ask(ASK, seed=0).cached  # what is known costs nothing
        assert len(server.asked) == 2


def test_threads_keep_to_one_budget() -> None:
    event = threading.Event()
    with serving(replace(says("yes"), event=event)) as server:
        model = chat(server, replace(QUICK, calls=3))

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
    seen = [Message("user", "look", (image,))]
    with serving(says('{"better": 1}'), says(None, refusal="no")) as server:
        model = chat(server, cache=str(file))
        first = model.ask(seen, SCHEMA)
        with pytest.raises(ChatError, match="refused"):
            model.ask(ASK)
        again = chat(server, cache=str(file)).ask(seen, SCHEMA)
        assert len(server.asked) == 2
    assert (again.cached, again.data, again.key) == (True, first.data, first.key)
    replay = CachedChat(RecordedConfig(str(file)))
    assert replay.name == "asked-model"
    assert replay.ask(seen, SCHEMA).data == {"better": 1}
    with pytest.raises(ChatError, match="refused: no"):
        replay.ask(ASK)
    other = [Message("user", "look", (image + 1,))]
    for question in ({"messages": other}, {"messages": seen, "seed": 1}):
        with pytest.raises(ChatError, match='no answer of asked-model to "look"'):
            replay.ask(question.pop("messages"), SCHEMA, **question)
    silent = ChatClient(Config(server.url, "asked-model", cache=str(file), recorded=True))
    assert silent.ask(seen, SCHEMA).data == {"better": 1}
    with pytest.raises(ChatError, match="only cached answers"):
        silent.ask(other, SCHEMA)


def test_a_record_says_where_a_label_came_from(tmp_path: Path) -> None:
    file = tmp_path / "cache.jsonl"
    with serving(says('{"better": 7}'), says('{"better": 0}')) as server:
        chat(server, cache=str(file)).ask(ASK, SCHEMA, temperature=0.2)
    record = json.loads(file.read_text())
    assert record["request"]["messages"] == [{"role": "user", "text": "which one?", "images": []}]
    assert (record["request"]["model"], record["served"]) == ("asked-model", "served-model")
    assert (record["fingerprint"], record["repaired"]) == ("fp7", True)
    assert record["usage"]["total_tokens"] == 20
    assert record["request"]["temperature"] == 0.2
    assert datetime.fromisoformat(record["time"]).tzinfo is not None


def test_a_node_opens_either(tmp_path: Path) -> None:
    node = {"_target_": "embodied.llm.client.ChatClient", "model": "m"}
    opened = open_chat({**node, "url": "http://127.0.0.1:9/v1", "limits": {"calls": 3}}, None)
    assert opened.name == "m"
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        ChatClient(Config("http://127.0.0.1:9/v1", "m", key="NO_SUCH_KEY"))
    with pytest.raises(ConfigError, match="must be an address"):
        open_chat({**node, "url": "127.0.0.1:9"}, None)
    with pytest.raises(ConfigError, match="does not exist"):
        open_chat({"_target_": "embodied.llm.client.CachedChat", "cache": "nowhere.jsonl"}, None)


@pytest.mark.parametrize("trouble", [{"error": {"message": "upstream"}}, {"choices": []}])
def test_an_error_of_the_server_is_not_cached(trouble: Any, tmp_path: Path) -> None:
    with serving(Told(trouble), says("fine")) as server:
        model = chat(server, cache=str(tmp_path / "c.jsonl"))
        with pytest.raises(
            ChatError, match="upstream" if "error" in trouble else "without choices"
        ):
            model.ask(ASK)
        assert model.ask(ASK).text == "fine"


def test_content_in_parts_is_joined() -> None:
    told = says(None)
    told.body["choices"][0]["message"]["content"] = [
        {"type": "text", "text": text} for text in ("the left ", "one")
    ]
    with serving(told) as server:
        assert chat(server).ask(ASK).text == "the left one"


def test_many_brackets_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening bracket may read the text to its end."""
    tried: list[int] = []
    decode = json.JSONDecoder.raw_decode

    def counted(self: json.JSONDecoder, text: str, idx: int = 0) -> Any:
        tried.append(idx)
        return decode(self, text, idx)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    with pytest.raises(ChatError, match="no JSON"):
        parse_json("{" * 300_000, SCHEMA)
    assert len(tried) < 2000


def chat_at(url: str, cache: Path | None = None, **limits: Any) -> ChatClient:
    kept = None if cache is None else str(cache)
    return ChatClient(Config(url, "m", cache=kept, limits=replace(QUICK, **limits)))


def test_retries_end_at_the_deadline(tmp_path: Path) -> None:
    """A million retries of a server that is overloaded; the next run may get an answer."""
    busy = Told({"error": "overloaded"}, 503)
    limits = {"retries": 1_000_000, "deadline": 0.2, "backoff": 0.01, "patience": 0.02}
    with serving(busy) as server:
        with pytest.raises(DeadlinePassed, match=r"within 0\.2 s \(chat\.limits\.deadline\).*503"):
            chat_at(server.url, tmp_path / "c.jsonl", **limits).ask(ASK)
        assert server.asked
        server.script[:] = [says("fine")]
        assert chat_at(server.url, tmp_path / "c.jsonl").ask(ASK).text == "fine"


def test_the_deadline_names_the_problem_before_a_silence() -> None:
    """The server is overloaded once, and then says nothing."""
    never = threading.Event()
    silent = Told({}, event=never)
    with serving(Told({"error": "overloaded"}, 503), silent) as server:
        with pytest.raises(DeadlinePassed, match=r"within 1 s \(chat\.limits\.deadline\).*503"):
            chat_at(server.url, deadline=1.0, backoff=0.01).ask(ASK)
        assert len(server.asked) == 2
        never.set()


def test_a_pause_that_is_longer_than_the_deadline_is_not_begun() -> None:
    busy = Told({"error": "quota"}, 429, {"Retry-After": "30"})
    with serving(busy) as server, pytest.raises(DeadlinePassed, match="429"):
        chat_at(server.url, deadline=20.0, patience=60.0).ask(ASK)
    assert len(server.asked) == 1


@pytest.mark.parametrize("drops", [False, True])
def test_a_server_that_does_not_end_its_answer_is_left_at_the_deadline(drops: bool) -> None:
    """Each read of the drops is far quicker than the read timeout."""
    event = threading.Event()
    with serving(replace(says("late"), event=event, drops=drops)) as server:
        try:
            with pytest.raises(DeadlinePassed, match=r"within 0\.2 s"):
                chat_at(server.url, deadline=0.2).ask(ASK)
        finally:
            event.set()
    assert len(server.asked) == 1


def test_an_endless_answer_is_left() -> None:
    with serving(Told(b" " * (TEXT + 2**20))) as server, pytest.raises(ChatError, match="has more"):
        chat_at(server.url).ask(ASK)


def test_a_slow_answer_in_drops_is_an_answer() -> None:
    event = threading.Event()
    with serving(replace(says("late"), event=event, drops=True)) as server:
        threading.Timer(0.1, event.set).start()
        assert chat_at(server.url).ask(ASK).text == "late"


def test_the_repair_of_an_answer_is_within_its_deadline() -> None:
    event = threading.Event()
    with serving(says("prose"), replace(says('{"better": 1}'), event=event)) as server:
        try:
            with pytest.raises(DeadlinePassed):
                chat_at(server.url, deadline=1.0).ask(ASK, SCHEMA)
        finally:
            event.set()
    assert len(server.asked) == 2


@pytest.mark.parametrize(("given", "most"), [({}, 32), ({"in_flight": 3}, 3)])
def test_so_many_answers_are_in_flight_and_no_more(given: dict[str, Any], most: int) -> None:
    with serving(replace(says("yes"), full=most)) as server:
        model = chat_at(server.url, **given)
        with ThreadPoolExecutor(48) as pool:
            answers = list(pool.map(lambda seed: model.ask(ASK, seed=seed).text, range(48)))
    assert answers == ["yes"] * 48
    assert server.most == most


def test_waiting_for_room_is_not_counted_by_the_deadline() -> None:
    """The one slot is taken for longer than a deadline; the answer after it still comes."""
    with serving(says("yes")) as server:
        model = chat_at(server.url, in_flight=1, deadline=0.2)
        assert model.http is not None
        with ThreadPoolExecutor(1) as pool, model.http.slot():
            later = pool.submit(model.ask, ASK)
            time.sleep(0.4)
            assert not later.done()
        assert later.result(10).text == "yes"


def test_a_failed_answer_gives_its_room_back() -> None:
    with serving(Told({"error": "bad"}, 400), says("yes")) as server:
        model = chat_at(server.url, in_flight=1)
        with pytest.raises(ChatError, match="400"):
            model.ask(ASK)
        assert model.ask(ASK).text == "yes"
