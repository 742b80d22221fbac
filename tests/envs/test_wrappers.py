"""Wrappers against arithmetic by hand, on a world that counts; trials, and that RL2 learns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.env import NotFinite, Step, VecEnv
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv
from embodied.envs.fr3.tasks.task import Parameter
from embodied.envs.maze.env import Config as MazeConfig
from embodied.envs.maze.env import Maze
from embodied.envs.row_rng import RowRng
from embodied.envs.toy.patrol import DT, PUSH, Patrol
from embodied.envs.toy.patrol import Config as PatrolConfig
from embodied.envs.toy.two_gap import Config as GapConfig
from embodied.envs.toy.two_gap import TwoGap
from embodied.envs.wrappers import actuators, delays, episodes, nan_guard
from embodied.envs.wrappers.stack import Wrapped
from embodied.envs.wrappers.trials import Config as TrialsConfig
from embodied.envs.wrappers.trials import Trials
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from tests.builders import make_learner, make_policy, node_of
from tests.tiers import only_all


@dataclass(frozen=True)
class Config:
    horizon: int = 4
    num_envs: int = 2


class Counter(BatchedEnv):
    """Row i shows 100 * i + 10 * episode + age, is paid its age and its action, and ends after
    `horizon + i` steps."""

    name = "counter"
    kept: ClassVar = {"age": "age", "episode": "episode"}

    def __init__(self, config: Config) -> None:
        self.num_envs = config.num_envs
        picture = Leaf((2, 2, 3), "uint8", 0, 255)
        obs = {"state": Leaf((1,), low=(0.0,), high=(999.0,)), "front": picture}
        obs["critic/state"] = obs["state"]
        self.spec = Spec(obs, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
        self.streams = RowRng(0, self.num_envs)
        self.last = config.horizon + torch.arange(self.num_envs)
        self.age, self.episode = torch.zeros(2, self.num_envs, dtype=torch.int64)
        self.applied: list[torch.Tensor] = []

    def observe(self, rows: torch.Tensor) -> Tensors:
        number = (100 * rows + 10 * self.episode[rows] + self.age[rows]).float()[:, None]
        picture = number.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 2, 2, 3).clone()
        return {"state": number, "front": picture, "critic/state": number.clone()}

    def begin(self, rows: torch.Tensor, task: torch.Tensor | None = None) -> None:
        self.age = self.age.index_fill(0, rows, 0)
        self.episode[rows] += 1

    def advance(self, action: torch.Tensor) -> Tensors:
        self.applied.append(action.clone())
        self.age = self.age + 1
        return self.observe(torch.arange(self.num_envs))

    def step(self, action: torch.Tensor) -> Step:
        following = self.advance(action)
        won = self.age >= self.last
        log = {"success": won, "age": self.age}
        return self.finish(following, self.age + action[:, 0], won, torch.zeros_like(won), log)


def steps(env: VecEnv, count: int, action: float = 0.0) -> list[Step]:
    return [env.step(torch.full((env.num_envs, 1), action)) for _ in range(count)]


def shown(obs: Tensors) -> list[float]:
    return obs["state"].flatten().tolist()


def test_time_limit() -> None:
    env = episodes.TimeLimit(episodes.LimitConfig(2), Counter(Config(horizon=3)))
    env.reset(0)
    step = steps(env, 2)[-1]
    assert step.truncated.tolist() == [True, True] and not step.terminated.any()
    assert shown(step.next_obs) == [12, 112] and shown(step.obs) == [20, 120]
    env.reset(mask=torch.tensor([True, False]))
    assert steps(env, 2)[-1].truncated.all(), "a reset by hand begins the count again, in its row"
    # An episode that ends by itself in its last step is not truncated as well.
    env = episodes.TimeLimit(episodes.LimitConfig(3), Counter(Config(horizon=3)))
    env.reset(0)
    step = steps(env, 3)[-1]
    assert step.terminated.tolist() == [True, False]
    assert step.truncated.tolist() == [False, True]


def test_sparse_success() -> None:
    """Reward 1 and a new episode at success, also where the environment goes on after it."""

    class GoesOn(Counter):
        def step(self, action: torch.Tensor) -> Step:
            following = self.advance(action)
            late, success = self.age >= self.last + 2, self.age >= torch.tensor([2, 99])
            pay, never = torch.full((2,), 7.0), torch.zeros_like(late)
            return self.finish(following, pay, never, late, {"success": success})

    env = episodes.SparseSuccess(episodes.SparseConfig(), GoesOn(Config(horizon=3)))
    env.reset(0)
    first, step, *_, last = steps(env, 6)
    assert first.reward.tolist() == [0, 0] and not first.ended.any()
    assert step.reward.tolist() == [1, 0] and step.terminated.tolist() == [True, False]
    assert shown(step.next_obs) == [12, 112] and shown(step.obs) == [20, 112]
    # Row 0 has succeeded again meanwhile; row 1 meets its time limit after 3 + 1 + 2 steps.
    assert last.truncated.tolist() == [False, True]
    # Success in the step in which the time is up: one reset, and terminated.
    env = episodes.SparseSuccess(episodes.SparseConfig(), GoesOn(Config(horizon=0)))
    env.reset(0)
    step = steps(env, 2)[-1]
    assert step.terminated.tolist() == [True, False] and not step.truncated.any()
    assert shown(step.obs) == [20, 112]


def test_sparse_success_needs_an_environment_that_reports_it() -> None:
    class Silent(Counter):
        def step(self, action: torch.Tensor) -> Step:
            return replace(super().step(action), log={})

    env = episodes.SparseSuccess(episodes.SparseConfig(), Silent(Config()))
    env.reset(0)
    with pytest.raises(ConfigError, match="does not report success"):
        steps(env, 1)


def test_action_repeat() -> None:
    """Horizons 4 and 5, three times each: rows end in the first and second of the second three."""
    env = episodes.ActionRepeat(episodes.RepeatConfig(3, 0.5), Counter(Config()))
    assert env.spec.dt == pytest.approx(0.3)
    env.reset(0)
    (step,) = steps(env, 1)
    assert step.reward.tolist() == [1 + 0.5 * 2 + 0.25 * 3] * 2
    assert not step.ended.any() and shown(step.obs) == shown(step.next_obs) == [13, 113]
    (step,) = steps(env, 1, 0.5)
    assert step.reward.tolist() == [4.5, 4.5 + 0.5 * 5.5]
    assert step.terminated.all() and step.log["success"].all()
    assert shown(step.next_obs) == [14, 115], "the true successor, not where the repeats went on"
    assert [number % 10 for number in shown(step.obs)] == [0, 0], "a fresh episode, not played yet"

    class Hits(Counter):
        def step(self, action: torch.Tensor) -> Step:
            step = super().step(action)
            return replace(step, log={"violated": step.next_obs["state"][:, 0] == 11})

    env = episodes.ActionRepeat(episodes.RepeatConfig(3), Hits(Config()))
    env.reset(0)
    assert [step.log["violated"].tolist() for step in steps(env, 2)] == [[True, False], [False] * 2]


def test_observation_delay() -> None:
    env = delays.ObservationDelay(delays.SeeLateConfig(2, 2), Counter(Config()))
    begun = shown(env.reset(0))
    went = steps(env, 5)
    seen = [begun, *(shown(step.obs) for step in went)]
    ahead = [shown(step.next_obs) for step in went]
    assert seen == [[10, 110], [10, 110], [10, 110], [11, 111], [20, 112], [20, 120]]
    assert ahead == [[10, 110], [10, 110], [11, 111], [12, 112], [20, 113]]
    assert went[-1].obs["critic/state"].flatten().tolist() == [21, 120], "critics see the present"
    assert went[-1].obs["front"][0, 0, 0, 0] == 20


def test_random_delays_are_of_the_seed_the_row_and_the_episode() -> None:
    def lags(rows: int, seed: int) -> torch.Tensor:
        env = delays.ObservationDelay(delays.SeeLateConfig(0, 3), Counter(Config(num_envs=rows)))
        kept = []
        for each in (seed, *[None] * 39):
            env.reset(each)
            kept.append(env.memory["lag"].clone())
        return torch.stack(kept)

    two, three, other = lags(2, 7), lags(3, 7), lags(2, 8)
    assert torch.equal(two, three[:, :2]) and not torch.equal(two, other)
    assert set(two.flatten().tolist()) == {0, 1, 2, 3}
    assert not torch.equal(two[:, 0], two[:, 1])


def test_action_delay() -> None:
    counter = Counter(Config(horizon=3))
    env = delays.ActionDelay(delays.ActLateConfig(2, 2, idle=-1.0, show=True), counter)
    assert env.reset(0)["sent"].tolist() == [[-1, -1]] * 2
    went = [env.step(torch.full((2, 1), i / 8)) for i in range(1, 5)]
    assert went[2].next_obs["sent"][0].tolist() == [3 / 8, 2 / 8]
    # A new episode knows no old action.
    assert went[2].obs["sent"].tolist() == [[-1, -1], [3 / 8, 2 / 8]]
    applied = torch.cat(counter.applied, 1).tolist()
    assert applied == [[-1, -1, 1 / 8, -1], [-1, -1, 1 / 8, 2 / 8]]
    beyond = env.step(torch.full((2, 1), 7.0))
    assert beyond.next_obs["sent"][:, 0].tolist() == [1, 1], "the bound is what will arrive"


def test_actuators() -> None:
    """An episode's actions are halved, turned by a quarter and shifted; the numbers are shown."""
    env = patrol(gain=(0.5, 0.5), offset=(0.1, 0.1), turn=(math.pi / 2, math.pi / 2))
    env.reset(0)
    # (1, -0.4) is halved to (0.5, -0.2), turned to (0.2, 0.5), shifted to (0.3, 0.6); 7 is 1.
    step = env.step(torch.tensor([[1.0, -0.4], [7.0, -0.4]]))
    velocity = torch.tensor([[0.3, 0.6]]) * PUSH * DT  # from rest
    torch.testing.assert_close(step.next_obs["state"][:, 2:4], velocity.expand(2, 2))
    numbers = torch.tensor([[0.5, 0.5, 0.1, 0.1, 0.0, 1.0]])
    torch.testing.assert_close(step.obs[actuators.LEAF], numbers.expand(2, 6))
    # What arrives is bounded as an action is.
    env = patrol(gain=(3.0, 3.0))
    env.reset(0)
    step = env.step(torch.ones(2, 2))
    torch.testing.assert_close(step.next_obs["state"][:, 2:4], torch.full((2, 2), PUSH * DT))


