"""A mixture: sums and scales by hand; it is what its parts are; visits; weights that grow."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.buffers.source import Relabel
from embodied.core.build import ConfigError, allow, build
from embodied.core.env import VecEnv
from embodied.core.reward import AugmentsEnv, ObservesSteps, Reward, Scheduled
from embodied.core.tensors import Tensors
from embodied.envs.quadrotor.hover_env import hover_rows
from embodied.rewards.handcrafted.composite import ScheduledWeights, correlation
from embodied.rewards.wrappers.added_observations import VISITS, VisitCountWrapper, with_render
from tests.builders import node_of
from tests.rewards.rows import drawn, make, rows, state, step
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter

allow("tests")
STAY = torch.zeros(2, 1)
NEAR = {
    "_target_": "embodied.rewards.handcrafted.factors.WeightedSum",
    "factors": {"near": {"of": "distance", "a": "tool", "b": "goal"}},
    "env_weight": 0.0,
}
LOOKING = {"_target_": "tests.rewards.test_composite.Looking"}
RND = {"_target_": "embodied.rewards.intrinsic.rnd.Rnd", "env_weight": 0.0, "hidden": [8]}


class Looking(Reward):
    """Watches pictures of the size that it is told."""

    frozen = True
    size = 4

    def augment_env(self, env: VecEnv) -> VecEnv:
        return with_render(env, self.size)

    def __call__(self, rows: Tensors) -> Tensor:
        return rows["next_obs/privileged/picture"].float().flatten(1).mean(1)

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        return {}


class Sharper(Looking):
    size = 8


def mixed(tmp_path: Path, *terms: dict[str, Any], **settings: Any) -> Any:
    """A composite of terms that are named a, b, ..."""
    named = dict(zip("ab", terms, strict=False))
    node = node_of("rewards.handcrafted.composite.CompositeReward", terms=named, **settings)
    return make(node, folder=tmp_path)


def at(*distances: float) -> Tensors:
    """Rows that stay at these distances from the goal."""
    states = torch.stack([state(distance) for distance in distances])
    return rows(states, states)


def test_weights_and_clips_by_hand(tmp_path: Path) -> None:
    """Distances 1, 3: w clip(d, 2) and 2 times the world's 0.5."""
    reward = mixed(tmp_path, {"reward": NEAR, "weight": 10.0, "clip": 2.0}, env_weight=2.0)
    parts = {name: part.tolist() for name, part in reward.components(at(1.0, 3.0)).items()}
    assert parts == {"env": [1.0, 1.0], "a": [10.0, 20.0]}
    assert reward(at(1.0, 3.0)).tolist() == [11.0, 21.0]


def test_a_normalised_term_has_mean_0_and_deviation_1(tmp_path: Path) -> None:
    """Distances 1, 3, 5: mean 3, deviation sqrt(8/3), all of it from `update`, none from a call."""
    reward = mixed(tmp_path, {"reward": NEAR, "normalise": True}, env_weight=0.0)
    batch = at(1.0, 3.0, 5.0)
    for _ in range(2):
        assert reward(batch).tolist() == [1.0, 3.0, 5.0]
    metrics = reward.update(batch)
    torch.testing.assert_close(reward(batch), torch.tensor([-2.0, 0.0, 2.0]) / (8 / 3) ** 0.5)
    assert metrics["a"].item() == pytest.approx(0.0, abs=1e-6)


def test_it_is_what_its_parts_are(tmp_path: Path) -> None:
    protocols = (AugmentsEnv, ObservesSteps, Scheduled)
    for node, frozen, expected in (
        (NEAR, True, []),
        (RND, False, [ObservesSteps]),
        (SCHEDULE, False, [Scheduled]),
        (LOOKING, True, [AugmentsEnv]),
    ):
        reward = mixed(tmp_path, {"reward": NEAR}, {"reward": node}, suspect=0)
        assert reward.frozen is frozen
        assert [each for each in protocols if isinstance(reward, each)] == expected
    assert not mixed(tmp_path, {"reward": NEAR, "normalise": True}).frozen


