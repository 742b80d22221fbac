"""Record: from the control process's ticks to the steps of an episode, as a dataset keeps them.

    tick     . . . . . . . . . . . .      ring of states, 100 to 1000 Hz
    step     |   k   |  k+1  |            the follower's grid, one row each

A row is what was seen as step k began, the action that the arm followed in it, and at its end what
that had come to: the target it meant (`action/proposed`), what safety left of it
(`action/filtered`) and what the arm was sent (`action/sent`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from real_robot.arm import Floats
from real_robot.decide import Target, observed
from real_robot.messages import Mode
from real_robot.observe import Observer

Judge = Callable[[Floats, Floats], bool | None]
KEPT = 4096  # ticks, and noises, that are looked back upon


def seen_spec(spec: Spec) -> Spec:
    """`spec` with the observations that are kept of a robot: none that only a simulator knows, and
    no pictures (a camera is the policy process's alone)."""
    hidden = ("critic/", "privileged/")
    obs = {
        name: leaf
        for name, leaf in spec.obs.items()
        if not name.startswith(hidden) and not leaf.is_image
    }
    return replace(spec, obs=obs, task=None)


@dataclass(frozen=True)
class Episode:
    """Rows as `EpisodeWriter.add` takes them, and how the episode ended."""

    rows: Tensors
    fault: str
    success: bool | None


class Scribe:
    """`take` ticks as they come and `hear` the policy's `noise` numbers; says when an episode is
    whole. A row whose decision was not heard, or which was made upon a tick that was not seen (the
    recorder was late), has zeros for noise."""

    def __init__(
        self, spec: Spec, observer: Observer, target: Target, noise: int, success: Judge
    ) -> None:
        self.spec, self.observer, self.target, self.noise = spec, observer, target, noise
        self.success = success
        self.ticks: OrderedDict[float, np.void] = OrderedDict()
        self.noises: OrderedDict[float, NDArray[np.float32]] = OrderedDict()
        self.rows: list[dict[str, Any]] = []
        self.open: np.void | None = None
        self.last: np.void | None = None

    def hear(self, seen: float, noise: NDArray[np.float32]) -> None:
        """The policy drew `noise` for what it saw at `seen` (s)."""
        self.noises[seen] = noise.copy()
        _shorten(self.noises)

    def take(self, tick: np.void) -> Episode | None:
        """The next tick; the episode that ended with it, if one did."""
        self.ticks[float(tick["measured"])] = tick
        _shorten(self.ticks)
        before, self.last = self.last, tick
        runs = int(tick["mode"]) == Mode.RUNNING
        ran = before is not None and int(before["mode"]) == Mode.RUNNING
        if runs and not ran:
            self.rows, self.open = [], None
        if runs and (self.open is None or tick["step"] != self.open["step"]):
            self._close(before if ran else None)
            self.open = tick if tick["size"] and not tick["starved"] else None
        if ran and not runs and before is not None:
            self._close(before)
            return self._whole(before, tick)
        return None

    def finish(self) -> Episode | None:
        """No tick will come any more: the episode that was under way, as far as it went."""
        if self.last is None or int(self.last["mode"]) != Mode.RUNNING:
            return None
        self._close(self.last)
        return self._whole(self.last, self.last)

    def _close(self, last: np.void | None) -> None:
        """The step that was open ended with tick `last`."""
        if self.open is None or last is None:
            return
        begin, size = self.open, int(self.open["size"])
        followed = float(begin["followed"])
        acted = begin["action"][:size].copy()
        if size != self.spec.act.size or not np.isfinite(acted).all():
            return  # it was refused, and followed by nobody
        row: dict[str, Any] = {f"obs/{k}": v for k, v in self._seen(begin).items()}
        decided = self._seen(self.ticks.get(followed, begin))  # what the policy saw then
        row |= {f"decided/{k}": v for k, v in decided.items()}
        row |= {"action": acted, "reward": 0.0}
        row |= {f"action/{k}": last[k].copy() for k in ("proposed", "filtered", "sent")}
        row |= {"tau": begin["tau"].copy(), "stamp/measured": float(begin["measured"])}
        row |= {"stamp/decided": followed, "stamp/sent": float(begin["now"])}
        row["interventions"] = (last["counts"] - begin["counts"]).copy()
        if self.noise:
            nothing = np.zeros(self.noise, np.float32)
            drawn = self.noises.get(followed, nothing)
            row["noise"] = drawn if followed in self.ticks else nothing
        done = self.success(last["q"], last["sensed"])
        if done is not None:
            row |= {"success": done, "reward": float(done)}
        self.rows.append(row)

    def _seen(self, tick: np.void) -> dict[str, NDArray[np.float32]]:
        return observed(self.observer, tick, self.target)

    def _whole(self, last: np.void, after: np.void) -> Episode | None:
        rows, self.rows, self.open = self.rows, [], None
        if not rows:
            return None
        made = {key: torch.as_tensor(np.stack([row[key] for row in rows])) for key in rows[0]}
        made["reward"] = made["reward"].float()
        made |= {f"next_obs/{k}": torch.as_tensor(v) for k, v in self._seen(last).items()}
        ended = torch.zeros(len(rows), dtype=torch.bool)
        success = bool(made["success"][-1]) if "success" in made else None
        made |= {"terminated": ended.clone(), "truncated": ended}
        made["terminated"][-1] = bool(success)
        fault = bytes(after["fault"]).decode(errors="replace")
        return Episode(made, fault, success)


def _shorten(kept: OrderedDict[float, Any]) -> None:
    while len(kept) > KEPT:
        kept.popitem(last=False)
