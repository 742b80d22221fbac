"""Hindsight replay: goals and rewards by hand, ends, resume, refusals, a task that needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation, TimeLimit, TransformReward

import embodied as em
from embodied.buffers.hindsight import Config, HindsightReplayBuffer
from embodied.buffers.replay import ReplayBuffer
from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import load_state
from embodied.core.env import VecEnv
from embodied.core.errors import ContractError, ContractWarning
from embodied.core.tensors import Tensors
from embodied.envs import gym
from embodied.envs.gym_object import register
from embodied.envs.wrappers.observations import Partial, PartialConfig
from embodied.training.collector import Collector
from embodied.training.config import read_config
from embodied.training.off_policy import build_off_policy
from embodied.training.trainer import RunParts
from tests.builders import make_learner, make_policy, node_of
from tests.toy_envs import Reach
from tests.training.test_train import resumed, settings

GAMMA = 0.9
HINDSIGHT = node_of("buffers.hindsight.HindsightReplayBuffer")
UNREACHED = 99.0


class Trip(gymnasium.Env[Any, Any]):
    """Goals are (number of the episode, time), rewards minus the difference of times; the wanted
    time is never reached. An episode of 1 to 6 steps ends with a fall, or is cut (`cut`)."""

    observation_space = spaces.Dict(
        {
            "observation": spaces.Box(0, 100, (1,), np.float64),
            "achieved_goal": spaces.Box(0, 1e6, (2,), np.float64),
            "desired_goal": spaces.Box(0, 1e6, (2,), np.float64),
        }
    )
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    reported = True  # whether the info says that a fall is no success

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []  # shapes of goals

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.number, self.time = int(self.np_random.integers(1_000_000)), 0
        self.end, self.cut = int(self.np_random.integers(1, 7)), self.np_random.random() < 0.5
        return self._obs(), {}

    def _obs(self) -> dict[str, Any]:
        reached, wanted = (
            np.array([self.number, time], np.float64) for time in (self.time, UNREACHED)
        )
        time = np.array([self.time], np.float64)
        return {"observation": time, "achieved_goal": reached, "desired_goal": wanted}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        obs = self._obs()
        reward = self.compute_reward(obs["achieved_goal"], obs["desired_goal"], {"own": True})
        over = self.time == self.end
        info = {"is_success": False} if self.reported else {}
        return obs, float(reward), over and not self.cut, over and self.cut, info

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        if "own" not in info:
            self.asked.append(np.shape(achieved_goal))
        return -np.abs(achieved_goal - desired_goal).sum(-1)


class OneByOne(Trip):
    """Takes a pair of goals at a time, and ends where the goal is reached."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        assert achieved_goal.shape == (2,)
        return super().compute_reward(achieved_goal, desired_goal, info)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        return bool((achieved_goal == desired_goal).all())


def made(env: Callable[[], gymnasium.Env[Any, Any]], count: int = 3) -> gym.Gym:
    return gym.Gym(gym.Config(register(env), count))


def buffer_of(env: VecEnv, capacity: int = 100, share: float = 0.8) -> HindsightReplayBuffer:
    return HindsightReplayBuffer(Config(share), capacity, env, GAMMA)


def played(
    env: VecEnv, replay: ReplayBuffer, steps: int, known: dict[int, int] | None = None
) -> Collector:
    """Random steps into `replay`; `known` gets the newest time of each episode by its number."""
    collector = Collector(env, make_policy("random.Random", env.spec), GAMMA, seed=0)
    more(collector, replay, steps, known)
    return collector


def more(
    collector: Collector, replay: ReplayBuffer, steps: int, known: dict[int, int] | None = None
) -> None:
    for _ in range(steps):
        transitions, step = collector.step()
        replay.add(transitions)
        replay.follow(step)
        if known is not None:
            known |= dict(step.next_obs["achieved_goal"].int().tolist())


def stored(replay: ReplayBuffer) -> Tensors:
    return replay.take(torch.arange(len(replay)))


