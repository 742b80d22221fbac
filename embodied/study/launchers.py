"""Where the trainings of a sweep run: processes of this machine, jobs of Slurm, or on Ray."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from embodied.core.build import ConfigError
from embodied.study.launcher import Launcher, Training
from embodied.study.ray_launcher import Ray
from embodied.study.study import program

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
