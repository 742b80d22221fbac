"""Every setting of a run, in every training regime: it takes effect, or is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.compose import PACKAGED
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.training.components import RunComponents
from embodied.training.config import REGIMES, RunConfig, read_config, settings_of
from embodied.training.logger import read_metrics
from embodied.training.trainer import Every, intervals
from tests.builders import node_of, random_demos
from tests.training.test_train import run

ENV = {"_target_": "tests.toy_envs.Reach", "num_envs": 4}
LEARNERS: dict[str, dict[str, Any]] = {
    "offline": {"_target_": "embodied.learners.off_policy.sac.Sac", "batch_size": 8},
    "off_policy": {"_target_": "embodied.learners.off_policy.sac.Sac", "batch_size": 8},
    "on_policy": {"_target_": "embodied.learners.on_policy.ppo.Ppo", "horizon": 4, "batch_size": 8},
}
POLICIES = {
    "offline": {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]},
    "off_policy": {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]},
    "on_policy": node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[8]),
}
REWARD = {"_target_": "embodied.rewards.handcrafted.composite.Scaled", "factor": -2.0}
UNIFORM = {"_target_": "embodied.teachers.tasks.uniform.Uniform", "signal": "return"}
PRIORITIZED = {"_target_": "embodied.buffers.prioritized.PrioritizedReplayBuffer"}
TOP = {"_target_": "embodied.buffers.weighted.Top"}
RESIDUAL = node_of("policies.steering.residual.Residual")

# Another value than the default of every setting that a regime can use, and how it is seen in the
# components; `None` where the whole run shows it (`test_a_run_follows`).
SEEN: dict[str, tuple[Any, Any]] = {
    "env": ({**ENV, "num_envs": 2}, lambda c: c.env.num_envs == 2),
    "policy": (None, lambda c: c.policy is not None),
    "learner": (None, lambda c: c.learner.node["batch_size"] == 8),
    "name": ("other", lambda c: c.config.name == "other"),
    "steps": (7, lambda c: c.config.total_steps == 7),
    "reward": (REWARD, lambda c: c.loop.rewards.reward.node["factor"] == -2.0),
    "teacher": (UNIFORM, lambda c: "teacher" in c.loop.stateful),
    "replay": (PRIORITIZED, lambda c: c.loop.buffers.replay.columns == ("index", "weight")),
    "execute": (1, lambda c: c.config.execute == 1),
    "data.utd_ratio": (0.5, lambda c: c.loop.config.utd_ratio == 0.5),
    "data.warmup_steps": (8, lambda c: not c.loop.learning),
    "data.replay_size": (50, lambda c: c.loop.buffers.replay.capacity == 50),
    "data.success_fraction": (0.5, lambda c: c.loop.buffers.success is not None),
}
WITH_DEMOS: dict[str, tuple[Any, Any]] = {
    "demos": (None, lambda c: len(c.episodes) == 4),
    "demo_episodes": (2, lambda c: len(c.episodes) == 2),
    "weighting": (TOP, lambda c: "data/effective_rows" in c.loop.data_metrics),
    "data.demo_fraction": (None, lambda c: len(c.loop.buffers.replay) == 80),
    "data.pretrain_steps": (5, lambda c: c.config.total_steps == 5 + c.config.steps),
    "data.normalize": (False, lambda c: bool(c.policy.encoder.norm.mean.abs().sum() == 0)),
}
# What the whole run shows, or what other files test.
ELSEWHERE = {
    "test_a_run_follows": "out log_every save_every eval_every video seed threads",
    "test_parallel.py, a GPU": "device",
    "test_train.py": "deterministic log resume",
    "test_foreign_columns.py": "instruction",
    "test_task_grid.py": "eval",
    "test_what_has_no_effect_or_no_sense_is_one_line": "data.random_shift",
    "test_dataset_run.py": "demo_memory_mb mapping data.statistics data.held_out",
    "test_pretrain.py": "data.fractions data.pairs finetune init demo_policy_steps",
    "test_dyna.py": "data.imagined",
    "actors/test_actor_runs.py": "data.actors data.max_lag data.when_behind data.actors_on",
    "test_finetune_adopted.py": "copy_base_mb",
    "test_the_clock_ends_a_training": "minutes",
}
REFUSED: dict[str, dict[str, Any]] = {
    "offline": {"reward": REWARD, "teacher": UNIFORM, "replay": PRIORITIZED},
    "off_policy": {},
    "on_policy": {"replay": PRIORITIZED, "weighting": TOP, "demo_episodes": 2, "demos": "demos"},
}


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_demos(tmp_path_factory.mktemp("demos") / "set", 4)


def node(folder: Path, regime: str, demos: str | None, **changes: Any) -> dict[str, Any]:
    data = {k.removeprefix("data."): v for k, v in changes.items() if k.startswith("data.")}
    return {
        "env": ENV,
        "policy": POLICIES[regime],
        "learner": LEARNERS[regime],
        "name": "run",
        "out": str(folder),
        "steps": 32,
        "data": {"regime": regime, **data},
        "demos": demos,
        "eval": {"episodes": 2, "num_envs": 2},
        "video": False,
        "device": "cpu",
        **{key: value for key, value in changes.items() if not key.startswith("data.")},
    }


def made(*given: Any, **changes: Any) -> Any:
    return RunComponents(read_config(node(*given, **changes)))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"data": [2]}, r"data should be a regime \(.*\), not \[2\]"),
        ({"learner": None}, "Learner should be a mapping with _target_, not None"),
        ({"learner": {"gamma": 0.9}}, "has no _target_"),
        ({"policy": [1]}, "policy"),
    ],
)
def test_parts_of_another_kind_are_one_line(changes: dict[str, Any], line: str) -> None:
    """As in a damaged run.yaml."""
    given = {**node(Path("out"), "off_policy", None), "data": {}, **changes}
    with pytest.raises(ConfigError, match=line):
        read_config(given)


def every_setting() -> list[str]:
    own = {f"data.{name}" for kind in REGIMES.values() for name in settings_of(kind)}
    return sorted({*settings_of(RunConfig), *own} - {"data"})


def test_every_setting_is_covered() -> None:
    """A new setting of a run has to be put into one of the tables above."""
    elsewhere = " ".join(ELSEWHERE.values()).split()
    assert set(every_setting()) == {*SEEN, *WITH_DEMOS, *elsewhere}
    groups = {file.name for file in PACKAGED.iterdir() if file.is_dir()}
    chosen = yaml.safe_load((PACKAGED / "train.yaml").read_text())["defaults"]
    chosen = {name for entry in chosen if isinstance(entry, dict) for name in entry}
    chosen = {name.partition("@")[0] for name in chosen}  # env@eval.env
    assert chosen <= groups
    assert chosen - {"experiment", "size", "data"} <= set(settings_of(RunConfig))


@pytest.mark.parametrize("setting", sorted(SEEN | WITH_DEMOS))
@pytest.mark.parametrize("regime", REGIMES)
def test_it_takes_effect_or_is_refused(
    tmp_path: Path, demos: str, regime: str, setting: str
) -> None:
    value, seen = (SEEN | WITH_DEMOS)[setting]
    name = setting.removeprefix("data.")
    foreign = setting.startswith("data.") and name not in settings_of(REGIMES[regime])
    if foreign or setting in REFUSED[regime]:
        given = demos if regime == "offline" or setting == "demos" else None
        changes = {} if setting == "demos" else {setting: value}
        with pytest.raises(ConfigError) as refused:
            made(tmp_path, regime, given, **changes)
        text = str(refused.value)
        assert "\n" not in text and (name in text or "demos" in text)
        return
    given = demos if regime == "offline" or setting in WITH_DEMOS else None
    keep = value is None and setting != "data.demo_fraction"
    changes = {} if keep else {setting: value}
    if setting == "teacher":
        pytest.importorskip("mujoco")
        changes["env"] = node_of("envs.fr3.env.Fr3", task="reach", num_envs=2)
    assert seen(made(tmp_path, regime, given, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.utd_ratio": -1}, "data.utd_ratio=-1"),
        ({"data.demo_fraction": 7}, "data.demo_fraction=7"),
        ({"data.success_fraction": 2}, "data.success_fraction=2"),
        ({"data.replay_size": 0}, "at least 1"),
        ({"data.demo_fraction": 0.25}, "demos=DIR"),
        ({"data.pretrain_steps": 5}, "demos=DIR"),
        ({"data.normalize": True}, "warm-up"),
        ({"demo_episodes": 3}, "demos=DIR"),
        ({"demo_memory_mb": 3}, "demos=DIR"),
        ({"weighting": TOP}, "demos=DIR"),
        ({"data.random_shift": 4}, "image observations"),
        ({"steps": 0}, "steps=0"),
        ({"threads": 0}, "threads=0"),
        ({"execute": 0}, "execute=0"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_one_line(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        made(tmp_path, "off_policy", None, **changes)


@pytest.mark.parametrize(
    ("changes", "fitted"),
    [
        ({}, False),
        ({"data.warmup_steps": 8}, True),
        ({"data.warmup_steps": 8, "data.normalize": False}, False),
        ({"demos": True}, True),
        ({"demos": True, "data.normalize": False}, False),
        ({"demos": True, "data.normalize": False, "data.pretrain_steps": 1}, False),
        ({"demos": True, "init": True}, False),
        ({"demos": True, "init": True, "data.pretrain_steps": 1}, False),
        ({"demos": True, "init": True, "data.normalize": True}, True),
        ({"data.warmup_steps": 8, "init": True, "finetune": RESIDUAL}, True),
        ({"demos": True, "regime": "offline"}, True),
        ({"demos": True, "regime": "offline", "init": True}, False),
    ],
)
def test_observations_are_normalised_where_something_is_known(
    tmp_path: Path, demos: str, changes: dict[str, Any], fitted: bool
) -> None:
    """But a policy that goes on from a run keeps what it was trained with."""
    given = demos if changes.get("demos") else None
    more = {key: value for key, value in changes.items() if key != "demos"}
    if "init" in more:
        run(node(tmp_path / "before", "off_policy", None))
        more["init"] = str(tmp_path / "before")
    regime = more.pop("regime", "off_policy")
    components = made(tmp_path / "run", regime, given, **more)
    norm = components.learner.policy.state_dict()["encoder.norm.mean"]
    assert (bool(norm.any()) or getattr(components.loop, "fit_after_warmup", False)) == fitted
    new = components.learner.critic.encoder.norm.mean
    assert regime == "off_policy" or new.any(), "a critic is new in any case"


def test_demonstrations_have_the_rewards_of_the_run(tmp_path: Path, demos: str) -> None:
    """As in off-policy training; a learner that compares them with its own had two units."""
    learner = node_of("learners.on_policy.hnpg.Hnpg", horizon=8, batch_size=8)
    plain, scaled = (
        made(tmp_path, "on_policy", demos, learner=learner, reward=reward).learner.shown["reward"]
        for reward in (None, REWARD)
    )
    assert torch.equal(scaled, -2 * plain) and bool(plain.any())
    curious = node_of("rewards.intrinsic.rnd.Rnd")
    with pytest.raises(ConfigError, match="recorded rewards"):
        made(tmp_path, "on_policy", demos, learner=learner, reward=curious)


def test_the_clock_ends_a_training(tmp_path: Path) -> None:
    """And a resume goes on, for as long again."""
    short = {"steps": 10**9, "minutes": 0.02, "data.replay_size": 99}
    asked = node(tmp_path, "off_policy", None, **short)
    run(asked)
    first = int(checkpoint.find(tmp_path).name)
    run(asked | {"resume": str(tmp_path)})
    assert 0 < first < int(checkpoint.find(tmp_path).name)


@pytest.mark.parametrize("regime", REGIMES)
def test_a_run_follows(tmp_path: Path, demos: str, regime: str) -> None:
    """Its folder, intervals and seed; the settings are all in run.yaml."""
    given = demos if regime == "offline" else None
    every = {"log_every": 8, "save_every": 16, "eval_every": 16, "seed": 3, "threads": 2}
    run(node(tmp_path, regime, given, **every))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["00000016", "00000032"]
    rows = read_metrics(tmp_path)
    updated = {16, 32} if regime == "on_policy" else {8, 16, 24, 32}
    assert {row["step"] for row in rows} >= updated
    assert [row["step"] for row in rows if "eval/return" in row] == [16, 32]
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert set(written) == {"format", *settings_of(RunConfig)} and written["seed"] == 3
    assert set(written["data"]) == {"regime", *settings_of(REGIMES[regime])}


@pytest.mark.parametrize(
    ("envs", "log", "evaluate", "save"),
    [(1, 1_000, 10_000, 10_000), (4096, 40_960, 409_600, 409_600)],
)
def test_intervals_that_are_not_given_grow_with_the_environments(
    envs: int, log: int, evaluate: int, save: int
) -> None:
    """At 4,096 environments a line in each vector step and a checkpoint in every third is noise."""
    assert intervals(None, None, None, envs) == Every(log, evaluate, save)
    assert intervals(7, 0, 5, envs) == Every(7, 0, 5)
