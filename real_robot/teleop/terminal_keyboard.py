"""TerminalKeyboard: drives an arm by the keys of a terminal, also over ssh and in tmux."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.real_robot.teleop.devices import GRIPS, KEYS, held_keys
from embodied.real_robot.teleop.episode_keys import ONE, Key, keys
from embodied.real_robot.teleop.teleop import NO_INPUT, Device, Held
from embodied.real_robot.teleop.terminal import Terminal

STALE = 1.0  # s
HINT = (
    "keys of this terminal: w s forward and back, a d left and right, r f up and down; "
    "z closes the hand, x opens it; u o, i k, j l turn"
)


@dataclass(frozen=True)
class TerminalKeyboardConfig:
    """A terminal does not tell when a key is let go; one that is kept down is typed again and again
    (autorepeat)."""

    hold: Annotated[float, Bound(above=0.0, high=0.5)] = 0.2  # s that a typed key counts as held

    def __post_init__(self) -> None:
        if not 0 < self.hold <= 0.5:
            raise ConfigError(f"hold={self.hold:g} should be above 0, at most 0.5 s")


class TerminalKeyboard(Device):
    """The keys of `devices.Keyboard`, and those of the episode. The key that was pressed last is
    the one that repeats, so two keys that are kept down move along one axis."""

    reads_terminal = True

    def __init__(
        self,
        config: TerminalKeyboardConfig,
        file: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.terminal = Terminal(file)
        if not self.terminal.foreground:
            raise ConfigError(
                "TerminalKeyboard: there is no terminal whose keys could drive the arm; run this "
                "in the foreground of one, or choose another device: Keyboard, Gamepad, SpaceMouse"
            )
        self.terminal.begin()
        print(HINT, file=sys.stderr, flush=True)
        self.typed = dict[str, float]()
        self.looked = clock()
        self.key: Key = ""

    def read(self, tool: tuple[float, float, float] | None) -> Held:
        now, looked = self.clock(), self.looked
        self.looked = now
        if now - looked > STALE:  # nobody looked, as while the arm went home: what came is old
            self.terminal.forget()
            self.typed.clear()
            return NO_INPUT
        text = self.terminal.read() or b""
        self.key = keys(text) or self.key
        names = {each.decode("ascii", "ignore") for each in ONE.findall(text)}
        self.typed |= dict.fromkeys(names & {*KEYS, *GRIPS}, now)
        until = now - self.config.hold
        return held_keys({name for name, typed in self.typed.items() if typed > until})

    def pressed(self) -> Key:
        key = self.key
        self.key = ""
        return key

    def close(self) -> None:
        self.terminal.close()
