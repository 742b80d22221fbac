"""RA-BC: weights by hand, and a clone that leaves out the detours of its recordings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.buffers.weighted import Weighted
from embodied.core.build import ConfigError, build
from embodied.datasets.lerobot.reader import read_episodes
from embodied.rewards.demonstrations.rewind import ProgressGain, weights
from tests.rewards.test_progress import corridor, record

NODE = {"_target_": "embodied.rewards.demonstrations.rewind.ProgressGain"}


def test_weights_by_hand() -> None:
    gain = torch.tensor([-0.5, -0.01, 0.0, 0.005, 0.02, 0.4], dtype=torch.float64)
    mean, std = gain.mean(), gain.std(correction=0)
    soft = (gain - (mean - 2 * std)) / (4 * std)
    expected = torch.tensor([0, 0, float(soft[2]), float(soft[3]), 1, 1], dtype=torch.float64)
    torch.testing.assert_close(weights(gain, 0.01), expected)
    assert 0 < float(soft[2]) < float(soft[3]) < 1


def test_recordings_without_gain_are_refused() -> None:
    with pytest.raises(ConfigError, match="gains progress"):
        weights(torch.tensor([-0.1, -0.2], dtype=torch.float64), 0.01)


def test_detours_are_not_sampled(tmp_path: Path) -> None:
    """Walks that turn back in their middle: the steps back have little weight, those on much."""
    demos = record(tmp_path / "demos", corridor(6, 20, seed=1))

    def detour(walk: Tensor) -> Tensor:
        return torch.cat([walk[:13], walk[4:12].flip(0), walk[4:]])

    walks = [detour(walk) for walk in corridor(4, 20, seed=2)]
    episodes = read_episodes(Path(record(tmp_path / "mixed", walks)))
    settings = {"demos": demos, "updates": 400, "hidden": [32, 32], "lr": 0.003}
    node = NODE | {"horizon": 3, "rewind": settings}
    weight = build(node, ProgressGain)(episodes)
    assert weight.shape == (sum(len(walk) - 1 for walk in walks),)
    each = weight.view(4, -1)
    back = torch.zeros(each.shape[1], dtype=torch.bool)
    back[12:18] = True  # what comes three steps later is still on the way back
    onwards = torch.zeros_like(back)
    onwards[:10], onwards[21:-1] = True, True
    assert each[:, back].mean() < 0.1 and each[:, onwards].mean() > 0.9
    source = Weighted({"x": torch.arange(len(weight))}, weight)
    drawn = source.sample(2000)["x"] % each.shape[1]
    assert float(back[drawn].float().mean()) < 0.05


def test_good_demonstrations_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"weighting\.rewind\.demos=DIR"):
        build(NODE, ProgressGain)
