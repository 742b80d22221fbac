"""Teleoperation devices: keyboard and gamepad (pygame), SpaceMouse (HID reports), a leader arm."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from embodied.core.bounds import Bound, CountOrZero, Number, Positive
from embodied.core.build import ConfigError, Node, build
from embodied.embodiments.kinematics.arm import forward_of
from embodied.real_robot.drivers.servos.driver import ServoBus
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.teleop.hold_to_run import (
    LOOK,
    ONE,
    DeviceFile,
    HoldDevice,
    Key,
    Terminal,
    keys,
)
from embodied.real_robot.teleop.teleop import NO_INPUT, Device, Held

# Held keys: which of the six motions, which way.
KEYS = {
    "w": (0, 1), "s": (0, -1), "a": (1, 1), "d": (1, -1), "r": (2, 1), "f": (2, -1),
    "u": (3, 1), "o": (3, -1), "i": (4, 1), "k": (4, -1), "j": (5, 1), "l": (5, -1),
}  # fmt: skip
GRIPS = {"z": -1.0, "x": 1.0}
DEAD = 0.12  # share of an axis that counts as let go
FULL = 350.0  # counts of a SpaceMouse at its rim


def _pygame() -> Any:
    try:
        import pygame
    except ModuleNotFoundError as error:
        raise ConfigError("a keyboard or gamepad needs: pip install pygame-ce") from error
    return pygame


class Keyboard(Device):
    """wasd, r and f move (x, y, z), u/o i/k j/l turn, z closes and x opens the hand. While its
    window is in front the terminal hears nothing, so it has the keys of the episode, too; without
    it no key is held."""

    def __init__(self) -> None:
        self.pygame = pygame = _pygame()
        pygame.display.init()
        pygame.display.set_mode((360, 120))
        pygame.display.set_caption("arm: wasd rf, uo ik jl, z x; keep this window in front")
        self.codes = {name: pygame.key.key_code(name) for name in (*KEYS, *GRIPS)}
        self.episode: dict[int, Key] = {
            pygame.K_RIGHT: "next",
            pygame.K_LEFT: "discard",
            pygame.K_ESCAPE: "stop",
        }

    def read(self, tool: tuple[float, float, float] | None) -> Held:
        for event in self.pygame.event.get(self.pygame.KEYDOWN):
            self.key = self.episode.get(event.key, self.key)
        if not self.pygame.key.get_focused():
            return NO_INPUT
        down = self.pygame.key.get_pressed()
        return held_keys({name for name, code in self.codes.items() if down[code]})

    def close(self) -> None:
        self.pygame.display.quit()


def held_keys(names: set[str]) -> Held:
    motion = [0.0] * 6
    for name in names & set(KEYS):
        axis, way = KEYS[name]
        motion[axis] += way
    grip = sum(GRIPS[name] for name in names & set(GRIPS))
    return Held((*motion,), float(np.sign(grip)), bool(names))  # pyright: ignore[reportArgumentType]


def _joystick(number: int) -> tuple[Any, Any]:
    """pygame and the gamepad, whichever window is in front, and without any."""
    pygame = _pygame()
    os.environ.setdefault("SDL_JOYSTICK_ALLOW_BACKGROUND_EVENTS", "1")
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    pygame.display.init()  # its events come with those of the display
    pygame.joystick.init()
    found = pygame.joystick.get_count()
    if number >= found:
        raise ConfigError(f"there is no gamepad {number} ({found} are there)")
    return pygame, pygame.joystick.Joystick(number)


@dataclass(frozen=True)
class GamepadConfig:
    """Settings of a gamepad."""

    number: CountOrZero = 0  # which gamepad
    hold: CountOrZero = 4  # button that has to be kept down for anything to move
    close: CountOrZero = 0  # button that closes the hand
    open: CountOrZero = 1  # button that opens the hand


class Gamepad(Device, HoldDevice):
    """Left stick x and y, right stick z and yaw, as long as the button `hold` is down. Also the
    device of hold-to-run (`embodied.real_robot.teleop.hold_to_run`): that button alone."""

    def __init__(self, config: GamepadConfig) -> None:
        self.config = config
        self.pygame, self.pad = _joystick(config.number)
        self.hint = f"hold button {config.hold} of gamepad {config.number} down"

    def read(self, tool: tuple[float, float, float] | None) -> Held:
        self.pygame.event.pump()
        if not self.pad.get_init() or not self.pad.get_button(self.config.hold):
            return NO_INPUT
        axes = [self.pad.get_axis(i) for i in range(min(4, self.pad.get_numaxes()))]
        close, open_ = (self.pad.get_button(b) for b in (self.config.close, self.config.open))
        return sticks(axes, float(open_) - float(close))

    def begin(self) -> None:
        """The device is read from the start."""

    def held(self) -> bool:
        """Whether the button `hold` is down; waits a moment. One that is unplugged is let go."""
        time.sleep(LOOK)
        return self.read(None).touched

    def close(self) -> None:
        self.pygame.joystick.quit()


def sticks(axes: list[float], grip: float) -> Held:
    """The motion of a gamepad's axes: left (right, down), right (right, down)."""
    left_x, left_y, right_x, right_y = [*(_live(a) for a in axes), 0.0, 0.0, 0.0, 0.0][:4]
    return Held((-left_y, -left_x, -right_y, 0.0, 0.0, -right_x), grip, True)


