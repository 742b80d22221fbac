"""A session in which a person drives the arm: to try it, or to record episodes that they keep."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

from embodied.core.build import ConfigError
from embodied.deploy.session import DISCARDED, KEPT, LOOK, WHOLE, Session, Status, Stopped
from embodied.real_robot.ipc.mailbox import Mailbox
from embodied.real_robot.ipc.messages import DISCARD, VERSION
from embodied.real_robot.teleop.teleop import Device
from embodied.real_robot.teleop.terminal import EpisodeKeys, Key


class TeleopSession(Session):
    """One episode without an end of its own: neither success nor a time that nobody said."""

    def run(self, episodes: int, seconds: float | None, home: bool) -> None:
        if home:
            self._go_home()
        self._play(seconds)

    def _success(self, status: Status) -> bool | None:
        return None


@dataclass(kw_only=True)
class RecordSession(Session):
    """Episodes are kept unless the operator discards them, until the dataset has as many as it
    should. Keys come from the terminal (`keys`) and from the `device`; `there`: how many episodes
    the dataset has already. `reset_seconds`: how long an operator has to put the scene back (None:
    until they press a key)."""

    keys: EpisodeKeys
    device: Device
    there: int
    reset_seconds: float | None
    stopping: bool = field(default=False, init=False)

    def run(self, episodes: int, seconds: float | None, home: bool) -> None:
        """Record until the dataset has `episodes`. Stopped as in a session."""
        with self.keys:
            self._record(episodes, seconds, home)

    def pressed(self) -> Key:
        """The newest key since the last call."""
        return self.keys.pressed() or self.device.pressed()

    def _record(self, episodes: int, seconds: float | None, home: bool) -> None:
        while self.there < episodes and not self.stopping:
            if home:
                self._go_home()
            print(f"episode {self.there + 1} of {episodes}", flush=True)
            self.pressed()  # what was typed before does not count
            self._play(seconds)
            episode = self.episodes[-1]
            if episode.end == DISCARDED:
                self._discard()
            elif episode.recorded:
                self.there += 1
            else:
                raise Stopped(f"the episode is not on the disk: {episode.unkept}")
            if not self.stopping and (self.there < episodes or self.reset_seconds is None):
                self._wait_for_reset(self.there < episodes)

    def asked(self) -> str:
        key = self.pressed()
        self.stopping = self.stopping or key == "stop"
        return {"": "", "discard": DISCARDED}.get(key, KEPT)

    def stop(self) -> None:
        """Also: an episode that did not end by itself is not kept."""
        super().stop()
        if self.episodes and self.episodes[-1].end not in WHOLE and self.episodes[-1].recorded:
            with suppress(Stopped, ConfigError):
                self._discard()

    def _discard(self) -> None:
        """Let the recorder remove the newest episode."""
        number = int(self.status["recorder"]["ended"])
        box = Mailbox(self.folder / "discard", DISCARD, VERSION, create=False)
        box.fields["ended"] = number
        box.send()
        box.close()

        def gone(status: Status) -> bool:
            if problem := status["recorder"]["problem"] or status["recorder"]["died"]:
                raise Stopped(f"the episode was not discarded: {problem}")
            return status["recorder"]["discarded"] == number

        self._until(gone, "the episode to be discarded", watch=False)
        self.episodes[-1].recorded, self.episodes[-1].unkept = False, "discarded"

    def _wait_for_reset(self, more: bool) -> None:
        """The operator puts the scene back; they may still discard the episode before."""
        last = self.episodes[-1]
        words = "put the scene back; right arrow: the next episode" if more else "right arrow: done"
        words += "; left arrow: discard the last one" if last.recorded else ""
        print(f"{words}; Esc: stop recording", flush=True)
        until = None if self.reset_seconds is None else time.monotonic() + self.reset_seconds
        while until is None or time.monotonic() < until:
            self._alive(self.status)
            key = self.pressed()
            if key == "discard" and last.recorded:
                self._discard()
                self.there -= 1
                print("discarded", flush=True)
            elif key == "stop":
                self.stopping = True
            if key in ("next", "stop"):
                return
            time.sleep(LOOK)
