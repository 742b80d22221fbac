"""The quality of a dataset: returns and distinct pairs by hand, and what `demos info` says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import Episodes, EpisodeWriter
from embodied.datasets.transitions import joined
from embodied.reports.quality import MOST_CELLS, Config, cells_for, distinct, quality
from tests.builders import exit_of

SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def recordings(state: list[float], action: list[float], length: list[int]) -> Episodes:
    """Episodes whose reward is the action, and which all terminate."""
    lengths = torch.tensor(length)
    ends = lengths.cumsum(0)
    steps = {
        "obs/state": torch.tensor(state)[:, None],
        "action": torch.tensor(action)[:, None],
        "reward": torch.tensor(action),
        "terminated": torch.arange(1, len(state) + 1)[:, None].eq(ends).any(1),
    }
    return Episodes(SPEC, steps, ends - lengths, lengths, {"state": torch.zeros(len(length), 1)})


def test_by_hand() -> None:
    """Returns 1 and 0.5; 4 steps in 3 cells of 2 by 2, of which the reference has all."""
    some = recordings([0.0, 0.1, 0.9, 1.0], [0.5, 0.5, 0.0, 0.5], [2, 2])
    reference = recordings([0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0], [4])
    found = quality(some, Config(random=0.25, best=1.25, cells=2), reference)
    assert (found.mean, found.tq) == (0.75, 0.5)
    # The states are low, low, high, high; the actions high, high, low, high.
    assert (found.distinct, found.reference, found.saco) == (3, 4, 0.75)
    assert found.log_saco == pytest.approx(0.7925, abs=1e-4)  # log 3 / log 4
    assert found.positive_variance == pytest.approx((0.5**2 + 0) / 2)  # of 1 and 0
    assert (found.terminated, found.at_bounds) == (1, 0)
    alone = quality(some, Config(cells=2))
    assert (alone.random, alone.best, alone.tq) == (0.5, 1.0, 0.5)
    assert alone.reference == 4, "every step counts as distinct"
    same = quality(recordings([0.0, 1.0], [0.5, 0.5], [1, 1]), Config())
    assert same.tq is None and "all returns are 0.5" in dict(same.rows())["TQ"]


def test_more_data_never_cover_less_and_experts_are_of_quality_one() -> None:
    torch.manual_seed(0)
    state, action = torch.randn(40).tolist(), (torch.rand(40) * 2 - 1).tolist()
    wide = recordings(state, action, [20, 20])
    expert = recordings([0.0] * 10, [1.0] * 10, [5, 5])
    given = Config(random=0.0, best=5.0, cells=10)
    whole = joined([wide, expert])

    best, poor, both = (quality(each, given, whole) for each in (expert, wide, whole))
    assert best.tq == best.distinct == best.at_bounds == 1
    assert both.distinct >= max(poor.distinct, best.distinct)
    assert both.saco == 1 > best.saco
    assert poor.tq is not None and both.tq is not None and poor.tq <= both.tq <= 1.0


def test_wide_vectors_are_projected() -> None:
    """Two numbers that vary, in twenty: cells as of the two alone, in other directions."""
    plane = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    repeated = plane.repeat(1, 10)

    def cells(pairs: Tensor, **given: int) -> int:
        return distinct(pairs, pairs, 10, Config(**given))

    assert cells(plane) == 100
    assert 45 <= cells(repeated, kept=2) <= 100
    assert cells(torch.rand(4000, 20, dtype=torch.float64), most=20) == 4000, "and without it"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, demos = recordings([0.0, 0.1, 0.9, 1.0], [0.5, 0.5, 0.0, 0.5], [2, 2]), tmp_path / "demos"
    ended = torch.zeros(2, dtype=torch.bool)
    with EpisodeWriter(demos, SPEC) as writer:
        for number in range(2):
            writer.add({**made.episode(number), "truncated": ended, "success": ended})
    assert exit_of("demos", "info", demos) == 0
    assert "TQ" not in capsys.readouterr().out
    words = ("quality=true", "best=1.25", "random=0.25", f"reference={demos}")
    assert exit_of("demos", "info", demos, *words) == 0
    shown = capsys.readouterr().out
    assert "TQ: 0.50 (0: return 0.25, 1: return 1.25)" in shown and "SACo: 1.00" in shown
    assert exit_of("demos", "info", demos, "best=1") == 2
    assert "quality=true" in capsys.readouterr().err


def test_coverage_is_not_the_number_of_steps() -> None:
    """In 100 cells of each of four numbers no two of 2,000 steps share one: whatever the recordings
    hold, all of them would count."""
    generator = torch.Generator().manual_seed(0)
    wide = 2 * torch.rand(2000, 4, generator=generator, dtype=torch.float64) - 1
    narrow = 0.2 * wide
    config = Config()
    cells = cells_for(wide, config)
    assert distinct(wide, wide, MOST_CELLS, config) > 0.99 * len(wide)
    assert distinct(narrow, wide, MOST_CELLS, config) > 0.9 * len(wide)
    assert distinct(wide, wide, cells, config) <= len(wide) / 2
    assert distinct(narrow, wide, cells, config) < 0.1 * distinct(wide, wide, cells, config)
