"""robomimic HDF5: `data/demo_i/{obs/*, next_obs/*, actions, rewards, dones}`.

Mandlekar et al., What Matters in Learning from Offline Human Demonstrations (2021).

Its actions are in [-1, 1] already, unless `--low` and `--high` are given; what goes beyond is
clipped, as robosuite's controllers do, and counted in the episode's `info`. Absolute poses need
those bounds. Success is a positive reward (with shaped rewards: `dones`). A demonstration that ends
in success terminates, any other is cut by the clock. Where a file keeps no `next_obs`, the last
step of a demonstration that did not succeed has no true successor, and is left out. The file's
masks (train, valid, ...) are in `info`; `--mask NAME` reads the demonstrations of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from embodied import importers
from embodied.core.native import Native, NativeLeaf
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.schema import DatasetError
from embodied.importers import CONTROL_PERIOD, Bounds, Recorded, flags, leaves, numbers, observed


def read(path: Path, dt: float | None, bounds: Bounds) -> tuple[Spec, Iterator[Recorded]]:
    """The Spec of a file, and its demonstrations in the order of their numbers."""
    with importers.opened(path) as file:
        data = file["data"]
        demos = importers.numbered(data, "demo")
        if not demos:
            raise DatasetError(f"{path} holds no data/demo_0; is it a robomimic file?")
        first = data[demos[0]]
        if "obs" not in first:
            raise DatasetError(
                f"{path} has no observations; extract them with robomimic's "
                "dataset_states_to_obs.py"
            )
        about = json.loads(data.attrs.get("env_args", "{}"))
        settings = about.get("env_kwargs", {})
        period = dt or 1.0 / settings.get("control_freq", 1.0 / CONTROL_PERIOD)
        entries = leaves(
            (place, numbers(array[:1])) for place, array in importers.walk(first["obs"])
        )
        size = first["actions"].shape[1]
        action = bounds.action((size,), str(path)) if bounds.given else importers.unit_box(size)
        if not bounds.given and _is_absolute(settings.get("controller_configs")):
            raise DatasetError(
                f"{path}: actions are absolute poses, whose bounds the file does not hold: --low "
                "and --high, one number per element"
            )
        text = str(about.get("env_name", ""))

    def rows(demo: Any) -> Tensors:
        return _rows(demo, entries, bool(settings.get("reward_shaping")))

    spec = Native(entries, action).spec(period, text)
    return spec, importers.with_actions(path, demos, action, text, "demo", "data", rows)


def _is_absolute(controller: Any) -> bool:
    """Whether robosuite's settings of a controller, or of one for each part of a body, say that
    actions are goals and not steps."""
    if not isinstance(controller, dict):
        return False
    said = controller.get("control_delta") is False or controller.get("input_type") == "absolute"
    return said or any(map(_is_absolute, controller.values()))


def _rows(demo: Any, entries: tuple[NativeLeaf, ...], shaped: bool) -> Tensors:
    observations = observed(entries, demo["obs"])
    reward = torch.from_numpy(numbers(demo["rewards"])).float()
    success = flags(demo["dones"]) if shaped else reward > 0
    steps = len(reward)
    if "next_obs" in demo:
        after = {name: value[-1] for name, value in observed(entries, demo["next_obs"]).items()}
    else:
        after = {name: value[-1] for name, value in observations.items()}
        steps -= not bool(success[-1])
    rows = {f"obs/{name}": value[:steps] for name, value in observations.items()}
    rows |= {f"next_obs/{name}": value for name, value in after.items()}
    rows |= {"reward": reward[:steps], "success": success[:steps]}
    rows["action"] = torch.from_numpy(numbers(demo["actions"]))[:steps]
    return rows | importers.last_flags(steps, bool(success[-1]))
