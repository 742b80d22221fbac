"""ManiSkill HDF5 with its JSON: `traj_i/{obs (T+1), actions, terminated, truncated, success,
rewards}` (Tao et al. 2024).

Observations have the names and types that `env=maniskill` gives them (`agent/qpos` is `agent_qpos`,
a flat one `state`; camera matrices are left out). Actions of its delta controllers are in
[-1, 1]; what goes beyond is clipped, as ManiSkill does, and counted in `info`. Those of absolute
controllers have bounds that the file does not hold: `--low` and `--high`. Those of several robots
are one vector, in the order of the file. Without recorded rewards,
the reward is 1 where the task is achieved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied import importers
from embodied.core.files import read_text, require_file
from embodied.core.native import Native, NativeAction, NestedAction
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.schema import DatasetError
from embodied.envs.maniskill.observations import flat, leaves
from embodied.importers import CONTROL_PERIOD, Bounds, Recorded, flags, last_flags, numbers, walk


def read(path: Path, dt: float | None, bounds: Bounds) -> tuple[Spec, Iterator[Recorded]]:
    """The Spec of a file, and its trajectories in the order of their numbers."""
    about = _about(path)
    with importers.opened(path) as file:
        names = importers.numbered(file, "traj")
        if not names:
            raise DatasetError(f"{path} holds no traj_0; is it a ManiSkill trajectory file?")
        first = file[names[0]]
        observations = _observations(first)
        if not observations:
            raise DatasetError(
                f"{path} has no observations (obs_mode none); record them with python -m "
                f"mani_skill.trajectory.replay_trajectory --traj-path {path} -o state --save-traj"
            )
        arms = [(where, values.shape[1]) for where, values in walk(first["actions"])]
        obs = leaves(observations, ())
    settings = about.get("env_kwargs", {})
    mode = str(settings.get("control_mode") or "delta, by default")
    if not bounds.given and "delta" not in mode:
        raise DatasetError(
            f"{path}: actions of {mode} have bounds of their own, which the file does not hold: "
            "--low and --high (env.action_space.low and .high of the task in ManiSkill)"
        )
    size = sum(count for _, count in arms)
    action = bounds.action((size,), str(path)) if bounds.given else importers.unit_box(size)
    rate = settings.get("sim_config", {}).get("control_freq", 1.0 / CONTROL_PERIOD)
    text = str(about.get("env_id", ""))
    episodes = importers.with_actions(path, names, action, text, "trajectory", "/", _rows)
    own = _of_arms(action, arms)
    native = Native((), own).to_json()
    return Spec(obs, own.leaf, dt or 1.0 / rate, text=text, native=native), episodes


def _of_arms(
    action: NativeAction, arms: list[tuple[tuple[str, ...], int]]
) -> NativeAction | NestedAction:
    """The elements of `action` as ManiSkill takes them: by the names of the robots, of several."""
    if arms[0][0] == ():
        return action
    parts: list[tuple[tuple[str, ...], NativeAction]] = []
    at = 0
    for where, count in arms:
        low, high = (end[at : at + count] for end in (action.low, action.high))
        parts.append((where, NativeAction((count,), action.dtype, low, high)))
        at += count
    return NestedAction(tuple(parts))


def _about(path: Path) -> dict[str, Any]:
    file = path.with_suffix(".json")
    if not file.exists():
        raise DatasetError(f"{file} is missing: ManiSkill writes it beside {path.name}")
    try:
        return json.loads(read_text(file, require_file(file)))["env_info"]
    except (ValueError, KeyError, ArithmeticError) as error:
        raise DatasetError(f"{file} is damaged ({error}); copy or download it again") from error


def _observations(trajectory: Any) -> Tensors:
    return flat(_nested(trajectory["obs"])) if "obs" in trajectory else {}


def _nested(node: Any) -> Any:
    if hasattr(node, "keys"):
        return {key: _nested(node[key]) for key in node}
    return torch.from_numpy(numbers(node))


def _rows(trajectory: Any) -> Tensors:
    rows = importers.split(_observations(trajectory))
    actions = [numbers(values) for _, values in walk(trajectory["actions"])]
    rows["action"] = torch.from_numpy(np.concatenate(actions, 1))
    steps = len(rows["action"])
    if "success" in trajectory:
        rows["success"] = flags(trajectory["success"])
    if "rewards" in trajectory:
        rows["reward"] = torch.from_numpy(numbers(trajectory["rewards"])).float()
    else:
        rows["reward"] = rows.get("success", torch.zeros(steps)).float()
    return rows | last_flags(steps, bool(flags(trajectory["terminated"])[-1]))
