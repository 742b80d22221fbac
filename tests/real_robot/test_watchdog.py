"""The hardware watchdog: the firmware's own state machine, its client, and a control process that
is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embodied.core.build import ConfigError, parse
from embodied.real_robot.assemble import open_channels, open_flight_recorder
from embodied.real_robot.emulators.watchdog import SOURCE, Firmware, WatchdogBoard
from embodied.real_robot.ipc.channels import Role
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.messages import Command, Mode
from embodied.real_robot.watchdog.client import (
    Config,
    Relay,
    Watchdog,
    beat_frame,
    take_status,
)
from tests.builders import wait_until
from tests.real_robot.test_control import Bench
from tests.real_robot.test_daemon import simulated

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) here")
LIMIT = 100  # ms


def closed(now: int = 0) -> Firmware:
    """A board whose button was pressed, fed with beats 1 to 8 until `now` + 70 ms."""
    board = Firmware(LIMIT, now)
    for number in range(1, 9):
        time = now + 10 * (number - 1)
        board.take(beat_frame(number), time)
        board.poll(time, contact=False)
    board.poll(now + 70, contact=True)
    assert board.relay == Relay.STARTED, "not yet: contacts bounce"
    board.poll(now + 120, contact=True)
    assert board.relay == Relay.CLOSED
    board.poll(now + 120, contact=False)
    return board


def test_by_hand() -> None:
    # CRC-16/CCITT-FALSE of "123456789" is 0x29B1; of A5 01 00 it is computed by both sides.
    assert beat_frame(1)[:3] == b"\xa5\x01\x00" and len(beat_frame(1)) == 5
    assert beat_frame(0x10002) == beat_frame(2), "two bytes count"
    said = bytearray(b"\x00\x5a" + Firmware(LIMIT).status())
    assert take_status(said) == (Relay.STARTED, LIMIT) and not said
    assert take_status(bytearray(b"\x5a\x01\x64\x00\x00\x00")) is None, "a wrong CRC"


@pytest.mark.parametrize("now", [0, 0xFFFFFFFF - 75])
def test_it_is_open_until_the_button_and_when_the_beats_end(now: int) -> None:
    """Also where its clock of 32 bits turns over."""
    board = closed(now)  # the last beat came at 70
    board.poll(now + 170)
    assert board.relay == Relay.CLOSED
    board.poll(now + 171)
    assert board.relay == Relay.SILENCE
    board.poll(now + 200, contact=True)
    board.poll(now + 300, contact=True)
    assert board.relay == Relay.SILENCE, "nobody beats"
    board.take(beat_frame(9), now + 310)
    board.poll(now + 310, contact=True)
    assert board.relay == Relay.SILENCE, "the button is held down: that is no press"


def test_a_late_beat_does_not_hide_a_silence() -> None:
    board = closed()
    board.take(beat_frame(9), 171)
    assert board.relay == Relay.SILENCE


def test_up_to_three_missed_beats_keep_it_closed() -> None:
    board = closed()
    for number, time in ((9, 130), (11, 150), (15, 160)):
        board.take(beat_frame(number), time)
        board.poll(time)
    assert board.relay == Relay.CLOSED
    board.take(beat_frame(20), 165)
    assert board.relay == Relay.SEQUENCE


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00", Relay.GARBAGE),
        (b"hello", Relay.GARBAGE),
        (b"\xa5\x09\x00\x00\x00", Relay.GARBAGE),
        (beat_frame(9)[:4] + bytes([beat_frame(9)[4] ^ 1]), Relay.GARBAGE),
        (beat_frame(8), Relay.SEQUENCE),
        (beat_frame(7), Relay.SEQUENCE),
        (beat_frame(9) + beat_frame(9), Relay.SEQUENCE),
    ],
)
def test_what_is_no_beat_opens_it_until_the_button(data: bytes, reason: Relay) -> None:
    board = closed()
    board.take(data, 125)
    assert board.relay == reason
    for number, time in enumerate(range(130, 330, 10), 30):
        board.take(beat_frame(number), time)
        board.poll(time)
    assert board.relay == reason, "beats alone do not close it"
    for time in (330, 390):
        board.take(beat_frame(47 + time // 60), time)
        board.poll(time, contact=True)
    assert board.relay == Relay.CLOSED


BOARD = """
#pragma once
#include <stdint.h>
enum { LOW, HIGH, OUTPUT, INPUT_PULLUP };
inline void digitalWrite(int, int) {}
inline int digitalRead(int) { return HIGH; }
inline void pinMode(int, int) {}
inline unsigned long millis() { return 0; }
struct Port {
    void begin(long) {}
    int available() { return 0; }
    int read() { return 0; }
    int availableForWrite() { return 64; }
    void write(const uint8_t *, int) {}
};
inline Port Serial;
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++) here")
def test_the_boards_part_compiles_as_a_sketch(tmp_path: Path) -> None:
    (tmp_path / "Arduino.h").write_text(BOARD)
    command = ["c++", "-std=c++17", "-Wall", "-Werror", "-fsyntax-only", "-DARDUINO=1"]
    command += ["-I", str(tmp_path), "-x", "c++", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Pretended:
    """A watchdog of the control loop whose board is the test's."""

    def __init__(self) -> None:
        self.beats, self.fault, self.waits = 0, "", 0

    def beat(self) -> None:
        self.beats += 1

    def wait(self) -> None:
        self.waits += 1


def test_the_loop_beats_once_a_tick_while_it_is_in_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    control: Any = bench.control
    control.watchdog = dog = Pretended()
    bench.moving()
    assert dog.beats == len(bench.sent)
    dog.fault = "the watchdog's relay is open (it missed beats): press its button"
    bench.run(1)
    assert bench.mode == Mode.ESTOP and bench.fault == dog.fault
    bench.run(100)
    assert bench.ask(Command.RESET) == Mode.IDLE and dog.waits == 1
    bench.run(1)
    assert bench.mode == Mode.ESTOP, "it is still open"
    dog.fault = ""
    assert bench.ask(Command.RESET) == Mode.IDLE
    assert dog.beats == len(bench.sent)
    control.source = None  # every tick raises
    bench.run(20)
    assert bench.mode == Mode.ESTOP and dog.beats == len(bench.sent) - 20


def test_a_board_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="cannot be opened"):
        Watchdog(Config(str(tmp_path / "none")), 100.0).connect()
    with WatchdogBoard(limit=100) as board:
        with pytest.raises(DriverError, match=r"100 ms is shorter than 3 ticks at 20 Hz"):
            Watchdog(Config(board.path), 20.0).connect()
        with pytest.raises(DriverError, match=r"switched on\): press its button; nobody did"):
            Watchdog(Config(board.path, patience=0.3), 100.0).connect()
    with pytest.raises(ConfigError):
        parse(Config, {"device": "x", "patience": 0.0}, "watchdog")


def test_a_killed_control_process_opens_the_relay(folder: Path) -> None:
    """The process of a deployment, its board on a pseudo-terminal, whose clock the test moves on: a
    busy machine is no fault here."""
    with WatchdogBoard(limit=60_000) as board:
        made = simulated(folder, watchdog=Config(board.path))
        made.write(folder)
        channels = open_channels(made, folder, Role.ALL, create=True)
        open_flight_recorder(made, folder, create=True)
        command = [sys.executable, "-m", "embodied.real_robot.control.main", str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            try:

                def pressed() -> bool:
                    board.press()
                    return board.relay == Relay.CLOSED

                wait_until(pressed, "the relay is closed")
                wait_until(
                    lambda: channels.state.receive() and channels.state.fields["tick"][0] > 20,
                    "the loop runs",
                )
                assert board.relay == Relay.CLOSED
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                board.ahead = 60_001
                wait_until(lambda: board.relay != Relay.CLOSED, "the relay is open")
                assert board.relay == Relay.SILENCE
            finally:
                process.kill()
