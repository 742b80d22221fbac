"""Changes of sound files: what the fuzzer tries, and the form in which its finds are kept.

A change is a list: [FILE, "set", PLACE, VALUE] and [FILE, "cut", PLACE] in the tree that a file
holds (its JSON or YAML, the header of safetensors, the columns of Parquet, the arrays of HDF5), or
[FILE, "bytes", AT, COUNT, HEX]: other bytes in the place of COUNT. FILE is a name in the folder, ""
where the file stands alone. Values are JSON, and {"array": [DTYPE, SHAPE, NUMBER]}; "deep N" in a
text format is a list of N levels.
"""

from __future__ import annotations

import copy
import io
import json
import math
import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from embodied.serve import protocol

Tree = Any
Edit = list[Any]
MOST = 6  # changes of one try
ROOM = 10**7  # numbers of an array that a change makes
DEEP = re.compile(r"""["']deep (\d{1,6})["']""")
NUMBERS = (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -0.0, 0.0, 0.5, 1e9, 1e-9)
INTEGERS = (-1, 0, 1, 2, 3, 7, 16, 255, 256, 4096, 65536, 10**6, 2**31 - 1, 2**31, 2**62, 2**63)
STRANGE: tuple[Any, ...] = (
    *(None, True, False, *INTEGERS, *NUMBERS, 10**400, -(2**31), -(2**63)),
    *("", "x", "a\nb", "nan", "1e3", "\0", "\ud800", "é" * 300, "../..", "../x", "/etc/passwd"),
    *("a.b.c", "os.system", "{x.__class__}", "x/y", "deep 50", "deep 2000", "float32", "uint8"),
    *([], [0], [[]], {}, {"": 0}, [math.nan] * 7, ["x"] * 7, [0.0] * 3, [2, 2], [10**6, 10**6]),
    *({"_target_": "os.system"}, {"array": ["<f4", [2, 2], 0]}, {"array": ["<f8", [0], 0]}),
    *({"array": ["|u1", [3, 4, 4, 3], 9]}, {"array": ["<f4", [4], math.nan]}),
    *({"array": ["<i8", [10, 1], 2**62]}, {"array": ["|b1", [4], 1]}, {"array": ["|S4", [4], 1]}),
)


class Unwritable(Exception):
    """The format has no place for this change."""


def _text(tree: str) -> bytes:
    nested = DEEP.sub(lambda found: "[" * int(found[1]) + "]" * int(found[1]), tree)
    return nested.encode(errors="surrogatepass")


def _resolved(value: Any, arrays: bool) -> Any:
    """`value`; in a format that has `arrays`, those that it describes."""
    if arrays and isinstance(value, dict) and "array" in value:
        kind, shape, number = value["array"]
        if math.prod(shape) > ROOM:
            raise Unwritable
        return np.full(shape, number).astype(kind)
    if isinstance(value, dict):
        return {key: _resolved(each, arrays) for key, each in value.items()}
    return [_resolved(each, arrays) for each in value] if isinstance(value, list) else value


def _saved(save: Callable[[Any], object]) -> bytes:
    """What `save` writes into a file."""
    sink = io.BytesIO()
    save(sink)
    return sink.getvalue()


def _json(tree: Tree) -> bytes:
    return _text(json.dumps(tree))


def _read_header(data: bytes) -> Tree:
    (size,) = struct.unpack("<Q", data[:8])
    return {"size": size, "header": json.loads(data[8 : 8 + size])}


def _write_header(tree: Tree, old: bytes) -> bytes:
    (before,) = struct.unpack("<Q", old[:8])
    text, size = _json(tree.get("header")), tree.get("size")
    size = len(text) if size == before else size
    return struct.pack("<Q", size) + text + old[8 + before :]


def _write_parquet(tree: Tree, old: bytes) -> bytes:
    schema = pq.read_schema(io.BytesIO(old))
    columns = {}
    for name, values in tree.items():
        try:
            columns[name] = pa.array(values, schema.field(name).type)
        except (KeyError, pa.ArrowException, TypeError):
            columns[name] = pa.array(values)
    table = pa.table(columns).replace_schema_metadata(schema.metadata)
    return _saved(lambda sink: pq.write_table(table, sink))


def _read_hdf5(data: bytes) -> Tree:
    found: dict[str, Any] = {}

    def look(name: str, item: Any) -> None:
        found.update({f"{name}@{key}": value for key, value in item.attrs.items()})
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    with h5py.File(io.BytesIO(data)) as file:
        file.visititems(look)
    return found


