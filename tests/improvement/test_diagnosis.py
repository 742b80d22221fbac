"""A diagnosis: statistics by hand, rules one by one, and policies whose remedy is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import embodied as em
from embodied.core.build import Node, allow
from embodied.core.env import Step
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.improvement import advice, diagnosis, pages
from embodied.improvement.advice import Advice, Diagnosis, Region, Score, advise
from embodied.improvement.ways import sampler_in, with_steps
from tests.builders import exit_of, make_policy, node_of, run_folder
from tests.toy_envs import Reach

FAR = 3.0


@dataclass(frozen=True)
class SidesConfig:
    """`sides`: the goal is on the side that is observed, else always above."""

    num_envs: int = 4
    horizon: int = 10
    sides: bool = False
    success: bool = True


class Sides(Reach):
    """Reaching 3 on the goal's side is a success with reward 1; 3 on the other side ends the
    episode too. Observed: the side (-1, 1), and a number in [0, 1] that means nothing here."""

    def __init__(self, config: SidesConfig) -> None:
        super().__init__(config.num_envs)
        self.config = config
        seen = Leaf((2,), names=("side", "number"))
        self.spec = Spec({"state": seen}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
        self.way = torch.zeros(config.num_envs)

    def _draw(self, row: int) -> Tensor:
        side, number = torch.rand(2, generator=self.generators[row])
        return torch.stack(
            [torch.tensor(-1.0 if self.config.sides and side < 0.5 else 1.0), number]
        )

    def _begin(self, rows: Tensor) -> None:
        super()._begin(rows)
        self.way = self.way * ~rows

    def step(self, action: Tensor) -> Step:
        self.way = self.way + action[:, 0]
        self.age = self.age + 1
        reached = self.way * self.place[:, 0]
        won = reached >= FAR
        over = won | (reached <= -FAR)
        late = (self.age >= self.config.horizon) & ~over
        following = {"state": self.place}
        if (over | late).any():
            self._notify_before_reset(over | late)
            self._begin(over | late)
        log = {"success": won} if self.config.success else {}
        return Step({"state": self.place}, following, won.float(), over, late, log)

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        level = int(20 * (self.way[row] + 6))
        return torch.full((height, width, 3), level, dtype=torch.uint8)


class Pusher(Policy):
    """`coin` pushes by the sign of its noise, `dice` in the same way but by noise that it does not
    offer, `number` upwards where the number is above 1/2, `wrong` downwards, `slow` up slowly."""

    def __init__(self, kind: str, spec: Spec) -> None:
        super().__init__()
        self.spec, self.kind, self.chunk = spec, kind, 4

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, 1) if self.kind == "coin" else torch.zeros(n, 0)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        number = obs["state"][:, 1]
        push = {
            "coin": lambda: noise[:, 0].sign(),
            "dice": lambda: torch.randn(len(number)).sign(),
            "number": lambda: (number > 0.5).float(),
            "wrong": lambda: -torch.ones_like(number),
            "slow": lambda: torch.full_like(number, 0.25),
        }[self.kind]()
        return push[:, None, None].expand(-1, self.chunk, 1), carry


allow("tests")
SMALL = diagnosis.Config(episodes=40, num_envs=20)


def sides(**settings: Any) -> Node:
    return {"_target_": "tests.improvement.test_diagnosis.Sides", **settings}


def found(kind: str, **env: Any) -> diagnosis.Findings:
    return diagnosis.diagnose(partial(Pusher, kind), sides(**env), SMALL)


def ways(d: Diagnosis) -> list[str]:
    return [each.way for each in advise(d)]


def test_a_coin_is_steered() -> None:
    """One noise is right in every state: a ticket, and no network is needed. Also where success is
    not reported."""
    d = found("coin").diagnosis
    assert d.noise == "chosen" and d.pass_at[16] > 0.99 and 0.3 < d.pass_at[1] < 0.7
    assert d.fixed == 1.0 and ways(d)[:2] == ["ticket", "dsrl"] and "residual" not in ways(d)
    assert d.noise_spread > 0.5 and d.obs_spread == 0.0
    assert d.limit is None, "no episode ran out of time"
    d = found("coin", success=False).diagnosis
    assert not d.base.is_rate and (d.worst, d.best) == (0.0, 1.0) and d.longer is None
    assert ways(d)[0] == "ticket"


def test_where_the_side_decides_a_noise_is_chosen_by_the_state() -> None:
    d = found("coin", sides=True).diagnosis
    assert d.fixed is not None and d.fixed < 0.8 and d.fixed_by_state is not None
    assert d.fixed_by_state > 0.9 and "three regions" in advise(d)[0].reason


def test_a_deterministic_policy_is_corrected_and_the_report_shows_failures(tmp_path: Path) -> None:
    """It stands still where the number is small, however long it takes."""
    result = found("number")
    d = result.diagnosis
    assert d.noise == "none" and d.pass_at == {1: pytest.approx(d.pass_at[1])}
    assert d.obs_spread > 0.5 and d.noise_spread == 0.0
    assert ways(d)[0] == "residual" and "ticket" not in ways(d) and "dsrl" not in ways(d)
    assert d.limit == 10 and d.longer == pytest.approx(d.pass_at[1]) and d.timeouts == 1.0
    assert [r.name for r in d.regions] == ["state.number"] and "demonstrations_there" in ways(d)
    assert d.always + d.never == pytest.approx(1.0)
    assert 1 <= len(result.pictures) <= 4
    assert all("out of time after 10 steps" in name for name in result.pictures)
    page = pages.write_diagnosis(tmp_path, "<a policy>", sides(), SMALL, result).read_text()
    assert "&lt;a policy&gt;" in page and page.count("<img") == len(result.pictures)
    written = yaml.safe_load((tmp_path / "diagnosis.yaml").read_text())
    assert written["advice"][0]["way"] == "residual" and written["diagnosis"]["limit"] == 10


@pytest.mark.parametrize(
    ("kind", "facts", "first"),
    [
        ("wrong", {"reached": False}, "demonstrations"),  # there is nothing to learn from
        ("slow", {"longer": 1.0}, "more_time"),
        ("dice", {"noise": "hidden", "fixed": None}, "offer_noise"),
    ],
)
def test_what_is_advised_first(kind: str, facts: dict[str, Any], first: str) -> None:
    d = found(kind).diagnosis
    assert {name: getattr(d, name) for name in facts} == facts
    assert (d.base.mean == 0) == (kind != "dice") and ways(d)[0] == first
    assert len(ways(d)) == 1 or kind != "wrong"


def test_best_of_k_by_hand() -> None:
    """The mean of the best over all pairs, and 1 - C(n - c, k) / C(n, k) of successes."""
    values = torch.tensor([[3.0], [1.0], [2.0], [7.0]])
    pairs = [max(a, b) for a, b in combinations([3, 1, 2, 7], 2)]
    assert diagnosis.best_of(values, 2) == pytest.approx(sum(pairs) / 6)
    won = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert diagnosis.best_of(won, 2) == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert (
        diagnosis.best_of(won, 1) == pytest.approx(won.mean().item())
        and diagnosis.best_of(won, 4) == 1.0
    )


def test_a_chosen_noise_is_scored_where_it_was_not_chosen() -> None:
    """Luck does not generalize; a noise for each group does."""
    torch.manual_seed(0)
    luck = (torch.rand(16, 400) < 0.5).float()
    one = torch.zeros(400, dtype=torch.int64)
    assert diagnosis.best_of(luck, 16) == 1.0 and diagnosis.chosen_noise(
        luck, [one]
    ) == pytest.approx(0.5, abs=0.1)
    group = torch.arange(400) // 2 % 2
    right = torch.stack([group == 0, group == 1]).float()
    assert diagnosis.chosen_noise(right, [one]) == pytest.approx(0.5)
    assert diagnosis.chosen_noise(right, [one, group]) == 1.0


def test_regions_are_those_that_matter() -> None:
    torch.manual_seed(0)
    numbers = {name: torch.rand(90) for name in ("this", *map(str, range(20)))}
    (region,) = diagnosis.regions(numbers, (numbers["this"] > 0.5).float())
    assert region.name == "this" and region.scores[0] == 0.0 and region.scores[2] == 1.0
    assert region.place.startswith("this below 0.")
    assert diagnosis.thirds(torch.tensor([1.0, -1.0, 1.0, -1.0]))[0].unique().numel() == 2


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
    equal = replace(PLAIN, noise="chosen", fixed=0.96, fixed_any=1.0)
    assert ways(equal)[0] == "ticket", "equal gains go to the cheaper way"


def test_settings_inside_of_others_are_found() -> None:
    env = {"_target_": "embodied.envs.wrappers.stack.Wrapped", "env": sides(), "wrappers": []}
    changed = diagnosis.with_horizon({**env, "env": node_of("envs.toy.two_gap.TwoGap")}, 7)
    assert changed is not None and changed["env"]["horizon"] == 7
    assert diagnosis.with_horizon(node_of("policies.random.Random"), 7) is None
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
