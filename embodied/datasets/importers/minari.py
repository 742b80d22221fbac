"""Minari datasets: `data/main_data.hdf5` with `episode_i/{observations (T+1), actions, rewards,
terminations, truncations, infos}` (Younis et al. 2024), or its Arrow files through the package.

Continuous actions are mapped from the bounds of the action space, which `data/metadata.json`
holds, to [-1, 1]; an element without bounds is divided by its largest magnitude where that is above
1. Discrete actions count from 0. Dictionaries of observations are flattened with `_`, a single
array is called `state`; a text observation becomes the episode's task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.importers import (
    CONTROL_PERIOD,
    Recorded,
    flattened,
    leaves,
    numbered,
    opened,
    split,
    tensor,
    widest,
)
from embodied.datasets.lerobot.schema import DatasetError

Episode = Mapping[str, Any]


def read(path: Path, dt: float | None) -> tuple[Spec, Iterator[Recorded]]:
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
    if space.get("type") not in ("Box", "Discrete"):
        raise DatasetError(
            f"{folder / 'metadata.json'}: the action space is {space.get('type', 'not given')}; "
            "only Box and Discrete can be converted"
        )
    discrete = space["type"] == "Discrete"
    if discrete:
        act = Leaf((), "int64", low=0.0, high=float(space["n"] - 1))
    else:
        act = Leaf(tuple(space["shape"]), low=-1.0, high=1.0)
    name = str(about.get("dataset_id", ""))
    spec = Spec(leaves(observations), act, dt or CONTROL_PERIOD, text=text or name)
    return spec, _recorded(folder, about, space, name)


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
    folder: Path, about: Mapping[str, Any], space: Mapping[str, Any], name: str
) -> Iterator[Recorded]:
    with _episodes(folder, about) as episodes:
        decode = _decoder(space, (np.asarray(one["actions"]) for one in episodes))
    with _episodes(folder, about) as episodes:
        for number, one in enumerate(episodes):
            observations, text = _observations(one)
            rows = split(observations)
            rows["action"] = decode(tensor(one["actions"]))
            rows["reward"] = tensor(one["rewards"]).float()
            # Terminated wins where both are set; an episode that merely stops was cut.
            ended = rows["terminated"] = tensor(one["terminations"]).bool()
            rows["truncated"] = tensor(one["truncations"]).bool() & ~ended
            infos = one.get("infos")
            if infos is not None and "success" in infos:
                rows["success"] = (tensor(infos["success"]) > 0.5).flatten()[-len(ended) :]
            yield Recorded(rows, text or name, {"episode": number})


def _decoder(space: Mapping[str, Any], actions: Iterator[np.ndarray]) -> Callable[[Tensor], Tensor]:
    """From the environment's actions to ours."""
    if space["type"] == "Discrete":
        return lambda action: action.long() - int(space.get("start", 0))
    shape = tuple(space["shape"])
    low = torch.tensor(space["low"], dtype=torch.float32).expand(shape)
    high = torch.tensor(space["high"], dtype=torch.float32).expand(shape)
    bounded = low.isfinite() & high.isfinite()
    scale = torch.ones(shape) if bounded.all() else widest(actions)
    half = torch.where(bounded, (high - low) / 2, scale)
    middle = torch.where(bounded, (high + low) / 2, torch.zeros(shape))
    return lambda action: (action.float() - middle) / half


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
