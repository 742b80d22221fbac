"""Captions of steps, what is said of them and what they pay: counts, abstention, exact resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.env import Step
from embodied.core.tensors import Tensors, nest
from embodied.envs.minigrid.describe import happened
from embodied.envs.minigrid.env import Config, MiniGrid
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
from embodied.rewards.wrappers.added_observations import (
    CAPTION,
    TIMES,
    CaptionVocabulary,
    with_event_captions,
)
from tests.builders import make_reward, node_of
from tests.llm.server import says, serving
from tests.rewards.rows import step

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


def test_what_a_user_may_get_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.goal"):
        made(tmp_path, goal="")
    with pytest.raises(ConfigError, match="remove the wrappers"):
        happened({"image": torch.zeros(1)}, {"image": torch.zeros(1)})


def walk(env: Any, planner: Planner, obs: Tensors) -> Step:
    return env.step(planner.act(obs, {}, planner.sample_noise(env.num_envs))[0][:, 0])


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


def made(folder: Path, **settings: Any) -> Annotate:
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
    reward = made(tmp_path, weight=0.5, env_weight=2.0)
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
    reward = made(tmp_path, labeller={"refusal": 1.0})
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
    reward = made(tmp_path, labeller={"error": 0.0})
    noted(reward, rows := rows_of(reward, TEXTS, [0, 1, 2, 1]))
    reward.update(rows)
    lines = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    values = {line["question"][0]: line["value"] for line in lines}
    assert values == {"you picked up the red key": 1.0, "you face the red door": 0.0}
    for line in lines:
        assert line["model"].startswith("simulated(") and len(line["key"]) == 64
        assert line["goal"] == "open the door"


def test_errors_depend_on_the_words_alone() -> None:
    """Whatever the order and the batch, the same captions are judged wrongly: about a tenth."""
    texts = [f"you picked up thing {number}" for number in range(400)]
    questions = [(text,) for text in texts]
    reader = CaptionLabeller(RuleReader(Rules(("picked up",), error=0.1, refusal=0.05)), "goal")
    one = {label.question: label.value for label in reader.label(questions)}
    two = {q: label.value for q in questions[::-1] for label in reader.label([q])}
    assert one == two
    values = list(one.values())
    assert 20 <= values.count(0.0) <= 60 and 8 <= values.count(None) <= 34


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
    reward, again = (made(tmp_path / name, **settings) for name in "ab")
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
        reward = made(tmp_path, labeller=node)
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
