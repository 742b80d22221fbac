"""Turns ticks of the control process into the frames of an episode, as a dataset keeps them.

    tick     . . . . . . . . . . . .      ring buffer of states, 100 to 1000 Hz
    step     |   k   |  k+1  |            the follower's grid, one frame each

A frame holds the observation at the start of step k, the action that was executed in it, and at its
end the target that the action meant (`action/proposed`), the target after the safety chain
(`action/filtered`) and the joint positions that were sent (`action/sent`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.real_robot.cameras.shared_frames import FrameHistory
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.policy.decider import Target, observe_state
from embodied.real_robot.policy.observer import Observer

SuccessFunction = Callable[[Floats, Floats], bool | None]
KEPT = 4096  # ticks, and noises, that are taken_at back upon


def recorded_spec(spec: Spec, filmed: Mapping[str, tuple[int, int]] | None = None) -> Spec:
    """`spec` with the observations that are kept of a robot: none that only a simulator knows, and
    the `filmed` pictures (height, width) that the policy does not see."""
    hidden = ("critic/", "privileged/")
    obs = {name: leaf for name, leaf in spec.obs.items() if not name.startswith(hidden)}
    for name, size in (filmed or {}).items():
        obs.setdefault(name, Leaf((*size, 3), "uint8", 0, 255))
    return replace(spec, obs=obs, task=None)


@dataclass(frozen=True)
class Episode:
    """Rows as `EpisodeWriter.add` takes them, and how the episode ended. `lost` says why the rest
    of it is not there, where it had to be cut; then there may be no steps at all."""

    steps: Tensors
    fault: str
    success: bool | None
    lost: str = ""


@dataclass
class EpisodeBuilder:
    """`take` ticks as they come and `hear` the policy's `noise` numbers; says when an episode is
    whole. A step whose decision was not heard, or which was made upon a tick that was not seen (the
    recorder was late), has zeros for noise. Pictures come from the `frames`."""

    spec: Spec
    observer: Observer
    target: Target
    noise: int
    success: SuccessFunction
    frames: FrameHistory = field(default_factory=lambda: FrameHistory({}, {}, (), 0.0))
    ticks: OrderedDict[float, np.void] = field(default_factory=OrderedDict[float, np.void])
    noises: OrderedDict[float, NDArray[np.float32]] = field(
        default_factory=OrderedDict[float, NDArray[np.float32]]
    )
    taken_at: OrderedDict[float, dict[str, float]] = field(
        default_factory=OrderedDict[float, dict[str, float]]
    )
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    open: np.void | None = None
    last: np.void | None = None

    def add_decision(
        self, seen: float, noise: NDArray[np.float32], taken_at: Floats | None = None
    ) -> None:
        """The policy drew `noise` for what it saw at `seen` (s); its pictures were taken at
        `taken_at` (s)."""
        self.noises[seen] = noise.copy()
        if taken_at is not None:
            self.taken_at[seen] = dict(
                zip(self.frames.policy_names, taken_at.tolist(), strict=True)
            )
        _shorten(self.noises)
        _shorten(self.taken_at)

    def add_tick(self, tick: np.void) -> Episode | None:
        """The next tick; the episode that ended with it, if one did."""
        self.ticks[float(tick["measured"])] = tick
        _shorten(self.ticks)
        before = self.last
        self.last = tick
        runs = int(tick["mode"]) == Mode.RUNNING
        ran = before is not None and int(before["mode"]) == Mode.RUNNING
        if runs and not ran:
            self.steps = []
            self.open = None
        if runs and (self.open is None or tick["step"] != self.open["step"]):
            self._close_step(before if ran else None)
            self.open = tick.copy() if tick["size"] and not tick["starved"] else None
            if self.open is not None and before is not None:  # before its action moved it
                self.open["reference"] = before["reference"]
        if ran and not runs and before is not None:
            self._close_step(before)
            return self._finish_episode(before, tick)
        return None

    def finish(self) -> Episode | None:
        """No tick will come any more: the episode that was under way, as far as it went."""
        if self.last is None or int(self.last["mode"]) != Mode.RUNNING:
            return None
        self._close_step(self.last)
        return self._finish_episode(self.last, self.last)

    def _close_step(self, last: np.void | None) -> None:
        """The step that was open ended with tick `last`."""
        if self.open is None or last is None:
            return
        begin, size = self.open, int(self.open["size"])
        followed = float(begin["followed"])
        acted = begin["action"][:size].copy()
        if size != self.spec.act.size or not np.isfinite(acted).all():
            return  # it was refused, and not followed
        step: dict[str, Any] = {f"obs/{k}": v for k, v in self._seen(begin).items()}
        decided = self._seen(self.ticks.get(followed, begin))  # what the policy saw then
        step |= {f"decided/{k}": v for k, v in decided.items()}
        step |= self.frames.at(float(begin["measured"]))
        step |= self.frames.decided(self.taken_at.get(followed, {}))
        step |= {"action": acted, "reward": 0.0}
        step |= {f"action/{k}": last[k].copy() for k in ("proposed", "filtered", "sent")}
        step |= {"tau": begin["tau"].copy(), "stamp/measured": float(begin["measured"])}
        step |= {"stamp/decided": followed, "stamp/sent": float(begin["now"])}
        step["intervened"] = bool(begin["intervened"])
        step["interventions"] = (last["counts"] - begin["counts"]).copy()
        if self.noise:
            nothing = np.zeros(self.noise, np.float32)
            drawn = self.noises.get(followed, nothing)
            mine = followed in self.ticks and not begin["intervened"]
            step["noise"] = drawn if mine else nothing
        done = self.success(last["q"], last["sensed"])
        if done is not None:
            step |= {"success": done, "reward": float(done)}
        self.steps.append(step)

    def _seen(self, tick: np.void) -> dict[str, NDArray[np.float32]]:
        return observe_state(self.observer, tick, self.target)

    def _finish_episode(self, last: np.void, after: np.void) -> Episode | None:
        steps = self.steps
        self.steps = []
        self.open = None
        if not steps:
            return None
        fault = bytes(after["fault"]).decode(errors="replace")
        measured = float(last["measured"])
        final: dict[str, Any] = {f"obs/{k}": v for k, v in self._seen(last).items()}
        final |= {**self.frames.at(measured), "stamp/measured": measured}
        lost = self.frames.stale([*steps, final])
        if lost is not None:  # the last moment with all its pictures is where it ends
            before, final = max(0, lost[0] - 1), steps[max(0, lost[0] - 1)]
            steps = steps[:before]
        words = "" if lost is None else f"{lost[1]}; {len(steps)} steps before it are kept"
        if not steps:
            return Episode({}, fault, None, words)
        made = {key: torch.as_tensor(np.stack([step[key] for step in steps])) for key in steps[0]}
        made["reward"] = made["reward"].float()
        ends = {k: torch.as_tensor(final[f"obs/{k}"]) for k in self.spec.obs}
        made |= {f"next_obs/{k}": v for k, v in ends.items()}
        ended = torch.zeros(len(steps), dtype=torch.bool)
        success = bool(made["success"][-1]) if "success" in made else None
        made |= {"terminated": ended.clone(), "truncated": ended}
        made["terminated"][-1] = bool(success)
        return Episode(made, fault, success, words)


def _shorten(kept: OrderedDict[float, Any]) -> None:
    while len(kept) > KEPT:
        kept.popitem(last=False)
