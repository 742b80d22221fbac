"""With LeRobot: writes checkpoints, inputs and its own actions: `PYTHON FILE FOLDER [--weights]`.

FOLDER/CASE/   config.json, processors, [model.safetensors]   as LeRobot saves them
               played.safetensors   observations, noise and LeRobot's actions of a short episode,
                                    computed in double precision

Weights follow `tests/adopt/formula_weights.py`; without --weights they are not written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.factory import make_pre_post_processors
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.adopt.formula_weights import weights

ROWS = 2
STATE = PolicyFeature(FeatureType.STATE, (4,))
ENV = PolicyFeature(FeatureType.ENV, (3,))
PICTURE = PolicyFeature(FeatureType.VISUAL, (3, 48, 64))
ACTION = PolicyFeature(FeatureType.ACTION, (3,))
NUMBERS = {"observation.state": STATE, "observation.environment_state": ENV}
PICTURES = {
    "observation.state": STATE,
    "observation.images.top": PICTURE,
    "observation.images.wrist": PICTURE,
}
SMALL_UNET = dict(down_dims=(16, 32), n_groups=8, diffusion_step_embed_dim=16, kernel_size=5)
SMALL_ACT = dict(dim_model=32, n_heads=4, dim_feedforward=48, n_encoder_layers=2, latent_dim=8)


def modes(state: str, action: str, visual: str = "MEAN_STD") -> dict[str, NormalizationMode]:
    names = {"STATE": state, "ENV": state, "ACTION": action, "VISUAL": visual}
    return {key: NormalizationMode(value) for key, value in names.items()}


def diffusion(inputs: dict[str, PolicyFeature], **settings: Any) -> DiffusionConfig:
    common = dict(
        horizon=8,
        n_action_steps=3,
        noise_scheduler_type="DDIM",
        num_inference_steps=10,
        pretrained_backbone_weights=None,
        spatial_softmax_num_keypoints=4,
        device="cpu",
    )
    return DiffusionConfig(
        input_features=inputs,
        output_features={"action": ACTION},
        **{**common, **SMALL_UNET, **settings},
    )


def act(inputs: dict[str, PolicyFeature], **settings: Any) -> ACTConfig:
    common = dict(chunk_size=6, n_action_steps=3, pretrained_backbone_weights=None, device="cpu")
    return ACTConfig(
        input_features=inputs,
        output_features={"action": ACTION},
        **{**common, **SMALL_ACT, **settings},
    )


def cases() -> dict[str, Any]:
    """The configuration of every case, by name."""
    return {
        "diffusion_numbers": diffusion(NUMBERS, normalization_mapping=modes("MIN_MAX", "MIN_MAX")),
        "diffusion_ddpm": diffusion(
            NUMBERS,
            normalization_mapping=modes("MEAN_STD", "MEAN_STD"),
            noise_scheduler_type="DDPM",
            num_inference_steps=None,
            num_train_timesteps=20,
            n_obs_steps=3,
            clip_sample=False,
            use_film_scale_modulation=False,
        ),
        "diffusion_pictures": diffusion(
            PICTURES, normalization_mapping=modes("MIN_MAX", "QUANTILES"), crop_shape=(40, 56)
        ),
        "diffusion_shared": diffusion(
            PICTURES,
            normalization_mapping=modes("QUANTILES", "QUANTILE10", "IDENTITY"),
            use_separate_rgb_encoder_per_camera=False,
            use_group_norm=True,
            prediction_type="sample",
            beta_schedule="linear",
            resize_shape=(36, 52),
            crop_ratio=0.9,
            clip_sample_range=1.5,
        ),
        "act_numbers": act(NUMBERS),
        "act_pictures": act(
            PICTURES, pre_norm=True, feedforward_activation="gelu", n_decoder_layers=2
        ),
        "act_dilated": act(
            {**NUMBERS, "observation.images.top": PICTURE},
            use_vae=False,
            vision_backbone="resnet50",
            replace_final_stride_with_dilation=True,
            normalization_mapping=modes("QUANTILES", "MIN_MAX"),
        ),
    }


def statistics(config: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Made-up statistics of every feature."""
    found = {}
    for number, (name, each) in enumerate({**config.input_features, "action": ACTION}.items()):
        random = np.random.RandomState(number)
        shape = (3, 1, 1) if each.type is FeatureType.VISUAL else each.shape
        mean, std = 0.4 + 0.1 * random.rand(*shape), 0.5 + random.rand(*shape)
        ends = {"min": mean - 2 * std, "max": mean + 2 * std, "q01": mean - 1.9 * std}
        ends |= {"q99": mean + 1.8 * std, "q10": mean - std, "q90": mean + std}
        values = {"mean": mean, "std": std, **ends}
        found[name] = {k: torch.tensor(v, dtype=torch.float32) for k, v in values.items()}
    return found


