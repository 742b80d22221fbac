"""Adaptive trajectory sampling: similarity, graph, field and chances by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.state_codec import pack, unpack
from embodied.teachers.resets.curricula import (
    Trajectory,
    nearby_states,
    similarity,
    similarity_graph,
)
from embodied.teachers.resets.reset_distribution import (
    DEFAULT_RESET,
    ResetStateWrapper,
    Trajectories,
    record_trajectories,
)
from embodied.teachers.teacher import Curriculum, Outcome
from tests.teachers.test_resets import SCRIPT, Fr3, paths, reach


def made(env: Fr3, **settings: Any) -> Trajectory:
    node = {
        "_target_": "embodied.teachers.resets.curricula.Trajectory",
        "player": SCRIPT,
        "episodes": 3,
    }
    return build({**node, "usual": 0.0, **settings}, Curriculum, spec=env.spec, env=env, seed=0)


def alike() -> Trajectories:
    """Two trajectories of five states: the second passes by the first's, 0.1 off."""
    return paths([5, 5], [1.0, 1.0], [0, 1, 2, 3, 4, 0.1, 1.1, 2.1, 3.1, 4.1])


def test_similarity_falls_with_the_mean_square() -> None:
    a, b = np.array([[0.0, 0.0]]), np.array([[0.0, 0.0], [1.0, 2.0]])
    np.testing.assert_allclose(similarity(a, b, 2.0), [[1.0, np.exp(-2 * 2.5)]])


def test_the_graph_joins_what_is_alike_of_other_trajectories() -> None:
    match, how = similarity_graph(alike(), 1.0, 1e-10)
    assert match.tolist() == [7, 7, 7, 8, 8, 2, 2, 2, 3, 3]  # never the first two nor the last
    spread = np.array(alike().togo).std()
    np.testing.assert_allclose(how[2], np.exp(-((0.1 / spread) ** 2)), rtol=1e-5)
    assert (similarity_graph(alike(), 1.0, 0.9999)[0] == -1).all()
    assert (similarity_graph(paths([5], [1.0]), 1.0, 1e-10)[0] == -1).all()  # nobody to go over to


def test_beside_a_state_is_where_random_actions_lead() -> None:
    env = reach()
    saved = record_trajectories(build(SCRIPT, Policy, spec=env.spec), env, 2, 2, 0, 0.99)
    near = nearby_states(saved, env, 3, 1.0, np.random.default_rng(0))
    assert 0 < len(near) <= len(saved) and set(near.states) == set(saved.states)
    far = (near.states["obs/state"][:, None] - saved.states["obs/state"][None]).abs().sum(2)
    assert (far.min(1).values > 0).all()
    known = set(zip(saved.episode.tolist(), saved.time.tolist(), strict=True))
    assert set(zip(near.episode.tolist(), near.time.tolist(), strict=True)) <= known


def test_what_goes_wrong_is_drawn_more_often() -> None:
    teacher = made(reach(), alpha=1.0, switch=0.0, stray=0.0)
    teacher.clip, teacher.frames = np.array([0, 0, 1, 1]), 4
    teacher.means = np.zeros(4)
    teacher.learn([0, 0], np.array([1.0, 1.0]), [0, 0])
    np.testing.assert_allclose(teacher.means, [0.75, 0, 0, 0])  # (0 + 1) / 2, (0.5 + 1) / 2
    clips, frames = teacher.chances()
    hard = np.exp(-5 * 0.375)
    np.testing.assert_allclose(clips, [hard / (hard + 1), 1 / (hard + 1)])
    low = np.exp(-7.5)
    np.testing.assert_allclose(frames, [low / (low + 1), 1 / (low + 1), 0.5, 0.5])
    drawn = [state for state, _ in teacher.propose(400)]
    assert drawn.count(0) < 5 and drawn.count(2) > 100


def test_switching_and_straying_are_the_frames_own_score() -> None:
    teacher = made(reach(), switch=1.0, stray=0.0)
    for state, frame in teacher.propose(30):
        assert state == (teacher.match[frame] if teacher.match[frame] >= 0 else frame)
    teacher = made(reach(), switch=0.0, stray=1.0)
    strayed = [(state, frame) for state, frame in teacher.propose(60) if state >= teacher.frames]
    assert strayed and all(teacher.origin[s - teacher.frames] == f for s, f in strayed)
    ended = torch.ones(1)
    for _ in range(20):
        state, ticket = teacher.sample(1)
        frame = teacher.pending[int(ticket)][1]
        before = teacher.means[frame]
        teacher.update(ticket, Outcome(ended, ended, ended))
        assert teacher.means[frame] == (before + 1) / 2 and state != DEFAULT_RESET


def test_it_goes_on_exactly_in_a_world() -> None:
    env = reach(horizon=50)
    teacher = made(env, usual=0.3, limit=4)
    world = ResetStateWrapper(env, teacher)
    world.reset(0)
    for _ in range(15):
        world.step(torch.zeros(2, 4))
    state, kept = world.get_state(), pack(teacher.get_state())
    other = made(reach(horizon=50), usual=0.3, limit=4, episodes=2)
    runs = []
    for each in (teacher, other):
        each.set_state(unpack(kept))
        world.resets = each
        world.set_state(state)
        runs.append(torch.cat([world.step(torch.zeros(2, 4)).obs["state"] for _ in range(20)]))
    assert torch.equal(*runs) and np.array_equal(teacher.means, other.means)


def test_settings_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="at most 1"):
        made(reach(), switch=0.6, stray=0.6)
