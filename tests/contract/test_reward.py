"""Every reward in configs/reward keeps the contract, in the world of an experiment that names it;
found by listing the folder."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.build import parse
from embodied.core.env import VecEnv
from embodied.core.reward import HasComponents, Reward, Stateful
from embodied.core.seeding import seed_everything
from embodied.core.tensors import Tensors
from embodied.datasets.collect import CollectConfig, collect
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.logger import Log
from embodied.training.train import train
from tests.training.test_train import flat

CONFIGS = Path(__file__).parents[2] / "configs"
REWARDS = sorted(path.stem for path in (CONFIGS / "reward").glob("*.yaml"))
NEEDS_A_SERVER = "asks a language model behind a server that is not here: reward.{}.url"
WHOLE, HALF = 96, 48  # steps of a run
RECORDED = {"demos": "won", "failures": "lost", "data": ("won", "lost")}


@cache
def experiment_of(name: str) -> str | None:
    """The first experiment that chooses this reward, else one whose reward is of the same class."""
    files = sorted((CONFIGS / "experiment").glob("*.yaml"))
    files.sort(key=lambda file: "_fast" in file.read_text())  # EnvPool cannot save its rows
    target = yaml.safe_load((CONFIGS / "reward" / f"{name}.yaml").read_text())["_target_"]
    others = [
        path.stem
        for path in (CONFIGS / "reward").glob("*.yaml")
        if yaml.safe_load(path.read_text())["_target_"] == target
    ]
    for wanted in ([name], others):
        for file in files:
            chosen = re.search(r"override /reward: (\w+)", file.read_text())
            if chosen and chosen[1] in wanted:
                return file.stem
    return None


def node(name: str, folder: Path, *more: str) -> dict[str, Any]:
    """A debug run of the reward's experiment; labels come when they are asked for, and what a
    reward learns from beforehand is recorded here."""
    experiment = experiment_of(name)
    assert experiment is not None, f"no experiment in configs/experiment uses reward={name}"
    words = [f"experiment={experiment}", f"reward={name}", "size=debug", "name=x"]
    words += [f"output={folder}", "save_every=0", "eval.num_envs=1"]
    made = compose("train", [*words, f"steps={WHOLE}", "eval.episodes=1", *more]).node
    if made["data"]["regime"] == "off_policy":
        made["data"]["warmup_steps"] = 32
    made["env"]["num_envs"] = min(4, made["env"].get("num_envs", 4))
    if made["demos"] is None:
        made["demo_episodes"] = None
    reward = made["reward"]
    if (unmet := _server(reward)) is not None:
        pytest.skip(NEEDS_A_SERVER.format(unmet))
    if "synchronous" in reward:
        reward["synchronous"] = True
    for key, which in RECORDED.items():
        if key in reward and reward[key] is None:
            names = [which] if isinstance(which, str) else list(which)
            paths = [str(recorded(experiment, each, folder.parent)) for each in names]
            reward[key] = paths[0] if isinstance(which, str) else paths
    return made


def _server(settings: Any, path: str = "") -> str | None:
    """Where a node names a server's address."""
    if isinstance(settings, dict):
        if settings.get("url"):
            return path.strip(".")
        found = [_server(value, f"{path}.{key}") for key, value in settings.items()]
        return next((each for each in found if each), None)
    return None


def recorded(experiment: str, kind: str, folder: Path) -> Path:
    """A few episodes of the experiment's world, played by its script or at random."""
    out = folder / kind
    if not out.exists():
        made = compose("train", [f"experiment={experiment}", "size=debug"])
        env, known = str(made.choices["env"]), CONFIGS / "demonstrator"
        names = [env, str(made.node["env"].get("task")), env.rpartition("_")[0], "random"]
        played = next(n for n in names if (known / f"{n}.yaml").exists() or n == "random")
        script = yaml.safe_load(
            (known / f"{played if kind == 'won' else 'random'}.yaml").read_text()
        )
        settings = {
            "env": made.node["env"],
            "demonstrator": script,
            "episodes": 4,
            "out": str(out),
            "num_envs": 4,
            "success_only": kind == "won",
            "images": "png",
        }
        collect(parse(CollectConfig, settings, "collect"), lambda kept, played: None)
    return out


