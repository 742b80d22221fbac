"""From a LeRobot checkpoint to the node and the weights of a policy of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from embodied.adopt.lerobot_config import LeRobotConfig
from embodied.adopt.normalization import Normalization, is_buffer
from embodied.core.build import ConfigError, Node

COMPILED = "._orig_mod"  # what torch.compile puts into names
UNUSED = {"diffusion": (), "act": ("model.vae_encoder",)}  # only training uses them


def policy_node(
    config: LeRobotConfig,
    weights: Mapping[str, Tensor],
    names: Mapping[str, str],
    chunk: int | None,
    steps: int | None,
) -> Node:
    """The policy's node; `names`: our observation of each input; `chunk`, `steps`: instead of the
    checkpoint's. ConfigError for a setting without effect."""
    inputs = {
        name: {"obs": names[name], "kind": each.kind, "shape": list(each.shape)}
        for name, each in config.inputs.items()
    }
    if config.type != "diffusion" and steps is not None:
        raise ConfigError("steps are of a Diffusion policy's sampler; an ACT policy has none")
    try:
        if config.type == "diffusion":
            return {**_diffusion(config, weights, chunk, steps), "inputs": inputs}
        return {**_act(config, chunk), "inputs": inputs}
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]}: it is damaged") from error
    except TypeError as error:
        raise ConfigError(f"config.json is damaged: {error}") from error


def _diffusion(
    config: LeRobotConfig, weights: Mapping[str, Tensor], chunk: int | None, steps: int | None
) -> Node:
    given = config.settings
    train_steps = int(given["num_train_timesteps"])
    separate = any(name.startswith("diffusion.rgb_encoder.0.") for name in weights)
    return {
        "_target_": "embodied.policies.lerobot.diffusion.LeRobotDiffusion",
        "chunk": chunk or int(given["n_action_steps"]),
        "horizon": int(given["horizon"]),
        "obs_steps": config.obs_steps,
        "steps": steps or int(given.get("num_inference_steps") or train_steps),
        "train_steps": train_steps,
        "schedule": given["beta_schedule"],
        "beta_start": float(given["beta_start"]),
        "beta_end": float(given["beta_end"]),
        "prediction": given["prediction_type"],
        "clip_sample": float(given["clip_sample_range"]) if given["clip_sample"] else None,
        "unet": {
            "channels": list(given["down_dims"]),
            "kernel": int(given["kernel_size"]),
            "groups": int(given["n_groups"]),
            "time_dim": int(given["diffusion_step_embed_dim"]),
            "scale": bool(given["use_film_scale_modulation"]),
        },
        "images": {
            "backbone": given.get("vision_backbone", "resnet18"),
            **_sizes(given),
            "groups": bool(given.get("use_group_norm", False)),
            "keypoints": int(given.get("spatial_softmax_num_keypoints", 32)),
            "separate": separate,
        },
    }


def _sizes(given: Mapping[str, Any]) -> Node:
    """`resize` and `crop`, as LeRobot makes them of its settings."""
    resize, crop = given.get("resize_shape"), given.get("crop_shape")
    if resize is not None:
        ratio = float(given.get("crop_ratio", 1.0))
        crop = [int(side * ratio) for side in resize] if ratio < 1 else None
    return {"resize": resize, "crop": crop}


def _act(config: LeRobotConfig, chunk: int | None) -> Node:
    given = config.settings
    if given.get("temporal_ensemble_coeff") is not None and chunk is None:
        raise ConfigError(
            "this ACT policy was run with temporal ensembling, which is not adopted: say how many "
            f"of its {given['chunk_size']} predicted steps are executed, such as chunk=20"
        )
    return {
        "_target_": "embodied.policies.lerobot.act.LeRobotAct",
        "chunk": chunk or int(given["n_action_steps"]),
        "horizon": int(given["chunk_size"]),
        "latent": int(given["latent_dim"]),
        "backbone": given.get("vision_backbone", "resnet18"),
        "dilate": bool(given.get("replace_final_stride_with_dilation", False)),
        "transformer": {
            "width": int(given["dim_model"]),
            "heads": int(given["n_heads"]),
            "feedforward": int(given["dim_feedforward"]),
            "activation": given["feedforward_activation"],
            "encoder": int(given["n_encoder_layers"]),
            "decoder": int(given["n_decoder_layers"]),
            "before": bool(given["pre_norm"]),
        },
    }


def network_weights(config: LeRobotConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network's tensors, which keep LeRobot's names."""
    unused = UNUSED[config.type]
    named = {name.replace(COMPILED, ""): value for name, value in weights.items()}
    return {k: v for k, v in named.items() if not is_buffer(k) and not k.startswith(unused)}


def normalization_weights(found: Normalization) -> dict[str, Tensor]:
    """The tensors of the maps of inputs and actions, by our names."""
    parts = {f"normalize.{i}": each for i, each in enumerate(found.inputs.values())}
    made: dict[str, Tensor] = {}
    for name, each in {**parts, "unnormalize": found.action}.items():
        made |= {f"{name}.low": each.low.clone(), f"{name}.scale": each.scale.clone()}
        made[f"{name}.offset"] = each.low.new_tensor(each.offset)
    return made
