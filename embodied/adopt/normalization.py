"""Statistics of a LeRobot checkpoint as affine maps, from its processors or its older buffers.

x' = (x - low) / scale - offset,    a = (a' + offset) scale + low

MEAN_STD     low = mean, scale = std (+ eps for inputs), offset = 0
MIN_MAX      low = min,  scale = (max - min) / 2,        offset = 1
QUANTILES    low = q01,  scale = (q99 - q01) / 2,        offset = 1     (QUANTILE10: q10, q90)
IDENTITY     low = 0,    scale = 1,                      offset = 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from embodied.adopt.lerobot_config import LeRobotConfig, read_json
from embodied.core.build import ConfigError

Stats = Mapping[str, Tensor]
PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
# Steps that do not change values beside (un)normalising: batches, devices, names.
PLAIN = ("rename_observations_processor", "to_batch_processor", "device_processor")
ENDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
BUFFERS = ("normalize_inputs.", "unnormalize_outputs.", "normalize_targets.")
EPS = 1e-8


@dataclass(frozen=True)
class Map:
    """The affine map of one feature."""

    low: Tensor
    scale: Tensor
    offset: float


@dataclass(frozen=True)
class Normalization:
    """`inputs`: the map of each input; `action`: that of actions; `stats`: of all features."""

    inputs: Mapping[str, Map]
    action: Map
    stats: Mapping[str, Stats]


def read_normalization(
    folder: Path, config: LeRobotConfig, weights: Mapping[str, Tensor]
) -> Normalization:
    """The normalisation of the checkpoint in `folder`; ConfigError for one that is not known."""
    if (folder / PRE).exists():
        into, before = _processor(folder, PRE, "normalizer_processor", config)
        back, after = _processor(folder, POST, "unnormalizer_processor", config)
        return _maps(config, into, before, back, after, widened=False)
    stats = buffers(config, weights)
    if not stats:
        raise ConfigError(
            f"{folder} has no statistics: neither {PRE} nor buffers in model.safetensors"
        )
    return _maps(config, config.norm, stats, config.norm, stats, widened=True)


def is_buffer(name: str) -> bool:
    """Whether a tensor of model.safetensors belongs to LeRobot's older normalisation."""
    return name.startswith(BUFFERS)


def buffers(config: LeRobotConfig, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The statistics in model.safetensors (before LeRobot 0.4), by feature."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in (*config.inputs, "action"):
        for start in BUFFERS[:2]:
            prefix = f"{start}buffer_{name.replace('.', '_')}."
            own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
            if own:
                found[name] = {key: value.float() for key, value in own.items()}
    return found


def _processor(
    folder: Path, file: str, wanted: str, config: LeRobotConfig
) -> tuple[Mapping[str, str], dict[str, dict[str, Tensor]]]:
    """The modes by type of feature, and the statistics by feature, of one pipeline."""
    steps = read_json(folder / file).get("steps")
    modes, stats = config.norm, dict[str, dict[str, Tensor]]()
    for step in cast(list[Any], steps) if isinstance(steps, list) else []:
        node = cast(dict[str, Any], step) if isinstance(step, dict) else {}
        name = str(node.get("registry_name", node.get("class")))
        if name in PLAIN:
            continue
        if name != wanted:
            raise ConfigError(f"{folder}/{file} has the step {name}, which is not adopted")
        settings = dict(node.get("config") or {})
        if settings.get("normalize_observation_keys") is not None:
            raise ConfigError(f"{folder}/{file} normalises only some inputs, which is not adopted")
        modes = {str(k): str(v) for k, v in dict(settings.get("norm_map") or {}).items()}
        if node.get("state_file") is not None:
            stats = _state(folder, str(node["state_file"]))
    return modes, stats


def _state(folder: Path, name: str) -> dict[str, dict[str, Tensor]]:
    """The statistics in a file of the checkpoint, by feature."""
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise ConfigError(f"{folder} names the file {name!r:.80}, which is not one of its own")
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in read_tensors(folder / name).items():
        feature, _, stat = key.rpartition(".")
        found.setdefault(feature, {})[stat] = value.float()
    return found


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ConfigError."""
    try:
        return load_file(file, device="cpu")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {file}; the checkpoint is incomplete") from error
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{file} is no safetensors file ({str(error).splitlines()[0]})"
        ) from error


def _maps(
    config: LeRobotConfig,
    into: Mapping[str, str],
    before: Mapping[str, Stats],
    back: Mapping[str, str],
    after: Mapping[str, Stats],
    widened: bool,
) -> Normalization:
    types = {"state": "STATE", "env": "ENV", "image": "VISUAL"}
    inputs: dict[str, Map] = {}
    for name, feature in config.inputs.items():
        image = feature.kind == "image"
        shape = (feature.shape[0], 1, 1) if image else feature.shape
        mode = into.get(types[feature.kind], "IDENTITY")
        inputs[name] = affine(mode, before.get(name), shape, name, True, widened)
    mode = back.get("ACTION", "IDENTITY")
    action = affine(mode, after.get("action"), (config.action,), "action", False, widened)
    return Normalization(inputs, action, {**before, **after})


def affine(
    mode: str, stats: Stats | None, shape: tuple[int, ...], name: str, entering: bool, widened: bool
) -> Map:
    """The map of a feature with `stats`; `entering`: of an input, not of actions; `widened`: as
    LeRobot's older buffers, which added eps to every range."""
    if mode == "IDENTITY" or stats is None:  # LeRobot leaves values without statistics as they are
        return Map(torch.zeros(shape), torch.ones(shape), 0.0)
    if mode == "MEAN_STD":
        mean, std = (_stat(stats, key, shape, name) for key in ("mean", "std"))
        return Map(mean, std + EPS if entering else std, 0.0)
    if mode not in ENDS:
        raise ConfigError(f"{name} is normalised by {mode}, which is not adopted")
    low, high = (_stat(stats, key, shape, name) for key in ENDS[mode])
    width = high - low
    if widened:
        width = width + EPS if entering else width
    else:
        width = torch.where(width == 0, torch.tensor(EPS), width)
    return Map(low, width / 2, 1.0)


def _stat(stats: Stats, key: str, shape: tuple[int, ...], name: str) -> Tensor:
    value = stats.get(key)
    if value is None or value.numel() != torch.Size(shape).numel():
        raise ConfigError(f"the checkpoint's statistics of {name} have no {key} of {list(shape)}")
    if not value.isfinite().all():
        raise ConfigError(f"the checkpoint's statistics of {name} are not finite ({key})")
    return value.reshape(shape)
