"""Runs that begin with data: pretraining, a replay that demonstrations begin, purely offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.datasets.collect import CollectConfig, collect
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.logger import read_metrics
from embodied.training.off_policy import OffPolicyLoop
from embodied.training.trainer import Trainer
from tests.builders import node_of
from tests.training.test_train import flat, run, same, settings, weights


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two sets of 4 and 8 episodes of 20 steps, by random actions."""
    folders = []
    for seed, episodes in ((0, 4), (1, 8)):
        folders.append(str(tmp_path_factory.mktemp("demos") / "set"))
        config = CollectConfig(
            env={"_target_": "tests.toy_envs.Reach"},
            demonstrator={"_target_": "embodied.policies.random.Random"},
            episodes=episodes,
            out=folders[-1],
            num_envs=4,
            seed=seed,
            success_only=False,
        )
        collect(config, lambda kept, played: None)
    return folders


def node(folder: Path, demos: Any, **changes: Any) -> dict[str, Any]:
    return settings(folder, demos=demos, warmup_steps=0, pretrain_steps=60, steps=120, **changes)


def parts(made: dict[str, Any]) -> RunComponents:
    return RunComponents(read_config(made))


def test_the_clock_counts_updates_and_then_steps(tmp_path: Path, demos: list[str]) -> None:
    run(node(tmp_path / "run", demos[0], eval_every=60, log_every=20))
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "eval/return" in row] == [60, 120, 180]
    learned = [row["step"] for row in rows if "train/critic_loss" in row]
    assert learned == list(range(20, 181, 20))
    # No episode was played in the first 60: they were updates.
    assert min(row["step"] for row in rows if "train/return" in row) > 60
    assert checkpoint.find(tmp_path / "run").name == "00000180"


@pytest.mark.parametrize("cut", [40, 100])
@pytest.mark.parametrize("fraction", [0.5, None])
def test_resume_is_exact_before_and_after(
    tmp_path: Path, demos: list[str], cut: int, fraction: float | None
) -> None:
    """Interrupted while pretraining (40 of 60) or while acting: the same run in the end."""
    run(node(tmp_path / "whole", demos, demo_fraction=fraction))
    half = node(tmp_path / "half", demos, demo_fraction=fraction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "running", property(lambda self: self.step < cut))
        run(half)
    assert checkpoint.find(tmp_path / "half").name == f"{cut:08d}"
    run(half | {"resume": str(tmp_path / "half")})
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))
    for name in ("learner", "loop"):
        whole, again = (checkpoint.load_state(tmp_path / f, name) for f in ("whole", "half"))
        assert flat(whole) == flat(again)


@pytest.mark.parametrize("cut", [100, 152])
def test_rows_completed_in_hindsight_resume_too(tmp_path: Path, demos: list[str], cut: int) -> None:
    """Cal-QL's rows wait for their returns: those of running episodes are saved as they wait."""
    calql = {"_target_": "embodied.learners.offline.calql.CalQl", "hidden": [32], "samples": 2}
    learner = calql | {"batch_size": 16}
    run(node(tmp_path / "whole", demos, learner=learner, data="off_policy"))
    half = node(tmp_path / "half", demos, learner=learner, data="off_policy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "running", property(lambda self: self.step < cut))
        run(half)
    run(half | {"resume": str(tmp_path / "half")})
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))
    whole, again = (checkpoint.load_state(tmp_path / f, "loop") for f in ("whole", "half"))
    assert flat(whole) == flat(again)
    # 30 of 120 steps a row: one episode of 20 is stored, 10 steps of the next one wait.
    assert len(whole["loop"]["replay"]["rows"]["returns"]) == 80
    assert len(whole["loop"]["trajectory_columns"]["env"]) == 40


def test_demonstrations_begin_the_replay(tmp_path: Path, demos: list[str]) -> None:
    """240 rows of 12 episodes, the older set first, then what the run adds, beside them."""
    made = parts(node(tmp_path / "run", demos, demo_fraction=None))
    assert isinstance(made.loop, OffPolicyLoop)
    buffers = made.loop.buffers
    assert buffers.source is buffers.replay is buffers.demos
    assert len(buffers.replay) == 240 and buffers.replay.capacity == 240 + 300
    assert made.episodes is not None
    first = buffers.replay.take(torch.arange(240))
    assert torch.equal(first["action"], made.episodes.steps["action"])
    mean = made.episodes.steps["obs/state"].mean(0)
    fitted = made.learner.policy.state_dict()["encoder.norm.mean"]
    torch.testing.assert_close(fitted, mean)  # before any update


def without_source(steps: Tensors) -> Tensors:
    """The steps without the position of their dataset among `demos`."""
    return {key: value for key, value in steps.items() if key != "source"}


def test_several_sets_are_read_as_one(tmp_path: Path, demos: list[str]) -> None:
    both = parts(node(tmp_path / "run", demos)).episodes
    one, two = (parts(node(tmp_path / "run", path)).episodes for path in demos)
    assert both is not None and one is not None and two is not None
    assert len(both) == 12 and both.length.tolist() == [20] * 12
    assert both.start.tolist() == [20 * number for number in range(12)]
    for number, (part, at) in {3: (one, 3), 4: (two, 0), 11: (two, 7)}.items():
        whole, own = both.episode(number), part.episode(at)
        assert set(whole["source"].tolist()) == {0 if part is one else 1}
        assert same(without_source(whole), without_source(own))
    first = parts(node(tmp_path / "run", demos, demo_episodes=2)).episodes
    assert first is not None and same(  # two of each
        without_source(first.episode(3)), without_source(two.episode(1))
    )


def test_a_learner_with_replay_learns_offline(tmp_path: Path, demos: list[str]) -> None:
    """`steps` are updates, nothing is played, and half-way resumes exactly."""
    made = settings(tmp_path / "whole", demos=demos, data="offline", steps=40, log_every=10)
    run(made)
    rows = read_metrics(tmp_path / "whole")
    assert [row["step"] for row in rows if "train/critic_loss" in row] == [10, 20, 30, 40]
    assert not any("train/return" in row for row in rows)
    half = made | {"out": str(tmp_path / "half")}
    run(half | {"steps": 20})
    run(half | {"resume": str(tmp_path / "half")})
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pretrain_steps": 10}, "updates from demonstrations"),
        ({"pretrain_steps": 10, "demos": "{}", "data": "offline"}, "no effect in offline"),
        ({"data": "offline"}, "needs demonstrations"),
        (
            {
                "data": "off_policy",
                "learner": node_of("learners.imitation.behavior_cloning.BehaviorCloning"),
            },
            "cannot use a replay buffer",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(
    tmp_path: Path, demos: list[str], changes: dict[str, Any], says: str
) -> None:
    if "demos" in changes:
        changes = changes | {"demos": demos[0]}
    with pytest.raises(ConfigError, match=says):
        run(settings(tmp_path / "run", **changes))
