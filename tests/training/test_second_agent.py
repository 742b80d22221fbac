"""A second student in a run: both learn, both are counted, and a resume is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.seeding import seed_everything
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.logger import Log
from embodied.training.train import train
from embodied.training.trainer import Every, Trainer
from tests.training.test_level_teaching import MEMORY, NODE, node
from tests.training.test_teaching import run

RIVALS = ("paired",)


def parts_of(tmp_path: Path, taught: dict[str, Any]) -> RunComponents:
    seed_everything(0)
    return RunComponents(read_config({**taught, "out": str(tmp_path)}))


@pytest.mark.parametrize("policy", [NODE["policy"], MEMORY], ids=["plain", "memory"])
@pytest.mark.parametrize("name", RIVALS)
def test_a_resume_is_exact(tmp_path: Path, name: str, policy: dict[str, Any]) -> None:
    """In the middle of a batch and of a round."""
    taught = node(name, policy=policy)
    whole, state = run(tmp_path / "whole", taught)
    assert len(whole) >= 40
    run(tmp_path / "parts", {**taught, "steps": 560})
    again, other = run(tmp_path / "parts", taught, resume=str(tmp_path / "parts"))
    assert again == whole
    assert str(other) == str(state)


@pytest.mark.parametrize("name", RIVALS)
def test_both_are_counted_and_both_learn(tmp_path: Path, name: str) -> None:
    """960 steps are 120 of each of the two students' four rows."""
    parts = parts_of(tmp_path, node(name))
    loop: Any = parts.loop
    rival = loop.second_agent
    assert rival is not None
    before = [p.clone() for p in rival.learner.parameters()]
    first = [p.clone() for p in parts.learner.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, first, strict=True))  # two beginners
    steps: list[int] = []
    log = Log(tmp_path, silent=True)
    with Trainer(log, 960, Every(0, 0, 0), steps.append, lambda step: None) as keeper:
        parts.loop.run(keeper)
    assert keeper.step == 960 and parts.learner.done == rival.learner.done == 480  # type: ignore
    for learner, old in ((rival.learner, before), (parts.learner, first)):
        moved = [not torch.equal(a, b) for a, b in zip(learner.parameters(), old, strict=True)]
        assert any(moved)
    assert any(key.startswith("rival_") for update in keeper.updates for key in update)
    assert parts.loop.teacher is rival.teacher and "regret" in rival.teacher.metrics()


def test_what_cannot_have_a_second_agent_is_refused(tmp_path: Path) -> None:
    reward = {"_target_": "embodied.rewards.handcrafted.composite.Scaled"}
    random = {"_target_": "embodied.policies.categorical.Categorical", "hidden": [8]}
    base = build(random, Policy, spec=build(NODE["env"], VecEnv).spec)
    checkpoint.save(tmp_path / "base" / "checkpoints" / "00000000", base, 0)
    for changes in ({"init": str(tmp_path / "base")}, {"reward": reward}):
        with pytest.raises(ConfigError, match="second agent from scratch"):
            parts_of(tmp_path, node("paired", **changes))


ROOMS: dict[str, Any] = {
    **NODE,
    "env": {
        "_target_": "embodied.envs.wrappers.stack.Wrapped",
        "num_envs": 4,
        "env": {
            "_target_": "embodied.envs.toy.rooms.Rooms",
            "rooms": 2,
            "size": 2,
            "noisy": 1,
            "horizon": 30,
        },
        "wrappers": [{"_target_": "embodied.envs.wrappers.episodic_density.EpisodicDensity"}],
    },
    "teacher": {
        "_target_": "embodied.teachers.exploration.adversarial_surprise.AdversarialSurprise",
        "turns": 4,
        "steps": 5,
    },
}


def test_a_game_resumes_exactly(tmp_path: Path) -> None:
    """In the middle of a turn of the first student; the second has had its batches meanwhile."""
    states = []
    for name, steps in (("whole", (1200,)), ("parts", (852, 1200))):
        for end in steps:
            resume = str(tmp_path / name) if end != steps[0] else None
            settings = {**ROOMS, "out": str(tmp_path / name), "steps": end, "resume": resume}
            train(settings, Log(tmp_path / name, silent=True))
        kept = checkpoint.load_state(tmp_path / name, "loop")["loop"]["parts"]
        assert kept["teacher"]["games"] == 1200 // (4 * 5 * 4)
        assert kept["second_agent"]["learner"]["done"] == 576  # of 600, by the dozen
        states.append((kept, checkpoint.load_state(tmp_path / name, "learner")))
    assert str(states[0]) == str(states[1])


def test_control_begins_where_explore_stopped(tmp_path: Path) -> None:
    """What it sees is what the body sees then, and its turns are its episodes."""
    parts = parts_of(tmp_path, ROOMS)
    loop: Any = parts.loop
    rival = loop.second_agent
    rollout, rooms = rival.loop.collector, parts.env.env.env  # type: ignore[attr-defined]
    told: list[tuple[bool, bool]] = []
    act = rollout.actor

    def noting(obs: Any, first: torch.Tensor) -> torch.Tensor:
        shown = rooms._observe()
        told.append((bool(first.all()), all(torch.equal(obs[k], shown[k]) for k in shown)))
        return act(obs, first)

    rollout.actor = _Noting(act, noting)
    for _ in range(10):
        loop.advance()
    assert told == [(True, True), *[(False, True)] * 4] * 2


class _Noting:
    """An actor that is watched."""

    def __init__(self, actor: Any, call: Any) -> None:
        self.actor, self.call = actor, call

    def __call__(self, obs: Any, first: torch.Tensor) -> torch.Tensor:
        return self.call(obs, first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor, name)
