"""Weighted sampling: weights by hand, frequencies of the draws, the run option."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from embodied.buffers.weighted import Weighted, Weights, positive_variance
from embodied.compose import PACKAGED
from embodied.core.build import ConfigError, build
from embodied.core.env import RETURN_ENDS
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import with_steps
from embodied.training.logger import read_metrics
from tests.builders import node_of
from tests.datasets.test_transitions import episodes
from tests.training.test_pretrain import demos, parts
from tests.training.test_train import run, settings

__all__ = ["demos"]

FOUR = episodes([[1.0, 1.0], [4.0], [0.0, 0.0, 0.0], [1.0, 2.0]], [True] * 4)  # 2, 4, 0, 3


def weights(kind: str, data: Episodes = FOUR, **settings: float | str) -> Tensor:
    return build(node_of(f"buffers.weighted.{kind}", **settings), Weights, gamma=0.9)(data)


def test_return_weights_by_hand() -> None:
    """Normalised returns 1/2, 1, 0, 3/4 of mean 9/16; only ratios count, so the largest weight
    is 1."""
    found = weights("Return", alpha=0.5).tolist()
    assert found == pytest.approx([math.exp((u - 1) / 0.5) for u in (0.5, 1, 0, 0.75)])
    assert weights("Return", episodes([[3.0], [1.0, 2.0]], [True, True])).tolist() == [1, 1]
    expected = ((1 - 9 / 16) ** 2 + (3 / 4 - 9 / 16) ** 2) / 4
    assert positive_variance(FOUR) == pytest.approx(expected)


def test_one_outlier_takes_all_unless_it_is_cut() -> None:
    """Returns 0 to 9 and one of 30: at alpha 0.1 it has nine tenths of the weight and more."""
    data = episodes([[float(g)] for g in (*range(10), 30)], [True] * 11)
    plain = weights("Return", data)
    assert (plain[10] / plain.sum()).item() > 0.9
    cut = weights("Return", data, quantile=0.9)
    assert (cut[10] / cut.sum()).item() < 0.5 and cut[9] == cut[10]
    ranked = weights("Return", data, ranks=True)
    assert ranked.tolist() == pytest.approx([math.exp(rank - 10) for rank in range(11)])


def test_ties_share_their_rank_and_a_high_temperature_is_uniform() -> None:
    data = episodes([[g] for g in (3.0, 1.0, 3.0, 2.0, 1.0, 1.0)], [True] * 6)
    ranked = weights("Return", data, ranks=True)
    below = [4.5 - rank for rank in (4.5, 1, 4.5, 3, 1, 1)]
    assert ranked.tolist() == pytest.approx([math.exp(-each / 3.5 / 0.1) for each in below])
    even = weights("Return", alpha=1e6)
    assert even.tolist() == pytest.approx([1.0] * 4, abs=1e-5)


def test_advantage_forgives_hard_starts() -> None:
    """Starts 0 and 10 ... return 100 s_0 + luck: what is left of G is the luck."""
    luck = [0.0, 1.0, 0.0, -1.0]
    data = episodes([[100.0 * 10 * e + x] for e, x in enumerate(luck)], [True] * 4)
    found = weights("Advantage", data)
    start = torch.tensor([0.0, 10.0, 20.0, 30.0], dtype=torch.float64)
    slope = ((start - 15) * torch.tensor(luck)).sum() / (start - 15).square().sum()
    u = torch.tensor(luck, dtype=torch.float64) - slope * (start - 15)
    expected = ((u - u.max()) / (u.max() - u.min()) / 0.1).exp()
    torch.testing.assert_close(found, expected)
    assert weights("Return", data).argmax() == 3 and found.argmax() == 1


def test_the_best_share() -> None:
    assert weights("Top", share=0.5).tolist() == [0, 1, 0, 1]
    assert weights("Top", share=0.01).tolist() == [0, 1, 0, 0]
    with pytest.raises(ConfigError, match="share=0"):
        weights("Top", share=0.0)


def test_of_two_successes_the_sooner_is_better() -> None:
    """Sparse reward: the slow success and the failure are left out, in whatever order they come."""
    slow, quick, failed = [0.0, 0.0, 0.0, 1.0], [0.0, 1.0], [0.0, 0.0]
    assert weights("Top", episodes([slow, quick], [True] * 2), share=0.5).tolist() == [0, 1]
    three = episodes([quick, failed, slow], [True, False, True])
    assert weights("Top", three, share=1 / 3).tolist() == [1, 0, 0]
    later = episodes([[0.0, 1.5], [1.0]], [True] * 2)
    assert weights("Top", later, share=0.5).tolist() == [1, 0]
    assert weights("Top", later, share=0.5, gamma=0.5).tolist() == [0, 1]


def test_the_best_steps_of_play_are_those_before_the_goal() -> None:
    play = episodes([[-1.0] * 3 + [0.0] + [-1.0] * 4], [False])
    play = with_steps(play, {RETURN_ENDS: torch.arange(8) == 3})
    assert weights("Top", play, share=3 / 8, of="steps").tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


def test_frequencies_are_exact() -> None:
    """100,000 draws of rows that weigh 1, 0, 2, 5 of 8: each within four deviations."""
    source = Weighted({"row": torch.arange(4)}, torch.tensor([1.0, 0.0, 2.0, 5.0]))
    torch.manual_seed(0)
    n = 100_000
    counts = source.sample(n)["row"].bincount(minlength=4)
    for count, p in zip(counts.tolist(), (1 / 8, 0.0, 2 / 8, 5 / 8), strict=True):
        assert abs(count - n * p) <= 4 * math.sqrt(n * p * (1 - p))
    assert source.effective == pytest.approx(64 / 30)


def test_small_weights_among_millions_are_drawn() -> None:
    """More rows than torch.multinomial takes; the last one weighs as much as all others."""
    n = 2**24 + 1
    weight = torch.full((n,), 1e-3, dtype=torch.float64)
    weight[-1] = weight[:-1].sum()
    source = Weighted({"row": torch.arange(n)}, weight)
    torch.manual_seed(0)
    share = (source.sample(10_000)["row"] == n - 1).double().mean().item()
    assert share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("bad", [[1.0], [1.0, -1.0], [0.0, 0.0]])
def test_bad_weights_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="one per transition"):
        Weighted({"row": torch.arange(2)}, torch.tensor(bad))


@pytest.mark.parametrize("data", ["offline", "off_policy"])
def test_a_run_draws_by_weight(tmp_path: Path, demos: list[str], data: str) -> None:
    own = {} if data == "offline" else {"warmup_steps": 0}
    node = settings(tmp_path, demos=demos, data=data, steps=40, **own)
    node["weighting"] = {"_target_": "embodied.buffers.weighted.Top", "share": 1 / 12}
    made = parts(node)
    # One episode of twelve.
    assert made.episodes is not None
    assert made.loop.data_metrics == {
        "data/rows": 240,
        "data/effective_rows": 20,
        "data/positive_variance": positive_variance(made.episodes),
    }
    discount = 0.99 ** torch.arange(20)
    best = int((made.episodes.steps["reward"].view(12, 20) * discount).sum(1).argmax())
    loop: Any = made.loop
    rows = (loop.source if data == "offline" else loop.buffers.demos).sample(50)
    mine = made.episodes.episode(best)["action"]
    assert (rows["action"][:, None] == mine).all(2).any(1).all()
    run(node)
    assert read_metrics(tmp_path)[0]["data/effective_rows"] == 20


@pytest.mark.parametrize("learner", ["td3_bc", "recoil"])
def test_it_goes_with_offline_learners(tmp_path: Path, demos: list[str], learner: str) -> None:
    """With ReCOIL the better episodes of each dataset."""
    node = settings(tmp_path, "offline", demos=demos, steps=2)
    if learner == "recoil":
        node["data"]["fractions"] = [0.5, 0.5]
    node["learner"] = yaml.safe_load((PACKAGED / "learner" / f"{learner}.yaml").read_text())
    node["learner"] |= {"batch_size": 8}
    node["policy"] = node_of("policies.deterministic.Deterministic")
    node["weighting"] = node_of("buffers.weighted.Return")
    run(node)
    assert read_metrics(tmp_path)[-1]["step"] == 2


@pytest.mark.parametrize("given", [False, True])
def test_weights_without_data_of_their_own_are_refused(
    tmp_path: Path, demos: list[str], given: bool
) -> None:
    own = {"demos": demos, "demo_fraction": None} if given else {}
    with pytest.raises(ConfigError, match="own buffer" if given else "demos=DIR"):
        parts(settings(tmp_path, weighting=node_of("buffers.weighted.Return"), **own))
