"""Trainings of a sweep on a Ray cluster: each is a process beside an actor that has its cores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError
from embodied.study.launchers import Launcher, Training
from embodied.study.ray_runner import Runner
from embodied.study.study import STOPPED, program
from embodied.training.actors.ray_cluster import connect, imported

KNOWN = ("cpus", "gpus")


class RayTraining(Training):
    """One whose machine is lost counts as interrupted: the next sweep goes on with it."""

    def __init__(
        self, ray: Any, words: Sequence[str], folder: Path, needs: dict[str, float]
    ) -> None:
        self.ray = ray
        options = {f"num_{name}": number for name, number in needs.items()}
        self.runner = ray.remote(Runner).options(max_concurrency=2, **options).remote()
        self.end = self.runner.run.remote(program(words), f"{folder.resolve()}.log", os.getcwd())
        self.code: int | None = None

    def poll(self) -> int | None:
        return self._code(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("embodied train", timeout or 0.0)
        return code

    def _code(self, timeout: float | None) -> int | None:
        if self.code is None and self.ray.wait([self.end], timeout=timeout)[0]:
            try:
                code = self.ray.get(self.end)
                self.code = STOPPED if code is None else code
            except self.ray.exceptions.RayError:
                self.code = STOPPED
            self.ray.kill(self.runner)
        return self.code


class Ray(Launcher):
    """The cluster of RAY_ADDRESS, whose machines share the folder; else one that is started here.
    `options`: cores and GPUs of a training, as `cpus=2 gpus=1`."""

    def __init__(self, options: str = "") -> None:
        self.needs = {"cpus": 1.0, **_needs(options)}
        self.ray = imported("on=ray")
        if not self.ray.is_initialized():
            connect(self.ray)

    def start(self, words: Sequence[str], folder: Path) -> RayTraining:
        return RayTraining(self.ray, words, folder, self.needs)

    def interrupt(self, process: Training, folder: Path) -> None:
        assert isinstance(process, RayTraining)
        process.runner.interrupt.remote()


def _needs(options: str) -> dict[str, float]:
    """ConfigError unless all are `cpus=NUMBER` or `gpus=NUMBER`."""
    found = dict[str, float]()
    for word in options.split():
        name, _, number = word.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            name = ""
        if name not in KNOWN:
            raise ConfigError(f'ray="{options}" should be as ray="cpus=2 gpus=1"')
    return found