@pytest.mark.parametrize(("kind", "takes_all"), [(Trip, True), (OneByOne, False)])
def test_goals_are_of_later_steps_of_the_episode_and_rewards_are_those_of_the_environment(
    kind: type[Trip], takes_all: bool
) -> None:
    """Also in a full ring whose size is no multiple of the envs, and in episodes that still run."""
    env, known = made(kind), dict[int, int]()
    replay = buffer_of(env, capacity=70)
    collector = played(env, replay, 20, known)
    trip: Any = env.envs[0].unwrapped
    offsets: list[float] = []
    for _ in range(40):
        more(collector, replay, 1, known)
        trip.asked.clear()
        batch = replay.sample(100)
        replaced = batch["obs/desired_goal"][:, 1] < UNREACHED
        assert replaced.sum() == 80 and replaced[:5].sum() == 4 == replaced[50:55].sum()
        if offsets and takes_all:
            assert trip.asked == [(80, 2)], "one call for a batch"
        reached, wanted = batch["next_obs/achieved_goal"], batch["next_obs/desired_goal"]
        assert torch.equal(batch["obs/desired_goal"], wanted)
        assert torch.equal(wanted[:, 0], reached[:, 0]), "the goal is of the same episode"
        newest = torch.tensor([known[int(number)] for number in reached[:, 0]])
        ahead = wanted[:, 1] - reached[:, 1]
        assert (ahead >= 0).all() and (wanted[:, 1] <= newest)[replaced].all()
        torch.testing.assert_close(batch["reward"], -(reached - wanted).abs().sum(1))
        offsets += ahead[replaced & (newest - reached[:, 1] == 3)].tolist()
        whole = stored(replay)
        fell = whole["next_obs/achieved_goal"][whole["discount"] == 0]
        ends = (reached[:, None] == fell).all(2).any(1)
        if not takes_all:  # compute_terminated
            ends |= ahead == 0
        assert torch.equal(batch["discount"], GAMMA * (~ends).float())
    counts = torch.tensor(offsets).long().bincount()
    assert len(counts) == 4 and counts.min() > 0.7 * counts.float().mean(), "drawn evenly"


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_share_is_what_is_asked_for_and_what_is_stored_does_not_change(share: float) -> None:
    env = made(Trip)
    replay = buffer_of(env, share=share)
    played(env, replay, 9)
    assert (replay.sample(40)["obs/desired_goal"][:, 1] < UNREACHED).sum() == 40 * share
    assert (stored(replay)["obs/desired_goal"][:, 1] == UNREACHED).all()


@pytest.mark.parametrize("capacity", [3, 4, 8])
def test_a_ring_that_is_shorter_than_episodes_keeps_them_apart(capacity: int) -> None:
    env = made(Trip)
    replay = buffer_of(env, capacity)
    collector = played(env, replay, 1)
    for _ in range(60):
        more(collector, replay, 1)
        index = torch.arange(len(replay)).repeat(5)
        places = index, replay.later(index)
        own, goal = (replay.leaf("next_obs/achieved_goal", at) for at in places)
        assert torch.equal(own[:, 0], goal[:, 0]) and (own[:, 1] <= goal[:, 1]).all()


class Passed(Trip):
    """Ends, with success, when the wanted time is over."""

    def _obs(self) -> dict[str, Any]:
        obs = super()._obs()
        obs["desired_goal"][1] = 2.5
        return obs

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *_ = super().step(action)
        return obs, reward, self.time == 3, self.time == self.end, {"is_success": self.time == 3}

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return achieved_goal[..., 1] > desired_goal[..., 1]


def test_what_ended_with_its_own_goal_does_not_end_with_another_one() -> None:
    env = made(Passed)
    replay = buffer_of(env, share=1.0)
    played(env, replay, 20)
    assert (stored(replay)["discount"] == 0).sum() > 5
    batch = replay.sample(200)  # a goal of this step or a later one is not passed
    assert torch.equal(batch["discount"], torch.full((200,), GAMMA))


def test_a_running_episode_counts_and_one_that_is_lost_goes_no_further() -> None:
    """As after a resume of an environment that cannot be saved, or an evaluation in it."""
    env = made(plane)
    replay = buffer_of(env)
    collector = played(env, replay, 4)
    first = torch.arange(3).repeat(100)  # the first step of each env
    assert set(replay.later(first).tolist()) == set(range(12)), "all steps until now"
    replay.end_episodes(torch.tensor([True, False, True]))
    collector.restart(seed=1)
    more(collector, replay, 2)
    later = replay.later(first)
    assert set(later[first != 1].tolist()) == {at for at in range(12) if at % 3 != 1}
    assert set(later[first == 1].tolist()) == set(range(1, 18, 3))


@pytest.mark.parametrize("count", [2, 9, 30])
def test_a_restored_buffer_draws_the_same(count: int, tmp_path: Path) -> None:
    """Before, in and after the first turn of the ring, in the middle of episodes."""
    env = made(OneByOne)
    replay, other = (buffer_of(env, capacity=31) for _ in range(2))
    collector = played(env, replay, count)
    torch.save(replay.get_state(), tmp_path / "replay.pt")
    other.set_state(torch.load(tmp_path / "replay.pt", weights_only=True))
    for _ in range(9):
        transitions, step = collector.step()
        drawn: list[Tensors] = []
        for one in (replay, other):
            one.add(transitions)
            one.follow(step)
            torch.manual_seed(0)
            drawn.append(one.sample(20))
        torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=0)


