"""What the command line shows of settings; one name for the output folder; no needless imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from embodied.commands.train import facts, fresh
from embodied.compose import PACKAGED, compose, options
from embodied.core.build import ConfigError
from embodied.core.config_fields import settings_of
from embodied.settings_tables import command_rows, regime_rows
from embodied.training.config import read_config
from tests.test_cli import Shell, embodied

__all__ = ["embodied"]  # a fixture


def test_alone_it_helps_and_it_has_a_version(embodied: Shell) -> None:
    outcome = embodied()
    assert outcome.code == 0 and "usage: embodied" in outcome.out and "train" in outcome.out
    assert embodied("--version").out.startswith("embodied 0.")


def test_train_help_lists_every_setting(embodied: Shell) -> None:
    shown = embodied("train", "--help").out
    rows = [*command_rows(PACKAGED / "train.yaml"), *regime_rows([PACKAGED])]
    assert all(row.key in shown and row.value in shown for row in rows)
    assert not [row.key for row in rows if not row.says], "a sentence each"
    config = settings_of("embodied.training.config.RunConfig") or []
    top = {row.key.partition("=")[0].partition(".")[0] for row in rows}
    assert {setting.name for setting in config} <= top


def test_show_and_list_show_one_option(embodied: Shell) -> None:
    shown = embodied("show", "learner=sac").out
    assert embodied("list", "sac").out == shown
    line = next(line for line in shown.splitlines() if "learner.gamma" in line)
    assert line.split()[1] == "0.99" and "discount" in line


def test_show_prints_the_configuration_and_runs_nothing(
    embodied: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("learner.gamma=0.9", "learner.batch_size=1e2", "steps=1e4")
    node = yaml.safe_load(embodied("show", "experiment=pendulum_sac", *words).out)
    assert node["learner"]["gamma"] == 0.9 and node["out"] == "outputs/pendulum_sac-0"
    steps = read_config(node).steps
    assert steps == 10_000 and isinstance(steps, int)
    assert not list(tmp_path.iterdir())


def test_plurals(embodied: Shell) -> None:
    listed = embodied("list").out
    for word in ("replays", "chats", "policies", "data", "envs"):
        assert f"\n{word} " in listed
        assert embodied("list", word).code == 0


ONE_STEP = r"/learner: (sac|rlpd|redq|cql|iql|rebrac)\b"
"""Learners whose experiments decide once a step (on a base policy only `residual` does)."""
SPARSE = r"/env: (fr3|ogbench)_"
NOT_SPARSE = r"/reward: |  reward: (?!sparse)|/finetune: (?!residual)"


def test_experiments_with_sparse_rewards_have_n_step_returns() -> None:
    found: dict[str, int] = {}
    for name, file in options("experiment", [PACKAGED]).items():
        text = file.read_text()
        if all(re.search(has, text) for has in (ONE_STEP, SPARSE)) and not re.search(
            NOT_SPARSE, text
        ):
            found[name] = yaml.safe_load(text)["learner"].get("n_step", 1)
    assert len(found) > 8 and all(5 <= n <= 10 for n in found.values()), found


def test_the_output_folder_has_one_name() -> None:
    assert fresh(["experiment=pendulum_sac", "out=here"], [])["out"] == "here"
    collected = compose("collect", ["env=fr3_lift", "demonstrator=lift", "out=here"]).node
    assert collected["out"] == "here"
    with pytest.raises(ConfigError, match='no setting "output"'):
        fresh(["experiment=pendulum_sac", "output=here"], [])


def test_out_is_understood_where_it_was_an_option(embodied: Shell, tmp_path: Path) -> None:
    outcome = embodied("export", tmp_path, f"out={tmp_path}/x")
    assert outcome.code == 2 and "--to" not in outcome.err and "unknown" not in outcome.err


def test_the_header_says_what_is_rewarded_and_taught() -> None:
    words = ["experiment=franka_reach_vlm", "reward.prompt=touch the ball"]
    shown = facts(read_config(fresh(words, [])))
    assert "touch the ball" in shown["reward"]
    taught = facts(read_config(fresh(["experiment=fr3_reach_far", "teacher=alpgmm"], [])))
    assert taught["teacher"].startswith("AlpGmm")


MISTAKES = [
    "trian experiment=pendulum_sac",
    "train experiment=pendulum_sc",
    "train experiment=pendulum_sac stepps=3",
    "train experiment=pendulum_sac learner.gama=1",
    "train experiment=pendulum_sac policy.hidden=256",
    "train pendulum_sac",
    "train --seed 3",
    "eval no_run",
    "view no_run",
    "view --compare no_run",
    "deploy robot=frnka demonstrator=reach",
    "deploy robot=franka_sim policy=no_run demonstrator=reach",
    "demos collect env=fr3_lfit out=x",
    "show learner=sca",
    "list learnerz",
    "check env pendulm",
    "study no_file.yaml",
    "sweep experiment=pendulum_sac",
    "adopt no_checkpoint",
    "serve no_run",
    "export no_run --to x",
    "resume no_run",
    "train resume=no_run",
    "train experiment=fr3_lift_dsrl init=no_run",
    "train experiment=fr3_lift_flow demos=no_data",
    "demos info no_data",
    "demos drop no_data episodes=1 out=x",
    "reward label no_data reward=shaping out=x",
    "reward compare own no_reward env=fr3_reach",
]


IN_TURN = """
import sys
from embodied.cli import main
for line in sys.stdin.read().splitlines():
    try:
        main(line.split())
    except SystemExit as stop:
        assert stop.code == 2, line
    assert "torch" not in sys.modules, line
"""


def test_a_mistake_imports_no_torch() -> None:
    """Importing it takes longer than everything else."""
    words = [sys.executable, "-c", IN_TURN]
    done = subprocess.run(words, input="\n".join(MISTAKES), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) >= len(MISTAKES), "each says in a line what is wrong"
