"""Images changed in one known way each, to see what a score survives (the table of the card)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from embodied.vision.image_text import views_of

TIES = "(progress itself, still steps in random order)"  # a row of the table
SHIFT = 6 / 96  # of a view
LARGER = 1.1
NOISE = 10.0  # grey levels, standard deviation
SAME = 14.0  # grey levels by which the background varies


def perturbed(pictures: Tensor) -> dict[str, Tensor]:
    """Images uint8 [N, s, V s, 3], as they are and changed, by name."""
    return {name: change(pictures.float()) for name, change in CHANGES.items()}


def _scaled(gain: float) -> Callable[[Tensor], Tensor]:
    return lambda pictures: _whole(gain * pictures)


def _whole(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


def _per_view(change: Callable[[Tensor], Tensor], pictures: Tensor) -> Tensor:
    """Apply `change` to each view as [N, 3, s, s]."""
    views = pictures.permute(0, 3, 1, 2).chunk(views_of(pictures), dim=3)
    return _whole(torch.cat([change(view) for view in views], 3).permute(0, 2, 3, 1))


def _blurred(pictures: Tensor) -> Tensor:
    def change(view: Tensor) -> Tensor:
        return functional.avg_pool2d(functional.pad(view, (1, 1, 1, 1), mode="replicate"), 3, 1)

    return _per_view(change, pictures)


def _shifted(pictures: Tensor) -> Tensor:
    def change(view: Tensor) -> Tensor:
        by = round(SHIFT * view.shape[3])
        wider = functional.pad(view, (by, 0, by, 0), mode="replicate")
        return wider[:, :, : view.shape[2], : view.shape[3]]

    return _per_view(change, pictures)


def _larger(pictures: Tensor) -> Tensor:
    def change(view: Tensor) -> Tensor:
        frame = torch.tensor([[1 / LARGER, 0.0, 0.0], [0.0, 1 / LARGER, 0.0]])
        grid = functional.affine_grid(
            frame.expand(len(view), 2, 3), list(view.shape), align_corners=False
        )
        return functional.grid_sample(view, grid, padding_mode="border", align_corners=False)

    return _per_view(change, pictures)


def _noisy(pictures: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return _whole(pictures + NOISE * torch.randn(pictures.shape, generator=random))


def _elsewhere(pictures: Tensor) -> Tensor:
    """What most images have in a place becomes a slope from dark blue to light grey."""
    back = pictures.median(0).values
    slope = torch.linspace(0, 1, pictures.shape[1])[:, None, None]
    other = slope * torch.tensor([40.0, 50.0, 90.0]) + (1 - slope) * 190
    still = (pictures - back).abs().amax(3, keepdim=True) < SAME
    return _whole(torch.where(still, other, pictures))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "as rendered": _scaled(1.0),
    "1.25 times as bright": _scaled(1.25),
    "half as bright": _scaled(0.5),
    "red and blue exchanged": lambda pictures: _whole(pictures.flip(3)),
    "another background": _elsewhere,
    "shifted by 6 pixels": _shifted,
    "a tenth larger": _larger,
    "blurred, 3 x 3": _blurred,
    "noise of 10": _noisy,
}