def _write_hdf5(tree: Tree, _: bytes) -> bytes:
    sink = io.BytesIO()
    with h5py.File(sink, "w") as file:
        for name, value in tree.items():
            item, _, key = name.partition("@")
            if key:
                file.require_group(item).attrs[key] = value
            else:
                file[item] = value
    return sink.getvalue()


def _read_xml(data: bytes) -> Tree:
    def tree(node: ElementTree.Element) -> Tree:
        return [node.tag, dict(node.attrib), node.text, [tree(each) for each in node]]

    return tree(ElementTree.fromstring(data))


def _write_xml(tree: Tree, _: bytes) -> bytes:
    def node(tree: Tree) -> ElementTree.Element:
        tag, attributes, text, inner = tree
        made = ElementTree.Element(tag, {key: str(value) for key, value in attributes.items()})
        made.text = text
        made.extend(node(each) for each in inner)
        return made

    return ElementTree.tostring(node(tree))


def _write_yaml(tree: Tree, _: bytes) -> bytes:
    return _text(yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False, width=10**6))


FORMATS: dict[str, tuple[Callable[[bytes], Tree], Callable[[Tree, bytes], bytes]]] = {
    ".json": (json.loads, lambda tree, _: _json(tree)),
    ".zarray": (json.loads, lambda tree, _: _json(tree)),
    ".jsonl": (
        lambda data: [json.loads(line) for line in data.splitlines()],
        lambda tree, _: b"".join(_json(each) + b"\n" for each in tree),
    ),
    ".yaml": (yaml.safe_load, _write_yaml),
    ".safetensors": (_read_header, _write_header),
    ".parquet": (lambda data: pq.read_table(io.BytesIO(data)).to_pydict(), _write_parquet),
    ".hdf5": (_read_hdf5, _write_hdf5),
    ".h5": (_read_hdf5, _write_hdf5),
    ".npz": (
        lambda data: dict(np.load(io.BytesIO(data))),
        lambda tree, _: _saved(lambda sink: np.savez(sink, **tree)),
    ),
    ".pt": (
        lambda data: torch.load(io.BytesIO(data)),
        lambda tree, _: _saved(lambda sink: torch.save(tree, sink)),
    ),
    ".xml": (_read_xml, _write_xml),
    ".urdf": (_read_xml, _write_xml),
    ".msgpack": (protocol.decode, lambda tree, _: protocol.encode(tree)),
}
ARRAYS = (".hdf5", ".h5", ".npz", ".pt", ".msgpack")
TEXTS = (".json", ".jsonl", ".yaml", ".xml", ".urdf", ".txt", ".py", ".zarray")


def suffix(name: str) -> str:
    return Path(name).suffix or Path(name).name