def _live(value: float) -> float:
    return 0.0 if abs(value) < DEAD else value


@dataclass(frozen=True)
class SpaceMouseConfig:
    """Settings of a SpaceMouse."""

    path: str  # /dev/hidraw0 or such, that this user may read


class SpaceMouse(Device):
    """Held while it is pushed or turned; its first button closes the hand, its second opens it."""

    def __init__(self, config: SpaceMouseConfig) -> None:
        hint = "see /dev/hidraw*, and who may read it"
        self.file = DeviceFile(config.path, "SpaceMouse at", hint)
        self.axes = [0.0] * 6
        self.grip = 0.0

    def read(self, tool: tuple[float, float, float] | None) -> Held:
        if not self.file.read(64, self.hear):  # it was unplugged
            return NO_INPUT
        x, y, z, roll, pitch, yaw = (_live(max(-1.0, min(1.0, a))) for a in self.axes)
        held = Held((-y, -x, -z, -pitch, roll, -yaw), self.grip, False)
        return Held(held.motion, held.grip, any(held.motion) or bool(held.grip))

    def hear(self, report: bytes) -> None:
        """Read one report: 1 is moved (and on newer ones turned), 2 turned, 3 buttons."""
        kind, body = report[0], report[1:]
        if kind in (1, 2) and len(body) >= 6:
            count = 6 if kind == 1 and len(body) >= 12 else 3
            at = 3 if kind == 2 else 0
            self.axes[at : at + count] = (np.frombuffer(body[: 2 * count], "<i2") / FULL).tolist()
        elif kind == 3 and body:
            self.grip = float(bool(body[0] & 2)) - float(bool(body[0] & 1))

    def close(self) -> None:
        self.file.close()


@dataclass(frozen=True)
class Reach:
    """How a leader's tool leads the follower's."""

    kinematics: str  # as in a deployment
    step: Annotated[float, Bound(above=0.0, high=1.0)] = 0.025  # m that an action of 1 moves
    scale: Positive = 1.0  # the follower's way from origin per the leader's
    origin: tuple[Number, Number, Number] = (0.0, 0.0, 0.0)  # where both tools are at one place, m
    still: Annotated[float, Bound(0.0, 1.0)] = 0.003  # m in half a second from which it is held


@dataclass(frozen=True, kw_only=True)
class LeaderConfig(Reach):
    """Settings of a leader arm of servos, which are read and never powered."""

    arm: Node  # node of the leader's ServoBus


class LeaderMotion:
    def __init__(self, reach: Reach, clock: Callable[[], float]) -> None:
        self.reach = reach
        self.clock = clock
        self.forward = forward_of(reach.kinematics)
        self.moved = -np.inf
        self.last = np.full(3, np.inf)

    def __call__(self, q: Floats, grip: float, tool: tuple[float, float, float] | None) -> Held:
        """The motion for a leader at joints `q` [n], and a follower's tool at `tool` (m)."""
        reach = self.reach
        origin = np.asarray(reach.origin)
        place = origin + reach.scale * (self.forward(q[None])[0][0] - origin)
        now = self.clock()
        if np.linalg.norm(place - self.last) > reach.still:
            self.moved = now if np.isfinite(self.last).all() else self.moved
            self.last = place
        if tool is None or now > self.moved + 0.5:
            return NO_INPUT
        x, y, z = ((place - np.asarray(tool)) / reach.step).tolist()
        return Held((x, y, z, 0.0, 0.0, 0.0), grip, True)


class Leader(Device):
    """The hand of the leader is the follower's: open above half of its width."""

    def __init__(self, config: LeaderConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.arm = arm = build(config.arm, ServoBus)
        self.motion = LeaderMotion(config, clock)
        arm.wire.port.open()  # and not `connect`, which would switch torque on
        arm.wire.find_echo()

    def read(self, tool: tuple[float, float, float] | None) -> Held:
        try:
            q = self.arm.read().q
        except DriverError:
            return NO_INPUT
        hand = self.arm.config.hand
        grip = 0.0 if hand is None else (1.0 if self.arm.width > hand.width / 2 else -1.0)
        return self.motion(q, grip, tool)

    def close(self) -> None:
        self.arm.wire.port.close()


STALE = 1.0  # s
HINT = (
    "keys of this terminal: w s forward and back, a d left and right, r f up and down; "
    "z closes the hand, x opens it; u o, i k, j l turn"
)


@dataclass(frozen=True)
class TerminalKeyboardConfig:
    """A terminal does not tell when a key is let go; one that is kept down is typed again."""

    hold: Annotated[float, Bound(above=0.0, high=0.5)] = 0.2  # s that a typed key counts as held


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

    def close(self) -> None:
        self.terminal.close()
