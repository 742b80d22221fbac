"""Advice as an observation: its score by hand, when it is due, what the small model learns."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.envs.crafter.env import Config as CrafterConfig
from embodied.envs.crafter.env import Crafter
from embodied.envs.crafter.rules import ACHIEVEMENTS
from embodied.rewards.language.instructions import (
    Advice,
    Advisor,
    Config,
    Instructions,
    comprehension,
    spoken,
    vector,
)
from embodied.rewards.language.scripted_advisor import (
    EMPTY,
    ORDER,
    USEFUL,
    ScriptedAdvisor,
    next_goals,
)
from embodied.rewards.language.scripted_advisor import Config as Rules
from tests.builders import node_of
from tests.llm.server import says, serving

SCRIPTED = node_of("rewards.language.scripted_advisor.ScriptedAdvisor", alone=1.0)
FIRST = ("collect_wood", "place_table", "make_wood_pickaxe")


def made(folder: Path, count: int = 2, **settings: Any) -> Instructions:
    given = {"chat": SCRIPTED, "synchronous": True, "every": 5, "folder": str(folder), **settings}
    return Instructions(Config(**given), Crafter(CrafterConfig(num_envs=count, workers=0)))


def advisor(folder: Path, stage: int = 4) -> Advisor:
    rules = Rules(alone=0.0)
    chats = ScriptedAdvisor(rules), ScriptedAdvisor(rules)
    return Advisor(*chats, ACHIEVEMENTS, folder, 1.0, stage, examples=2)


def test_the_score_by_hand() -> None:
    """The same words: sigma(9). Of two words that are shared in part, the angle between sums."""
    assert comprehension("do", "do", "words") == pytest.approx(1 / (1 + math.exp(-9)))
    tree, wood = vector("tree", "words"), vector("wood", "words")
    assert tree.norm() == pytest.approx(1.0) and abs(float(tree @ wood)) < 0.2
    both = tree + wood
    cosine = float(tree @ both / both.norm())
    score = comprehension("tree", "wood, tree", "words")
    assert score == pytest.approx(1 / (1 + math.exp(-10 * (cosine - 0.1))), abs=1e-5)
    assert not vector("", "words").any()


def test_the_advice_lasts_until_the_next_is_due(tmp_path: Path) -> None:
    """Asked at the beginning and after 5 steps; the score is of the actions in between."""
    env = made(tmp_path)
    first = vector(spoken(FIRST), "words")
    obs = env.reset(0)
    assert torch.equal(obs["advice"], first.expand(2, 384))
    for _ in range(5):
        step = env.step(torch.tensor([5, 8]))  # do, place_table
        assert torch.equal(step.next_obs["advice"], step.obs["advice"])
    lines = [json.loads(line) for line in (tmp_path / "advice.jsonl").read_text().splitlines()]
    assert [line["goals"] for line in lines] == [list(FIRST)] * 2
    expected = [comprehension(name, spoken(FIRST), "words") for name in ("do", "place table")]
    assert [line["score"] for line in lines] == pytest.approx(expected)
    assert env.memory["asked"].tolist() == [2, 2] and env.memory["due"].tolist() == [10, 10]
    digest = env._digest(1)
    assert f"The last sub-goals: {spoken(FIRST)}; comprehension {expected[1]:.2f}." in digest


def test_a_new_episode_begins_without_the_last_one(tmp_path: Path) -> None:
    crafter = Crafter(CrafterConfig(num_envs=2, workers=0, length=7))
    given = {"chat": SCRIPTED, "synchronous": True, "every": 5, "folder": str(tmp_path)}
    env = Instructions(Config(**given), crafter)
    env.reset(0)
    for _ in range(7):
        step = env.step(torch.zeros(2, dtype=torch.int64))
    assert step.truncated.all() and env.memory["asked"].tolist() == [3, 3]
    assert not env.memory["score"].any() and not env.memory["used"].any()


def test_an_exact_copy_goes_on_the_same(tmp_path: Path) -> None:
    env, other = made(tmp_path / "one"), made(tmp_path / "other")
    env.reset(0)
    other.reset(1)
    moves = torch.randint(0, 17, (30, 2), generator=torch.Generator().manual_seed(0))
    for move in moves[:12]:
        env.step(move)
    other.set_state(env.get_state())
    for move in moves[12:]:
        one, two = env.step(move), other.step(move)
        assert torch.equal(one.obs["advice"], two.obs["advice"])
        assert torch.equal(env.memory["score"], other.memory["score"])


def test_the_environment_does_not_wait_for_an_answer(tmp_path: Path) -> None:
    """Until it is there the advice is zeros; an answer to an earlier question is left out."""
    env = made(tmp_path, synchronous=False, every=3)
    gate, ask = threading.Event(), env.advisor.ask

    def late(digest: str) -> Advice:
        assert gate.wait(60)
        return ask(digest)

    env.advisor.ask = late
    assert not env.reset(0)["advice"].any()
    still = torch.zeros(2, dtype=torch.int64)
    for _ in range(4):
        assert not env.step(still).obs["advice"].any()
    gate.set()
    assert env.pool.drain(60)
    assert env.step(still).obs["advice"].any(1).all()
    assert {each.digest.count("step 3") for each in env.given.values()} == {1}


def test_a_stage_keeps_what_was_followed_by_reward(tmp_path: Path) -> None:
    """Rewards 0, 3, 1, 2 have the mean 1.5: the second and the fourth, the better one first. One
    without an analysis is no example. Another environment of the run learns it too."""
    one, other = advisor(tmp_path), advisor(tmp_path)
    for number, reward in enumerate((0.0, 3.0, 1.0, 2.0)):
        one.record(Advice(f"digest {number}", f"analysis {number}", FIRST), 0.5, reward)
    assert [line["analysis"] for line in one.examples] == ["analysis 1", "analysis 3"]
    assert other.examples == [] and one.stages == 1
    other.record(Advice("digest 4", "", FIRST), 0.5, 9.0)
    assert other.examples == one.examples and len(other.new) == 1
    kept = [json.loads(line) for line in (tmp_path / "stage_1.jsonl").read_text().splitlines()]
    assert [[turn["role"] for turn in line["messages"]] for line in kept] == [
        ["system", "user", "assistant"]
    ] * 2
    assert kept[0]["messages"][1:] == [
        {"role": "user", "content": "digest 1"},
        {"role": "assistant", "content": "analysis 1"},
    ]
    assert advisor(tmp_path).examples == one.examples  # a run that goes on


def test_the_small_model_learns_which_analysis_helps(tmp_path: Path) -> None:
    """By its own choice half of the analyses are useful, and the right goals are rewarded; from the
    second stage on all are."""
    small = advisor(tmp_path, stage=64)
    shares = []
    for stage in range(3):
        useful = 0
        for number in range(64):
            advice = small.ask(f"{stage} {number}. Achieved: nothing.")
            useful += advice.analysis.startswith(USEFUL)
            assert advice.analysis.startswith((USEFUL, EMPTY))
            small.record(advice, 0.5, float(advice.goals == FIRST))
        shares.append(useful / 64)
    assert 0.3 < shares[0] < 0.7 and shares[1:] == [1.0, 1.0]


def test_the_goals_that_are_named_next() -> None:
    assert set(ORDER) == set(ACHIEVEMENTS)
    assert next_goals("Achieved: nothing.", ORDER) == list(FIRST)
    assert next_goals("Achieved: collect_wood, wake_up.", ORDER)[:2] == list(FIRST[1:])
    assert len(next_goals(f"Achieved: {', '.join(ORDER)}.", ORDER)) == 3


def test_both_models_may_be_served(tmp_path: Path) -> None:
    """The analysis is one line in the large model's message; what is no list of goals is none."""
    right = says(json.dumps({"goals": ["eat_cow", "wake_up", "collect_drink"]}))
    wrong = says(json.dumps({"goals": ["fly", "wake_up", "collect_drink"]}))
    with serving(says("It knows\nwood.")) as small, serving(right, wrong) as large:
        limits = {"retries": 0}
        nodes = {
            "adapter": small.node(cache=str(tmp_path / "small.jsonl"), limits=limits),
            "chat": large.node(cache=str(tmp_path / "large.jsonl"), limits=limits),
        }
        env = made(tmp_path, 1, **nodes)
        named = spoken(["eat_cow", "wake_up", "collect_drink"])
        assert torch.equal(env.reset(0)["advice"][0], vector(named, "words"))
        told = large.asked[0]["messages"][-1]["content"]
        told = told if isinstance(told, str) else told[0]["text"]
        assert "Achieved: nothing.\nAnalysis: It knows wood.\n" in told
        for _ in range(5):
            step = env.step(torch.zeros(1, dtype=torch.int64))
        assert torch.equal(step.obs["advice"][0], vector(named, "words"))  # the last one stays


def test_another_environment_is_refused(tmp_path: Path) -> None:
    env = build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 1}, VecEnv)
    with pytest.raises(ConfigError, match="names no goals and actions; env=crafter does"):
        Instructions(Config(chat=SCRIPTED, folder=str(tmp_path)), env)
