"""Chaos at the operator's terminal: the program that started the daemon and its episode hangs.

`python -m tests.real_robot.chaos_scenes FOLDER SECONDS` is that program: what `embodied deploy`
does once its questions are answered, for the deployment in FOLDER (SECONDS of 0: no time limit).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embodied.deploy.session import Session
from embodied.embodiments import fr3
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.daemon.daemon import UNHEARD
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.messages import Mode
from tests.real_robot.blows import BRAKE, PRESSED, SAY, TURN, press
from tests.real_robot.chaos import Blow, Outcome, Scene, Settings, Watch, latch, on, scene
from tests.real_robot.jaws import SENSED as FELT
from tests.real_robot.plate import SENSED
from tests.real_robot.test_daemon import PATIENT, Bridge, until
from tests.real_robot.trouble import Trouble

CONTACT = Blow(
    "control: brakes, then yields to where the arm is",
    press,
    lambda s: (SAY + BRAKE + 1.0, SAY + TURN),
    PRESSED,
    done="an operator presses stop while the arm presses on a plate; then reset, then arm",
)
CLOSES = Blow(
    "control: the target of the hand becomes its measured width",
    press,
    lambda s: (SAY + BRAKE, SAY + TURN),
    PRESSED,
    done="an operator presses stop while the hand closes",
)
PRESSES = "the same while the jaws press on a finger of 20 mm, with 20 N or more"
HANDS = (CLOSES, replace(CLOSES, done=PRESSES))
SQUEEZED, CLOSING = 20.0, 0.05  # N on the finger; m of an empty hand
FINGER_BOUND, FINGER_AFTER = 10.0, 0.3  # N, from so many s after the latch on
CLOSED_BOUND = 3.0  # mm

BOUND = 15.0  # N, from `AFTER` on
AFTER, WATCHED = 1.0, 5.0  # s from the latch on; how long the plate is looked at, at most
FORCED, LONG = 150.0, 0.3  # N; s for which it is pressed on before anything happens


class OnPlate(Scene):
    """The scene with a plate under the hand: `running` presses on it."""

    after = AFTER + 2.0

    def deployed(self) -> Deployment:
        made = super().deployed()
        world = {"_target_": "tests.real_robot.plate.Plate"}
        driver = {**made.driver, "world": world}
        return replace(made, driver=driver, sensed=(SENSED,), home=tuple(fr3.HOME))

    def policy(self) -> dict[str, Any]:
        return {**super().policy(), "reach": 0.0, "down": 0.8}

    def running(self) -> dict[str, Any]:
        """From above the plate: where it was pressed before, it presses less and less."""
        self.bridge.idle()
        self.bridge.done(Verb.HOME)
        self.bridge.mode("IDLE")
        return super().running()

    def moving(self) -> dict[str, Any]:
        """Running, and pressing on the plate for a while."""
        deadline, status = time.monotonic() + PATIENT, self.running()
        state = open_channels(self.deployment, self.folder).state
        self.felt, since = Felt(self.trouble), np.inf
        while not since <= time.monotonic() - LONG:
            assert time.monotonic() < deadline, "the arm never pressed on the plate"
            time.sleep(0.003)
            if not state.receive():
                continue
            if state.fields["mode"] != Mode.RUNNING:
                status = self.running()
            pressed = float(state.fields["sensed"][0, 0]) > FORCED
            since = min(since, time.monotonic()) if pressed else np.inf
        return status

    def records(self) -> Any:
        """What comes after is not of the blow."""
        self.felt.end()
        return super().records()


class InJaws(OnPlate):
    """The scene of a hand that closes on a bar of `thick` m, 0: on nothing."""

    thick = 0.02

    def deployed(self) -> Deployment:
        made = super().deployed()
        world = {"_target_": "tests.real_robot.jaws.Jaws", "thick": self.thick}
        driver = {**made.driver, "world": world}
        return replace(made, driver=driver, sensed=(FELT,), home_width=fr3.OPEN)

    def policy(self) -> dict[str, Any]:
        return {**Scene.policy(self), "reach": 0.1, "grip": -1.0}

    def moving(self) -> dict[str, Any]:
        """Running, and closing, or pressing on the bar."""
        status = self.running()
        self.felt = Felt(self.trouble)
        state = open_channels(self.deployment, self.folder).state

        def closes() -> bool:
            state.receive()
            fields = state.fields[0]
            assert fields["mode"] == Mode.RUNNING, fields["fault"]
            if self.thick:
                return bool(fields["sensed"][0] > SQUEEZED)
            return bool(fields["width"] < CLOSING)

        until(closes, "the hand closes")
        return status


class OnNothing(InJaws):
    """The same, with nothing between the jaws."""

    thick = 0.0


plate = partial(scene, kind=OnPlate)
"""An arm that presses on a plate."""


def jaws(settings: Settings, kind: type[InJaws] = InJaws) -> AbstractContextManager[Scene]:
    """A hand that closes."""
    return scene(settings, kind=kind)


def closed_on(outcome: Outcome) -> float:
    """Opening (mm) that the hand lost after the latch."""
    records = outcome.records
    late = (records["mode"] == Mode.ESTOP) & (records["now"] > outcome.began)
    width = records["width"][late]
    return 1e3 * float(width[0] - width.min())


@dataclass(frozen=True)
class Contact:
    """The largest force, N."""

    before: float  # in the second before
    after: float | None  # from 1 s after the latch on (None: nothing is simulated so late)
    last: float  # when nothing is felt any more


def contact(scene: Scene, outcome: Outcome, after: float = AFTER) -> Contact | None:
    """Of a blow on a plate, from `after` s after the latch on; None where nothing latched."""
    assert isinstance(scene, OnPlate)
    times, force = scene.felt.all()
    if (latched := latch(outcome.records, outcome.began)) is None:
        return None
    since = times - outcome.began
    late = (since >= latched + after) & (since <= latched + WATCHED)
    before = (since > -1.0) & (since <= 0.0)
    worst = float(force[late].max()) if late.any() else None
    return Contact(float(force[before].max()), worst, float(force[-1]))


def reset_and_armed(scene: Scene) -> float:
    """The largest force (N) in the 2 s after an operator's reset, and arm."""
    scene.bridge.done(Verb.RESET)
    scene.bridge.done(Verb.ARM)
    felt = Felt(scene.trouble)
    time.sleep(2.0)
    assert scene.bridge.status["mode"] == "ARMED"
    return float(felt.all()[1].max())


