"""The Crafter benchmark: players that are not trained get a score, and the table has all rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("crafter")

from benchmarks import crafter_score
from benchmarks.evidence import study_of
from embodied.core.build import ConfigError
from embodied.study.study import last_value


def test_a_player_gets_a_score_and_the_table_has_a_row_for_each_rate(tmp_path: Path) -> None:
    study = replace(study_of("crafter"), seeds=(0,))
    with pytest.raises(ConfigError, match="no finished variant"):
        crafter_score.table(study, tmp_path)
    out = tmp_path / "random-0"
    short = "demonstrator=random episodes=2 num_envs=2 length=40 seed=3"
    crafter_score.main([*short.split(), f"out={out}"])
    (tmp_path / "random-0.done").touch()
    score = last_value(out, "eval/score")
    assert 0 <= score <= 100
    head, _, first, *rest = crafter_score.table(study, tmp_path).splitlines()
    assert head == "|  | random |" and first == f"| score (percent) | {score:.1f} |"
    assert len(rest[: rest.index("")]) == 22 and "| SPRING (GPT-4, no steps) | 27.3 ± 1.2 |" in rest
    rate = 100 * last_value(out, "eval/achievement/collect_sapling")
    assert f"| collect_sapling | {rate:.1f} |" in rest
