"""What annotation saves and how its network agrees with its teacher; no clocks."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.annotate import HELPFUL, agreement, saved, taught
from embodied.nn.statistics import ranks, spearman
from embodied.rewards.language.annotate import Classification
from embodied.rewards.language.rule_reader import Config, RuleReader


def test_rank_correlation_by_hand() -> None:
    assert ranks(np.array([5.0, 1.0, 5.0, 9.0])).tolist() == [2.5, 1.0, 2.5, 4.0]
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 21.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([3.0, 1.0, 2.0])) == pytest.approx(-0.5)


def test_each_caption_once_and_every_fourth_step_lose_little() -> None:
    row = saved("events", stride=4, steps=300)
    assert row.ratio_median >= 5 and row.notes["rank_correlation"] >= 0.95


def test_the_network_agrees_with_its_teacher_where_it_was_not_told() -> None:
    assert taught(100)[1] >= 0.9
    judge, model = RuleReader(Config(HELPFUL)), Classification(1, 1e-3, 4, 0.5, seed=0)
    texts = ["you picked up the red key", "you face the red key"]
    score = model.scores(texts)
    assert agreement(model, judge.worth, texts) == float(score[0] > score[1])