def test_actuators_are_of_the_seed_the_row_and_the_episode() -> None:
    env = patrol(gain=(0.2, 1.0), turn=(-1.0, 1.0), horizon=2)
    first = env.reset(3)[actuators.LEAF]
    assert (first[0] != first[1]).any()
    still = torch.zeros(2, 2)
    step = env.step(still)
    assert torch.equal(step.obs[actuators.LEAF], first), "constant for an episode"
    state = env.get_state()
    ends = []
    for _ in range(2):
        env.set_state(state)
        step = env.step(still)
        assert torch.equal(step.next_obs[actuators.LEAF], first)
        ends.append(step.obs[actuators.LEAF])
    assert (ends[0] != first).any() and torch.equal(*ends)
    assert torch.equal(env.reset(3)[actuators.LEAF], first)


def test_one_element_is_not_turned() -> None:
    with pytest.raises(ConfigError, match="leave turn out"):
        actuators.Actuators(actuators.Config(turn=(0.0, 1.0)), Counter(Config()))


def patrol(horizon: int = 200, **ranges: tuple[float, float]) -> actuators.Actuators:
    inner = Patrol(PatrolConfig(num_envs=2, horizon=horizon))
    return actuators.Actuators(actuators.Config(**ranges), inner)


def test_frame_stack() -> None:
    env = delays.FrameStack(delays.StackConfig(3), Counter(Config()))
    assert env.spec.obs["state"].shape == (3, 1) and env.spec.obs["state"].high == (999.0,) * 3
    assert env.spec.obs["front"].shape == (2, 2, 9) and env.spec.obs["front"].is_image
    assert env.spec.obs["critic/state"].shape == (1,)
    begun, went = env.reset(0)["state"][0], steps(env, 4)
    seen = [begun, went[0].obs["state"][0], went[3].next_obs["state"][0], *went[3].obs["state"]]
    stacks = [[10, 10, 10], [10, 10, 11], [12, 13, 14], [20, 20, 20], [112, 113, 114]]
    assert [each.flatten().tolist() for each in seen] == stacks
    assert went[3].next_obs["front"][0, 1, 1].tolist() == [12] * 3 + [13] * 3 + [14] * 3


