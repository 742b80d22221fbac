"""Rewards in a run: told the step, saved and resumed exactly; what a log says is going wrong; DiWA
from its command lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.build import ConfigError, Node, allow
from embodied.core.env import NotFinite
from embodied.core.reward import Reward, SummedReward
from embodied.core.tensors import Tensors
from embodied.learners.off_policy.sac import Sac
from embodied.models.latent_policy import LatentPolicy
from embodied.reports import run_report
from embodied.rewards.success.model import contrastive_loss
from embodied.training import warning_signs as signs
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.demonstrations import rows_for
from embodied.training.logger import Log, read_metrics
from tests.builders import exit_of, node_of, random_demos
from tests.training.test_train import resumed, run, settings

allow("tests")


PPO: dict[str, Any] = {
    "policy": {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian", "hidden": [16]},
    "learner": {"_target_": "embodied.learners.on_policy.ppo.Ppo", "horizon": 10, "batch_size": 20},
}


@dataclass(frozen=True)
class Config:
    start: float = 1.0


class Growing(Reward):
    """Pays a factor that learning raises, and remembers every step it was told. What it sees and is
    taught from holds what the world paid: less than 0."""

    frozen = False

    def __init__(self, config: Config) -> None:
        self.factor, self.told = config.start, list[int]()

    def set_step(self, step: int) -> None:
        self.told.append(step)

    def __call__(self, rows: Tensors) -> Tensor:
        assert (rows["reward"] < 0).all()
        return torch.full_like(rows["reward"], self.factor)

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        assert (rows["reward"] < 0).all() and not any("own" in key for key in rows)
        self.factor += 0.01
        return {"factor": torch.tensor(self.factor)}

    def get_state(self) -> dict[str, Any]:
        return {"factor": self.factor, "told": list(self.told)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.factor, self.told = state["factor"], list(state["told"])


class Broken(Reward):
    """Not a number where the world paid little; it learns unless `frozen`."""

    def __init__(self, config: Config) -> None:
        self.frozen = config.start > 0

    def __call__(self, rows: Tensors) -> Tensor:
        return torch.where(rows["reward"] < -0.5, torch.nan, 0.0)


def mine(kind: str, **settings: Any) -> Node:
    return {"_target_": f"{__name__}.{kind}", **settings}


@pytest.mark.parametrize("start", [1.0, -1.0], ids=["frozen", "learned"])
@pytest.mark.parametrize("more", [{}, PPO], ids=["replay", "rollout"])
def test_a_reward_that_is_not_a_number_is_named(
    start: float, more: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(NotFinite, match=r"the reward Broken: reward is not finite in transitions"):
        run(settings(tmp_path, reward=mine("Broken", start=start), **more))


def test_rewards_of_single_decisions_are_no_n_step_returns(tmp_path: Path) -> None:
    def made(reward: Node) -> RunComponents:
        node = settings(tmp_path, reward=reward)
        node["learner"]["n_step"] = 3
        return RunComponents(read_config(node))

    with pytest.raises(ConfigError, match=r"of a single decision: learner\.n_step=1"):
        made(mine("Growing"))
    made(node_of("rewards.handcrafted.composite.Scaled", factor=2.0))


def test_a_reward_learns_from_what_the_world_paid_and_is_resumed_exactly(tmp_path: Path) -> None:
    whole = resumed(settings(tmp_path, reward=mine("Growing")), 200)
    state = checkpoint.load_state(whole, "loop")["loop"]["reward"]
    assert state["factor"] > 1.5 and state["told"] == [*range(4, 401, 4)]
    assert max(row.get("train/reward_factor", 0) for row in read_metrics(whole)) > 1.5


def test_a_flight_school_is_resumed_exactly(tmp_path: Path) -> None:
    """The quadrotor's experiment, interrupted before its weights grow and ended after."""
    words = ["experiment=quadrotor_hover", "size=debug", "reward.every=150", "steps=240"]
    words += ["data.utd_ratio=0.2", f"out={tmp_path}", "name=x"]
    resumed(compose("train", words).node, 120)


