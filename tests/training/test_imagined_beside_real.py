"""DiWA from its command lines; imagined success beside real success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from embodied.cli import main
from embodied.core import checkpoint
from embodied.models.latent_policy import LatentPolicy
from embodied.rewards.success.model import contrastive_loss
from embodied.training.logger import read_metrics
from embodied.training.run_evaluation import parted


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


def run(*words: str | Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    assert stopped.value.code == 0, words


def test_diwa_runs_at_debug_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Play, demonstrations, model, classifier of latents, base policy and DPPO in the model; the
    policy that is saved is one of the real environment, which trained nothing."""
    collect = ["demos", "collect", "env=fr3_insert", "env.horizon=40"]
    run(*collect, "demonstrator.quality=0.9", "episodes=4", f"out={tmp_path / 'demos'}")
    other = ["demonstrator.quality=0.2", "episodes=3", "success_only=false", "seed=5"]
    run(*collect, *other, f"out={tmp_path / 'play'}")
    demos = f"demos=[{tmp_path / 'demos'},{tmp_path / 'play'}]"
    size = ["model.width=16", "model.groups=2", "model.classes=4", "model.hidden=[16]"]
    model = ["model=recurrent", *size, "model.most_updates=10", "model.length=4"]
    run("model", "train", demos, *model, "device=cpu", f"out={tmp_path / 'model'}")
    seen = [f"latents={tmp_path / 'model'}", "views=[latent]", "contrastive=0.5", "updates=20"]
    data = [tmp_path / "demos", tmp_path / "play"]
    run("reward", "classifier", *data, *seen, f"out={tmp_path / 'classifier'}")
    env = [f"env.model={tmp_path / 'model'}", f"env.starts={tmp_path / 'demos'}"]
    debug = [*env, "size=debug", "device=cpu"]
    base = ["env=imagined", "policy=diffusion", "learner=imitate", f"demos={tmp_path / 'demos'}"]
    run("train", *base, *debug, "steps=20", f"out={tmp_path / 'base'}")
    tuned = [f"init={tmp_path / 'base'}", f"reward.trained={tmp_path / 'classifier'}"]
    run("train", "experiment=fr3_insert_diwa", *tuned, *debug, f"out={tmp_path / 'diwa'}")
    last = [row for row in read_metrics(tmp_path / "diwa") if "eval/success" in row][-1]
    assert {"eval/imagined_success", "eval/imagined_return", "eval/success"} <= last.keys()
    policy = checkpoint.load_policy(tmp_path / "diwa")
    assert isinstance(policy, LatentPolicy) and [*policy.spec.obs] != ["latent"]
    capsys.readouterr()
    run("eval", tmp_path / "diwa", "env=fr3_insert", "env.horizon=20", "episodes=2", "device=cpu")
    assert "imagined" in capsys.readouterr().out
    row = json.loads((tmp_path / "diwa" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert row["imagined"] == last["eval/imagined_success"]
