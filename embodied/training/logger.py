"""Log: writes metrics to metrics.jsonl, the terminal and, if asked, TensorBoard or wandb."""

from __future__ import annotations

import hashlib
import json
import netrc
import os
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from embodied.core.atomic_write import write_durably
from embodied.core.files import read_bytes, require_file

REFRESH = 0.2  # s between redraws of the bar
LARGEST = 3.4e38  # of a float32
PLAIN = 5.0  # s between lines if the output is not a terminal


class Log:
    """One run's log; `folder/metrics.jsonl` has one JSON object per line. Every line has `step`,
    `seconds` (wall time, over all resumes) and metrics such as `train/critic_loss` and
    `eval/success`. `last` holds the newest value of each. After a resume, lines past the resumed
    step and an incomplete last line are dropped. Without `begin` nothing is printed. A `silent` log
    prints and writes nothing. `also`: "tensorboard" or "wandb"."""

    def __init__(self, folder: Path, also: str | None = None, silent: bool = False) -> None:
        self.folder, self.file = Path(folder), Path(folder) / "metrics.jsonl"
        self.silent = silent
        self.last: dict[str, float] = {}
        self._began = time.monotonic()
        self._cut: int | None = None
        self._opened = False
        self._shown: _Bar | _Lines | None = None
        self._console: Console | None = None
        self._also: Any = None
        self._wanted = also

    def begin(
        self,
        facts: Mapping[str, str],
        steps: int,
        step: int,
        config: Any = None,
        verbose: bool = True,
    ) -> None:
        """Print `facts` and show progress from `step` to `steps`, if `verbose`. Metrics past `step`
        are dropped: `step` 0 starts a new file."""
        self._cut = step
        if self.silent:
            return
        if verbose:
            self._console = console = Console(highlight=False)
            for name, value in facts.items():
                self.fact(name, value)
            kind = _Bar if console.is_terminal else _Lines
            self._shown = kind(console, steps, step)
        if self._wanted == "wandb":
            self._also = _start_wandb(self.folder, config)
        elif self._wanted == "tensorboard":
            self._also = EventFile(self.folder, step)

    def fact(self, name: str, value: str) -> None:
        """Print one more fact, if `begin` printed some."""
        if self._console is not None:
            self._console.print(f"{name:>8}  {value}", soft_wrap=True, markup=False)

    def evaluated(self, step: int) -> bool:
        """Whether an evaluation at `step` was logged, now or before the run was resumed."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        rows = (json.loads(line) for line in lines)
        return any(row["step"] == step and any(k.startswith("eval/") for k in row) for row in rows)

    def write(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Append metrics of `step` (numbers, or 0-d tensors: only here are they waited for)."""
        values = {key: float(value) for key, value in metrics.items()}
        if not values or self.silent:
            return
        if not self._opened:
            self._open(step if self._cut is None else self._cut)
        line = {"step": step, "seconds": round(time.monotonic() - self._began, 3), **values}
        try:
            with self.file.open("a") as sink:
                sink.write(json.dumps(line) + "\n")
        except OSError as error:  # the error of a full disk does not name the file
            raise OSError(error.errno, error.strerror, str(self.file)) from error
        self.last |= values
        if self._also is not None:
            self._also.log(values, step=step)
        if self._shown is not None:
            self._shown.tell(self.last)

    def advance(self, step: int) -> None:
        if self._shown is not None:
            self._shown.advance(step)

    def warn(self, line: str) -> None:
        if not self.silent:
            print(f"embodied: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the progress bar and finish the wandb run or the file of TensorBoard."""
        if self._shown is not None:
            self._shown.close()
        if self._also is not None:
            self._also.finish()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, step: int) -> None:
        """Keep the lines up to `step` and continue their clock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = read_metrics(self.folder)
        kept = [row for row in rows if row["step"] <= step and (step > 0 or self._cut is None)]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        write_durably(self.file, lambda sink: sink.write(text.encode()))
        for row in kept:
            self.last |= {key: row[key] for key in row if key not in ("step", "seconds")}
        self._began -= kept[-1]["seconds"] if kept else 0.0
        self._opened = True


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without an incomplete last one; [] without a file."""
    file = Path(folder) / "metrics.jsonl"
    if not file.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in read_bytes(file, require_file(file)).splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break  # after a power failure the file can end in zero bytes
        rows.append(row)
    return rows


