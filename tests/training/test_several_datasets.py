"""Offline training from several datasets: fractions of a batch, the column `source`, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.buffers.source import Mixture
from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.datasets.collect import CollectConfig, collect
from embodied.learners.imitation import behavior_cloning
from embodied.learners.off_policy import sac
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.offline import OfflineLoop
from tests.training.test_train import run, same, settings, weights


class SourceSac(sac.Sac):
    """SAC that reports which datasets its batch is of."""

    extra_columns = ("source",)

    def update(self, batch: Tensors) -> Tensors:
        assert batch["source"].dtype == torch.int64
        share = (batch["source"] == 1).float().mean()
        return {**super().update(batch), "share": share}


class SourceCloning(behavior_cloning.BehaviorCloning):
    """Behavior cloning whose batches say which dataset they are of."""

    extra_columns = ("source",)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two datasets of 2 and 6 episodes."""
    folders: list[str] = []
    for count in (2, 6):
        folder = str(tmp_path_factory.mktemp("demos") / f"of_{count}")
        random = {"_target_": "embodied.policies.random.Random"}
        env = {"_target_": "tests.toy_envs.Reach", "num_envs": 2}
        how = CollectConfig(env, random, count, folder, 4, success_only=False)
        collect(how, lambda kept, played: None)
        folders.append(folder)
    return folders


def node(folder: Path, demos: Any, fractions: list[float] | None = None, **more: Any) -> Any:
    made = settings(folder, "offline", demos=demos, steps=8, log_every=1, **more)
    made["learner"]["_target_"] = f"{__name__}.SourceSac"
    made["data"]["fractions"] = fractions
    return made


def loop_of(made: Any) -> OfflineLoop:
    loop = RunComponents(read_config(made)).loop
    assert isinstance(loop, OfflineLoop)
    return loop


def test_every_batch_has_the_fractions(tmp_path: Path, demos: list[str]) -> None:
    loop = loop_of(node(tmp_path, demos, [0.75, 0.25]))
    assert isinstance(loop.source, Mixture)
    assert loop.data_metrics == {f"data/rows_{n}": len(loop.source.sources[n]) for n in (0, 1)}
    assert len(loop.source.sources[1]) > len(loop.source.sources[0])
    for _ in range(3):
        batch = loop.source.sample(32)
        assert batch["source"].tolist() == [0, 0, 0, 1] * 8
        assert float(loop.learner.update(batch)["share"]) == 0.25


def test_without_fractions_rows_are_of_all_datasets_by_their_lengths(
    tmp_path: Path, demos: list[str]
) -> None:
    loop = loop_of(node(tmp_path, demos))
    of_second = loop.source.sample(4000)["source"].float().mean()
    assert 0.65 < float(of_second) < 0.85  # 6 of 8 episodes, all of about the same length
    assert not loop_of(node(tmp_path, demos[1])).source.sample(64)["source"].any()


def test_chunks_have_the_column_too(tmp_path: Path, demos: list[str]) -> None:
    made = node(tmp_path, demos, [0.5, 0.5])
    made["learner"] = {"_target_": f"{__name__}.SourceCloning", "batch_size": 8}
    made["policy"] = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8], "chunk": 2}
    assert loop_of(made).source.sample(8)["source"].tolist() == [0, 1] * 4


def test_resume_is_exact(tmp_path: Path, demos: list[str]) -> None:
    run(node(tmp_path / "whole", demos, [0.5, 0.5]))
    run(node(tmp_path / "half", demos, [0.5, 0.5]) | {"steps": 4})
    run(node(tmp_path / "half", demos, [0.5, 0.5]) | {"resume": str(tmp_path / "half")})
    run(node(tmp_path / "other", demos, [0.25, 0.75]))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "other"))


def test_a_weighting_acts_within_each_dataset(tmp_path: Path, demos: list[str]) -> None:
    made = node(tmp_path, demos, [0.5, 0.5], weighting={"_target_": f"{WEIGHTED}.Return"})
    batch = loop_of(made).source.sample(32)
    assert batch["source"].tolist() == [0, 1] * 16
    made["weighting"] = {"_target_": f"{WEIGHTED}.Top", "share": 0.01}
    with pytest.raises(ConfigError, match=r"dataset [01] of demos has no step to train on"):
        loop_of(made)


WEIGHTED = "embodied.buffers.weighted"


@pytest.mark.parametrize(
    ("fractions", "says"),
    [
        ([0.5], "one share of a batch for each of the 2 datasets"),
        ([0.5, 0.25, 0.25], "for each of the 2 datasets"),
        ([0.5, 0.4], "sum to 1"),
        ([1.0, 0.0], r"data\.fractions=0\.0 should be above 0"),
        ([0.3, 0.7], "batch_size=32 should be a multiple of 10"),
        ([0.005, 0.995], "denominators of at most 64"),
    ],
)
def test_wrong_fractions_are_refused(
    tmp_path: Path, demos: list[str], fractions: list[float], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        loop_of(node(tmp_path, demos, fractions))
    assert "\n" not in str(refused.value)


def test_online_training_has_no_such_column(tmp_path: Path) -> None:
    made = settings(tmp_path)
    made["learner"]["_target_"] = f"{__name__}.SourceSac"
    with pytest.raises(ConfigError, match="only offline training has"):
        RunComponents(read_config(made))
