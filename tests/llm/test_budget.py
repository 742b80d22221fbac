"""The pool of questions: newest first, bounded, beside the caller. The cache loses nothing; budgets
hold over resumes, threads and processes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import threading
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.llm.ask_pool import AskPool, ask_all
from embodied.llm.budget import FILE, Budget, Limits, Price
from embodied.llm.chat import BudgetSpent, ChatError, Message, Request
from embodied.llm.client import Cache, ChatClient, Config, Record
from embodied.reward_design.run import DesignConfig, design
from tests.builders import make_reward, node_of, wait_until
from tests.llm.server import Server, Told, says, serving


class Model:
    """Answers a question with itself in capitals, once `gate` is open; keeps what it was asked."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.fails: list[Exception] = []

    def __call__(self, questions: Sequence[str]) -> list[str]:
        self.batches.append(list(questions))
        self.entered.set()
        assert self.gate.wait(600)
        if self.fails:
            raise self.fails.pop()
        return [question.upper() for question in questions]


def test_newest_first_in_batches_and_the_oldest_fall_out_of_a_full_queue() -> None:
    model = Model()
    pool = AskPool(model, batch=2, room=3, synchronous=True)
    assert pool.submit([*"ab"]) == []
    assert pool.submit([*"cde"]) == [*"ab"]
    assert pool.questions() == [*"cde"] and pool.dropped == 2
    assert not model.batches
    assert [asked.answer for asked in pool.poll()] == [*"EDC"]
    assert model.batches == [["e", "d"], ["c"]]
    assert pool.asked == 3 and pool.calls == 2 and pool.seconds > 0


def test_a_failed_call_is_no_answer() -> None:
    model = Model()
    model.fails = [ChatError("prose")]
    pool = AskPool(model, batch=2, synchronous=True)
    pool.submit([*"ab"])
    assert [(one.answer, one.why) for one in pool.poll()] == [(None, "prose")] * 2
    assert pool.failed == 1


def test_submitting_does_not_wait_for_the_model() -> None:
    """Killed and started again, nothing is lost or counted twice."""
    model = Model()
    model.gate.clear()
    pool = AskPool(model, batch=2, workers=1)
    pool.submit([*"ab"])
    assert model.entered.wait(600)
    pool.submit(["c"])
    assert pool.poll() == [] and sorted(pool.questions()) == [*"abc"]
    pool.stop()
    assert sorted(pool.questions()) == [*"abc"]
    model.gate.set()
    assert pool.drain(600)
    assert sorted(pool.questions()) == [*"abc"], "a checkpoint has what no one took the answer of"
    assert sorted(asked.question for asked in pool.poll()) == [*"abc"] and pool.asked == 3


@pytest.mark.parametrize("synchronous", [False, True])
def test_as_many_are_asked_at_a_time_as_there_are_workers(synchronous: bool) -> None:
    """All four wait for each other: fewer at a time would never end."""
    together = threading.Barrier(4)

    def ask(questions: Sequence[str]) -> list[int]:
        return [together.wait(600) + 1 for _ in questions]

    pool = AskPool(ask, workers=4, synchronous=synchronous)
    pool.submit([*"abcdefgh"])
    assert pool.drain(20)
    assert [asked.question for asked in pool.poll()] == [*"hgfedcba"]  # as they were asked


def test_one_slow_question_holds_back_no_other() -> None:
    model, slow = Model(), threading.Event()

    def ask(questions: Sequence[str]) -> list[str]:
        assert questions[0] != "slow" or slow.wait(600)
        return model(questions)

    pool = AskPool(ask, workers=2)
    pool.submit([*"abc", "slow"])
    found: list[str] = []
    wait_until(lambda: found.extend(one.question for one in pool.poll()) or len(found) == 3)
    assert sorted(found) == [*"abc"] and pool.questions() == ["slow"]
    slow.set()
    assert pool.drain(600)


def test_a_spent_budget_leaves_questions_waiting() -> None:
    model = Model()
    model.fails = [BudgetSpent("10 calls are used up")]
    pool = AskPool(model, batch=2, workers=1, synchronous=True)
    pool.submit([*"abc"])
    assert pool.poll() == [] and pool.spent == "10 calls are used up"
    assert pool.questions() == [*"abc"] and len(model.batches) == 1
    assert pool.discard() == [*"abc"] and not pool.pending


def test_a_spent_budget_does_not_lose_what_is_in_flight() -> None:
    slow, entered = threading.Event(), threading.Event()

    def ask(questions: Sequence[str]) -> list[str]:
        if questions[0] == "slow":
            entered.set()
            assert slow.wait(600)
            return ["SLOW"]
        assert entered.wait(600)
        threading.Timer(0.05, slow.set).start()
        raise BudgetSpent("spent")

    pool = AskPool(ask, workers=2)
    pool.submit(["a", "slow"])
    assert not pool.drain(600)
    assert [asked.answer for asked in pool.poll()] == ["SLOW"] and pool.questions() == ["a"]


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_fault_is_the_learners_to_see(synchronous: bool) -> None:
    model = Model()
    model.fails = [ZeroDivisionError("a bug")]
    pool = AskPool(model, batch=9, synchronous=synchronous)
    pool.submit([*"ab"])
    assert not pool.drain(600)
    model.gate.clear()  # its thread may ask again at once
    with pytest.raises(ZeroDivisionError, match="a bug"):
        pool.poll()
    assert pool.questions() == [*"ab"]
    model.gate.set()
    assert pool.drain(600)
    assert len(pool.poll()) == 2


