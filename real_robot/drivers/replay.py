"""A driver that replays a recording: measurements come from a file, commands are not followed.

For debugging at a desk: the same observations reach the same policy again, at their recorded
times, and the commands can be compared with those sent then.
"""

from __future__ import annotations

import time
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from embodied.core.bounds import CountOrZero
from embodied.core.build import ConfigError
from embodied.core.files import require_file, require_room
from embodied.embodiments import fr3
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError

BROKEN = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, SyntaxError, tokenize.TokenError),
)
"""What zipfile and numpy raise for a file that is none of theirs, or damaged."""


@dataclass(frozen=True)
class Config:
    """Settings of a recording that is played as a robot."""

    file: str  # black box (.npz), or the folder of a dataset
    episode: CountOrZero = 0  # number of the dataset's episode
    joints: tuple[str, ...] = fr3.JOINTS  # names of the joints
    sensed: tuple[str, ...] = ()  # names of what a black box kept of the things


class Recording(NamedTuple):
    """k measurements: times (s, from 0 on), joints [k, n], the hand (m) [k], the things [k, m]."""

    t: Floats
    q: Floats
    dq: Floats
    tau: Floats
    width: Floats
    sensed: Floats


class Replay(Driver):
    """Commands are checked for their shape, kept in `sent`, and not followed."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.joints = config.joints
        self.sensed = config.sensed
        self.sent: Floats = np.zeros(len(config.joints))
        self.recording: Recording | None = None
        self._began = 0.0
        self._at = 0

    def connect(self) -> None:
        path = Path(self.config.file)
        made = _episode(path, self.config) if path.is_dir() else _black_box(path)
        if made.q.shape[1] != len(self.joints) or made.sensed.shape[1] != len(self.sensed):
            raise DriverError(
                f"{path} has {made.q.shape[1]} joints and {made.sensed.shape[1]} sensed numbers, "
                f"joints and sensed name {len(self.joints)} and {len(self.sensed)}"
            )
        self.recording = made
        self._began = self.clock()
        self._at = 0

    def read(self) -> ArmState:
        made = self._made()
        since = self.clock() - self._began
        self._at = max(0, int(np.searchsorted(made.t, since, side="right")) - 1)
        k = self._at
        ended = since > made.t[-1]
        t = self.clock() if ended else self.clock() - (since - made.t[k])
        dq = made.dq[k] * (not ended)
        nothing = np.zeros(len(dq))  # pushes on a recording
        return ArmState(made.q[k].copy(), dq, made.tau[k].copy(), float(t), external=nothing)

    def write(self, q: Floats, width: float) -> None:
        self._made()
        if np.shape(q) != self.sent.shape:
            raise DriverError(f"a command for {np.shape(q)} joints, the recording has {self.sent}")
        np.copyto(self.sent, q)

    @property
    def width(self) -> float:
        return 0.0 if self.recording is None else float(self.recording.width[self._at])

    def sense(self) -> Floats:
        return self._made().sensed[self._at]

    def renew(self) -> None:
        """The next episode is the same one."""
        self._began = self.clock()

    def release(self) -> None:
        raise DriverError("a recording moves nothing: there is no arm to release")

    def stop(self) -> None:
        """A recording moves nothing."""

    def close(self) -> None:
        self.recording = None

    def _made(self) -> Recording:
        if self.recording is None:
            raise DriverError("the recording is not open")
        return self.recording


def _black_box(path: Path) -> Recording:
    try:
        with zipfile.ZipFile(path) as packed:
            size = sum(each.file_size for each in packed.infolist())
            require_room(size, require_file(path), path)
        with np.load(path, allow_pickle=False) as file:
            state = file["state"]
        state = state[state["measured"] > 0]
        _, first = np.unique(state["measured"], return_index=True)
        state = state[first]
        if not len(state):
            raise ValueError("it is empty")
        names = ("measured", "q", "dq", "tau", "width", "sensed")
        t, q, dq, tau, width, sensed = (np.asarray(state[name], float) for name in names)
        if not (q.shape == dq.shape == tau.shape and q.ndim == sensed.ndim == 2):
            raise ValueError("its records are of another kind")
        return Recording(t - t[0], q, dq, tau, width.reshape(len(t)), sensed)
    except BROKEN as error:
        raise DriverError(f"{path} is no black box that can be played: {error}") from error


def _episode(path: Path, config: Config) -> Recording:
    """An episode of a dataset whose observations name `q1 ...`, `dq1 ...` and `width`."""
    # Only here: a control process needs no tensors.
    from embodied.datasets.lerobot.reader import DatasetError, read_episodes

    try:
        episodes = read_episodes(path)
        frames = episodes.episode(config.episode)
    except (DatasetError, IndexError) as error:
        raise DriverError(f"episode {config.episode} of {path} cannot be read: {error}") from error
    columns = {
        name: frames[f"obs/{leaf}"][:, i].numpy().astype(float)
        for leaf, about in episodes.spec.obs.items()
        for i, name in enumerate(about.names)
        if not about.is_image
    }
    count = len(config.joints)
    wanted = [f"{kind}{i}" for kind in ("q", "dq") for i in range(1, count + 1)]
    if missing := [name for name in (*wanted, *config.sensed) if name not in columns]:
        raise ConfigError(f"{path} has no {missing[0]} in its observations")
    length = len(frames["action"])
    stamps = frames.get("stamp/measured")
    t = np.arange(length) * episodes.spec.dt if stamps is None else stamps.numpy().astype(float)
    q, dq = (np.stack([columns[n] for n in half], 1) for half in (wanted[:count], wanted[count:]))
    tau = frames["tau"].numpy().astype(float) if "tau" in frames else np.zeros_like(q)
    things = [columns[name] for name in config.sensed]
    sensed = np.stack(things, 1) if things else np.zeros((length, 0))
    return Recording(t - t[0], q, dq, tau, columns.get("width", np.zeros(length)), sensed)
