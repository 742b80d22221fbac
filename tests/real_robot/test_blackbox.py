"""The last records, in order, whole; a file of them, or a reason why there is none."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.real_robot.ipc.mailbox import MailboxError
from embodied.real_robot.ipc.ring_buffer import BlackBox, BlackBoxError, keep_newest

RECORD = np.dtype([("tick", "<i8"), ("q", "<f8", (64,))])


def box(folder: Path, slots: int, create: bool = True) -> BlackBox:
    return BlackBox(folder / "ring", RECORD, slots, create)


def fill(made: BlackBox, first: int, last: int) -> None:
    record = np.zeros(1, RECORD)
    for tick in range(first, last + 1):
        record["tick"], record["q"] = tick, tick
        made.add(record)


def write_forever(folder: str) -> None:
    made = box(Path(folder), 50, create=False)
    tick = 0
    while True:
        fill(made, tick, tick + 999)
        tick += 1000


def test_it_keeps_the_last_ones_in_order(tmp_path: Path) -> None:
    made = box(tmp_path, 5)
    assert len(made.records()) == 0
    fill(made, 1, 3)
    assert made.records()["tick"].tolist() == [1, 2, 3]
    fill(made, 4, 12)
    # Of 5 slots, the one that the writer may be at work on is left out.
    assert made.records()["tick"].tolist() == [9, 10, 11, 12]


def test_others_read_it_and_nobody_else(tmp_path: Path) -> None:
    fill(box(tmp_path, 8), 1, 4)
    assert box(tmp_path, 8, create=False).records()["tick"].tolist() == [1, 2, 3, 4]
    assert stat.S_IMODE((tmp_path / "ring").stat().st_mode) == 0o600
    with pytest.raises(MailboxError, match="another version"):
        box(tmp_path, 9, create=False)
    with pytest.raises(MailboxError, match="is not there"):
        box(tmp_path / "none", 8, create=False)


def test_what_somebody_left_says_what_it_is(tmp_path: Path) -> None:
    odd = np.dtype([("b", "<u2"), ("none", "<f8", (0,)), ("m", "<f4", (2, 3)), ("text", "S7")])
    made = BlackBox(tmp_path / "odd", odd, 5, create=True)
    record = np.zeros(1, odd)
    record["b"], record["m"], record["text"] = 7, np.arange(6).reshape(2, 3), b"lost"
    made.add(record)
    left = BlackBox.left(tmp_path / "odd")
    assert left.slots == 5 and left.records().dtype == odd and left.records()[0] == record[0]
    other = np.dtype([("b", "<u2"), ("none", "<f8", (0,)), ("n", "<f4", (2, 3)), ("text", "S7")])
    with pytest.raises(MailboxError, match="another version"):  # as large, and something else
        BlackBox(tmp_path / "odd", other, 5, create=False)
    whole = (tmp_path / "odd").read_bytes()
    for bad in (b"", whole[:30], whole[:-1], whole[:48] + b"x" * 200, os.urandom(400)):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(MailboxError):
            BlackBox.left(tmp_path / "bad")


def test_records_are_whole_while_another_process_writes_and_after_it_was_killed(
    tmp_path: Path,
) -> None:
    made = box(tmp_path, 50)
    process = multiprocessing.get_context("spawn").Process(
        target=write_forever, args=(str(tmp_path),), daemon=True
    )
    process.start()
    looks, deadline = 0, time.monotonic() + 60
    while looks < 200 and time.monotonic() < deadline:
        records = made.records()
        if len(records):
            looks += 1
            assert (records["q"] == records["tick"][:, None]).all(), "never half of two"
            assert (np.diff(records["tick"]) == 1).all()
    assert looks == 200 and process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(made.records()) == 49
    assert made.save(tmp_path / "last.npz") == 49


def test_a_record_that_is_counted_and_not_yet_there_is_left_out(tmp_path: Path) -> None:
    """As on a machine that lets the count be seen before the record (aarch64)."""
    made: Any = box(tmp_path, 8)
    fill(made, 1, 12)
    newest = made._ring[11 % 8].copy()
    made._ring[11 % 8, 100:] = made._ring[3, 0]
    records, count = made.since(9)
    assert records["tick"].tolist() == [10, 11] and count == 11
    assert made.records()["tick"].tolist() == [6, 7, 8, 9, 10, 11]
    made._ring[11 % 8] = newest
    records, count = made.since(count)
    assert records["tick"].tolist() == [12] and count == 12, "taken at the next look"
    made._ring[8 % 8] = made._ring[2]  # another record, whole, in the wrong place
    assert made.records()["tick"].tolist() == [6, 7, 8, 10, 11, 12]


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    made = box(tmp_path, 1000)
    fill(made, 1, 700)
    path = tmp_path / "records" / "one.npz"
    assert made.save(path) == 700
    state = np.load(path, allow_pickle=False)["state"]
    assert state["tick"].tolist() == list(range(1, 701)) and (state["q"][-1] == 700).all()
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # as a disk that is full
    try:
        with pytest.raises(BlackBoxError, match=r"one\.npz: "):
            made.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1
    fill(made, 701, 701)
    assert made.save(path) == 701, "the loop went on, and a later one can be saved"
    (tmp_path / "file").touch()
    with pytest.raises(BlackBoxError):
        made.save(tmp_path / "file" / "one.npz")


def test_only_the_newest_files_stay(tmp_path: Path) -> None:
    for name in ("1.npz", "3.npz", "2.npz", "other.txt"):
        (tmp_path / name).touch()
    keep_newest(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2.npz", "3.npz", "other.txt"]
