"""env=imagined: a model's predictions are an environment in which learners train unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, SpecMismatch
from embodied.datasets.lerobot.reader import read_episodes
from tests.builders import exit_of
from tests.linear_system import SPEC, WALL, fitted, step


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fitted(tmp_path_factory.mktemp("imagined"), most_updates=2000)


def made(given: dict[str, str], **settings: Any) -> VecEnv:
    node = {"_target_": "embodied.envs.imagined.Imagined", **given, **settings}
    return build(node, VecEnv)


def test_steps_are_those_of_the_system(given: dict[str, str]) -> None:
    env = made(given, num_envs=64, horizon=10)
    assert env.spec == SPEC
    obs, near = env.reset(0), list[torch.Tensor]()
    for action in 2 * torch.rand(10, 64, 1, generator=torch.Generator().manual_seed(0)) - 1:
        following, _, _ = step(obs["state"], action)
        seen = env.step(action)
        near.append((seen.next_obs["state"] - following).abs().amax(1))
        obs = seen.obs
    assert float(torch.cat(near).median()) < 0.01


def test_episodes_begin_in_the_data_and_end(given: dict[str, str]) -> None:
    """By the model's termination, else truncated after the horizon; never both."""
    data = read_episodes(given["starts"])
    every = {tuple(state) for state in data.steps["obs/state"].tolist()}
    first = {tuple(state) for state in data.steps["obs/state"][data.start].tolist()}
    for only_first, known in ((False, every), (True, first)):
        env = made(given, num_envs=32, horizon=7, only_first=only_first)
        begun = {tuple(state) for state in env.reset(1)["state"].tolist()}
        assert begun <= known
        age = torch.zeros(32, dtype=torch.int64)
        ends: list[torch.Tensor] = []
        for _ in range(40):
            seen = env.step(torch.ones(32, 1))
            age = age + 1
            assert torch.equal(seen.truncated, (age >= 7) & ~seen.terminated)
            ends.append(seen.next_obs["state"][seen.terminated, 0] > WALL - 0.05)
            age = age * ~seen.ended
            new = seen.obs["state"][seen.ended].tolist()
            assert {tuple(state) for state in new} <= known
        assert len(torch.cat(ends)) > 10 and torch.cat(ends).float().mean() > 0.6
    assert begun - every == set() and first < every


def test_an_env_depends_on_its_seed_and_number_only(given: dict[str, str]) -> None:
    one, two = made(given, num_envs=1, horizon=5), made(given, num_envs=3, horizon=5)
    assert torch.equal(one.reset(4)["state"], two.reset(4)["state"][:1])
    for _ in range(12):
        a, b = one.step(torch.ones(1, 1)), two.step(torch.ones(3, 1))
        assert torch.allclose(a.obs["state"], b.obs["state"][:1], atol=1e-5)


def test_what_does_not_fit_is_refused(given: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"):
        made({**given, "model": str(tmp_path)})
    shutil.copytree(given["model"], tmp_path / "model")
    for spec, kind, says in (
        (
            SPEC.with_act(Leaf((1,), low=-2.0, high=2.0)),
            ConfigError,
            r"environment needs \[-1, 1\]",
        ),
        (SPEC.with_obs(state=Leaf((2,), low=0.0)), SpecMismatch, r"env.starts: .*obs/state"),
    ):
        (tmp_path / "model" / "spec.json").write_text(json.dumps(spec.to_json()))
        with pytest.raises(kind, match=says):
            made({**given, "model": str(tmp_path / "model")})


@pytest.mark.parametrize(
    "words", [("policy=gaussian", "learner=sac"), ("policy=diagonal_gaussian", "learner=ppo")]
)
def test_learners_train_in_it(
    given: dict[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    model = [f"env.model={given['model']}", f"env.starts={given['starts']}", "env.horizon=8"]
    run = ["train", "env=imagined", *model, "size=debug", "device=cpu", *words]
    assert exit_of(*run, f"out={tmp_path / 'run'}") == 0
    assert (tmp_path / "run" / "checkpoints" / "00000240").is_dir()
    assert exit_of("train", f"resume={tmp_path / 'run'}", "steps=280") == 0
