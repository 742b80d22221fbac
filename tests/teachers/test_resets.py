"""Starts from saved states: what is saved continues exactly, and who begins where, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, build
from embodied.core.env import NotSavable, restored
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.envs.fr3.env import Config, Fr3
from embodied.envs.gym import Config as GymConfig
from embodied.envs.gym import Gym
from embodied.teachers.resets.reset_distribution import (
    DEFAULT_RESET,
    ResetDistribution,
    ResetStateWrapper,
    Trajectories,
    record_trajectories,
)
from embodied.teachers.resets.reset_distribution import (
    Config as Resets,
)
from embodied.teachers.resets.reverse import Reverse
from embodied.teachers.resets.snapshot import Snapshot
from embodied.teachers.resets.trajectory import nearby_states, similarity, similarity_graph
from embodied.teachers.teacher import FILE, Curriculum, EpisodeLog, Outcome
from embodied.training.logger import Log
from embodied.training.train import train
from tests.builders import make_policy
from tests.teachers.place import ended
from tests.training.test_teaching import NODE, PPO

SCRIPT = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "reach", "quality": 1.0}
SNAPSHOT = "embodied.teachers.resets.snapshot.Snapshot"
REVERSE = "embodied.teachers.resets.reverse.Reverse"
STILL = torch.zeros(2, 4)


def reach(rows: int = 2, horizon: int = 20) -> Fr3:
    return Fr3(Config(task="reach", num_envs=rows, threads=1, horizon=horizon))


def made(target: str, env: Any, **settings: Any) -> Any:
    node = {"_target_": target, "player": SCRIPT, "episodes": 3, "every": 2, **settings}
    return build(node, Curriculum, spec=env.spec, env=env, seed=0)


def recorded(env: Fr3, episodes: int, every: int) -> Trajectories:
    policy = build(SCRIPT, Policy, spec=env.spec)
    return record_trajectories(policy, env, episodes, every, seed=0, gamma=0.99)


def ends(n: int, score: float = 1.0) -> Outcome:
    return ended(*[score] * n)


def paths(sizes: list[int], returns: list[float], togo: list[float] | None = None) -> Trajectories:
    """Trajectories of so many states each, without a world."""
    lengths = torch.tensor(sizes)
    episode = torch.arange(len(sizes)).repeat_interleave(lengths)
    time = torch.cat([torch.arange(size) for size in sizes])
    left = lengths[episode] - time
    values = torch.tensor(togo) if togo else left.double()
    won = (torch.tensor(returns) > 0).float()
    obs = {"obs/state": values[:, None]}
    return Trajectories(
        obs, episode, time, left, values, left.double(), torch.tensor(returns), lengths, won
    )


@pytest.mark.parametrize("world", ["hopper", "reach"])
def test_what_is_saved_goes_on_exactly_as_it_did(world: str) -> None:
    """From each saved state the player earns to the bit what it earned from there."""
    env = reach() if world == "reach" else Gym(GymConfig("Hopper-v5", 2))
    policy = make_policy("gaussian.Gaussian", env.spec, seed=None, hidden=[8]).eval()
    saved = record_trajectories(policy, env, episodes=3, every=5, seed=1, gamma=0.9)
    assert saved.returns.shape == (3,) and set(saved.episode.tolist()) == {0, 1, 2}
    assert (saved.time % 5 == 0).all() and len(saved) == tt.length(saved.states)
    assert (saved.time + saved.left == saved.lengths[saved.episode]).all()
    assert saved.only(torch.tensor([2, 0])).episode.unique().tolist() == [0, 1]
    for number in (0, len(saved) // 2, len(saved) - 1):
        env.reset(7)
        row = int(saved.episode[number]) % 2  # networks round by place in the batch
        at, which = torch.tensor([row]), torch.tensor([number])
        obs = env.set_state(restored(env.get_state(), at, saved.states, which, env.state_roles))
        earned, over = [], False
        while not over:
            with torch.no_grad():
                action, _ = policy.act(obs, policy.initial(2), policy.sample_noise(2))
            step = env.step(action[:, 0])
            earned.append(float(step.reward[row]))
            obs = step.obs
            over = bool(step.terminated[row]) or len(earned) >= int(saved.left[number])
        assert len(earned) == int(saved.left[number])
        assert sum(earned) == pytest.approx(float(saved.after[number]), rel=1e-12)
        discounted = sum(0.9**k * reward for k, reward in enumerate(earned))
        assert discounted == pytest.approx(float(saved.togo[number]), rel=1e-12)


class Fixed(ResetDistribution):
    """Begins in state 1 whenever it may."""

    def __init__(self, env: Any, **settings: Any) -> None:
        config = Resets(player=SCRIPT, episodes=2, every=3, **settings)
        super().__init__(config, env.spec, env)
        self.heard: list[Any] = []

    def select(self, paths: Trajectories) -> Trajectories:
        return paths

    def propose(self, n: int) -> list[tuple[int, Any]]:
        return [(1, "memo")] * n

    def learn(self, states: list[int], scores: Any, memos: list[Any]) -> None:
        self.heard += zip(states, scores.tolist(), memos, strict=True)


def test_episodes_begin_there_and_are_cut_off_after_the_limit(tmp_path: Path) -> None:
    env = reach(horizon=50)
    resets = Fixed(env, limit=2, steps=12)
    world = ResetStateWrapper(env, resets, EpisodeLog(tmp_path / FILE))
    begun = resets.paths.states["obs/state"][1].expand(2, -1)
    assert torch.equal(world.reset(3)["state"], begun)
    first, second = (world.step(STILL) for _ in range(2))
    assert not first.ended.any() and first.log["ticket"].tolist() == [0, 1]
    assert second.truncated.all() and not second.terminated.any()
    assert torch.equal(second.obs["state"], begun)  # begun again
    assert not torch.equal(second.next_obs["state"], begun)  # the true successor
    assert resets.heard == [(1, 0.0, "memo")] * 2
    for _ in range(4):  # 12 environment steps are done: from now on as usual
        last = world.step(STILL)
    assert last.truncated.all() and resets.clock == 12
    assert not torch.equal(last.obs["state"], begun)
    assert not torch.equal(last.obs["state"][0], last.obs["state"][1])
    for _ in range(10):
        assert not world.step(STILL).truncated.any()  # the limit is of placed ones
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    longest = float(resets.paths.lengths.max())
    assert len(lines) == 6 and lines[0]["length"] == 2
    assert lines[0]["task"] == [pytest.approx(3 / longest, abs=1e-4)]


def test_usual_episodes_and_those_without_a_score_teach_nothing() -> None:
    resets = Fixed(reach(), usual=0.5)
    states, tickets = resets.sample(200)
    usual = states == DEFAULT_RESET
    assert 70 < int(usual.sum()) < 130
    with pytest.warns(UserWarning, match="is NaN"):
        resets.update(tickets[:50], ends(50, float("nan")))
    assert resets.dropped == int((~usual[:50]).sum()) and not resets.heard
    resets.update(tickets[50:199], ends(149))
    assert len(resets.heard) == int((~usual[50:199]).sum())
    assert list(resets.pending) == [199]  # an episode that never ends


def test_a_return_is_scored_against_what_the_player_still_earned() -> None:
    resets = Fixed(reach(), signal="return")
    resets.paths = replace(resets.paths, after=torch.tensor([4.0, -2.0, *resets.paths.after[2:]]))
    outcome = Outcome(torch.tensor([1.0, -3.0, -1.0]), torch.zeros(3), torch.ones(3))
    assert resets.scores(np.array([0, 1, 1]), outcome).tolist() == [0.25, 0, 1]
    endless = replace(outcome, ret=torch.full((3,), torch.inf))
    assert np.isnan(resets.scores(np.array([0, 1, 1]), endless)).all()


def test_snapshot_keeps_the_best_episodes_and_draws_clusters_evenly() -> None:
    teacher: Snapshot = made(SNAPSHOT, reach(), best=2, clusters=2)
    kept = teacher.select(paths([3, 2, 4], [5.0, 1.0, 7.0]))
    assert kept.returns.tolist() == [5, 7] and kept.episode.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert kept.time.tolist() == [0, 1, 2, 0, 1, 2, 3]
    teacher.paths = paths([100], [1.0], [0.0] * 99 + [50.0])
    teacher.set_up()
    assert sorted(map(len, teacher.members)) == [1, 99]
    drawn = [state for state, _ in teacher.propose(400)]
    assert 150 < drawn.count(99) < 250  # a cluster of one is drawn as often as that of 99
    teacher.paths = paths([5], [1.0], [2.0] * 5)  # states that are all alike
    teacher.set_up()
    assert len(teacher.members) == 1


def test_reverse_goes_back_when_it_succeeds_and_only_then() -> None:
    teacher: Reverse = made(REVERSE, reach(), batch=4, enough=0.5, width=2, stride=3, usual=0.0)
    assert teacher.select(paths([3, 2], [0.0, 1.0])).returns.tolist() == [1]  # those that succeeded
    with pytest.raises(ConfigError, match="successful"):
        teacher.select(paths([3], [0.0]))
    teacher.paths = paths([5], [1.0])
    teacher.set_up()
    assert {state for state, _ in teacher.propose(50)} == {3, 4}  # the two before the end
    late = (0, 5)
    teacher.learn([4] * 3, np.array([1.0, 0.0, 0.0]), [late] * 3)
    assert teacher.point[0] == 5
    teacher.learn([4], np.array([1.0]), [late])  # two of four
    assert teacher.point[0] == 2
    teacher.learn([4] * 4, np.ones(4), [late] * 4)  # begun before it moved: not counted
    assert teacher.point[0] == 2 and not teacher.recent[0]
    assert {state for state, _ in teacher.propose(50)} == {0, 1}
    teacher.learn([1] * 4, np.ones(4), [(0, 2)] * 4)
    assert teacher.point[0] == 0
    assert {state for state, _ in teacher.propose(5)} == {DEFAULT_RESET}
    teacher.update(teacher.sample(5)[1], ends(5))
    assert teacher.metrics() == {"done": 1.0}


class Closed(Wrapper):
    def get_state(self) -> Tensors:
        raise NotSavable("Closed cannot save its state")


@pytest.mark.parametrize("target", [SNAPSHOT, REVERSE])
def test_what_cannot_be(target: str) -> None:
    env = reach()
    with pytest.raises(ConfigError, match="cannot begin in saved states"):
        made(target, Closed(env))
    with pytest.raises(ConfigError, match=r"teacher\.run=RUN"):
        made(target, env, player=None)
    with pytest.raises(ConfigError, match="needs one policy to record"):
        made(target, env, run="RUN")
    with pytest.raises(ConfigError, match="needs env"):
        build({"_target_": target, "player": SCRIPT}, Curriculum, spec=env.spec)
    with pytest.raises(ConfigError, match="at most 1"):
        made_trajectory(env, switch=0.6, stray=0.6)


@pytest.mark.parametrize(
    ("target", "more"), [(SNAPSHOT, {}), (REVERSE, PPO)], ids=["replay", "rollout"]
)
def test_a_run_is_resumed_exactly(tmp_path: Path, target: str, more: dict[str, Any]) -> None:
    teacher = {"_target_": target, "player": SCRIPT, "episodes": 3, "every": 2, "usual": 0.2}
    teacher |= {"limit": 6, "steps": 360}
    node = {**NODE, **more, "teacher": teacher, "env": {**NODE["env"], "horizon": 20}}

    def run(name: str, **changes: Any) -> list[dict[str, Any]]:
        folder = tmp_path / name
        train({**node, "out": str(folder), **changes}, Log(folder, silent=True))
        return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]

    whole = run("whole")
    assert len(whole) > 40 and any(row["task"] != [0.0] for row in whole)
    assert [row for row in whole if row["length"] > 6]  # as usual, in the end
    run("parts", steps=240)
    assert run("parts", resume=str(tmp_path / "parts")) == whole


made_trajectory = partial(made, "embodied.teachers.resets.trajectory.Trajectory", usual=0.0)


def alike() -> Trajectories:
    """Two trajectories of five states: the second passes by the first's, 0.1 off."""
    return paths([5, 5], [1.0, 1.0], [0, 1, 2, 3, 4, 0.1, 1.1, 2.1, 3.1, 4.1])


