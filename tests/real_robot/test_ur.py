"""The UR's two drivers, ours of RTDE and ur_rtde in its process, before a fake at the level of its
protocols, and the codec by itself. Nothing is timed."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError, parse
from embodied.real_robot.drivers.ur import rtde_codec as rtde
from embodied.real_robot.drivers.ur import ur_rtde_driver
from embodied.real_robot.drivers.ur.driver import UR, Config, program
from embodied.real_robot.drivers.ur.ur_rtde_driver import UrRtde
from embodied.real_robot.emulators.ur import controller
from embodied.real_robot.emulators.ur.controller import PROTECTIVE, STOPPED, FakeUR
from embodied.real_robot.kernel.driver import DriverError, StopCategory
from tests.builders import wait_until
from tests.real_robot.test_daemon import gone
from tests.tiers import only_all

PATIENT = 60.0
FRAMES = 100_000
needs_ur_rtde = pytest.mark.skipif(
    find_spec("rtde_control") is None, reason="ur_rtde is not installed"
)
BOTH = pytest.mark.parametrize("kind", [UR, pytest.param(UrRtde, marks=(needs_ur_rtde, only_all))])


@pytest.fixture
def fake() -> Iterator[FakeUR]:
    with FakeUR() as fake:
        yield fake


def driver(fake: FakeUR, kind: type[UR] = UR, **more: Any) -> Any:
    calm = {"frequency": 125.0, "watchdog": 20.0, "silence": 20.0, "patience": PATIENT}
    config = Config if kind is UR else ur_rtde_driver.Config
    return kind(config(fake.host, **(calm | more)))


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
    buffer, found = bytearray(), []
    for byte in rtde.pack(rtde.TEXT, b"abc") + rtde.pack(rtde.PAUSE):
        buffer.append(byte)
        if (packet := rtde.take(buffer)) is not None:
            found.append(packet)
    assert found == [rtde.Packet(rtde.TEXT, b"abc"), rtde.Packet(rtde.PAUSE, b"")], "in pieces"


def test_what_was_not_agreed() -> None:
    for data, words in (
        (b"\x01DOUBLE,NOT_FOUND", "field b is NOT_FOUND"),
        (b"\x01DOUBLE", "2 fields were asked for, 1 answered"),
        (b"", "without"),
    ):
        with pytest.raises(rtde.RtdeError, match=words):
            rtde.setup(data, ("a", "b"))


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


@BOTH
def test_reads_and_follows(fake: FakeUR, kind: type[UR]) -> None:
    with driver(fake, kind) as arm:
        here = arm.read()
        assert here.q.tolist() == fake.q and here.t <= time.monotonic()
        assert not here.dq.any() and not here.tau.any()
        to = here.q + np.array([0.1, -0.1, 0.2, 0.0, 0.05, 0.1])
        arm.write(to, 0.0)
        wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "where it was sent")
        later = arm.read()
        assert later.t > here.t and arm.width == 0.0
        wait_until(lambda: arm.read().t > later.t, "a newer measurement")
        assert fake.joints.resting and not fake.halted
        for bad in (np.full(6, math.nan), np.full(6, 7.0), np.zeros(7)):
            with pytest.raises(DriverError, match="outside"):
                arm.write(bad, 0.0)
    wait_until(lambda: fake.halted, "a program that was told to leave")
    assert fake.halted == "told" and fake.runtime == STOPPED
    assert kind is UR or fake.code.startswith("def rtde_control():")


@BOTH
def test_stop_holds_and_it_can_go_on(fake: FakeUR, kind: type[UR]) -> None:
    with driver(fake, kind) as arm:
        to = arm.read().q + 3.0
        arm.write(to, 0.0)
        wait_until(lambda: arm.read().q[0] > 0.1, "moving")
        arm.stop()
        arm.stop()
        wait_until(lambda: np.abs(arm.read().dq).max() == 0, "at rest")
        assert arm.read().q[0] < 2.9 and not fake.halted
        arm.write(to, 0.0)
        wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "there after all")


@BOTH
def test_silent_hands_stop_it(fake: FakeUR, kind: type[UR]) -> None:
    """A control process that stands still: its orders end, and no other process adds one."""
    with driver(fake, kind, watchdog=0.1 if kind is UR else 0.5) as arm:
        arm.write(arm.read().q + 4.0, 0.0)
        wait_until(lambda: fake.halted, "its own watchdog")
        assert fake.halted == "the watchdog" and fake.q[0] < 3.9
        with pytest.raises(DriverError, match="its program has stopped"):
            wait_until(lambda: arm.read() is None, "said")


@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [
        (UR, "mute", "nothing heard for"),
        (UR, "garble", "cannot be"),
        (UR, "cut", "closed the connection"),
        pytest.param(UrRtde, "garble", ".", marks=needs_ur_rtde),
        pytest.param(UrRtde, "hang", "nothing heard for", marks=needs_ur_rtde),
    ],
)
def test_faults_on_the_wire(fake: FakeUR, kind: type[UR], fault: str, said: str) -> None:
    """`hang`: the process with ur_rtde does."""
    calm = 5.0 if fault == "garble" else PATIENT
    with driver(fake, kind, silence=0.3 if kind is UR else 2.0, patience=calm) as arm:
        arm.read()
        if fault == "hang":
            os.kill(arm._process.pid, signal.SIGSTOP)
        elif fault == "cut":
            fake.cut()
        else:
            setattr(fake, fault, True)
        with pytest.raises(DriverError, match=said):
            wait_until(lambda: arm.read() is None, fault)
        arm.stop()


@BOTH
def test_a_protective_stop_waits_for_an_operator(fake: FakeUR, kind: type[UR]) -> None:
    with driver(fake, kind) as arm:
        fake.bits |= 0x4
        said = r"clear the way, then reset" + (r" \(it said: hello\)$" if kind is UR else "$")
        with pytest.raises(DriverError, match=f"a protective stop: {said}"):
            wait_until(lambda: arm.read() is None, "said")
        arm.write(np.array(fake.q) + 1.0, 0.0)  # nothing to follow it
        asked = ["close safety popup", "unlock protective stop"]
        assert not set(asked) & set(fake.asked)
        arm.recover()
        assert [words for words in fake.asked if words in asked] == asked
        to = arm.read().q + 0.05
        arm.write(to, 0.0)
        wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "it follows again")


@BOTH
def test_where_the_chain_gives_up_the_controller_makes_a_protective_stop(
    fake: FakeUR, kind: type[UR]
) -> None:
    with driver(fake, kind) as arm:
        to = arm.read().q + 3.0
        arm.write(to, 0.0)
        wait_until(lambda: arm.read().q[0] > 0.1, "moving")
        assert arm.halt() == StopCategory.HELD
        wait_until(lambda: fake.halted and fake.joints.resting, "at rest")
        assert fake.halted == PROTECTIVE and fake.q[0] < 2.9
        with pytest.raises(DriverError, match="a protective stop: clear the way, then reset"):
            wait_until(lambda: arm.read() is None, "said")
        arm.halt()
        arm.recover()
        to = arm.read().q + 0.05
        arm.write(to, 0.0)
        wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "it follows again")


@BOTH
def test_freedrive_until_it_is_engaged(fake: FakeUR, kind: type[UR]) -> None:
    with driver(fake, kind) as arm:
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


@BOTH
def test_what_does_not_start(fake: FakeUR, kind: type[UR]) -> None:
    if kind is UR:
        fake.protocol = 1
        with pytest.raises(DriverError, match="does not speak RTDE protocol 2"):
            driver(fake).connect()
        fake.protocol = 2
    fake.mode = 3
    with pytest.raises(DriverError, match="not switched on"):
        driver(fake, kind).connect()
    fake.mode, fake.host = 7, "127.9.9.9"
    with pytest.raises(DriverError, match=r"127\.9\.9\.9: .*30004"):
        driver(fake, kind).connect()


def test_settings() -> None:
    for bad in ({"lookahead": 0.3}, {"gain": 10.0}, {"watchdog": 0.001}, {"joints": ["a"]}):
        with pytest.raises(ConfigError):
            parse(Config, {"host": "h", **bad}, "driver")
    said = program(Config("h"))
    assert "still > 50" in said and "t=0.002, lookahead_time=0.1, gain=300" in said
    assert said.count("end\n") == 6  # of four ifs, a while and a def


def test_what_an_earlier_session_left_is_not_followed(fake: FakeUR) -> None:
    """Neither where packets arrive in pieces."""
    fake.split = True
    left = {f"input_double_register_{i}": 1.0 for i in range(24, 30)}
    fake.registers.values.update(left, input_int_register_24=500)
    with driver(fake) as arm:
        before = arm.read()
        wait_until(lambda: arm.read().t > before.t + 0.1, "later")
        assert arm.read().q.tolist() == before.q.tolist()
        arm.write(before.q + 0.01, 0.0)
        wait_until(lambda: abs(arm.read().q[0] - 0.01) < 1e-9, "0.01 rad away")


RECEIVER = """
import sys, rtde_receive
names = ["timestamp", "actual_q", "actual_qd", "robot_mode", "safety_mode", "runtime_state"]
client = rtde_receive.RTDEReceiveInterface(sys.argv[1], 125.0, names)
print(client.getActualQ(), client.getRobotMode())
client.disconnect()
"""


@needs_ur_rtde
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
        with pytest.raises(DriverError, match=reason):
            wait_until(lambda: arm.read() is None, "a stop")


def test_a_program_arrives_at_a_controller_that_reads_late_and_says_much(fake: FakeUR) -> None:
    """A connection closed with unread words is reset, and takes what was sent with it."""
    fake.busy = 0.3
    with driver(fake, patience=5.0) as arm:
        assert fake.code == program(arm.config) and arm.read() is not None


def test_freedrive_ends_where_nobody_is_heard_any_more(fake: FakeUR) -> None:
    with driver(fake, watchdog=0.5) as arm:
        arm.write(arm.read().q, 0.0)
        arm.release()
        wait_until(lambda: (arm.read(), fake.free)[1], "freedrive")
        wait_until(lambda: fake.halted == "the watchdog", "its watchdog")
        assert not fake.free


@needs_ur_rtde
def test_nothing_moves_before_the_first_order(fake: FakeUR) -> None:
    """And the watchdog is kept waiting until then."""
    fake.registers.values.update({f"input_double_register_{i}": 1.0 for i in range(11)})
    fake.registers.values.update(input_int_register_0=11)  # a servoj that an earlier session left
    with driver(fake, UrRtde, watchdog=2.0) as arm:
        before = arm.read()
        wait_until(lambda: arm.read().t > before.t + 3.0, "later than the watchdog waits")
        assert arm.read().q.tolist() == before.q.tolist() and not fake.halted


CLIENT = """
import sys, time
from embodied.real_robot.drivers.ur.ur_rtde_driver import Config, UrRtde

