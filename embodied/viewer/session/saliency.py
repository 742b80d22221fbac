"""Saliency by occlusion: which image patches change the policy's action chunk most.

Occlusion (Zeiler and Fergus, 2014): s[i, j] = mean |pi(o with patch i, j grey, w) - pi(o, w)| over
the chunk, in units of the action, for one noise w. It only evaluates the policy, so it works for
every network.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from embodied.core import tensors as tt
from embodied.core.device import forked
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, hidden
from embodied.viewer.scene.images import Picture, picture_of
from embodied.viewer.session.episode import Moment
from embodied.viewer.session.plan_preview import carried

GRID = 8
"""Patches along each side of an image."""
HOT = (213, 94, 0)
LEAST = 1e-6


def pictures_of(policy: Policy) -> list[str]:
    """The image observations that `policy` uses."""
    leaves = policy.spec.obs.items()
    return [name for name, leaf in leaves if leaf.is_image and not hidden(name)]


@torch.no_grad()
def saliency(policy: Policy, before: Moment, after: Moment, grid: int = GRID) -> dict[str, Tensor]:
    """By image name, how much each patch [grid, grid] changes the chunk that `policy` decided
    between `before` and `after`."""
    device = next((p.device for p in policy.parameters()), torch.device("cpu"))
    with forked(before.step):
        noise = policy.sample_noise(1)
    found: dict[str, Tensor] = {}
    for name in pictures_of(policy):
        covered = occluded(before.obs[name][0], grid)
        same = torch.zeros(len(covered), dtype=torch.int64)
        obs = tt.to({**tt.take(before.obs, same), name: covered}, device)
        seen, carry = policy.observe(obs, carried(policy, before, after, same), noise[same])
        chunks = policy.act(seen, carry, noise[same])[0].float()  # [1 + grid^2, H, A]
        change = (chunks[1:] - chunks[:1]).abs().flatten(1).mean(1)
        found[name] = change.view(grid, grid).cpu()
    return found


def occluded(picture: Tensor, grid: int) -> Tensor:
    """`picture` [H, W, C] itself, then with each of grid x grid patches replaced by its mean
    colour, [1 + grid^2, H, W, C]."""
    high, wide = picture.shape[:2]
    mean = picture.float().mean((0, 1)).round().to(picture.dtype)
    rows = torch.arange(high) * grid // high
    columns = torch.arange(wide) * grid // wide
    patch = rows[:, None] * grid + columns
    which = torch.arange(-1, grid * grid)[:, None, None]
    return torch.where((patch == which)[..., None], mean, picture)


def heated(value: Tensor, leaf: Leaf, change: Tensor, most: float) -> Picture:
    """One image [H, W, C] in grey, orange where `change` [grid, grid] is near `most`."""
    picture = picture_of(value, leaf).astype(np.float32)
    high, wide = picture.shape[:2]
    heat = functional.interpolate(change[None, None], (high, wide), mode="bilinear")[0, 0]
    share: NDArray[np.float32] = (heat / max(most, LEAST)).clamp(0, 1).numpy()[..., None]
    grey = 0.35 * picture.mean(2, keepdims=True) + 0.65 * 160
    return ((1 - share) * grey + share * np.array(HOT)).round().astype(np.uint8)
