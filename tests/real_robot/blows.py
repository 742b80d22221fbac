"""Blows: what may go wrong with a bridge at work, what stops the arm then, and in how long."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from embodied.core import checkpoint
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.daemon.client import call, emergency_stop
from embodied.real_robot.daemon.requests import MOST_BYTES, Request, Verb
from embodied.real_robot.deployment import FILE
from embodied.real_robot.emulators.servos.bus import Faults
from embodied.real_robot.ipc.channels import Role
from embodied.real_robot.kernel.checks import FreshConfig, Heartbeat
from tests.builders import python
from tests.real_robot.chaos import RETRIES, Blow, Scene, Settings, on
from tests.real_robot.test_control import LIMITS
from tests.real_robot.test_daemon import HERTZ, PATIENT, raw, until
from tests.real_robot.test_decide import SPEC

CAREFUL = FreshConfig(0.3, 1.0, 0.2, frozen=20, pause=0.15)
TABLE = Settings(CAREFUL, 0.2, 0.01, 0.2, 0.5, 1.0, Heartbeat(), 12)
"""What one would set for an arm."""
PATIENTLY = FreshConfig(1.0, 3.0, 2.0, frozen=30, pause=1.5)
BUSY = Settings(PATIENTLY, 2.0, 0.2, 1.5, 2.0, 1.0, Heartbeat(2.0, 6.0), 8)
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
    pid = scene.bridge.process.pid
    most = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, most))
    return press(scene)


def empty_disk(scene: Scene) -> None:
    pid = scene.bridge.process.pid
    most = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
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


BRAKES = "control: brakes within the limits"
HOLDS = "control: its plan ends, then holds"
WATCHDOG = "servos hold their last goal, then their watchdog"
PRESSED = "an operator pressed stop"
Strike = Callable[[Scene], float | None]


def brakes(
    strike: Strike,
    wait: float,
    reason: str | tuple[str, ...] = PRESSED,
    mend: Strike = lambda scene: scene.trouble.end(),
    **more: Any,
) -> Blow:
    """After at most `wait` s the control process brakes the arm, and latches."""
    bounds = (wait + BRAKE, wait + TURN)
    return Blow(BRAKES, strike, lambda s: bounds, reason, mend=mend, **more)


def silences(strike: Strike, stops: str = HOLDS, more: float = 0.0) -> Blow:
    """Nothing new comes of the policy, from `more` times the freshness of a picture on."""
    return Blow(
        stops,
        strike,
        lambda s: ((1 + more) * s.fresh.hold + BRAKE, more * s.fresh.hold + s.fresh.stop + TURN),
        "the policy's last observation is",
    )


def hurt(name: str, value: float = 1.0) -> Strike:
    """By one of the suite's own parts."""
    return lambda scene: setattr(scene.trouble, name, value)


def noisy(flip: float = 0.0, lose: float = 0.0) -> Strike:
    """A share of the frames on the bus is flipped or lost, both ways."""

    def strike(scene: Scene) -> None:
        assert scene.bus is not None
        scene.bus.faults = Faults(flip=flip, lose=lose)

    return strike


HURT = {
    "an operator presses stop": brakes(press, SAY),
    "the policy process is killed": silences(lambda scene: scene.send("policy", signal.SIGKILL)),
    "the policy process hangs": silences(lambda scene: scene.send("policy", signal.SIGSTOP)),
    "the control process is stopped for {paused} s (SIGSTOP)": Blow(
        "the arm's own servo loops, then control brakes",
        lambda scene: scene.pause("control"),
        lambda s: (s.paused + BRAKE, s.paused + TURN),
        "the control process paused for",
    ),
    "the policy's camera gives no more pictures": silences(darken),
    "the process of the policy's camera is killed": silences(
        blind, "control: pictures grow old, the plan ends, then holds", more=1.0
    ),
    "the sensors repeat themselves": brakes(hurt("frozen"), 0.3, "the sensors have not changed in"),
    "the sensors say NaN": brakes(hurt("blind"), 0.0, "a measurement is not a finite number"),
    "the policy says NaN": brakes(hurt("wild"), 3 * SPEC.dt, "a command is not a finite number"),
    "the control process's clock jumps ahead by an hour": brakes(
        hurt("jump", HOUR), TURN, "paused for 3"
    ),
    # Whether a measurement or a chunk is the first to come after the jump is chance.
    "the control process's clock jumps back by an hour": brakes(
        hurt("jump", -HOUR), TURN, ("older than the one before", "from the future")
    ),
    "104 clients, garbage and 199 requests at once at the socket; then stop is pressed": brakes(
        flood, 4 * SAY, mend=leave
    ),
    "the disk is full; then stop is pressed": brakes(fill_disk, SAY, saved=False, mend=empty_disk),
    "the daemon is killed": Blow(
        "control: brakes, then ends; the arm is held",
        end_daemon,
        lambda s: (2 * TURN + BRAKE, 2 * TURN),
        "its daemon is gone",
        "lost",
        saved=False,
        mend=lambda scene: scene.bridge.start(),
    ),
}
ARM = on("arm", HURT)
"""On the simulated arm, in this order."""