def test_two_that_look_share_a_picture_or_are_refused(tmp_path: Path) -> None:
    looking, world = {"reward": LOOKING}, Counter(CounterConfig())
    assert mixed(tmp_path, looking, looking).augment_env(world).depth == 1
    other = {"reward": {"_target_": "tests.rewards.test_composite.Sharper"}}
    with pytest.raises(ConfigError, match=r"reward\.terms\.b renders .* with other settings"):
        mixed(tmp_path, looking, other).augment_env(world)


def test_state_goes_on_exactly(tmp_path: Path) -> None:
    terms = {"reward": NEAR, "normalise": True}, {"reward": RND}
    one, other = (mixed(tmp_path, *terms) for _ in range(2))
    everyone = torch.arange(2)
    one.observe_step(drawn(2), everyone, step(2, [True, False], [True, False]))
    one.update(drawn(8))
    other.set_state(one.get_state())
    for reward in (one, other):
        reward.observe_step(drawn(2, 1), everyone, step(2, [True, True], [False, False]))
        reward.update(drawn(8, 1))
        assert reward.get_state()["record"]["won"] == [1.0, 0.0, 0.0]
    assert torch.equal(one(drawn(8, 2)), other(drawn(8, 2)))
    assert one.get_state()["record"] == other.get_state()["record"]