def test_resume_is_exact(tmp_path: Path) -> None:
    """In an environment of our own; 120 steps of 4 envs end within episodes of 9."""
    arm = node_of("envs.so101.So101", num_envs=4, horizon=9)
    resumed(settings(tmp_path, env=arm, replay=HINDSIGHT, replay_size=150, steps=240), 120)


@pytest.mark.parametrize(
    ("target", "task", "close"),
    [("so101.So101", {}, 0.015), ("fr3.env.Fr3", {"task": "reach"}, 0.02)],
)
def test_goals_of_our_arms_are_those_of_their_tasks(
    target: str, task: dict[str, Any], close: float
) -> None:
    """A replaced goal shows in the difference too; within `close` the reward is 1, and the end."""
    env = build(node_of(f"envs.{target}", num_envs=4, horizon=9, **task), VecEnv)
    replay = buffer_of(env, share=1.0)
    played(env, replay, 25)
    batch = replay.sample(200)
    place = {name: at for at, name in enumerate(env.spec.obs["state"].names)}
    for when in ("obs", "next_obs"):
        tool, goal, between = (
            batch[f"{when}/state"][:, [place[f"{what}_{axis}"] for axis in "xyz"]]
            for what in ("tool", "goal", "goal_from_tool")
        )
        torch.testing.assert_close(between, goal - tool)
    won = (goal - tool).norm(dim=1) < close
    assert 0.1 < won.float().mean() < 0.9
    assert torch.equal(batch["reward"], won.float())
    assert torch.equal(batch["discount"], GAMMA * (~won).float())


class Parted(Trip):
    """Goals in parts, each of another type."""

    parts = spaces.Dict({"count": spaces.Discrete(9, start=3), "bits": spaces.MultiBinary(2)})
    observation_space = spaces.Dict({"achieved_goal": parts, "desired_goal": parts})

    def _obs(self) -> dict[str, Any]:
        reached = {"count": 3 + self.time, "bits": np.array([self.time % 2, 1], np.int8)}
        return {"achieved_goal": reached, "desired_goal": {**reached, "count": 11}}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> float:
        assert achieved_goal["bits"].dtype == np.int8 and 3 <= achieved_goal["count"] <= 11
        return -1.0 if achieved_goal["count"] != desired_goal["count"] else 0.0


def test_goals_in_parts_keep_their_types() -> None:
    env = made(Parted)
    replay = buffer_of(env)
    played(env, replay, 9)
    batch = replay.sample(100)
    reached, wanted = (batch[f"next_obs/{key}_goal/count"] for key in ("achieved", "desired"))
    assert torch.equal(batch["reward"], -(reached != wanted).float())
    assert 20 < (batch["reward"] == 0).sum() < 80


def scaled() -> Any:
    return TransformReward(Trip(), lambda reward: 10 * float(reward))


def refuses(line: str, env: Any) -> None:
    with pytest.raises((ConfigError, ContractError), match=line) as caught:
        played(env, buffer_of(env), 50)
    assert "\n" not in str(caught.value)


def explained(fell: bool = False, **attributes: Any) -> type[Trip]:
    """A Trip with these attributes, whose falls are successes if `fell`."""

    class Other(Trip):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            obs, reward, over, late, info = super().step(action)
            return obs, reward, over, late, {"is_success": over} if fell else info

    for name, value in attributes.items():
        setattr(Other, name, value)
    return Other


def asks_the_info(self: Any, achieved_goal: Any, desired_goal: Any, info: Any) -> float:
    return 0.0 if info["own"] else -1.0


Winner = explained(fell=True)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (scaled, r"scaled-v0: a step had the reward -9\d+, and its goal gives -9\d when"),
        (explained(compute_reward=asks_the_info), "raised KeyError: 'own' .*info empty"),
        (Winner, "terminated, and the environment does not say .*: write compute_terminated"),
        (
            explained(reported=False),
            r'terminated, .* or info\["is_success"\] = False where no goal did it',
        ),
        (
            explained(compute_reward=property()),
            r"no goals .*: it has no compute_reward\(achieved_goal, desired_goal, info\)",
        ),
        (lambda: FlattenObservation(Trip()), "no goals .*: its observation has no achieved_goal"),
    ],
)
def test_an_environment_whose_goals_cannot_be_replaced_is_refused(kind: Any, line: str) -> None:
    refuses(line, made(kind))


