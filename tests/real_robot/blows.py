"""Blows: what may go wrong with a bridge at work, what stops the arm then, and in how long."""

from __future__ import annotations

import os
import resource
import signal
import time

from embodied.real_robot.daemon.requests import MOST_BYTES, Request, Verb
from embodied.real_robot.emulators.servos.bus import Faults
from embodied.real_robot.safety.checks import FreshConfig, Heartbeat
from tests.real_robot.chaos import RETRIES, Blow, Scene, Settings
from tests.real_robot.test_control import LIMITS
from tests.real_robot.test_daemon import HERTZ, raw, until
from tests.real_robot.test_decide import SPEC

CAREFUL = FreshConfig(0.3, 1.0, 0.2, frozen=20, pause=0.15)
TABLE = Settings(CAREFUL, 0.2, 0.01, 0.2, 0.5, 1.0, Heartbeat())
"""What one would set for an arm."""
PATIENTLY = FreshConfig(1.0, 3.0, 2.0, frozen=30, pause=1.5)
BUSY = Settings(PATIENTLY, 2.0, 0.2, 1.5, 2.0, 1.0, Heartbeat(2.0, 6.0))
"""For a machine that does much else at the same time, as those that run tests do."""
SETTLE = 0.3  # s: an arm that springs hold comes to rest a little after its commands do
BRAKE = SETTLE + max(
    v / a + a / j for v, a, j in zip(LIMITS.velocity, LIMITS.acceleration, LIMITS.jerk, strict=True)
)
TURN = 2 / HERTZ
SAY = 0.5  # s that the daemon may take to pass a wish on
HOUR = 3600.0
SILENT = 4  # id of a servo


def flood(scene: Scene) -> float:
    """A crowd, garbage and more requests than one may make; then somebody presses stop."""
    for junk in (b"hello\n" * 50, b"x" * (MOST_BYTES + 1), os.urandom(4000)):
        line = raw(scene.bridge)
        line.sendall(junk)
        scene.lines.append(line)
    scene.lines += [raw(scene.bridge) for _ in range(100)]
    line = raw(scene.bridge)
    line.sendall(b"".join(Request(n, time.monotonic(), Verb.STATUS).line() for n in range(1, 200)))
    scene.lines.append(line)
    return press(scene)


def darken(scene: Scene) -> None:
    """The policy's process says so, and goes: it decides nothing blindly."""
    scene.trouble.dark = 1
    until(lambda: "gives no more pictures" in scene.bridge.status["policy"]["died"], "it is said")


def blind(scene: Scene) -> None:
    """Nobody says a word: the policy's process notices that its pictures grow old."""
    os.kill(scene.bridge.status["cameras"]["front"]["pid"], signal.SIGKILL)


def leave(scene: Scene) -> None:
    while scene.lines:
        scene.lines.pop().close()


def press(scene: Scene) -> float:
    began = time.monotonic()
    assert scene.bridge.ask(Verb.ESTOP).ok
    return began


