"""Minari datasets: `data/main_data.hdf5` with `episode_i/{observations (T+1), actions, rewards,
terminations, truncations, infos}` (Younis et al. 2024), or its Arrow files through the package.

Names, types and bounds are those that `env=gym` gives the environment of the same spaces, which
`data/metadata.json` holds, so that a dataset and its environment fit without a mapping. Continuous
actions are mapped from the bounds of the action space (or `--low` and `--high`) to [-1, 1]; what
goes beyond is clipped and counted in `info`. Choices count from 0; the parts of a Tuple or Dict are
joined in their order. A text observation becomes the episode's task. The
control period is that of the file's environment, which has to be installed, or `--dt`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied import importers
from embodied.core.build import needed
from embodied.core.files import MALFORMED, read_json, reading
from embodied.core.native import Native, NativeLeaf
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.schema import DatasetError
from embodied.datasets.lerobot.video import decode_image
from embodied.importers import Bounds, Recorded, flags, into_unit, leaf_tensor, naming, numbered

Episode = Mapping[str, Any]
SUCCESS = ("success", "is_success")
MOST = 2**28  # numbers of a space


def read(path: Path, dt: float | None, bounds: Bounds) -> tuple[Spec, Iterator[Recorded]]:
    """The Spec of a dataset folder (or its `main_data.hdf5`), and its episodes in order."""
    folder = path.parent if path.is_file() else path
    folder = folder / "data" if (folder / "data").is_dir() else folder
    about = _about(folder)
    seen, acted = (_space(folder, about, f"{kind}_space") for kind in ("observation", "action"))
    native = _native(seen, acted, bounds, folder)
    recorded = _recorded(folder, about, native, list(_sentences(seen)))
    first = next(recorded, None)
    if first is None:
        raise DatasetError(f"{path} holds no episodes")
    return native.spec(dt or _period(folder, about), first.text), chain([first], recorded)


def _space(folder: Path, about: Mapping[str, Any], kind: str) -> Any:
    serialization = needed("minari.serialization", "this dataset needs Minari", "data")
    flatdim = needed("gymnasium.spaces.utils", "this dataset needs Minari", "data").flatdim
    if kind not in about:
        raise DatasetError(f"{folder / 'metadata.json'}: the {kind} is not given")
    with reading(f"{folder / 'metadata.json'}: the {kind}", AssertionError, *MALFORMED):
        made = serialization.deserialize_space(about[kind])
    with suppress(ValueError, NotImplementedError):  # spaces of no fixed size
        if flatdim(made) > MOST:
            raise DatasetError(f"{folder / 'metadata.json'}: the {kind} is too large")
    return made


def _native(seen: Any, acted: Any, bounds: Bounds, folder: Path) -> Native:
    from gymnasium import spaces

    from embodied.envs.spaces import action_of, entries

    file = folder / "metadata.json"
    try:
        leaves = entries(seen, "state", str(file))
    except ValueError as error:
        raise DatasetError(str(error)) from error
    if bounds.given and isinstance(acted, spaces.Box):
        return Native(leaves, bounds.action(acted.shape, str(folder)))
    try:
        return Native(leaves, action_of(acted, str(file)))
    except ValueError as error:
        if not isinstance(acted, spaces.Box):
            raise DatasetError(str(error)) from error
        raise DatasetError(
            f"{file}: the action space has no finite bounds: --low and --high, one number per "
            "element"
        ) from error


def _about(folder: Path) -> dict[str, Any]:
    file = folder / "metadata.json"
    if not file.exists():
        raise DatasetError(f"{file} is missing; name the folder of a Minari dataset")
    try:
        return read_json(file)
    except ValueError as error:
        raise DatasetError(f"{file} is damaged ({error}); download it again") from error


def _period(folder: Path, about: Mapping[str, Any]) -> float:
    """The control period (s) of the environment that the episodes are of."""
    from embodied.envs.gym import Config, control_period, make

    file = folder / "metadata.json"
    if not about.get("env_spec"):
        raise DatasetError(f"{file} does not say the environment, and so no control period: --dt")
    env_spec = json.loads(about["env_spec"])
    kwargs = {k: v for k, v in (env_spec.get("kwargs") or {}).items() if k != "render_mode"}
    try:
        env = make(Config(str(env_spec["id"]), kwargs=kwargs))
    except (ValueError, ModuleNotFoundError, ArithmeticError) as error:
        raise DatasetError(
            f"{file}: the control period is that of {env_spec['id']}, which cannot be made here "
            f"({error}): --dt"
        ) from error
    try:
        return control_period(env)
    finally:
        env.close()


@contextmanager
def _episodes(folder: Path, about: Mapping[str, Any]) -> Iterator[Iterator[Episode]]:
    """The episodes, as groups of arrays, whichever way they are stored."""
    if about.get("data_format", "hdf5") == "hdf5":
        with importers.opened(folder / "main_data.hdf5") as file:
            yield (file[name] for name in numbered(file, "episode"))
        return
    from minari import MinariDataset

    yield (vars(one) for one in MinariDataset(folder).iterate_episodes())


def _recorded(
    folder: Path, about: Mapping[str, Any], native: Native, sentences: list[tuple[Any, ...]]
) -> Iterator[Recorded]:
    name = str(about.get("dataset_id", ""))
    with _episodes(folder, about) as episodes:
        for number, one in enumerate(episodes):
            with naming(folder, f"episode {number}"):
                rows, notes = _rows(one, native)
                words = [_picked(one["observations"], place)[0] for place in sentences[:1]]
                text = (
                    words[0].decode() if words and isinstance(words[0], bytes) else "".join(words)
                )
            yield Recorded(f"episode {number}", rows, text or name, {"episode": number, **notes})


def _rows(one: Episode, native: Native) -> tuple[Tensors, dict[str, int]]:
    steps = len(one["rewards"])
    if not steps:
        return {}, {}
    observations = {entry.name: _observed(entry, one["observations"]) for entry in native.obs}
    for name, value in observations.items():
        if len(value) != steps + 1:
            raise DatasetError(
                f"{name} has {len(value)} observations and there are {steps} actions; one "
                "observation more is needed"
            )
    rows = importers.split(observations)
    rows["action"], notes = into_unit(native.act, _acted(one["actions"]))
    rows["reward"] = torch.from_numpy(np.asarray(one["rewards"], np.float32))
    # Terminated wins where both are set; an episode that merely stops was cut.
    ended = rows["terminated"] = flags(one["terminations"])
    rows["truncated"] = flags(one["truncations"]) & ~ended
    infos = one.get("infos") or {}
    for key in SUCCESS:
        if key in infos:
            # One value more than steps where the reset has one, too.
            rows["success"] = flags(infos[key])[-len(ended) :]
    return rows, notes


def _acted(node: Any) -> Any:
    """Recorded actions as nested mappings and arrays; Minari calls places `_index_0`, ..."""
    if isinstance(node, tuple):
        return tuple(map(_acted, node))
    if not hasattr(node, "keys"):
        return np.asarray(node)
    prefix = "_index_"
    return {
        int(name.removeprefix(prefix)) if name.startswith(prefix) else name: _acted(node[name])
        for name in node
    }


def _observed(entry: NativeLeaf, observations: Any) -> torch.Tensor:
    """[T + 1, ...] of one leaf; pictures are kept as JPEG files, or as they are."""
    array = np.asarray(_picked(observations, entry.path))
    if array.shape[1:] != entry.shape and (array.dtype == object or array.dtype == np.uint8):
        pictures = [decode_image(bytes(memoryview(item))).numpy() for item in array]
        array = np.stack(pictures).reshape(len(array), *entry.shape)
    return leaf_tensor(entry, array)


def _picked(node: Any, path: tuple[Any, ...]) -> Any:
    """What lies at `path` of nested observations; HDF5 calls the parts of a Tuple `_index_0`."""
    for key in path:
        node = node[f"_index_{key}" if isinstance(key, int) and hasattr(node, "keys") else key]
    return node


def _sentences(space: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the texts are among the observations."""
    from gymnasium import spaces

    parts = space.spaces if isinstance(space, spaces.Dict | spaces.Tuple) else {}
    for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        yield from _sentences(part, (*path, key))
    if isinstance(space, spaces.Text):
        yield path