class Says(gymnasium.Wrapper[Any, Any, Any, Any]):
    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return (achieved_goal == desired_goal).all(-1)


def test_a_wrapper_may_say_where_goals_end_episodes() -> None:
    env = made(lambda: Says(Winner()))
    replay = buffer_of(env, share=1.0)
    played(env, replay, 20)
    batch = replay.sample(100)
    won = batch["next_obs/achieved_goal"] == batch["next_obs/desired_goal"]
    assert (batch["discount"] == 0)[won.all(1)].all() and 20 < won.all(1).sum() < 80


def test_a_run_that_may_stop_at_a_success_says_so_at_once() -> None:
    with pytest.warns(ContractWarning, match="no compute_terminated.*: this run stops if a step"):
        played(made(Winner), buffer_of(made(Winner)), 1)


def test_other_environments_and_sizes_are_refused() -> None:
    refuses("Reach has no goals that could be replaced: replay=hindsight is for Gym", Reach())
    shaped = build(node_of("envs.so101.So101", num_envs=1, reward="shaped"), VecEnv)
    refuses("so101.* for env.reward=sparse", shaped)
    partial = Partial(PartialConfig({"achieved_goal": (0,)}), made(Trip))
    refuses("a wrapper changes the observation achieved_goal", partial)
    with pytest.raises(ConfigError, match=r"data\.replay_size=2 should be at least 3"):
        buffer_of(made(Trip), capacity=2)


SCALED = node_of("rewards.handcrafted.composite.Scaled", factor=2.0)


@pytest.mark.parametrize(
    ("learning", "acting", "given", "instead"),
    [
        ({"n_step": 3}, {}, {}, "learner.n_step=1"),
        ({}, {"chunk": 2}, {}, "execute=1"),
        ({}, {}, {"reward": SCALED}, "reward=null"),
        ({}, {}, {"actors": 1}, "data.actors=0"),
        ({}, {}, {"demos": "demos", "demo_fraction": None}, "data.demo_fraction=0.5"),
    ],
)
def test_what_does_not_store_single_steps_is_refused(
    learning: dict[str, Any], acting: dict[str, Any], given: Any, instead: str, tmp_path: Path
) -> None:
    env = Reach()
    policy = make_policy("gaussian.Gaussian", env.spec, hidden=[8], **acting)
    learner = make_learner("off_policy.sac.Sac", policy, hidden=[8], **learning)
    config = read_config(settings(tmp_path, replay=HINDSIGHT, **given))
    with pytest.raises(ConfigError, match=f"asks .* single steps, .*: {instead}"):
        build_off_policy(RunParts(config, env, policy, learner, torch.device("cpu"), None))


class Plane(gymnasium.Env[Any, Any]):
    """A point goes from the middle of a plane to a goal in it: reward 0 within 5 cm, else -1."""

    place = spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = spaces.Dict(
        {"observation": place, "achieved_goal": place, "desired_goal": place}
    )
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.goal = np.zeros(2, np.float32), self._drawn()
        return self._obs(), {}

    def _drawn(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def _obs(self) -> dict[str, Any]:
        return {"observation": self.x, "achieved_goal": self.x, "desired_goal": self.goal}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x = np.clip(self.x + 0.2 * action, -1, 1).astype(np.float32)
        reward = float(self.compute_reward(self.x, self.goal, {}))
        return self._obs(), reward, False, False, {"is_success": reward == 0}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -(np.linalg.norm(achieved_goal - desired_goal, axis=-1) > 0.05).astype(np.float32)


def plane() -> Any:
    return TimeLimit(Plane(), 15)


@pytest.mark.parametrize("learner", ["sac", "td3"])
def test_an_object_of_a_python_program_is_trained_in(learner: str, tmp_path: Path) -> None:
    """Evaluated in too, in the middle of an episode."""
    small: Any = {"size": "debug", "verbose": False, "steps": 90, "eval_every": 40}
    out = str(tmp_path / "run")
    agent = em.train(env=plane(), num_envs=1, learner=learner, replay="hindsight", out=out, **small)
    assert agent.predict(Plane().reset(seed=0)[0]) in Plane.action_space
    state = load_state(out, "loop")["loop"]["replay"]
    left = state["steps_left"].tolist()
    assert len(left) == 90 and left[:4] == [14, 13, 12, 11]
    assert left[38:42] == [1, 0, 14, 13], "the evaluation ended the episode of the 40th step"
