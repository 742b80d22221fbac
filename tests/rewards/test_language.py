"""Subgoals that pay once, in order; captions of steps, what is said of them and what they pay."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.env import Step, VecEnv
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors, nest
from embodied.envs.minigrid import describe, subgoals
from embodied.envs.minigrid.describe import happened
from embodied.envs.minigrid.env import Config, MiniGrid
from embodied.llm.chat import Answer, ChatError
from embodied.policies.scripted.grids import Planner, PlannerConfig
from embodied.rewards.language.annotate import (
    CONTRADICTED,
    Annotate,
    CaptionLabeller,
    Classification,
    Ranking,
)
from embodied.rewards.language.rule_reader import Config as Rules
from embodied.rewards.language.rule_reader import RuleReader
from embodied.rewards.language.subgoal_bonus import (
    BONUS,
    ObservedConfig,
    ObservedSubgoals,
    SubgoalBonus,
    SubgoalBonusWrapper,
)
from embodied.rewards.wrappers.added_observations import (
    CAPTION,
    TIMES,
    CaptionVocabulary,
    with_event_captions,
)
from tests.builders import make_reward, node_of
from tests.llm.server import says, serving
from tests.rewards.rows import step

RECORDED = Path(__file__).parents[2] / "benchmarks/studies/recorded/beacons_scripted.jsonl"
NODE = node_of("rewards.language.subgoal_bonus.SubgoalBonus", synchronous=True)
LIMIT = 10 * 8 * 8  # of DoorKey-8x8


def world(id: str = "MiniGrid-DoorKey-8x8-v0", count: int = 4, **more: Any) -> MiniGrid:
    return MiniGrid(Config(id, "gymnasium", num_envs=count, privileged=True, **more))


class Said:
    """A language model that always says the same; without texts: nothing that can be used."""

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


def walk(env: VecEnv, planner: Planner, obs: Tensors) -> Step:
    return env.step(planner.act(obs, {}, planner.sample_noise(env.num_envs))[0][:, 0])


def episodes(reward: SubgoalBonus, env: Any, steps: int) -> list[list[tuple[int, float]]]:
    """The paid steps (number in the episode, bonus) of every episode that a planner ended; the
    reward counts the same."""
    planner, obs = Planner(PlannerConfig(), env.env.spec), env.reset(0)
    age, ended = [0] * env.num_envs, []
    running: list[list[tuple[int, float]]] = [[] for _ in age]
    for _ in range(steps):
        step = walk(env, planner, obs)
        reward.observe_step(nest(step.next_obs, "next_obs"), torch.arange(env.num_envs), step)
        obs = step.obs
        for row, paid in enumerate(step.next_obs[BONUS].tolist()):
            age[row] += 1
            running[row] += [(age[row], paid)] if paid else []
            if step.ended[row]:
                ended.append(running[row])
                running[row], age[row] = [], 0
                assert float(obs[BONUS][row]) == 0
    assert (reward.reached, reward.episodes) == (sum(map(len, ended + running)), len(ended))
    return ended


@pytest.mark.parametrize("kind", ["position", "object", "language"])
def test_the_planner_of_steps_passes_every_beacon(tmp_path: Path, kind: str) -> None:
    """Key, door and goal, each once: 0.2 (1 - k / T), k steps after the one before."""
    reward = made(tmp_path, kind=kind)
    ended = episodes(reward, led(reward, world()), 60)
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


def test_what_is_not_there_is_no_subgoal_and_counted(tmp_path: Path) -> None:
    texts = ["pick up the yellow key", "reach (0, 0)", "open the red door", "get to the goal"]
    reward = made(tmp_path, Said(*texts))
    led(reward, env := world(count=2)).reset(0)
    assert audit(reward).items() >= {"named": 4, "null": 0.5}.items()
    whole, guide = env.whole(), env.subgoals()
    for text in ("reach (0, 0)", "reach (99, 1)", "the red key", "pick up the blue ball", "wait"):
        assert guide.understood(text, whole, 0) is None
    assert guide.understood("Pick up the yellow key.", whole, 0) == (2, 5, 4)


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
        assert {len(paid) for paid in episodes(reward, env, 40)} == {4}


@pytest.mark.parametrize(
    ("kind", "accuracy", "wrong", "null"),
    [
        ("language", 1.0, (0.0, 0.0), (0.0, 0.0)),
        ("language", 0.7, (0.2, 0.4), (0.0, 1.0)),
        ("position", 0.0, (1.0, 1.0), (0.1, 0.7)),  # wrong cells are near or nowhere
    ],
)
def test_the_error_model(tmp_path: Path, kind: str, accuracy: float, wrong: Any, null: Any) -> None:
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


def test_what_a_user_may_get_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.privileged=true"):
        made(tmp_path).augment_env(MiniGrid(Config(backend="gymnasium", num_envs=1)))
    with pytest.raises(ConfigError, match="no subgoals"):
        made(tmp_path).augment_env(build({"_target_": "embodied.envs.toy.two_gap.TwoGap"}, VecEnv))


KEY, DOOR, BOX, EMPTY, YELLOW, RED = 5, 4, 7, 1, 4, 0
DOORKEY = Config("MiniGrid-DoorKey-5x5-v0", "gymnasium", num_envs=4, privileged=True)
UNLOCK = Config("MiniGrid-Unlock-v0", "gymnasium", num_envs=4, text="open the door")


def view(hand: list[int], ahead: list[int], turn: int = 0) -> Tensors:
    cells = torch.ones(1, 7, 7, 3, dtype=torch.uint8)
    cells[0, 3, 6], cells[0, 3, 5] = torch.tensor(hand), torch.tensor(ahead)
    return {"cells": cells, "direction": torch.tensor([turn])}


NOTHING, HELD, CLOSED, OPEN = [EMPTY, 0, 0], [KEY, YELLOW, 0], [DOOR, RED, 1], [DOOR, RED, 0]
LOCKED, UNLOCKED, BOXED = [DOOR, YELLOW, 2], [DOOR, YELLOW, 0], [BOX, RED, 0]
FOUND = "you opened the red box and found the yellow key in it"
HAPPENED = [
    (view(NOTHING, HELD), view(HELD, NOTHING), "you picked up the yellow key"),
    (view(HELD, NOTHING), view(NOTHING, HELD), "you put down the yellow key"),
    (view(HELD, LOCKED), view(HELD, UNLOCKED), "you unlocked the yellow door"),
    (view(NOTHING, CLOSED), view(NOTHING, OPEN), "you opened the red door"),
    (view(NOTHING, OPEN), view(NOTHING, CLOSED), "you closed the red door"),
    (view(NOTHING, OPEN), view(NOTHING, NOTHING), "you stepped into the doorway of the red door"),
    (view(NOTHING, BOXED), view(NOTHING, HELD), FOUND),
    (view(NOTHING, NOTHING), view(NOTHING, HELD, 1), "you face the yellow key"),
    (view(NOTHING, CLOSED), view(NOTHING, NOTHING, 1), ""),
    (view(NOTHING, HELD), view(NOTHING, HELD), ""),
]


@pytest.mark.parametrize(("before", "after", "said"), HAPPENED)
def test_what_happened(before: Tensors, after: Tensors, said: str) -> None:
    assert happened(before, after) == [said]


def test_what_annotations_need(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.goal"):
        annotating(tmp_path, goal="")
    with pytest.raises(ConfigError, match="remove the wrappers"):
        happened({"image": torch.zeros(1)}, {"image": torch.zeros(1)})


@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_a_way_to_the_goal_is_told(backend: Any) -> None:
    """Each row says that it took the key and opened the door, in this order, in each episode."""
    if backend == "envpool":
        pytest.importorskip("envpool")
    captions = CaptionVocabulary()
    env = with_event_captions(world := MiniGrid(replace(DOORKEY, backend=backend)), captions)
    planner, obs = Planner(PlannerConfig(), world.spec), env.reset(0)
    assert obs[CAPTION].tolist() == [0] * 4 and captions.texts == [""]
    said: list[list[str]] = [[] for _ in range(4)]
    way = ["you picked up the yellow key", "you unlocked the yellow door"]
    way += ["you stepped into the doorway of the yellow door"]
    ended = 0
    for _ in range(60):
        step = walk(env, planner, obs)
        obs = step.obs
        for row, number in enumerate(step.next_obs[CAPTION].tolist()):
            text = captions.texts[number]
            said[row] += [text] if text and "face" not in text else []
            if step.ended[row]:
                assert said[row] == way
                assert int(obs[CAPTION][row]) == 0 and int(obs[TIMES][row]) == 0
                said[row], ended = [], ended + 1
    assert ended >= 8


def test_counts_begin_again_with_an_episode() -> None:
    """Picking up and putting down: the first time, the second, the third; anew after a reset."""
    captions = CaptionVocabulary()
    env = with_event_captions(world := MiniGrid(replace(DOORKEY, num_envs=1)), captions)
    planner, obs = Planner(PlannerConfig(), world.spec), env.reset(0)
    while obs["privileged/agent"][0, 3] == EMPTY:
        obs = walk(env, planner, obs).obs
    counted = []
    for action in (4, 3, 4, 3):
        seen = env.step(torch.tensor([action])).next_obs
        counted.append((captions.texts[int(seen[CAPTION])].split()[1], int(seen[TIMES])))
    assert counted == [("put", 1), ("picked", 2), ("put", 2), ("picked", 3)]
    assert int(env.reset(0)[TIMES]) == 0
    assert not env.memory["counts"].any()  # pyright: ignore[reportAttributeAccessIssue]


class Silent(MiniGrid):
    """An environment without event captions."""

    event_captions = None  # pyright: ignore[reportAssignmentType]


def test_a_world_without_events_is_described() -> None:
    captions = CaptionVocabulary()
    env = with_event_captions(Silent(replace(DOORKEY, num_envs=2)), captions)
    env.reset(0)
    seen = env.step(torch.tensor([0, 6])).next_obs
    assert captions.texts[0] == "" and int(seen[CAPTION].min()) > 0
    assert "You face" in captions.texts[int(seen[CAPTION][0])]
    assert seen[TIMES].tolist() == [1, 1]


JUDGE = node_of("rewards.language.rule_reader.RuleReader", helpful=["unlocked", "picked up"])


def annotating(folder: Path, **settings: Any) -> Annotate:
    judge = settings.pop("labeller", {})
    judge = judge if "_target_" in judge else JUDGE | judge
    node = node_of("rewards.language.annotate.Annotate", labeller=judge, synchronous=True)
    return make_reward(node | settings, MiniGrid(UNLOCK).spec, folder)


def rows_of(reward: Annotate, texts: list[str], times: list[int], own: float = 0.0) -> Any:
    """Rows whose steps were told as `texts`."""
    reward.captions.of("")
    return {
        f"next_obs/{CAPTION}": torch.tensor([reward.captions.of(text) for text in texts]),
        f"next_obs/{TIMES}": torch.tensor(times),
        "reward": torch.full((len(texts),), own),
    }


def noted(reward: Annotate, rows: Any) -> None:
    count = len(rows["reward"])
    reward.observe_step(rows, torch.arange(count), step(count))


TEXTS = ["", "you picked up the red key", "you picked up the red key", "you face the red door"]


def test_what_a_caption_pays(tmp_path: Path) -> None:
    """own r + weight r(c) / n^beta; the third time pays 1/27; unhelpful: nothing."""
    reward = annotating(tmp_path, weight=0.5, env_weight=2.0)
    rows = rows_of(reward, TEXTS, [0, 1, 3, 1], own=0.25)
    assert reward(rows).tolist() == [0.5] * 4
    noted(reward, rows)
    reward.set_step(4)
    intrinsic = torch.tensor([0, 0.5, 0.5 / 27, 0])
    torch.testing.assert_close(reward(rows), 0.5 + intrinsic)
    torch.testing.assert_close(reward.components(rows)["captions"], intrinsic)
    metrics = reward.update(rows)
    torch.testing.assert_close(metrics["intrinsic"], intrinsic.mean())
    assert float(metrics["coverage"]) == 1.0 and float(metrics["labels"]) == 2
    noted(reward, rows)
    assert reward.pool.asked == 2  # each caption is asked about once


def test_abstaining_is_no_label_and_is_asked_again_at_twice_the_visits(tmp_path: Path) -> None:
    reward = annotating(tmp_path, labeller={"refusal": 1.0})
    rows = rows_of(reward, ["you picked up the red key"], [1])
    asked = []
    for _ in range(9):
        noted(reward, rows)
        metrics = reward.update(rows)
        asked.append(reward.pool.asked)
    assert asked == [1, 2, 2, 3, 3, 3, 3, 4, 4]
    assert float(reward(rows)) == 0 and float(metrics["labels"]) == 0
    assert float(metrics["abstained"]) == 4 and float(metrics["coverage"]) == 0.0


def test_labels_say_where_they_come_from(tmp_path: Path) -> None:
    reward = annotating(tmp_path, labeller={"error": 0.0})
    noted(reward, rows := rows_of(reward, TEXTS, [0, 1, 2, 1]))
    reward.update(rows)
    lines = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    values = {line["question"][0]: line["value"] for line in lines}
    assert values == {"you picked up the red key": 1.0, "you face the red door": 0.0}
    for line in lines:
        assert line["model"].startswith("simulated(") and len(line["key"]) == 64
        assert line["goal"] == "open the door"


def test_pairs_are_asked_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = CaptionLabeller(RuleReader(Rules(("unlocked", "picked up"))), "goal")
    pairs = [("you unlocked it", "you picked up a key"), ("you wait", "you turn")]
    assert [label.value for label in judge.label(pairs)] == [1.0, 0.5]
    monkeypatch.setattr(RuleReader, "_compared", lambda *_: "first")  # what it is shown first
    biased = judge.label(pairs)
    assert [(label.value, label.why) for label in biased] == [(None, CONTRADICTED)] * 2


COLOURS = ("red", "green", "blue", "purple"), ("yellow", "grey")
SAID = ("you unlocked the {} door", "you picked up the {} key", "you face the {} door")


def test_classification_knows_colours_it_was_not_told_of() -> None:
    model = Classification(steps=120, lr=2e-3, batch=32, threshold=0.5, seed=0)
    assert model(["you face the red door"]).tolist() == [0.0]
    known, held_out = ([said.format(c) for said in SAID for c in few] for few in COLOURS)
    model.learn([(text,) for text in known], [0.0 if "face" in text else 1.0 for text in known])
    assert model(held_out).tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_ranking_is_measured_against_all_captions() -> None:
    """Normalised over the captions met: unlocking above picking up above facing, below: nothing."""
    model = Ranking(steps=60, lr=2e-3, batch=32, threshold=0.0, seed=0)
    every = [said.format(colour) for said in SAID for colour in COLOURS[0][:3]]
    worth = dict(zip(every, [2, 2, 2, 1, 1, 1, 0, 0, 0], strict=True))
    pairs = [*permutations(every, 2)]
    gains = [worth[a] - worth[b] for a, b in pairs]
    model.learn(pairs, [0.5 + 0.5 * (gain > 0) - 0.5 * (gain < 0) for gain in gains])
    model.normalize_on(every)
    paid = model(every).view(3, 3)
    assert (paid[0] > paid[1].max()).all() and (paid[2] == 0).all()
    z = (model.scores(every) - model.mean) / model.deviation
    assert abs(float(z.mean())) < 1e-4 and float(z.std()) == pytest.approx(1.0, abs=1e-3)


MOVES = torch.randint(0, 6, (96, 4), generator=torch.Generator().manual_seed(1))


def play(reward: Annotate, world: Any, moves: Tensor) -> list[Tensor]:
    paid = []
    for number, move in enumerate(moves):
        step = world.step(move)
        rows = {**nest(step.next_obs, "next_obs"), "reward": step.reward}
        reward.observe_step(rows, torch.arange(len(move)), step)
        if number % 8 == 7:
            reward.set_step(number)
            paid.append(reward(rows))
            reward.update(rows)
    return paid


@pytest.mark.parametrize("model", ["hash", "classification", "ranking"])
def test_going_on_gives_identical_labels_and_rewards(tmp_path: Path, model: str) -> None:
    settings: Any = {"model": model, "labeller": {"error": 0.2, "refusal": 0.2}, "steps": 4}
    reward, again = (annotating(tmp_path / name, **settings) for name in "ab")
    env, other = (each.augment_env(MiniGrid(UNLOCK)) for each in (reward, again))
    env.reset(0)
    other.reset(0)
    play(reward, env, MOVES[:48])
    torch.save((reward.get_state(), env.get_state()), tmp_path / "state.pt")
    expected = play(reward, env, MOVES[48:])
    states = torch.load(tmp_path / "state.pt", weights_only=True)
    again.set_state(states[0])
    other.set_state(states[1])
    assert all(map(torch.equal, expected, play(again, other, MOVES[48:])))
    assert again.captions.texts == reward.captions.texts
    assert again.counts.labelled.tolist() == reward.counts.labelled.tolist()
    assert torch.equal(again.scores, reward.scores)


def test_a_real_server_is_asked_and_prose_is_no_label(tmp_path: Path) -> None:
    """Two captions are judged, the newest first; what is said of a third is no JSON, twice."""
    with serving(says('{"1": "helpful", "2": "unhelpful"}'), says("It helps, I think.")) as server:
        node = server.node(cache=str(tmp_path / "chat.jsonl"), limits={"retries": 0})
        reward = annotating(tmp_path, labeller=node)
        noted(reward, rows_of(reward, ["you turn", "you unlocked the red door"], [1, 1]))
        reward.set_step(0)
        noted(reward, rows_of(reward, ["you wait"], [1]))
        rows = rows_of(reward, ["you turn", "you unlocked the red door", "you wait"], [1, 1, 1])
        metrics = reward.update(rows)
        assert reward(rows).tolist() == pytest.approx([0.0, 0.1, 0.0])
        assert float(metrics["labels"]) == 2 and float(metrics["failed"]) == 1
        asked = server.asked[0]["messages"][-1]["content"]
    text = asked if isinstance(asked, str) else asked[0]["text"]
    assert text.startswith("Goal: open the door\n")
    assert "\n1. you unlocked the red door\n2. you turn" in text


def test_the_active_subgoal_is_observed() -> None:
    """The codes of the oracle's sentences, one after the other; 0 where the list is over."""
    env = ObservedSubgoals(ObservedConfig(), world("MiniGrid-DoorKey-5x5-v0"))
    assert env.spec.obs["subgoal"].shape == (3,)
    planner, obs = Planner(PlannerConfig(), env.spec), env.reset(0)
    seen = [[obs["subgoal"][0].tolist()]]
    for _ in range(60):
        step = walk(env, planner, obs)
        obs = step.obs
        seen[-1].append(step.next_obs["subgoal"][0].tolist())
        if step.ended[0]:
            seen.append([obs["subgoal"][0].tolist()])
    yellow = describe.COLOURS.index("yellow")
    kind = describe.KIND
    oracle = [
        (subgoals.PICK + 1, kind["key"], yellow),
        (subgoals.UNLOCK + 1, kind["door"], yellow),
        (subgoals.GOAL + 1, kind["goal"], 0),
        (0, 0, 0),
    ]
    assert len(seen) > 2
    for episode in seen[:-1]:
        assert list(dict.fromkeys(map(tuple, episode))) == oracle
