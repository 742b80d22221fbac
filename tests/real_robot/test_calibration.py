"""Calibrating a servo arm by hand, on an emulated bus; LeRobot's file both ways."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied.core.build import ConfigError
from embodied.real_robot.drivers.servos.calibration import (
    Calibration,
    Motor,
    Progress,
    driver_settings,
    load_lerobot,
    motors_of,
    save_lerobot,
)
from embodied.real_robot.emulators.servos.bus import FakeBus
from embodied.real_robot.kernel.driver import DriverError
from tests.builders import exit_of

IDS = {"shoulder_pan": 1, "elbow_flex": 2, "gripper": 3}
MIDDLES, ENDS = (2300, 1800, 2500), (700, 500, 300)


@pytest.fixture
def bus() -> Iterator[FakeBus]:
    with FakeBus("feetech", [2000, 2000, 2000]) as made:
        yield made


class Person:
    """Moves the arm as each line says. `stops`: the line at which they press Ctrl-C."""

    def __init__(self, bus: FakeBus, stops: str = "") -> None:
        self.bus, self.stops, self.asked = bus, stops, list[str]()

    def calibrates(self, folder: Path, wait: Any = None) -> Progress:
        return Calibration(self.bus.path, IDS, folder / "part", self.ask, wait or self.wait).run()

    def ask(self, line: str) -> None:
        self.asked.append(line.split()[0])
        if self.stops and self.stops in line:
            raise KeyboardInterrupt
        if "middle" in line:
            self.put(*MIDDLES)
        if "zero" in line:
            self.put(*(middle + 100 for middle in MIDDLES))

    def wait(self, line: str, look: Callable[[], bool]) -> None:
        self.ask(line)
        for way in (-1, 1):
            self.put(*(m + way * e for m, e in zip(MIDDLES, ENDS, strict=True)))
            look()

    def put(self, *ticks: int) -> None:
        for id, tick in enumerate(ticks, 1):
            assert not self.bus.servos[id].table[40], "torque is off while a person moves it"
            self.bus.servos[id].at = float(tick)
            self.bus.servos[id].measure()


def test_a_person_moves_it_and_servos_keep_what_was_found(bus: FakeBus, tmp_path: Path) -> None:
    person = Person(bus)
    for servo in bus.servos.values():
        servo.table[40] = 1
    found = person.calibrates(tmp_path)
    for (name, id), middle, end in zip(IDS.items(), MIDDLES, ENDS, strict=True):
        table = bus.servos[id].table
        assert found.motors[name] == Motor(id, 0, middle - 2047, 2047 - end, 2047 + end)
        assert found.zeros[name] == 2147
        assert int.from_bytes(table[9:11], "little") == 2047 - end
        assert table[55] == 1, "its memory is locked again"
    assert bus.servos[2].offset == 1800 - 2047, "a negative one, too"
    made = driver_settings(found.motors, found.zeros)
    assert made["joints"][1] == {
        "name": "elbow_flex", "id": 2, "low": 1547, "high": 2547, "zero": 2147, "sign": 1
    }  # fmt: skip
    assert made["hand"] == {"id": 3, "closed": 1747, "open": 2347}


def test_an_interrupted_one_goes_on(bus: FakeBus, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Person(bus, stops="both of its ends").calibrates(tmp_path)
    person = Person(bus)
    found = person.calibrates(tmp_path)
    assert "middle" not in " ".join(person.asked) and len(person.asked) == 3
    assert found.motors["elbow_flex"].homing_offset == -247
    with pytest.raises(ConfigError, match="of other motors"):
        Calibration(bus.path, {"hip": 1}, tmp_path / "part", person.ask, person.wait)


@pytest.mark.parametrize(
    ("ticks", "says"),
    [
        # 1,500 ticks that cross from 4095 to 0 are not a range of 4,076.
        ([3397 + 100 * part for part in range(16)], r"\d+ to 4897"),
        # A whole turn, as of wrist_roll, would limit nothing.
        ([2047, 1024, 0, 1024, 2047, 3070, 4095], "0 to 4095"),
    ],
)
def test_a_motion_over_the_encoders_seam_is_refused(
    bus: FakeBus, tmp_path: Path, ticks: list[int], says: str
) -> None:
    """`ticks`: where the first servo says it is led, whose middle is 253 away from its own."""
    person = Person(bus)

    def lead(line: str, look: Callable[[], bool]) -> None:
        for part, tick in enumerate(ticks):
            way = (-1) ** part
            others = (m + way * e for m, e in zip(MIDDLES[1:], ENDS[1:], strict=True))
            person.put((tick + MIDDLES[0] - 2047) % 4096, *others)
            look()

    said = rf"shoulder_pan was moved over the seam of its encoder \(ticks {says}, of 0 to 4095"
    with pytest.raises(DriverError, match=said):
        person.calibrates(tmp_path, lead)


def test_a_range_of_a_whole_turn_is_refused() -> None:
    """As LeRobot writes it for wrist_roll, which nobody moves: it would limit nothing."""
    with pytest.raises(ConfigError, match=r"range of wrist_roll is a whole turn.* both ends"):
        driver_settings({"wrist_roll": Motor(5)})


def test_lerobots_file_both_ways(tmp_path: Path) -> None:
    motors = {"elbow_flex": Motor(3, 1, -12, 900, 3100), "gripper": Motor(6, 0, 5, 2000, 3400)}
    save_lerobot(motors, tmp_path / "arm.json")
    assert load_lerobot(tmp_path / "arm.json") == motors
    ours = driver_settings(motors)
    assert ours["joints"][0]["sign"] == -1 and ours["joints"][0]["zero"] == 2000
    back = motors_of(ours)
    assert (back["elbow_flex"].range_min, back["elbow_flex"].drive_mode) == (900, 1)
    assert (back["gripper"].range_min, back["gripper"].range_max) == (2000, 3400)
    bad = {"hip": {"id": 1, "range_min": 5, "range_max": 1}}
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    with pytest.raises(ConfigError, match="range_min < range_max"):
        load_lerobot(tmp_path / "bad.json")
    save_lerobot({"hip": Motor(3), "knee": Motor(3)}, tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="hip and knee have the same id, 3"):
        load_lerobot(tmp_path / "bad.json")


def test_the_commands(
    bus: FakeBus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exit_of("robot", "find", f"port={bus.path}", "protocol=feetech")
    assert "servos 1 (at 2000), 2 (at 2000), 3 (at 2000)" in capsys.readouterr().out
    exit_of("robot", "find", f"port={tmp_path}/none", "protocol=feetech")
    assert "no serial port that is there" in capsys.readouterr().out
    person = Person(bus)

    def typed(line: str) -> str:
        if "both of its ends" in line:
            person.wait(line, lambda: time.sleep(0.5) is None)
        else:
            person.ask(line)
        return ""

    monkeypatch.setattr("builtins.input", typed)
    out, lerobot = tmp_path / "arm.yaml", tmp_path / "arm.json"
    words = ["robot", "calibrate", f"port={bus.path}", "names=[shoulder_pan,elbow_flex,gripper]"]
    exit_of(*words, f"out={out}", f"lerobot={lerobot}")
    made = yaml.safe_load(out.read_text())
    assert [each["name"] for each in made["joints"]] == ["shoulder_pan", "elbow_flex"]
    assert load_lerobot(lerobot)["gripper"].range_max == 2347
    again = tmp_path / "again.yaml"
    exit_of("robot", "calibrate", f"from={lerobot}", f"out={again}")
    assert yaml.safe_load(again.read_text())["hand"] == made["hand"]
    assert exit_of(*words, f"out={out}") == 2
    assert "exists already" in capsys.readouterr().err