def test_the_graph_joins_what_is_alike_of_other_trajectories() -> None:
    """Similarity falls with the mean square; never the first two states nor the last are joined."""
    a, b = np.array([[0.0, 0.0]]), np.array([[0.0, 0.0], [1.0, 2.0]])
    np.testing.assert_allclose(similarity(a, b, 2.0), [[1.0, np.exp(-2 * 2.5)]])
    match, how = similarity_graph(alike(), 1.0, 1e-10)
    assert match.tolist() == [7, 7, 7, 8, 8, 2, 2, 2, 3, 3]
    spread = np.array(alike().togo).std()
    np.testing.assert_allclose(how[2], np.exp(-((0.1 / spread) ** 2)), rtol=1e-5)
    assert (similarity_graph(alike(), 1.0, 0.9999)[0] == -1).all()
    assert (similarity_graph(paths([5], [1.0]), 1.0, 1e-10)[0] == -1).all()  # nobody to go over to


def test_beside_a_state_is_where_random_actions_lead() -> None:
    env = reach()
    saved = recorded(env, 2, 2)
    near = nearby_states(saved, env, 3, 1.0, np.random.default_rng(0))
    assert 0 < len(near) <= len(saved) and set(near.states) == set(saved.states)
    far = (near.states["obs/state"][:, None] - saved.states["obs/state"][None]).abs().sum(2)
    assert (far.min(1).values > 0).all()
    places = [set(zip(p.episode.tolist(), p.time.tolist(), strict=True)) for p in (near, saved)]
    assert places[0] <= places[1]


def test_what_goes_wrong_is_drawn_more_often() -> None:
    teacher = made_trajectory(reach(), alpha=1.0, switch=0.0, stray=0.0)
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
    teacher = made_trajectory(reach(), switch=1.0, stray=0.0)
    for state, frame in teacher.propose(30):
        assert state == (teacher.match[frame] if teacher.match[frame] >= 0 else frame)
    teacher = made_trajectory(reach(), switch=0.0, stray=1.0)
    strayed = [(state, frame) for state, frame in teacher.propose(60) if state >= teacher.frames]
    assert strayed and all(teacher.origin[s - teacher.frames] == f for s, f in strayed)
    for _ in range(20):
        state, ticket = teacher.sample(1)
        frame = teacher.pending[int(ticket)][1]
        before = teacher.means[frame]
        teacher.update(ticket, ends(1))
        assert teacher.means[frame] == (before + 1) / 2 and state != DEFAULT_RESET