class _Bar:
    def __init__(self, console: Console, steps: int, step: int) -> None:
        self.shown, self.start, self.began = 0.0, step, time.monotonic()
        self.progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}"),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        self.task = self.progress.add_task("", total=steps, completed=step, rate="", note="")
        self.progress.start()

    def advance(self, step: int) -> None:
        now = time.monotonic()
        if now - self.shown > REFRESH or step >= (self.progress.tasks[0].total or 0):
            self.shown = now
            rate = (step - self.start) / max(now - self.began, 1e-9)
            self.progress.update(self.task, completed=step, rate=f"{rate:,.0f}/s", refresh=True)

    def tell(self, last: Mapping[str, float]) -> None:
        self.progress.update(self.task, note=newest(last), refresh=True)

    def close(self) -> None:
        self.progress.stop()


class _Lines:
    """Plain progress lines, for output without a terminal."""

    def __init__(self, console: Console, steps: int, step: int) -> None:
        self.steps, self.start, self.note = steps, step, ""
        self.began = self.shown = time.monotonic()

    def advance(self, step: int) -> None:
        now = time.monotonic()
        if now - self.shown > PLAIN:
            self.shown = now
            rate = (step - self.start) / (now - self.began)
            left = (self.steps - step) / max(rate, 1e-9)
            print(
                f"{step}/{self.steps}  {rate:,.0f}/s  {left:,.0f} s left  {self.note}", flush=True
            )

    def tell(self, last: Mapping[str, float]) -> None:
        self.note = newest(last)

    def close(self) -> None:
        """Nothing to close."""


def newest(last: Mapping[str, float]) -> str:
    """The most informative metric: success or return of evaluation, else of training."""
    if "eval/loss" in last:
        error = last.get("eval/action_error", float("nan"))
        return f"held-out loss {last['eval/loss']:.4g}, action error {error:.1%} of the range"
    for key in ("eval/success", "eval/return", "train/success", "train/return"):
        if key in last:
            value = f"{last[key]:.0%}" if key.endswith("success") else f"{last[key]:,.1f}"
            imagined = last.get("eval/imagined_success")
            beside = "" if imagined is None else f", imagined success {imagined:.0%}"
            return f"{key.replace('/', ' ')} {value}{beside}"
    return f"loss {last['train/loss']:.4g}" if "train/loss" in last else ""


def _start_wandb(folder: Path, config: Any) -> Any:
    """A wandb run in `folder`, offline unless the user is logged in or WANDB_MODE is set."""
    import wandb

    if not _logged_in():
        os.environ.setdefault("WANDB_MODE", "offline")
    folder.mkdir(parents=True, exist_ok=True)
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    name = f"{folder.parent.name}/{folder.name}"
    return wandb.init(
        project="embodied", dir=folder, name=name, id=identity, resume="allow", config=config
    )


def _logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


class EventFile:
    """A new file in `folder` that TensorBoard reads, which replaces what earlier files have after
    `step`; nothing has to be installed to write it. Records are a length, its checksum, data and
    their checksum (TFRecord); the data protocol buffers `Event`: wall_time = 1, step = 2,
    file_version = 3, summary = 5, session_log = 7."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.embodied.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._add(0, _field(3, b"brain.Event:2"))
        if step:
            self._add(step + 1, _field(7, b"\x08\x01"))  # SessionLog.START

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append the `values` of `step`, by name."""
        pairs = ((name, max(min(value, LARGEST), -LARGEST)) for name, value in values.items())
        each = (_field(1, name.encode()) + b"\x15" + struct.pack("<f", v) for name, v in pairs)
        self._add(step, _field(5, b"".join(_field(1, value) for value in each)))

    def finish(self) -> None:
        self._file.close()

    def _add(self, step: int, content: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + content
        size = struct.pack("<Q", len(event))
        self._file.write(size + _checksum(size) + event + _checksum(event))
        self._file.flush()


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
