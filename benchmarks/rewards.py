"""Image rewards: frames per second of a CLIP ViT-B/32, batched against one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import main
from benchmarks.measure import Block, Comparison, alone, compare, table, write_json
from embodied.core.build import ConfigError
from embodied.vision.contrastive import Contrastive
from embodied.vision.image_text import ImageText
from embodied.vision.simclip import SimClip, load

BATCH, SIDE = 16, 96


def run(out: Path, device: str | torch.device = "cpu") -> list[Comparison]:
    """Print the table, and write it to `out`/rewards.json."""
    measured = rows(torch.device(device))
    table(measured, "Scoring images")
    write_json(out, "rewards", measured)
    return measured


def rows(device: torch.device, repeats: int = 3) -> list[Comparison]:
    """Frames per second, preprocessing included; about a minute on one core."""
    large, small = vit_b32(device), load(device=device)
    few = pictures(4 if device.type == "cpu" else BATCH)
    many = pictures(BATCH)
    return [
        compare(at_once(large, many), each(large, few), repeats, f"ViT-B/32 x{BATCH}", "frames"),
        compare(at_once(small, many), each(small, many), repeats, f"simclip x{BATCH}", "frames"),
        alone(at_once(small, pictures(8 * BATCH)), repeats, f"simclip x{8 * BATCH}", "frames"),
    ]


def vit_b32(device: torch.device) -> Contrastive:
    """A CLIP of the size of ViT-B/32 with random weights, which do not affect speed."""
    try:
        from transformers import CLIPConfig, CLIPModel
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    except ModuleNotFoundError as error:
        raise ConfigError(
            'bench rewards needs transformers: pip install "embodied-rl[rewards]"'
        ) from error
    config = CLIPConfig(
        vision_config={"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
        | {"num_attention_heads": 12, "patch_size": 32, "image_size": 224},
        text_config={"num_hidden_layers": 1},
    )
    model: Any = CLIPModel(config)
    no_words: Any = None  # only images are measured
    return Contrastive(model.to(device), no_words, CLIPImageProcessorPil(), "b32")


def pictures(count: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, SIDE, SIDE, 3), generator=random).to(torch.uint8)


def at_once(model: ImageText | SimClip, frames: Tensor) -> Block:
    """All frames in one call; the result is copied back, so that the device has finished."""

    def block() -> int:
        model.images(frames).cpu()
        return len(frames)

    return block


def each(model: ImageText | SimClip, frames: Tensor) -> Block:
    """Frame by frame, as a loop over environments does."""

    def block() -> int:
        for frame in frames.split(1):
            model.images(frame).cpu()
        return len(frames)

    return block


if __name__ == "__main__":
    main(run)
