"""`embodied reward preferences`: writes a copy of a dataset with rewards learned from pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodied.cli import main
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes
from tests.rewards.test_preference import recording

WORDS = ["reward=preference", "reward.leaf=state", "reward.labels=100", "reward.fit.epochs=3"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    episodes, folder = recording(episodes=12), tmp_path_factory.mktemp("recorded") / "data"
    with EpisodeWriter(folder, episodes.spec) as writer:
        for number in range(len(episodes)):
            writer.add(episodes.episode(number), info={"number": number})
    return folder


def test_a_copy_is_paid_by_what_was_learned(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "paid"
    with pytest.raises(SystemExit) as stop:
        main(["reward", "preferences", str(dataset), *WORDS, "reward.zero=highest", f"out={out}"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "learned from 100 labels" in said
    old, new = read_episodes(dataset), read_episodes(out)
    for key in ("obs/state", "action", "truncated", "terminated"):
        assert new.steps[key].equal(old.steps[key])
    assert new.final["state"].equal(old.final["state"])
    assert new.steps["env_reward"].equal(old.steps["reward"])
    assert float(new.steps["reward"].max()) == pytest.approx(0, abs=1e-5)
    assert float(new.steps["reward"].std()) == pytest.approx(1, abs=1e-3)
    assert new.info[3]["number"] == 3
    facts = json.loads((out / "preferences.json").read_text())
    assert facts["labels"] == 100
    assert facts["reward"]["labeller"]["_target_"].endswith("SimulatedLabeller")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["reward=scaled"], "cannot be fitted to pairs"),
        ([*WORDS, "reward.leaf=picture"], "no observation picture"),
        ([*WORDS, "held_out=1.5"], "held_out=1.5 must be"),
        ([*WORDS, "reward.labeller.eror=0.1"], "eror"),
    ],
)
def test_mistakes_are_one_line(
    dataset: Path, tmp_path: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["reward", "preferences", str(dataset), *words, f"out={tmp_path / 'paid'}"])
    said = str(stop.value.code) + capsys.readouterr().err
    assert why in said
    assert "Traceback" not in said
    assert not (tmp_path / "paid" / "meta").exists()
