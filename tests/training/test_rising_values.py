"""The line about values that were still rising when a run ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.tensors import Tensors
from embodied.learners.off_policy.sac import Sac
from embodied.training.warning_signs import METRIC, rise, warning
from tests.builders import random_demos
from tests.training.test_train import run, settings

STEPS = list(range(30))


class Paid(Sac):
    """Its rewards are 1."""

    def update(self, batch: Tensors) -> Tensors:
        return super().update({**batch, "reward": torch.ones_like(batch["reward"])})


@pytest.mark.parametrize(
    ("values", "rising"),
    [
        ([0.01 * s for s in STEPS], True),
        ([-20 + 0.5 * s for s in STEPS], True),
        ([1 - np.exp(-s / 15) for s in STEPS], True),  # 86% of the way
        ([1 - np.exp(-s / 6) for s in STEPS], False),  # arrived
        ([0.2 + 0.01 * (-1) ** s for s in STEPS], False),
        ([0.2] * 30, False),
        ([1 - 0.01 * s for s in STEPS], False),
        ([min(s, 15) + 0.001 * s for s in STEPS], False),  # a hundredth of what it rose before
        ([0.01 * s for s in STEPS[:9]], False),  # too few lines
        ([float("nan")] * 30, False),
    ],
)
def test_rising_is_what_it_says(values: list[float], rising: bool) -> None:
    assert (rise(range(len(values)), values) is not None) == rising


@pytest.mark.parametrize("count", [10, 20, 100])
def test_noise_hardly_ever_counts(count: int) -> None:
    random = np.random.default_rng(0)
    drawn = random.normal(size=(2000, count)).tolist()
    assert sum(rise(range(count), values) is not None for values in drawn) < 20


def test_a_noisy_rise_counts() -> None:
    random = np.random.default_rng(0)
    assert rise(range(30), [0.01 * s + 0.01 * random.normal() for s in STEPS])


def test_the_line_says_what_to_do() -> None:
    rows = [{"step": 100 * s, METRIC: 0.01 * s} for s in STEPS] + [{"step": 3000, "eval/loss": 1}]
    assert warning(rows, 5, "outputs/x").endswith("train longer, embodied resume outputs/x steps=N")
    assert warning(rows, 1, "outputs/x").endswith("where rewards are sparse, learner.n_step=5")
    assert warning(rows[:9], 1, "outputs/x") == ""


def test_a_run_ends_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step of the demonstrations is paid 1: after 90 updates values are far below 100."""
    made = settings(tmp_path / "run", "offline", demos=random_demos(tmp_path / "set", 2), steps=90)
    made["log_every"] = 3
    made["learner"] |= {"critic_lr": 0.003, "tau": 0.02, "_target_": f"{__name__}.Paid"}
    run(made)
    lines = [line for line in capsys.readouterr().err.splitlines() if "still rising" in line]
    assert len(lines) == 1 and "learner.n_step=5" in lines[0]
