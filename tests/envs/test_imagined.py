"""env=imagined: a model's predictions are an environment in which learners train unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.cli import main
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, SpecMismatch
from embodied.datasets.lerobot.reader import read_episodes
from embodied.models import dynamics
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
    obs, random = env.reset(0), torch.Generator().manual_seed(0)
    near: list[torch.Tensor] = []
    for _ in range(10):
        action = 2 * torch.rand(64, 1, generator=random) - 1
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


def test_envs_are_independent_and_restored(given: dict[str, str]) -> None:
    """The first env's episodes do not depend on how many others there are."""
    one, two = made(given, num_envs=1, horizon=5), made(given, num_envs=3, horizon=5)
    assert torch.equal(one.reset(4)["state"], two.reset(4)["state"][:1])
    for _ in range(12):
        a, b = one.step(torch.ones(1, 1)), two.step(torch.ones(3, 1))
        assert torch.allclose(a.obs["state"], b.obs["state"][:1], atol=1e-5)
    state = tt.each(two.get_state(), torch.clone)
    before = [two.step(torch.ones(3, 1)).obs["state"].clone() for _ in range(6)]
    two.set_state(state)
    after = [two.step(torch.ones(3, 1)).obs["state"].clone() for _ in range(6)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert two.state_roles.clocks.keys() | two.state_roles.generators.keys() < state.keys()


def test_what_does_not_fit_is_refused(given: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"):
        made({**given, "model": str(tmp_path)})
    import json
    import shutil

    shutil.copytree(given["model"], tmp_path / "model")
    file = tmp_path / "model" / "spec.json"
    spec = SPEC.with_act(Leaf((1,), low=-2.0, high=2.0))
    file.write_text(json.dumps(spec.to_json()))
    with pytest.raises(ConfigError, match=r"an environment needs \[-1, 1\]"):
        made({**given, "model": str(tmp_path / "model")})
    file.write_text(json.dumps(SPEC.with_obs(state=Leaf((2,), low=0.0)).to_json()))
    with pytest.raises(SpecMismatch, match=r"env.starts: .*obs/state"):
        made({**given, "model": str(tmp_path / "model")})


def run(*words: str | Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    assert stopped.value.code == 0


def words_of(given: dict[str, str]) -> list[str]:
    model = [f"env.model={given['model']}", f"env.starts={given['starts']}", "env.horizon=8"]
    return ["env=imagined", *model, "size=debug", "device=cpu"]


@pytest.mark.parametrize(
    "words",
    [("policy=gaussian", "learner=sac"), ("policy=diagonal_gaussian", "learner=ppo")],
    ids=("sac", "ppo"),
)
def test_learners_train_in_it(
    given: dict[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    run("train", *words_of(given), *words, f"out={tmp_path / 'run'}")
    assert (tmp_path / "run" / "checkpoints" / "00000240").is_dir()
    run("train", f"resume={tmp_path / 'run'}", "steps=280")


@pytest.mark.parametrize(("base", "name"), [("flow", "reinflow"), ("diffusion", "dppo")])
def test_generative_policies_are_fine_tuned_in_it(
    given: dict[str, str], base: str, name: str, tmp_path: Path
) -> None:
    """As in DiWA: a policy cloned from the data improves in the model of the same data."""
    demos = f"demos={given['starts']}"
    imitate = [*words_of(given), f"policy={base}", "learner=imitate", demos]
    run("train", *imitate, f"out={tmp_path / 'base'}")
    words = [*words_of(given), f"finetune={name}", f"learner={name}", f"init={tmp_path / 'base'}"]
    run("train", *words, f"out={tmp_path / 'tuned'}")
    assert (tmp_path / "tuned" / "checkpoints").is_dir()
    assert dynamics.load(given["model"]).spec == SPEC
