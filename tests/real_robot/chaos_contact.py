"""Chaos in contact: the simulated arm presses on a plate when things go wrong, and the plate's own
contact force says whether it is let go of."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from embodied.embodiments import fr3
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.messages import Mode
from tests.real_robot.blows import BRAKE, SAY, TURN, press
from tests.real_robot.chaos import Blow, Outcome, Scene, Settings, ended, latch, place
from tests.real_robot.plate import SENSED
from tests.real_robot.test_daemon import PATIENT
from tests.real_robot.trouble import Trouble

CONTACT = Blow(
    "an operator presses stop while the arm presses on a plate; then reset, then arm",
    "control: brakes, then yields to where the arm is",
    press,
    lambda s: (SAY + BRAKE + 1.0, SAY + TURN),
    "latched",
    "an operator pressed stop",
)

BOUND = 15.0  # N, from `AFTER` on
AFTER, WATCHED = 1.0, 5.0  # s from the latch on; how long the plate is looked at, at most
PRESSED, LONG = 150.0, 0.3  # N; s for which it is pressed on before anything happens


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
            pressed = float(state.fields["sensed"][0, 0]) > PRESSED
            since = min(since, time.monotonic()) if pressed else np.inf
        return status

    def records(self) -> Any:
        """What comes after is not of the blow."""
        self.felt.end()
        return super().records()


@contextmanager
def plate(settings: Settings) -> Iterator[Scene]:
    """An arm that presses on a plate."""
    with place() as folder:
        yield from ended(OnPlate(folder, settings))


@dataclass(frozen=True)
class Contact:
    """`before`: the largest force (N) in the second before; `after`: from 1 s after the latch on
    (None: nothing is simulated so late); `last`: when nothing is felt any more."""

    before: float
    after: float | None
    last: float


def contact(scene: Scene, outcome: Outcome) -> Contact | None:
    """Of a blow on a plate; None where nothing latched."""
    assert isinstance(scene, OnPlate)
    times, force = scene.felt.all()
    if (latched := latch(outcome.records, outcome.began)) is None:
        return None
    since = times - outcome.began
    late = (since >= latched + AFTER) & (since <= latched + WATCHED)
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


class Felt:
    """What the simulated arm's plate feels, whatever the control process says or does not say."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble, self.done = trouble, threading.Event()
        self.seen: list[tuple[float, float]] = []
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        last = 0.0
        while not self.done.wait(0.004):
            if (felt := self.trouble.felt) != last:
                self.seen.append((time.monotonic(), self.trouble.force))
                last = felt

    def end(self) -> None:
        """Safe to call twice."""
        self.done.set()
        self.thread.join()

    def all(self) -> tuple[Floats, Floats]:
        """Times [k] (s) and forces [k] (N), to the end."""
        self.end()
        return np.array([t for t, _ in self.seen]), np.array([f for _, f in self.seen])
