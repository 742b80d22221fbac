"""RLDS, as TensorFlow Datasets and Open X-Embodiment store it (Ramos et al. 2021), read without
TensorFlow: `features.json` and `NAME-train.tfrecord-00000-of-00008` in the folder of a version.

A record is an episode: `steps/{observation/*, action, reward, is_terminal, ...}` with all steps one
after the other. The last step is the final observation; its action means nothing, and its reward,
where Open X-Embodiment says success, counts for the action before. The parts of an action of
several names are put together in the order of their names; actions keep their units,
unless `--low` and `--high` are given. A text becomes the task. `--dt` is needed: the files do not
say their period. `--mask` chooses a split (train, val).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied import importers
from embodied.core.files import read_json, require_file, require_room
from embodied.core.native import NativeLeaf, native_leaf
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.schema import DatasetError
from embodied.datasets.lerobot.video import decode_image
from embodied.envs.process.worker.memory import flat_name
from embodied.importers import Bounds, Recorded, in_own_units, naming, observed, require_elements

OBSERVATION, ACTION = "steps/observation/", "steps/action"
FILE = re.compile(r"-(\w+)\.tfrecord(-\d+-of-\d+)?$")
Values = np.ndarray | list[bytes]


@dataclass(frozen=True)
class Feature:
    """One array of a step: its `shape`, numpy `dtype` ("str" for texts), and whether each is the
    bytes of a picture."""

    shape: tuple[int, ...]
    dtype: str
    picture: bool = False

    def array(self, name: str, values: Values) -> np.ndarray:
        """[T, *shape] of all that an episode holds. ValueError where it is not as many."""
        if self.picture:
            if not isinstance(values, list):
                raise ValueError(f"{name} holds no pictures")
            size = len(values) * math.prod(self.shape) * np.dtype(self.dtype).itemsize
            require_room(size, sum(map(len, values)), name)
            pictures = np.empty((len(values), *self.shape), self.dtype)
            for row, value in enumerate(values):
                picture = decode_image(value).numpy()
                if picture.shape != self.shape or str(picture.dtype) != self.dtype:
                    raise ValueError(
                        f"{name} holds pictures {picture.dtype}{list(picture.shape)}, "
                        f"features.json says {self.dtype}{list(self.shape)}"
                    )
                pictures[row] = picture
            return pictures
        if isinstance(values, list):
            raise ValueError(f"{name} is encoded as bytes, which cannot be read")
        return values.reshape(-1, *self.shape).astype(self.dtype)


def read(path: Path, dt: float | None, bounds: Bounds) -> tuple[Spec, Iterator[Recorded]]:
    """The Spec of a version's folder, and its episodes in the order of the files."""
    if dt is None:
        raise DatasetError(f"{path} does not say its control period: --dt SECONDS")
    files = sorted(f for f in path.glob("*.tfrecord*") if FILE.search(f.name))
    if not files or not (path / "features.json").exists():
        raise DatasetError(
            f"{path} holds no features.json and *.tfrecord files; name the folder of a version "
            "(NAME/1.0.0)"
        )
    features = _features(path / "features.json")
    entries = tuple(
        native_leaf(flat_name(tuple(place), "state"), (name,), f.shape, f.dtype, -np.inf, np.inf)
        for name, f in features.items()
        if name.startswith(OBSERVATION) and f.dtype != "str"
        for place in [name.removeprefix(OBSERVATION).split("/")]
    )
    acted = {n: f for n, f in sorted(features.items()) if f"{n}/".startswith(f"{ACTION}/")}
    acted = {name: f for name, f in acted.items() if f.dtype != "str" and not f.picture}
    if not acted or not entries:
        missing = OBSERVATION + "*" if acted else ACTION
        raise DatasetError(f"{path / 'features.json'} has no {missing}")
    require_elements(sum(math.prod(f.shape) for f in acted.values()), path)
    names = tuple(
        name.rpartition("/")[2] + (f"_{element}" if f.shape else "")
        for name, f in acted.items()
        for element in range(int(np.prod(f.shape, dtype=int)))
    )
    act, convert = in_own_units(names, bounds, str(path))

    def recorded() -> Iterator[Recorded]:
        for file in files:
            split = FILE.search(file.name)
            masks = [split[1]] if split else []
            for number, record in enumerate(records(file)):
                name = f"record {number}"
                with naming(file, name):
                    episode = example(record)
                    rows, values = _rows(episode, features, entries, acted)
                    notes: dict[str, Any] = {"file": file.name, "record": number, "masks": masks}
                    if rows:
                        rows["action"], clipped = convert(values)
                        notes |= clipped
                    text = _sentence(episode, features)
                yield Recorded(f"{file.name}, {name}", rows, text, notes)

    leaves: dict[str, Leaf] = {entry.name: entry.leaf for entry in entries}
    return Spec(leaves, act, dt), recorded()