NODE: dict[str, Any] = yaml.safe_load("""
_target_: embodied.envs.wrappers.stack.Wrapped
num_envs: 3
env: {_target_: embodied.envs.toy.two_gap.TwoGap, horizon: 7}
wrappers:
  - {_target_: embodied.envs.wrappers.delays.ActionDelay, low: 0, high: 2, show: true}
  - {_target_: embodied.envs.wrappers.delays.ObservationDelay, low: 0, high: 3}
  - {_target_: embodied.envs.wrappers.delays.FrameStack, frames: 2}
  - {_target_: embodied.envs.wrappers.episodes.ActionRepeat, times: 2}
  - {_target_: embodied.envs.wrappers.episodes.TimeLimit, steps: 3}
""")


def test_a_stack_of_wrappers_saves_and_forwards_everything() -> None:
    env, fresh = (build(NODE | {"num_envs": 4}, VecEnv) for _ in range(2))
    assert isinstance(env, Wrapped) and env.num_envs == 4 and env.horizon == 7
    assert not hasattr(env, "scene") and env.render(1).shape == (240, 320, 3)
    assert "point is at" in env.describe(2)
    env.reset(3)
    fresh.reset(99)
    plan = torch.rand(30, 4, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for action in plan[:10]:
        env.step(action)
    state = env.get_state()
    assert {key.split("/")[0] for key in state} > {f"wrapper{i}" for i in (1, 2, 3, 5)}
    runs = []
    for world in (env, env, fresh):
        begun = world.set_state(state)
        went = [world.step(action) for action in plan[10:]]
        parts = [(*each.obs.values(), each.reward, each.truncated) for each in went]
        runs.append([*begun.values(), *(value for part in parts for value in part)])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("delays.ObservationDelay", {"names": ["stat"]}, 'did you mean "state"'),
        ("delays.ActionDelay", {"low": 3, "high": 1}, "0 <= low <= high"),
        ("actuators.Actuators", {"gain": [1.0, 0.5]}, "low <= high"),
    ],
)
def test_wrong_settings_are_one_line(kind: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(NODE | {"wrappers": [node_of(f"envs.wrappers.{kind}", **settings)]}, VecEnv)


class Breaks(TwoGap):
    """Its third step divides by nothing in row 1."""

    def step(self, action: torch.Tensor) -> Step:
        step = super().step(action)
        if int(self.age.max()) == 3:
            step.next_obs["state"][1, 0] = torch.nan
        return step


def test_nan_guard(tmp_path: Path) -> None:
    env = nan_guard.NanGuard(nan_guard.GuardConfig(str(tmp_path), keep=2), Breaks(GapConfig(2)))
    start = env.reset(4)["state"].clone()
    env.step(torch.full((2, 2), 0.25))
    before = env.get_state()["place"].clone()
    env.step(torch.full((2, 2), 0.5))
    with pytest.raises(NotFinite, match=r"state is not finite in envs \[1\]") as found:
        env.step(torch.full((2, 2), 0.75))
    (file,) = tmp_path.iterdir()
    assert str(file) in str(found.value) and "\n" not in str(found.value)
    kept = np.load(file)
    assert (kept["0/action"] == 0.75).all() and (kept["1/action"] == 0.5).all()
    assert "2/action" not in kept, "keep=2"
    np.testing.assert_array_equal(kept["1/state/place"], before)
    np.testing.assert_allclose(kept["1/obs/state"], start + 0.05 * 0.25, rtol=1e-6)
    assert np.isnan(kept["next/state"][1, 0])
    with pytest.raises(NotFinite):
        env.step(torch.full((2, 2), torch.nan))
    assert len(list(tmp_path.iterdir())) == 1, "written once"


@dataclass(frozen=True)
class ArmsConfig:
    num_envs: int = 4
    length: int = 1


class Arms(BatchedEnv):
    """A bandit: one of two arms pays 1, the one that the task [1] names (above 0.5: arm 1)."""

    name = "arms"
    kept: ClassVar = {"task": "task", "age": "age"}
    parameters = (Parameter("arm", 0.0, 1.0, ""),)

    def __init__(self, config: ArmsConfig) -> None:
        self.num_envs, self.length = config.num_envs, config.length
        act, task = Leaf((), "int64", 0, 1, unit=SYMBOL), Leaf((1,), low=0.0, high=1.0)
        self.spec = Spec({"state": Leaf((1,))}, act, 0.1, task, "pull the arm that pays")
        self.streams = RowRng(0, self.num_envs)
        self.task = torch.zeros(self.num_envs, 1)
        self.age = torch.zeros(self.num_envs, dtype=torch.int64)

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        if task is not None:
            self.task[rows] = task[rows]
        self.age[rows] = 0

    def observe(self, rows: Tensor) -> Tensors:
        return {"state": self.age[rows][:, None].float()}

    def step(self, action: Tensor) -> Step:
        won = action == (self.task[:, 0] > 0.5)
        self.age = self.age + 1
        following, ended = self.observe(torch.arange(self.num_envs)), self.age >= self.length
        return self.finish(following, won.float(), ended, torch.zeros_like(ended), {"success": won})


def arms(episodes: int = 3, num_envs: int = 4, length: int = 1) -> Trials:
    return Trials(TrialsConfig(episodes), Arms(ArmsConfig(num_envs, length)))


def test_a_lifetime_by_hand() -> None:
    env = arms(episodes=2, num_envs=1, length=2)
    seen, tasks, steps = [env.reset(0)], [env.env.task.item()], []
    for _ in range(5):
        steps.append(env.step(torch.tensor([1])))
        seen.append(steps[-1].obs)
        tasks.append(env.env.task.item())
    assert [float(obs["first"]) for obs in seen] == [1, 0, 1, 0, 1, 0]
    assert [bool(step.terminated) for step in steps] == [False, False, False, True, False]
    assert not any(bool(step.truncated) for step in steps)
    assert [int(step.log["trial"]) for step in steps] == [0, 0, 1, 1, 0]
    pays, later = float(tasks[0] > 0.5), float(tasks[4] > 0.5)
    assert [float(obs["last_reward"]) for obs in seen] == [0, pays, pays, pays, 0, later]
    assert seen[0]["last_action"].tolist() == [[0, 0]]
    assert seen[2]["last_action"].tolist() == [[0, 1]]
    assert len(set(tasks[:4])) == 1 and tasks[4] != tasks[3], "one task in a lifetime"
    # An inner episode ends: the successor is the start of the next; a lifetime ends: it is the end.
    ends = [steps[1].next_obs, steps[3].next_obs]
    assert [(obs["state"].item(), obs["first"].item()) for obs in ends] == [(0, 1), (2, 0)]


def test_a_given_task_stays() -> None:
    env = arms()
    task = torch.tensor([[0.1], [0.9], [0.2], [0.8]])
    env.reset(0, task)
    for _ in range(2):
        env.step(torch.zeros(4, dtype=torch.int64))
        assert torch.equal(env.env.task, task)


def test_a_level_is_a_task_too() -> None:
    env = Trials(TrialsConfig(2), Maze(MazeConfig(side=5, blocks=3, horizon=3, num_envs=2)))
    env.reset(0)
    task = env.memory["task"].clone()
    for expected in (True, False):
        for _ in range(3):
            env.step(torch.zeros(2, dtype=torch.int64))
        assert torch.equal(env.memory["task"], task) == expected


def test_an_environment_without_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="task vector"):
        Trials(TrialsConfig(), TwoGap(GapConfig(num_envs=1)))


