"""Surprise in turns, and help that fades: by hand, exact resumes, bad settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied.checks.teacher import TwoAgents
from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.toy.rooms import Config, Rooms
from embodied.envs.wrappers.episodic_density import CLOCK, KNOWN, EpisodicDensity
from embodied.envs.wrappers.episodic_density import Config as FamiliarConfig
from embodied.teachers.assistance.privilege import Privilege
from embodied.teachers.exploration.adversarial_surprise import AdversarialSurprise
from embodied.teachers.teacher import Curriculum
from tests.builders import node_of
from tests.teachers.place import ended

NODE = node_of(
    "teachers.exploration.adversarial_surprise.AdversarialSurprise", turns=4, steps=3, free=0.34
)
STILL = torch.zeros(2, dtype=torch.int64)


def world(**settings: Any) -> EpisodicDensity:
    rooms = Rooms(Config(num_envs=2, **{"noisy": 0, "dark": 0, "horizon": 50, **settings}))
    return EpisodicDensity(FamiliarConfig(horizon=50), rooms)


def game(env: EpisodicDensity) -> tuple[AdversarialSurprise, Any, Any, list[Tensors | None]]:
    """A teacher, the worlds of Control and Explore, and what Control was told to see."""
    teacher = build(NODE, AdversarialSurprise, spec=env.spec, env=env, seed=0)
    control = teacher.antagonist_env(env, world)
    told: list[Tensors | None] = []

    def play(obs: Tensors | None = None) -> None:
        told.append(obs)
        control.step(STILL)

    explore = TwoAgents(teacher.protagonist_env(env, None), teacher, play)
    return teacher, control, explore, told


def test_what_is_known_by_hand() -> None:
    """Two pictures counted: a place that showed 1 and then 0, among 8 symbols."""
    env = world()
    obs = env.reset(0)
    theta = obs[KNOWN].view(2, 25, 8)
    assert torch.allclose(theta, torch.tensor(1 / 8)) and obs[CLOCK].tolist() == [[0], [0]]
    seen = [env.step(STILL).next_obs for _ in range(2)]
    first, second = (each["view"].flatten(1)[0].long() for each in seen)
    place = int((first != second).nonzero()[0])
    theta = seen[1][KNOWN].view(2, 25, 8)[0, place]
    wanted = torch.full((8,), 1e-3)
    wanted[first[place]] = wanted[second[place]] = 0.5
    assert torch.allclose(theta, wanted) and seen[1][CLOCK][0].item() == pytest.approx(2 / 50)
    # Surprise at the second picture: log 2 where it is what was shown once of two, floor else.
    third = env.step(STILL).next_obs
    chances = seen[1][KNOWN].view(2, 25, 8).gather(2, third["view"].flatten(1).long()[..., None])
    assert torch.allclose(env.surprise(seen[1], third), -chances.log().mean((1, 2)))
    assert env.surprise(obs, third).tolist() == pytest.approx([math.log(8)] * 2)


def test_a_new_episode_knows_nothing() -> None:
    """Nor what was not to be counted."""
    env = world(horizon=3)
    env.reset(0)
    env.count(False)
    assert torch.allclose(env.step(STILL).obs[KNOWN], torch.tensor(1 / 8))
    env.count(True)
    steps = [env.step(STILL) for _ in range(2)]
    assert steps[-1].truncated.all()
    assert steps[-1].next_obs[KNOWN].max() > 0.3 and steps[-1].next_obs[CLOCK].max() > 0
    assert torch.allclose(steps[-1].obs[KNOWN], torch.tensor(1 / 8))
    assert steps[-1].obs[CLOCK].max() == 0


def test_turns_by_hand() -> None:
    """Explore's three steps, then Control's three, of which the last two are paid."""
    env, other = world(), world()
    _, control, explore, told = game(env)
    obs = explore.reset(3)
    steps = [explore.step(STILL) for _ in range(3)]
    assert not any(step.reward.any() or step.ended.any() for step in steps[:2])
    assert steps[2].terminated.all() and torch.equal(steps[2].reward, -control.paid)
    # Four turns to the left and one is where it began; Control saw what Explore left, and no more.
    assert told[1:] == [None, None] and told[0] is not None
    assert torch.equal(told[0]["view"], steps[2].next_obs["view"])
    assert torch.equal(steps[2].obs["facing"], (obs["facing"] + 2) % 4)  # six turns to the left
    # Counted: only paid steps, two of them.
    assert env.memory["counts"].sum(2).unique().tolist() == [2]
    # Paid by hand: first log(1/8); then 1 or the floor of each place, of what was seen before.
    other.reset(3)
    views = [other.step(STILL).next_obs["view"].flatten(1) for _ in range(6)]
    second = ((views[5] != views[4]) * math.log(1e-3)).mean(1)
    assert torch.allclose(control.paid, -math.log(8) + second, atol=1e-5)


def test_a_game_ends_after_its_turns() -> None:
    env = world()
    teacher, _, explore, told = game(env)
    explore.reset(0)
    for _ in range(3):
        step = explore.step(STILL)
    assert teacher.games == 0 and env.memory["age"][0] == 6
    for _ in range(3):
        step = explore.step(STILL)
    assert teacher.games == 1 and env.memory["age"][0] == 0 and len(told) == 6
    assert torch.allclose(step.obs[KNOWN], torch.tensor(1 / 8))
    how = teacher.metrics()
    assert how["world_return"] == 0 and how["games"] == 1 and how["control"] < 0


def test_other_worlds_and_settings_are_refused() -> None:
    rooms = Rooms(Config(num_envs=2))
    with pytest.raises(ConfigError, match="episodic density"):
        build(NODE, Curriculum, env=rooms, seed=0)
    with pytest.raises(ConfigError, match="turns=3 should be an even number"):
        build(NODE | {"turns": 3}, Curriculum, env=world(), seed=0)
    with pytest.raises(ConfigError, match='no observation "vew"'):
        EpisodicDensity(FamiliarConfig(of="vew"), rooms)


TASK = Leaf((2,), low=0.0, high=1.0, names=("cube_x", "help"))
SPEC = Spec({}, Leaf((1,), low=-1.0, high=1.0), 0.1, TASK)
PRIVILEGE = {"_target_": "embodied.teachers.assistance.privilege.Privilege"}


def made(**settings: Any) -> Privilege:
    node = {"batch": 4, "step": 0.25, "below": 0.0, **settings}
    return build(PRIVILEGE | node, Curriculum, spec=SPEC, seed=0)


def play(teacher: Privilege, scores: list[float]) -> torch.Tensor:
    tasks, tickets = teacher.sample(len(scores))
    teacher.update(tickets, ended(*scores))
    return tasks


def test_help_falls_with_success_and_rises_with_failure() -> None:
    """Episodes with other help than now are not counted."""
    teacher = made()
    tasks = play(teacher, [1.0] * 3)
    assert (tasks[:, 1] == 1).all() and tasks[:, 0].unique().numel() == 3
    assert teacher.level == 1  # fewer episodes than it waits for
    _, tickets = teacher.sample(5)
    teacher.update(tickets[:1], ended(1.0))
    assert teacher.level == 0.75
    teacher.update(tickets[1:], ended(*[0.0] * 4))
    assert teacher.level == 0.75 and not teacher.recent
    play(teacher, [1.0, 1.0, 0.0, 0.0])
    assert teacher.level == 0.75 and len(teacher.recent) == 4  # neither enough nor too little
    play(teacher, [0.0])  # the window is 1, 0, 0, 0: a quarter
    assert teacher.level == 1.0
    for _ in range(6):
        play(teacher, [1.0] * 4)
    assert teacher.level == 0 and teacher.metrics() == {"help": 0.0}


def test_some_episodes_have_less() -> None:
    teacher = made(first=0.5, below=0.8)
    given = teacher.sample(400)[0][:, 1]
    assert given.max() <= 0.5 and (given == 0).any()
    assert 90 < int((given > 0.45).sum()) < 110  # 0.8 u^2 < 0.05: u < 1/4
    teacher.forget()
    play(teacher, [1.0] * 4)
    assert teacher.level == 0.25  # what had less counts as well


def test_settings_that_mean_nothing() -> None:
    for node, spec, message in (
        ({"name": "aid"}, SPEC, "with assistance"),
        ({}, replace(SPEC, task=None), "with assistance"),
        ({"box": {"help": [0.5, 0.5]}}, SPEC, "cannot be annealed"),
        ({"little": 0.8}, SPEC, "little < enough"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(PRIVILEGE | node, Curriculum, spec=spec)
