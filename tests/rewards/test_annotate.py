"""Captions of steps, what is said of them and what they pay: counts, abstention, exact resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
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


def actions(world: MiniGrid, planner: Planner, obs: Tensors) -> Tensor:
    return planner.act(obs, {}, planner.sample_noise(world.num_envs))[0][:, 0]


@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_a_way_to_the_goal_is_told(backend: Any) -> None:
    """Each row says that it took the key and opened the door, in this order, in each episode."""
    if backend == "envpool":
        pytest.importorskip("envpool")
    config = Config("MiniGrid-DoorKey-5x5-v0", backend, num_envs=4, privileged=True)
    captions = CaptionVocabulary()
    env = with_event_captions(world := MiniGrid(config), captions)
    planner = Planner(PlannerConfig(), world.spec)
    obs = env.reset(0)
    assert obs[CAPTION].tolist() == [0] * 4 and captions.texts == [""]
    said: list[list[str]] = [[] for _ in range(4)]
    ended = 0
    for _ in range(60):
        step = env.step(actions(world, planner, obs))
        obs = step.obs
        for row in range(4):
            text = captions.texts[int(step.next_obs[CAPTION][row])]
            if text and "face" not in text:
                said[row].append(text)
            if step.ended[row]:
                way = ["you picked up the yellow key", "you unlocked the yellow door"]
                assert said[row] == [*way, "you stepped into the doorway of the yellow door"]
                assert int(obs[CAPTION][row]) == 0 and int(obs[TIMES][row]) == 0
                said[row], ended = [], ended + 1
    assert ended >= 8


def test_counts_begin_again_with_an_episode() -> None:
    """Picking up and putting down: the first time, the second, the third; anew after a reset."""
    config = Config("MiniGrid-DoorKey-5x5-v0", "gymnasium", num_envs=1, privileged=True)
    captions = CaptionVocabulary()
    env = with_event_captions(world := MiniGrid(config), captions)
    planner = Planner(PlannerConfig(), world.spec)
    obs = env.reset(0)
    while obs["privileged/agent"][0, 3] == EMPTY:
        obs = env.step(actions(world, planner, obs)).obs
    counted = []
    for action in (4, 3, 4, 3):
        step = env.step(torch.tensor([action]))
        text = captions.texts[int(step.next_obs[CAPTION])]
        counted.append((text.split()[1], int(step.next_obs[TIMES])))
    assert counted == [("put", 1), ("picked", 2), ("put", 2), ("picked", 3)]
    assert int(env.reset(0)[TIMES]) == 0
    assert not env.memory["counts"].any()  # pyright: ignore[reportAttributeAccessIssue]


class Silent(MiniGrid):
    """An environment without event captions."""

    event_captions = None  # pyright: ignore[reportAssignmentType]


def test_a_world_without_events_is_described() -> None:
    captions = CaptionVocabulary()
    world = Silent(Config("MiniGrid-DoorKey-5x5-v0", "gymnasium", num_envs=2))
    env = with_event_captions(world, captions)
    env.reset(0)
    step = env.step(torch.tensor([0, 6]))
    assert captions.texts[0] == "" and int(step.next_obs[CAPTION].min()) > 0
    assert "You face" in captions.texts[int(step.next_obs[CAPTION][0])]
    assert step.next_obs[TIMES].tolist() == [1, 1]


JUDGE = node_of("rewards.language.rule_reader.RuleReader", helpful=["unlocked", "picked up"])


def made(folder: Path, **settings: Any) -> Annotate:
    world = MiniGrid(Config("MiniGrid-Unlock-v0", "gymnasium", num_envs=4, text="open the door"))
    judge = settings.pop("labeller", {})
    judge = judge if "_target_" in judge else JUDGE | judge
    node = node_of("rewards.language.annotate.Annotate", labeller=judge, synchronous=True)
    return make_reward(node | settings, world.spec, folder)


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
    expected = [0.5, 0.5 + 0.5, 0.5 + 0.5 / 27, 0.5]
    torch.testing.assert_close(reward(rows), torch.tensor(expected))
    metrics = reward.update(rows)
    paid = (reward(rows) - 0.5).mean()
    torch.testing.assert_close(metrics["intrinsic"], paid)
    assert float(metrics["coverage"]) == 1.0 and float(metrics["labels"]) == 2
    noted(reward, rows)
    assert reward.pool.asked == 2  # each caption is asked about once
    terms = reward.components(rows)
    torch.testing.assert_close(terms["env"] + terms["captions"], reward(rows))


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


def test_unreadable_answers_are_dropped(tmp_path: Path) -> None:
    reward = made(tmp_path, labeller={"broken": 1.0})
    rows = rows_of(reward, TEXTS, [0, 1, 2, 1])
    noted(reward, rows)
    metrics = reward.update(rows)
    assert float(metrics["labels"]) == 0 and float(metrics["failed"]) == 1
    assert reward(rows).tolist() == [0.0] * 4


def test_labels_say_where_they_come_from(tmp_path: Path) -> None:
    reward = made(tmp_path, labeller={"error": 0.0})
    noted(reward, rows := rows_of(reward, TEXTS, [0, 1, 2, 1]))
    reward.update(rows)
    lines = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert {tuple(line["question"]): line["value"] for line in lines} == {
        ("you picked up the red key",): 1.0,
        ("you face the red door",): 0.0,
    }
    assert all(line["model"].startswith("simulated(") and len(line["key"]) == 64 for line in lines)
    assert all(line["goal"] == "open the door" for line in lines)


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


COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
SAID = ("you unlocked the {} door", "you picked up the {} key", "you face the {} door")


def test_classification_knows_colours_it_was_not_told_of() -> None:
    model = Classification(steps=120, lr=2e-3, batch=32, threshold=0.5, seed=0)
    known = [(said.format(colour),) for said in SAID for colour in COLOURS[:4]]
    values = [0.0 if "face" in text else 1.0 for (text,) in known]
    assert model(["you face the red door"]).tolist() == [0.0]
    model.learn(known, values)
    held_out = [said.format(colour) for said in SAID for colour in COLOURS[4:]]
    assert model(held_out).tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_ranking_is_measured_against_all_captions() -> None:
    """Normalised over the captions met: unlocking above picking up above facing, below: nothing."""
    model = Ranking(steps=60, lr=2e-3, batch=32, threshold=0.0, seed=0)
    every = [said.format(colour) for said in SAID for colour in COLOURS[:3]]
    worth = [2] * 3 + [1] * 3 + [0] * 3
    pairs = [(a, b) for a in every for b in every if a != b]
    value = dict(zip(every, worth, strict=True))
    targets = [0.5 + 0.5 * (value[a] > value[b]) - 0.5 * (value[a] < value[b]) for a, b in pairs]
    model.learn(pairs, targets)
    model.normalize_on(every)
    paid = model(every).view(3, 3)
    assert (paid[0] > paid[1].max()).all() and (paid[2] == 0).all()
    z = (model.scores(every) - model.mean) / model.deviation
    assert abs(float(z.mean())) < 1e-4 and float(z.std()) == pytest.approx(1.0, abs=1e-3)


def play(reward: Annotate, world: Any, moves: Tensor) -> list[Tensor]:
    paid = []
    for number, move in enumerate(moves):
        step = world.step(move)
        rows = {**nest(step.next_obs, "next_obs"), "reward": step.reward}
        reward.observe_step(rows, torch.arange(len(move)), step)
        if number % 8 == 7:
            reward.set_step(number)
            paid.append(reward(rows))
            paid += reward.update(rows).values()
    return paid


@pytest.mark.parametrize("model", ["hash", "classification", "ranking"])
def test_going_on_gives_identical_labels_and_rewards(tmp_path: Path, model: str) -> None:
    moves = torch.randint(0, 6, (96, 4), generator=torch.Generator().manual_seed(1))
    settings: Any = {"model": model, "labeller": {"error": 0.2, "refusal": 0.2}, "steps": 4}
    reward = made(tmp_path / "a", **settings)
    world = MiniGrid(Config("MiniGrid-Unlock-v0", "gymnasium", num_envs=4))
    env = reward.augment_env(world)
    env.reset(0)
    play(reward, env, moves[:48])
    kept, rows = reward.get_state(), env.get_state()
    torch.save(kept, tmp_path / "state.pt")
    expected = play(reward, env, moves[48:])
    again = made(tmp_path / "b", **settings)
    other = again.augment_env(MiniGrid(world.config))
    other.reset(0)
    again.set_state(torch.load(tmp_path / "state.pt", weights_only=True))
    other.set_state(rows)
    for one, two in zip(expected, play(again, other, moves[48:]), strict=True):
        if not torch.equal(one, two):
            assert one.ndim == 0  # counts of calls and seconds are of the process
    assert again.captions.texts == reward.captions.texts
    assert again.counts.labelled.tolist() == reward.counts.labelled.tolist()
    assert torch.equal(again.scores, reward.scores)


def test_beside_training_the_labels_are_the_same_in_the_end(tmp_path: Path) -> None:
    """A thread and a queue change when a label comes, not what it is; one killed on the way too."""
    moves = torch.randint(0, 6, (80, 4), generator=torch.Generator().manual_seed(1))
    values = []
    for beside in (False, True):
        judge = {"error": 0.2, "latency": 0.002 * beside}
        reward = made(tmp_path / str(beside), synchronous=not beside, labeller=judge, batch=2)
        env = reward.augment_env(MiniGrid(Config("MiniGrid-Unlock-v0", "gymnasium", num_envs=4)))
        env.reset(0)
        play(reward, env, moves[:40])
        reward.pool.stop()
        play(reward, env, moves[40:])
        assert reward.pool.drain(20)
        reward.set_step(0)
        values.append(reward.model.get_state()["value"])
    assert values[0] == values[1] and len(values[0]) >= 8


def test_a_real_server_is_asked_and_prose_is_no_label(tmp_path: Path) -> None:
    """Two captions are judged, the newest first; what is said of a third is no JSON, twice."""
    with serving(says('{"1": "helpful", "2": "unhelpful"}'), says("It helps, I think.")) as server:
        limits = {"retries": 0, "backoff": 0.001}
        node = server.node(cache=str(tmp_path / "chat.jsonl"), limits=limits)
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
