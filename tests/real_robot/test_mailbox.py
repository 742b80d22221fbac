"""The newest message, whole or not at all, whatever the other process does."""

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

from embodied.core.build import ConfigError
from embodied.real_robot.ipc.channels import Channels, Role
from embodied.real_robot.ipc.external_state import Config, ExternalStateReader, ExternalStateWriter
from embodied.real_robot.ipc.ring_buffer import (
    BlackBox,
    BlackBoxError,
    keep_newest,
    write_records,
)
from embodied.real_robot.kernel.channels import EmergencyStop
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.mailbox import Mailbox, MailboxError, checksum
from tests.builders import Clock

RECORD = np.dtype([("number", "<i8"), ("values", "<f8", (64,))])


def write_forever(path: str) -> None:
    box = Mailbox(Path(path), RECORD, 1, create=False, write=True)
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


@pytest.mark.parametrize("first", [24, None], ids=["an old record", "half of two"])
def test_what_lags_behind_its_counter_is_not_accepted(
    torn: tuple[Any, Any], first: int | None
) -> None:
    """As on a machine that lets the counter be seen before the record (aarch64): half a message, or
    checksum and record of the one before, which would hide the new one."""
    writer, reader = torn
    before = bytes(writer._map)
    writer.fields["number"], writer.fields["values"] = 8, 8
    writer.send()
    after = bytes(writer._map)
    late = first or len(after) - RECORD.itemsize // 2
    writer._map[late:] = before[late:]
    assert not reader.receive() and reader.fields["number"][0] == 7
    assert (reader.fields["values"] == 7).all(), "what was read before stays whole"
    writer._map[late:] = after[late:]
    assert reader.receive() and (reader.fields["values"] == 8).all(), "the rest has come"


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


