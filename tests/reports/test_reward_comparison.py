"""Two rewards on the same episodes, and datasets labelled anew: through the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.cli import parse
from embodied.commands import checked
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf
from embodied.datasets.lerobot.reader import DatasetError, EpisodeWriter, read_episodes
from embodied.datasets.transitions import transitions
from embodied.policies.random import Config as RandomConfig
from embodied.policies.random import Random
from embodied.reports.datasets import RECORDED, rows_of
from embodied.reports.reward_comparison import collect_episodes
from tests.builders import recorded
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter

GOAL = '{of: distance, a: "x,y", b: [0.95, 0.5], weight: -1.0}'


def command(*words: str) -> None:
    args = parse(["reward", *words])
    checked(args)(args)


def test_coverage_is_whole_episodes_with_their_true_ends() -> None:
    """Row 0 ends after 3 steps (a success), row 1 after 5 (the clock): as many of each."""
    env = Counter(CounterConfig())
    random = Random(RandomConfig(), env.spec)
    cover = collect_episodes(env, [random, random], episodes=4, gamma=0.9, seed=0)
    parts = cover.split(cover.rows["next_obs/state"])
    lengths = torch.tensor([len(part) for part in parts])
    assert sorted(lengths.tolist()) == [3] * 4 + [5] * 4
    for part in parts:
        start = 100.0 if len(part) == 5 else 0.0
        assert part[:, 0].tolist() == [start + 1 + t for t in range(len(part))]
    assert cover.success is not None and torch.equal(cover.success, lengths == 3)
    assert cover.policy.tolist() == [0] * 4 + [1] * 4
    ends = torch.stack([part[-1] for part in cover.split(cover.rows["discount"])])
    torch.testing.assert_close(ends, torch.where(lengths == 3, 0.0, 0.9))


def test_compare_a_reward_with_its_shaping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same up to a potential; its negation is as far away as can be; sums tell success."""
    words = ["env=two_gap", "episodes=8", "num_envs=8", "epic_rows=64", "epic_means=16"]
    words += [f"b.potential={GOAL}", "b.weight=0.2"]

    def compared(name: str, *more: str) -> dict[str, Any]:
        command("compare", "own", "shaping", *words, *more, f"out={tmp_path / name}")
        return json.loads((tmp_path / name / "compare.json").read_text())

    same = compared("same")
    assert same["epic"] < 1e-3 and same["starc"] < 0.1
    assert same["successes"] == 8 and same["policies"] == ["random", "demonstrator"]
    assert same["a_auc_return"]["value"] == 1.0
    assert (tmp_path / "same" / "compare.png").stat().st_size > 10_000
    assert "EPIC distance" in capsys.readouterr().out
    apart = compared("far", "b.env_weight=-1.0")
    assert apart["epic"] > 0.99 and apart["starc"] > 0.99
    assert apart["b_auc_return"]["value"] < 0.2


def record(folder: Path) -> Path:
    """Two episodes of a point that goes right, of 3 and 2 steps; the first one arrives."""
    spec = Counter(CounterConfig()).spec.with_obs(state=Leaf((2,), names=("x", "y")))
    with EpisodeWriter(folder, spec) as writer:
        for length, won in ((3, True), (2, False)):
            place = torch.stack([torch.arange(length + 1.0), torch.zeros(length + 1)], 1)
            over = torch.zeros(length, dtype=torch.bool)
            over[-1] = won
            ends = {"reward": over.float(), "terminated": over, "success": over}
            steps = recorded({"state": place}, torch.zeros(length, 1), **ends)
            writer.add(steps, info={"number": length})
    return folder


LABEL = ["reward=shaping", "reward.potential={of: value, a: x, b: null, weight: 1.0}", "gamma=0.9"]


def label(source: Path, out: Path, *words: str) -> None:
    command("label", str(source), *(words or LABEL), f"out={out}")


def test_labels_are_the_reward_and_what_was_recorded_stays(tmp_path: Path) -> None:
    """0.9 (t + 1) - t beside the recorded reward; at the true end 1 - 2."""
    source, out = record(tmp_path / "demos"), tmp_path / "new"
    label(source, out)
    episodes, about = read_episodes(out), yaml.safe_load((out / "reward.yaml").read_text())
    expected = [0.9, 0.8, 1 - 2.0, 0.9, 0.8]
    assert episodes.steps["reward"].tolist() == pytest.approx(expected)
    assert episodes.steps[RECORDED].tolist() == [0, 0, 1, 0, 0]
    assert episodes.steps["success"].tolist() == [False, False, True, False, False]
    assert about["node"]["potential"]["of"] == "value" and about["gamma"] == 0.9
    assert list(episodes.info) == [{"number": n, "reward": about["hash"]} for n in (3, 2)]
    assert read_episodes(source).steps["reward"].tolist() == [0, 0, 1, 0, 0]
    assert transitions(episodes, 0.9)["reward"].tolist() == pytest.approx(expected)


def test_it_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = record(tmp_path / "demos"), tmp_path / "new"
    add = EpisodeWriter.add

    def stopping(self: EpisodeWriter, *args: Any) -> int:
        number = add(self, *args)
        raise KeyboardInterrupt if number == 0 else AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(EpisodeWriter, "add", stopping)
        with pytest.raises(KeyboardInterrupt, match="run the same command"):
            label(source, out)
    assert len(read_episodes(out)) == 1
    label(source, out)
    assert len(read_episodes(out)) == 2
    with pytest.raises(DatasetError, match="another reward"):
        label(source, out, *LABEL, "reward.weight=2.0")


@pytest.mark.parametrize(
    ("reward", "message"),
    [("rnd", "learned during training"), ("shaping", 'no observation or element is called "tool"')],
)
def test_what_cannot_be_labelled_is_one_line(tmp_path: Path, reward: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        label(record(tmp_path / "demos"), tmp_path / "out", f"reward={reward}")


def test_rows_of_an_episode_are_those_of_the_dataset(tmp_path: Path) -> None:
    episodes = read_episodes(record(tmp_path / "demos"))
    rows = transitions(episodes, 0.9)
    mine = rows_of(episodes.episode(0), 0.9)
    for key, value in mine.items():
        torch.testing.assert_close(value, rows[key][:3])
