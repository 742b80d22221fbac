"""What a run's log says is going wrong: values that still rise, imagined success that parts from
real success; DiWA from its command lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core import checkpoint
from embodied.core.tensors import Tensors
from embodied.learners.off_policy.sac import Sac
from embodied.models.latent_policy import LatentPolicy
from embodied.rewards.success.model import contrastive_loss
from embodied.training.logger import read_metrics
from embodied.training.warning_signs import METRIC, parted, rise, warning
from tests.builders import exit_of, random_demos
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


@pytest.mark.parametrize("count", [10, 100])
def test_noise_hardly_ever_counts_and_a_noisy_rise_does(count: int) -> None:
    random = np.random.default_rng(0)
    drawn = random.normal(size=(2000, count)).tolist()
    assert sum(rise(range(count), values) is not None for values in drawn) < 20
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


def test_where_they_part_by_hand() -> None:
    """Wilson intervals of 200 episodes: 80% is [74%, 85%], 66% is [59%, 72%], 70% is [63%, 76%]."""
    apart = {"imagined_success": 0.8, "success": 0.66, "episodes": 200.0}
    assert "imagined success is 80% [74%, 85%], and real success 66% [59%, 72%]" in parted(apart)
    assert parted(apart | {"success": 0.7}) == ""
    assert "parted" in parted(apart | {"imagined_success": 0.66, "success": 0.8})
    assert parted({"success": 0.1, "episodes": 200.0}) == ""


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
