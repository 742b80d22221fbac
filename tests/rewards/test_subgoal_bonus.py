"""Subgoals pay once, in order, less the later; wrong and missing ones are counted."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.reward import Reward
from embodied.core.tensors import nest
from embodied.envs.minigrid.env import Config, MiniGrid
from embodied.llm.chat import Answer, ChatError
from embodied.policies.scripted.grids import Planner, PlannerConfig
from embodied.rewards.language.subgoal_bonus import BONUS, SubgoalBonus, SubgoalBonusWrapper

RECORDED = Path(__file__).parents[2] / "benchmarks/studies/recorded/beacons_scripted.jsonl"
LIMIT = 10 * 8 * 8  # of DoorKey-8x8


def world(id: str = "MiniGrid-DoorKey-8x8-v0", count: int = 4, **more: Any) -> MiniGrid:
    return MiniGrid(Config(id, "gymnasium", num_envs=count, privileged=True, **more))


def made(folder: Path, seed: int = 0, **settings: Any) -> SubgoalBonus:
    node = {"_target_": "embodied.rewards.language.subgoal_bonus.SubgoalBonus"}
    node |= {"synchronous": True, **settings}
    return build(node, Reward, folder=folder, seed=seed)


def led(reward: SubgoalBonus, env: MiniGrid) -> SubgoalBonusWrapper:
    watched = reward.augment_env(env)
    assert isinstance(watched, SubgoalBonusWrapper)
    return watched


def episodes(
    env: SubgoalBonusWrapper, planner: Planner, steps: int
) -> list[list[tuple[int, float]]]:
    """The paid steps (number in the episode, bonus) of every episode that ended."""
    obs = env.reset(0)
    age = [0] * env.num_envs
    open_: list[list[tuple[int, float]]] = [[] for _ in age]
    ended = []
    for _ in range(steps):
        step = env.step(planner.act(obs, {}, planner.sample_noise(env.num_envs))[0][:, 0])
        obs = step.obs
        for row, paid in enumerate(step.next_obs[BONUS].tolist()):
            age[row] += 1
            open_[row] += [(age[row], paid)] if paid else []
            if step.ended[row]:
                ended.append(open_[row])
                open_[row], age[row] = [], 0
                assert float(obs[BONUS][row]) == 0
    return ended


@pytest.mark.parametrize("kind", ["position", "object", "language"])
def test_the_planner_of_steps_passes_every_beacon(tmp_path: Path, kind: str) -> None:
    """Key, door and goal, each once: 0.2 (1 - k / T), k steps after the one before."""
    reward = made(tmp_path, kind=kind)
    env = led(reward, inner := world())
    ended = episodes(env, Planner(PlannerConfig(), inner.spec), 60)
    assert len(ended) >= 4
    for paid in ended:
        assert len(paid) == 3
        before = 0
        for number, bonus in paid:
            assert bonus == pytest.approx(0.2 * (1 - (number - before) / LIMIT))
            before = number
    audit = {name: float(value) for name, value in reward.update({}).items()}
    assert audit["named"] == 3 and audit["null"] == audit["wrong"] == audit["empty"] == 0


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
    reward = made(tmp_path)
    texts = ["pick up the yellow key", "reach (0, 0)", "open the red door", "get to the goal"]
    reward.planner.chat = Said(texts)
    led(reward, world(count=2)).reset(0)
    audit = {name: float(value) for name, value in reward.update({}).items()}
    assert audit["named"] == 4 and audit["null"] == 0.5


class Said:
    """A language model that always says the same; None: it says nothing that can be used."""

    name = "said"

    def __init__(self, texts: list[str] | None) -> None:
        self.texts, self.calls = texts, 0
        self.gate: threading.Event | None = None

    def ask(self, messages: Any, schema: Any = None, **_: Any) -> Answer:
        self.calls += 1
        assert self.gate is None or self.gate.wait(600)
        if self.texts is None:
            raise ChatError("an answer in prose")
        data = {"subgoals": self.texts}
        return Answer(json.dumps(data), data, self.name, "0" * 64)


def test_levels_told_alike_are_asked_about_once_and_kept(tmp_path: Path) -> None:
    reward = made(tmp_path)
    reward.planner.chat = chat = Said(["pick up the yellow key", "get to the goal"])
    env = led(reward, world(count=8))
    env.reset(0)
    env.reset(1)
    assert chat.calls == 1
    (line,) = map(json.loads, (tmp_path / "plans.jsonl").read_text().splitlines())
    assert line["subgoals"] == chat.texts and line["model"] == "said"
    assert "a locked yellow door" in line["question"] and "(" not in line["question"].split("\n")[1]


def test_cells_need_a_map(tmp_path: Path) -> None:
    reward = made(tmp_path, kind="position")
    reward.planner.chat = chat = Said(["reach (6, 6)"])
    led(reward, world(count=8)).reset(0)
    assert chat.calls > 1


def test_without_answers_the_run_goes_on(tmp_path: Path) -> None:
    """Asked again when the question came up twice as often: 1st, 2nd, 4th, 8th time."""
    reward = made(tmp_path)
    reward.planner.chat = chat = Said(None)
    env = led(reward, world(count=8))
    env.reset(0)
    assert chat.calls == 4
    step = env.step(torch.zeros(8, dtype=torch.int64))
    assert not step.next_obs[BONUS].any()
    assert float(reward.update({})["unanswered"]) == 1.0


def test_the_environment_does_not_wait_for_a_list(tmp_path: Path) -> None:
    """Without an answer episodes have no subgoals; once it is there, the running ones have."""
    reward = made(tmp_path, synchronous=False)
    gate = threading.Event()
    reward.planner.chat = chat = Said(["pick up the yellow key", "get to the goal"])
    chat.gate = gate
    env = led(reward, world(count=3))
    env.reset(0)
    still = torch.full((3,), 6)
    step = env.step(still)
    assert not step.next_obs[BONUS].any() and env.memory["length"].tolist() == [0, 0, 0]
    state = reward.get_state()
    gate.set()
    assert reward.planner.pool.drain(10)
    env.step(still)
    assert env.memory["length"].tolist() == [2, 2, 2] and chat.calls == 1
    assert env.memory["age"].tolist() == [2, 2, 2]  # a late list is paid by the same clock
    assert float(reward.update({})["named"]) == 2
    other = made(tmp_path, synchronous=False)
    other.planner.chat = again = Said(chat.texts)
    other.set_state(state)
    assert other.planner.pool.drain(10) and again.calls == 1


def test_a_recording_leads_as_it_says(tmp_path: Path) -> None:
    """What a scripted planner said through a real endpoint; see scripted_planner.py."""
    chat = {"_target_": "embodied.llm.client.CachedChat", "cache": str(RECORDED)}
    for id in ("MiniGrid-DoorKey-8x8-v0", "MiniGrid-UnlockPickup-v0"):
        reward = made(tmp_path / id, chat=chat)
        env = led(reward, inner := world(id, count=16))
        env.reset(0)
        audit = {name: float(value) for name, value in reward.update({}).items()}
        assert audit["named"] == 4 and audit["null"] == audit["unanswered"] == 0
        if "DoorKey" in id:
            ended = episodes(env, Planner(PlannerConfig(), inner.spec), 40)
            assert {len(paid) for paid in ended} == {4}


@pytest.mark.parametrize(
    ("accuracy", "low", "high"), [(1.0, 0.0, 0.0), (0.7, 0.2, 0.4), (0.0, 1.0, 1.0)]
)
def test_the_model_of_error(tmp_path: Path, accuracy: float, low: float, high: float) -> None:
    """The share of wrong ones, and the same subgoals for a level whenever it comes up."""
    reward = made(tmp_path, accuracy=accuracy)
    env = led(reward, world(count=100))
    env.reset(0)
    first = env.memory["plan"].clone()
    audit = reward.update({})
    assert low <= float(audit["wrong"]) <= high
    env.reset(0)
    assert torch.equal(env.memory["plan"], first)
    other = made(tmp_path, seed=1, accuracy=accuracy)
    again = led(other, world(count=100))
    again.reset(0)
    assert torch.equal(again.memory["plan"], first) == (accuracy == 1.0)


def test_wrong_cells_are_near_or_nowhere(tmp_path: Path) -> None:
    reward = made(tmp_path, kind="position", accuracy=0.0)
    env = led(reward, world(count=100))
    env.reset(0)
    audit = reward.update({})
    assert audit["wrong"] == 1.0 and 0.1 < audit["null"] < 0.7


def test_going_on_pays_the_same(tmp_path: Path) -> None:
    def play(env: SubgoalBonusWrapper, first: int, last: int) -> list[Tensor]:
        """A planner that often slips, the same way at the same step."""
        planner, paid = Planner(PlannerConfig(0.5), env.spec), []
        obs = {"privileged/" + key: value for key, value in env.whole.items()}
        for number in range(first, last):
            noise = torch.rand(4, 2, generator=torch.Generator().manual_seed(number))
            step = env.step(planner.act(obs, {}, noise)[0][:, 0])
            obs = step.obs
            paid.append(step.next_obs[BONUS])
        return paid

    reward = made(tmp_path)
    env = led(reward, world("MiniGrid-DoorKey-5x5-v0"))
    env.reset(0)
    play(env, 0, 15)
    torch.save({"reward": reward.get_state(), "env": env.get_state()}, tmp_path / "state.pt")
    expected = play(env, 15, 80)
    assert sum(paid.sum() for paid in expected) > 0
    other = made(tmp_path)
    again = led(other, world("MiniGrid-DoorKey-5x5-v0"))
    again.reset(0)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other.set_state(state["reward"])
    again.set_state(state["env"])
    for one, two in zip(expected, play(again, 15, 80), strict=True):
        assert torch.equal(one, two)
    assert other.planner.count == reward.planner.count


def test_reached_are_counted_an_episode(tmp_path: Path) -> None:
    reward = made(tmp_path)
    env = led(reward, inner := world("MiniGrid-DoorKey-5x5-v0"))
    planner = Planner(PlannerConfig(), inner.spec)
    obs, who, ended = env.reset(0), torch.arange(4), 0
    for _ in range(200):
        step = env.step(planner.act(obs, {}, planner.sample_noise(4))[0][:, 0])
        reward.observe_step(nest(step.next_obs, "next_obs"), who, step)
        obs, ended = step.obs, ended + int(step.ended.sum())
    assert float(reward.update({})["reached"]) == pytest.approx(3.0, abs=12 / ended)


def test_what_a_user_may_get_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.privileged=true"):
        made(tmp_path).augment_env(MiniGrid(Config(backend="gymnasium", num_envs=1)))
    with pytest.raises(ConfigError, match="no subgoals"):
        made(tmp_path).augment_env(build({"_target_": "embodied.envs.toy.two_gap.TwoGap"}, VecEnv))
