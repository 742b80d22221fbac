"""The UR's driver before a fake at the level of its protocols, its codec by itself, and
`embodied deploy robot=ur_sim` from end to end. Nothing is timed."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError, parse
from embodied.datasets.lerobot.reader import read_episodes
from embodied.real_robot.drivers.ur import driver as rtde
from embodied.real_robot.drivers.ur.driver import UR, Config, Recipe, RtdeError, take_packet
from embodied.real_robot.emulators.ur import controller
from embodied.real_robot.emulators.ur.controller import FakeUR
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.driver import DriverError, StopCategory
from tests.builders import wait_until
from tests.real_robot.test_deploy import said, start

PATIENT = 60.0


@pytest.fixture
def fake() -> Iterator[FakeUR]:
    with FakeUR() as fake:
        yield fake


def driver(fake: FakeUR, **more: Any) -> UR:
    calm = {"frequency": 125.0, "watchdog": 20.0, "silence": 20.0, "patience": PATIENT}
    return UR(Config(fake.host, **(calm | more)))


def follows(arm: UR, by: Any) -> None:
    """Send it `by` (rad) further, and wait until it is there."""
    to = arm.read().q + by
    arm.write(to, 0.0)
    wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "where it was sent")


def far_away(arm: UR) -> Floats:
    """Send it 3 rad further, and wait until it moves; where to."""
    to = arm.read().q + 3.0
    arm.write(to, 0.0)
    wait_until(lambda: arm.read().q[0] > 0.1, "moving")
    return to


def fails(arm: UR, says: str) -> None:
    """Read it until it raises."""
    with pytest.raises(DriverError, match=says):
        wait_until(lambda: arm.read() is None, says)


def becomes(arm: UR, so: Callable[[], Any], what: str) -> None:
    """Read it until `so`."""
    wait_until(lambda: (arm.read(), so())[1], what)


def test_by_hand() -> None:
    # Version 2: size 5, 'V', 2; start: size 3, 'S'.
    assert rtde.pack_packet(rtde.VERSION, b"\x00\x02").hex() == "0005560002"
    assert rtde.pack_packet(rtde.START).hex() == "000353"
    recipe = Recipe(1, ("a", "b", "c"), ("DOUBLE", "INT32", "VECTOR6D"))
    made = recipe.pack([1.0, -2, (0.0, 0.5, 2.0, 0.0, 0.0, 0.0)])
    numbers = "3ff0000000000000 fffffffe 0000000000000000 3fe0000000000000 4000000000000000"
    assert made.hex() == "00405501" + numbers.replace(" ", "") + 48 * "0"
    packet = take_packet(bytearray(made))
    assert packet is not None
    assert recipe.unpack(packet.payload) == {"a": 1.0, "b": -2, "c": [0.0, 0.5, 2.0, 0.0, 0.0, 0.0]}
    for bad in (packet.payload[:-1], b"\x02" + packet.payload[1:], b""):
        with pytest.raises(RtdeError):
            recipe.unpack(bad)
    assert rtde.message(b"\x05hello\x04fake\x03") == "hello" and rtde.message(b"") == ""
    buffer, found = bytearray(), []
    for byte in rtde.pack_packet(rtde.TEXT, b"abc") + rtde.pack_packet(rtde.START):
        buffer.append(byte)
        if (packet := take_packet(buffer)) is not None:
            found.append(packet)
    assert found == [rtde.Packet(rtde.TEXT, b"abc"), rtde.Packet(rtde.START, b"")], "in pieces"


def test_what_was_not_agreed() -> None:
    for data, words in (
        (b"\x01DOUBLE,NOT_FOUND", "field b is NOT_FOUND"),
        (b"\x01DOUBLE", "2 fields were asked for, 1 answered"),
        (b"", "without"),
    ):
        with pytest.raises(RtdeError, match=words):
            Recipe.of(data, ("a", "b"))


def test_noise_is_survived() -> None:
    """Random bytes, flipped packets and cut ones: either packets or an RtdeError come of them."""
    draw, taken = random.Random(0), 0
    recipe = Recipe(1, ("q", "n"), ("VECTOR6D", "INT32"))
    good = recipe.pack([(0.1,) * 6, 7])
    for k in range(100_000):
        data = bytearray(draw.randbytes(draw.randrange(64)) if k % 2 else good)
        if k % 2 == 0:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            data = data[: draw.randrange(len(data) + 1)] + good
        for _ in range(len(data) // 3 + 1):  # each packet takes three bytes or more
            try:
                if (packet := take_packet(data)) is None:
                    break
                taken += 1
                if packet.type == rtde.DATA:
                    recipe.unpack(packet.payload)
                elif packet.type in (rtde.OUTPUTS, rtde.INPUTS):
                    Recipe.of(packet.payload, ("q", "n"))
                rtde.message(packet.payload)
            except RtdeError:
                break
        else:
            assert take_packet(data) is None
    assert taken > 25_000


def test_reads_and_follows(fake: FakeUR) -> None:
    with driver(fake) as arm:
        here = arm.read()
        assert here.q.tolist() == fake.q and here.t <= time.monotonic()
        assert not here.dq.any() and not here.tau.any()
        follows(arm, np.array([0.1, -0.1, 0.2, 0.0, 0.05, 0.1]))
        assert arm.read().t > here.t and arm.width == 0.0
        assert fake.joints.resting and not fake.halted
        for bad in (np.full(6, math.nan), np.full(6, 7.0), np.zeros(7)):
            with pytest.raises(DriverError, match="outside"):
                arm.write(bad, 0.0)
    wait_until(lambda: fake.halted, "a program that was told to leave")
    assert fake.halted == "told" and fake.runtime == controller.STOPPED


def test_stop_holds_and_it_can_go_on(fake: FakeUR) -> None:
    with driver(fake) as arm:
        to = far_away(arm)
        arm.stop()
        arm.stop()
        wait_until(lambda: np.abs(arm.read().dq).max() == 0, "at rest")
        assert arm.read().q[0] < 2.9 and not fake.halted
        follows(arm, to - arm.read().q)


def test_silent_hands_stop_it(fake: FakeUR) -> None:
    """A control process that stands still: its orders end, and no other process adds one."""
    with driver(fake, watchdog=0.1) as arm:
        arm.write(arm.read().q + 4.0, 0.0)
        wait_until(lambda: fake.halted, "its own watchdog")
        assert fake.halted == "the watchdog" and fake.q[0] < 3.9
        fails(arm, "its program has stopped")


@pytest.mark.parametrize(
    ("fault", "said"),
    [("mute", "nothing heard for"), ("garble", "cannot be"), ("cut", "closed the connection")],
)
def test_faults_on_the_wire(fake: FakeUR, fault: str, said: str) -> None:
    with driver(fake, silence=0.3, patience=5.0 if fault == "garble" else PATIENT) as arm:
        arm.read()
        if fault == "cut":
            fake.cut()
        else:
            setattr(fake, fault, True)
        fails(arm, said)
        arm.stop()


def test_a_protective_stop_waits_for_an_operator(fake: FakeUR) -> None:
    with driver(fake) as arm:
        fake.bits |= 0x4
        fails(arm, r"a protective stop: clear the way, then reset \(it said: hello\)$")
        arm.write(np.array(fake.q) + 1.0, 0.0)  # nothing to follow it
        asked = ["close safety popup", "unlock protective stop"]
        assert not set(asked) & set(fake.asked)
        arm.recover()
        assert [words for words in fake.asked if words in asked] == asked
        follows(arm, 0.05)


def test_where_the_chain_gives_up_the_controller_makes_a_protective_stop(fake: FakeUR) -> None:
    with driver(fake) as arm:
        far_away(arm)
        assert arm.halt() == StopCategory.HELD
        wait_until(lambda: fake.halted and fake.joints.resting, "at rest")
        assert fake.halted == controller.PROTECTIVE and fake.q[0] < 2.9
        fails(arm, "a protective stop: clear the way, then reset")
        arm.halt()
        arm.recover()
        follows(arm, 0.05)


def test_freedrive_until_it_is_engaged(fake: FakeUR) -> None:
    with driver(fake) as arm:
        here = arm.read().q
        arm.write(here, 0.0)
        becomes(arm, lambda: fake.program is not None, "it follows")
        assert not arm.falls_when_released
        arm.release()
        becomes(arm, lambda: fake.free, "freedrive")
        led = here + 0.2
        fake.joints.q = led.tolist()  # by hand
        wait_until(lambda: np.abs(arm.read().q - led).max() < 1e-9, "led away")
        arm.engage()
        becomes(arm, lambda: not fake.free, "held")
        arm.write(led, 0.0)
        assert fake.q == pytest.approx(led.tolist()) and not fake.halted
        arm.release()
        becomes(arm, lambda: fake.free, "freedrive again")
        arm.stop()
        becomes(arm, lambda: not fake.free, "a stop holds it")


@pytest.mark.parametrize(
    ("what", "value", "says"),
    [
        ("protocol", 1, "does not speak RTDE protocol 2"),
        ("mode", 3, "not switched on"),
        ("host", "127.9.9.9", r"127\.9\.9\.9: .*30004"),
    ],
)
def test_what_does_not_start(fake: FakeUR, what: str, value: Any, says: str) -> None:
    setattr(fake, what, value)
    with pytest.raises(DriverError, match=says):
        driver(fake).connect()


def test_settings() -> None:
    for bad in ({"watchdog": 0.001}, {"joints": ["a"]}):
        with pytest.raises(ConfigError):
            parse(Config, {"host": "h", **bad}, "driver")
    with pytest.raises(ConfigError):
        parse(controller.Config, {"q": (0.0,) * 5}, "emulator")
    said = rtde.program(Config("h"))
    assert "still > 50" in said and "t=0.002, lookahead_time=0.1, gain=300" in said
    assert said.count("end\n") == 6  # of four ifs, a while and a def


def test_what_an_earlier_session_left_is_not_followed(fake: FakeUR) -> None:
    """Neither where packets arrive in pieces."""
    fake.split = True
    left = {f"input_double_register_{i}": 1.0 for i in range(24, 30)}
    fake.registers.update(left, input_int_register_24=500)
    with driver(fake) as arm:
        before = arm.read()
        wait_until(lambda: arm.read().t > before.t + 0.1, "later")
        assert arm.read().q.tolist() == before.q.tolist()
        follows(arm, 0.01)


RECEIVER = """
import sys, rtde_receive
names = ["timestamp", "actual_q", "actual_qd", "robot_mode", "safety_mode", "runtime_state"]
client = rtde_receive.RTDEReceiveInterface(sys.argv[1], 125.0, names)
print(client.getActualQ(), client.getRobotMode())
client.disconnect()
"""


@pytest.mark.skipif(find_spec("rtde_receive") is None, reason="ur_rtde is not installed")
def test_another_client_understands_the_fake(fake: FakeUR) -> None:
    # In a process of its own: it holds Python's lock while it waits.
    command = [sys.executable, "-c", RECEIVER, fake.host]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT)
    assert said.stdout.split("\n")[-2:] == [f"{fake.q} 7", ""], said.stderr


@pytest.mark.parametrize(
    ("bits", "reason"),
    [
        (1 << 3, "recovery mode"),
        (1 << 10, "safety system"),
        (1 << 10 | 1 << 5, "system's emergency stop"),
    ],
)
def test_what_its_safety_system_stops_it_for_is_named(fake: FakeUR, bits: int, reason: str) -> None:
    """The most exact reason first."""
    with driver(fake) as arm:
        fake.bits = bits
        fails(arm, reason)


def test_a_program_arrives_at_a_controller_that_reads_late_and_says_much(fake: FakeUR) -> None:
    """A connection closed with unread words is reset, and takes what was sent with it."""
    fake.busy = 0.3
    with driver(fake, patience=5.0) as arm:
        assert fake.code == rtde.program(arm.config) and arm.read() is not None


def test_freedrive_ends_where_nobody_is_heard_any_more(fake: FakeUR) -> None:
    with driver(fake, watchdog=0.5) as arm:
        arm.write(arm.read().q, 0.0)
        arm.release()
        becomes(arm, lambda: fake.free, "freedrive")
        wait_until(lambda: fake.halted == "the watchdog", "its watchdog")
        assert not fake.free


def test_force_and_currents_are_those_of_the_wire(fake: FakeUR) -> None:
    fake.force, fake.current = (1.0, -2.0, 3.0, 0.1, 0.2, 0.3), (0.5, -1.0, 1.5, 0.0, 0.0, 0.25)
    with driver(fake, torque=(12.0, 12.0, 12.0, 9.0, 9.0, 9.0)) as arm:
        state = arm.read()
    assert state.force.tolist() == [1.0, -2.0, 3.0]
    assert state.tau.tolist() == [6.0, -12.0, 18.0, 0.0, 0.0, 2.25]


def test_it_reaches_over_rtde_and_it_is_recorded(tmp_path: Path, folder: Path) -> None:
    slow = [f"robot.driver.{name}=10.0" for name in ("watchdog", "silence")]  # a busy machine
    deploy = start(tmp_path, folder, "robot=ur_sim", "demonstrator=reach", *slow)
    text = said(deploy)
    assert deploy.returncode == 0, text
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert [each["end"] for each in summary["episodes"]] == ["success"], text
    assert json.loads((out / "deployment.json").read_text())["robot"] == "ur5e"
    steps = read_episodes(out / "recording").episode(0)
    assert bool(steps["success"][-1]) and steps["action"].shape[1] == 3
    place = steps["obs/state"][:, 12:15].numpy()  # after q1 to q6 and dq1 to dq6
    assert np.linalg.norm(place[0] - [-0.4919, -0.1333, 0.4879]) < 0.06, "it began at home"
    assert np.linalg.norm(place[-1] - [-0.55, 0.1, 0.35]) < 0.06


def test_a_played_servoj_by_hand() -> None:
    """From rest, 1 rad away, lookahead 0.1 s, 100 Hz: it speeds up by 0.4 rad/s a tick to 2 rad/s,
    keeps that, then falls behind as (target - q) / lookahead, and is there exactly."""
    arm = controller.UrJoints(100.0, (0.0,) * 6)
    speeds = []
    for _ in range(400):
        arm.follow([1.0, *[0.0] * 5], 0.1)
        speeds.append(arm.dq[0])
    assert speeds[:6] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    assert max(speeds) == controller.SPEED == 2.0 and arm.q[0] == 1.0 and arm.dq[0] == 0.0
    # q' = (1 - q) / 0.1 s, in ticks of 0.01 s: falls by a tenth
    assert np.divide(speeds[61:64], speeds[60:63]) == pytest.approx(0.9)
    arm.dq[0] = 0.1
    arm.turn([0.0] * 6, 4.0)  # stopj: 0.04 rad/s a tick
    assert arm.dq[0] == pytest.approx(0.06) and arm.q[0] == pytest.approx(1.0 + 0.0006)
