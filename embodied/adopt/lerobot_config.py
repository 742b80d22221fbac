"""The config.json of a LeRobot checkpoint, checked: its type, features and settings.

Written for LeRobot 0.6; a field that is not known here may change what the policy does, so it is
refused unless the user says that it does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from embodied.core.build import ConfigError, shown

STATE, ENV = "observation.state", "observation.environment_state"
KINDS = {"STATE": "state", "ENV": "env", "VISUAL": "image"}
# Fields that change nothing when the policy acts: where it ran, how it was trained and published.
WITHOUT_EFFECT = """type n_obs_steps input_features output_features normalization_mapping device
    use_amp use_peft push_to_hub repo_id private tags license pretrained_path pretrained_revision
    pretrained_backbone_weights optimizer_lr optimizer_weight_decay"""
FIELDS = {
    "diffusion": """horizon n_action_steps drop_n_last_frames vision_backbone resize_shape
    crop_ratio crop_shape crop_is_random use_group_norm spatial_softmax_num_keypoints
    use_separate_rgb_encoder_per_camera down_dims kernel_size n_groups diffusion_step_embed_dim
    use_film_scale_modulation gradient_checkpointing noise_scheduler_type num_train_timesteps
    beta_schedule beta_start beta_end prediction_type clip_sample clip_sample_range
    num_inference_steps compile_model compile_mode do_mask_loss_for_padding optimizer_betas
    optimizer_eps scheduler_name scheduler_warmup_steps""",
    "act": """chunk_size n_action_steps vision_backbone replace_final_stride_with_dilation pre_norm
    dim_model n_heads dim_feedforward feedforward_activation n_encoder_layers n_decoder_layers
    use_vae latent_dim n_vae_encoder_layers temporal_ensemble_coeff dropout kl_weight
    optimizer_lr_backbone""",
}
SERVED = ("smolvla", "pi0", "pi05")
"""Types that run in LeRobot itself, in a process of its own."""


@dataclass(frozen=True)
class Feature:
    """A feature of the policy: `kind` is state, env or image; `shape` as LeRobot has it."""

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LeRobotConfig:
    """`inputs` by name, in the order of the file; `action`: its size; `norm`: the normalisation of
    each type of feature; `settings`: the other fields."""

    type: str
    inputs: Mapping[str, Feature]
    action: int
    obs_steps: int
    norm: Mapping[str, str]
    settings: Mapping[str, Any]


def read_config(folder: Path, ignore: tuple[str, ...] = ()) -> LeRobotConfig:
    """Read FOLDER/config.json; ConfigError for one that cannot be adopted. `ignore`: unknown fields
    that do not matter."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give one with config.json, model.safetensors")
    node = read_json(folder / "config.json")
    kind = node.get("type")
    if kind in SERVED:
        raise ConfigError(
            f"{folder} holds {kind}, which needs LeRobot: run `PYTHON scripts/serve_lerobot.py "
            f"{folder}` with its interpreter, then use policy=remote (docs/lerobot.md)"
        )
    if not isinstance(kind, str) or kind not in FIELDS:
        known = ", ".join((*FIELDS, *SERVED))
        raise ConfigError(f"{folder} holds a policy of type {shown(kind)}; adopted are {known}")
    if node.get("use_peft"):
        raise ConfigError(f"{folder} holds adapters only (use_peft): merge them into the model")
    known = {*WITHOUT_EFFECT.split(), *FIELDS[kind].split(), *ignore}
    unknown = [name for name in node if name not in known]
    if unknown:
        names = ", ".join(unknown)
        raise ConfigError(
            f"{folder}/config.json has fields that are not known here ({names}), as of a newer "
            f'LeRobot; if they change nothing: "ignore=[{",".join(unknown)}]"'
        )
    try:
        inputs = {name: _feature(value) for name, value in node["input_features"].items()}
        action = _feature(node["output_features"]["action"]).shape[0]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{folder}/config.json names no features (input_features, output_features.action): it "
            "is of a LeRobot before 0.2, or damaged"
        ) from error
    _require_features(inputs, kind)
    steps = int(node.get("n_obs_steps", 1))
    norm = {str(k): str(v) for k, v in dict(node.get("normalization_mapping") or {}).items()}
    return LeRobotConfig(kind, inputs, action, steps, norm, node)


def read_json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file; ConfigError."""
    try:
        node = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no {file}; give the folder of a LeRobot checkpoint (pretrained_model)"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(node, dict):
        raise ConfigError(f"{file} should hold settings, not {shown(node)}")
    return cast(dict[str, Any], node)


def _feature(node: Mapping[str, Any]) -> Feature:
    return Feature(
        KINDS.get(node["type"], str(node["type"]).lower()), tuple(int(n) for n in node["shape"])
    )


def _require_features(inputs: Mapping[str, Feature], kind: str) -> None:
    for name, each in inputs.items():
        if each.kind not in KINDS.values():
            raise ConfigError(f"the policy takes {name} of type {each.kind}, which is not adopted")
        if each.kind == "image" and (len(each.shape) != 3 or each.shape[0] != 3):
            raise ConfigError(f"{name} should be 3 x height x width, not {list(each.shape)}")
        if each.kind != "image" and len(each.shape) != 1:
            raise ConfigError(f"{name} should be a vector, not {list(each.shape)}")
    kinds = [each.kind for each in inputs.values()]
    for one in ("state", "env"):
        if kinds.count(one) > 1:
            raise ConfigError(f"the policy takes {kinds.count(one)} inputs of type {one}, not one")
    if "state" not in kinds:  # LeRobot itself cannot run one without
        raise ConfigError(f"the policy does not take {STATE}, which LeRobot's {kind} needs")
