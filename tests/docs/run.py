"""Runs steps of a page in a folder: commands as the terminal does, Python in one namespace.

Processes are forked from one that has imported what most of them need (not MuJoCo, which
opens a display), which saves two seconds each.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.docs import small
from tests.docs.blocks import ROOT, Step

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("torch", "gymnasium", "hydra.compose", "embodied.compose", "embodied.training.trainer"),
        *("embodied.commands.train", "embodied.commands.eval", "embodied.commands.demos"),
        *("embodied.teachers.teacher", "embodied.reports.run_report"),
    ]
)
LIMIT = 900.0  # s of one step, on a busy machine too
TRIES = 3  # with a robot: a busy machine makes a simulated one late, which stops it
READY = re.compile(r"\b(?:http|ws)://127\.0\.0\.1:\d+")


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    threads = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **threads, "PATH": path, "PYTHONPATH": str(ROOT)}


def _enter(folder: Path, log: Path, env: Mapping[str, str]) -> None:
    """Make this process one that was started in `folder`, and writes to `log`."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [""]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _command(words: list[str], folder: Path, log: Path, env: Mapping[str, str]) -> None:
    from embodied.cli import main

    _enter(folder, log, env)
    sys.argv = ["embodied", *words]
    main(words)


def _python(pipe: Connection, folder: Path, log: Path, env: Mapping[str, str]) -> None:
    """Runs each code that comes, in one namespace, and answers with what went wrong."""
    _enter(folder, log, env)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    while True:
        try:
            exec(compile(pipe.recv(), "<page>", "exec"), namespace)
            pipe.send("")
        except EOFError:
            return
        except Exception:
            pipe.send(traceback.format_exc())


class Page:
    """One page that is being worked through in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / ".log"
        self.log.touch()
        self.private = folder / ".robot"
        self.private.mkdir(mode=0o700)
        self.services: list[ForkServerProcess] = []
        self.pipe: Connection | None = None

    def run(self, step: Step) -> None:
        if step.kind == "file":
            place = self.folder / step.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(step.text)
        else:
            {"python": self.python, "command": self.command}[step.kind](step.text)

    def python(self, code: str) -> None:
        if self.pipe is None:
            self.pipe, other = FORKS.Pipe()
            self._start(_python, other)
            other.close()
        self.pipe.send(small.python(code, str(self.private)))
        assert self.pipe.poll(LIMIT), "it goes on and on"
        problem = self.pipe.recv()
        assert not problem, f"{code}\n{problem}\n{self._said()}"

    def command(self, text: str) -> None:
        words = small.command(shlex.split(text), str(self.private))
        with self.log.open("a") as log:
            print(f"$ {shlex.join(words)}", file=log)
        if small.serves(words):
            self._serve(words)
        elif words[0] == "embodied":
            tries = TRIES if small.has_robot(words) else 1
            ok = any(self._ends_well(words[1:]) for _ in range(tries))
            assert ok, f"{shlex.join(words)}: {self._said()}"
        else:
            line = shlex.join(words) if small.verb_of(words) else text
            self._bash(line)

    def as_written(self, line: str) -> str:
        """Run a command of `embodied` without making it short; the last line that it prints."""
        assert self._ends_well(shlex.split(line)[1:]), f"{line}: {self._said()}"
        return self._said().splitlines()[-1]

    def _ends_well(self, words: list[str]) -> bool:
        process = self._start(_command, words)
        process.join(LIMIT)
        if process.exitcode != 0:  # what it left would be in the way of another try
            for out in (word[4:] for word in words if word.startswith("out=")):
                shutil.rmtree(self.folder / out, ignore_errors=True)
        return process.exitcode == 0

    def _start(self, target: Callable[..., None], what: Any) -> ForkServerProcess:
        process = FORKS.Process(target=target, args=(what, self.folder, self.log, environment()))
        process.start()
        return process

    def _bash(self, line: str) -> None:
        words = ["bash", "-ec", line]
        with self.log.open("ab") as log:
            done = subprocess.run(
                words, cwd=self.folder, env=environment(), stdout=log, stderr=log, timeout=LIMIT
            )
        assert done.returncode == 0, f"{line}: {self._said()}"

    def _serve(self, words: list[str]) -> None:
        """Start it and wait until it says where it listens; it goes on until the page ends."""
        before = len(self._said(None))
        service = self._start(_command, words[1:])
        self.services.append(service)
        end = time.monotonic() + LIMIT
        while (found := READY.search(self._said(None)[before:])) is None:
            assert service.is_alive() and time.monotonic() < end, self._said()
            time.sleep(0.1)
        if found[0].startswith("http"):
            with urllib.request.urlopen(found[0], timeout=LIMIT) as page:
                assert b"<html" in page.read().lower()

    def close(self) -> None:
        """End what serves; it must have gone on until now."""
        if self.pipe is not None:
            self.pipe.close()
        ended = [service.exitcode for service in self.services]
        for service in self.services:
            service.kill()
            service.join()
        assert ended == [None] * len(ended), self._said()

    def _said(self, last: int | None = 3000) -> str:
        return self.log.read_text(errors="replace")[-last if last else None :]
