"""The alarm: when it rings, that it says so once, and that resuming changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import allow
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors
from embodied.reports import run_report
from embodied.training import reward_hacking
from embodied.training.logger import Log, read_metrics
from embodied.training.reward_hacking import diverging, evaluations, ever_diverged, log_evaluation
from tests.training.test_train import run, settings

allow("tests")


class Payer:
    """A loop that says what it is told to have paid."""

    def __init__(self) -> None:
        self.next = 0.0

    def mean_reward(self) -> dict[str, Tensor]:
        return {reward_hacking.PROXY: torch.tensor(self.next)}


def history(pairs: list[tuple[float, float]]) -> list[tuple[float, float, int]]:
    return [(proxy, won, step) for step, (proxy, won) in enumerate(pairs)]


UP = [(0.0, 0.9), (1.0, 0.8), (2.0, 0.7), (3.0, 0.6)]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (UP, True),
        (UP[:3], False),
        ([(9.0, 0.1), *UP], True),
        ([*UP, (4.0, 0.6)], False),
        ([*UP, (2.9, 0.5)], False),
        ([(p, 1 - s) for p, s in UP], False),
        ([(-p, s) for p, s in UP], False),
        ([], False),
    ],
)
def test_three_evaluations_apart(pairs: list[tuple[float, float]], expected: bool) -> None:
    assert diverging(history(pairs)) is expected


def play(folder: Path, pairs: list[tuple[float, float]], first: int = 0) -> Log:
    log, loop = Log(folder), Payer()
    for step, (loop.next, won) in enumerate(pairs, first):
        log_evaluation(loop, log, 100 * (step + 1), {"eval/success": won, "eval/episodes": 10.0})
    return log


def test_it_warns_once_and_the_report_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, [*UP, (4.0, 0.5), (5.0, 0.4)])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "the reward rose while success fell (now 60%)" in said[0]
    rang = [row["reward/alarm"] for row in read_metrics(tmp_path) if "reward/alarm" in row]
    assert rang == [0, 0, 0, 1, 1, 1]
    page = run_report.write(tmp_path).read_text()
    assert "Reward and success" in page and "reward rose while success fell" in page


def test_the_history_goes_on_in_another_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, UP[:2])
    play(tmp_path, UP[2:], first=2)
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert ever_diverged(evaluations(tmp_path)) and not ever_diverged(
        evaluations(tmp_path, step=300)
    )


def test_a_world_without_success_or_reward_has_none(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log_evaluation(Payer(), log, 100, {"eval/return": 1.0})
    log_evaluation(object(), log, 200, {"eval/success": 1.0})
    assert not any("reward/alarm" in row for row in read_metrics(tmp_path))


@dataclass(frozen=True)
class Config:
    frozen: bool = True


class Parted(Reward):
    """Twice the world's reward, and 1."""

    def __init__(self, config: Config) -> None:
        self.frozen = config.frozen

    def __call__(self, rows: Tensors) -> Tensor:
        return sum(self.components(rows).values(), start=0 * rows["reward"])

    def components(self, rows: Tensors) -> Tensors:
        return {"world": 2 * rows["reward"], "bonus": torch.ones_like(rows["reward"])}

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        return {}


PPO: dict[str, Any] = {
    "policy": {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian", "hidden": [16]},
    "learner": {"_target_": "embodied.learners.on_policy.ppo.Ppo", "horizon": 10, "batch_size": 20},
}


@pytest.mark.parametrize(("frozen", "more"), [(True, {}), (False, {}), (True, PPO)])
def test_a_run_logs_what_it_pays_and_of_what(
    tmp_path: Path, frozen: bool, more: dict[str, Any]
) -> None:
    """Both loops and both kinds: the proxy is the terms' sum, and the bonus is 1."""
    reward = {"_target_": "tests.training.test_reward_hacking.Parted", "frozen": frozen}
    run(settings(tmp_path, steps=200, eval_every=80, reward=reward, video=True, **more))
    rows = [row for row in read_metrics(tmp_path) if "reward/proxy" in row]
    assert [row["step"] for row in rows] == [80, 160, 200]
    for row in rows:
        assert row["reward/bonus"] == 1.0
        assert row["reward/proxy"] < 1.0  # the world pays less than nothing
    exact = rows[-1]["reward/proxy"] - rows[-1]["reward/world"] - 1
    assert abs(exact) < 1e-5 or frozen
    assert "Terms of the reward" in run_report.write(tmp_path).read_text()
