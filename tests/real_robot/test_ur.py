"""The UR's driver before a fake at the level of its protocols, and the codec by itself."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.real_robot.drivers.driver import DriverError
from embodied.real_robot.drivers.ur import rtde_codec as rtde
from embodied.real_robot.drivers.ur.driver import UR, Config, program
from tests.builders import wait_until
from tests.fakes.rtde import FakeUR

PATIENT = 60.0
FRAMES = 100_000


@pytest.fixture
def fake() -> Iterator[FakeUR]:
    with FakeUR() as fake:
        yield fake


def config(fake: FakeUR, **more: Any) -> Config:
    calm = {"frequency": 125.0, "watchdog": 20.0, "silence": 20.0, "patience": PATIENT}
    return Config(fake.host, **(calm | more))


def test_by_hand() -> None:
    # Version 2: size 5, 'V', 2; start: size 3, 'S'.
    assert rtde.pack(rtde.VERSION, b"\x00\x02").hex() == "0005560002"
    assert rtde.pack(rtde.START).hex() == "000353"
    recipe = rtde.Recipe(1, ("a", "b", "c"), ("DOUBLE", "INT32", "VECTOR3D"))
    made = recipe.pack([1.0, -2, (0.0, 0.5, 2.0)])
    assert made.hex() == (
        "00285501" + " 3ff0000000000000 fffffffe00000000 000000003fe00000 0000000040000000 00000000"
    ).replace(" ", "")
    packet = rtde.take(bytearray(made))
    assert packet is not None
    assert recipe.unpack(packet.payload) == {"a": 1.0, "b": -2, "c": (0.0, 0.5, 2.0)}
    for bad in (packet.payload[:-1], b"\x02" + packet.payload[1:], b""):
        with pytest.raises(rtde.RtdeError):
            recipe.unpack(bad)
    assert rtde.text(b"\x05hello\x04fake\x03") == "hello" and rtde.text(b"") == ""


def test_a_packet_in_pieces() -> None:
    buffer, whole = bytearray(), rtde.pack(rtde.TEXT, b"abc") + rtde.pack(rtde.PAUSE)
    found = []
    for byte in whole:
        buffer.append(byte)
        if (packet := rtde.take(buffer)) is not None:
            found.append(packet)
    assert found == [rtde.Packet(rtde.TEXT, b"abc"), rtde.Packet(rtde.PAUSE, b"")]


def test_what_was_not_agreed() -> None:
    with pytest.raises(rtde.RtdeError, match="field b is NOT_FOUND"):
        rtde.setup(b"\x01DOUBLE,NOT_FOUND", ("a", "b"))
    with pytest.raises(rtde.RtdeError, match="2 fields were asked for, 1 answered"):
        rtde.setup(b"\x01DOUBLE", ("a", "b"))
    with pytest.raises(rtde.RtdeError, match="without"):
        rtde.setup(b"", ("a",))


def noise(count: int) -> int:
    """Random bytes, flipped packets and cut ones into the codec: how many packets came of it."""
    draw, taken = random.Random(0), 0
    recipe = rtde.Recipe(1, ("q", "n"), ("VECTOR6D", "INT32"))
    good = recipe.pack([(0.1,) * 6, 7])
    for k in range(count):
        data = bytearray(draw.randbytes(draw.randrange(64)) if k % 2 else good)
        if k % 2 == 0:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            data = data[: draw.randrange(len(data) + 1)] + good
        for _ in range(len(data) // 3 + 1):  # each packet takes three bytes or more
            try:
                if (packet := rtde.take(data)) is None:
                    break
                taken += 1
                if packet.type == rtde.DATA:
                    recipe.unpack(packet.payload)
                elif packet.type in (rtde.OUTPUTS, rtde.INPUTS):
                    rtde.setup(packet.payload, ("q", "n"))
                rtde.text(packet.payload)
            except rtde.RtdeError:
                break
        else:
            assert rtde.take(data) is None
    return taken


def test_noise_is_survived() -> None:
    assert noise(FRAMES) > FRAMES // 4


def test_reads_and_follows(fake: FakeUR) -> None:
    with UR(config(fake)) as arm:
        here = arm.read()
        assert here.q.tolist() == fake.q and here.t <= time.monotonic()
        to = here.q + 0.1
        arm.write(to, 0.0)
        wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "0.1 rad away")
        assert arm.width == 0.0
    wait_until(lambda: fake.halted, "a program that was told to leave")
    assert fake.halted == "told"


def test_split_packets(fake: FakeUR) -> None:
    fake.split = True
    with UR(config(fake)) as arm:
        arm.write(arm.read().q + 0.05, 0.0)
        wait_until(lambda: abs(arm.read().q[0] - 0.05) < 1e-9, "0.05 rad away")


def test_stop_holds(fake: FakeUR) -> None:
    with UR(config(fake)) as arm:
        arm.write(arm.read().q + 3.0, 0.0)
        wait_until(lambda: arm.read().q[0] > 0.1, "moving")
        arm.stop()
        arm.stop()
        wait_until(lambda: np.abs(arm.read().dq).max() == 0, "at rest")
        assert arm.read().q[0] < 2.9


def test_silent_hands_stop_it(fake: FakeUR) -> None:
    with UR(config(fake, watchdog=0.1)) as arm:
        arm.write(arm.read().q + 3.0, 0.0)
        wait_until(lambda: fake.halted, "its own watchdog")
        assert fake.halted == "the watchdog" and fake.q[0] < 2.9
        with pytest.raises(DriverError, match="its program has stopped"):
            wait_until(lambda: arm.read() is None, "said")


@pytest.mark.parametrize(
    ("fault", "said"),
    [("mute", "nothing heard for"), ("garble", "cannot be"), ("cut", "closed the connection")],
)
def test_faults_on_the_wire(fake: FakeUR, fault: str, said: str) -> None:
    with UR(config(fake, silence=0.3)) as arm:
        if fault == "cut":
            fake.cut()
        else:
            setattr(fake, fault, True)
        with pytest.raises(DriverError, match=said):
            wait_until(lambda: arm.read() is None, fault)
        arm.stop()


def test_a_protective_stop_waits_for_an_operator(fake: FakeUR) -> None:
    with UR(config(fake)) as arm:
        fake.bits |= 0x4
        with pytest.raises(
            DriverError, match=r"a protective stop: .*then reset \(it said: hello\)"
        ):
            wait_until(lambda: arm.read() is None, "said")
        assert fake.asked == []
        arm.recover()
        assert fake.asked == ["close safety popup", "unlock protective stop"]
        arm.read()


def test_what_an_earlier_session_left_is_not_followed(fake: FakeUR) -> None:
    left = {f"input_double_register_{i}": 1.0 for i in range(24, 30)}
    fake.registers.values.update(left, input_int_register_24=500)
    with UR(config(fake)) as arm:
        before = arm.read()
        wait_until(lambda: arm.read().t > before.t + 0.1, "later")
        assert arm.read().q.tolist() == before.q.tolist()
        arm.write(before.q + 0.01, 0.0)
        wait_until(lambda: abs(arm.read().q[0] - 0.01) < 1e-9, "0.01 rad away")


def test_what_does_not_start(fake: FakeUR) -> None:
    fake.mode = 3
    with pytest.raises(DriverError, match="not switched on"):
        UR(config(fake)).connect()
    fake.mode, fake.protocol = 7, 1
    with pytest.raises(DriverError, match="does not speak RTDE protocol 2"):
        UR(config(fake)).connect()
    with pytest.raises(DriverError, match="port 30004"):
        UR(Config("127.9.9.9", patience=1.0)).connect()


def test_commands_that_cannot_be(fake: FakeUR) -> None:
    with UR(config(fake)) as arm:
        for bad in (np.full(6, math.nan), np.full(6, 7.0), np.zeros(7)):
            with pytest.raises(DriverError, match="outside"):
                arm.write(bad, 0.0)


def test_settings() -> None:
    good = Config("h")
    for bad in ({"lookahead": 0.3}, {"gain": 10.0}, {"watchdog": 0.001}, {"joints": ("a",)}):
        with pytest.raises(ConfigError):
            replace(good, **bad)
    said = program(good)
    assert "still > 50" in said and "t=0.002, lookahead_time=0.1, gain=300" in said
    assert said.count("end\n") == 6  # of four ifs, a while and a def


CLIENT = """
import sys, rtde_receive
names = ["timestamp", "actual_q", "actual_qd", "robot_mode", "safety_mode", "runtime_state"]
client = rtde_receive.RTDEReceiveInterface(sys.argv[1], 125.0, names)
print(client.getActualQ(), client.getRobotMode())
client.disconnect()
"""


def test_another_client_understands_the_fake(fake: FakeUR) -> None:
    pytest.importorskip("rtde_receive", reason="ur_rtde is not installed")
    # In a process of its own: it holds Python's lock while it waits.
    command = [sys.executable, "-c", CLIENT, fake.host]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT)
    assert said.stdout.split("\n")[-2:] == [f"{fake.q} 7", ""], said.stderr


def test_a_double_is_big_endian() -> None:
    assert struct.pack(">d", 1.0) == bytes.fromhex("3ff0000000000000")


@pytest.mark.parametrize(("bit", "reason"), [(3, "recovery mode"), (10, "safety system")])
def test_every_bit_of_its_safety_system_that_stops_it_is_named(
    fake: FakeUR, bit: int, reason: str
) -> None:
    with UR(config(fake)) as arm:
        fake.bits = 1 << bit

        def said() -> bool:
            try:
                arm.read()
            except DriverError as error:
                return reason in str(error)
            return False

        wait_until(said, reason)
        fake.bits = 1


def test_a_more_exact_reason_comes_before_a_stop_by_the_safety_system(fake: FakeUR) -> None:
    with UR(config(fake)) as arm:
        fake.bits = 1 << 10 | 1 << 5
        with pytest.raises(DriverError, match="system's emergency stop"):
            wait_until(lambda: arm.read() is None, "a stop")


def test_a_program_arrives_at_a_controller_that_reads_late_and_says_much(fake: FakeUR) -> None:
    """A connection closed with unread words is reset, and takes what was sent with it."""
    fake.busy = 0.3
    with UR(config(fake, patience=5.0)) as arm:
        assert fake.code == program(arm.config) and arm.read() is not None


def test_freedrive_until_it_is_engaged(fake: FakeUR) -> None:
    with UR(config(fake)) as arm:
        here = arm.read().q
        arm.write(here, 0.0)
        wait_until(lambda: fake.program is not None and arm.read() is not None, "it follows")
        assert not arm.falls_when_released
        arm.release()
        wait_until(lambda: (arm.read(), fake.free)[1], "freedrive")
        led = here + 0.2
        fake.joints.q = led.tolist()  # by hand
        wait_until(lambda: np.abs(arm.read().q - led).max() < 1e-9, "led away")
        arm.engage()
        wait_until(lambda: (arm.read(), not fake.free)[1], "held")
        arm.write(led, 0.0)
        assert fake.q == pytest.approx(led.tolist()) and not fake.halted
        arm.release()
        wait_until(lambda: (arm.read(), fake.free)[1], "freedrive again")
        arm.stop()
        wait_until(lambda: (arm.read(), not fake.free)[1], "a stop holds it")


def test_freedrive_ends_where_nobody_is_heard_any_more(fake: FakeUR) -> None:
    with UR(config(fake, watchdog=0.5)) as arm:
        arm.write(arm.read().q, 0.0)
        arm.release()
        wait_until(lambda: (arm.read(), fake.free)[1], "freedrive")
        wait_until(lambda: fake.halted == "the watchdog", "its watchdog")
        assert not fake.free