HURT_ON_SERVOS = {
    "noise on a servo bus: 1% of frames flipped, 1% lost": Blow(
        "nothing has to: it goes on",
        noisy(0.01, 0.01),
        lambda s: (0.0, 0.0),
        ends="goes on",
        mend=noisy(),
    ),
    "one servo of seven falls silent": Blow(
        "control: brakes the others within the limits; it holds its last goal",
        mute,
        lambda s: (asked(s) + TURN + BRAKE, asked(s) + TURN),
        "fr3_joint4",
        mend=heard,
    ),
    "the control process is killed, on a servo bus": Blow(
        WATCHDOG,
        lambda scene: scene.send("control", signal.SIGKILL),
        lambda s: (s.watchdog + SETTLE, SAY),
        "the control process died (SIGKILL)",
        "lost",
    ),
    "noise on a servo bus: a bit of every frame is flipped": Blow(
        WATCHDOG,
        noisy(flip=1.0),
        lambda s: (s.watchdog + SETTLE + asked(s), asked(s) + TURN),
        "fr3_joint",
        mend=noisy(),
    ),
    "the cable of a servo bus is pulled": Blow(
        WATCHDOG,
        unplug,
        lambda s: (s.watchdog + SETTLE, TURN),
        "is gone",
    ),
}
BUS = on("bus", HURT_ON_SERVOS)
"""On servos, in this order: nothing comes after a pulled cable."""


POLL = 0.1  # s between two beats of the daemon, at most
ANSWER = 0.2  # s that a stop without the daemon may take


def hang(scene: Scene) -> None:
    """The daemon is there and does nothing; then it goes on."""
    scene.bridge.process.send_signal(signal.SIGSTOP)
    time.sleep(scene.settings.hung)
    scene.bridge.process.send_signal(signal.SIGCONT)


def press_beside(scene: Scene) -> float:
    """Stop is pressed while the daemon hangs, as `embodied robot estop` does it."""
    os.kill(scene.bridge.process.pid, signal.SIGSTOP)
    time.sleep(0.1)
    began = time.monotonic()
    stopped = emergency_stop(scene.folder, patience=1.0)
    assert stopped.done and stopped.reply is None, stopped.line()
    os.kill(scene.bridge.process.pid, signal.SIGCONT)
    return began


def say(**wrong: float) -> Strike:
    """The policy process posts one more record; these fields of it are `wrong`."""

    def strike(scene: Scene) -> float:
        scene.send("policy", signal.SIGSTOP)  # it is the record's only writer
        chunk = open_channels(scene.deployment, scene.folder, Role.POLICY).chunk
        assert chunk.receive()
        fields = chunk.fields[0]
        fields["number"] += 1
        fields["start"] = fields["seen"] = time.monotonic()
        for name, value in wrong.items():
            fields[name] = value
        began = time.monotonic()
        chunk.send()
        return began

    return strike


def go_on(scene: Scene) -> None:
    scene.send("policy", signal.SIGCONT)


def attacked(scene: Scene) -> Path:
    """A checkpoint as the arm's own, but that its policy.yaml names our command line, which is to
    run a shell command."""
    evil, proof = scene.folder / "evil", scene.folder / "ran"
    shutil.copytree(scene.deployment.policy, evil)
    words = ["demos", "collect", "env=contact_maze", "demonstrator=random", "allow=[subprocess]"]
    words.append("demonstrator._target_=subprocess.Popen")
    words.append(f"demonstrator.args=[sh,-c,'id > {proof}']")
    words.append(f"out={scene.folder / 'evil_demos'}")
    node = {"_target_": "embodied.cli.main", "argv": words}
    (evil / "policy.yaml").write_text(yaml.safe_dump(node))
    checkpoint.seal(evil, checkpoint.read_about(evil))  # as an attacker would
    return evil


def load_attack(scene: Scene) -> None:
    reply = call(scene.folder, Verb.LOAD, timeout=PATIENT, policy=str(attacked(scene)))
    assert not reply.ok and "\n" not in reply.reason, reply.reason
    assert not (scene.folder / "ran").exists(), "the file ran a command"
    assert not (scene.folder / "evil_demos").exists(), "the file ran our command line"
    scene.said = reply.reason


def deploy_again(scene: Scene) -> None:
    """Somebody types `embodied deploy` once more, for another robot, in the same folder."""
    file = scene.folder / FILE
    before = file.read_bytes()
    words = ["robot=sim", "demonstrator=reach", "yes=true", f"folder={scene.folder}"]
    words += [f"out={scene.folder / 'second'}", "record=false"]
    done = python("-m", "embodied.cli", "deploy", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert file.read_bytes() == before, f"the second deploy changed {FILE}"
    scene.said = done.stderr.strip().splitlines()[-1].removeprefix("embodied: ")


HURT_BRIDGE = {
    "the daemon hangs for {hung} s (SIGSTOP)": Blow(
        "control: holds, then latches",
        hang,
        lambda s: (s.beat.hold + POLL + BRAKE, s.beat.stop + POLL + TURN),
        "the daemon has not answered for",
    ),
    "the daemon hangs; 0.1 s later an operator presses stop": Blow(
        BRAKES,
        press_beside,
        lambda s: (ANSWER + BRAKE, ANSWER),
        PRESSED,
    ),
    "the policy posts 3 numbers where the robot takes 4": brakes(
        say(size=3), TURN, "3", mend=go_on
    ),
    "the policy's times are no numbers (NaN)": brakes(
        say(start=np.nan, seen=np.nan), TURN, "", go_on
    ),
    "a part of the control process raises in every tick (its controller)": brakes(
        hurt("broken"), SPEC.dt, "broken on purpose"
    ),
}
BRIDGE = on("arm", HURT_BRIDGE)
"""On the simulated arm, in this order."""

REFUSALS = {
    "`embodied robot load` of a file whose policy.yaml names a command-line function": Blow(
        "nothing has to: it is refused, the policy before goes on",
        load_attack,
        lambda s: (0.0, 0.0),
        "embodied.cli has no class main",
        "goes on",
    ),
    "a second `embodied deploy` in the same folder": Blow(
        "nothing has to: it is refused and touches nothing",
        deploy_again,
        lambda s: (0.0, 0.0),
        "already",
        "goes on",
    ),
}
REFUSED = on("arm", REFUSALS)
"""What is refused in one line, while the arm goes on."""