class Felt(Watch):
    """What the simulated arm's plate feels, whatever the control process says or does not say."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble, self.last = trouble, 0.0
        self.seen: list[tuple[float, float]] = []
        super().__init__()

    def look(self) -> None:
        if (felt := self.trouble.felt) != self.last:
            self.seen.append((time.monotonic(), self.trouble.force))
            self.last = felt

    def all(self) -> tuple[Floats, Floats]:
        """Times [k] (s) and forces [k] (N), to the end."""
        self.end()
        return np.array([t for t, _ in self.seen]), np.array([f for _, f in self.seen])


LIMIT = 4.0  # s of an episode with a time limit
POLLED = 0.3  # s between two requests of a session, and the daemon's poll


class Terminal(Bridge):
    """A session that runs one episode of `seconds` (0: no limit), with its daemon."""

    seconds = 0.0

    def start(self) -> None:
        self.run("tests.real_robot.chaos_scenes", self.folder, self.seconds)

    def again(self, seconds: float) -> None:
        """The one before is killed, and another session starts."""
        self.end()
        self.seconds = seconds
        self.start()

    def end(self) -> None:
        """Its daemon goes with it."""
        self.process.kill()
        self.process.wait()
        until(lambda: not (self.folder / "state").exists(), "its daemon has ended")


class AtTerminal(Scene):
    """The scene of a session."""

    bridge: Terminal

    def bridged(self) -> Bridge:
        return Terminal(self.folder)

    def running(self) -> dict[str, Any]:
        return self.bridge.mode("RUNNING")

    def close(self) -> None:
        self.bridge.end()


terminal = partial(scene, kind=AtTerminal)
"""A session whose episode has no time limit, on the simulated arm."""


def hang(scene: Scene) -> None:
    scene.bridge.process.send_signal(signal.SIGSTOP)


def new_session(scene: Scene) -> None:
    assert isinstance(scene, AtTerminal)
    scene.bridge.again(LIMIT)


HURT_AT_TERMINAL = {
    "the terminal of `embodied deploy` hangs (SIGSTOP), the episode has no time limit": Blow(
        "the daemon: it stops an episode whose session is silent",
        hang,
        lambda s: (UNHEARD + POLLED + BRAKE, 0.0),
        "was silent for",
        "rests",
        saved=False,
        mend=new_session,
    ),
    f"the same, in an episode of seconds={LIMIT:.0f}": Blow(
        "control: the episode's time limit",
        hang,
        lambda s: (LIMIT + TURN + BRAKE, 0.0),
        "TIME",
        "rests",
        saved=False,
        mend=lambda scene: None,
    ),
}
TERMINAL = on("terminal", HURT_AT_TERMINAL)
"""At the terminal, in this order."""


def main(folder: Path, seconds: float) -> None:
    """One episode of the deployment in `folder`."""
    output = folder / f"session-{os.getpid()}"
    output.mkdir()
    with Session(folder, Deployment.read(folder), output, lambda *_: None) as session:
        session.ready()
        session.run(1, seconds if seconds else None, home=False)
        time.sleep(PATIENT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