def test_a_term_that_goes_against_success_is_warned_about_once(tmp_path: Path) -> None:
    """Episodes of one step; those that succeed are nearer, so distance goes against success."""
    terms = {"reward": NEAR}, {"reward": NEAR, "weight": -1.0}
    reward = mixed(tmp_path, *terms, report=4, suspect=2)
    seen = []
    for _ in range(12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ended = step(2, [True, True], [True, False])
            reward.observe_step(at(1.0, 3.0), torch.arange(2), ended)
        seen.append([str(warning.message) for warning in caught])
    (line,) = seen.pop(3)
    assert "term a was lower in successful episodes" in line and not any(seen)


def test_correlation_by_hand() -> None:
    pairs = ([1.0, 2, 3], [2.0, 4, 6]), ([1.0, 2, 3], [1.0, 3, 2]), ([1.0, 1, 1], [1.0, 3, 2])
    found = [correlation(torch.tensor(a), torch.tensor(b)).item() for a, b in pairs]
    assert found == pytest.approx([1.0, 0.5, 0.0])


class Circle(Counter):
    """The number that is seen has only two values."""

    def _obs(self) -> Tensors:
        return {"state": (self.age % 2).float()[:, None]}


def test_visits_are_counted_within_an_episode_of_each_row() -> None:
    """0 1 0 1 0 ...: row 0 ends after 3 steps, row 1 after 5; each begins again at one visit. They
    go on from a saved state."""
    env, other = (VisitCountWrapper(Circle(CounterConfig())) for _ in range(2))
    assert env.reset()[VISITS].tolist() == [1, 1]
    results = []
    for _ in range(5):
        results.append(env.step(STAY))
        other.set_state(env.get_state())
        env, other = other, env
    reached = [result.next_obs[VISITS].tolist() for result in results]
    assert reached == [[1, 1], [2, 2], [2, 2], [1, 3], [2, 3]]
    begun = [result.obs[VISITS].tolist() for result in results]
    assert begun == [[1, 1], [2, 2], [1, 2], [1, 3], [2, 1]]


def test_visits_hash_apart() -> None:
    numbers = {"state": torch.arange(20_000.0).view(-1, 1) / 500}
    env = VisitCountWrapper(Counter(CounterConfig(num_envs=20_000)))
    assert len(env._hash(numbers).unique()) == 20_000


def test_decay_divides_by_the_visits(tmp_path: Path) -> None:
    reward = mixed(tmp_path, {"reward": NEAR, "decay": 2.0}, env_weight=0.0)
    batch = at(4.0, 4.0) | {f"next_obs/{VISITS}": torch.tensor([1, 4])}
    assert reward(batch).tolist() == [4.0, 0.25]
    assert VISITS in reward.augment_env(Counter(CounterConfig())).spec.obs


SCHEDULE = {
    "_target_": "embodied.rewards.handcrafted.composite.ScheduledWeights",
    "function": "embodied.envs.quadrotor.hover_env.hover_rows",
    "start": {"position": 5.0, "velocity": 0.01, "action": 0.01},
    "factor": {"position": 1.2, "velocity": 1.4, "action": 1.4},
    "limit": {"position": 40.0, "velocity": 1.0, "action": 1.0},
}


def test_weights_at_each_bump() -> None:
    reward = build(SCHEDULE, Reward)
    assert isinstance(reward, ScheduledWeights)
    for at, position, velocity in (
        (0, 5.0, 0.01),
        (99_999, 5.0, 0.01),
        (100_000, 6.0, 0.014),
        (299_999, 7.2, 0.0196),
        (10_000_000, 40.0, 1.0),
        (10, 5.0, 0.01),
    ):
        reward.set_step(at)
        expected = pytest.approx({"position": position, "velocity": velocity, "action": velocity})
        assert reward.weights == expected
        assert {name: float(value) for name, value in reward.update({}).items()} == expected


def hovering() -> dict[str, torch.Tensor]:
    state = torch.zeros(2, 28)
    state[:, 3:12:4] = 1.0
    state[:, 0] = 0.5
    return {
        "obs/critic/state": state,
        "action": torch.zeros(2, 4),
        "discount": torch.tensor([0.99, 0.0]),
        "reward": torch.tensor([7.0, 7.0]),
    }


def test_stored_rows_are_rewarded_with_the_weights_of_now() -> None:
    """r = 2 - 1/2 (w_p 0.25 + w_a 4 * 0.334^2); a row that ended the world has none."""
    replay, reward = ReplayBuffer(4), build(SCHEDULE, Reward)
    replay.add(hovering())
    source = Relabel(replay, reward)
    for at, position, action in ((0, 5.0, 0.01), (200_000, 7.2, 0.0196)):
        reward.set_step(at)
        batch = source.sample(64)
        expected = 2 - 0.5 * (position * 0.25 + action * 4 * 0.334053**2)
        torch.testing.assert_close(batch["reward"], expected * (batch["discount"] > 0))
    assert replay.sample(1)["reward"] == 7.0


def test_a_tilt_costs_its_share() -> None:
    """A quarter turn about x: q_w^2 = 1/2, R = diag(1, 0, 0) and +-1 off the diagonal."""
    tilted = hovering()
    tilted["obs/critic/state"][:, 0] = 0
    tilted["obs/critic/state"][:, 3:12] = torch.tensor([1.0, 0, 0, 0, 0, -1, 0, 1, 0])
    weights = {"position": 40.0, "velocity": 1.0, "action": 0.0}
    assert float(hover_rows(tilted, weights)[0]) == pytest.approx(2 - 0.5 * 5 * 0.5)


def test_settings_reach_the_function() -> None:
    """At the level of another vehicle the same action is no effort."""
    reward = build(SCHEDULE | {"settings": {"level": 0.0}}, Reward)
    assert float(reward(hovering())[0]) == pytest.approx(2 - 0.5 * 5.0 * 0.25)
    with pytest.raises(ConfigError, match="no speed"):
        build(SCHEDULE | {"factor": {"speed": 2.0}}, Reward)


def test_rewards_are_multiplied() -> None:
    scaled = build(node_of("rewards.handcrafted.composite.Scaled", factor=0.1), Reward)
    paid = scaled({"reward": torch.tensor([10.0, -5.0])})
    torch.testing.assert_close(paid, torch.tensor([1.0, -0.5]))