def filled(policy: torch.nn.Module) -> None:
    """Give the policy the weights of the formula."""
    state = policy.state_dict()
    made = weights({name: tuple(value.shape) for name, value in state.items()})
    policy.load_state_dict({**state, **{k: torch.from_numpy(v) for k, v in made.items()}})


def observations(config: Any, steps: int) -> dict[str, torch.Tensor]:
    """Observations [steps, rows, ...]: numbers, and pictures as uint8 [H, W, 3]."""
    random, found = np.random.RandomState(7), {}
    for name, each in config.input_features.items():
        if each.type is FeatureType.VISUAL:
            channels, height, width = each.shape
            shape = (steps, ROWS, height, width, channels)
            found[name] = torch.from_numpy(random.randint(0, 256, shape).astype(np.uint8))
        else:
            values = random.randn(steps, ROWS, *each.shape).astype(np.float32)
            found[name] = torch.from_numpy(values)
    return found


def given(seen: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """The observation of a step as LeRobot takes it: pictures as floats [3, H, W] in [0, 1]."""
    found = {}
    for name, value in seen.items():
        now = value[step].double()
        picture = value.dtype == torch.uint8
        found[name] = now.permute(0, 3, 1, 2).contiguous() / 255 if picture else now
    return found


def in_double(policy: Any) -> None:
    """Compute in double precision: how a kernel rounds should not matter to the comparison."""
    torch.set_default_dtype(torch.float64)
    policy.double()
    if policy.config.type == "act":  # its latent is float32 always
        enter = policy.model.encoder_latent_input_proj
        enter.register_forward_pre_hook(lambda _, given: tuple(each.double() for each in given))


@torch.no_grad()
def play(policy: Any, config: Any, pre: Any, post: Any) -> dict[str, torch.Tensor]:
    """An episode: LeRobot's actions, and the noise of its decisions."""
    steps = 2 * config.n_action_steps + 1
    seen, actions = observations(config, steps), []
    noise = np.random.RandomState(11).randn(3, ROWS, getattr(config, "horizon", 1), 3)
    noise = torch.from_numpy(noise.astype(np.float32))
    in_double(policy)
    policy.reset()
    for step in range(steps):
        now = noise[step // config.n_action_steps].double()
        more = {} if config.type == "act" else {"noise": now}
        actions.append(post(policy.select_action(pre(given(seen, step)), **more)).clone())
    played = {f"obs/{name}": value for name, value in seen.items()}
    return {**played, "noise": noise, "actions": torch.stack(actions)}


def write(name: str, config: Any, out: Path, with_weights: bool) -> None:
    """Save the checkpoint of a case and what LeRobot does with it."""
    kind = {"act": ACTPolicy, "diffusion": DiffusionPolicy}[config.type]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    policy = kind(config)
    filled(policy)
    policy.eval()
    pre, post = make_pre_post_processors(config, dataset_stats=statistics(config))
    folder = out / name
    policy.save_pretrained(folder)
    pre.save_pretrained(folder)
    post.save_pretrained(folder)
    if config.type == "diffusion" and config.noise_scheduler_type == "DDPM":
        # The noise of DDPM's steps cannot be chosen: the same weights and betas with DDIM.
        config.noise_scheduler_type = "DDIM"
        sampled = kind(config)
        sampled.load_state_dict(policy.state_dict())
        policy = sampled.eval()
    save_file(play(policy, config, pre, post), folder / "played.safetensors")
    if not with_weights:
        (folder / "model.safetensors").unlink()


if __name__ == "__main__":
    chosen = [word for word in sys.argv[2:] if word != "--weights"]
    for name, config in cases().items():
        if chosen and name not in chosen:
            continue
        write(name, config, Path(sys.argv[1]), "--weights" in sys.argv)
        print(name, flush=True)
