"""Chaos: what goes wrong is done to a bridge at work, and its own records say what came of it.

Everything is a process: daemon, control, policy; the arm is MuJoCo, or servos on a pseudo-terminal.
`python -m tests.real_robot.safety_page` does all of it and writes `docs/safety.md`.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pytest

from embodied.core.build import allow, build
from embodied.core.checkpoint import save
from embodied.core.policy import Policy
from embodied.core.spec import Leaf
from embodied.embodiments import fr3
from embodied.real_robot.assemble import open_channels, open_flight_recorder
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.emulators.servos.bus import FakeBus
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.checks import FreshConfig, Heartbeat
from embodied.real_robot.kernel.mailbox import memory_folder
from embodied.real_robot.kernel.messages import Mode
from tests.builders import node_of
from tests.real_robot.test_daemon import HERTZ, PATIENT, Bridge, boxed, gone, simulated, until
from tests.real_robot.test_decide import SPEC
from tests.real_robot.trouble import Trouble

SITE = Path(__file__).parent / "chaos_site"
FAST, FAST_SERVOS, STILL = 0.5, 0.15, 0.02  # rad/s
NEAR, LOOKED = 5e-4, 0.3  # rad; s that have to be quiet at the end of the records
TICK = 4096 / (2 * np.pi)  # of a servo, per rad
ZEROS = np.rint(2048 - (fr3.LOWER + fr3.UPPER) / 2 * TICK)
RETRIES = 3


@dataclass(frozen=True)
class Settings:
    """Of a scene; times in s."""

    fresh: FreshConfig  # of the deployment
    paused: float  # how long a process is
    timeout: float  # of one exchange on a servo bus
    watchdog: float  # of its servos
    silence: float  # of a radio, that is a lost link
    hover: float  # how long a drone does that nobody moves
    beat: Heartbeat  # of the deployment
    hung: int  # how long a daemon is


@dataclass(frozen=True)
class Blow:
    """`done` (in the scene `on`) says what `strike` does, and `stops` what stops the arm. `strike`
    returns the time from which that counts, if that is not when it was called.

    The arm then ends `latched`, or at rest and free to be started again (`rests`), or `goes on`, or
    nobody of ours is left to move it (`lost`)."""

    stops: str
    strike: Callable[[Scene], float | None]
    within: Callable[[Settings], tuple[float, float]]  # s until it is at rest, and latched
    reason: str | tuple[str, ...] = ""  # a part of what is logged, or several: chance decides
    ends: Literal["latched", "rests", "goes on", "lost"] = "latched"
    saved: bool = True  # whether a black box has to hold it
    mend: Callable[[Scene], object] = lambda scene: scene.trouble.end()
    done: str = ""
    on: str = "arm"


def on(place: str, blows: dict[str, Blow]) -> tuple[Blow, ...]:
    """Those blows, by what is done, in the scene of that name and in this order."""
    return tuple(replace(blow, done=done, on=place) for done, blow in blows.items())


@dataclass(frozen=True)
class Outcome:
    """What came of a blow at time `began`."""

    still: float | None  # s until the arm was at rest (None: it never was)
    latched: float | None  # s until only a reset led on (None: it never did)
    reason: str
    whole: bool  # no tick is missing in what was recorded
    records: Any = field(repr=False)
    began: float


class Watch:
    """Looks, again and again in a thread of its own, whoever else still does."""

    every = 0.004  # s

    def __init__(self) -> None:
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.done.wait(self.every):
            self.look()

    def look(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Safe to call twice."""
        self.done.set()
        self.thread.join()

    def still(self, began: float) -> float | None:
        """s from `began` until nothing moved any more; None: something still does."""
        raise NotImplementedError


