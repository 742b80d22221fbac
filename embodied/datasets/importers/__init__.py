"""Importers: other projects' demonstration files become our datasets (LeRobot v3 layout).

A format is one module here with `read(path, dt, bounds) -> (Spec, episodes)`; what those of HDF5
share stands here too: opening, flattening groups, types, and the range of actions.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError, nearest
from embodied.core.native import NativeAction, NestedAction, native_action
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import DatasetError, EpisodeWriter
from embodied.datasets.lerobot.video import decode_image

CONTROL_PERIOD = 0.05  # s, where a file does not say


@dataclass(frozen=True)
class Recorded:
    """One episode as `EpisodeWriter.add` takes it, its task in words, and notes."""

    rows: Tensors
    text: str
    info: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An HDF5 file for reading; DatasetError where it is cut off or lacks what is looked up."""
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise ConfigError('HDF5 files need h5py: pip install "embodied-rl[data]"') from error
    try:
        with h5py.File(path, "r") as file:
            yield file
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise DatasetError(
            f"{path} is not a complete HDF5 file ({reason}); copy or download it again"
        ) from error
    except KeyError as error:
        raise DatasetError(f"{path} lacks something: {str(error).strip(chr(34))}") from error


@dataclass(frozen=True)
class Bounds:
    """The range of actions as the user gives it, one number per element (empty: not given)."""

    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def given(self) -> bool:
        return bool(self.low or self.high)

    def action(self, size: int, name: str) -> NativeAction:
        """The box of `size` numbers. DatasetError where the bounds are not as many."""
        if (len(self.low), len(self.high)) != (size, size):
            raise DatasetError(
                f"{name}: actions have {size} elements, --low has {len(self.low)} numbers and "
                f"--high {len(self.high)}"
            )
        return native_action((size,), "float32", self.low, self.high, name)


def unit_box(size: int) -> NativeAction:
    """Actions [size] that are in [-1, 1] already."""
    return NativeAction((size,), "float32", (-1.0,) * size, (1.0,) * size)


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
        group = file[root]
        for name in names:
            rows = rows_of(group[name])
            rows["action"], notes = into_unit(action, rows["action"])
            yield Recorded(rows, text, {note: name, **notes})


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


def numbered(group: Any, prefix: str) -> list[str]:
    """The names `prefix_0`, `prefix_1`, ... in a group, in the order of their numbers."""
    names = [name for name in group if re.fullmatch(rf"{prefix}_\d+", name)]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def flattened(node: Any, prefix: str = "") -> dict[str, Any]:
    """The arrays of nested groups by path, joined with `_`; a single array is called `state`."""
    if isinstance(node, tuple):
        node = {str(place): item for place, item in enumerate(node)}
    if not hasattr(node, "keys"):
        return {prefix or "state": node}
    arrays: dict[str, Any] = {}
    for name in node:
        arrays |= flattened(node[name], f"{prefix}_{name.strip('_')}" if prefix else name)
    return arrays


def tensor(values: Any) -> Tensor:
    """An array as a tensor: 64-bit floats become 32-bit, 16-bit depth becomes int32, JPEG and PNG
    bytes become pictures."""
    array = np.asarray(values[()] if hasattr(values, "shape") else values)
    if array.dtype == object:
        return torch.stack([decode_image(np.asarray(item).tobytes()) for item in array])
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    elif array.dtype in (np.uint16, np.int16, np.uint32):
        array = array.astype(np.int32 if array.dtype != np.uint32 else np.int64)
    return torch.from_numpy(np.array(array))


def leaves(observations: Tensors) -> dict[str, Leaf]:
    """What [T, ...] observations look like in a Spec."""
    dtype = {name: str(value.dtype).removeprefix("torch.") for name, value in observations.items()}
    return {n: Leaf(tuple(value.shape[1:]), dtype[n]) for n, value in observations.items()}


def split(observations: Tensors) -> Tensors:
    """T + 1 observations as those acted on, `obs/*` [T, ...], and the final ones, `next_obs/*`."""
    before = {f"obs/{name}": value[:-1] for name, value in observations.items()}
    return before | {f"next_obs/{name}": value[-1] for name, value in observations.items()}


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
) -> tuple[int, int]:
    """Read `in_path`, written by robomimic, ManiSkill or Minari, and write the same episodes to the
    new dataset `out_path`; returns how many, and how many of their actions were clipped.

    `dt` is the control period (s); None takes it from the file, or 0.05 where the file does not
    say. Actions become [-1, 1], affine to the environment's bounds or to `bounds`: see the format's
    module. DatasetError in one line where something is missing, cut off, or already there.
    """
    if source_format not in formats():
        hint = nearest(source_format, formats())
        raise DatasetError(f'there is no importer for "{source_format}"{hint}')
    path, out = Path(in_path), Path(out_path)
    if not path.exists():
        raise DatasetError(f"{path} does not exist")
    if (out / "meta").exists():
        raise DatasetError(f"{out} holds a dataset already; name a new folder")
    spec, episodes = importlib.import_module(f"{__name__}.{source_format}").read(path, dt, bounds)
    clipped = 0
    partial = out.with_name(f".{out.name}.partial")  # so that `out` is whole or not there
    shutil.rmtree(partial, ignore_errors=True)
    with EpisodeWriter(partial, spec, robot=source_format, images=images) as writer:
        for episode in episodes:
            writer.add(episode.rows, episode.text, episode.info)
            clipped += episode.info.get("clipped_actions", 0)
    partial.rename(out)
    return len(writer), clipped
