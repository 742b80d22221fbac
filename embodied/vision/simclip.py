"""SimClip: a small image-text dual encoder for the simulated environments of this package.

Contrastive towers as in CLIP (Radford et al., 2021), with the pairwise sigmoid of SigLIP (Zhai et
al., 2023): p(sentence j is true of image i) = sigmoid(e^t <x_i, y_j> + b). It is distilled from
simulator states: it understands the sentences of its model card, not language in general.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Bound, Count, Few, Units
from embodied.core.build import ConfigError
from embodied.core.files import read_json, reading
from embodied.core.saved_file import fitting, load_tensors
from embodied.vision.image_text import views_of

HOME = Path(__file__).with_name("weights")
WORD = re.compile(r"[a-z0-9]+")
BLANK = "there is nothing to be seen"
FAMILIAR = 0.6  # fraction of a sentence's words that must be known
HUES, GREYS, CELLS = 12, 6, 6
LIKE = 0.7  # least cosine of a sentence and a rung with the same meaning


@dataclass(frozen=True)
class Shape:
    side: Count = 96  # side of a view, pixels
    views: Count = 1  # largest number of views of an image
    size: Count = 128  # dimension of embeddings
    buckets: Annotated[int, Bound(2)] = 4096  # hash buckets for subwords
    width: Units = 128  # units of the text transformer
    layers: Few = 1  # layers of the text transformer
    heads: Few = 4  # attention heads of the text transformer
    longest: Count = 64  # largest number of pieces of a sentence


def pieces(word: str, buckets: int) -> list[int]:
    """Hash buckets of a word and its 3- and 4-grams, so that "touches" is similar to "touching"."""
    marked = f"<{word}>"
    runs = [marked[i : i + n] for n in (3, 4) for i in range(len(marked) - n + 1)]
    return [1 + zlib.crc32(run.encode()) % (buckets - 1) for run in (marked, *runs)]


def words_of(sentence: str) -> list[str]:
    return WORD.findall(sentence.lower())


class ColourMoments(nn.Module):
    """Colour features of images: [N, 3, side, side] in [0, 1] to [N, F].

    Pixels are softly assigned to twelve hues (weighted by saturation, so that edge pixels count
    partly and centroids are accurate below a pixel) and six greys; for each colour its mass,
    centroid, spread, and mass in 6 x 6 cells. Nothing is learned: simulated objects have plain
    colours, and a CNN needs a hundred times longer to find a ball of four pixels.
    """

    powers: Tensor
    hues: Tensor
    greys: Tensor

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        at = (torch.arange(side // 2) + 0.5) / (side // 2) * 2 - 1
        x, y = at.repeat(len(at)), at.repeat_interleave(len(at))
        powers = torch.stack([torch.ones_like(x), x, y, x * x, y * y, x * y], 1)
        turns = torch.arange(HUES) * 2 * torch.pi / HUES
        self.register_buffer("powers", powers, persistent=False)
        self.register_buffer("hues", torch.stack([turns.cos(), turns.sin()], 1), persistent=False)
        self.register_buffer("greys", torch.linspace(0, 1, GREYS)[:, None], persistent=False)

    @property
    def size(self) -> int:
        return (HUES + GREYS) * (6 + CELLS * CELLS)

    def forward(self, pictures: Tensor) -> Tensor:
        weights = self.colours(functional.avg_pool2d(pictures, 2).flatten(2))
        sums = weights @ self.powers
        mass = sums[..., :1]
        first = sums[..., 1:3]
        second = sums[..., 3:]
        mean, square = first / (mass + 0.3), second / (mass + 0.3)
        mixed = torch.stack([mean[..., 0] ** 2, mean[..., 1] ** 2, mean.prod(-1)], -1)
        shape = torch.cat([(mass + 0.05).log(), mean, square - mixed], -1)
        maps = weights.unflatten(2, (self.side // 2, self.side // 2))
        cells = (functional.adaptive_avg_pool2d(maps, CELLS) * 64 + 0.05).log()
        return torch.cat([shape.flatten(1), cells.flatten(1)], 1)

    def colours(self, pixels: Tensor) -> Tensor:
        """The weight of each colour in each of `pixels` [N, 3, P]: [N, HUES + GREYS, P]."""
        red, green, blue = pixels.unbind(1)
        plane = torch.stack([red - green, (red + green) / 2 - blue], 1)
        saturation = plane.norm(dim=1, keepdim=True)
        along = (self.hues @ (plane / (saturation + 1e-4))).clamp(min=0)
        off = (pixels.mean(1, keepdim=True) - self.greys) ** 2 / 0.02 + saturation**2 / 0.01
        return torch.cat([saturation * along**8, (-off).exp()], 1)


class ImageTower(nn.Module):
    """Encodes images [N, 3, side, V side] in [0, 1] as embeddings [N, D]."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.each = ColourMoments(shape.side)
        self.views = shape.views
        size = self.each.size * shape.views
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("deviation", torch.ones(size))
        self.head = nn.Sequential(
            nn.Linear(size, 512),
            nn.GELU(),
            nn.Linear(512, 256),
            nn.GELU(),
            nn.Linear(256, shape.size),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.of(self.moments(pictures))

    def moments(self, pictures: Tensor) -> Tensor:
        """The fixed (not learned) features [N, F] of images; NaN for missing views. Views beyond
        the number in training are ignored."""
        views = pictures.chunk(views_of(pictures.permute(0, 2, 3, 1)), dim=3)[: self.views]
        seen = torch.cat([self.each(view) for view in views], 1)
        missing = (self.views - len(views)) * self.each.size
        return functional.pad(seen, (0, missing), value=torch.nan)

    def of(self, moments: Tensor) -> Tensor:
        """Embeddings [N, D] of fixed features `moments` [N, F]; missing views count as the mean."""
        scaled = ((moments - self.mean) / self.deviation).clamp(-8, 8)
        return self.head(scaled.nan_to_num(0.0))


class TextTower(nn.Module):
    """Encodes sentences as embeddings [N, D]: hashed subwords, a transformer, mean pooling."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.pieces = nn.EmbeddingBag(shape.buckets, shape.width, mode="mean", padding_idx=0)
        self.places = nn.Parameter(torch.randn(shape.longest, shape.width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            shape.width,
            shape.heads,
            4 * shape.width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.mixer = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.head = nn.Linear(shape.width, shape.size)
        self.known: dict[str, list[int]] = {}

    def forward(self, sentences: Sequence[str]) -> Tensor:
        rows = [(words_of(text) or ["nothing"])[: self.shape.longest] for text in sentences]
        longest = max(map(len, rows))
        flat = [self._pieces(word) for row in rows for word in row]
        most = max(map(len, flat))
        padded = torch.tensor([each + [0] * (most - len(each)) for each in flat])
        lengths = torch.tensor([len(row) for row in rows], device=self.places.device)
        mask = torch.arange(longest, device=lengths.device) < lengths[:, None]
        words = self.places.new_zeros(len(rows), longest, self.shape.width)
        words[mask] = self.pieces(padded.to(self.places.device))
        mixed = self.mixer(words + self.places[:longest], src_key_padding_mask=~mask)
        return self.head((mixed * mask[..., None]).sum(1) / lengths[:, None])

    def _pieces(self, word: str) -> list[int]:
        if word not in self.known:
            self.known[word] = pieces(word, self.shape.buckets)
        return self.known[word]


class Towers(nn.Module):
    """Both towers, and the logits' scale and offset: e^t <x, y> + b."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.look = ImageTower(shape)
        self.read = TextTower(shape)
        self.t = nn.Parameter(torch.tensor(10.0).log())
        self.b = nn.Parameter(torch.tensor(-10.0))

    def pictures(self, pictures: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] to unit vectors [N, D]."""
        return functional.normalize(self.look(resize_views(pictures, self.shape.side)), dim=1)

    def sentences(self, sentences: Sequence[str]) -> Tensor:
        """Sentences to unit vectors [N, D]."""
        return functional.normalize(self.read(sentences), dim=1)


def resize_views(pictures: Tensor, side: int) -> Tensor:
    """uint8 [N, H, W, 3] as float32 [N, 3, side, V side] in [0, 1] of V views; a single view is
    resized to a square."""
    chw, size = pictures.permute(0, 3, 1, 2).float() / 255, (side, views_of(pictures) * side)
    if chw.shape[-2:] == size:
        return chw
    return functional.interpolate(chw, size, mode="bilinear", antialias=True)


class SimClip:
    """The frozen towers with their model card: an `ImageText`."""

    def __init__(self, towers: Towers, card: dict[str, Any], device: torch.device | str) -> None:
        self.towers = towers.to(device).eval().requires_grad_(False)
        self.card = card
        self.device = torch.device(device)
        self.name = f"simclip:{card.get('weights', 'new')}"
        self.size = towers.shape.size
        self.side = towers.shape.side
        self.scale = float(towers.t.exp())
        self.known = frozenset(card.get("vocabulary", ()))

    @torch.no_grad()
    def images(self, pictures: Tensor) -> Tensor:
        parts = [self.towers.pictures(part.to(self.device)) for part in pictures.split(256)]
        return torch.cat(parts) if parts else torch.zeros(0, self.size, device=self.device)

    @torch.no_grad()
    def texts(self, sentences: Sequence[str]) -> Tensor:
        if not sentences:
            return torch.zeros(0, self.size, device=self.device)
        return self.towers.sentences(sentences)

    def ladder(self, sentence: str) -> list[list[str]] | None:
        """Captions from worst to best (several phrasings each) that end in the meaning of
        `sentence`; None if no ladder of the model ends in, or starts with, it."""
        words = words_of(sentence)
        if sum(word in self.known for word in words) / max(len(words), 1) < FAMILIAR:
            return None  # too few of its words were in the training captions
        best, found = LIKE, None
        said = self.texts([sentence])
        for each in self.card.get("ladders", {}).values():
            for rungs in (each, each[::-1]):
                likeness = float((self.texts(rungs[-1]) @ said.T).max())
                if likeness > best:
                    best, found = likeness, rungs
        return None if found is None else [[BLANK], *found]


def load(folder: Path = HOME, device: torch.device | str = "cpu") -> SimClip:
    """The model in `folder` (simclip.safetensors, simclip.json); ConfigError if it is missing."""
    weights, about = folder / "simclip.safetensors", folder / "simclip.json"
    for path in (weights, about):
        if not path.exists():
            raise ConfigError(
                f"{path} is missing: the folder of a SimClip holds both (a checkout trains one: "
                f"python -m benchmarks.simclip out={folder})"
            )
    card = read_json(about)
    with reading(weights, KeyError, TypeError, ValueError, RuntimeError, SafetensorError):
        tensors = load_tensors(weights)
        with fitting(tensors, about):
            towers = Towers(Shape(**card["shape"]))
        towers.load_state_dict({k: v.float() for k, v in tensors.items()})
    return SimClip(towers, card, device)