def test_demonstrations_are_paid_like_everything_else(tmp_path: Path) -> None:
    """A reward that stands in for the world's own pays their rows too; offline it has to be asked
    for a labelled copy; what it cannot see in them is one line."""
    double = node_of("rewards.handcrafted.composite.Scaled", factor=-2.0)
    more = {"demos": random_demos(tmp_path / "demos", 4), "reward": double}
    made: Any = RunComponents(read_config(settings(tmp_path, demo_fraction=None, **more)))
    paid = rows_for(made.episodes, made.policy, made.learner, None)["reward"]
    stored = made.loop.buffers.replay.take(torch.arange(len(paid)))
    assert torch.equal(stored["reward"], -2 * paid) and paid.abs().sum() > 0
    looks = node_of("rewards.vision_language.clip.Clip", prompt="the ball is there")
    for line, changes in (
        ("embodied reward label", {"data": "offline"}),
        ("which this reward observes", {"reward": looks}),
    ):
        with pytest.raises(ConfigError, match=line):
            run(settings(tmp_path / "no", **{**more, **changes}))


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
    history = [(proxy, won, step) for step, (proxy, won) in enumerate(pairs)]
    assert signs.diverging(history) is expected


def play(folder: Path, pairs: list[tuple[float, float]], first: int = 0) -> None:
    """Evaluations of a loop that says to have paid so much, and how often they succeeded."""
    log = Log(folder)
    for step, (paid, won) in enumerate(pairs, first + 1):
        loop = SimpleNamespace(mean_reward=lambda paid=paid: {signs.PROXY: torch.tensor(paid)})
        signs.log_evaluation(loop, log, 100 * step, {"eval/success": won, "eval/episodes": 10.0})


