"""Off-policy evaluation: estimators and portfolios by hand, and a chain whose values are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied.cli import parse
from embodied.commands import function
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import Episodes, EpisodeWriter
from embodied.evaluation.off_policy import (
    Config,
    Recorded,
    doubly_robust,
    estimate,
    log_density,
    pdis,
    weights,
)
from embodied.evaluation.portfolio import portfolio
from tests.builders import make_policy

SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def test_weighted_estimates_by_hand() -> None:
    """Two episodes, of two decisions and of one: ratios 3 and 2, and 1."""
    ratio = torch.tensor([[3.0, 2.0], [1.0, 1.0]])
    weight = weights(ratio.log())
    torch.testing.assert_close(weight, torch.tensor([[3 / 4, 6 / 7], [1 / 4, 1 / 7]]))
    reward = torch.tensor([[1.0, 2.0], [4.0, 0.0]])
    discount = torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    expected = 3 / 4 * 1 + 0.5 * 6 / 7 * 2 + 1 / 4 * 4
    assert pdis(weight, reward, discount) == pytest.approx(expected)
    q, v = torch.tensor([[2.0, 1.0], [3.0, 0.0]]), torch.tensor([[2.5, 1.5], [2.0, 0.0]])
    first = 3 / 4 * (1 - 2) + 1 / 2 * 2.5 + 1 / 4 * (4 - 3) + 1 / 2 * 2
    second = 0.5 * (6 / 7 * (2 - 1) + 3 / 4 * 1.5)
    assert doubly_robust(weight, reward, discount, q, v) == pytest.approx(first + second)
    even = weights(torch.zeros(2, 2))  # the behaviour policy itself: the mean return
    assert pdis(even, reward, discount) == pytest.approx((1 + 0.5 * 2 + 4) / 2)
    zeros = torch.zeros(2, 2)
    assert doubly_robust(weight, reward, discount, zeros, zeros) == pytest.approx(expected)


def test_a_gaussian_by_hand() -> None:
    error, std = torch.tensor([[0.5, -1.0]]), torch.tensor([0.5, 2.0])
    expected = torch.distributions.Normal(0.0, std).log_prob(error).sum(1)
    torch.testing.assert_close(log_density(error, std), expected)


def test_portfolios_by_hand() -> None:
    """Estimates put 3, then the behaviour policy (2), then 0 in front; the best, 5, is last."""
    estimates, true, behaviour = [9.0, 1.5, 1.0], [3.0, 0.0, 5.0], 2.0
    two = portfolio(estimates, true, behaviour, 2)
    assert (two.best, two.worst, two.mean, two.std) == (3, 2, 2.5, 0.5)
    assert two.sharpe == 2 and two.regret == pytest.approx(2 / 5) and two.unsafe == 0
    three = portfolio(estimates, true, behaviour, 3)
    assert three.std == pytest.approx((14 / 9) ** 0.5) and three.unsafe == pytest.approx(1 / 3)
    whole = portfolio(estimates, true, behaviour, 4)
    assert (whole.gain, whole.regret) == (3, 0)
    assert portfolio([3.0, 2.0], [2.0, 2.0], 2.0, 2).sharpe == 0
    assert portfolio([3.0, 3.0], [4.0, 4.0], 2.0, 2).sharpe == float("inf")
    assert portfolio([3.0, 3.0], [4.0, 4.0], 5.0, 2).unsafe == 0.5, "the behaviour is in front"
    with pytest.raises(ConfigError, match="there are 4 policies"):
        portfolio(estimates, true, behaviour, 5)


def chain(episodes: int, seed: int = 0) -> Episodes:
    """Three steps from state 0; the reward of a step is (1 + action) / 2, actions are uniform."""
    generator = torch.Generator().manual_seed(seed)
    n = 3 * episodes
    action = 2 * torch.rand(n, 1, generator=generator) - 1
    steps = {
        "obs/state": torch.arange(3.0).repeat(episodes)[:, None],
        "action": action,
        "reward": (1 + action[:, 0]) / 2,
        "terminated": (torch.arange(3) == 2).repeat(episodes),
    }
    start = torch.arange(0, n, 3)
    length = torch.full((episodes,), 3)
    return Episodes(SPEC, steps, start, length, {"state": torch.full((episodes, 1), 3.0)})


def test_all_three_estimate_a_better_and_a_worse_policy() -> None:
    """A policy that always acts with a is worth 1.5 (1 + a) with gamma 1; the recordings 1.5."""
    config = Config(gamma=1.0, updates=600, batch_size=128, lr=2e-3, tau=0.05, hidden=(32,))
    recorded = Recorded(chain(600), config, 1)
    found = {}
    for action in (-0.5, 0.5):
        policy = make_policy("deterministic.Deterministic", SPEC, hidden=[4], std=0.05)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()
            list(policy.parameters())[-1].fill_(torch.atanh(torch.tensor(action)))
        found[action] = estimate(policy, recorded)
    for action, made in found.items():
        true = 1.5 * (1 + action)
        assert made.fqe == pytest.approx(true, abs=0.25)
        assert made.pdis == pytest.approx(true, abs=0.3)
        assert made.dr == pytest.approx(true, abs=0.3)
        assert 5 < made.effective < 400
    with pytest.raises(ConfigError, match="without memory"):
        estimate(make_policy("generative.flow.Flow", SPEC, obs_steps=2), recorded)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, demos = chain(8), tmp_path / "demos"
    with EpisodeWriter(demos, SPEC) as writer:
        for number in range(8):
            ended = torch.zeros(3, dtype=torch.bool)
            writer.add({**recorded.episode(number), "truncated": ended, "success": ended})
    runs = [tmp_path / name for name in ("one", "two")]
    for run in runs:
        policy = make_policy("generative.flow.Flow", SPEC, chunk=2, width=8, depth=1)
        checkpoint.save(run / "checkpoints" / "00000000", policy, 0)

    def says(*words: str) -> str:
        given = [f"policies=[{runs[0]},{runs[1]}]", f"demos={demos}", "updates=5", *words]
        args = parse(["score", *given])
        function(args.run)(args)
        return capsys.readouterr().out

    shown = says("gamma=1")
    assert all(word in shown for word in ("FQE", "PDIS", "DR", "the recordings", "the 2 to try"))
    for words, wrong in (
        ("k=1", "at least 2"),
        ("k=4", "are 3 policies"),
        ("env=two_gap", "without truth"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            says(words)
