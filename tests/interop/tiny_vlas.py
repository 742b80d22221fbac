"""With LeRobot: tiny SmolVLA, pi0 and pi0.5 with random weights, as checkpoint folders.

    PYTHON -m tests.interop.tiny_vlas OUT        a SmolVLA for env=fr3_lift_pixels, in OUT/policy

SmolVLA takes its sizes from a folder with the configuration of its VLM, so that LeRobot's classes
are used as they are. The sizes of pi0 and pi0.5 are constants in LeRobot's code: `small_pi`
replaces these, and their tokenizer (of the hub), while a policy is built.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

STATE = "observation.state"
CAMERAS = {"front": "observation.images.front", "wrist": "observation.images.wrist"}
SIZES = {STATE: 21, "action": 4}
TASK = "lift the cube"
WORDS = ["<pad>", "<unk>", "lift", "the", "cube", "<image>", "<fake_token_around_image>"]
WIDTH, HEADS, VOCABULARY = 32, 4, 64
PI_PIXELS = 28


def tokenizer(folder: Path) -> Path:
    """A tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: i for i, word in enumerate([*WORDS, "<end_of_utterance>", "<global-img>"])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"fake_image_token": WORDS[6], "global_image_token": "<global-img>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>", **special},
    )
    fast.save_pretrained(folder)
    return folder


def tiny_vlm(folder: Path) -> Path:
    """The configuration and the processor of a tiny SmolVLM."""
    from transformers import AutoTokenizer, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    heads = {"num_hidden_layers": 2, "num_attention_heads": HEADS}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, **heads}
    text = {"model_type": "llama", "vocab_size": VOCABULARY, "num_key_value_heads": 2}
    text |= {**sizes, "head_dim": WIDTH // HEADS, "pad_token_id": 0}
    vision = {**sizes, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
    numbers: dict[str, Any] = {"image_token_id": 5, "pad_token_id": 0}
    config = SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2, **numbers)
    config.save_pretrained(folder)
    words = AutoTokenizer.from_pretrained(tokenizer(folder))
    pictures, films = SmolVLMImageProcessor(), SmolVLMVideoProcessor()
    SmolVLMProcessor(pictures, words, films, image_seq_len=4).save_pretrained(folder)
    return folder


def features() -> dict[str, Any]:
    """The features of env=fr3_lift_pixels, without what only critics see."""
    from lerobot.configs.types import FeatureType, PolicyFeature

    inputs = {STATE: PolicyFeature(FeatureType.STATE, (SIZES[STATE],))}
    inputs |= {c: PolicyFeature(FeatureType.VISUAL, (3, 64, 64)) for c in CAMERAS.values()}
    action = PolicyFeature(FeatureType.ACTION, (SIZES["action"],))
    return {"input_features": inputs, "output_features": {"action": action}, "device": "cpu"}


def write_smolvla(folder: Path) -> Path:
    """A SmolVLA checkpoint in `folder`/policy, its VLM beside it."""
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    config = SmolVLAConfig(
        **features(),
        vlm_model_name=str(tiny_vlm(folder / "vlm").resolve()),
        chunk_size=10,
        n_action_steps=10,
        num_vlm_layers=2,
        resize_imgs_with_padding=(32, 32),
        tokenizer_max_length=6,
        num_steps=3,
    )
    return _save(SmolVLAPolicy, config, folder / "policy")


def write_pi(kind: str, folder: Path) -> Path:
    """A checkpoint of `kind`, "pi0" or "pi05", in `folder`/policy; call it within `small_pi`."""
    from importlib import import_module

    name = f"lerobot.policies.{kind}"
    config = getattr(import_module(f"{name}.configuration_{kind}"), f"{kind.upper()}Config")
    policy = getattr(import_module(f"{name}.modeling_{kind}"), f"{kind.upper()}Policy")
    sizes = {"chunk_size": 10, "n_action_steps": 10, "num_inference_steps": 3}
    sizes |= {"image_resolution": (PI_PIXELS, PI_PIXELS), "tokenizer_max_length": 16}
    return _save(policy, config(**features(), **sizes), folder / "policy")


@contextmanager
def small_pi(kind: str, folder: Path) -> Iterator[None]:
    """Within it, LeRobot's pi0 or pi0.5 is small, and its tokenizer is one of `folder`."""
    from importlib import import_module

    from transformers import AutoTokenizer

    module: Any = import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    words = AutoTokenizer.from_pretrained(tokenizer(folder))
    wide = module.GemmaConfig(WIDTH, 2, 2 * WIDTH, HEADS, 1, WIDTH // HEADS)
    vlm, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM

    def small_vlm(config: Any) -> Any:
        config.text_config.vocab_size = config.image_token_index = VOCABULARY
        vision = config.vision_config
        vision.hidden_size, vision.intermediate_size = WIDTH, 2 * WIDTH
        vision.num_hidden_layers, vision.num_attention_heads = 1, HEADS
        vision.projection_dim = WIDTH
        return vlm(config=config)

    def small_expert(config: Any) -> Any:
        config.vocab_size = VOCABULARY
        return expert(config=config)

    with (
        patch.object(module, "get_gemma_config", lambda _: wide),
        patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", small_vlm),
        patch.object(module, "PiGemmaForCausalLM", small_expert),
        patch.object(AutoTokenizer, "from_pretrained", lambda *_, **__: words),
    ):
        yield


def _save(kind: Any, config: Any, folder: Path) -> Path:
    """Build a policy with random weights and save it with its processors."""
    from lerobot.policies.factory import make_pre_post_processors

    torch.manual_seed(0)
    policy = kind(config).float()
    stats = {name: _stats(size) for name, size in SIZES.items()}
    for part in (policy, *make_pre_post_processors(config, dataset_stats=stats)):
        part.save_pretrained(folder)
    return folder


def _stats(size: int) -> dict[str, torch.Tensor]:
    """Statistics of a feature between -2 and 2, of all kinds."""
    values = {"mean": 0.0, "std": 1.0, "min": -2.0, "max": 2.0, "q01": -2.0, "q99": 2.0}
    return {name: torch.full((size,), value) for name, value in values.items()}


if __name__ == "__main__":
    print(write_smolvla(Path(sys.argv[1])))