MEMORIES: dict[str, dict[str, Any]] = {
    "recurrent.Recurrent": {"width": 16},
    "transformer.Transformer": {"width": 16, "heads": 2, "layers": 1, "window": 8},
}


@only_all
@pytest.mark.parametrize(("memory", "settings"), MEMORIES.items())
def test_a_policy_with_memory_learns_within_a_lifetime(
    memory: str, settings: dict[str, Any]
) -> None:
    """The arm that paid in the episode before is pulled; the first episode can only guess."""
    env = arms(episodes=3, num_envs=64)
    inner = node_of("policies.categorical.Categorical", hidden=[16])
    policy = make_policy(memory, env.spec, inner=inner, **settings)
    ppo = {"horizon": 12, "batch_size": 192, "epochs": 4, "lr": 0.01, "entropy": 0.01}
    ppo |= {"normalize": False, "value": {"hidden": [16]}}
    learner = make_learner("on_policy.ppo.Ppo", policy, **ppo)
    loop = OnPolicyLoop(Collector(env, learner.policy, learner.gamma, seed=0), learner)
    for _ in range(40 * 12):
        loop.advance()
    actor = Actor(learner.policy, env.num_envs)
    obs, first, rewards = env.reset(9), torch.ones(env.num_envs, dtype=torch.bool), []
    for _ in range(3):
        step = env.step(actor(obs, first))
        rewards.append(step.reward.mean().item())
        obs, first = step.obs, step.ended
    assert 0.2 < rewards[0] < 0.8 and min(rewards[1:]) > 0.95
