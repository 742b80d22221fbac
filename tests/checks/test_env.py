"""Wrong environments, ours and Gymnasium's, are named in one line: by `embodied check env` and by
`embodied train`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import embodied as em
from embodied.core import checkpoint, env_contract
from embodied.evaluation import evaluate
from embodied.mistakes import mistake
from tests.builders import Capture, Patch, exit_of, write_files
from tests.checks import wrong_envs
from tests.checks import wrong_gym_envs as wrong

SOUND = [wrong_envs.Plane, wrong_envs.PlaneAndClock]
REFUSED = [  # what training cannot go on with
    (wrong_envs.RewardColumn, "reward is of shape [B, 1], should be [B]: write reward.squeeze(-1)"),
    (wrong_envs.RewardDouble, "reward is float64, should be float32"),
    (wrong_envs.ObsDouble, 'obs["state"] is float64, should be float32'),
    (wrong_envs.FlagsAsNumbers, "truncated is float32, should be bool"),
    (wrong_envs.NanReward, "reward is not finite in envs"),
    (wrong_envs.NanObs, "state is not finite in envs"),
    (wrong_envs.NoAutoreset, "whose episode ended is not reset: reset it inside step"),
    (wrong_envs.NoSuccessor, "next_obs is the next episode's first observation"),
    (wrong_envs.OwnUnits, "declare Leaf((A,), low=-1.0, high=1.0)"),
    (wrong_envs.OtherName, 'obs has no "state", which spec.obs declares'),
    (wrong_envs.Raises, "raised RuntimeError"),
    (wrong_envs.Both, "terminated and truncated at once"),
]
WARNED = [  # what it can live with
    (wrong_envs.Unseeded, "gives other observations the second time (from the reset)"),
    (wrong_envs.OneEpisode, "every seed gives the same episodes"),
    (wrong_envs.NoMask, "reset(mask=...) changes envs that are not in the mask"),
    (wrong_envs.SeedsUnmasked, "reset(seed, mask=...) does not begin the episodes of reset(seed)"),
    (wrong_envs.NoTask, "two tasks give the same episodes (20 steps of random actions)"),
    (wrong_envs.Unbounded, "an action of 3 does more than 1, the bound: write action = action.cla"),
]
ONLY_CHECKED = [
    (wrong_envs.SameBuffer, "changes the obs"),
    (wrong_envs.ClocksUnmasked, "reset(mask=...) changes envs that are not in the mask"),
    (wrong_envs.Endless, "no episode has ended in 2,000 steps: give a time limit"),
]
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


def says(line: str, num_envs: int) -> str:
    return line.replace("B", str(num_envs), 2) if "[B" in line else line


def embodied(*words: str) -> int | str:
    return exit_of(*words, "allow=[tests]")


@pytest.fixture(autouse=True)
def patient(monkeypatch: Patch) -> None:
    """An episode's end is waited for on a busy machine too."""
    monkeypatch.setattr(env_contract, "MOST_SECONDS", 60.0)


def named(kind: type) -> str:
    """How `embodied check env` is asked for one of them."""
    gym = kind.__module__ == wrong.__name__
    return f"{kind.__module__}:{kind.__name__}-v0" if gym else f"{kind.__module__}.{kind.__name__}"


def checked(name: str, capsys: Capture, code: int = 1) -> list[str]:
    """What the check finds wrong, or all that it prints of a sound one."""
    assert embodied("check", "env", name) == code
    lines = capsys.readouterr().out.splitlines()
    return [each for each in lines if " wrong " in f" {each} "] if code else lines


def train(kind: type, folder: Path, *more: str) -> int | str:
    words = ["env=gym", f"env.id={named(kind)}"]
    if kind.__module__ == wrong_envs.__name__:
        write_files(folder, {"configs/env/mine.yaml": f"_target_: {named(kind)}\n"})
        words = ["env=mine", "--config-dir", str(folder / "configs")]
    words += ["policy=gaussian", "learner=sac", "size=debug", "video=false", "steps=120"]
    return embodied("train", *words, f"out={folder}/run", *more)


@pytest.mark.parametrize(("kind", "line"), [*REFUSED, *WARNED, *ONLY_CHECKED, *WRONG, *CONVERTED])
def test_check_names_it(kind: type, line: str, capsys: Capture) -> None:
    found = checked(named(kind), capsys)
    assert any(says(line, 2) in each for each in found), found


