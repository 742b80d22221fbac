"""Importers: other projects' demonstration files become our datasets (LeRobot v3 layout).

A format is one module here with `read(path, dt, bounds) -> (Spec, episodes)`, or with `copy(path,
out) -> episodes` where the files are nearly a dataset of ours. What formats share stands here:
opening HDF5, arrays of nested groups under the names that an environment gives them, and the range
of actions.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import nearest, needed
from embodied.core.files import MALFORMED, FileError, reading, require_file, require_room
from embodied.core.native import (
    NativeAction,
    NativeLeaf,
    NestedAction,
    native_action,
    native_leaf,
)
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import DatasetError, EpisodeWriter
from embodied.datasets.lerobot.video import decode_image
from embodied.envs.process.worker.memory import flat_name

CONTROL_PERIOD = 0.05  # s: the default of robosuite and of ManiSkill, whose files may not say it
MOST_ELEMENTS = 10_000  # of an action


@dataclass(frozen=True)
class Recorded:
    """One episode: what its file calls it, its rows as `EpisodeWriter.add` takes them (none: it has
    no steps), its task in words, and notes."""

    name: str
    rows: Tensors
    text: str
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Converted:
    """What `convert` did: `episodes` written; `clipped` actions; `empty`, the names of episodes
    without steps, which are left out; `masks`, how many episodes each subset of the file has."""

    episodes: int
    clipped: int = 0
    empty: tuple[str, ...] = ()
    masks: Mapping[str, int] = field(default_factory=dict)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An HDF5 file for reading; DatasetError where it is cut off or lacks what is looked up."""
    h5py = needed("h5py", "HDF5 files need h5py", "data")
    try:
        require_file(path)
        with h5py.File(path, "r") as file:
            # FileError where a name leads into another file.
            found: list[str] = []

            def look(name: str, link: Any) -> None:
                if hasattr(link, "filename"):
                    found.append(name)

            file.visititems_links(look)
            if found:
                line = f"{path}: {found[0][:100]!r} is a link into another file"
                raise FileError(f"{line}; ask for a file that holds it")
            yield file
    except (OSError, SystemError) as error:  # h5py's, where a link is damaged
        reason = str(error).strip().splitlines()[0]
        raise DatasetError(
            f"{path} is not a complete HDF5 file ({reason}); copy or download it again"
        ) from error
    except KeyError as error:
        raise DatasetError(f"{path} lacks something: {str(error).strip(chr(34))}") from error


def require_own(array: Any) -> int:
    """The size (bytes) of the file that an HDF5 `array` is in; 0 for other arrays. FileError where
    its numbers lie in another file, or are more than memory may hold."""
    if not hasattr(array, "is_virtual"):
        return 0
    where = f"{array.file.filename}: {array.name[:100]}"
    if array.external or array.is_virtual:
        raise FileError(f"{where} has its numbers in another file; ask for one that holds them")
    size = require_file(Path(array.file.filename))
    for shape in (array.shape, array.chunks or ()):
        require_room(math.prod(shape) * array.dtype.itemsize, size, where)
    return size


@contextmanager
def naming(path: Path, name: str) -> Iterator[None]:
    """Errors inside are DatasetErrors that name the file and the episode."""
    try:
        yield
    except (DatasetError, ValueError, KeyError, IndexError, ArithmeticError) as error:
        reason = str(error).strip("\"'") or type(error).__name__
        raise DatasetError(f"{path}, {name}: {reason}") from error


@dataclass(frozen=True)
class Bounds:
    """The range of actions as the user gives it, one number per element (empty: not given)."""

    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def given(self) -> bool:
        return bool(self.low or self.high)

    def action(self, shape: Sequence[int], name: str) -> NativeAction:
        """The box of `shape`. DatasetError where the bounds are not as many."""
        size = int(np.prod(shape, dtype=int))
        if (len(self.low), len(self.high)) != (size, size):
            raise DatasetError(
                f"{name}: actions have {size} elements, --low has {len(self.low)} numbers and "
                f"--high {len(self.high)}"
            )
        return native_action(shape, "float32", self.low, self.high, name)


def require_elements(size: int, where: object) -> int:
    """The number of an action's elements. DatasetError where it cannot be meant."""
    if size > MOST_ELEMENTS:
        raise DatasetError(f"{where}: actions of {size:,} elements, {MOST_ELEMENTS:,} are the most")
    return size


