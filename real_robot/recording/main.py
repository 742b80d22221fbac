"""Recorder process: `python -m embodied.real_robot.recording.main FOLDER`, started by the daemon.

It reads the shared memory of the other processes and controls nothing: it may stall or die, or find
the disk full, without effect on the arm. Every finished episode is on the disk before the next is
processed.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError
from embodied.core.checkpoint import CheckpointError, load_spec
from embodied.core.spec import Spec, SpecMismatch
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
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import DISCARD, RECORDED
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.kernel.mailbox import Mailbox, MailboxError
from embodied.real_robot.kernel.messages import VERSION
from embodied.real_robot.kernel.rate import Rate
from embodied.real_robot.policy.observer import Success, observer
from embodied.real_robot.recording.recorder import Episode, EpisodeBuilder, recorded_spec
from embodied.real_robot.safety.parameters import checksum

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
        """Take what is new."""
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
        """Keep what was under way, and let go of the dataset."""
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
        """The newest episode is removed again, if it is that one and on the disk."""
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