def test_all_answers_come_in_order() -> None:
    together = threading.Barrier(3)

    def ask(number: int) -> int:
        together.wait(600)
        return 10 * number

    assert ask_all(ask, range(6), workers=3) == [0, 10, 20, 30, 40, 50]
    assert ask_all(ask, [], workers=3) == []
    for workers in (1, 2):
        with pytest.raises(ZeroDivisionError):
            ask_all(lambda number: 1 // number, [1, 0, 2], workers)


def record(name: str) -> Record:
    return {"key": name, "request": {"model": "m"}, "text": f"answer {name}\nof two lines"}


def test_a_cut_file_loses_its_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "c.jsonl"
    cache = Cache(file)
    for name in "abc":
        cache.put(record(name))
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]) + lines[2][:20])
    with caplog.at_level(logging.WARNING):
        cut = Cache(file)
    assert sorted(cut.records) == ["a", "b"]
    assert caplog.text.count("is incomplete") == 1
    assert (tmp_path / "c.jsonl.broken").read_bytes() == lines[2][:20] + b"\n"
    cut.put(record("c"))
    assert file.read_bytes() == whole
    assert sorted(Cache(file).records) == ["a", "b", "c"]
    assert caplog.text.count("is incomplete") == 1


def test_foreign_lines_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "c.jsonl"
    text = json.dumps(record("a")) + '\n{"half": \n[3]\n' + json.dumps(record("b")) + "\n"
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert sorted(Cache(file).records) == ["a", "b"]
    assert "1 lines cannot be parsed" in caplog.text and "1 lines are no answers" in caplog.text
    assert file.read_text() == text


def test_one_process_sees_what_another_appends(tmp_path: Path) -> None:
    one, two = Cache(tmp_path / "c.jsonl"), Cache(tmp_path / "c.jsonl")
    for writer, reader, name in ((one, two, "a"), (two, one, "b")):
        assert reader.get(name) is None
        writer.put(record(name))
        assert reader.get(name) == record(name)


def append(path: Path, name: str) -> None:
    cache = Cache(path)
    for i in range(40):
        cache.put({**record(f"{name}{i}"), "text": "x" * 5000})


