"""A diagnosis: statistics by hand, rules one by one, and policies whose remedy is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import embodied as em
from embodied.core.build import Node, allow
from embodied.core.spec import Spec
from embodied.improvement import advice, diagnosis, diagnosis_page
from embodied.improvement.advice import Advice, Diagnosis, Region, Score, advise
from embodied.improvement.diagnosis import (
    Config,
    Findings,
    diagnose,
    with_horizon,
)
from embodied.improvement.outcomes import best_of, chosen_noise, regions, thirds
from embodied.improvement.samplers import sampler_in, with_steps
from tests.builders import exit_of, make_policy, node_of, run_folder
from tests.improvement.toy import Pusher, PusherConfig

allow("tests")
SMALL = Config(episodes=40, num_envs=20)


def sides(**settings: Any) -> Node:
    return {"_target_": "tests.improvement.toy.Sides", **settings}


def found(kind: Any, chunk: int = 4, **env: Any) -> Findings:
    def make(spec: Spec) -> Pusher:
        return Pusher(PusherConfig(kind, chunk), spec)

    return diagnose(make, sides(**env), SMALL)


def ways(d: Diagnosis) -> list[str]:
    return [each.way for each in advise(d)]


def test_a_coin_is_steered() -> None:
    """One noise is right in every state: a ticket, and no network is needed."""
    d = found("coin").diagnosis
    assert d.noise == "chosen" and d.pass_at[16] > 0.99 and 0.3 < d.pass_at[1] < 0.7
    assert d.fixed == 1.0 and ways(d)[:2] == ["ticket", "dsrl"] and "residual" not in ways(d)
    assert d.noise_spread > 0.5 and d.obs_spread == 0.0
    assert d.limit is None, "no episode ran out of time"


def test_where_the_side_decides_a_noise_is_chosen_by_the_state() -> None:
    d = found("coin", sides=True).diagnosis
    assert d.fixed is not None and d.fixed < 0.8 and d.fixed_by_state is not None
    assert d.fixed_by_state > 0.9 and "three regions" in advise(d)[0].reason


def test_a_deterministic_policy_is_corrected() -> None:
    """It stands still where the number is small, however long it takes."""
    d = found("number").diagnosis
    assert d.noise == "none" and d.pass_at == {1: pytest.approx(d.pass_at[1])}
    assert d.obs_spread > 0.5 and d.noise_spread == 0.0
    assert ways(d)[0] == "residual" and "ticket" not in ways(d) and "dsrl" not in ways(d)
    assert d.limit == 10 and d.longer == pytest.approx(d.pass_at[1]) and d.timeouts == 1.0
    assert [r.name for r in d.regions] == ["state.number"] and "demonstrations_there" in ways(d)
    assert d.always + d.never == pytest.approx(1.0)


def test_without_a_success_there_is_nothing_to_learn_from() -> None:
    d = found("wrong").diagnosis
    assert d.base.mean == 0 and not d.reached and ways(d) == ["demonstrations"]


def test_a_slow_policy_needs_time() -> None:
    d = found("slow").diagnosis
    assert d.base.mean == 0 and d.longer == 1.0 and ways(d)[0] == "more_time"


def test_noise_that_is_not_offered_cannot_be_chosen() -> None:
    d = found("dice").diagnosis
    assert d.noise == "hidden" and d.fixed is None and ways(d)[0] == "offer_noise"


def test_returns_where_success_is_not_reported() -> None:
    d = found("coin", success=False).diagnosis
    assert not d.base.is_rate and (d.worst, d.best) == (0.0, 1.0) and d.longer is None
    assert ways(d)[0] == "ticket"


def test_the_report_shows_failures(tmp_path: Path) -> None:
    result = found("number")
    assert 1 <= len(result.pictures) <= 4
    assert all("out of time after 10 steps" in name for name in result.pictures)
    page = diagnosis_page.write(tmp_path, "<a policy>", sides(), SMALL, result).read_text()
    assert "&lt;a policy&gt;" in page and page.count("<img") == len(result.pictures)
    written = yaml.safe_load((tmp_path / "diagnosis.yaml").read_text())
    assert written["advice"][0]["way"] == "residual" and written["diagnosis"]["limit"] == 10


def test_best_of_k_by_hand() -> None:
    """The mean of the best over all pairs, and 1 - C(n - c, k) / C(n, k) of successes."""
    values = torch.tensor([[3.0], [1.0], [2.0], [7.0]])
    pairs = [max(a, b) for a, b in combinations([3, 1, 2, 7], 2)]
    assert best_of(values, 2) == pytest.approx(sum(pairs) / 6)
    won = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert best_of(won, 2) == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert best_of(won, 1) == pytest.approx(won.mean().item()) and best_of(won, 4) == 1.0


def test_a_chosen_noise_is_scored_where_it_was_not_chosen() -> None:
    """Luck does not generalize; a noise for each group does."""
    torch.manual_seed(0)
    luck = (torch.rand(16, 400) < 0.5).float()
    one = torch.zeros(400, dtype=torch.int64)
    assert best_of(luck, 16) == 1.0 and chosen_noise(luck, [one]) == pytest.approx(0.5, abs=0.1)
    group = torch.arange(400) // 2 % 2
    right = torch.stack([group == 0, group == 1]).float()
    assert chosen_noise(right, [one]) == pytest.approx(0.5)
    assert chosen_noise(right, [one, group]) == 1.0


def test_regions_are_those_that_matter() -> None:
    torch.manual_seed(0)
    numbers = {name: torch.rand(90) for name in ("this", *map(str, range(20)))}
    (region,) = regions(numbers, (numbers["this"] > 0.5).float())
    assert region.name == "this" and region.scores[0] == 0.0 and region.scores[2] == 1.0
    assert region.place.startswith("this below 0.")
    assert thirds(torch.tensor([1.0, -1.0, 1.0, -1.0]))[0].unique().numel() == 2


PLAIN = Diagnosis(base=Score(0.5, 0.4, 0.6, 100, True), pass_at={1: 0.5, 4: 0.5, 16: 0.5})


@pytest.mark.parametrize(
    ("rule", "change", "gain"),
    [
        (advice.demonstrations, {"reached": False}, 1.0),
        (advice.sampler, {"sampler": ("execute=1",), "sampled": 0.7}, 0.2),
        (advice.more_time, {"limit": 10, "longer": 0.8}, 0.3),
        (advice.ticket, {"noise": "chosen", "fixed": 0.6, "fixed_by_state": 0.9}, 0.4),
        (advice.offer_noise, {"noise": "hidden", "pass_at": {1: 0.5, 16: 1.0}}, 0.5),
        (advice.own_successes, {"pass_at": {1: 0.5, 16: 0.9}}, 0.2),
        (advice.dsrl, {"noise": "chosen", "fixed": 0.7, "fixed_any": 0.9}, 0.3),
        (advice.residual, {"noise": "none"}, 0.5),
        (advice.demonstrations_there, {"regions": (Region("x", (0, 1), (0, None, 0.9)),)}, 0.4),
    ],
)
def test_each_rule(rule: advice.Rule, change: dict[str, Any], gain: float) -> None:
    found = rule(replace(PLAIN, **change))
    assert isinstance(found, Advice) and found.gain == pytest.approx(gain) and found.reason
    assert rule in advice.RULES


def test_what_a_rule_does_not_advise() -> None:
    d = replace(PLAIN, continuous=False)
    assert advice.residual(d) is None and advise(d) == []
    assert advice.residual(replace(PLAIN, reached=False, rewarded=False)) is None
    assert advice.NOTHING in str(replace(PLAIN, pass_at={1: 0.99}, continuous=False))


def test_equal_gains_go_to_the_cheaper_way() -> None:
    d = replace(PLAIN, noise="chosen", fixed=0.96, fixed_any=1.0)
    assert ways(d)[0] == "ticket"


def test_settings_inside_of_others_are_found() -> None:
    env = {"_target_": "embodied.envs.wrappers.stack.Wrapped", "env": sides(), "wrappers": []}
    changed = with_horizon({**env, "env": node_of("envs.toy.two_gap.TwoGap")}, 7)
    assert changed is not None and changed["env"]["horizon"] == 7
    assert with_horizon(node_of("policies.random.Random"), 7) is None
    spec = em.make_env("two_gap").spec
    flow = make_policy("generative.flow.Flow", spec, chunk=2, width=16)
    assert sampler_in(flow) == () and with_steps(flow, 10).steps == 10  # type: ignore[attr-defined]
    inner = node_of("policies.gaussian.Gaussian", hidden=[8])
    steered = make_policy("steering.dsrl.Dsrl", spec, base=flow.node, inner=inner)
    assert sampler_in(steered) == ("base",) and with_steps(steered, 2).base.steps == 2  # type: ignore
    assert sampler_in(make_policy("gaussian.Gaussian", spec)) is None


def test_the_command_and_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with a sampler, in its own environment; the states are the same for both."""
    env = node_of("envs.toy.two_gap.TwoGap", horizon=12)
    flow = node_of("policies.generative.flow.Flow", chunk=2, width=16)
    run = run_folder(tmp_path / "run", env, flow, (5,))
    few = ("episodes=4", "num_envs=2", "noises=2")
    assert exit_of("diagnose", run, *few) == 0
    said = capsys.readouterr().out
    assert "as it is: 0%" in said and "demonstrations" in said
    written = yaml.safe_load((run / "diagnosis" / "diagnosis.yaml").read_text())
    assert (run / "diagnosis" / "report.html").exists()
    d = em.diagnose(run, episodes=4, num_envs=2, noises=2, verbose=False)
    assert written["diagnosis"]["noise_spread"] == pytest.approx(d.noise_spread)
    assert exit_of("diagnose", run, run) == 2 and exit_of("diagnose", run, "noises=1") == 2
    assert "noises=1 should be at least 2" in capsys.readouterr().err
    assert diagnosis.Config().seed == 20_000
