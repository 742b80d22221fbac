"""Chunk records that are not valid, through the control loop: refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.real_robot.ipc.messages import Command, Mode
from tests.real_robot.chunk_fuzz import fuzz
from tests.real_robot.test_control import DOWN, DT, Bench, within

NAN, INF = float("nan"), float("inf")
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no numbers": ({"size": 0}, "0 numbers for 4 actions (dx, dy, dz, gripper)"),
    "fewer than no numbers": ({"size": -1}, "-1 numbers for 4 actions"),
    "a number too few": ({"size": 3}, "3 numbers for 4 actions"),
    "two numbers too many": ({"size": 6}, "6 numbers for 4 actions"),
    "more numbers than fit": ({"size": 33}, "33 numbers for 4 actions"),
    "as many numbers as can be": ({"size": 2**31 - 1}, "2147483647 numbers for 4 actions"),
    "no steps": ({"steps": 0}, "0 steps; 1 to 128"),
    "fewer than no steps": ({"steps": -3}, "-3 steps; 1 to 128"),
    "more steps than fit": ({"steps": 129}, "129 steps; 1 to 128"),
    "a million steps": ({"steps": 10**6}, "1000000 steps; 1 to 128"),
    "seen is not a number": ({"seen": NAN}, "seen=nan, which is not a time"),
    "seen is infinite": ({"seen": INF}, "seen=inf, which is not a time"),
    "seen is infinitely long ago": ({"seen": -INF}, "seen=-inf, which is not a time"),
    "seen in the future": ({"seen": 1e9}, "s from the future"),
    "start is not a number": ({"start": NAN}, "start=nan, which is not a time"),
    "start is infinite": ({"start": INF}, "start=inf, which is not a time"),
    "start is infinitely long ago": ({"start": -INF}, "start=-inf, which is not a time"),
    "start in the future": ({"start": 1e9}, "in the future"),
    "no stamp is a number": ({"seen": NAN, "start": NAN}, "seen=nan, which is not a time"),
    "less than no noise": ({"noise_size": -1}, "-1 numbers of noise"),
    "more noise than fits": ({"noise_size": 4097}, "4097 numbers of noise"),
    "an image of no time": ({"image_times": NAN}, "capture time of an image"),
}


def speak(bench: Bench, wrong: dict[str, Any]) -> None:
    """A chunk as it should be, but for what is `wrong`."""
    fields = bench.there.chunk.fields[0]
    fields["actions"], fields["noise_size"], fields["image_times"] = 0.0, 0, 0.0
    fields["number"] += 1
    fields["seen"] = bench.there.state.fields["measured"][0]
    fields["start"], fields["steps"], fields["size"] = bench.now, 4, len(DOWN)
    fields["actions"][:4, : len(DOWN)] = DOWN
    for name, value in wrong.items():
        fields[name] = value
    bench.there.chunk.send()
    fields["noise_size"], fields["image_times"] = 0, 0.0


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_chunk_is_a_latched_fault_in_one_line(tmp_path: Path, name: str) -> None:
    wrong, line = MALFORMED[name]
    bench = Bench(tmp_path)
    bench.moving()
    bench.action = None
    speak(bench, wrong)
    bench.run(1)
    assert bench.mode == Mode.ESTOP
    assert line in bench.fault and "\n" not in bench.fault
    assert bench.fault.startswith("the policy's ")
    bench.run(150)
    within(bench.sent)
    assert np.ptp(np.stack(bench.sent[-5:]), axis=0).max() < 1e-3, "at rest"
    assert bench.ask(Command.RESET) == Mode.IDLE
    bench.moving()
    assert bench.mode == Mode.RUNNING, "the next good chunk is followed"


@pytest.mark.parametrize("name", MALFORMED)
def test_an_idle_arm_drops_it_and_is_not_started_upon_it(tmp_path: Path, name: str) -> None:
    bench = Bench(tmp_path)
    bench.run(10)
    speak(bench, MALFORMED[name][0])
    bench.run(2)
    assert bench.mode == Mode.IDLE and not bench.fault
    bench.ask(Command.ARM)
    assert bench.ask(Command.START) == Mode.ARMED, "no chunk that could be followed has come"
    speak(bench, MALFORMED[name][0])
    bench.run(1)
    assert bench.mode == Mode.ESTOP and MALFORMED[name][1] in bench.fault, "armed: it is said why"


def test_stamps_of_long_ago_are_stale_and_no_other_fault(tmp_path: Path) -> None:
    for long_ago in (-1.7e308, -1e9, 0.0):
        folder = tmp_path / str(long_ago)
        folder.mkdir()
        bench = Bench(folder)
        bench.moving()
        bench.action = None
        speak(bench, {"seen": long_ago, "start": long_ago})
        bench.run(1)
        assert bench.mode == Mode.RUNNING, "older than what is followed: not followed"
        speak(bench, {"start": long_ago})
        bench.run(6)
        assert bench.mode == Mode.RUNNING and bench.there.state.fields["starved"][0]
        bench.run(100)
        assert bench.mode == Mode.ESTOP and "s old" in bench.fault


def test_stamps_that_are_no_numbers_do_not_switch_freshness_off(tmp_path: Path) -> None:
    """Every chunk says NaN, and then nothing comes for 3 s."""
    bench = Bench(tmp_path)
    bench.moving()
    bench.action = None
    for _ in range(5):
        speak(bench, {"seen": NAN, "start": NAN})
        bench.run(5)
    bench.run(round(3.0 / DT))
    assert bench.mode == Mode.ESTOP and bench.fault
    within(bench.sent)


def test_numbers_may_begin_anew(tmp_path: Path) -> None:
    """A policy that is started again counts from 1."""
    bench = Bench(tmp_path)
    bench.moving()
    bench.there.chunk.fields["number"] = -5
    bench.run(50)
    assert bench.mode == Mode.RUNNING


def test_random_chunk_records_neither_end_nor_fool_the_loop() -> None:
    """10^5 of them: `python -m tests.real_robot.chunk_fuzz 100000`."""
    made = fuzz(3000, seed=1)
    assert made.told["latched"] > 500 and made.told["dropped"] > 100
    assert made.told["followed"] > 100
