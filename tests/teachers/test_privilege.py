"""Help that fades: up and down by hand, exact resume, bad settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.remembered import pack, unpack
from embodied.core.spec import Leaf, Spec
from embodied.teachers.assistance.privilege import Privilege
from embodied.teachers.teacher import Curriculum, Outcome

TASK = Leaf((2,), low=0.0, high=1.0, names=("cube_x", "help"))
SPEC = Spec({}, Leaf((1,), low=-1.0, high=1.0), 0.1, TASK)


def made(**settings: Any) -> Privilege:
    node = {
        "_target_": "embodied.teachers.assistance.privilege.Privilege",
        "batch": 4,
        "step": 0.25,
        "below": 0.0,
    }
    return build({**node, **settings}, Curriculum, spec=SPEC, seed=0)


def play(teacher: Privilege, scores: list[float]) -> torch.Tensor:
    tasks, tickets = teacher.sample(len(scores))
    values = torch.tensor(scores)
    teacher.update(tickets, Outcome(values, values, torch.ones(len(scores))))
    return tasks


def test_help_falls_with_success_and_rises_with_failure() -> None:
    teacher = made()
    tasks = play(teacher, [1.0] * 3)
    assert (tasks[:, 1] == 1).all() and tasks[:, 0].unique().numel() == 3
    assert teacher.level == 1  # fewer episodes than it waits for
    play(teacher, [1.0])
    assert teacher.level == 0.75
    play(teacher, [1.0, 1.0, 0.0, 0.0])
    assert teacher.level == 0.75 and len(teacher.recent) == 4  # neither enough nor too little
    play(teacher, [0.0])  # the window is 1, 0, 0, 0: a quarter
    assert teacher.level == 1.0
    for _ in range(6):
        play(teacher, [1.0] * 4)
    assert teacher.level == 0 and teacher.metrics() == {"help": 0.0}


def test_episodes_with_other_help_are_not_counted() -> None:
    teacher = made()
    _, late = teacher.sample(4)
    play(teacher, [1.0] * 4)
    teacher.update(late, Outcome(torch.zeros(4), torch.zeros(4), torch.ones(4)))
    assert teacher.level == 0.75 and not teacher.recent


def test_some_episodes_have_less() -> None:
    teacher = made(first=0.5, below=0.8)
    given = teacher.sample(400)[0][:, 1]
    assert given.max() <= 0.5 and (given == 0).any()
    assert 90 < int((given > 0.45).sum()) < 110  # 0.8 u^2 < 0.05: u < 1/4
    play(teacher, [1.0] * 4)
    assert teacher.level == 0.25  # what had less counts as well


def test_no_number_no_lesson_and_an_exact_resume() -> None:
    teacher, other = made(), made()
    with pytest.warns(UserWarning, match="is NaN"):
        play(teacher, [float("nan")] * 5)
    assert teacher.level == 1 and not teacher.recent
    play(teacher, [1.0, 1.0, 0.0])
    teacher.sample(2)  # two that never end
    other.set_state(unpack(pack(teacher.get_state())))
    assert torch.equal(play(teacher, [1.0] * 9), play(other, [1.0] * 9))
    assert teacher.level == other.level < 1


def test_settings_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="with assistance"):
        build(
            {"_target_": "embodied.teachers.assistance.privilege.Privilege", "name": "aid"},
            Curriculum,
            spec=SPEC,
        )
    with pytest.raises(ConfigError, match="with assistance"):
        node = {"_target_": "embodied.teachers.assistance.privilege.Privilege"}
        build(node, Curriculum, spec=replace(SPEC, task=None))
    with pytest.raises(ConfigError, match="cannot be annealed"):
        made(box={"help": [0.5, 0.5]})
    with pytest.raises(ConfigError, match="little < enough"):
        made(little=0.8)