def test_check_says_each_mistake_once(capsys: Capture) -> None:
    found = checked(named(wrong_envs.NanObs), capsys)
    assert len(set(found)) == len(found) > 0
    assert all("not finite" in each or "something wrong" in each for each in found), found
    embodied("check", "env", named(wrong_envs.ResetDouble))
    assert 'write obs["state"].to(torch.float32)' in capsys.readouterr().out


@pytest.mark.parametrize("kind", SOUND)
def test_check_and_training_find_nothing_in_a_sound_one(
    kind: type, tmp_path: Path, capsys: Capture
) -> None:
    lines = checked(named(kind), capsys, 0)
    assert lines[-1] == f"{named(kind)}: sound"
    skipped = [line for line in lines if "skipped" in line]
    assert len(skipped) == 3, "it has no get_state, no task, and is not one of Gymnasium's"
    assert train(kind, tmp_path) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("kind", "line"), [*REFUSED, *WRONG])
def test_train_refuses_it(kind: type, line: str, tmp_path: Path, capsys: Capture) -> None:
    code = train(kind, tmp_path)
    err = capsys.readouterr().err
    assert code == 2 and says(line, 4) in err and err.count("\n") == 1, err


@pytest.mark.parametrize(("kind", "line"), [*WARNED, *CONVERTED])
def test_train_warns_of_it(kind: type, line: str, tmp_path: Path, capsys: Capture) -> None:
    assert train(kind, tmp_path) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


def test_an_ignored_mask_ends_a_run_with_a_teacher_and_an_endless_one_is_named(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    assert train(wrong_envs.NoMask, tmp_path / "mask", "teacher=uniform") == 2
    assert "NoMask: reset(mask=...) changes envs" in capsys.readouterr().err
    monkeypatch.setattr(evaluate, "LONGEST", 100)
    assert train(wrong_envs.Endless, tmp_path / "endless") == 2
    first, last = capsys.readouterr().err.splitlines()
    assert "Endless: no episode has ended in 2,000 steps: give a time limit" in first
    assert "Endless: no episode has ended in 100 steps" in last
    saved = tmp_path / "endless" / "run" / "checkpoints"
    assert list(saved.glob("*/policy.safetensors")), "what was trained is kept"


def test_a_gymnasium_id_is_checked(capsys: Capture) -> None:
    assert embodied("check", "env", named(wrong.Unseeded)) == 1
    out = capsys.readouterr().out
    assert "gives other observations the second time" in out
    assert "gymnasium's check_env says" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("env", "pendulm"), 'no env "pendulm" (did you mean "pendulum"?)'),
        (("envs", "pendulum"), 'nothing to check in "envs" (did you mean "env"?)'),
        (("env", "nowhere.Env"), "add its package with allow="),
        (("reward", "scaled"), "a reward is checked in a run: add experiment=NAME"),
    ],
)
def test_mistakes(words: tuple[str, ...], line: str, capsys: Capture) -> None:
    assert embodied("check", *words) == 2
    assert line in capsys.readouterr().err


def test_python_names_the_mistake_too(tmp_path: Path) -> None:
    how = {"learner": "sac", "size": "debug", "verbose": False}
    em.train(env=wrong.Sound, out=str(tmp_path / "sound"), **how)
    kind, line = WRONG[0]
    with pytest.raises(Exception) as caught:
        em.train(env=kind, out=str(tmp_path / "wrong"), **how)
    said = mistake(caught.value)
    assert said is not None and line in said and "\n" not in said


def test_a_random_one_is_not_told_to_clamp(tmp_path: Path, capsys: Capture) -> None:
    assert train(wrong.Random, tmp_path, "env.num_envs=2") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{named(wrong.Random)}: seed 0 gives other observations" in line
    assert "clamp" not in line


def test_many_numbers_are_named_and_the_advice_makes_them_a_picture(
    tmp_path: Path, capsys: Capture
) -> None:
    words = ["env.num_envs=2", "steps=20"]
    assert train(wrong.Bright, tmp_path / "numbers", *words) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "the observation state [40, 40, 3] is 4,800 numbers, and no picture: if it is" in line
    advice = line.partition("if it is one, ")[2]
    assert train(wrong.Bright, tmp_path / "picture", *words, advice) == 0
    assert not capsys.readouterr().err
    assert checkpoint.load_spec(tmp_path / "picture" / "run").obs["state"].is_image