def test_who_finds_a_message_unfinished_waits_ten_times_once(
    torn: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = torn
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for count in (10, 0, 0):
        writer._counter[0] |= np.uint64(1)
        assert not reader.receive() and slept == [0] * count
        slept.clear()
    writer._counter[0] += 2
    assert not reader.receive() and slept == [0] * 10, "another one is waited for again"


def test_a_message_that_is_finished_while_it_is_waited_for_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first one; and a box in which nothing was sent is not waited for."""
    writer: Any = Mailbox(tmp_path / "box", RECORD, 1, create=True)
    reader = Mailbox(tmp_path / "box", RECORD, 1, create=False)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert not reader.receive() and not slept
    monkeypatch.setattr(time, "sleep", lambda seconds: writer.send())
    for number in (1, 2, 3):
        writer.fields["number"] = number
        writer._counter[0] += 1
        assert reader.receive() and reader.fields["number"][0] == number
        assert not reader.receive()


def test_the_same_bytes_under_another_number_do_not_match() -> None:
    data = np.arange(99, dtype=np.uint8)
    assert len({checksum(data, number) for number in range(0, 400, 2)}) == 200
    assert checksum(data, 2**40 + 2) == checksum(data, 2**32 + 2)


def free() -> list[int]:
    """The next free file descriptors."""
    handles = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    for handle in handles:
        os.close(handle)
    return handles


def test_a_closed_mailbox_holds_no_file(tmp_path: Path) -> None:
    before = free()
    boxes = [Mailbox(tmp_path / "box", RECORD, 1, create=create) for create in (True, False)]
    for box in boxes:
        box.close()
    assert free() == before


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


def test_a_new_writer_is_heard_after_one_that_died_within_a_message(tmp_path: Path) -> None:
    dead: Any = Mailbox(tmp_path / "box", RECORD, 1, create=True)
    reader = Mailbox(tmp_path / "box", RECORD, 1, create=False)
    dead._counter[0] += 1
    writer = Mailbox(tmp_path / "box", RECORD, 1, create=False, write=True)
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


def test_newest_values_and_their_age(tmp_path: Path) -> None:
    clock = Clock(50.0)
    writer = ExternalStateWriter(tmp_path, ("cube_x", "cube_y"))
    seen = ExternalStateReader(Config(str(tmp_path), ("cube_x", "cube_y"), age=0.5), clock)
    seen.connect()
    with pytest.raises(DriverError, match="cube_x was last measured"):
        seen.read()  # never
    writer.publish(np.array([1.0, 2.0]), 50.0)
    assert seen.read().tolist() == [1, 2]
    writer.publish(np.array([3.0, 4.0]), 50.2)
    clock.now = 50.6
    assert seen.read().tolist() == [3, 4]
    clock.now = 50.8
    with pytest.raises(DriverError, match=r"0\.6 s ago"):
        seen.read()
    assert not writer.renew_requested()
    seen.renew()
    assert writer.renew_requested() and not writer.renew_requested(), "laid out again"
    with pytest.raises(DriverError, match="another version"):
        ExternalStateReader(Config(str(tmp_path), ("cube_x",))).connect()
    with pytest.raises(DriverError, match="no process measures x"):
        ExternalStateReader(Config(str(tmp_path / "none"), ("x",))).connect()
    with pytest.raises(ConfigError):
        Config("f", ())


TICK = np.dtype([("tick", "<i8"), ("q", "<f8", (64,))])


def box(folder: Path, slots: int, create: bool = True) -> BlackBox:
    return BlackBox(folder / "ring", TICK, slots, create, write=True)


def fill(made: BlackBox, first: int, last: int) -> None:
    record = np.zeros(1, TICK)
    for tick in range(first, last + 1):
        record["tick"], record["q"] = tick, tick
        made.add(record)


def fill_forever(folder: str) -> None:
    made = box(Path(folder), 50, create=False)
    tick = 0
    while True:
        fill(made, tick, tick + 999)
        tick += 1000


def test_it_keeps_the_last_ones_in_order(tmp_path: Path) -> None:
    made = box(tmp_path, 5)
    assert len(made.records()) == 0
    fill(made, 1, 3)
    for each in (made, box(tmp_path, 5, create=False)):
        assert each.records()["tick"].tolist() == [1, 2, 3]
    assert stat.S_IMODE((tmp_path / "ring").stat().st_mode) == 0o600
    with pytest.raises(MailboxError, match="another version"):
        box(tmp_path, 9, create=False)
    with pytest.raises(MailboxError, match="is not there"):
        box(tmp_path / "none", 8, create=False)
    fill(made, 4, 12)
    # Of 5 slots, the one that the writer may be at work on is left out.
    assert made.records()["tick"].tolist() == [9, 10, 11, 12]
    for seen, new in ((3, [9, 10, 11, 12]), (10, [11, 12]), (12, [])):
        records, count = made.since(seen)
        assert records["tick"].tolist() == new and count == 12


def test_what_somebody_left_says_what_it_is(tmp_path: Path) -> None:
    odd = np.dtype([("b", "<u2"), ("none", "<f8", (0,)), ("m", "<f4", (2, 3)), ("text", "S7")])
    made = BlackBox(tmp_path / "odd", odd, 5, create=True)
    record = np.zeros(1, odd)
    record["b"], record["m"], record["text"] = 7, np.arange(6).reshape(2, 3), b"lost"
    made.add(record)
    left = BlackBox.left(tmp_path / "odd")
    assert left.slots == 5 and left.records().dtype == odd and left.records()[0] == record[0]
    other = np.dtype([(name.replace("m", "n"), *about) for name, *about in odd.descr])
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
        target=fill_forever, args=(str(tmp_path),), daemon=True
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
    write_records(made.records(), path)
    state = np.load(path, allow_pickle=False)["state"]
    assert state["tick"].tolist() == list(range(1, 701)) and (state["q"][-1] == 700).all()
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # as a disk that is full
    try:
        with pytest.raises(BlackBoxError, match=r"one\.npz: "):
            write_records(made.records(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1
    fill(made, 701, 701)
    write_records(made.records(), path)
    assert len(np.load(path)["state"]) == 701, "the loop went on, and a later one can be saved"
    (tmp_path / "file").touch()
    with pytest.raises(BlackBoxError):
        write_records(made.records(), tmp_path / "file" / "one.npz")


def test_only_the_newest_files_stay(tmp_path: Path) -> None:
    for name in ("1.npz", "3.npz", "2.npz", "other.txt"):
        (tmp_path / name).touch()
    keep_newest(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2.npz", "3.npz", "other.txt"]


RIGHTS = {
    Role.CONTROL: {"state", "estop"},
    Role.POLICY: {"chunk"},
    Role.DAEMON: {"request", "heartbeat", "estop"},
    Role.READER: set[str](),
    Role.ALL: {"state", "chunk", "request", "heartbeat", "deadman", "takeover", "estop"},
}


@pytest.mark.parametrize("role", Role)
def test_a_process_maps_for_writing_what_it_writes(tmp_path: Path, role: Role) -> None:
    """The kernel of the operating system says so, and whoever writes the rest is told."""
    Channels.make(tmp_path, 7, 3, role=Role.READER).close()
    boxes = Channels.open(tmp_path, 7, 3, role=role)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = {Path(line[-1]).name: line[1] for line in maps if line[-1].startswith(str(tmp_path))}
    assert set(mapped) == RIGHTS[Role.ALL]
    assert {name for name, rights in mapped.items() if rights == "rw-s"} == RIGHTS[role]
    for name in RIGHTS[Role.ALL] - RIGHTS[role]:
        assert mapped[name] == "r--s"
        box: Any = getattr(boxes, name)
        with pytest.raises(ValueError, match="read-only"):
            box.press() if name == "estop" else box.send()
    boxes.close()


def test_every_press_of_the_stop_is_a_newer_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Microseconds, also where the clock stands still or goes back."""
    stop = EmergencyStop(tmp_path / "estop", create=True, write=True)
    assert stop.number == 0
    seen: list[int] = []
    for now in (5_000_000, 5_000_000, 1_000_000, 9_000_000):
        monkeypatch.setattr(time, "monotonic_ns", lambda now=now: now)
        stop.press()
        seen.append(stop.number)
    assert seen == [5000, 5001, 5002, 9000]
    memory = stop._map
    stop.close()
    assert memory.closed
