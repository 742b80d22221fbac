"""Controls: the protocol through which the panels of the page control the viewer.

It keeps the imports acyclic: the viewer imports the panels, and the panels import this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from embodied.viewer.scene.types import Array
from embodied.viewer.session.player import Player
from embodied.viewer.session.session import Session


class Controls(Protocol):
    """The viewer as panels see it.

    Panels hand every change to `press`, which runs it in the viewer's thread and shows errors on
    the page. `share` is how far between the previous moment and the current one the display is
    while it plays, 0 to 1; `problem` is the error that stopped playback, empty if none.
    """

    session: Session
    playing: bool
    speed: float
    problem: str

    @property
    def share(self) -> float: ...

    def press(self, command: Callable[[], None]) -> None: ...

    def redraw(self) -> None: ...

    def toggle(self) -> None: ...

    def step(self, steps: int = 1) -> None: ...

    def back(self, steps: int = 1) -> None: ...

    def scrub(self, step: int) -> None: ...

    def newest(self) -> None: ...

    def branch(self) -> None: ...

    def next(self) -> None: ...

    def reset(self, seed: int | None = None) -> None: ...

    def set_task(self, task: Sequence[float] | None) -> None: ...

    def set_speed(self, speed: float) -> None: ...

    def choose(self, policy: str) -> None: ...

    def other_checkpoint(self, by: int) -> None: ...

    def push(self, name: str, strength: float = 1.0) -> None: ...

    def shove(self, player: Player, link: str, way: Array, strength: float = 1.0) -> None: ...

    def hold(self, player: Player, name: str, place: Array) -> None: ...

    def let_go(self, player: Player) -> None: ...

    def disturb_observations(self, late: int = 0, off: Iterable[str] = ()) -> None: ...

    def explore(self, on: bool) -> None: ...
