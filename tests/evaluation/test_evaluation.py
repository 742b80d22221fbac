"""The metrics of an evaluation, by hand."""

from __future__ import annotations

import pytest
import torch

from embodied.evaluation.evaluate import Evaluation


def test_the_worst_tenth_is_the_mean_of_the_lowest_returns() -> None:
    """Of 20 returns the two lowest; of 21 three; of one itself."""
    for returns, worst in (([*range(20)], 0.5), ([*range(21)], 1.0), ([4], 4.0)):
        shuffled = torch.tensor(returns).float()[torch.randperm(len(returns))]
        metrics = Evaluation(None, shuffled, torch.ones(len(returns))).metrics()
        assert metrics["return_cvar10"] == pytest.approx(worst)
        assert metrics["return"] == pytest.approx(sum(returns) / len(returns))