with UrRtde(Config(sys.argv[1], 125.0, watchdog=float(sys.argv[2]), patience=60.0)) as arm:
    to = arm.read().q
    to[0] = 6.0
    print(arm._process.pid, flush=True)
    while True:
        arm.write(to, 0.0)
        time.sleep(0.01)
"""


@needs_ur_rtde
@pytest.mark.parametrize(("both", "halted"), [(True, "the watchdog"), (False, "told")])
def test_a_killed_client_stops_it(fake: FakeUR, both: bool, halted: str) -> None:
    """`both`: the process of ur_rtde too, as when the power goes: the arm is on its own."""
    command = [sys.executable, "-c", CLIENT, fake.host, "1.0" if both else "20.0"]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        other = int(client.stdout.readline())
        wait_until(lambda: fake.joints.dq[0] > 0.5, "on its way")
        client.kill()
        if both:
            os.kill(other, signal.SIGKILL)
        wait_until(lambda: fake.halted and fake.joints.resting, "at rest")
        assert fake.halted == halted and fake.q[0] < 5.9
    finally:
        client.kill()
        client.communicate()


ORPHAN = """
import sys, time
from embodied.real_robot.drivers.ur.ur_rtde_driver import BEGIN, Config, UrRtde

arm = UrRtde(Config(sys.argv[1], 125.0, patience=5.0))
arm._start()
arm._wait(lambda: True, "send its state")
print(arm._process.pid, flush=True)
sys.stdin.readline()
arm._order(BEGIN)
print("begun", flush=True)
time.sleep(600)
"""


@needs_ur_rtde
def test_a_process_that_hangs_does_not_outlive_its_client(fake: FakeUR) -> None:
    """An arm that answers and sends no data: ur_rtde waits for it for ever."""
    command, pipe = [sys.executable, "-c", ORPHAN, fake.host], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as client:
        assert client.stdin is not None and client.stdout is not None
        other = int(client.stdout.readline())
        fake.mute = True
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "begun\n"
        client.kill()
    wait_until(lambda: gone(other), "the alarm ended it")


@needs_ur_rtde
def test_a_dead_process_is_told_of_and_recovered_from(fake: FakeUR) -> None:
    with driver(fake, UrRtde) as arm:
        os.kill(arm._process.pid, signal.SIGKILL)
        with pytest.raises(DriverError, match=r"the process with ur_rtde died \(exit status -9\)"):
            wait_until(lambda: arm.read() is None, "said")
        arm.stop()
        arm.recover()
        to = arm.read().q + 0.05
        arm.write(to, 0.0)
        wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "it follows again")


@needs_ur_rtde
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param("mute", "nothing heard for", marks=only_all),
        ("cut", "the connection broke|its program has stopped"),  # whichever is seen first
    ],
)
def test_ur_rtde_does_not_connect_again(fake: FakeUR, fault: str, said: str) -> None:
    """Behind our back, without a watchdog."""
    with driver(fake, UrRtde, silence=2.0, watchdog=4.0) as arm:
        asked, program = list(fake.asked), fake.program
        arm.write(arm.read().q + 0.1, 0.0)
        if fault == "cut":
            fake.cut()
        else:
            fake.mute = True
        with pytest.raises(DriverError, match=said) as error:
            wait_until(lambda: arm.read() is None, fault)
        assert "\n" not in str(error.value)
        arm.stop()
        wait_until(lambda: fake.halted, "the arm stops by itself")
        assert fake.asked == asked and fake.program is program
        fake.mute = False
        arm.recover()
        arm.read()


@needs_ur_rtde
def test_what_does_not_start_with_ur_rtde(fake: FakeUR, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(controller.SAID, "is in remote control", "false")
        with pytest.raises(DriverError, match="enable remote control"):
            driver(fake, UrRtde).connect()
    fake.mute = True
    mute = driver(fake, UrRtde, patience=3.0)
    with pytest.raises(DriverError, match=r"did not (send its state|return) within 3 s"):
        mute.connect()
    assert mute._process is None
    monkeypatch.setitem(sys.modules, "rtde_control", None)
    with pytest.raises(DriverError, match=r"not installed; type: pip install 'ur-rtde>=1\.6"):
        driver(fake, UrRtde).connect()


@BOTH
def test_force_and_currents_are_those_of_the_wire(fake: FakeUR, kind: type[UR]) -> None:
    fake.force, fake.current = (1.0, -2.0, 3.0, 0.1, 0.2, 0.3), (0.5, -1.0, 1.5, 0.0, 0.0, 0.25)
    with driver(fake, kind, torque=(12.0, 12.0, 12.0, 9.0, 9.0, 9.0)) as arm:
        state = arm.read()
    assert state.force.tolist() == [1.0, -2.0, 3.0]
    assert state.tau.tolist() == [6.0, -12.0, 18.0, 0.0, 0.0, 2.25]
