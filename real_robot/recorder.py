"""Recorder process: `python -m embodied.real_robot.recorder FOLDER`, started by the daemon.

    tick     . . . . . . . . . . . .      ring buffer of states, 100 to 1000 Hz
    step     |   k   |  k+1  |            the follower's grid, one frame each

A frame of the dataset holds the observation at the start of step k, the action that was executed in
it, and at its end the target that the action meant (`action/proposed`), the target after the safety
chain (`action/filtered`) and the joint positions that were sent (`action/sent`).

The recorder reads shared memory and controls nothing: it may stall or die, or find the disk full,
without effect on the arm. Every finished episode is on the disk before the next is processed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.core.checkpoint import CheckpointError, load_spec
from embodied.core.spec import Leaf, Spec, SpecMismatch
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.schema import DatasetError
from embodied.datasets.lerobot.writer import EpisodeWriter
from embodied.real_robot.assemble import (
    build_chain,
    open_channels,
    open_flight_recorder,
    tool_target,
)
from embodied.real_robot.cameras.policy_images import image_sizes
from embodied.real_robot.cameras.shared_frames import FrameHistory, FrameReader
from embodied.real_robot.control.main import DaemonWatch
from embodied.real_robot.deployment import Deployment, checksum
from embodied.real_robot.ipc.channels import DISCARD, RECORDED
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.mailbox import Mailbox, MailboxError
from embodied.real_robot.kernel.messages import VERSION, Mode
from embodied.real_robot.kernel.rate import Rate
from embodied.real_robot.policy.decider import Target, observe_state
from embodied.real_robot.policy.observer import Observer, Success, observer

SuccessFunction = Callable[[Floats, Floats], bool | None]
KEPT = 4096  # ticks and decisions that are looked back upon


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
    ticks: dict[float, np.void] = field(default_factory=dict[float, np.void])
    noises: dict[float, NDArray[np.float32]] = field(default_factory=dict[float, Any])
    taken_at: dict[float, dict[str, float]] = field(default_factory=dict[float, Any])
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    open: np.void | None = None
    last: np.void | None = None

    def add_decision(
        self, seen: float, noise: NDArray[np.float32], taken_at: Floats | None = None
    ) -> None:
        """The policy drew `noise` for what it saw at `seen` (s), with pictures `taken_at` (s)."""
        self.noises[seen] = noise.copy()
        if taken_at is not None:
            names = self.frames.policy_names
            self.taken_at[seen] = dict(zip(names, taken_at.tolist(), strict=True))
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


def _shorten(kept: dict[float, Any]) -> None:
    while len(kept) > KEPT:
        del kept[next(iter(kept))]


PER_STEP = 4  # looks in a step of the policy


@dataclass
class Recorder:
    """`look` often; `status` is where the daemon reads how it goes."""

    folder: Path
    ring: BlackBox
    chunk: Mailbox
    status: Mailbox
    discard: Mailbox

    def __post_init__(self) -> None:
        self.deployment = Deployment.read(self.folder)
        self.spec = self._spec(load_spec(self.deployment.policy))
        self.stages = list(build_chain(self.deployment).names)
        self.noise_size = 0
        self.builder: EpisodeBuilder | None = None
        self.writer: EpisodeWriter | None = None
        self.place = Path(self.deployment.recording)
        self.number = 0
        _, self.count = self.ring.since(0)  # what was there before is another recorder's
        self.status.fields["alive"] = 1
        self.status.send()

    def update(self) -> None:
        if self.discard.receive():
            self._discard(int(self.discard.fields["ended"][0]))
        if self.chunk.receive():
            message = self.chunk.fields[0]
            noise_size, before = int(message["noise_size"]), self.number
            self.number = int(message["number"])
            if self.builder is None or self.number < before:
                self._begin(noise_size)
            if self.builder is not None and (noise_size or self.builder.frames.policy_names):
                looked = message["image_times"][: len(self.builder.frames.policy_names)]
                noise = message["noise"][:noise_size]
                self.builder.add_decision(float(message["seen"]), noise, looked)
        if self.builder is None:
            return  # the ticks wait: the first decision was made upon one of them
        records, self.count = self.ring.since(self.count)
        self.builder.frames.update()  # after the ticks: pictures of before them have come
        for tick in records:
            episode = self.builder.add_tick(tick)
            if episode is not None:
                self._write_episode(episode)

    def close(self) -> None:
        if self.builder is not None and (episode := self.builder.finish()) is not None:
            self._write_episode(episode)
        if self.writer is not None:
            self.writer.close()

    def _begin(self, noise: int) -> None:
        """The first policy speaks, or another one: as before, where they see and draw the same."""
        self.deployment = Deployment.read(self.folder)
        full = load_spec(self.deployment.policy)
        spec = self._spec(full)
        if self.builder is not None and (spec, noise) == (self.spec, self.noise_size):
            return
        if self.builder is not None:
            # What comes now does not fit into the dataset that was begun
            if self.writer is not None:
                self.writer.close()
            first, number = Path(self.deployment.recording), 2
            while first.with_name(f"{first.name}-{number}").exists():
                number += 1
            self.writer = None
            self.place = first.with_name(f"{first.name}-{number}")
        self.spec = spec
        self.noise_size = noise
        watch, target = observer(full, self.deployment), tool_target(self.deployment)
        success, before = Success(self.deployment), self.builder
        # frames of what the policy sees, and of what is filmed
        views = {name: FrameReader(self.folder, name) for name in image_sizes(spec)}
        frames = FrameHistory(
            views, image_sizes(spec), tuple(image_sizes(full)), self.deployment.picture
        )
        self.builder = EpisodeBuilder(spec, watch, target, noise, success, frames)
        if before is not None:
            self.builder.ticks = before.ticks

    def _spec(self, full: Spec) -> Spec:
        return recorded_spec(full, self.deployment.filmed)

    def _write_episode(self, episode: Episode) -> None:
        fields = self.status.fields
        try:
            if episode.steps:
                self._write(episode)
                fields["episodes"] += 1
            fields["problem"] = episode.lost.encode()[:239]
        except (DatasetError, SpecMismatch, OSError) as error:
            fields["problem"] = str(error).encode()[:239]
        fields["ended"] += 1
        fields["success"] = -1 if episode.success is None else int(episode.success)
        fields["steps"] = len(episode.steps["action"]) if episode.steps else 0
        self.status.send()

    def _discard(self, number: int) -> None:
        fields = self.status.fields
        newest = int(fields["ended"][0]) == number != int(fields["discarded"][0])
        if not newest or fields["problem"][0]:
            return
        try:
            if self.writer is None:
                raise DatasetError("the newest episode was written by a recorder that died")
            self.writer.drop_newest()
        except (DatasetError, OSError) as error:
            fields["problem"] = str(error).encode()[:239]
        else:
            fields["episodes"] -= 1
            fields["discarded"] = number
        self.status.send()

    def _write(self, episode: Episode) -> None:
        about: dict[str, Any] = {
            "policy": self.deployment.policy,
            "given": self.deployment.given,
            "dry": self.deployment.dry,
            "stages": self.stages,
            "safety": checksum(self.deployment),
            "fault": episode.fault,
            "recorded": time.time(),
        }
        about |= {"cut": episode.lost} if episode.lost else {}
        if self.writer is None:
            images = self.deployment.images or "png"
            self.writer = EpisodeWriter(self.place, self.spec, self.deployment.robot, images)
        self.writer.add(episode.steps, info=about)


def main(folder: Path) -> None:
    """Until the daemon is gone. ConfigError, CheckpointError, MailboxError."""
    gone = threading.Event()
    DaemonWatch(lambda reason: gone.set())
    deployment = Deployment.read(folder).allow_packages()
    ring = open_flight_recorder(deployment, folder)
    status = Mailbox(folder / "recorded", RECORDED, VERSION, create=False, write=True)
    discard = Mailbox(folder / "discard", DISCARD, VERSION, create=False)
    recorder = Recorder(folder, ring, open_channels(deployment, folder).chunk, status, discard)
    rate = Rate(PER_STEP / deployment.step)
    while not gone.is_set():
        rate.wait()
        recorder.update()
    recorder.update()
    recorder.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (CheckpointError, MailboxError, ConfigError, DatasetError) as error:
        sys.exit(f"recorder: {error}")
