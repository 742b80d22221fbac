"""The newest message, whole or not at all, whatever the other process does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.real_robot.ipc.mailbox import Mailbox, MailboxError

RECORD = np.dtype([("number", "<i8"), ("values", "<f8", (64,))])


def write_forever(path: str) -> None:
    box = Mailbox(Path(path), RECORD, 1, create=False)
    number = 0
    while True:
        number += 1
        box.fields["number"], box.fields["values"] = number, number
        box.send()


def test_a_message_arrives_once(tmp_path: Path) -> None:
    writer = Mailbox(tmp_path / "box", RECORD, 1, create=True)
    reader = Mailbox(tmp_path / "box", RECORD, 1, create=False)
    assert not reader.receive(), "nothing was sent yet"
    for number in (1, 2):
        writer.fields["number"] = number
        writer.send()
    assert reader.receive() and reader.fields["number"][0] == 2, "the newest one"
    assert not reader.receive()


@pytest.fixture
def torn(tmp_path: Path) -> tuple[Any, Any]:
    """A writer and a reader that has read its message number 7, of sevens."""
    writer: Any = Mailbox(tmp_path / "box", RECORD, 1, create=True)
    reader: Any = Mailbox(tmp_path / "box", RECORD, 1, create=False)
    writer.fields["number"], writer.fields["values"] = 7, 7
    writer.send()
    assert reader.receive()
    return writer, reader


def test_half_a_message_behind_an_even_counter_is_not_accepted(torn: tuple[Any, Any]) -> None:
    """As on a machine that lets the counter be seen before the record (aarch64)."""
    writer, reader = torn
    before = bytes(writer._map)
    writer.fields["number"], writer.fields["values"] = 8, 8
    writer.send()
    after = bytes(writer._map)
    half = len(after) - RECORD.itemsize // 2
    writer._map[half:] = before[half:]
    assert not reader.receive() and reader.fields["number"][0] == 7, "half of two messages"
    assert (reader.fields["values"] == 7).all(), "what was read before stays whole"
    writer._map[half:] = after[half:]
    assert reader.receive() and (reader.fields["values"] == 8).all(), "the rest has come"


def test_an_old_record_behind_a_new_counter_is_not_accepted(torn: tuple[Any, Any]) -> None:
    """Taken as the new message, it would hide that one."""
    writer, reader = torn
    old = bytes(writer._map[24:])  # checksum and record
    writer.fields["number"], writer.fields["values"] = 8, 8
    writer.send()
    new = bytes(writer._map[24:])
    writer._map[24:] = old
    assert not reader.receive()
    writer._map[24:] = new
    assert reader.receive() and reader.fields["number"][0] == 8


def test_random_mixtures_of_two_messages_are_not_accepted(torn: tuple[Any, Any]) -> None:
    writer, reader = torn
    before = np.frombuffer(bytes(writer._map), np.uint8).copy()
    writer.fields["number"], writer.fields["values"] = 8, 8
    writer.send()
    after = np.frombuffer(bytes(writer._map), np.uint8).copy()
    words = np.flatnonzero((before != after)[24:].reshape(-1, 8).any(1))
    random = np.random.default_rng(0)
    for _ in range(2000):
        late = random.choice(words, random.integers(1, len(words)), replace=False)
        mixed = after.copy()
        at = 24 + 8 * late[:, None] + np.arange(8)
        mixed[at] = before[at]
        writer._map[:] = mixed.tobytes()
        assert not reader.receive()


def test_a_message_that_never_becomes_whole_costs_the_reader_little(torn: tuple[Any, Any]) -> None:
    """A policy that was killed within a message must not delay the control loop."""
    writer, reader = torn
    writer._counter[0] += 1
    reader.receive()
    began = time.process_time()
    for _ in range(1000):
        assert not reader.receive()
    assert time.process_time() - began < 0.5, "0.5 ms each; waiting each time took 1 ms and more"


def test_no_message_is_ever_half_of_two(tmp_path: Path) -> None:
    Mailbox(tmp_path / "box", RECORD, 1, create=True)
    reader = Mailbox(tmp_path / "box", RECORD, 1, create=False)
    process = multiprocessing.get_context("spawn").Process(
        target=write_forever, args=(str(tmp_path / "box"),), daemon=True
    )
    process.start()
    got, deadline = 0, time.monotonic() + 60
    last = 0
    while got < 300 and time.monotonic() < deadline:
        if reader.receive():
            number = int(reader.fields["number"][0])
            assert (reader.fields["values"] == number).all() and number > last
            got, last = got + 1, number
    assert got == 300
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    while reader.receive():
        pass
    assert not reader.receive(), "a dead writer is silent, even one that died within a message"


def test_a_writer_that_died_within_a_message_is_silent(tmp_path: Path) -> None:
    writer = Mailbox(tmp_path / "box", RECORD, 1, create=True)
    reader: Any = Mailbox(tmp_path / "box", RECORD, 1, create=False)
    writer.fields["number"] = 7
    writer.send()
    assert reader.receive()
    reader._counter[0] += 1  # where the writer is between its two steps
    assert not reader.receive() and reader.fields["number"][0] == 7


def test_a_new_writer_is_heard_after_one_that_died_within_a_message(tmp_path: Path) -> None:
    dead: Any = Mailbox(tmp_path / "box", RECORD, 1, create=True)
    reader = Mailbox(tmp_path / "box", RECORD, 1, create=False)
    dead._counter[0] += 1
    writer = Mailbox(tmp_path / "box", RECORD, 1, create=False)
    for number in (1, 2):
        writer.fields["number"] = number
        writer.send()
        assert reader.receive() and reader.fields["number"][0] == number
    assert int(dead._counter[0]) % 2 == 0


def test_others_cannot_read_it_and_versions_are_compared(tmp_path: Path) -> None:
    Mailbox(tmp_path / "box", RECORD, 1, create=True)
    assert stat.S_IMODE((tmp_path / "box").stat().st_mode) == 0o600
    for dtype, version in ((RECORD, 2), (np.dtype("<f8"), 1)):
        with pytest.raises(MailboxError, match="another version"):
            Mailbox(tmp_path / "box", dtype, version, create=False)
    with pytest.raises(MailboxError, match="is not there"):
        Mailbox(tmp_path / "none", RECORD, 1, create=False)
    with pytest.raises(FileExistsError):
        Mailbox(tmp_path / "box", RECORD, 1, create=True)
