"""CLIP and SigLIP from a folder or the Hugging Face hub, as an `ImageText`.

CLIP (Radford et al., 2021), SigLIP (Zhai et al., 2023), through `transformers`; images are
preprocessed here, in torch, as the model's preprocessor_config.json specifies.
"""

# pyright: basic
# (transformers has no types)
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.build import ConfigError
from embodied.vision import simclip
from embodied.vision.image_text import ImageText, views_of

MODES = {0: "nearest-exact", 2: "bilinear", 3: "bicubic"}  # PIL's resampling filters
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BATCH = 64


@dataclass(frozen=True)
class Preparation:
    """Image preprocessing of a model: resize to `short` (the shorter side, aspect ratio kept) or to
    `square`, centre crop to `crop`, scale to [0, 1], normalise per channel."""

    short: int | None
    square: tuple[int, int] | None
    crop: tuple[int, int] | None
    mode: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, about: Mapping[str, Any], kind: str) -> Preparation:
        """Read a preprocessor_config.json; missing entries are the defaults of the model `kind`."""
        clip = kind == "clip"
        size = about.get("size", {"shortest_edge": 224} if clip else 224)
        if isinstance(size, int):
            size = {"shortest_edge": size} if clip else {"height": size, "width": size}
        resizes = about.get("do_resize", True)
        crop = about.get("crop_size", 224) if about.get("do_center_crop", clip) else None
        mean = about.get("image_mean", CLIP_MEAN if clip else (0.5,) * 3)
        return cls(
            short=size.get("shortest_edge") if resizes else None,
            square=_sides(size) if resizes and "height" in size else None,
            crop=None if crop is None else _sides(crop),
            mode=MODES[about.get("resample", 3)],
            mean=tuple(mean),
            std=tuple(about.get("image_std", CLIP_STD if clip else (0.5,) * 3)),
        )

    def __call__(self, pictures: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] to float32 [N, 3, h, w]."""
        chw = pictures.permute(0, 3, 1, 2)
        if self.square is not None or self.short is not None:
            chw = resized(chw, self.square or _shorter(chw.shape[-2:], self.short or 0), self.mode)
        if self.crop is not None:
            chw = _cut(chw, self.crop)
        mean, std = (
            torch.tensor(each, device=chw.device)[:, None, None] for each in (self.mean, self.std)
        )
        return (chw.float() / 255 - mean) / std


def resized(chw: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Images uint8 [N, 3, H, W] resized to `size`: exactly as by PIL on a CPU (with rounding
    between the two directions), within one or two grey levels elsewhere."""
    smooth = mode != "nearest-exact"
    if chw.device.type == "cpu":
        return functional.interpolate(chw, size, mode=mode, antialias=smooth)
    fine = functional.interpolate(chw.float(), size, mode=mode, antialias=smooth)
    return fine.clamp(0, 255).round()


class Contrastive:
    """A frozen dual encoder of `transformers`, in float32."""

    def __init__(self, model: Any, tokenizer: Any, prepare: Preparation, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.prepare = prepare
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
            values = self.prepare(view.to(self._device))
            features = self.model.get_image_features(pixel_values=values)
            seen.append(functional.normalize(_pooled(features), dim=1))
        return functional.normalize(torch.stack(seen).mean(0), dim=1)

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
        prepare = Preparation.of(_preprocessor(name, local), config.model_type)
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{name} cannot be opened: {' '.join(str(error).split())[:200]}"
        ) from error
    return Contrastive(model.to(device), tokenizer, prepare, name)


def _preprocessor(name: str, local: bool) -> dict[str, Any]:
    """The model's preprocessor_config.json; {} without one."""
    if local:
        path = Path(name) / "preprocessor_config.json"
        return json.loads(path.read_text()) if path.exists() else {}
    from transformers.utils.hub import cached_file

    found = cached_file(
        name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False
    )
    return json.loads(Path(found).read_text()) if found else {}


def _pooled(features: Any) -> Tensor:
    """The embedding of each row, for all versions of `transformers`."""
    return getattr(features, "pooler_output", features)


def _sides(size: int | Mapping[str, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size["height"], size["width"])


def _shorter(size: Sequence[int], short: int) -> tuple[int, int]:
    """(height, width) with the shorter side `short` and the same aspect ratio, rounded down."""
    height, width = size
    if height <= width:
        return short, int(short * width / height)
    return int(short * height / width), short


def _cut(pictures: Tensor, crop: tuple[int, int]) -> Tensor:
    """The centre crop of images [N, 3, H, W], zero-padded."""
    height, width = pictures.shape[-2:]
    tall, wide = max(crop[0] - height, 0), max(crop[1] - width, 0)
    if tall or wide:
        top, left = (tall + 1) // 2, (wide + 1) // 2
        pictures = functional.pad(pictures, (left, wide - left, top, tall - top))
        height, width = pictures.shape[-2:]
    top, left = (height - crop[0]) // 2, (width - crop[1]) // 2
    return pictures[..., top : top + crop[0], left : left + crop[1]]
