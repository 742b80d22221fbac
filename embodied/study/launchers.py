"""Where the trainings of a sweep run: processes of this machine, jobs of Slurm, or on Ray."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from embodied.core.build import ConfigError
from embodied.study.ray_runner import Runner
from embodied.study.study import STOPPED, program
from embodied.training.actors.ray_connection import connected, imported


class Training(Protocol):
    """A training that runs somewhere, as `subprocess.Popen` has it."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended. subprocess.TimeoutExpired."""
        ...


class Launcher(ABC):
    """Starts trainings and asks them to save and end. `terminal`: whether Ctrl-C in the sweep's
    terminal reaches them without `interrupt`."""

    terminal = False

    @abstractmethod
    def start(self, words: Sequence[str], folder: Path) -> Training:
        """Begin the training `words`. FOLDER.log has what it prints."""

    @abstractmethod
    def interrupt(self, process: Training, folder: Path) -> None:
        """SIGINT: the training of `folder` saves a checkpoint and ends."""

    def close(self) -> None:  # noqa: B027  most have nothing to end
        """After the sweep."""


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


WARNED = 120  # s before a job's time limit in which its training saves where it is


class Here(Launcher):
    """Processes of this machine."""

    terminal = True

    def start(self, words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
        with Path(f"{folder}.log").open("a") as log:
            return subprocess.Popen(program(words), stdout=log, stderr=subprocess.STDOUT)

    def interrupt(self, process: Training, folder: Path) -> None:
        assert isinstance(process, subprocess.Popen)
        process.send_signal(signal.SIGINT)


class Slurm(Launcher):
    """Jobs of `sbatch --wait`, whose folder all machines share; `options` are more words of it."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        self.options = list(options)
        for name in ("sbatch", "scancel"):
            if shutil.which(name) is None:
                raise ConfigError(f"on=slurm needs {name}, which is not on this machine: on=here")

    def start(self, words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
        script = Path(f"{folder}.sbatch")
        script.write_text(self._script(words, folder))
        with Path(f"{folder}.slurm").open("a") as said:
            return subprocess.Popen(
                ["sbatch", "--wait", *self.options, str(script)],
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C: `interrupt` ends the job, then sbatch ends
            )

    def interrupt(self, process: Training, folder: Path) -> None:
        job = f"--name={_name(folder)}"
        subprocess.run(["scancel", "--state=PENDING", job])  # has nothing to save
        subprocess.run(["scancel", "--batch", "--signal=INT", job])

    def _script(self, words: Sequence[str], folder: Path) -> str:
        lines = [
            "#!/bin/bash",
            f"#SBATCH --job-name={_name(folder)}",
            f"#SBATCH --output={folder.resolve()}.log",
            "#SBATCH --open-mode=append",
            f"#SBATCH --signal=B:INT@{WARNED}",
            f"cd {shlex.quote(os.getcwd())}",
            f"exec {shlex.join(program(words))}",  # signals go to the training itself
        ]
        return "\n".join(lines) + "\n"


def _name(folder: Path) -> str:
    """The job's, which no other sweep of this user has."""
    return "-".join(part for part in folder.resolve().parts[1:] if part)


def launcher(on: str, options: str | None, threads: int = 1, device: str = "auto") -> Launcher:
    """`on` is here, slurm or ray; `options` (None: not given) are words of sbatch; `threads` and
    `device` of each training."""
    if on not in ("here", "slurm", "ray"):
        raise ConfigError(f"on={on} should be here, slurm or ray")
    if on == "slurm":
        return Slurm(shlex.split(options or ""))
    if options is not None:
        raise ConfigError("slurm= has an effect with on=slurm only")
    if on == "here":
        return Here()
    return Ray(threads, device)
