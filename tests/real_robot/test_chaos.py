"""Whatever goes wrong, the arm comes to rest, stays there, says why, and has recorded all of it.

Those of `blows.py` that no other test does; times are only bounded generously, `docs/safety.md` has
the measured ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.real_robot.blows import ARM, BUS, BUSY
from tests.real_robot.blows_bridge import BRIDGE, REFUSED
from tests.real_robot.chaos import Blow, Scene, scene, steady, suffer
from tests.real_robot.chaos_contact import BOUND, CONTACT, contact, plate, reset_and_armed
from tests.real_robot.chaos_drone import DRONE, flown
from tests.real_robot.chaos_terminal import TERMINAL, terminal

PATIENCE = 30.0  # s more than what is stated
ALSO_ELSEWHERE = (
    "an operator",
    "the policy process",
    "104",
    "the disk",
    "the daemon",
    "noise on a servo bus: 1%",
    "a drone: the policy",  # what control does then is the same for an arm
)
HERE = [
    *(blow for blow in (*ARM, *BUS, *DRONE) if not blow.done.startswith(ALSO_ELSEWHERE)),
    *(*BRIDGE, *REFUSED, *TERMINAL),
]
IN_CONTACT = [
    blow
    for blow in (*BRIDGE, *ARM)
    if blow.done.startswith(("the daemon hangs;", "the policy posts", "the sensors say", "a part"))
]


@pytest.fixture(scope="module")
def arm() -> Iterator[Scene]:
    with scene(BUSY) as made:
        yield made


@pytest.fixture(scope="module")
def pressing() -> Iterator[Scene]:
    with plate(BUSY) as made:
        yield made


@pytest.fixture(scope="module", name="terminal")
def at_terminal() -> Iterator[Scene]:
    with terminal(BUSY) as made:
        yield made


@pytest.fixture(scope="module")
def bus() -> Iterator[Scene]:
    with scene(BUSY, bus=True) as made:
        yield made


@pytest.fixture(scope="module")
def drone() -> Iterator[Scene]:
    pytest.importorskip("cflib", reason="cflib is not installed")
    with flown(BUSY) as made:
        yield made


@pytest.mark.parametrize("blow", HERE, ids=lambda blow: blow.done)
def test_it_ends_at_rest_and_latched(blow: Blow, request: pytest.FixtureRequest) -> None:
    outcome = suffer(request.getfixturevalue(blow.on), blow)
    assert outcome.whole
    if blow.ends == "goes on":
        return
    at_rest, latched = blow.within(BUSY)
    assert outcome.still is not None and outcome.still < at_rest + PATIENCE
    if blow.ends == "rests":
        return
    assert outcome.latched is not None and outcome.latched < latched + PATIENCE


@pytest.mark.parametrize("blow", IN_CONTACT, ids=lambda blow: blow.done)
def test_it_lets_go_of_what_it_presses_on(blow: Blow, pressing: Scene) -> None:
    pressed = contact(pressing, suffer(pressing, blow))
    assert pressed is not None and pressed.before > BOUND > pressed.last


def test_contact_at_stop_is_let_go_of_and_stays_so_after_reset_and_arm(pressing: Scene) -> None:
    pressed = contact(pressing, suffer(pressing, CONTACT))
    assert pressed is not None and pressed.before > BOUND > pressed.last
    assert reset_and_armed(pressing) < BOUND


def test_jumps_are_taken_out_of_a_clock() -> None:
    now = np.array([10.0, 10.01, 3610.02, 3610.03, 10.04, 10.05])
    assert steady(now, 10.0) == pytest.approx(np.arange(6) * 0.01 + 10)
    assert steady(now[2:], 10.05) == pytest.approx(np.arange(2, 6) * 0.01 + 10)
