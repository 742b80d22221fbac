"""CLIP and SigLIP from a folder or the Hugging Face hub, as an `ImageText`.

CLIP (Radford et al., 2021), SigLIP (Zhai et al., 2023), through `transformers`.
"""

# pyright: basic
# (transformers has no types)
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.build import ConfigError
from embodied.vision import simclip
from embodied.vision.image_text import ImageText, views_of

BATCH = 64


class Contrastive:
    """A frozen dual encoder of `transformers`, in float32."""

    def __init__(self, model: Any, tokenizer: Any, processor: Any, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.processor = processor
        self.name = name
        config = model.config
        self.kind: str = config.model_type
        self.side = int(config.vision_config.image_size)
        clip = self.kind == "clip"
        self.size = int(config.projection_dim if clip else config.vision_config.hidden_size)
        self.longest = int(config.text_config.max_position_embeddings)
        self.scale = float(model.logit_scale.exp())

    @torch.no_grad()
    def images(self, pictures: Tensor) -> Tensor:
        parts = [self._images(part) for part in pictures.split(BATCH)]
        return torch.cat(parts) if parts else torch.zeros(0, self.size)

    @torch.no_grad()
    def texts(self, sentences: Sequence[str]) -> Tensor:
        # SigLIP was trained with texts padded to the maximum length,
        tokens = self.tokenizer(
            list(sentences),
            padding=True if self.kind == "clip" else "max_length",
            max_length=self.longest,
            truncation=True,
            return_tensors="pt",
        )
        taken = {key: tokens[key] for key in ("input_ids", "attention_mask") if key in tokens}
        if self.kind != "clip":
            taken.pop("attention_mask", None)  # and attends to the padding
        said = self.model.get_text_features(**{k: v.to(self._device) for k, v in taken.items()})
        return functional.normalize(_pooled(said), dim=1)

    def _images(self, pictures: Tensor) -> Tensor:
        """The mean embedding of several views."""
        seen: list[Tensor] = []
        for view in pictures.chunk(views_of(pictures), dim=2):
            features = self.model.get_image_features(self.prepared(view))
            seen.append(functional.normalize(_pooled(features), dim=1))
        return functional.normalize(torch.stack(seen).mean(0), dim=1)

    def prepared(self, pictures: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] to the model's own sizes and scale, [N, 3, h, w]."""
        values = self.processor(list(pictures.cpu().numpy()), return_tensors="pt")["pixel_values"]
        return values.to(self._device)

    @property
    def _device(self) -> torch.device:
        return self.model.logit_scale.device


def open_image_text(name: str, device: torch.device | str = "cpu") -> ImageText:
    """The encoder called `name`: "simclip", a folder (with a SimClip, CLIP or SigLIP), or
    "owner/model" on the hub. ConfigError if it cannot be opened."""
    if name == "simclip":
        return simclip.load(device=device)
    folder = Path(name).expanduser()
    if (folder / "simclip.json").exists():
        return simclip.load(folder, device)
    if not folder.exists() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ConfigError(
            f"no model at {name}: use a folder with a CLIP or SigLIP, "
            'owner/model on the hub, or "simclip"'
        )
    return _opened(str(folder) if folder.exists() else name, folder.exists(), device)


def _opened(name: str, local: bool, device: torch.device | str) -> Contrastive:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'the model {name} needs transformers: pip install "embodied-rl[rewards]"'
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=local)
        kinds = {"clip": transformers.CLIPModel, "siglip": transformers.SiglipModel}
        if config.model_type not in kinds:
            raise ConfigError(
                f"{name} is a {config.model_type}; supported image-text encoders: "
                f"{', '.join(kinds)}"
            )
        kind = kinds[config.model_type]
        model = kind.from_pretrained(name, local_files_only=local, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=local)
        processor = transformers.AutoImageProcessor.from_pretrained(
            name, local_files_only=local, backend="pil"
        )
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{name} cannot be opened: {' '.join(str(error).split())[:200]}"
        ) from error
    return Contrastive(model.to(device), tokenizer, processor, name)


def _pooled(features: Any) -> Tensor:
    return getattr(features, "pooler_output", features)
