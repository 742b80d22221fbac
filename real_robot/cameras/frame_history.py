"""A short history of camera frames, in the size that a recording keeps, by capture time.

A recorded frame gets the newest image that is not later than its measurement, with the image's own
time. The images that the policy decided on are recorded bit by bit. No frame is given an image
older than `age`: the episode is cut before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied.real_robot.cameras.camera import Frame, fitted
from embodied.real_robot.cameras.shared_frames import FrameReader

KEPT = 256  # pictures of each camera that are taken_at back upon


class FrameHistory:
    """`take` often. Of each reader height and width as in `sizes`; `seen` are those that the policy
    looks at as well; `age` in s."""

    def __init__(
        self,
        readers: Mapping[str, FrameReader],
        sizes: Mapping[str, tuple[int, int]],
        policy_names: Sequence[str],
        age: float,
    ) -> None:
        self.readers = readers
        self.sizes = dict(sizes)
        self.policy_names = tuple(policy_names)
        self.age = age
        self.kept: dict[str, OrderedDict[float, Frame]] = {name: OrderedDict() for name in sizes}

    def update(self) -> None:
        """What has come since."""
        for name, reader in self.readers.items():
            for picture in reader.since():
                self.add(name, picture.t, fitted(picture.frame, *self.sizes[name]))

    def add(self, name: str, t: float, frame: Frame) -> None:
        """`frame` as large as it is kept; pictures come in the order of their times."""
        kept = self.kept[name]
        kept[t] = frame
        if len(kept) > KEPT:
            kept.popitem(last=False)

    def at(self, measured: float) -> dict[str, Any]:
        """`obs/NAME` and `stamp/NAME` (s) of all cameras at that time; black and 0 where there is
        none."""
        made: dict[str, Any] = {}
        for name, kept in self.kept.items():
            t = next((t for t in reversed(kept) if t <= measured), 0.0)
            made |= {f"obs/{name}": self._frame(name, t), f"stamp/{name}": t}
        return made

    def decided(self, taken_at: Mapping[str, float]) -> dict[str, Any]:
        """`decided/NAME` and `stamp/decided/NAME` of the pictures that the policy saw, by their
        times; black and 0 where one is not here any more, or was never known."""
        made: dict[str, Any] = {}
        for name in self.policy_names:
            t = taken_at.get(name, 0.0)
            t = t if t in self.kept[name] else 0.0
            made |= {f"decided/{name}": self._frame(name, t), f"stamp/decided/{name}": t}
        return made

    def stale(self, moments: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
        """The first of `moments` (with `stamp/measured`) for which a camera had nothing new, and
        which; None where all is well."""
        for k, moment in enumerate(moments):
            for name in self.sizes:
                old = moment["stamp/measured"] - moment[f"stamp/{name}"]
                if old > self.age:
                    since = f"for {old:.2f} s" if moment[f"stamp/{name}"] else "yet"
                    return k, f"camera {name} had shown nothing new {since} at step {k}"
        return None

    def _frame(self, name: str, t: float) -> Frame:
        frame = self.kept[name].get(t)
        return np.zeros((*self.sizes[name], 3), np.uint8) if frame is None else frame
