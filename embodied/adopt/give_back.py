"""give_back: writes a policy of a LeRobot checkpoint as a LeRobot checkpoint again.

The network's tensors have LeRobot's names all along, so a policy whose weights were trained on is
a checkpoint that LeRobot loads without this project. Its observations and actions are those of the
checkpoint that was adopted: LeRobot's names and units, and no clipping to an environment's [-1, 1].
Written for LeRobot 0.6.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from embodied.adopt.adopt import WEIGHTS
from embodied.adopt.lerobot_config import EPS, KINDS, POST, PRE, SETTINGS
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.policies.abilities import acts_as
from embodied.policies.lerobot.act import LeRobotAct
from embodied.policies.lerobot.diffusion import LeRobotDiffusion
from embodied.policies.lerobot.policy import LeRobotPolicy, Normalization

TYPES = {kind: name for name, kind in KINDS.items()}


def give_back(policy: Policy, folder: Path) -> None:
    """Write the LeRobot checkpoint `folder`; ConfigError if LeRobot has no class for `policy`."""
    policy = acts_as(policy.inference_policy())
    if isinstance(policy, LeRobotDiffusion):
        settings = _diffusion(policy)
    elif isinstance(policy, LeRobotAct):
        settings = _act(policy)
    else:
        raise ConfigError(
            f"LeRobot has no policy like {type(policy).__name__}: an adopted Diffusion or ACT "
            "policy can be given back, trained on or not, without what steers or corrects it"
        )
    own = ("normalize.", "unnormalize.")
    weights = {k: v for k, v in policy.state_dict().items() if not k.startswith(own)}
    modes, stats = _statistics(policy)
    features = {
        name: {"type": TYPES[each.kind], "shape": list(each.shape)}
        for name, each in policy.inputs.items()
    }
    action = {"action": {"type": "ACTION", "shape": [policy.spec.act.size]}}
    shared = {
        "input_features": features,
        "output_features": action,
        "normalization_mapping": modes,
        "n_action_steps": policy.chunk,
        "n_obs_steps": policy.past + 1,
        "pretrained_backbone_weights": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**settings, **shared}, indent=1))
    save_file({k: v.cpu().contiguous() for k, v in weights.items()}, folder / WEIGHTS)
    before: list[tuple[str, dict[str, Any]]] = [
        ("rename_observations_processor", {"rename_map": {}}),
        ("to_batch_processor", {}),
        ("device_processor", {"device": "cpu", "float_dtype": None}),
        ("normalizer_processor", _normalizer({**features, **action}, modes)),
    ]
    after = [("unnormalizer_processor", _normalizer(action, modes)), before[2]]
    _write_processor(folder / PRE, before, stats)
    _write_processor(folder / POST, after, stats)


def _shared(policy: LeRobotDiffusion | LeRobotAct, kind: str) -> dict[str, Any]:
    """The settings that have another name there only."""
    found = {theirs: attrgetter(ours)(policy.config) for ours, theirs, *_ in SETTINGS[kind]}
    return {"type": kind, **found}


def _diffusion(policy: LeRobotDiffusion) -> dict[str, Any]:
    """The fields of config.json of a Diffusion policy, sampled as it is sampled here."""
    config, images = policy.config, policy.config.images
    crop, ratio = images.crop, 1.0
    if images.resize is not None and crop is not None:
        # LeRobot makes the crop of resized pictures itself: int(side * ratio) of each side.
        pairs = list(zip(crop, images.resize, strict=True))
        ratio = (max(a / b for a, b in pairs) + min((a + 1) / b for a, b in pairs)) / 2
    return _shared(policy, "diffusion") | {
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": config.steps,
        "clip_sample": config.clip_sample is not None,
        "clip_sample_range": 1.0 if config.clip_sample is None else config.clip_sample,
        "resize_shape": images.resize,
        "crop_shape": crop,
        "crop_ratio": ratio,
        "use_separate_rgb_encoder_per_camera": images.separate,
    }


def _act(policy: LeRobotAct) -> dict[str, Any]:
    """The fields of config.json of an ACT policy, without the encoder of its latent."""
    return _shared(policy, "act") | {"use_vae": False, "temporal_ensemble_coeff": None}


def _statistics(policy: LeRobotPolicy) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The normalisation of each type of feature, and the statistics of features as LeRobot's
    processors store them; those of observations in the units of the adopted checkpoint."""
    maps: dict[str, tuple[str, Normalization]] = {}
    for (name, each), norm in zip(policy.inputs.items(), policy.normalize, strict=True):
        assert isinstance(norm, Normalization)
        made = Normalization(tuple(norm.low.shape))
        made.load_state_dict(norm.state_dict())
        if each.units is not None:
            zero = torch.zeros(each.units.size)
            offset = each.units.to_physical(zero)
            made.low = each.units.to_unit(norm.low)
            made.scale = norm.scale / (each.units.to_physical(zero + 1) - offset)
        maps[name] = (TYPES[each.kind], made)
    maps["action"] = ("ACTION", policy.unnormalize)
    modes: dict[str, str] = {}
    for kind in {kind for kind, _ in maps.values()}:
        ranges = all(float(norm.offset) == 1 for found, norm in maps.values() if found == kind)
        modes[kind] = "MIN_MAX" if ranges else "MEAN_STD"
    stats: dict[str, Tensor] = {}
    for name, (kind, norm) in maps.items():
        if modes[kind] == "MIN_MAX":
            stats |= {f"{name}.min": norm.low.clone(), f"{name}.max": norm.low + 2 * norm.scale}
        else:
            entering = 0.0 if name == "action" else EPS  # LeRobot adds it to inputs' deviations
            stats[f"{name}.mean"] = norm.low + norm.offset * norm.scale
            stats[f"{name}.std"] = norm.scale - entering
    return modes, {name: value.cpu().contiguous() for name, value in stats.items()}


def _normalizer(features: Mapping[str, Any], modes: Mapping[str, str]) -> dict[str, Any]:
    return {"eps": EPS, "features": dict(features), "norm_map": dict(modes)}


def _write_processor(
    file: Path, steps: list[tuple[str, dict[str, Any]]], stats: dict[str, Tensor]
) -> None:
    """Write a pipeline of LeRobot's processors and the statistics of its normalisation."""
    nodes: list[dict[str, Any]] = []
    for number, (name, settings) in enumerate(steps):
        node: dict[str, Any] = {"registry_name": name, "config": settings}
        if "features" in settings:
            node["state_file"] = f"{file.stem}_step_{number}_{name}.safetensors"
            save_file(stats, file.with_name(node["state_file"]))
        nodes.append(node)
    file.write_text(json.dumps({"name": file.stem, "steps": nodes}, indent=1))
