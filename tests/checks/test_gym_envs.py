"""A wrong Gymnasium environment is named in one line, by `check env` and when it is trained in."""

from __future__ import annotations

from pathlib import Path

import pytest

import embodied as em
from embodied.cli import mistake
from embodied.core import checkpoint
from tests.builders import exit_of
from tests.checks import wrong_gym_envs as wrong

WRONG = [
    (wrong.RewardArray, "reward is of shape [1], should be a number: write reward.item()"),
    (wrong.RewardColumn, "reward is of shape [1, 1], should be a number"),
    (wrong.RewardNone, "reward is None, should be a number"),
    (wrong.RewardNan, "reward is not finite"),
    (wrong.RewardText, "reward is str, should be a number"),
    (wrong.ObsNan, "state is not finite"),
    (wrong.ObsShape, "the observation state is an array [3], observation_space says [2]"),
    (wrong.ObsUnit, "state has numbers from 0.5 to 0.5, which are not in observation_space: "),
    (wrong.ObsChoice, "state has numbers from 1 to 7, which are not in observation_space: "),
    (wrong.OldStep, "step returned 4 values: write return obs, reward, terminated, truncated"),
    (wrong.OldReset, "reset returned an array [2]: write return obs, info"),
    (wrong.NoSeed, "write def reset(self, seed=None, options=None)"),
    (wrong.NoSpaces, "NoSpaces-v0 has no observation_space: write self.observation_space = gym"),
]
CONVERTED = [  # trained in, with a warning
    (wrong.ObsDouble, "state is float64, observation_space says float32: write .as"),
    (wrong.ObsWhole, "state is int64, observation_space says float32: write .astyp"),
]


@pytest.mark.parametrize(("kind", "line"), [*WRONG, *CONVERTED])
def test_check_names_it(kind: type, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = exit_of("check", "env", f"{wrong.__name__}:{kind.__name__}-v0", "allow=[tests]")
    said = [each for each in capsys.readouterr().out.splitlines() if line in each]
    assert code == 1 and said and said[0].lstrip().startswith("wrong")


@pytest.mark.parametrize(("kind", "line"), WRONG)
def test_training_names_it(kind: type, line: str, tmp_path: Path) -> None:
    with pytest.raises(Exception) as caught:
        em.train(env=kind, learner="sac", size="debug", out=str(tmp_path / "run"), verbose=False)
    said = mistake(caught.value)
    assert said is not None and line in said and "\n" not in said


@pytest.mark.parametrize(("kind", "line"), CONVERTED)
def test_training_warns_of_it(
    kind: type, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["env=gym", f"env.id={wrong.__name__}:{kind.__name__}-v0", "policy=gaussian"]
    words += ["learner=sac", "size=debug", "video=false", f"out={tmp_path}/run", "steps=120"]
    code = exit_of("train", *words, "allow=[tests]")
    err = capsys.readouterr().err
    assert code == 0 and line in err and err.count("\n") == 1, err


def test_a_random_one_is_not_told_to_clamp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["env=gym", f"env.id={wrong.__name__}:Random-v0", "env.num_envs=2", "policy=gaussian"]
    words += ["learner=sac", "size=debug", "video=false", f"out={tmp_path}/run", "steps=120"]
    assert exit_of("train", *words, "allow=[tests]") == 0
    err = capsys.readouterr().err
    assert f"{wrong.__name__}:Random-v0: seed 0 gives other observations" in err
    assert err.count("\n") == 1 and "clamp" not in err, err


def test_many_numbers_are_named_and_the_advice_makes_them_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["env=gym", f"env.id={wrong.__name__}:Bright-v0", "env.num_envs=2", "policy=gaussian"]
    words += ["learner=sac", "size=debug", "video=false", "steps=20", "allow=[tests]"]
    assert exit_of("train", *words, f"out={tmp_path}/numbers") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "the observation state [40, 40, 3] is 4,800 numbers, and no picture: if it is" in line
    assert (
        exit_of("train", *words, f"out={tmp_path}/picture", line.partition("if it is one, ")[2])
        == 0
    )
    assert not capsys.readouterr().err
    assert checkpoint.load_spec(tmp_path / "picture").obs["state"].is_image


def test_a_sound_one_is_trained_in(tmp_path: Path) -> None:
    em.train(env=wrong.Sound, learner="sac", size="debug", out=str(tmp_path / "run"), verbose=False)
