"""The UR's other driver: ur_rtde itself, in its process, before a played arm. Nothing is timed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from embodied.real_robot.drivers.driver import DriverError
from embodied.real_robot.drivers.ur.ur_rtde_driver import Config, UrRtde
from embodied.real_robot.emulators.ur import clients
from embodied.real_robot.emulators.ur.controller import STOPPED
from tests.builders import wait_until
from tests.fakes.rtde import FakeUR
from tests.real_robot.test_daemon import gone
from tests.real_robot.test_ur import PATIENT

pytest.importorskip("rtde_control", reason="ur_rtde is not installed")


@pytest.fixture
def fake() -> Iterator[FakeUR]:
    with FakeUR() as fake:
        yield fake


def config(fake: FakeUR, **more: Any) -> Config:
    calm: dict[str, Any] = {
        "frequency": 125.0,
        "watchdog": 20.0,
        "silence": 20.0,
        "patience": PATIENT,
    }
    return Config(fake.host, **(calm | more))


def process(arm: UrRtde) -> int:
    """That of ur_rtde."""
    assert arm._process is not None
    return arm._process.pid


def test_reads_and_follows(fake: FakeUR) -> None:
    with UrRtde(config(fake)) as arm:
        here = arm.read()
        assert here.q.tolist() == fake.q and not here.dq.any() and not here.tau.any()
        to = here.q + np.array([0.1, -0.1, 0.2, 0.0, 0.05, 0.1])
        arm.write(to, 0.0)
        wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "where it was sent")
        later = arm.read()
        assert later.t > here.t and arm.width == 0.0
        wait_until(lambda: arm.read().t > later.t, "a newer measurement")
        assert fake.joints.resting and not fake.halted
    assert fake.halted == "told" and fake.runtime == STOPPED
    assert fake.code.startswith("def rtde_control():")


def test_nothing_moves_before_the_first_order(fake: FakeUR) -> None:
    """And the watchdog is kept waiting until then."""
    fake.registers.values.update({f"input_double_register_{i}": 1.0 for i in range(11)})
    fake.registers.values.update(input_int_register_0=11)  # a servoj that an earlier session left
    with UrRtde(config(fake, watchdog=2.0)) as arm:
        before = arm.read()
        wait_until(lambda: arm.read().t > before.t + 3.0, "later than the watchdog waits")
        assert arm.read().q.tolist() == before.q.tolist() and not fake.halted


def test_stop_holds_and_it_can_go_on(fake: FakeUR) -> None:
    with UrRtde(config(fake)) as arm:
        to = arm.read().q + 3.0
        arm.write(to, 0.0)
        wait_until(lambda: arm.read().q[0] > 0.1, "moving")
        arm.stop()
        arm.stop()
        wait_until(lambda: np.abs(arm.read().dq).max() == 0, "at rest")
        assert arm.read().q[0] < 2.9 and not fake.halted
        arm.write(to, 0.0)
        wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "there after all")


def test_silent_hands_stop_it(fake: FakeUR) -> None:
    """A control process that stands still: its orders end, and the other process adds none."""
    with UrRtde(config(fake, watchdog=0.5)) as arm:
        arm.write(arm.read().q + 4.0, 0.0)
        wait_until(lambda: fake.halted, "its own watchdog")
        assert fake.halted == "the watchdog" and fake.q[0] < 3.9
        with pytest.raises(DriverError, match="its program has stopped"):
            wait_until(lambda: arm.read() is None, "said")


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


def test_a_dead_process_is_told_of_and_recovered_from(fake: FakeUR) -> None:
    with UrRtde(config(fake)) as arm:
        os.kill(process(arm), signal.SIGKILL)
        with pytest.raises(DriverError, match=r"the process with ur_rtde died \(exit status -9\)"):
            wait_until(lambda: arm.read() is None, "said")
        arm.stop()
        arm.recover()
        to = arm.read().q + 0.05
        arm.write(to, 0.0)
        wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "it follows again")


def test_a_process_that_hangs_is_told_of(fake: FakeUR) -> None:
    with UrRtde(config(fake, silence=2.0)) as arm:
        arm.read()
        os.kill(process(arm), signal.SIGSTOP)
        with pytest.raises(DriverError, match="nothing heard for"):
            wait_until(lambda: arm.read() is None, "said")


@pytest.mark.parametrize(
    ("fault", "said"), [("mute", "nothing heard for"), ("cut", "the connection broke")]
)
def test_faults_on_the_wire(fake: FakeUR, fault: str, said: str) -> None:
    """ur_rtde does not connect again behind our back, without a watchdog."""
    with UrRtde(config(fake, silence=2.0, watchdog=4.0)) as arm:
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


def test_nonsense_is_an_error(fake: FakeUR) -> None:
    with UrRtde(config(fake, silence=2.0, patience=5.0)) as arm:
        fake.garble = True
        with pytest.raises(DriverError):
            wait_until(lambda: arm.read() is None, "said")


def test_a_protective_stop_waits_for_an_operator(fake: FakeUR) -> None:
    with UrRtde(config(fake)) as arm:
        fake.bits |= 0x4
        with pytest.raises(DriverError, match=r"a protective stop: clear the way, then reset$"):
            wait_until(lambda: arm.read() is None, "said")
        arm.write(np.array(fake.q) + 1.0, 0.0)  # nothing to follow it
        assert "unlock protective stop" not in fake.asked
        arm.recover()
        assert "unlock protective stop" in fake.asked
        to = arm.read().q + 0.05
        arm.write(to, 0.0)
        wait_until(lambda: np.abs(arm.read().q - to).max() < 1e-9, "it follows again")


def test_a_program_that_somebody_stopped(fake: FakeUR) -> None:
    with UrRtde(config(fake)) as arm:
        fake.runtime = STOPPED
        with pytest.raises(DriverError, match="its program has stopped"):
            wait_until(lambda: arm.read() is None, "said")


def test_what_does_not_start(fake: FakeUR, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.mode = 3
    with pytest.raises(DriverError, match="not switched on"):
        UrRtde(config(fake)).connect()
    fake.mode = 7
    with pytest.raises(DriverError, match=r"127\.9\.9\.9: .*30004"):
        UrRtde(Config("127.9.9.9", patience=PATIENT)).connect()
    with monkeypatch.context() as patch:
        patch.setitem(clients.SAID, "is in remote control", "false")
        with pytest.raises(DriverError, match="enable remote control"):
            UrRtde(config(fake)).connect()
    fake.mute = True
    mute = UrRtde(config(fake, patience=3.0))
    with pytest.raises(DriverError, match=r"did not (send its state|return) within 3 s"):
        mute.connect()
    assert mute._process is None
    monkeypatch.setitem(sys.modules, "rtde_control", None)
    with pytest.raises(DriverError, match=r"not installed; type: pip install 'ur-rtde>=1\.6"):
        UrRtde(config(fake)).connect()


def test_commands_that_cannot_be(fake: FakeUR) -> None:
    with UrRtde(config(fake)) as arm:
        for bad in (np.full(6, np.nan), np.full(6, 7.0), np.zeros(7)):
            with pytest.raises(DriverError, match="outside"):
                arm.write(bad, 0.0)


def test_freedrive_until_it_is_engaged(fake: FakeUR) -> None:
    with UrRtde(config(fake)) as arm:
        here = arm.read().q
        arm.write(here, 0.0)
        arm.release()
        wait_until(lambda: (arm.read(), fake.free)[1], "freedrive")
        led = here + 0.2
        fake.joints.q = led.tolist()  # by hand
        wait_until(lambda: np.abs(arm.read().q - led).max() < 1e-9, "led away")
        arm.engage()
        wait_until(lambda: (arm.read(), not fake.free)[1], "held")
        assert fake.q == pytest.approx(led.tolist()) and not fake.halted
