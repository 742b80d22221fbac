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

from real_robot.ipc.mailbox import Mailbox, MailboxError, keeps_order

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


def test_machines_that_reorder_memory_accesses_are_not_supported() -> None:
    assert keeps_order("x86_64") and keeps_order("AMD64") and not keeps_order("aarch64")


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
