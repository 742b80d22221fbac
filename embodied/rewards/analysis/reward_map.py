"""Reward maps: a factor or a utility over two elements of the state, as numbers and as an image.

Maps of Lucy-SKG's reward analysis (Moschopoulos et al., 2023): all elements of one observation but
two stay as they are, so that one sees where a combination of factors has its sign, is flat, or is
steep. An element that depends on the others (`goal_from_tool_x`) is not changed with them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, Node
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.handcrafted.factors import elements_of
from embodied.rewards.handcrafted.kinesthetic import Utility

Range = tuple[str, float, float]
"""An element's name, its lowest and its highest value."""


def reward_map(
    node: Node, spec: Spec, obs: Tensors, x: Range, y: Range, points: int = 64
) -> Tensor:
    """Values [points, points] of a factor, or of `{weight, all: [factors]}`: rows by `y`, columns
    by `x`, both rising. `obs` is one observation (leaves [1, ...]). ConfigError for a name that is
    not one element, or an empty range."""
    rows = {key: leaf.repeat(points**2, *[1] * (leaf.dim() - 1)) for key, leaf in obs.items()}
    ticks = torch.stack(torch.meshgrid(*_ticks(y, x, points), indexing="ij")).flatten(1)
    for (name, _, _), values in zip((y, x), ticks, strict=True):
        leaf, index = elements_of(name, spec)
        if index is None or len(index) != 1:
            raise ConfigError(f"{name} is not one element of an observation")
        rows[leaf][:, index[0]] = values
    zero = torch.zeros(points**2, *spec.act.shape)
    transitions = {**tt.nest(rows, "next_obs"), "reward": zero.new_zeros(points**2), "action": zero}
    return Utility("map", node, spec, "krc")(transitions, "next_obs").view(points, points)


def draw(values: Tensor, x: Range, y: Range, title: str, file: Path) -> None:
    """Write a map [points, points] as a PNG; the line is where it is 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 4))
    most = max(float(values.abs().max()), 1e-12)
    shown = axes.imshow(
        values.numpy(),
        origin="lower",
        extent=(*x[1:], *y[1:]),
        aspect="auto",
        cmap="RdBu",
        vmin=-most,
        vmax=most,
    )
    if values.min() < 0 < values.max():
        across, up = (ticks.numpy() for ticks in _ticks(x, y, len(values)))
        axes.contour(across, up, values.numpy(), levels=[0.0], colors="black")
    axes.set(xlabel=x[0], ylabel=y[0], title=title)
    figure.colorbar(shown)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _ticks(one: Range, other: Range, points: int) -> list[Tensor]:
    for name, low, high in (one, other):
        if low >= high:
            raise ConfigError(f"the range of {name} is empty: {low:g} to {high:g}")
    return [torch.linspace(low, high, points) for _, low, high in (one, other)]
