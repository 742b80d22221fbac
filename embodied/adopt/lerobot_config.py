"""The config.json of a LeRobot checkpoint, checked: its type, features and settings.

Written for LeRobot 0.6; a field that is not known here may change what the policy does, so it is
refused unless the user says that it does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from embodied.core.build import ConfigError, shown
from embodied.core.files import SIDE, inside, read_json, reading
from embodied.core.saved_file import load_tensors
from embodied.core.spec import known

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


SETTINGS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "diffusion": (
        ("horizon", "horizon", int),
        ("train_steps", "num_train_timesteps", int),
        ("schedule", "beta_schedule", str),
        ("beta_start", "beta_start", float),
        ("beta_end", "beta_end", float),
        ("prediction", "prediction_type", str),
        ("unet.channels", "down_dims", list),
        ("unet.kernel", "kernel_size", int),
        ("unet.groups", "n_groups", int),
        ("unet.time_dim", "diffusion_step_embed_dim", int),
        ("unet.scale", "use_film_scale_modulation", bool),
        ("images.backbone", "vision_backbone", str, "resnet18"),
        ("images.groups", "use_group_norm", bool, False),
        ("images.keypoints", "spatial_softmax_num_keypoints", int, 32),
    ),
    "act": (
        ("horizon", "chunk_size", int),
        ("latent", "latent_dim", int),
        ("backbone", "vision_backbone", str, "resnet18"),
        ("dilate", "replace_final_stride_with_dilation", bool, False),
        ("transformer.width", "dim_model", int),
        ("transformer.heads", "n_heads", int),
        ("transformer.feedforward", "dim_feedforward", int),
        ("transformer.activation", "feedforward_activation", str),
        ("transformer.encoder", "n_encoder_layers", int),
        ("transformer.decoder", "n_decoder_layers", int),
        ("transformer.before", "pre_norm", bool),
    ),
}
"""Settings that are the same here and there: our name, LeRobot's, type, and the default if any."""


@dataclass(frozen=True)
class Feature:
    """A feature of the policy: `kind` is state, env or image; `shape` as LeRobot has it."""

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LeRobotConfig:
    """`inputs` by name, in the order of the file; `action`: its size; `norm`: the normalisation of
    each type of feature; `settings`: the other fields; `unread`: features that the file lists and
    LeRobot's policy does not read."""

    type: str
    inputs: Mapping[str, Feature]
    action: int
    obs_steps: int
    norm: Mapping[str, str]
    settings: Mapping[str, Any]
    unread: tuple[str, ...] = ()


def read_config(folder: Path, ignore: tuple[str, ...] = ()) -> LeRobotConfig:
    """Read FOLDER/config.json; ConfigError. `ignore`: unknown fields that do not matter."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give one with config.json, model.safetensors")
    node = read_settings(folder / "config.json")
    kind = node.get("type")
    if not isinstance(kind, str):
        raise ConfigError(f"{folder} holds a policy of type {shown(kind)}: it is damaged")
    if kind not in FIELDS:
        raise ConfigError(
            f"{folder} holds a policy of type {shown(kind)}; adopted are {', '.join(FIELDS)}. "
            f"Others run in LeRobot: `PYTHON scripts/serve_lerobot.py {folder}` with its "
            "interpreter, then init=ws://127.0.0.1:8000 (docs/lerobot.md)"
        )
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
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
        raise ConfigError(
            f"{folder}/config.json names no features (input_features, output_features.action): it "
            "is of a LeRobot before 0.2, or damaged"
        ) from error
    # LeRobot's policies read one feature of this type, by its name.
    unread = tuple(name for name, each in inputs.items() if each.kind == "state" and name != STATE)
    inputs = {name: each for name, each in inputs.items() if name not in unread}
    _require_features(inputs, kind)
    with reading(folder / "config.json", TypeError, ValueError):
        steps = int(node.get("n_obs_steps", 1))
        norm = {str(k): str(v) for k, v in dict(node.get("normalization_mapping") or {}).items()}
    return LeRobotConfig(kind, inputs, action, steps, norm, node, unread)


def read_settings(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file; ConfigError."""
    try:
        node = read_json(file)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no {file}; give the folder of a LeRobot checkpoint (pretrained_model)"
        ) from error
    except OSError as error:
        raise ConfigError(f"{file} is not JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(node, dict):
        raise ConfigError(f"{file} should hold settings, not {shown(node)}")
    return cast(dict[str, Any], node)


def _feature(node: Mapping[str, Any]) -> Feature:
    shape, _ = known([int(n) for n in node["shape"]], "float32")
    if len(shape) > 1 and max(shape) > SIDE:
        raise ValueError(f"a picture of {list(shape)}")
    return Feature(KINDS.get(node["type"], str(node["type"]).lower()), shape)


def _require_features(inputs: Mapping[str, Feature], kind: str) -> None:
    for name, each in inputs.items():
        if each.kind not in KINDS.values():
            raise ConfigError(f"the policy takes {name} of type {each.kind}, which is not adopted")
        if each.kind == "image" and (len(each.shape) != 3 or each.shape[0] != 3):
            raise ConfigError(f"{name} should be 3 x height x width, not {list(each.shape)}")
        if each.kind != "image" and len(each.shape) != 1:
            raise ConfigError(f"{name} should be a vector, not {list(each.shape)}")
    envs = [name for name, each in inputs.items() if each.kind == "env"]
    if envs not in ([], [ENV]):
        raise ConfigError(f"the policy takes {', '.join(envs)} of type env, not {ENV} alone")
    if STATE not in inputs:  # LeRobot itself cannot run one without
        raise ConfigError(f"the policy does not take {STATE}, which LeRobot's {kind} needs")


Stats = Mapping[str, Tensor]
PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
# Steps that do not change values beside (un)normalising: batches, devices, names.
PLAIN = ("rename_observations_processor", "to_batch_processor", "device_processor")
ENDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
BUFFERS = ("normalize_inputs.", "unnormalize_outputs.", "normalize_targets.")
EPS = 1e-8


@dataclass(frozen=True)
class Map:
    """The affine map of one feature, from the checkpoint's processors or its older buffers.

    x' = (x - low) / scale - offset,    a = (a' + offset) scale + low

    MEAN_STD     low = mean, scale = std (+ eps for inputs), offset = 0
    MIN_MAX      low = min,  scale = (max - min) / 2,        offset = 1
    QUANTILES    low = q01,  scale = (q99 - q01) / 2,        offset = 1     (QUANTILE10: q10, q90)
    IDENTITY     low = 0,    scale = 1,                      offset = 0
    """

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
    steps = read_settings(folder / file).get("steps")
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
    if not name.endswith(".safetensors"):
        raise ConfigError(f"{folder} names the file {name!r:.80}, which is not one of its own")
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in read_tensors(inside(folder, name)).items():
        feature, _, stat = key.rpartition(".")
        found.setdefault(feature, {})[stat] = value.float()
    return found


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ConfigError."""
    try:
        return load_tensors(file)
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
        shape = (feature.shape[0], 1, 1) if feature.kind == "image" else feature.shape
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
