"""Runs from a dataset without an environment, and runs of an environment from a foreign dataset."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embodied.commands.eval import evaluate_run
from embodied.commands.train import train
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.spec import SpecMismatch
from embodied.datasets.lerobot import pictures
from embodied.datasets.lerobot.reader import DatasetError, read_episodes
from embodied.evaluation.held_out import HeldOut
from embodied.reports.run_report import summary
from embodied.training.logger import read_metrics
from tests.builders import Patch, exit_of
from tests.datasets.test_editing import DATA, rewrite
from tests.foreign import DEGREES, MAPPING, SPEC, foreign_two_gap

SMALL = ("policy.width=32", "policy.depth=1", "learner.batch_size=64", "log_every=20")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_two_gap(tmp_path_factory.mktemp("data") / "their_arm", 20)


@pytest.fixture(scope="module")
def filmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_two_gap(tmp_path_factory.mktemp("data") / "filmed", 4, camera=True)


@pytest.fixture(scope="module")
def mapping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mapping") / "gap.yaml"
    file.write_text(MAPPING)
    return file


def train_on(data: Path | str, out: Path, *words: str) -> Path:
    """Behaviour cloning of `data` by a flow policy, which other words may replace."""
    return train([f"demos={data}", "policy=flow", "learner=imitate", f"out={out}", *words])


@pytest.fixture(scope="module")
def cloned(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "cloned"
    return train_on(data, folder, "steps=120", "eval_every=40", "save_every=40", *SMALL)


def test_a_number_that_is_not_finite_is_named_and_the_advice_works(
    tmp_path: Path, data: Path
) -> None:
    broken, mended = tmp_path / "broken", tmp_path / "mended"
    shutil.copytree(data, broken)
    length = int(read_episodes(broken).length[0])

    def spoil(rows: list[list[float]]) -> list[list[float]]:
        rows[length + 3][1] = float("nan")
        return rows

    rewrite(broken / DATA, "action", spoil)
    where = r"episode 1, step 3: action\[y.vel\] is not finite; embodied demos check"
    with pytest.raises(DatasetError, match=where) as caught:
        train_on(broken, tmp_path / "run", "steps=2", *SMALL)
    advice = re.search(r"embodied (demos check .* fix=)NEW_FOLDER", str(caught.value))
    assert advice is not None
    exit_of(*f"{advice[1]}{mended}".split())
    train_on(mended, tmp_path / "run", "steps=2", *SMALL)


def test_the_spec_is_the_datasets_and_actions_are_physical(cloned: Path) -> None:
    spec = checkpoint.load_spec(cloned)
    assert spec == SPEC and spec.text == "pass the wall"
    assert (spec.act.names, spec.obs["state"].names) == (SPEC.act.names, ("x.pos", "y.pos"))
    policy = checkpoint.load_policy(cloned)
    low, high = policy.node["action"]["low"], policy.node["action"]["high"]
    assert max(high) == pytest.approx(DEGREES, rel=0.02) and min(low) < -20
    actions, _ = policy.act({"state": torch.tensor([[60.0, 500.0]])}, {}, policy.sample_noise(1))
    assert actions.abs().max() > 10


def test_it_is_evaluated_on_held_out_episodes(cloned: Path) -> None:
    rows = [row for row in read_metrics(cloned) if "eval/loss" in row]
    assert [row["step"] for row in rows] == [40, 80, 120]
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert {"eval/action_error", "eval/error_x.vel", "eval/error_y.vel"} <= rows[-1].keys()
    assert read_metrics(cloned)[0]["data/held_out_episodes"] == 2
    page = (cloned / "report.html").read_text()
    assert "held-out loss" in page and "action error" in page


def test_the_best_policy_is_saved_not_the_last(
    data: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    losses = iter([2.0, 1.0, 3.0])
    measured = HeldOut.evaluate

    def rising(*args: Any) -> dict[str, float]:
        return {**measured(*args), "loss": next(losses)}

    monkeypatch.setattr(HeldOut, "evaluate", rising)
    folder = train_on(data, tmp_path / "run", "steps=60", "eval_every=20", "save_every=20", *SMALL)
    rows = [row for row in read_metrics(folder) if "eval/loss" in row]
    assert [row["eval/best_step"] for row in rows] == [20, 40, 40]
    saved = [load_file(folder / f"checkpoints/000000{n}/policy.safetensors") for n in (20, 40, 60)]
    same = [all(torch.equal(a[key], saved[1][key]) for key in a) for a in saved]
    assert same == [False, True, True]
    assert f"at {40} (the best, saved)" in summary(folder)


def test_a_resumed_run_keeps_the_statistics(data: Path, tmp_path: Path, cloned: Path) -> None:
    """The cosine decay of the learning rate ends elsewhere: the weights may differ."""
    run = train_on(data, tmp_path / "run", "steps=80", "eval_every=40", "save_every=40", *SMALL)
    train([f"resume={run}", "steps=120"])
    whole, parts = (checkpoint.load_policy(each) for each in (cloned, run))
    assert whole.node == parts.node and whole.state_dict().keys() == parts.state_dict().keys()


@pytest.mark.parametrize("policy", ["gaussian", "act", "diffusion"])
def test_other_policies_imitate_too(policy: str, filmed: Path, tmp_path: Path) -> None:
    words = (f"policy={policy}", "size=debug", "steps=3", "learner.batch_size=4")
    folder = train_on(filmed, tmp_path / "run", *words)
    camera = checkpoint.load_policy(folder).spec.obs["top"]
    assert camera.shape == (16, 24, 3) and camera.is_image
    assert any("eval/loss" in row for row in read_metrics(folder))


@pytest.mark.parametrize("statistics", ["minmax", "mean_std"])
def test_other_statistics(statistics: str, data: Path, tmp_path: Path) -> None:
    words = ("size=debug", "steps=2", f"data.statistics={statistics}")
    reach = checkpoint.load_policy(train_on(data, tmp_path / "run", *words)).node["reach"]
    assert reach == pytest.approx(1.0) if statistics == "minmax" else reach > 1.2


def test_several_datasets_at_once(data: Path, tmp_path: Path) -> None:
    both = f"[{data},{foreign_two_gap(tmp_path / 'other', 5)}]"
    folder = train_on(both, tmp_path / "run", "size=debug", "steps=2")
    assert read_metrics(folder)[0]["data/held_out_episodes"] == 2


def test_the_run_acts_in_an_environment_by_a_mapping(cloned: Path, mapping: Path) -> None:
    words = ["env=two_gap", f"mapping={mapping}", "episodes=16", "policy.base.steps=2"]
    row = evaluate_run(cloned, words, [])
    assert row["episodes"] == 16
    with pytest.raises(SpecMismatch, match="mapping=FILE"):
        evaluate_run(cloned, ["env=two_gap", "episodes=2"], [])
    with pytest.raises(ConfigError, match=r"without an environment: env=NAME"):
        evaluate_run(cloned, [], [])


def test_a_foreign_dataset_trains_in_an_environment(
    data: Path, mapping: Path, tmp_path: Path
) -> None:
    words = ("env=two_gap", f"mapping={mapping}", "steps=150", "eval.episodes=8", "video=false")
    folder = train_on(data, tmp_path / "run", *words, *SMALL)
    policy = checkpoint.load_policy(folder)
    assert policy.spec.act.high == 1.0
    actions, _ = policy.act({"state": torch.tensor([[0.06, 0.5]])}, {}, policy.sample_noise(1))
    assert 0.3 < actions[0, 0, 0] <= 1.0  # full speed ahead
    assert read_metrics(folder)[-1]["eval/episodes"] == 8


def test_offline_rl_learns_from_it_too(data: Path, mapping: Path, tmp_path: Path) -> None:
    words = ("env=two_gap", f"mapping={mapping}", "size=debug", "steps=4")
    folder = train_on(data, tmp_path / "run", *words, "policy=gaussian", "learner=iql")
    assert checkpoint.load_spec(folder).obs["state"].high == 1.0


def test_the_run_is_a_base_for_reinforcement_learning(
    cloned: Path, mapping: Path, tmp_path: Path
) -> None:
    words = ("experiment=two_gap_dsrl", f"init={cloned}", f"mapping={mapping}", "size=debug")
    folder = train([*words, f"out={tmp_path / 'run'}"])
    policy = checkpoint.load_policy(folder)
    assert policy.node["base"]["_target_"] == "embodied.policies.wrappers.translated.Mapped"
    assert policy.spec.act.high == 1.0
    with pytest.raises(SpecMismatch, match="mapping=FILE"):
        train(["experiment=two_gap_dsrl", f"init={cloned}", f"out={tmp_path / 'no'}"])
    own = (*words[1:], f"out={tmp_path / 'no'}")
    with pytest.raises(ConfigError, match=r"trained with env=\) can be fine-tuned, not Mapped"):
        train(["experiment=two_gap_dppo", *own])
    with pytest.raises(ConfigError, match=r"by another method .* or an experiment of that method"):
        train([words[0], "finetune=dppo", *own])


ELEMENTS = "action: {elements: [x, y]}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "obs: {state: {name: state, elements: [x, y]}}\n"
            "action: {low: [-1, -1], high: [1, 1], elements: [x, y]}",
            r"beyond the mapping's action.low.*45",
        ),
        (ELEMENTS, "obs.state is x, y here and x.pos, y.pos there: write state: {name: state, "),
        ("action: {low: [-1], high: [1]}", "should have 2 numbers"),
        (f"obs: {{state: observation.tip}}\n{ELEMENTS}", "there is no tip .*NAME_THERE"),
        ("obs: {stat: observation.state}", 'obs.stat is no observation here.*"state"'),
    ],
)
def test_a_mismatch_is_one_line(text: str, says: str, data: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        train_on(data, tmp_path / "run", "env=two_gap", f"mapping={wrong}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("policy=gaussian learner=sac", "can be imitated, and this learner does not"),
        ("policy=gaussian learner=iql", "give env=NAME and mapping=FILE"),
        ("mapping=x.yaml", "mapping needs an environment"),
        ("data.held_out=2", "data.held_out=2"),
        ("data.statistics=median", "data.statistics"),
        ("env=two_gap", "mapping=FILE names .*leave env= out"),
        ("env=two_gap data.statistics=minmax", "data.statistics has no effect with env="),
    ],
)
def test_what_a_dataset_alone_cannot_do_is_one_line(
    words: str, says: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, SpecMismatch), match=says) as caught:
        train_on(data, tmp_path / "run", *words.split())
    assert "\n" not in str(caught.value)


def test_without_an_environment_and_without_data_it_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"no experiment is given.*demos=DIR"):
        train(["policy=flow", "learner=imitate"])


def test_imitation_is_the_same_bit_by_bit(filmed: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Whether pictures are in memory or are decoded when they are sampled."""
    pytest.importorskip("av")
    real, loads = pictures.load_all, []

    def counting(all_: Sequence[pictures.LazyPictures]) -> list[torch.Tensor]:
        loads.extend(all_)
        return real(all_)

    def trained(name: str, memory: float) -> tuple[dict[str, Any], list[float]]:
        loads.clear()
        out = train_on(filmed, tmp_path / name, *words, f"demo_memory_mb={memory}")
        losses = [row["eval/loss"] for row in read_metrics(out) if "eval/loss" in row]
        return load_file(out / "checkpoints" / "00000008" / "policy.safetensors"), losses

    monkeypatch.setattr(pictures, "load_all", counting)
    words = ["size=debug", "steps=8", "learner.batch_size=4", "eval_every=4", "data.random_shift=2"]
    whole, losses = trained("whole", 2000)
    assert not loads and len(losses) == 2
    lazy, again = trained("lazy", 0.05)
    assert len(loads) >= 8 and losses == again and whole.keys() == lazy.keys()
    assert all(torch.equal(value, lazy[key]) for key, value in whole.items())