def places(tree: Tree, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values."""
    yield place
    if isinstance(tree, dict | list):
        for key, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(key, str | int):
                yield from places(each, (*place, key))


class Base:
    """Sound files, in the folder `path` or the file `path` itself, and what they hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = sorted(each for each in path.rglob("*") if each.is_file()) or [path]
        self.data = {
            "" if each == path else str(each.relative_to(path)): each.read_bytes() for each in found
        }
        self.kinds = {name: suffix(name or path.name) for name in self.data}
        self.trees = {
            name: FORMATS[kind][0](self.data[name])
            for name, kind in self.kinds.items()
            if kind in FORMATS
        }
        self.places = {name: list(places(tree)) for name, tree in self.trees.items()}
        words = {str(key) for all in self.places.values() for place in all for key in place}
        self.words = sorted(words | {str(v) for t in self.trees.values() for v in _texts(t)})

    def changed(self, edits: Sequence[Edit]) -> dict[str, bytes]:
        """The files that `edits` change. Unwritable."""
        trees: dict[str, Tree] = {}
        found: dict[str, bytes] = {}
        try:
            for name, kind, *how in edits:
                if kind != "bytes":
                    if name not in trees:
                        trees[name] = copy.deepcopy(self.trees[name])
                    with suppress(LookupError, TypeError, ValueError):  # there is no such place
                        value = _resolved(how[1:] and how[1], self.kinds[name] in ARRAYS)
                        trees[name] = _edited(trees[name], kind, how[0], value)
            for name, tree in trees.items():
                write = FORMATS[self.kinds[name]][1]
                found[name] = write(tree, self.data[name])
            for name, kind, *how in edits:
                if kind == "bytes":
                    at, count, new = how
                    old = found.get(name, self.data[name])
                    found[name] = old[:at] + bytes.fromhex(new) + old[at + count :]
        except Exception as error:  # of the libraries: many kinds
            raise Unwritable from error
        return found


def _texts(tree: Tree) -> Iterator[str]:
    if isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(each)
    elif isinstance(tree, str) and len(tree) < 60:
        yield tree


def _edited(tree: Tree, kind: str, place: Sequence[Any], value: Any) -> Tree:
    if not place:
        return value
    inner = _at(tree, place[:-1])
    last = place[-1]
    if kind == "cut":
        del inner[last]
    elif isinstance(inner, list) and last >= len(inner):
        inner.append(value)
    else:
        inner[last] = value
    return tree


def mutated(edits: list[Edit], base: Base, words: Sequence[str], dice: random.Random) -> list[Edit]:
    """Other changes: one more, one less, or one of them different."""
    edits = copy.deepcopy(edits)
    which = dice.random()
    if edits and (which < 0.15 or len(edits) >= MOST):
        del edits[dice.randrange(len(edits))]
    if edits and 0.15 <= which < 0.4:
        one = dice.choice(edits)
        if one[1] == "set":
            one[3] = _value(base, one[0], one[2], words, dice)
        elif one[1] == "bytes":
            one[2:] = _bytes(base, one[0], dice, words)
    else:
        edits.append(_new(base, words, dice))
    return edits


def _new(base: Base, words: Sequence[str], dice: random.Random) -> Edit:
    name = dice.choice(list(base.data))
    if name not in base.trees or dice.random() < 0.15:
        return [name, "bytes", *_bytes(base, name, dice, words)]
    place = list(dice.choice(base.places[name]))
    which = dice.random()
    if which < 0.15 and place:
        return [name, "cut", place]
    if which < 0.3:
        key = dice.choice((*base.words, "x", "")) if dice.random() < 0.8 else dice.choice(words)
        place = [*place, 10**6 if isinstance(_at(base.trees[name], place), list) else key]
    return [name, "set", place, _value(base, name, place, words, dice)]


def _at(tree: Tree, place: Sequence[Any]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def _value(
    base: Base, name: str, place: Sequence[Any], words: Sequence[str], dice: random.Random
) -> Any:
    which = dice.random()
    try:
        old = _at(base.trees[name], place)
    except (LookupError, TypeError, ValueError):
        old = None
    if isinstance(old, list) and old and which < 0.3:  # all of a column, or all but some
        if which < 0.15:
            return [dice.choice(STRANGE)] * len(old)
        return old[: dice.randrange(len(old))] if _plain(old) else []
    if isinstance(old, int | float) and which < 0.4:
        return old + dice.choice((-1, 1)) if which < 0.1 else old * dice.choice((-1, 0, 2, 1e3))
    if which < 0.5:
        other = dice.choice(list(base.trees))
        value = _at(base.trees[other], dice.choice(base.places[other]))
        return copy.deepcopy(value) if _plain(value) else dice.choice(STRANGE)
    return dice.choice(words) if which < 0.6 else copy.deepcopy(dice.choice(STRANGE))


def _plain(value: Any) -> bool:
    """Whether it can be kept as short JSON."""
    try:
        return len(json.dumps(value)) < 500
    except (TypeError, ValueError):
        return False


def _bytes(base: Base, name: str, dice: random.Random, words: Sequence[str]) -> list[Any]:
    data = base.data[name]
    at = dice.randrange(len(data) + 1)
    if dice.random() < 0.5:
        at -= at % 4
    count = dice.choice((0, 1, 2, 4, 8, len(data) - at))
    kind = dice.randrange(6)
    if base.kinds[name] in TEXTS and kind < 4:
        new = f" {dice.choice((*words, *base.words, '[' * 5000, '(' * 300, 'NaN'))} ".encode()
    elif kind == 0:
        new = struct.pack("<d", dice.choice(NUMBERS))
    elif kind == 1:
        new = struct.pack(dice.choice("<>") + "Q", dice.choice(INTEGERS) % 2**64)
    elif kind == 2:
        new = struct.pack(dice.choice("<>") + "I", dice.choice(INTEGERS) % 2**32)
    elif kind == 3:
        other = dice.randrange(len(data) + 1)
        new = data[other : other + dice.choice((1, 8, 64))]
    else:
        new = dice.randbytes(dice.choice((0, 1, 1, 2, 8)))
    return [at, len(new) if kind in (0, 1, 2) else count, new.hex()]
