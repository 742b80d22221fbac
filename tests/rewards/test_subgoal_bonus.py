"""Subgoals pay once, in order, less the later; wrong and missing ones are counted."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.env import Step, VecEnv
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors, nest
from embodied.envs.minigrid.env import Config, MiniGrid
from embodied.llm.chat import Answer, ChatError
from embodied.policies.scripted.grids import Planner, PlannerConfig
from embodied.rewards.language.subgoal_bonus import BONUS, SubgoalBonus, SubgoalBonusWrapper
from tests.builders import node_of

RECORDED = Path(__file__).parents[2] / "benchmarks/studies/recorded/beacons_scripted.jsonl"
NODE = node_of("rewards.language.subgoal_bonus.SubgoalBonus", synchronous=True)
LIMIT = 10 * 8 * 8  # of DoorKey-8x8


def world(id: str = "MiniGrid-DoorKey-8x8-v0", count: int = 4, **more: Any) -> MiniGrid:
    return MiniGrid(Config(id, "gymnasium", num_envs=count, privileged=True, **more))


class Said:
    """A language model that always says the same; None: it says nothing that can be used."""

    name = "said"

    def __init__(self, *texts: str) -> None:
        self.texts, self.calls = [*texts], 0
        self.gate = threading.Event()
        self.gate.set()

    def ask(self, messages: Any, schema: Any = None, **_: Any) -> Answer:
        self.calls += 1
        assert self.gate.wait(600)
        if not self.texts:
            raise ChatError("an answer in prose")
        data = {"subgoals": self.texts}
        return Answer(json.dumps(data), data, self.name, "0" * 64)


def made(folder: Path, chat: Said | None = None, seed: int = 0, **settings: Any) -> SubgoalBonus:
    reward = build(NODE | settings, Reward, folder=folder, seed=seed)
    if chat is not None:
        reward.planner.chat = chat
    return reward


def led(reward: SubgoalBonus, env: MiniGrid) -> SubgoalBonusWrapper:
    watched = reward.augment_env(env)
    assert isinstance(watched, SubgoalBonusWrapper)
    return watched


def audit(reward: SubgoalBonus) -> dict[str, float]:
    return {name: float(value) for name, value in reward.update({}).items()}


def walk(env: SubgoalBonusWrapper, planner: Planner, obs: Tensors) -> Step:
    return env.step(planner.act(obs, {}, planner.sample_noise(env.num_envs))[0][:, 0])


def episodes(env: SubgoalBonusWrapper, steps: int) -> list[list[tuple[int, float]]]:
    """The paid steps (number in the episode, bonus) of every episode that a planner ended."""
    planner, obs = Planner(PlannerConfig(), env.env.spec), env.reset(0)
    age = [0] * env.num_envs
    running: list[list[tuple[int, float]]] = [[] for _ in age]
    ended = []
    for _ in range(steps):
        step = walk(env, planner, obs)
        obs = step.obs
        for row, paid in enumerate(step.next_obs[BONUS].tolist()):
            age[row] += 1
            running[row] += [(age[row], paid)] if paid else []
            if step.ended[row]:
                ended.append(running[row])
                running[row], age[row] = [], 0
                assert float(obs[BONUS][row]) == 0
    return ended


@pytest.mark.parametrize("kind", ["position", "object", "language"])
def test_the_planner_of_steps_passes_every_beacon(tmp_path: Path, kind: str) -> None:
    """Key, door and goal, each once: 0.2 (1 - k / T), k steps after the one before."""
    reward = made(tmp_path, kind=kind)
    ended = episodes(led(reward, world()), 60)
    assert len(ended) >= 4
    for paid in ended:
        taken = [now - before for before, now in pairwise([0, *(number for number, _ in paid)])]
        assert [bonus for _, bonus in paid] == pytest.approx([0.2 * (1 - k / LIMIT) for k in taken])
        assert len(paid) == 3
    assert audit(reward).items() >= {"named": 3, "null": 0, "wrong": 0, "empty": 0}.items()


def test_the_bonus_is_added_to_the_worlds_reward(tmp_path: Path) -> None:
    reward = made(tmp_path)
    rows = {"reward": torch.tensor([0.0, 0.9]), f"next_obs/{BONUS}": torch.tensor([0.2, 0.1])}
    torch.testing.assert_close(reward(rows), torch.tensor([0.2, 1.0]))


def test_what_is_not_there_is_no_subgoal() -> None:
    env = world(count=1)
    env.reset(0)
    whole, guide = env.whole(), env.subgoals()
    for text in ("reach (0, 0)", "reach (99, 1)", "the red key", "pick up the blue ball", "wait"):
        assert guide.understood(text, whole, 0) is None
    assert guide.understood("Pick up the yellow key.", whole, 0) == (2, 5, 4)


def test_null_subgoals_are_counted(tmp_path: Path) -> None:
    texts = ["pick up the yellow key", "reach (0, 0)", "open the red door", "get to the goal"]
    reward = made(tmp_path, Said(*texts))
    led(reward, world(count=2)).reset(0)
    assert audit(reward).items() >= {"named": 4, "null": 0.5}.items()


def test_levels_told_alike_are_asked_about_once_and_kept(tmp_path: Path) -> None:
    """In words all levels are alike; cells need a map, which no two levels share."""
    chat = Said("pick up the yellow key", "get to the goal")
    env = led(made(tmp_path, chat), world(count=8))
    env.reset(0)
    env.reset(1)
    assert chat.calls == 1
    (line,) = map(json.loads, (tmp_path / "plans.jsonl").read_text().splitlines())
    assert line["subgoals"] == chat.texts and line["model"] == "said"
    assert "a locked yellow door" in line["question"] and "(" not in line["question"].split("\n")[1]
    cells = Said("reach (6, 6)")
    led(made(tmp_path / "cells", cells, kind="position"), world(count=8)).reset(0)
    assert cells.calls > 1


def test_without_answers_the_run_goes_on(tmp_path: Path) -> None:
    """Asked again when the question came up twice as often: 1st, 2nd, 4th, 8th time."""
    reward = made(tmp_path, chat := Said())
    env = led(reward, world(count=8))
    env.reset(0)
    assert chat.calls == 4
    assert not env.step(torch.zeros(8, dtype=torch.int64)).next_obs[BONUS].any()
    assert audit(reward)["unanswered"] == 1


def test_the_environment_does_not_wait_for_a_list(tmp_path: Path) -> None:
    """Without an answer episodes have no subgoals; once it is there, the running ones have."""
    chat, again = (Said("pick up the yellow key", "get to the goal") for _ in range(2))
    reward = made(tmp_path, chat, synchronous=False)
    chat.gate.clear()
    env = led(reward, world(count=3))
    env.reset(0)
    still = torch.full((3,), 6)
    assert not env.step(still).next_obs[BONUS].any()
    assert env.memory["length"].tolist() == [0, 0, 0]
    state = reward.get_state()
    chat.gate.set()
    assert reward.planner.pool.drain(600)
    env.step(still)
    assert env.memory["length"].tolist() == [2, 2, 2] and chat.calls == 1
    assert env.memory["age"].tolist() == [2, 2, 2]  # a late list is paid by the same clock
    assert audit(reward)["named"] == 2
    other = made(tmp_path, again, synchronous=False)
    other.set_state(state)
    assert other.planner.pool.drain(600) and again.calls == 1


@pytest.mark.parametrize("id", ["MiniGrid-DoorKey-8x8-v0", "MiniGrid-UnlockPickup-v0"])
def test_a_recording_leads_as_it_says(tmp_path: Path, id: str) -> None:
    """What a scripted planner said through a real endpoint; see scripted_planner.py."""
    chat = {"_target_": "embodied.llm.client.CachedChat", "cache": str(RECORDED)}
    reward = build(NODE | {"chat": chat}, Reward, folder=tmp_path, seed=0)
    env = led(reward, world(id, count=16))
    env.reset(0)
    assert audit(reward).items() >= {"named": 4, "null": 0, "unanswered": 0}.items()
    if "DoorKey" in id:
        assert {len(paid) for paid in episodes(env, 40)} == {4}


@pytest.mark.parametrize(
    ("kind", "accuracy", "wrong", "null"),
    [
        ("language", 1.0, (0.0, 0.0), (0.0, 0.0)),
        ("language", 0.7, (0.2, 0.4), (0.0, 1.0)),
        ("position", 0.0, (1.0, 1.0), (0.1, 0.7)),  # wrong cells are near or nowhere
    ],
)
def test_the_model_of_error(
    tmp_path: Path, kind: str, accuracy: float, wrong: Any, null: Any
) -> None:
    """The share of wrong ones, and the same subgoals for a level whenever it comes up."""
    plans = []
    for seed in (0, 0, 1):
        reward = made(tmp_path, seed=seed, kind=kind, accuracy=accuracy)
        env = led(reward, world(count=100))
        env.reset(0)
        plans.append(env.memory["plan"].clone())
        env.reset(0)
        assert torch.equal(env.memory["plan"], plans[-1])
    found = audit(reward)
    assert wrong[0] <= found["wrong"] <= wrong[1] and null[0] <= found["null"] <= null[1]
    assert torch.equal(plans[0], plans[1])
    assert torch.equal(plans[0], plans[2]) == (accuracy == 1.0)


def test_going_on_pays_the_same(tmp_path: Path) -> None:
    def play(env: SubgoalBonusWrapper, first: int, last: int) -> Tensor:
        """What is paid [T, 4] to a planner that often slips, the same way at the same step."""
        planner, paid = Planner(PlannerConfig(0.5), env.spec), []
        obs = {"privileged/" + key: value for key, value in env.whole.items()}
        for number in range(first, last):
            noise = torch.rand(4, 2, generator=torch.Generator().manual_seed(number))
            step = env.step(planner.act(obs, {}, noise)[0][:, 0])
            obs = step.obs
            paid.append(step.next_obs[BONUS])
        return torch.stack(paid)

    reward, other = made(tmp_path), made(tmp_path)
    env, again = (led(each, world("MiniGrid-DoorKey-5x5-v0")) for each in (reward, other))
    env.reset(0)
    again.reset(0)
    play(env, 0, 15)
    torch.save((reward.get_state(), env.get_state()), tmp_path / "state.pt")
    expected = play(env, 15, 80)
    states = torch.load(tmp_path / "state.pt", weights_only=True)
    other.set_state(states[0])
    again.set_state(states[1])
    assert torch.equal(play(again, 15, 80), expected) and expected.sum() > 0
    assert other.planner.count == reward.planner.count


def test_reached_are_counted_an_episode(tmp_path: Path) -> None:
    reward = made(tmp_path)
    env = led(reward, inner := world("MiniGrid-DoorKey-5x5-v0"))
    planner, obs, ended = Planner(PlannerConfig(), inner.spec), env.reset(0), 0
    for _ in range(200):
        step = walk(env, planner, obs)
        reward.observe_step(nest(step.next_obs, "next_obs"), torch.arange(4), step)
        obs, ended = step.obs, ended + int(step.ended.sum())
    assert audit(reward)["reached"] == pytest.approx(3.0, abs=12 / ended)


def test_what_a_user_may_get_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.privileged=true"):
        made(tmp_path).augment_env(MiniGrid(Config(backend="gymnasium", num_envs=1)))
    with pytest.raises(ConfigError, match="no subgoals"):
        made(tmp_path).augment_env(build({"_target_": "embodied.envs.toy.two_gap.TwoGap"}, VecEnv))
