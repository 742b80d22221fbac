"""The limits of a client hold against a real server: deadline of an answer, answers in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from embodied.llm.budget import DeadlinePassed, Limits
from embodied.llm.chat import ChatError, Message
from embodied.llm.client import ChatClient, Config
from tests.llm.server import Told, says, serving

ASK = [Message("user", "which one?")]
SCHEMA = {"type": "object", "required": ["better"]}
QUICK = Limits(connect=1.0, read=5.0, retries=2, backoff=0.001, patience=5.0)


def chat(url: str, cache: Path | None = None, **limits: Any) -> ChatClient:
    kept = None if cache is None else str(cache)
    return ChatClient(Config(url, "m", cache=kept, limits=replace(QUICK, **limits)))


def test_retries_end_at_the_deadline(tmp_path: Path) -> None:
    """A million retries of a server that is overloaded; the next run may get an answer."""
    busy = Told({"error": "overloaded"}, 503)
    limits = {"retries": 1_000_000, "deadline": 0.2, "backoff": 0.01, "patience": 0.02}
    with serving(busy) as server:
        with pytest.raises(DeadlinePassed, match=r"within 0\.2 s \(chat\.limits\.deadline\).*503"):
            chat(server.url, tmp_path / "c.jsonl", **limits).ask(ASK)
        assert server.asked
        server.script[:] = [says("fine")]
        assert chat(server.url, tmp_path / "c.jsonl").ask(ASK).text == "fine"


def test_the_deadline_names_the_problem_before_a_silence() -> None:
    """The server is overloaded once, and then says nothing."""
    never = threading.Event()
    silent = Told({}, event=never)
    with serving(Told({"error": "overloaded"}, 503), silent) as server:
        with pytest.raises(DeadlinePassed, match=r"within 1 s \(chat\.limits\.deadline\).*503"):
            chat(server.url, deadline=1.0, backoff=0.01).ask(ASK)
        assert len(server.asked) == 2
        never.set()


def test_a_pause_that_is_longer_than_the_deadline_is_not_begun() -> None:
    busy = Told({"error": "quota"}, 429, {"Retry-After": "30"})
    with serving(busy) as server, pytest.raises(DeadlinePassed, match="429"):
        chat(server.url, deadline=20.0, patience=60.0).ask(ASK)
    assert len(server.asked) == 1


@pytest.mark.parametrize("drops", [False, True])
def test_a_server_that_does_not_end_its_answer_is_left_at_the_deadline(drops: bool) -> None:
    """Each read of the drops is far quicker than the read timeout."""
    event = threading.Event()
    with serving(replace(says("late"), event=event, drops=drops)) as server:
        try:
            with pytest.raises(DeadlinePassed, match=r"within 0\.2 s"):
                chat(server.url, deadline=0.2).ask(ASK)
        finally:
            event.set()
    assert len(server.asked) == 1


def test_a_slow_answer_in_drops_is_an_answer() -> None:
    event = threading.Event()
    with serving(replace(says("late"), event=event, drops=True)) as server:
        threading.Timer(0.1, event.set).start()
        assert chat(server.url).ask(ASK).text == "late"


def test_the_repair_of_an_answer_is_within_its_deadline() -> None:
    event = threading.Event()
    with serving(says("prose"), replace(says('{"better": 1}'), event=event)) as server:
        try:
            with pytest.raises(DeadlinePassed):
                chat(server.url, deadline=1.0).ask(ASK, SCHEMA)
        finally:
            event.set()
    assert len(server.asked) == 2


class Crowd:
    """How many requests are with the server at a time; it answers once `full` of them are."""

    def __init__(self, full: int) -> None:
        self.full, self.now, self.most = full, 0, 0
        self.changed = threading.Condition()

    def enter(self) -> None:
        with self.changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.full, 10)
        time.sleep(0.02)  # further requests would be seen now
        with self.changed:
            self.now -= 1


@contextmanager
def crowded(full: int) -> Iterator[tuple[str, Crowd]]:
    """A server that counts the requests in flight."""
    crowd, body = Crowd(full), b'{"choices": [{"message": {"content": "yes"}}]}'

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            crowd.enter()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on the terminal."""

    class Many(ThreadingHTTPServer):
        request_queue_size = 128

    httpd = Many(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", crowd
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


@pytest.mark.parametrize(("given", "most"), [({}, 32), ({"in_flight": 3}, 3)])
def test_so_many_answers_are_in_flight_and_no_more(given: dict[str, Any], most: int) -> None:
    with crowded(most) as (url, crowd):
        model = chat(url, **given)
        with ThreadPoolExecutor(48) as pool:
            answers = list(pool.map(lambda seed: model.ask(ASK, seed=seed).text, range(48)))
    assert answers == ["yes"] * 48
    assert crowd.most == most


def test_waiting_for_room_is_not_counted_by_the_deadline() -> None:
    """The one slot is taken for longer than a deadline; the answer after it still comes."""
    with serving(says("yes")) as server:
        model = chat(server.url, in_flight=1, deadline=0.2)
        assert model.http is not None
        with ThreadPoolExecutor(1) as pool, model.http.slot():
            later = pool.submit(model.ask, ASK)
            time.sleep(0.4)
            assert not later.done()
        assert later.result(10).text == "yes"


def test_a_failed_answer_gives_its_room_back() -> None:
    with serving(Told({"error": "bad"}, 400), says("yes")) as server:
        model = chat(server.url, in_flight=1)
        with pytest.raises(ChatError, match="400"):
            model.ask(ASK)
        assert model.ask(ASK).text == "yes"