def parts_of(name: str, folder: Path) -> tuple[RunComponents, Reward]:
    made = node(name, folder)
    seed_everything(0)
    parts = RunComponents(read_config(made))
    loop: Any = parts.loop
    return parts, loop.rewards.reward


def play(parts: RunComponents, steps: int = 3) -> Tensors:
    """Rows of the first steps, as the loops hand them to a reward."""
    loop: Any = parts.loop
    kept: list[Tensors] = []
    count = 0
    while len(kept) < steps:
        rows, step = loop.collector.step()
        count += parts.env.num_envs
        finished = loop.collector.finished
        loop.rewards.observe_step(rows, loop.env_ids if finished is None else finished, step)
        loop.rewards.set_step(count)
        if rows:
            kept.append(tt.each(rows, torch.clone))
    return tt.cat(kept)


@pytest.mark.parametrize("name", REWARDS)
def test_answers_and_learns(name: str, tmp_path: Path) -> None:
    """[N] finite numbers, the same ones when asked again; metrics are detached scalars; terms are
    of the same rows; what is saved answers as before."""
    parts, reward = parts_of(name, tmp_path / "run")
    rows = play(parts)
    before = tt.each(rows, torch.clone)
    paid = reward(rows)
    assert paid.shape == rows["reward"].shape and paid.dtype == torch.float32
    assert torch.isfinite(paid).all() and not paid.requires_grad
    assert torch.equal(paid, reward(rows))
    for key, value in (*reward.update(rows).items(), *reward.update(rows).items()):
        assert value.ndim == 0 and not value.requires_grad and torch.isfinite(value), key
    assert flat(before) == flat(rows), "the rows are not the reward's to change"
    if isinstance(reward, HasComponents):
        for key, value in reward.components(rows).items():
            assert value.shape == paid.shape and torch.isfinite(value).all(), key
    if isinstance(reward, Stateful):
        torch.save(reward.get_state(), tmp_path / "reward.pt")
        _, other = parts_of(name, tmp_path / "other")
        assert isinstance(other, Stateful)
        other.set_state(torch.load(tmp_path / "reward.pt", weights_only=True))
        assert torch.equal(reward(rows), other(rows))
        assert flat(reward.get_state()) == flat(other.get_state())
    parts.env.close()


@pytest.mark.parametrize("name", REWARDS)
def test_a_run_with_it_resumes_exactly(name: str, tmp_path: Path) -> None:
    """Interrupted and gone on with is the same as not stopped: weights, reward, replay, worlds."""

    def run(folder: str, steps: int, resume: str | None = None) -> None:
        made = node(name, tmp_path / folder) | {"steps": steps, "resume": resume}
        train(made, Log(tmp_path / folder))

    run("whole", WHOLE)
    whole = checkpoint.load_state(tmp_path / "whole", "loop")
    if whole["loop"]["rollout"] is None:
        pytest.skip("this world cannot save its rows: EnvPool")
    run("half", HALF)
    run("half", WHOLE, resume=str(tmp_path / "half"))
    half = checkpoint.load_state(tmp_path / "half", "loop")
    for key in whole["loop"]:
        assert flat(whole["loop"][key]) == flat(half["loop"][key]), key
    one, other = (
        load_file(checkpoint.find(tmp_path / each) / "policy.safetensors")
        for each in ("whole", "half")
    )
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("name", REWARDS)
def test_policies_keep_what_they_need(name: str, tmp_path: Path) -> None:
    """Rows are stored with everything that the policy sees, whatever a reward looked at beside."""
    parts, reward = parts_of(name, tmp_path / "run")
    plain: VecEnv = parts.env
    loop: Any = parts.loop
    dropped = getattr(loop, "unseen", frozenset())
    assert not dropped & {f"{end}/{leaf}" for leaf in plain.spec.obs for end in ("obs", "next_obs")}
    assert reward.frozen or not dropped
    parts.env.close()


def test_a_reward_without_an_experiment_is_noticed() -> None:
    assert experiment_of("scaled") == "pendulum_scaled"
    assert not [name for name in REWARDS if experiment_of(name) is None]
