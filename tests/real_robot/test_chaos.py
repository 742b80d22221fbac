"""Whatever goes wrong, the arm comes to rest, stays there, says why, and has recorded all of it.

Times are only bounded generously, `docs/safety.md` has the measured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any

import pytest

from tests.real_robot.blows import ARM, BRIDGE, BUS, BUSY, REFUSED
from tests.real_robot.chaos import Blow, Scene, scene, suffer
from tests.real_robot.chaos_drone import DRONE, flown
from tests.real_robot.chaos_scenes import (
    BOUND,
    CONTACT,
    TERMINAL,
    contact,
    plate,
    reset_and_armed,
    terminal,
)
from tests.tiers import only_all

PATIENCE = 30.0  # s more than what is stated
ELSEWHERE = (
    *("an operator", "the policy", "104", "the disk", "the daemon is killed"),
    *("the sensors", "the control process's clock", "a part of", "noise on a servo bus"),
    *("the terminal of", "the same,", "a drone", "the process of the policy's camera"),
    *("the daemon hangs for", "a second `embodied deploy`"),
)
"""What begins so runs with `--all` only: other tests do it to a control loop on a clock of their
own, or to a daemon."""


def blows(*chosen: Blow) -> list[Any]:
    """Parameters, one for each blow."""
    return [
        pytest.param(
            blow,
            id=blow.done,
            marks=only_all if blow.done.startswith(ELSEWHERE) else (),
        )
        for blow in chosen
    ]


SCENES: dict[str, Callable[[], AbstractContextManager[Scene]]] = {
    "arm": lambda: scene(BUSY),
    "plate": lambda: plate(BUSY),
    "terminal": lambda: terminal(BUSY),
    "bus": lambda: scene(BUSY, bus=True),
    "drone": lambda: flown(BUSY),
}


@pytest.fixture(scope="module")
def place() -> Iterator[Callable[[str], Scene]]:
    """The scene of that name, which begins when it is asked for and ends when another one is."""
    with ExitStack() as stack:
        yield lru_cache(1)(lambda name: (stack.close(), stack.enter_context(SCENES[name]()))[1])


EVERY = sorted((*ARM, *BUS, *DRONE, *BRIDGE, *REFUSED, *TERMINAL), key=lambda blow: blow.on)


@pytest.mark.parametrize("blow", blows(*EVERY))
def test_it_ends_at_rest_and_latched(blow: Blow, place: Callable[[str], Scene]) -> None:
    if blow.on == "drone":
        pytest.importorskip("cflib", reason="cflib is not installed")
    outcome = suffer(place(blow.on), blow)
    assert outcome.whole
    if blow.ends == "goes on":
        return
    at_rest, latched = blow.within(BUSY)
    assert outcome.still is not None and outcome.still < at_rest + PATIENCE
    if blow.ends == "rests":
        return
    assert outcome.latched is not None and outcome.latched < latched + PATIENCE


@pytest.mark.parametrize("blow", blows(*BRIDGE[1:3], BRIDGE[4], ARM[7], CONTACT))
def test_it_lets_go_of_what_it_presses_on(blow: Blow, place: Callable[[str], Scene]) -> None:
    pressing = place("plate")
    pressed = contact(pressing, suffer(pressing, blow))
    assert pressed is not None and pressed.before > BOUND > pressed.last
    assert blow is not CONTACT or reset_and_armed(pressing) < BOUND