def _rows(
    episode: Mapping[str, Values],
    features: Mapping[str, Feature],
    entries: tuple[NativeLeaf, ...],
    acted: Mapping[str, Feature],
) -> tuple[Tensors, np.ndarray]:
    """Rows without their action, and the actions [T, A]; none of an episode of one step."""
    moves = [f.array(name, episode[name]) for name, f in acted.items()]
    steps = len(moves[0]) - 1
    values = np.concatenate([m.reshape(len(m), -1) for m in moves], 1).astype(np.float32)[:steps]
    if steps < 1:
        return {}, values
    seen = [str(entry.path[0]) for entry in entries]
    arrays = {name: features[name].array(name, episode[name]) for name in seen}
    rows = importers.with_final(observed(entries, arrays), torch.from_numpy(values))
    for name in ("steps/reward", "steps/is_terminal"):
        if name not in episode:
            continue
        told = torch.from_numpy(np.array(episode[name], np.float32))
        if name == "steps/reward":
            rows["reward"] = told[:steps]
            rows["reward"][-1] += told[-1].nan_to_num()  # the format leaves it open
        elif told[-1] > 0.5:
            rows["terminated"], rows["truncated"] = rows["truncated"], rows["terminated"]
    return rows, values


def _sentence(episode: Mapping[str, Values], features: Mapping[str, Feature]) -> str:
    """The first text of an episode's steps, or of its observations."""
    names = [n for n, f in features.items() if f.dtype == "str" and n.startswith("steps/")]
    for name in sorted(names, key=lambda n: n.startswith(OBSERVATION)):
        values = episode.get(name)
        if isinstance(values, list) and values:
            return values[0].decode()
    return ""


def _features(file: Path) -> dict[str, Feature]:
    """Every array of a step by its path. DatasetError for those of no fixed shape."""

    def walk(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Feature]]:
        if "featuresDict" in node:
            for name, part in node["featuresDict"]["features"].items():
                yield from walk(part, f"{path}/{name}" if path else name)
        elif "sequence" in node:
            yield from walk(node["sequence"]["feature"], path)
        elif "text" in node:
            yield path, Feature((), "str")
        elif kinds := [kind for kind in ("tensor", "image") if kind in node]:
            about = node[kinds[0]]
            sizes = tuple(int(n) for n in about.get("shape", {}).get("dimensions", ()))
            dtype = "str" if about["dtype"] in ("string", "object") else about["dtype"]
            if path.startswith("steps/") and min(sizes, default=1) < 0:
                raise DatasetError(f"{file}: {path} has no fixed shape, which cannot be read")
            yield path, Feature(sizes, dtype, kinds[0] == "image")

    try:
        return dict(walk(read_json(file), ""))
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise DatasetError(f"{file} is damaged ({error}); copy it again") from error


def records(file: Path) -> Iterator[bytes]:
    """The records of a TFRecord file: a length (8 bytes), 4 of a checksum, the data, 4 more."""
    size = require_file(file)
    with file.open("rb") as opened:
        while head := opened.read(12):
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else 0
            data = opened.read(min(length, size))
            if len(head) < 12 or len(data) < length or len(opened.read(4)) < 4:
                raise DatasetError(f"{file} is cut off; copy it again")
            yield data


def example(record: bytes) -> dict[str, Values]:
    """The features of a serialized tf.train.Example: a list of bytes, or numbers. Example.features
    = 1, Features.feature = 1 (map: key = 1, value = 2), and Feature is one of bytes_list = 1,
    float_list = 2, int64_list = 3, each with value = 1."""
    found: dict[str, Values] = {}
    for _, features in _fields(memoryview(record)):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            name = bytes(parts[1]).decode()
            for kind, values in _fields(parts.get(2, memoryview(b""))):
                found[name] = _list(kind, [value for _, value in _fields(values)])
    return found


def _list(kind: int, values: list[Any]) -> Values:
    if kind == 1:
        return [bytes(value) for value in values]
    if kind == 2:  # packed, or each of its own
        return np.frombuffer(b"".join(map(bytes, values)), "<f4")
    if values and isinstance(values[0], int):
        return np.array(values, np.uint64).view(np.int64)
    # Packed integers: 7 bits a byte, the lowest first, the last byte below 128.
    data = np.frombuffer(b"".join(map(bytes, values)), np.uint8)
    if not len(data):
        return np.empty(0, np.int64)
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(len(data)) - np.repeat(starts, ends - starts + 1)
    bits = (data & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(bits, starts).view(np.int64)


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: number, and bytes or an integer. ValueError."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data):
                raise ValueError("the record is cut off")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("the record is no tf.train.Example")

    while at < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError("the record is no tf.train.Example")
        size = {1: 8, 5: 4}.get(wire) or varint()
        if size > len(data) - at:
            raise ValueError("the record is cut off")
        yield number, data[at : at + size]
        at += size
