"""EpisodeWriter: episodes to disk, each one safe from the moment `add` returns."""

# pyright: basic
# (pyarrow and PyAV have no types)
from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from embodied.core.atomic_write import write_durably, write_json
from embodied.core.spec import Leaf, Spec, require_same
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot import schema
from embodied.datasets.lerobot.consolidate import consolidate, statistics
from embodied.datasets.lerobot.schema import (
    ROW,
    Column,
    DatasetError,
    columns_of,
    columns_of_info,
    list_pending,
    pending_file,
    read_index,
    read_info,
    spec_of_info,
)
from embodied.datasets.lerobot.video import encode_film, encode_png


class EpisodeWriter:
    """Writes a dataset in the LeRobot v3 layout, or goes on with one that is there.

    `add` makes each finished episode durable in a small file of its own; `close` (or leaving the
    `with` block) moves them into the large files. Whenever the process is killed, `read_episodes`
    finds every finished episode, and the next writer goes on from there.

    `images` says how camera pictures are kept: "mp4" (small; three channels, even sides) or "png"
    (exact). It is fixed by the first episode, as are the extra columns. SpecMismatch where the
    folder holds episodes of another Spec; DatasetError where something else writes to it.
    """

    def __init__(
        self,
        path: Path | str,
        spec: Spec,
        robot: str = "fr3",
        images: Literal["mp4", "png"] = "mp4",
    ) -> None:
        self.path, self.spec, self.robot = Path(path), spec, robot
        self.stored = {"mp4": "video", "png": "image"}[images]
        self.fps = schema.frames_per_second(spec)
        self.columns: tuple[Column, ...] = ()
        self.count = 0
        self._lock: int | None = self._locked()
        try:
            if (self.path / "meta" / "info.json").exists():
                self._continue()
        except BaseException:
            self._unlock()
            raise

    def __len__(self) -> int:
        """Finished episodes in the folder."""
        return self.count

    def add(
        self, episode: Tensors, text: str | None = None, info: Mapping[str, Any] | None = None
    ) -> int:
        """Keep one episode of T steps and return its number.

        `obs/<name>` [T, ...] (what was acted on), `next_obs/<name>` (the final observation: [...],
        [1, ...], or [T, ...] of which the last counts), `action` [T, A], `reward` [T],
        `terminated` [T], `truncated` [T]; optional `success` [T], `task` ([D] or [T, D]) and any
        other numbers [T, ...]. `text` is the task in words (the Spec's if None), `info` anything
        that JSON can hold. An episode that merely stops counts as truncated.
        """
        steps, final = self._checked(episode)
        if not self.columns:
            self._begin(steps)
        here = {column.key: column.shape for column in self.columns}
        there = {key: tuple(steps[key].shape[1:]) for key in steps if key != "terminated"}
        if here != there:
            different = sorted(k for k in {*here, *there} if here.get(k) != there.get(k))
            raise DatasetError(
                f"this episode does not fit the {self.count} in {self.path}: "
                f"{', '.join(different)} differ; write it to another folder"
            )
        words = self.spec.text if text is None else text
        line = self._line(steps, final, words, json.dumps(dict(info) if info else {}))
        try:
            self._write(steps, line)
        except OSError as error:
            raise self._unwritable(error) from error
        self.count += 1
        return self.count - 1

    def drop_newest(self) -> None:
        """Remove the episode that `add` kept last. DatasetError where there is none any more."""
        newest = pending_file(self.path, self.count - 1)
        if not newest.file.exists():
            raise DatasetError(
                f"{self.path}: its newest episode was kept in an earlier session; type: "
                f"embodied demos drop {self.path} episodes={self.count - 1} out=NEW_FOLDER"
            )
        newest.file.unlink()  # first: from here on there is no such episode
        for column in self.columns:
            newest.film(column).unlink(missing_ok=True)
        self.count -= 1

    def close(self) -> None:
        """Move the episodes into the large files and let go of the folder; safe to call twice."""
        if self._lock is None:
            return
        try:
            if (self.path / "meta" / "info.json").exists():
                consolidate(self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            self._unlock()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, DatasetError):
            self._unlock()  # the disk is full or gone: what is pending stays as it is
        else:
            self.close()

    def _locked(self) -> int:
        """The folder's own handle, locked; the lock goes with the process, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise DatasetError(
                f"{self.path} is being written to by another process; wait for it to end"
            ) from error
        return handle

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _continue(self) -> None:
        info, index = read_info(self.path), read_index(self.path)
        if schema.OURS not in info:
            raise DatasetError(f"{self.path} was recorded by LeRobot; write to another folder")
        listed = 0 if index is None else index.num_rows
        self.count = listed + len(list_pending(self.path, listed))
        if not self.count:
            return  # nothing was finished: the first episode decides anew
        require_same(self.spec, spec_of_info(info), "these episodes", f"dataset {self.path}")
        self.columns = columns_of_info(info)
        self.stored = next((c.stored for c in self.columns if c.stored), self.stored)

    def _begin(self, steps: Tensors) -> None:
        """The first episode decides the columns, and is preceded by the file that says so."""
        columns = columns_of(self.spec, steps, self.stored)
        for column in columns:
            odd = column.stored == "video" and (
                column.shape[0] % 2 or column.shape[1] % 2 or column.shape[2] != 3
            )
            if odd:
                raise DatasetError(
                    f"{column.key} {list(column.shape)} cannot be filmed (three channels and even "
                    'sides are needed); use images="png"'
                )
        info = schema.new_info(self.spec, columns, self.robot, self.stored, self.fps)
        try:
            write_json(self.path / "meta" / "info.json", info)
        except OSError as error:
            raise self._unwritable(error) from error
        self.columns = columns

    def _write(self, steps: Tensors, line: pa.Table) -> None:
        target = pending_file(self.path, self.count)
        arrays: dict[str, pa.Array] = {}
        for column in self.columns:
            values = steps[column.key]
            if column.stored == "video":
                film = encode_film(values, self.fps)
                write_durably(target.film(column), lambda sink, film=film: sink.write(film))
            elif column.stored == "image":
                pictures = [{"bytes": encode_png(value), "path": None} for value in values]
                arrays[column.name] = pa.array(pictures, schema.IMAGE)
            else:
                arrays[column.name] = column.to_arrow(values)
        frame = torch.arange(len(steps["done"]))
        arrays["timestamp"] = pa.array((frame.double() / self.fps).float().numpy())
        arrays["frame_index"] = pa.array(frame.numpy())
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, line.schema) as stream:
            stream.write_table(line)
        table = pa.table(arrays).replace_schema_metadata({ROW: sink.getvalue().to_pybytes()})
        write_durably(target.file, lambda out: pq.write_table(table, out))

    def _line(self, steps: Tensors, final: Tensors, text: str, info: str) -> pa.Table:
        """The episode's line of meta/episodes, as far as it is known before its place is."""
        line: dict[str, Any] = {"tasks": [[text]], "length": [len(steps["done"])], "info": [info]}
        for column in self.columns:
            if column.key in final:
                value, name = final[column.key], f"final/{column.key.removeprefix('obs/')}"
                if column.stored:
                    line[name] = pa.array([encode_png(value)], pa.binary())
                else:
                    line[name] = column.to_arrow(value[None])
            for kind, numbers in statistics(column, steps[column.key]).items():
                line[f"stats/{column.name}/{kind}"] = [numbers.tolist()]
        return pa.table(line)

    def _checked(self, episode: Tensors) -> tuple[Tensors, Tensors]:
        """(steps, final observation), of the Spec's shapes and types; DatasetError says what is
        wrong with the episode."""
        if "action" not in episode or not len(episode["action"]):
            raise DatasetError("an episode needs at least one step with an action")
        length = len(episode["action"])
        steps: Tensors = {}
        final: Tensors = {}
        for name, leaf in self.spec.obs.items():
            steps[f"obs/{name}"] = _leaf(episode, f"obs/{name}", leaf, length)
            last = _required(episode, f"next_obs/{name}")
            last = last if last.ndim == len(leaf.shape) else last[-1]
            final[f"obs/{name}"] = _leaf(
                {f"next_obs/{name}": last[None]}, f"next_obs/{name}", leaf
            )[0]
        steps["action"] = _leaf(episode, "action", self.spec.act, length)
        flat = Leaf(())
        steps["reward"] = _leaf(episode, "reward", flat, length)
        for key in ("terminated", "truncated", *(["success"] if "success" in episode else [])):
            steps[key] = _leaf(episode, key, Leaf((), "bool"), length)
        if (steps["terminated"] | steps["truncated"])[:-1].any():
            raise DatasetError(
                "an episode ends at its last step: the flags before it must be false"
            )
        if (steps["terminated"] & steps["truncated"]).any():
            raise DatasetError("a step is either terminated or truncated, not both")
        steps["truncated"] = steps["truncated"].clone()
        steps["truncated"][-1] = ~steps["terminated"][-1]
        steps["done"] = steps["terminated"] | steps["truncated"]
        for key, value in episode.items():
            if key not in steps and not key.startswith(("obs/", "next_obs/")):
                constant = key == "task" and value.ndim == 1
                value = value.expand(length, *value.shape) if constant else value
                steps[key] = _leaf({key: value}, key, Leaf(tuple(value.shape[1:]), ""), length)
        return steps, final

    def _unwritable(self, error: OSError) -> DatasetError:
        return DatasetError(
            f"could not write to {self.path}: {error.strerror or error}; its {self.count} finished "
            "episodes are safe; make room and run the same command again to go on"
        )


def _required(rows: Tensors, key: str) -> Tensor:
    if key not in rows:
        raise DatasetError(f"the episode has no {key}")
    return rows[key]


def _leaf(rows: Tensors, key: str, leaf: Leaf, length: int = 1) -> Tensor:
    """`rows[key]` as [length, *leaf.shape] of the leaf's type, finite."""
    value = _required(rows, key).detach().cpu()
    if tuple(value.shape) != (length, *leaf.shape):
        raise DatasetError(
            f"{key} is {list(value.shape)}, expected {[length, *leaf.shape]} (steps first)"
        )
    value = value.to(getattr(torch, leaf.dtype)) if leaf.dtype else value
    if value.is_floating_point() and not torch.isfinite(value).all():
        raise DatasetError(f"{key} is not finite; the episode was not kept")
    return value