def fill_disk(scene: Scene) -> float:
    """Nothing that is longer than 1,000 bytes can be written any more."""
    most = resource.prlimit(scene.bridge.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(scene.bridge.process.pid, resource.RLIMIT_FSIZE, (1000, most))
    return press(scene)


def empty_disk(scene: Scene) -> None:
    most = resource.prlimit(scene.bridge.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(scene.bridge.process.pid, resource.RLIMIT_FSIZE, (most, most))
    assert "could not be saved" in str(scene.bridge.status["notes"])
    assert not list(scene.folder.glob("records/.*.part")), "nothing half written"


def end_daemon(scene: Scene) -> None:
    scene.bridge.process.kill()
    scene.bridge.process.wait()


def unplug(scene: Scene) -> None:
    assert scene.bus is not None
    scene.bus.unplug()
    scene.unplugged = True


def asked(settings: Settings) -> float:
    """s until a servo that does not answer is given up; it may have been asked once before."""
    return 2 * (RETRIES + 1) * settings.timeout


def mute(scene: Scene) -> None:
    """One servo neither answers nor listens; it holds its last goal."""
    assert scene.bus is not None
    scene.bus.gone.add(SILENT)


def heard(scene: Scene) -> None:
    assert scene.bus is not None
    scene.bus.gone.clear()


def noise(flip: float, lose: float) -> Blow:
    """A share of the frames on the bus, both ways."""
    all_of_it = flip == 1.0

    def strike(scene: Scene) -> None:
        assert scene.bus is not None
        scene.bus.faults = Faults(flip=flip, lose=lose)

    def mend(scene: Scene) -> None:
        assert scene.bus is not None
        scene.bus.faults = Faults()

    share = "every frame" if all_of_it else f"{flip:.0%} of frames flipped, {lose:.0%} lost"
    return Blow(
        f"noise on a servo bus: {'a bit of every frame is flipped' if all_of_it else share}",
        "servos hold their last goal, then their watchdog"
        if all_of_it
        else "nothing has to: it goes on",
        strike,
        lambda s: (
            s.watchdog + SETTLE + asked(s),
            asked(s) + TURN,
        ),
        "latched" if all_of_it else "goes on",
        "fr3_joint" if all_of_it else "",
        on="bus",
        mend=mend,
    )


def jump(by: float) -> Blow:
    """Of the clock that the control process reads."""

    def strike(scene: Scene) -> None:
        scene.trouble.jump = by

    ahead = by > 0
    return Blow(
        f"the control process's clock jumps {'ahead' if ahead else 'back'} by an hour",
        "control: brakes within the limits",
        strike,
        lambda s: (TURN + BRAKE, TURN),
        "latched",
        # Whether a measurement or a chunk is the first to come after the jump is chance.
        ("paused for 3",) if ahead else ("older than the one before", "from the future"),
    )


def hurt(name: str, done: str, within: float, reason: str) -> Blow:
    """By one of the suite's own parts."""

    def strike(scene: Scene) -> None:
        setattr(scene.trouble, name, 1)

    stop = "control: brakes within the limits"
    return Blow(done, stop, strike, lambda s: (within + BRAKE, within + TURN), "latched", reason)


ARM = (
    Blow(
        "an operator presses stop",
        "control: brakes within the limits",
        press,
        lambda s: (SAY + BRAKE, SAY + TURN),
        "latched",
        "an operator pressed stop",
    ),
    Blow(
        "the policy process is killed",
        "control: its plan ends, then holds",
        lambda scene: scene.send("policy", signal.SIGKILL),
        lambda s: (s.fresh.hold + BRAKE, s.fresh.stop + TURN),
        "latched",
        "the policy's last observation is",
    ),
    Blow(
        "the policy process hangs",
        "control: its plan ends, then holds",
        lambda scene: scene.send("policy", signal.SIGSTOP),
        lambda s: (s.fresh.hold + BRAKE, s.fresh.stop + TURN),
        "latched",
        "the policy's last observation is",
    ),
    Blow(
        "the control process is stopped for {paused} s (SIGSTOP)",
        "the arm's own servo loops, then control brakes",
        lambda scene: scene.pause("control"),
        lambda s: (s.paused + BRAKE, s.paused + TURN),
        "latched",
        "the control process paused for",
    ),
    Blow(
        "the policy's camera gives no more pictures",
        "control: its plan ends, then holds",
        darken,
        lambda s: (s.fresh.hold + BRAKE, s.fresh.stop + TURN),
        "latched",
        "the policy's last observation is",
    ),
    Blow(
        "the process of the policy's camera is killed",
        "control: pictures grow old, the plan ends, then holds",
        blind,
        lambda s: (2 * s.fresh.hold + BRAKE, s.fresh.hold + s.fresh.stop + TURN),
        "latched",
        "the policy's last observation is",
    ),
    hurt("frozen", "the sensors repeat themselves", 0.3, "the sensors have not changed in"),
    hurt("blind", "the sensors say NaN", 0.0, "a measurement is not a finite number"),
    hurt("wild", "the policy says NaN", 3 * SPEC.dt, "a command is not a finite number"),
    jump(HOUR),
    jump(-HOUR),
    Blow(
        "104 clients, garbage and 199 requests at once at the socket; then stop is pressed",
        "control: brakes within the limits",
        flood,
        lambda s: (4 * SAY + BRAKE, 4 * SAY + TURN),
        "latched",
        "an operator pressed stop",
        mend=leave,
    ),
    Blow(
        "the disk is full; then stop is pressed",
        "control: brakes within the limits",
        fill_disk,
        lambda s: (SAY + BRAKE, SAY + TURN),
        "latched",
        "an operator pressed stop",
        saved=False,
        mend=empty_disk,
    ),
    Blow(
        "the daemon is killed",
        "control: brakes, then ends; the arm is held",
        end_daemon,
        lambda s: (2 * TURN + BRAKE, 2 * TURN),
        "lost",
        "its daemon is gone",
        saved=False,
        mend=lambda scene: scene.bridge.start(),
    ),
)
"""On the simulated arm, in this order."""

BUS = (
    noise(0.01, 0.01),
    Blow(
        "one servo of seven falls silent",
        "control: brakes the others within the limits; it holds its last goal",
        mute,
        lambda s: (
            2 * (RETRIES + 1) * s.timeout + TURN + BRAKE,
            2 * (RETRIES + 1) * s.timeout + TURN,
        ),
        "latched",
        "fr3_joint4",
        on="bus",
        mend=heard,
    ),
    Blow(
        "the control process is killed, on a servo bus",
        "servos hold their last goal, then their watchdog",
        lambda scene: scene.send("control", signal.SIGKILL),
        lambda s: (s.watchdog + SETTLE, SAY),
        "lost",
        "the control process died (SIGKILL)",
        on="bus",
    ),
    noise(1.0, 0.0),
    Blow(
        "the cable of a servo bus is pulled",
        "servos hold their last goal, then their watchdog",
        unplug,
        lambda s: (s.watchdog + SETTLE, TURN),
        "latched",
        "is gone",
        on="bus",
    ),
)
"""On servos, in this order: nothing comes after a pulled cable."""