def test_two_processes_append_without_mixing(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")  # torch need not be imported again
    both = [fork.Process(target=append, args=(tmp_path / "c.jsonl", name)) for name in "ab"]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    cache = Cache(tmp_path / "c.jsonl")
    assert len(cache) == 80
    assert all(len(r["text"]) == 5000 for r in cache.records.values())


def test_the_key_depends_on_everything_that_the_answer_does() -> None:
    image = torch.arange(12, dtype=torch.uint8).view(2, 2, 3)
    ask = Message("user", "which?", (image,))
    base = Request("m", [ask])
    others = [
        Request("n", [ask]),
        Request("m", [Message("system", "which?", (image,))]),
        Request("m", [Message("user", "which one?", (image,))]),
        Request("m", [Message("user", "which?")]),
        Request("m", [Message("user", "which?", (image.flip(0),))]),
        Request("m", [Message("user", "which?", (image.view(1, 4, 3),))]),
        Request("m", [ask], {"type": "object"}),
        Request("m", [ask], temperature=0.1),
        Request("m", [ask], seed=1),
        Request("m", [ask], max_tokens=7),
        Request("m", [ask], extra={"top_p": 0.5}),
    ]
    keys = {question.key for question in [base, *others]}
    assert len(keys) == len(others) + 1
    assert base.key == Request("m", [Message("user", "which?", (image.clone(),))]).key
    assert Request("m", ASK).key[:16] == "b8ad0810d49f78ea"  # caches of before are replayed by it


ASK = [Message("user", "which one?")]
PRICE = Price(prompt=1e6, completion=2e6)  # 7 + 2 * 3 = 13 an answer


def chat(server: Server, folder: Path | None, model: str = "m", **limits: Any) -> ChatClient:
    bounds = Limits(connect=1.0, read=5.0, retries=1, backoff=0.001, **limits)
    return ChatClient(Config(server.url, model, limits=bounds), folder)


LIMITS: list[dict[str, Any]] = [{"calls": 3}, {"tokens": 25}, {"cost": 30.0, "price": PRICE}]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_resumed_run_goes_on_with_what_is_left(limit: dict[str, Any], tmp_path: Path) -> None:
    """A line that was cut by a kill loses only itself; another run starts anew."""
    with serving(says("yes")) as server:
        first = chat(server, tmp_path / "a", **limit)
        for seed in range(2):
            first.ask(ASK, seed=seed)
    with (tmp_path / "a" / FILE).open("a") as file:
        file.write('{"model": "m", "tok')
    with serving(says("yes")) as server:  # another address, as after a restart
        resumed = chat(server, tmp_path / "a", **limit)
        resumed.ask(ASK, seed=2)
        with pytest.raises(BudgetSpent, match=f"{FILE}"):
            resumed.ask(ASK, seed=3)
        assert len(server.asked) == 1
        assert chat(server, tmp_path / "b", **limit).ask(ASK).text == "yes"
    assert (resumed.budget.calls, resumed.budget.tokens) == (3, 30)


def test_models_of_one_run_have_budgets_and_its_processes_share_them(tmp_path: Path) -> None:
    """Clients that know of each other only by the file; a raised budget continues."""
    with serving(says("yes")) as server:
        one, same, other = (chat(server, tmp_path, name, calls=2) for name in "aab")
        for client in (one, same, other):
            client.ask(ASK)
        for client in (one, same):
            with pytest.raises(BudgetSpent):
                client.ask(ASK)
        assert (one.budget.calls, other.budget.calls) == (2, 1)
        assert chat(server, tmp_path, "a", calls=3).ask(ASK).text == "yes"


def test_failures_cost_nothing_and_cut_answers_cost_a_call(tmp_path: Path) -> None:
    busy, cut = Told({"error": "busy"}, 503), Told(b'{"choices": [{"mess')
    with serving(busy, says("yes"), cut, says("yes")) as server:
        client = chat(server, tmp_path, calls=3)
        client.ask(ASK)
        client.ask(ASK)
        with pytest.raises(BudgetSpent):
            client.ask(ASK)
    lines = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert [line["tokens"] for line in lines] == [10, 0, 10]


def test_a_settled_request_is_not_counted_twice() -> None:
    budget = Budget(Limits(calls=2), "m")
    budget.reserve()
    budget.settle({"total_tokens": 1})
    budget.reserve()  # the second of two
    with pytest.raises(BudgetSpent):
        budget.reserve()
    budget.settle(None)  # it failed, and another may be tried
    budget.reserve()


CHAT = node_of("llm.client.ChatClient", url="http://127.0.0.1:9/v1", model="m")
JUDGE = node_of("rewards.preferences.labellers.VisionLanguageLabeller", chat=CHAT, goal="x")
WITH_CHAT: dict[str, tuple[dict[str, Any], str]] = {
    "language.annotate.Annotate": ({"labeller": CHAT, "goal": "x"}, "labeller.chat"),
    "language.subgoal_bonus.SubgoalBonus": ({"chat": CHAT}, "planner.chat"),
    "preferences.preference.Preference": ({"labeller": JUDGE, "leaf": "state"}, "labeller.chat"),
}


@pytest.mark.parametrize("name", WITH_CHAT)
def test_rewards_keep_what_they_spend_in_the_folder_of_their_run(name: str, tmp_path: Path) -> None:
    settings, where = WITH_CHAT[name]
    env = build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 1}, VecEnv)
    reward = make_reward(node_of(f"rewards.{name}", **settings), env.spec, tmp_path)
    budget: Budget = attrgetter(where)(reward).budget
    assert budget.log is not None and budget.log.path == tmp_path / FILE


def test_costs_need_prices_and_usage() -> None:
    with pytest.raises(ConfigError, match=r"chat\.limits\.cost needs chat\.limits\.price"):
        Limits(cost=1.0)
    silent = says("yes")
    del silent.body["usage"]
    with (
        serving(silent) as server,
        pytest.raises(ChatError, match=r"does not report.*limits\.cost=null"),
    ):
        chat(server, None, cost=1.0, price=PRICE).ask(ASK)


def test_an_interrupted_design_does_not_spend_twice(tmp_path: Path) -> None:
    """Every answer is refused, so that nothing is trained; stopped in the second of five rounds."""
    said: list[str] = []

    def stop(line: str) -> None:
        said.append(line)
        if sum("no code block" in each for each in said) == 2:
            raise KeyboardInterrupt

    for tell, error, asked in (
        (stop, pytest.raises(KeyboardInterrupt), 2),
        (said.append, pytest.raises(ConfigError, match="no valid program"), 1),
    ):
        with serving(says("prose")) as server, error:
            config = DesignConfig(
                env={"_target_": "embodied.envs.toy.two_gap.TwoGap"},
                designer=node_of("reward_design.designers.language_model.Eureka", repairs=0),
                chat=server.node(limits={"calls": 3, "backoff": 0.001}),
                sentence="go to the goal",
                out=str(tmp_path),
                rounds=5,
                samples=1,
                tried=256,
            )
            design(config, ["env=two_gap"], tell)
        assert len(server.asked) == asked
    assert "  the budget of the model is spent: the search ends" in said