class Scene:
    """A bridge at work on an arm, and what can be done to it. `after`: s for which it is looked at
    when everything should be over."""

    after = 1.0

    def __init__(self, folder: Path, settings: Settings, bus: FakeBus | None = None) -> None:
        self.folder, self.settings, self.bus = folder, settings, bus
        self.trouble = Trouble(folder / "trouble", create=True)
        self.deployment = self.deployed()
        self.deployment.write(folder)
        self.bridge = self.bridged()
        self.unplugged = False
        self.fast = FAST if bus is None else FAST_SERVOS
        self.lines: list[socket.socket] = []
        self.said = ""  # what a strike was answered

    def deployed(self) -> Deployment:
        return deployment(self.folder, self.settings, self.bus, self.policy())

    def bridged(self) -> Bridge:
        """A daemon at work on the deployment, and whoever started it."""
        return Bridge(self.folder)

    def policy(self) -> dict[str, Any]:
        """The node of what moves the arm."""
        trouble = str(self.folder / "trouble")
        return {"_target_": "tests.real_robot.troubled.Sway", "trouble": trouble}

    def running(self) -> dict[str, Any]:
        return self.bridge.running()

    def watch(self) -> Watch | None:
        """None: the records say it."""
        return None if self.bus is None else Watched(self)

    def settle(self, seconds: float) -> None:
        """What should take so many s has the time."""
        time.sleep(max(0.0, seconds))

    def moving(self) -> dict[str, Any]:
        """Running, and fast just now."""
        deadline, fast = time.monotonic() + PATIENT, self.fast
        while True:
            status = self.running()
            state = open_channels(self.deployment, self.folder).state
            while not state.receive() or state.fields["mode"] == Mode.RUNNING:
                if float(np.abs(state.fields["dq"]).max()) > fast:
                    return status
                assert time.monotonic() < deadline, "the arm never moved"
                time.sleep(0.003)

    def send(self, name: str, number: signal.Signals) -> None:
        """A signal to the control or the policy process."""
        os.kill(self.bridge.status[name]["pid"], number)

    def pause(self, name: str) -> None:
        pid = self.bridge.status[name]["pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.settings.paused)
        os.kill(pid, signal.SIGCONT)

    def records(self) -> Any:
        """What the control process recorded; the ring outlives it."""
        ring = open_flight_recorder(self.deployment, self.folder)
        records = ring.records()
        ring.close()
        return records

    def close(self) -> None:
        for line in self.lines:
            line.close()
        self.bridge.process.terminate()
        assert self.bridge.process.wait(PATIENT) == 0


@contextmanager
def place() -> Iterator[Path]:
    """A folder in memory, as for a real arm; nothing of it stays."""
    paths = (str(SITE), os.getcwd(), os.environ.get("PYTHONPATH", ""))
    with (
        TemporaryDirectory(dir=memory_folder(), prefix="embodied-chaos-") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("TROUBLE", str(Path(name) / "trouble"))
        yield Path(name)


@contextmanager
def scene(settings: Settings, bus: bool = False, kind: type[Scene] = Scene) -> Iterator[Scene]:
    """Of an arm (`kind`), or of servos on a `bus`."""
    ticks = (ZEROS + fr3.HOME * TICK).tolist()
    with (
        place() as folder,
        FakeBus("dynamixel", ticks) if bus else nullcontext() as servos,
        closing(kind(folder, settings, servos)) as made,
    ):
        yield made


def deployment(
    folder: Path, settings: Settings, bus: FakeBus | None, node: dict[str, Any]
) -> Deployment:
    """The policy `node`, which goes on for ever, on the simulated arm or on servos that turn like
    its joints."""
    allow("tests")

    def troubled(name: str, **more: float) -> dict[str, Any]:
        target = f"tests.real_robot.troubled.Troubled{name}"
        return {"_target_": target, "trouble": str(folder / "trouble"), **more}

    spec = SPEC.with_obs(front=Leaf((8, 8, 3), "uint8", 0, 255))
    policy = build(node, Policy, spec=spec)
    fresh, driver = settings.fresh, troubled("Sim", noise=1e-4)
    if bus is not None:
        fresh = replace(fresh, frozen=0)  # servos measure whole ticks: one at rest repeats itself
        wait = {"timeout": settings.timeout, "watchdog": settings.watchdog}
        driver = servos(bus.path, "dynamixel", retries=RETRIES, **wait)
    return simulated(
        folder,
        driver=driver,
        controller=troubled("Delta"),
        policy=str(save(folder / "policy" / "0", policy, 0)),
        fresh=fresh,
        heartbeat=settings.beat,
        cameras={"front": troubled("Camera")},
        picture=settings.fresh.hold,
        seconds=30.0,
    )


def servos(port: str, protocol: str = "dynamixel", **settings: float) -> dict[str, Any]:
    """Seven of them on the bus at `port`, by the driver for real ones."""
    joints = [
        {"name": name, "id": i, "low": 0, "high": 4095, "zero": int(zero)}
        for i, (name, zero) in enumerate(zip(fr3.JOINTS, ZEROS, strict=True), 1)
    ]
    how = {"protocol": protocol, "port": port, "joints": joints, **settings}
    return node_of("real_robot.drivers.servos.driver.ServoBus", **how)


def suffer(scene: Scene, blow: Blow) -> Outcome:
    """Strike while the arm moves, wait for how it ends, and read what the records say."""
    status = scene.moving()
    watched = scene.watch()
    began = time.monotonic()
    try:
        counted = blow.strike(scene)
        began = began if counted is None else counted
        reason = waited(scene, blow.ends, status)
        ended = time.monotonic() - began
        scene.settle(scene.after + max(blow.within(scene.settings)) - ended)
        records = scene.records()
        seen = blow.ends != "lost"  # whoever recorded went when the commands were at rest
        still = rest(records, began, seen) if watched is None else watched.still(began)
    finally:
        blow.mend(scene)
    expected = (blow.reason,) if isinstance(blow.reason, str) else blow.reason
    assert any(part in reason for part in expected), reason
    if blow.ends == "goes on":
        modes = records["mode"][records["now"] > began]
        assert (modes == Mode.RUNNING).all(), f"it did not go on: modes {np.unique(modes)}"
        return Outcome(None, None, reason, _whole(records), records, began)
    latched = latch(records, began)
    whole = _whole(records)
    if blow.saved:
        log = (scene.folder / "daemon.log").read_text()
        assert reason in log, f"{reason!r} is not in the log"
        fault = b"" if blow.ends == "lost" else reason.encode()
        box = until(lambda: boxed(Path(scene.deployment.records), fault), "a black box")
        whole = whole and _whole(box) and bool((box["mode"] == Mode.RUNNING).any())
    took = ended if latched is None else latched
    return Outcome(still, took, reason, whole, records, began)


def waited(scene: Scene, ends: str, before: dict[str, Any]) -> str:
    """Why it ended so, once it has."""
    bridge = scene.bridge
    if ends == "latched":
        return bridge.mode("ESTOP")["fault"]
    if ends == "rests":
        status = bridge.mode("IDLE")
        return status["stopped"] or status["ended"]
    if ends == "goes on":
        status = bridge.ticks(150)
        assert status["mode"] == "RUNNING", status["fault"]
        return scene.said
    until(lambda: gone(before["control"]["pid"]), "the control process is gone")
    if bridge.process.poll() is None:
        return bridge.mode("DISCONNECTED")["fault"]
    return bytes(scene.records()["fault"][-1]).decode()


def _whole(records: Any) -> bool:
    return len(records) > 10 and bool((np.diff(records["tick"]) == 1).all())


def rest(records: Any, began: float, seen: bool) -> float | None:
    """s from `began` until neither the commands nor (`seen`) the arm moved any more; None: they
    still do. What a sensor says that is stuck or blind does not count, and neither does a
    set-point that follows the noise of a sensor by less than `NEAR`.
    """
    now, sent = steady(records["now"], began), records["sent"]
    if not seen:  # whoever recorded went when the commands were at rest
        moving = np.abs(np.diff(sent, axis=0)).max(1) * HERTZ > STILL / 10
        last = int(np.flatnonzero(moving)[-1]) + 1
        return None if last + 1 >= len(now) else max(0.0, float(now[last]) - began)
    speed, q = np.abs(records["dq"]).max(1)[1:], records["q"]
    lies = (np.diff(q, axis=0) == 0).all(1) | np.isnan(q[1:]).any(1)
    away = np.abs(sent - sent[-1]).max(1)[1:] > NEAR
    last = int(np.flatnonzero(away | (~lies & (speed > STILL)))[-1]) + 1
    return None if now[last] > now[-1] - LOOKED else max(0.0, float(now[last]) - began)


def latch(records: Any, began: float) -> float | None:
    """s from `began` until a reset was needed; None: it never was."""
    now = steady(records["now"], began)
    found = np.flatnonzero((records["mode"] == Mode.ESTOP) & (now > began - 1 / HERTZ))
    return max(0.0, float(now[found[0]]) - began) if len(found) else None


def steady(now: Floats, true: float) -> Floats:
    """Times in s; the jumps of their clock are taken out, and they are right around `true`."""
    steps = np.diff(now, prepend=now[:1])
    even = np.cumsum(np.where(np.abs(steps) > 900, 1 / HERTZ, steps))
    near = int(np.argmin(np.abs(now - true)))
    return even - even[near] + now[near]


class Watched(Watch):
    """Where the servos themselves are."""

    def __init__(self, scene: Scene) -> None:
        assert scene.bus is not None
        self.scene, self.servos = scene, scene.bus.servos.values()
        self.seen: list[tuple[float, list[float]]] = []
        super().__init__()

    def look(self) -> None:
        now = time.monotonic()
        if self.scene.unplugged:  # nobody else moves them on
            for servo in self.servos:
                servo.move(now)
        self.seen.append((now, [servo.at for servo in self.servos]))

    def still(self, began: float) -> float | None:
        """By 0.2 degrees."""
        self.end()
        times, at = np.array([t for t, _ in self.seen]), np.array([each for _, each in self.seen])
        last = int(np.flatnonzero(np.abs(at - at[-1]).max(1) > 2.0)[-1]) + 1
        return None if last + 10 >= len(times) else max(0.0, float(times[last]) - began)
