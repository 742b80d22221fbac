"""Trainings of a sweep on a Ray cluster: each is a process beside an actor that has its cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from embodied.core.build import ConfigError
from embodied.study.launcher import Launcher, Training
from embodied.study.ray_runner import Runner
from embodied.study.study import STOPPED
from embodied.training.actors.ray_connection import connected, imported


class RayTraining(Training):
    """One whose machine is lost counts as interrupted: the next sweep goes on with it."""

    def __init__(self, ray: Any, words: Sequence[str], folder: Path, needs: dict[str, int]) -> None:
        self.ray, self.folder = ray, folder
        mark, name = uuid4().hex, str(folder.resolve())
        Path(f"{name}.ray").write_text(mark)
        options = {"max_concurrency": 2, "num_cpus": needs["CPU"], "num_gpus": needs["GPU"]}
        self.runner = ray.remote(Runner).options(**options).remote()
        self.placed = self.runner.__ray_ready__.remote()
        self.end = self.runner.run.remote(list(words), name, os.getcwd(), mark)
        self.code: int | None = None

    def poll(self) -> int | None:
        return self._code(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("embodied train", timeout or 0.0)
        return code

    def interrupt(self) -> None:
        if self.ray.wait([self.placed], timeout=0)[0]:
            self.runner.interrupt.remote()
        else:  # it waits for a machine, and has nothing to save
            self.code = STOPPED
            self.ray.kill(self.runner)

    def _code(self, timeout: float | None) -> int | None:
        if self.code is None and self.ray.wait([self.end], timeout=timeout)[0]:
            self.code = self._ended()
            self.ray.kill(self.runner)
        return self.code

    def _ended(self) -> int:
        try:
            code = self.ray.get(self.end)
        except self.ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            print(f"{self.folder} ended with its machine: {reason}", file=sys.stderr, flush=True)
            return STOPPED
        if isinstance(code, str):
            raise ConfigError(code)
        return code


class Ray(Launcher):
    """The cluster of RAY_ADDRESS, whose machines share the folder; else one that is started here.
    A training has `threads` cores, and a GPU with `device` cuda."""

    def __init__(self, threads: int, device: str) -> None:
        self.needs = {"CPU": threads, "GPU": int(device.startswith("cuda"))}
        self.ray = imported("on=ray")
        self.ours = connected(self.ray)
        try:
            self._require_machine()
        except ConfigError:
            self.close()
            raise

    def start(self, words: Sequence[str], folder: Path) -> RayTraining:
        return RayTraining(self.ray, words, folder, self.needs)

    def interrupt(self, process: Training, folder: Path) -> None:
        assert isinstance(process, RayTraining)
        process.interrupt()

    def close(self) -> None:
        if self.ours:
            self.ray.shutdown()

    def _require_machine(self) -> None:
        """ConfigError if a training fits on no machine: it would wait for ever."""
        have = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(each.get(k, 0) >= n for k, n in self.needs.items()) for each in have):
            largest = {key: int(max(each.get(key, 0) for each in have)) for key in self.needs}
            raise ConfigError(
                f"a training needs {_text(self.needs)} on one machine of the Ray cluster, which "
                f"has at most {_text(largest)}: fewer threads=, or device=cpu"
            )


def _text(resources: dict[str, int]) -> str:
    return f"{resources['CPU']} cores and {resources['GPU']} GPUs"
