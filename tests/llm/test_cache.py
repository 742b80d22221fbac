"""The cache of answers loses nothing: cut files, two processes, bad lines."""

from __future__ import annotations

import json
import logging
import multiprocessing
from pathlib import Path

import pytest
import torch

from embodied.llm.chat import Message, Request
from embodied.llm.client import Cache, Record


def record(name: str) -> Record:
    return {"key": name, "request": {"model": "m"}, "text": f"answer {name}\nof two lines"}


def test_a_cut_file_loses_only_what_was_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_line_that_is_no_record_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "c.jsonl"
    text = json.dumps(record("a")) + '\n{"half": \n[3]\n' + json.dumps(record("b")) + "\n"
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert sorted(Cache(file).records) == ["a", "b"]
    assert "1 lines cannot be parsed" in caplog.text and "1 lines are no answers" in caplog.text
    assert file.read_text() == text


def test_one_process_sees_what_another_appends(tmp_path: Path) -> None:
    one, two = Cache(tmp_path / "c.jsonl"), Cache(tmp_path / "c.jsonl")
    one.put(record("a"))
    found = two.get("a")
    assert found is not None and found["text"] == "answer a\nof two lines"
    assert one.get("b") is None
    two.put(record("b"))
    assert one.get("b") is not None


def append(path: Path, name: str) -> None:
    cache = Cache(path)
    for i in range(40):
        cache.put({"key": f"{name}{i}", "text": "x" * 5000})


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