def test_it_warns_once_also_of_another_process_and_the_report_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, UP[:2])
    play(tmp_path, [*UP[2:], (4.0, 0.5), (5.0, 0.4)], first=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert "the reward rose while success fell (now 60%)" in line
    rang = [row["reward/alarm"] for row in read_metrics(tmp_path) if "reward/alarm" in row]
    assert rang == [0, 0, 0, 1, 1, 1]
    page = run_report.write(tmp_path).read_text()
    assert "Reward and success" in page and "reward rose while success fell" in page
    assert signs.ever_diverged(signs.evaluations(tmp_path))
    assert not signs.ever_diverged(signs.evaluations(tmp_path, step=300))


def test_a_world_without_success_or_reward_has_none(tmp_path: Path) -> None:
    log, loop = Log(tmp_path), SimpleNamespace(mean_reward=lambda: {signs.PROXY: torch.ones(())})
    signs.log_evaluation(loop, log, 100, {"eval/return": 1.0})
    signs.log_evaluation(object(), log, 200, {"eval/success": 1.0})
    assert not any("reward/alarm" in row for row in read_metrics(tmp_path))


class Parted(SummedReward):
    """Twice the world's reward, and 1."""

    def __init__(self, frozen: bool) -> None:
        self.frozen = frozen

    def components(self, rows: Tensors) -> Tensors:
        return {"world": 2 * rows["reward"], "bonus": torch.ones_like(rows["reward"])}


@pytest.mark.parametrize(("frozen", "more"), [(True, {}), (False, {}), (True, PPO)])
def test_a_run_logs_what_it_pays_and_of_what(
    tmp_path: Path, frozen: bool, more: dict[str, Any]
) -> None:
    """Both loops and both kinds: the proxy is the terms' sum, and the bonus is 1."""
    reward = mine("Parted", frozen=frozen)
    run(settings(tmp_path, steps=200, eval_every=80, reward=reward, video=True, **more))
    rows = [row for row in read_metrics(tmp_path) if "reward/proxy" in row]
    assert [row["step"] for row in rows] == [80, 160, 200]
    assert {row["reward/bonus"] for row in rows} == {1.0}
    assert max(row["reward/proxy"] for row in rows) < 1  # the world pays less than nothing
    exact = rows[-1]["reward/proxy"] - rows[-1]["reward/world"] - 1
    assert abs(exact) < 1e-5 or frozen
    assert "Terms of the reward" in run_report.write(tmp_path).read_text()


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
    assert (signs.rise(range(len(values)), values) is not None) == rising


@pytest.mark.parametrize("count", [10, 100])
def test_noise_hardly_ever_counts_and_a_noisy_rise_does(count: int) -> None:
    random = np.random.default_rng(0)
    drawn = random.normal(size=(2000, count)).tolist()
    assert sum(signs.rise(range(count), values) is not None for values in drawn) < 20
    assert signs.rise(range(30), [0.01 * s + 0.01 * random.normal() for s in STEPS])


def test_the_line_says_what_to_do() -> None:
    rows = [{"step": 100 * s, signs.METRIC: 0.01 * s} for s in STEPS] + [
        {"step": 3000, "eval/loss": 1}
    ]
    assert signs.warning(rows, 5, "outputs/x").endswith(
        "train longer, embodied resume outputs/x steps=N"
    )
    assert signs.warning(rows, 1, "outputs/x").endswith(
        "where rewards are sparse, learner.n_step=5"
    )
    assert signs.warning(rows[:9], 1, "outputs/x") == ""


def test_a_run_ends_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step of the demonstrations is paid 1: after 90 updates values are far below 100."""
    made = settings(tmp_path / "run", "offline", demos=random_demos(tmp_path / "set", 2), steps=90)
    made["log_every"] = 3
    made["learner"] |= {"critic_lr": 0.003, "tau": 0.02, "_target_": f"{__name__}.Paid"}
    run(made)
    lines = [line for line in capsys.readouterr().err.splitlines() if "still rising" in line]
    assert len(lines) == 1 and "learner.n_step=5" in lines[0]


def test_where_they_part_by_hand() -> None:
    """Wilson intervals of 200 episodes: 80% is [74%, 85%], 66% is [59%, 72%], 70% is [63%, 76%]."""
    apart = {"imagined_success": 0.8, "success": 0.66, "episodes": 200.0}
    assert "imagined success is 80% [74%, 85%], and real success 66% [59%, 72%]" in signs.parted(
        apart
    )
    assert signs.parted(apart | {"success": 0.7}) == ""
    assert "parted" in signs.parted(apart | {"imagined_success": 0.66, "success": 0.8})
    assert signs.parted({"success": 0.1, "episodes": 200.0}) == ""


def test_the_contrastive_loss_by_hand() -> None:
    """Of (1, 0), (2, 0) with label 1 and (0, 3) with label 0, at temperature 1/2: the cosines are 1
    and 0, so both positives have log(e^2 / (e^2 + 1)); the negative has none like it."""
    features = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    loss = contrastive_loss(features, torch.tensor([1.0, 1.0, 0.0]), 0.5)
    expected = 2 / 3 * torch.log(1 + torch.exp(torch.tensor(-2.0)))
    assert torch.allclose(loss, expected)


def test_diwa_runs_at_debug_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Play, demonstrations, model, classifier of latents, base policy and DPPO in the model; the
    policy that is saved is one of the real environment, which trained nothing."""
    at = {name: tmp_path / name for name in ("demos", "play", "model", "judge", "base", "diwa")}

    def command(line: str) -> None:
        assert exit_of(*line.format(**at).split()) == 0, line

    collect = "demos collect env=fr3_insert env.horizon=40 demonstrator.quality"
    debug = "env.model={model} env.starts={demos} size=debug device=cpu"
    size = "model.width=16 model.groups=2 model.classes=4 model.hidden=[16] model.length=4"
    command(f"{collect}=0.9 episodes=4 out={{demos}}")
    command(f"{collect}=0.2 episodes=3 success_only=false seed=5 out={{play}}")
    command(
        f"model train demos=[{{demos}},{{play}}] model=recurrent {size} model.most_updates=10 "
        "device=cpu out={model}"
    )
    command(
        "reward classifier {demos} {play} latents={model} views=[latent] contrastive=0.5 "
        "updates=20 out={judge}"
    )
    command(
        f"train env=imagined policy=diffusion learner=imitate demos={{demos}} {debug} steps=20 "
        "out={base}"
    )
    command(
        f"train experiment=fr3_insert_diwa init={{base}} reward.trained={{judge}} {debug} "
        "out={diwa}"
    )
    last = [row for row in read_metrics(at["diwa"]) if "eval/success" in row][-1]
    assert {"eval/imagined_success", "eval/imagined_return", "eval/success"} <= last.keys()
    policy = checkpoint.load_policy(at["diwa"])
    assert isinstance(policy, LatentPolicy) and [*policy.spec.obs] != ["latent"]
    capsys.readouterr()
    command("eval {diwa} env=fr3_insert env.horizon=20 episodes=2 device=cpu")
    assert "imagined" in capsys.readouterr().out
    row = json.loads((at["diwa"] / "evaluations.jsonl").read_text().splitlines()[-1])
    assert row["imagined"] == last["eval/imagined_success"]
