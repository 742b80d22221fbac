"""Minari datasets: `data/main_data.hdf5` with `episode_i/{observations (T+1), actions, rewards,
terminations, truncations, infos}` (Younis et al. 2024), or its Arrow files through the package.

Continuous actions are mapped from the bounds of the action space, which `data/metadata.json`
holds (or `--low` and `--high`), to [-1, 1]; what goes beyond is clipped and counted in `info`.
Choices (Discrete, MultiDiscrete, MultiBinary) count from 0; actions of a Tuple or Dict are joined
in the order of their parts. Dictionaries of observations are flattened with `_`, a single array
is called `state`; a text observation becomes the episode's task.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.build import ConfigError
from embodied.core.native import NativeAction, NestedAction, discrete_action, native_action
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.importers import (
    CONTROL_PERIOD,
    Bounds,
    Recorded,
    flattened,
    into_unit,
    leaves,
    numbered,
    opened,
    split,
    tensor,
)
from embodied.datasets.lerobot.schema import DatasetError

Episode = Mapping[str, Any]


def read(path: Path, dt: float | None, bounds: Bounds) -> tuple[Spec, Iterator[Recorded]]:
    """The Spec of a dataset folder (or its `main_data.hdf5`), and its episodes in order."""
    folder = path.parent if path.is_file() else path
    folder = folder / "data" if (folder / "data").is_dir() else folder
    about = _about(folder)
    with _episodes(folder, about) as episodes:
        first = next(episodes, None)
        if first is None:
            raise DatasetError(f"{path} holds no episodes")
        observations, text = _observations(first)
    space = json.loads(about["action_space"]) if "action_space" in about else {}
    name = str(about.get("dataset_id", ""))
    action = _action(space, bounds, folder)
    spec = Spec(leaves(observations), action.leaf, dt or CONTROL_PERIOD, text=text or name)
    return spec, _recorded(folder, about, action, name)


def _action(space: Mapping[str, Any], bounds: Bounds, folder: Path) -> NativeAction | NestedAction:
    if space.get("type") in ("Tuple", "Dict"):
        return NestedAction(tuple(_parts(space, (), bounds, folder)))
    return _array_action(space, bounds, folder)


def _array_action(space: Mapping[str, Any], bounds: Bounds, folder: Path) -> NativeAction:
    if space.get("type") == "Discrete":
        return discrete_action(int(space.get("start", 0)), int(space["n"]))
    if space.get("type") == "MultiDiscrete":
        many = np.array(space["nvec"])
        first = np.array(space.get("start", 0))
        return discrete_action(first, many, str(space.get("dtype", "int64")), many.shape)
    if space.get("type") == "MultiBinary":
        size = space["n"]
        return discrete_action(0, 2, "int8", tuple(size) if isinstance(size, list) else (size,))
    if space.get("type") != "Box":
        raise DatasetError(
            f"{folder / 'metadata.json'}: the action space is {space.get('type', 'not given')}; "
            "Box, Discrete, MultiDiscrete, MultiBinary, Tuple and Dict can be converted"
        )
    shape = tuple(space["shape"])
    if bounds.given:
        return bounds.action(int(np.prod(shape)), str(folder))
    low, high = (np.broadcast_to(np.array(space[end], float), shape) for end in ("low", "high"))
    try:
        return native_action(shape, str(space.get("dtype", "float32")), low, high, str(folder))
    except ValueError as error:
        raise DatasetError(
            f"{folder / 'metadata.json'}: the action space has no finite bounds: --low and "
            "--high, one number per element"
        ) from error


def _parts(
    space: Mapping[str, Any], path: tuple[str | int, ...], bounds: Bounds, folder: Path
) -> Iterator[tuple[tuple[str | int, ...], NativeAction]]:
    """The parts of a Tuple or Dict of actions, by their path."""
    if space.get("type") not in ("Tuple", "Dict"):
        yield path, _array_action(space, bounds, folder)
        return
    below = space["subspaces"]
    for key, part in below.items() if isinstance(below, Mapping) else enumerate(below):
        yield from _parts(part, (*path, key), bounds, folder)


def _native(node: Any) -> Any:
    """Recorded actions as nested mappings and arrays; Minari calls places `_index_0`, ..."""
    if isinstance(node, tuple):
        return tuple(map(_native, node))
    if not hasattr(node, "keys"):
        return tensor(node)
    prefix = "_index_"
    return {
        int(name.removeprefix(prefix)) if name.startswith(prefix) else name: _native(node[name])
        for name in node
    }


def _about(folder: Path) -> dict[str, Any]:
    file = folder / "metadata.json"
    if not file.exists():
        raise DatasetError(f"{file} is missing; name the folder of a Minari dataset")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise DatasetError(f"{file} is damaged ({error}); download it again") from error


@contextmanager
def _episodes(folder: Path, about: Mapping[str, Any]) -> Iterator[Iterator[Episode]]:
    """The episodes, as groups of arrays, whichever way they are stored."""
    if about.get("data_format", "hdf5") == "hdf5":
        with opened(folder / "main_data.hdf5") as file:
            yield (file[name] for name in numbered(file, "episode"))
        return
    try:
        from minari import MinariDataset
    except ModuleNotFoundError as error:
        raise ConfigError('this dataset needs Minari: pip install "embodied-rl[data]"') from error
    yield (vars(one) for one in MinariDataset(folder).iterate_episodes())


def _recorded(
    folder: Path, about: Mapping[str, Any], action: NativeAction | NestedAction, name: str
) -> Iterator[Recorded]:
    with _episodes(folder, about) as episodes:
        for number, one in enumerate(episodes):
            observations, text = _observations(one)
            rows = split(observations)
            rows["action"], notes = into_unit(action, _native(one["actions"]))
            rows["reward"] = tensor(one["rewards"]).float()
            # Terminated wins where both are set; an episode that merely stops was cut.
            ended = rows["terminated"] = tensor(one["terminations"]).bool()
            rows["truncated"] = tensor(one["truncations"]).bool() & ~ended
            infos = one.get("infos")
            if infos is not None and "success" in infos:
                rows["success"] = (tensor(infos["success"]) > 0.5).flatten()[-len(ended) :]
            yield Recorded(rows, text or name, {"episode": number, **notes})


def _observations(episode: Episode) -> tuple[Tensors, str]:
    """Arrays [T + 1, ...] by name, and the first of a text observation."""
    arrays = flattened(episode["observations"])
    text = ""
    observations: Tensors = {}
    for name, array in arrays.items():
        first = array[0]
        if isinstance(first, bytes | str):
            text = first.decode() if isinstance(first, bytes) else first
        else:
            observations[name] = tensor(array)
    return observations, text
