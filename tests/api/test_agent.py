"""What an agent does by itself, callbacks, and the words of other libraries."""

from __future__ import annotations

import struct
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embodied as em
from embodied.core.build import ConfigError
from embodied.core.spec import SpecMismatch
from embodied.training.logger import read_metrics
from tests.builders import python

SMALL = {"size": "debug", "verbose": False, "video": False}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[em.Agent, list[Any]]:
    """A run that its third callback ends, and what the callbacks saw."""
    seen: list[Any] = []

    def watch(progress: Any) -> bool:
        action = progress.agent.predict(np.zeros(3, np.float32))
        seen.append((progress.step, action.shape, progress.metrics))
        return len(seen) < 3

    out = str(tmp_path_factory.mktemp("runs") / "run")
    how = {"callback": watch, "callback_every": 20, "log": "tensorboard", "log_every": 20}
    return em.train(env="Pendulum-v1", learner="sac", out=out, **how, **SMALL), seen


def test_a_callback_sees_the_progress_and_ends_the_training(
    watched: tuple[em.Agent, list[Any]],
) -> None:
    agent, seen = watched
    assert [step for step, _, _ in seen] == [20, 40, 60]
    assert {shape for _, shape, _ in seen} == {(1,)}
    assert "train/steps_per_second" in seen[0][2]
    assert agent.folder is not None and read_metrics(agent.folder)[-1]["step"] == 60


def test_a_callback_changes_nothing(tmp_path: Path) -> None:
    """Its random numbers and the mode of its policy are its own."""
    how = {"env": "Pendulum-v1", "learner": "sac", **SMALL}
    act = lambda progress: progress.agent.predict(np.zeros(3, np.float32))  # noqa: E731
    agents = [
        em.train(out=str(tmp_path / "a"), callback=act, callback_every=7, **how),
        em.train(out=str(tmp_path / "b"), **how),
    ]
    first, second = (agent.policy.state_dict() for agent in agents)
    assert all(bool((first[key] == second[key]).all()) for key in first)


def test_tensorboard_reads_what_was_logged(watched: tuple[em.Agent, list[Any]]) -> None:
    """Records of a length and data, with a checksum each; the bytes of the first are TensorBoard's
    own but for the time."""
    folder = watched[0].folder
    assert folder is not None
    (file,) = folder.glob("events.out.tfevents.*")
    left, events = file.read_bytes(), []
    assert left[:12] == struct.pack("<Q", 26) + bytes.fromhex("129bd82d")
    while left:
        (size,) = struct.unpack("<Q", left[:8])
        events.append(left[12 : 12 + size])
        left = left[16 + size :]
    assert events[0][9:] == b"\x10\x00\x1a\x0dbrain.Event:2"
    said = b"".join(events)
    assert b"eval/return" in said and b"train/steps_per_second" in said
    value = struct.pack("<f", read_metrics(folder)[-1]["eval/return"])
    assert b"\x0a\x0beval/return\x15" + value in said


def test_an_agent_goes_on_films_and_shows_its_curves(
    watched: tuple[em.Agent, list[Any]], tmp_path: Path
) -> None:
    agent = em.load(watched[0].folder or "")
    assert "state [3] -> action [1], 60 steps, eval return -" in repr(agent)
    assert agent.train(steps=40, verbose=False) is agent
    table = agent.metrics
    assert table.index[-1] == 100 and table["eval/return"].dropna().index.tolist() == [60, 100]
    assert len(agent.evaluate(episodes=2).returns) == 2
    assert agent.video(tmp_path / "films" / "one.mp4").stat().st_size > 1000
    saved = em.load(agent.save(tmp_path / "saved"))
    assert repr(saved).endswith("of no run>")
    with pytest.raises(ConfigError, match="belongs to no run"):
        saved.train(steps=10)
    went_on = em.train(env="Pendulum-v1", learner="sac", init=agent, out=tmp_path / "b", **SMALL)
    assert went_on.folder == tmp_path / "b"


def test_the_words_of_other_libraries_are_answered() -> None:
    assert {"train", "Agent", "make_env"} <= {*dir(em)}
    answers = [
        ({"learning_rate": 1e-3}, 'learner={"name": NAME, ...}'),
        ({"policy_kwargs": {"net_arch": [64]}}, '"hidden": [64, 64]'),
        ({"tensorboard_log": "x"}, 'log="tensorboard"'),
    ]
    for given, answer in answers:
        with pytest.raises(ConfigError) as told:
            em.train(env="Pendulum-v1", learner="sac", **given)
        assert answer in str(told.value)
    with pytest.raises(ConfigError, match=r"'Pendulum-v1' is no key=value: em\.train"):
        em.train("Pendulum-v1", learner="sac")


def test_a_mistake_is_one_line_without_the_traceback_inside(
    watched: tuple[em.Agent, list[Any]],
) -> None:
    agent = watched[0]
    cases: list[tuple[Any, type[Exception]]] = [
        (lambda: em.evaluate(agent, "CartPole-v1"), SpecMismatch),
        (lambda: em.train(env="Pendulum-v1", learner="sacs"), ConfigError),
        (lambda: em.make_env("Pendulum-v1", kwargs={"mass": 1}), ValueError),
        (lambda: agent.predict(np.zeros(5)), ConfigError),
        (lambda: em.load("nowhere"), Exception),
    ]
    for call, kind in cases:
        with pytest.raises(kind) as told:
            call()
        assert "\n" not in str(told.value)
        assert len(traceback.extract_tb(told.value.__traceback__)) <= 5, (
            "of this file, and the edge"
        )
        assert told.value.__suppress_context__
    line = "import embodied as em; em.make_env('Pendulum-v7')"
    assert len(python("-c", line).stderr.strip().splitlines()) <= 8
