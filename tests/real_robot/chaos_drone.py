"""Chaos in the air: a drone of the emulator behind cflib, and what its bridge does when hurt.

Nothing holds a drone but its motors. A fault of ours ends in a landing by the planner on board; a
radio that nobody speaks on any more, in the firmware's own watchdog: level after 0.5 s, motors off
after 2 s, and it falls.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from embodied.core.build import allow, build
from embodied.core.checkpoint import save
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.embodiments.flight import Flight
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.crazyflie.driver import ASK, SPEED
from embodied.real_robot.emulators.crazyflie import LOCK_AFTER
from embodied.real_robot.policy.observer import names_of
from tests.fakes.crazyflie import FakeCrazyflie
from tests.real_robot.blows import SAY, end_daemon, hurt
from tests.real_robot.chaos import Blow, Scene, Settings, Watch, on, place
from tests.real_robot.test_daemon import until
from tests.real_robot.test_decide import deployment

FAST = 0.2  # m/s
HIGH, LOW = 0.6, 0.35  # m: it sways at 0.5
SETTLE = 1.0  # s: it follows its set-points late, and touches down softly
TURN = 2 / 50
BRAKE = 0.8 / 3 + 3 / 60 + SETTLE  # s, of its limits
LANDING = max(1.5, HIGH / SPEED) + ASK + SETTLE
FALL = math.sqrt(2 * HIGH / 9.81) + SETTLE


class Flying(Scene):
    """The scene in the air: `running` has taken off before."""

    def __init__(self, folder: Path, settings: Settings, fake: FakeCrazyflie) -> None:
        self.fake = fake
        super().__init__(folder, settings)
        self.fast = FAST

    def deployed(self) -> Deployment:
        """As `robot=crazyflie_sim`, but that the policy sways for ever."""
        allow("tests")
        made = deployment("crazyflie_sim", emulator=None)
        names = names_of(4, made.given, ())
        act = Leaf((3,), low=-1.0, high=1.0, names=Flight.names)
        spec = Spec({"state": Leaf((len(names),), names=names)}, act, dt=made.step)
        policy = build(self.policy(), Policy, spec=spec)
        # News of a drone come when the radio has them: one that is silent is the driver's to see.
        fresh = replace(self.settings.fresh, state=1.0 + self.settings.silence, frozen=0)
        own = {"uri": self.fake.uri, "silence": self.settings.silence, "hover": self.settings.hover}
        return replace(
            made,
            driver={**made.driver, **own},
            policy=str(save(self.folder / "policy" / "0", policy, 0)),
            fresh=fresh,
            seconds=60.0,
            records=str(self.folder / "records"),
        )

    def running(self) -> dict[str, Any]:
        if not self.fake.height > LOW:
            self.bridge.idle()
            self.bridge.done(Verb.HOME)
            self.bridge.mode("IDLE")
        return super().running()

    def watch(self) -> Landing:
        return Landing(self.fake)

    def settle(self, seconds: float) -> None:
        until(lambda: self.fake.down, "it is down")


class Landing(Watch):
    """Where it really is."""

    def __init__(self, fake: FakeCrazyflie) -> None:
        self.fake, self.up = fake, time.monotonic()
        super().__init__()

    def look(self) -> None:
        if not self.fake.down:
            self.up = time.monotonic()

    def still(self, began: float) -> float | None:
        self.end()
        return self.up - began if self.fake.down else None


@contextmanager
def flown(settings: Settings) -> Iterator[Scene]:
    """A drone, from its take-off on."""
    with (
        place() as folder,
        FakeCrazyflie() as fake,
        closing(Flying(folder, settings, fake)) as made,
    ):
        yield made


def fake(scene: Scene) -> FakeCrazyflie:
    assert isinstance(scene, Flying)
    return scene.fake


def mute(scene: Scene) -> None:
    fake(scene).air.silent = True


def spoken(scene: Scene) -> None:
    """Somebody has been there: it can be heard again, and was switched off and on."""
    fake(scene).air.silent = False
    fake(scene).switch_off_and_on()


LANDS = "control: hovers, then the planner on board lands it"
FALLS = "its own watchdog: level, then motors off, and it falls"
HURT_IN_THE_AIR = {
    "a drone: the policy says NaN": Blow(
        LANDS,
        hurt("wild"),
        lambda s: (3 * 0.05 + s.hover + LANDING, 3 * 0.05 + TURN),
        "a command is not a finite number",
    ),
    "a drone: the policy process is killed": Blow(
        LANDS,
        lambda scene: scene.send("policy", signal.SIGKILL),
        lambda s: (s.fresh.stop + s.hover + LANDING, s.fresh.stop + TURN),
        "the policy's last observation is",
    ),
    "a drone: the daemon is killed": Blow(
        "control: comes to rest, lands it, disarms it, then ends",
        end_daemon,
        lambda s: (BRAKE + LANDING, 2 * TURN),
        "its daemon is gone",
        "lost",
        saved=False,
        mend=lambda scene: scene.bridge.start(),
    ),
    "a drone: the control process is killed": Blow(
        FALLS,
        lambda scene: scene.send("control", signal.SIGKILL),
        lambda s: (LOCK_AFTER + FALL, SAY),
        "the control process died (SIGKILL)",
        "lost",
        mend=spoken,
    ),
    "a drone: nothing goes over the air any more": Blow(
        FALLS,
        mute,
        lambda s: (LOCK_AFTER + FALL, s.silence + TURN),
        "nothing heard for more than",
        mend=spoken,
    ),
}
DRONE = on("drone", HURT_IN_THE_AIR)
"""In the air, in this order."""
