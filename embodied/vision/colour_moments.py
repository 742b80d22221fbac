"""Colour features of images: what SimClip's image tower is a network of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

HUES, GREYS, CELLS = 12, 6, 6


class ColourMoments(nn.Module):
    """Colour features of images: [N, 3, side, side] in [0, 1] to [N, F].

    Pixels are softly assigned to twelve hues (weighted by saturation, so that edge pixels count
    partly and centroids are accurate below a pixel) and six greys; for each colour its mass,
    centroid, spread, principal axis (which no shift, scale or light changes), and mass in 6 x 6
    cells. Nothing is learned: simulated objects have plain colours, and a CNN needs a hundred times
    longer to find a ball of four pixels.
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
        return (HUES + GREYS) * (8 + CELLS * CELLS)

    def forward(self, pictures: Tensor) -> Tensor:
        weights = self.colours(functional.avg_pool2d(pictures, 2).flatten(2))
        sums = weights @ self.powers
        mass, first, second = sums[..., :1], sums[..., 1:3], sums[..., 3:]
        mean, square = first / (mass + 0.1), second / (mass + 0.1)
        mixed = torch.stack([mean[..., 0] ** 2, mean[..., 1] ** 2, mean.prod(-1)], -1)
        axis = axis_of(mass, first, second)
        shape = torch.cat([(mass + 0.05).log(), mean, square - mixed, axis], -1)
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


def axis_of(mass: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Twice the angle of the principal axis as (cosine, sine) [..., 2], shorter where there is
    none; of sums of 1 [..., 1], (x, y) and (x x, y y, x y)."""
    mixed = torch.cat([first**2, first.prod(-1, keepdim=True)], -1)
    wide, tall, both = (second - mixed / (mass + 1e-6)).unbind(-1)
    return torch.stack([wide - tall, 2 * both], -1) / (wide + tall + 0.01)[..., None]