def unit_box(size: int) -> NativeAction:
    """Actions [size] that are in [-1, 1] already."""
    require_elements(size, "the file")
    return NativeAction((size,), "float32", (-1.0,) * size, (1.0,) * size)


def into_unit(action: NativeAction | NestedAction, native: Any) -> tuple[Tensor, dict[str, int]]:
    """Recorded actions [T, *shape] as policy actions, and a note: numbers beyond the bounds are
    clipped, as the environment did when it was recorded. DatasetError for a choice beyond them."""
    unit = action.unit(native)
    low, high = (torch.tensor(end) for end in (action.leaf.low, action.leaf.high))
    inside = torch.maximum(torch.minimum(unit, high), low)
    beyond = ((unit - inside).abs() > 1e-6).reshape(len(unit), -1)
    if (beyond & (torch.tensor(action.leaf.choices) > 0)).any():
        raise DatasetError(
            f"an action is a choice beyond its {action.leaf.choices} classes (0: a number): the "
            "file does not fit its action space"
        )
    clipped = int(beyond.any(1).sum())
    return inside, {"clipped_actions": clipped} if clipped else {}


def in_own_units(
    names: tuple[str, ...], bounds: Bounds, where: str
) -> tuple[Leaf, Callable[[np.ndarray], tuple[Tensor, dict[str, int]]]]:
    """The action of a file that does not tell its bounds, and what makes it of recorded ones [T, A]
    as `into_unit` does: in [-1, 1] by `bounds`, otherwise as they are."""
    if bounds.given:
        action = bounds.action((len(names),), where)
        return action.leaf, lambda values: into_unit(action, values)
    return Leaf((len(names),), names=names), lambda values: (torch.from_numpy(values), {})


