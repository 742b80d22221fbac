"""Latent-noise RL (DSRL): the noise that a steering policy chose for its base policy, as an image.

DSRL (Wagenmaker et al., 2025) acts by w = bound * u in place of w ~ N(0, I). Gaussian samples have
|w| of about sqrt(D); the distance of |w| from that shows how strongly the base policy is steered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.policy import Policy
from embodied.viewer.scene.images import Picture
from embodied.viewer.session.episode import Moment

BELOW, ABOVE, NONE = (0, 114, 178), (213, 94, 0), (255, 255, 255)
GROUND, INK = (255, 255, 255), (55, 65, 81)
MAP, BARS, NAMES, EDGE = 210, 120, 70, 6
"""Widths of the image's parts and the gap between them, in pixels."""
HIGH = 170


class ChoosesNoise(Protocol):
    """A policy whose `inner` policy chooses the noise of a base policy, each element up to
    `bound`."""

    bound: float
    noise_shape: torch.Size
    inner: Policy


def chooses_noise(policy: object) -> TypeGuard[ChoosesNoise]:
    """Not `isinstance`, which from Python 3.12 on does not find `inner`, a submodule."""
    return all(hasattr(policy, name) for name in ChoosesNoise.__annotations__)


@torch.no_grad()
def noise_of(acts: object) -> Tensor | None:
    """The noise w [D] of the last decision; None if the noise was sampled rather than chosen, or if
    exploration hides it."""
    if not isinstance(acts, Actor) or not chooses_noise(acts.policy):
        return None
    chosen = acts.carry.get("row/action")
    if chosen is None and not acts.explore:
        inner = acts.policy.inner
        chosen = inner.act(acts.decision_obs, {}, inner.sample_noise(1))[0].flatten(1)
    return None if chosen is None else acts.policy.bound * chosen[0].detach().cpu()


def decisions(moments: Sequence[Moment]) -> list[tuple[int, Tensor]]:
    """Step index and noise [D] of each decision that has one."""
    return [
        (i, moment.noise)
        for i, moment in enumerate(moments)
        if moment.is_decision and moment.noise is not None
    ]


def describe(noise: Tensor) -> str:
    """The norm of the noise beside that of Gaussian samples, as a label."""
    size = float(noise.norm())
    return f"latent noise: norm {size:.1f} (Gaussian samples: about {math.sqrt(noise.numel()):.1f})"


def noise_picture(chosen: Sequence[Tensor], at: int, bound: float, names: Sequence[str]) -> Picture:
    """Image of noises `chosen`: decisions from left to right, elements [D] from top to bottom,
    grouped by the action element (`names`) they belong to. Number `at` is framed and repeated as
    bars. Blue is negative, orange positive."""
    from PIL import Image, ImageDraw, ImageFont

    values = np.stack([each.numpy() for each in chosen], 1) / bound
    order = grouped(len(values), len(names))
    values = values[order]
    tall, count = values.shape
    row = max(2, HIGH // tall)
    image = Image.new("RGB", (NAMES + MAP + EDGE + BARS, row * tall), GROUND)
    cells = Image.fromarray(coloured(values)).resize((MAP, row * tall), Image.Resampling.NEAREST)
    image.paste(cells, (NAMES, 0))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(11)
    left = NAMES + round(at * MAP / count)
    right = max(NAMES + round((at + 1) * MAP / count), left + 2)
    pen.rectangle((left, 0, right - 1, row * tall - 1), outline=INK)
    middle = NAMES + MAP + EDGE + BARS // 2
    for i, value in enumerate(values[:, at]):
        end = middle + round(float(np.clip(value, -1, 1)) * (BARS // 2 - 2))
        low, high = sorted((middle, end))
        pen.rectangle((low, i * row, high, i * row + row - 2), fill=ABOVE if value > 0 else BELOW)
    pen.line((middle, 0, middle, row * tall), fill=INK)
    rows = tall // len(names) if names and tall % len(names) == 0 else tall
    for i, name in enumerate(names if rows < tall else ()):
        pen.text((2, i * rows * row + 1), name[:11], fill=INK, font=font)
        pen.line((0, i * rows * row, NAMES + MAP, i * rows * row), fill=INK)
    return np.asarray(image)


def grouped(size: int, elements: int) -> NDArray[np.intp]:
    """The order of D = H * A numbers, stored step by step, that groups them by action element."""
    if not elements or size % elements:
        return np.arange(size)
    return np.arange(size).reshape(-1, elements).T.reshape(-1)


def coloured(values: NDArray[np.floating]) -> Picture:
    """Numbers in [-1, 1] as colours [..., 3], white at zero."""
    strength = np.abs(np.clip(values, -1, 1))[..., None]
    ends = np.where(values[..., None] > 0, np.array(ABOVE), np.array(BELOW))
    return (strength * ends + (1 - strength) * np.array(NONE)).round().astype(np.uint8)