def numbered(group: Any, prefix: str) -> list[str]:
    """The names `prefix_0`, `prefix_1`, ... in a group, in the order of their numbers."""
    names = [name for name in group if re.fullmatch(rf"{prefix}_\d+", name)]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def walk(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Where each array of nested groups lies, and the array."""
    if not hasattr(node, "keys"):
        require_own(node)
        yield path, node
        return
    for key in node:
        yield from walk(node[key], (*path, key))


def numbers(values: Any) -> np.ndarray:
    """An array of a file, [T, ...]; JPEG and PNG bytes become pictures."""
    size = require_own(values)
    if not hasattr(values, "dtype"):
        values = np.asarray(values)
    if values.dtype.kind != "O":
        return np.asarray(values[()])
    made = np.empty((0,), np.uint8)
    for row, item in enumerate(values):  # one after the other: all may be the same large one
        picture = decode_image(bytes(memoryview(item))).numpy()
        if not row:
            require_room(len(values) * picture.nbytes, size, "a column of pictures")
            made = np.empty((len(values), *picture.shape), picture.dtype)
        if picture.shape != made.shape[1:]:
            raise ValueError(f"pictures of {list(made.shape[1:])} and {list(picture.shape)}")
        made[row] = picture
    return made


def flags(values: Any) -> Tensor:
    """Truth values [T] of a file: a share above one half is true."""
    return torch.from_numpy(numbers(values).astype(np.float64).reshape(len(values)) > 0.5)


def leaves(arrays: Iterable[tuple[tuple[str, ...], np.ndarray]]) -> tuple[NativeLeaf, ...]:
    """The observations of arrays [T, ...] whose file does not tell their bounds."""
    return tuple(
        native_leaf(flat_name(path, "state"), path, a.shape[1:], str(a.dtype), -np.inf, np.inf)
        for path, a in arrays
    )


def observed(entries: Sequence[NativeLeaf], node: Any) -> Tensors:
    """The observations [T, ...] in `node`, by their names. ValueError for another shape."""
    return {entry.name: leaf_tensor(entry, numbers(entry.pick(node))) for entry in entries}


def leaf_tensor(entry: NativeLeaf, values: np.ndarray) -> Tensor:
    """Recorded values [T, ...] as the leaf's. ValueError for another shape."""
    return torch.from_numpy(np.ascontiguousarray(entry.converted(values)))


def split(observations: Tensors) -> Tensors:
    """T + 1 observations as those acted on, `obs/*` [T, ...], and the final ones, `next_obs/*`."""
    before = {f"obs/{name}": value[:-1] for name, value in observations.items()}
    return before | {f"next_obs/{name}": value[-1] for name, value in observations.items()}


def with_final(observations: Tensors, action: Tensor) -> Tensors:
    """Rows of T + 1 observations and T actions, of files that know no reward and no end."""
    rows = {**split(observations), "action": action, "reward": torch.zeros(len(action))}
    return rows | last_flags(len(action), terminated=False)


def last_flags(steps: int, terminated: bool) -> Tensors:
    """`terminated` and `truncated` [T] of an episode that ends one way or the other."""
    last = torch.arange(steps) == steps - 1
    return {"terminated": last & terminated, "truncated": last & (not terminated)}


def formats() -> list[str]:
    """The names `convert` takes: the modules of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def convert(
    source_format: str,
    in_path: Path | str,
    out_path: Path | str,
    dt: float | None = None,
    images: Literal["mp4", "png"] = "mp4",
    bounds: Bounds = Bounds(),
    mask: str | None = None,
) -> Converted:
    """Read `in_path`, of one of `formats()`, and write the same episodes to the new dataset
    `out_path`. `dt` is the control period (s); None takes it from the file. Actions become [-1, 1],
    affine to the environment's bounds or to `bounds`; of formats that do not tell them they stay as
    they are: see the format's module. `mask`: only the episodes of this subset or split.
    DatasetError in one line where something is missing, cut off, or already there."""
    if source_format not in formats():
        hint = nearest(source_format, formats())
        raise DatasetError(f'there is no importer for "{source_format}"{hint}')
    path, out = Path(in_path), Path(out_path)
    if not path.exists():
        raise DatasetError(f"{path} does not exist")
    if (out / "meta").exists():
        raise DatasetError(f"{out} holds a dataset already; name a new folder")
    module = importlib.import_module(f"{__name__}.{source_format}")
    partial = out.with_name(f".{out.name}.partial")  # so that `out` is whole or not there
    shutil.rmtree(partial, ignore_errors=True)
    if hasattr(module, "copy") and (dt is not None or bounds.given or mask is not None):
        raise DatasetError(f"{source_format} files are copied as they are: no other option")
    with reading(path, *MALFORMED):
        if hasattr(module, "copy"):
            made = Converted(module.copy(path, partial))
        else:
            spec, episodes = module.read(path, dt, bounds)
            with EpisodeWriter(partial, spec, robot=source_format, images=images) as writer:
                made = _written(writer, path, episodes, mask)
    partial.rename(out)
    return made


def _written(
    writer: EpisodeWriter, path: Path, episodes: Iterator[Recorded], mask: str | None
) -> Converted:
    """Add all `episodes`, or those in `mask`."""
    clipped, empty, masks = 0, list[str](), Counter[str]()
    for episode in episodes:
        within = episode.info.get("masks", ())
        masks.update(within)
        if mask is not None and mask not in within:
            continue
        if not episode.rows:
            empty.append(episode.name)
            continue
        with naming(path, episode.name):
            writer.add(episode.rows, episode.text, episode.info)
        clipped += episode.info.get("clipped_actions", 0)
    if mask is not None and mask not in masks:
        raise DatasetError(f"{path} has no mask {mask}{nearest(mask, masks)}")
    if not len(writer):
        raise DatasetError(f"{path}: no episode has a step")
    return Converted(len(writer), clipped, tuple(empty), dict(masks))


def with_actions(
    path: Path,
    names: list[str],
    action: NativeAction,
    text: str,
    note: str,
    root: str,
    rows_of: Callable[[Any], Tensors],
) -> Iterator[Recorded]:
    """The episodes `names` of the group `root`, their `actions` converted as `into_unit` does."""
    with opened(path) as file:
        group, masks = file[root], _masks(file)
        for name in names:
            with naming(path, name):
                rows = rows_of(group[name]) if len(group[name]["actions"]) else {}
                notes: dict[str, Any] = {note: name}
                if masks:
                    notes["masks"] = [mask for mask, within in masks.items() if name in within]
                if rows and len(rows["action"]):
                    rows["action"], clipped = into_unit(action, rows["action"].numpy())
                    yield Recorded(name, rows, text, notes | clipped)
                else:
                    yield Recorded(name, {}, text, notes)


def _masks(file: Any) -> dict[str, set[str]]:
    """The named subsets of episodes, as robomimic keeps them."""
    names = file.get("mask", {})
    return {mask: {np.bytes_(name).decode() for name in names[mask][()]} for mask in names}
