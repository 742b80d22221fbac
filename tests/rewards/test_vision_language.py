"""Sentences, goals and videos as rewards: by hand, by an encoder, by a model behind a server."""

from __future__ import annotations

import base64
import copy
import json
import math
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.simclip.captions import fact, fill_templates, ladder
from embodied.core.build import ConfigError, build
from embodied.core.env import Step
from embodied.core.reward import Reward
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, nest
from embodied.datasets.lerobot.video import decode_image, encode_png
from embodied.envs.toy.two_gap import Config as GapConfig
from embodied.envs.toy.two_gap import TwoGap
from embodied.llm.chat import ChatError
from embodied.rewards.vision_language.clip import Config, Ladders, Projected, readout_of
from embodied.rewards.vision_language.goal import Goal
from embodied.rewards.vision_language.video_reward import VideoReward, shrunk
from embodied.rewards.vision_language.vlm_success import probability_of_true
from embodied.rewards.wrappers.added_observations import VIDEO_INDEX, Video
from embodied.rewards.wrappers.success_detector import NoTerminationWrapper
from embodied.vision import simclip
from tests.builders import node_of
from tests.llm.server import Server, Told, says, serving
from tests.rewards.rows import write_episodes
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter

REACH = "the hand is touching the green ball"
CPU = torch.device("cpu")
SPEC = Spec({"state": Leaf((2,)), "front": Leaf((8, 8, 3), "uint8", 0, 255)}, Leaf((1,)), dt=0.1)


def unit(rows: int, seed: int, size: int = 16) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return functional.normalize(torch.randn(rows, size, generator=random), dim=1)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_only_the_way_to_the_goal_counts_as_far_as_it_is_projected(alpha: float) -> None:
    """By the matrix of the paper; without projection or a baseline it is the cosine."""
    seen, goal, away = unit(20, 0), unit(1, 1)[0], unit(1, 2)[0]
    way = goal - away
    matrix = alpha * torch.outer(way, way) / way.square().sum() + (1 - alpha) * torch.eye(16)
    expected = 1 - 0.5 * ((seen - goal) @ matrix).square().sum(1)
    torch.testing.assert_close(Projected(goal, away, alpha)(seen), expected)
    torch.testing.assert_close(Projected(goal, None, alpha)(seen), seen @ goal)


def test_a_ladder_is_the_expected_place() -> None:
    """On the rungs; between two of them, half of each; and on two ladders, the mean of both."""
    rungs = torch.eye(3)
    seen = functional.normalize(torch.cat([rungs, torch.tensor([[0.0, 1.0, 1.0]])]), dim=1)
    torch.testing.assert_close(Ladders([rungs], 100.0)(seen), torch.tensor([0.0, 0.5, 1.0, 0.75]))
    both = Ladders([rungs, rungs.flip(0)], 100.0)
    torch.testing.assert_close(both(rungs), torch.full((3,), 0.5))


class Words:
    """An encoder whose texts are known vectors and whose pictures are their first pixel's hue."""

    name, size, side = "words", 3, 8

    def texts(self, sentences: Sequence[str]) -> Tensor:
        place = {"bad": 0, "fair": 1, "good": 2}
        return torch.eye(3)[[place[text] for text in sentences]]

    def images(self, pictures: Tensor) -> Tensor:
        return functional.normalize(pictures[:, 0, 0].float(), dim=1)


def test_given_sentences_are_used_as_they_are() -> None:
    picture = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    picture[0, 0, 0, 1] = 200
    model = Words()
    steps = readout_of(Config(ladder=("bad", "fair", "good"), temperature=0.01), model, ())
    assert float(steps(model.images(picture))) == pytest.approx(0.5, abs=1e-4)
    plain = readout_of(Config(alpha=0.0), model, ("good", "fair"))
    assert float(plain(model.images(picture))) == pytest.approx(0.5 + 0.25)  # |g| is not one
    with pytest.raises(ConfigError, match="at least two"):
        readout_of(Config(ladder=("good",)), model, ())
    with pytest.raises(ConfigError, match="the same embedding"):
        readout_of(Config(baseline="good"), model, ("good",))


def test_a_known_order_is_found_and_others_are_not() -> None:
    model = simclip.load()
    found = model.ladder("the gripper is right at the green ball")
    assert found is not None and found[0] == [simclip.BLANK]
    assert any("touching" in text or "exactly at" in text for text in found[-1])
    backwards = model.ladder("the hand is very far from the ball")
    assert backwards is not None and backwards[-1] == found[1]
    for sentence in ("a red bus waits in the rain", "quarterly earnings exceeded forecasts"):
        assert model.ladder(sentence) is None


def test_the_world_is_drawn_where_no_picture_is_named(tmp_path: Path) -> None:
    """By the reward of a sentence and by that of a goal, which the first of three rows is at."""
    env = TwoGap(GapConfig(num_envs=3))
    env.reset(0)
    env.place[:] = torch.tensor([[0.9, 0.9], [0.8, 0.8], [0.1, 0.1]])
    (tmp_path / "goal.png").write_bytes(encode_png(env.render_batch(torch.tensor([0]), 96)[0]))
    goal = made_goal(goal=str(tmp_path / "goal.png"))
    for reward in (made(env.spec), goal):
        watched = reward.augment_env(env)
        watched.reset(0)
        env.place[:] = torch.tensor([[0.9, 0.9], [0.8, 0.8], [0.1, 0.1]])
        step = watched.step(torch.zeros(3, 2))
        paid = reward(nest(step.next_obs, "next_obs") | {"reward": step.reward})
        assert paid.shape == (3,) and bool((paid <= 0).all())
        with pytest.raises(ConfigError, match=r"reward\.(picture|leaf)=NAME"):
            reward({"reward": step.reward})
    assert paid[0] > paid[1] > paid[2]


def made(spec: Spec = SPEC, **settings: object) -> Any:
    node = node_of("rewards.vision_language.clip.Clip", prompt=REACH) | settings
    return build(node, Reward, spec=spec, device=CPU)


def test_change_is_potential_based() -> None:
    reward = made(value="change", scale=2.0, picture="front")
    before, after = (torch.full((2, 8, 8, 3), v, dtype=torch.uint8) for v in (30, 220))
    discount = torch.tensor([0.9, 0.0])
    rows = {"obs/front": before, "next_obs/front": after, "reward": torch.zeros(2)}
    expected = 2 * (discount * reward.score(after) - reward.score(before))
    torch.testing.assert_close(reward(rows | {"discount": discount}), expected)


def test_ends_are_hidden_from_the_learner() -> None:
    env = TwoGap(GapConfig(num_envs=1))
    endless = NoTerminationWrapper(env)
    endless.reset(0)
    env.place[0] = torch.tensor([0.9, 0.5])
    step = endless.step(torch.tensor([[1.0, 0.0]]))
    assert bool(step.log["success"]) and not bool(step.terminated) and bool(step.truncated)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"picture": "state"}, "is not an image observation"),
        ({"picture": "back"}, "there are \\['front'\\]"),
        ({"alpha": 1.5}, "alpha=1.5 should be at least 0, at most 1"),
        ({"prompt": None}, "no goal"),
        ({"model": "/no/such"}, "no model at /no/such"),
    ],
)
def test_wrong_settings_are_one_clear_line(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**settings)


def test_places_on_a_ladder_are_by_hand() -> None:
    phrases = [fill_templates(("{a} {b}",), a=("x", "y"), b=(f"p{n}", f"q{n}")) for n in range(3)]
    falling = ladder("near", (0.2, 0.1), (0.3, 0.0), phrases)
    quantity = torch.tensor([0.5, 0.25, 0.15, 0.05, 0.0])
    assert falling.rung(quantity).tolist() == [0, 0, 1, 2, 2]
    expected = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0]) * 2 / 3
    torch.testing.assert_close(falling.place(quantity), expected)
    made = fact("f", ["a", "b", "c", "d", "d"])
    assert len(made.phrases) == 3 and len(made.held_out) == 1
    assert not {*made.phrases} & {*made.held_out}


STATE = Leaf((3,), names=("x", "y", "z"))
GOAL_SPEC = Spec({"state": STATE, "front": Leaf((48, 48, 3), "uint8", 0, 255)}, Leaf((2,)), dt=0.1)


def made_goal(**settings: object) -> Goal:
    node = node_of("rewards.vision_language.goal.Goal", **settings)
    return build(node, Reward, spec=GOAL_SPEC, device=CPU)


def seen_rows(**leaves: Tensor) -> dict[str, Tensor]:
    count = len(next(iter(leaves.values())))
    return {f"next_obs/{k}": v for k, v in leaves.items()} | {"reward": torch.zeros(count)}


def test_distance_to_named_numbers() -> None:
    reward = made_goal(leaf="state", state={"x": 1.0, "z": 0.0}, weights={"z": 2.0}, scale=0.5)
    state = torch.tensor([[1.0, 9.0, 0.0], [4.0, 9.0, 2.0]])
    # sqrt(3^2 + (2 * 2)^2) = 5; y does not count.
    torch.testing.assert_close(reward(seen_rows(state=state)), torch.tensor([0.0, -2.5]))


def test_the_end_of_a_recorded_episode(tmp_path: Path) -> None:
    spec = Spec({"state": STATE}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
    walk = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 3.0, 4.0]])
    shown = write_episodes(tmp_path / "shown", spec, [{"state": walk}], won=False)
    reward = made_goal(leaf="state", goal=shown)
    torch.testing.assert_close(reward(seen_rows(state=torch.zeros(1, 3))), torch.tensor([-5.0]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "no goal"),
        ({"goal": "/no/such"}, "neither an image nor a dataset"),
        ({"leaf": "touch", "goal": "x"}, "not an observation: state, front"),
        ({"state": {"x": 1.0}}, "reward.leaf=state"),
        ({"leaf": "state", "state": {"w": 1.0}}, "no element 'w'"),
        ({"leaf": "state", "state": {"x": 1.0}, "weights": {"v": 1.0}}, "no element 'v'"),
    ],
)
def test_wrong_goals_are_one_clear_line(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        made_goal(**settings)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "goal.png").write_text("not a picture")
    with pytest.raises(ConfigError, match="is not an image"):
        made_goal(goal=str(tmp_path / "goal.png"))
    (tmp_path / "goal.png").write_bytes(encode_png(torch.full((8, 8, 1), 0.3)))  # in mm, 16 bits
    with pytest.raises(ConfigError, match="16 bits a colour: save it with 8"):
        made_goal(goal=str(tmp_path / "goal.png"))


PROGRESS = "embodied.rewards.vision_language.vlm_progress.VlmProgress"
SUCCESS = "embodied.rewards.vision_language.vlm_success.VlmSuccess"
FAST = {"retries": 0, "backoff": 0.0}


class Filmed(Counter):
    """A Counter whose image is as bright as the number of steps since the start."""

    def __init__(self, config: CounterConfig) -> None:
        super().__init__(config)
        self.spec = self.spec.with_obs(front=Leaf((8, 8, 3), "uint8", 0, 255))

    def _obs(self) -> Tensors:
        bright = (10 * self.age).to(torch.uint8)
        image = bright[:, None, None, None].expand(-1, 8, 8, 3).clone()
        return {"state": (self.start + self.age)[:, None], "front": image}


def made_video(
    server: Server, target: str = PROGRESS, spec: Spec | None = None, **settings: Any
) -> VideoReward:
    chat = server.node(limits=FAST) | settings.pop("chat", {})
    node = {"_target_": target, "chat": chat, "picture": "front", "synchronous": True} | settings
    return build(node, VideoReward, spec=spec or Filmed(CounterConfig()).spec, seed=0, folder=None)


def percent(*values: int) -> Told:
    return says(json.dumps({"completion": values}))


def token(**alternatives: float) -> Told:
    """An answer of one token with its alternatives."""
    told = says(max(alternatives, key=lambda word: alternatives[word]))
    top = [{"token": word, "logprob": math.log(p)} for word, p in alternatives.items()]
    told.body["choices"][0]["logprobs"] = {"content": [{"token": "x", "top_logprobs": top}]}
    return told


def film(count: int) -> Tensor:
    """An episode of images, each as bright as its place says."""
    return torch.stack([torch.full((8, 8, 3), 10 * i, dtype=torch.uint8) for i in range(count)])


def bright(question: dict[str, Any]) -> list[int]:
    """How many steps after the start each of a question's images is."""
    parts = question["messages"][-1]["content"][1:]
    data = [part["image_url"]["url"].partition(",")[2] for part in parts]
    return [int(decode_image(base64.b64decode(each))[0, 0, 0]) // 10 for each in data]


def played(reward: VideoReward, steps: int, env: Any = None, obs: Any = None) -> list[Tensors]:
    """Transitions of each step, as training hands them to the reward."""
    env = env or reward.augment_env(Filmed(CounterConfig(ends=(3, 5))))
    before, kept = env.reset(0) if obs is None else obs, list[Tensors]()
    for count in range(steps):
        step: Step = env.step(torch.zeros(2, 1))
        rows = nest(before, "obs") | nest(step.next_obs, "next_obs")
        rows |= {"reward": step.reward * 0, "discount": 0.9 * (~step.terminated).float()}
        reward.observe_step(rows, torch.arange(2), step)
        reward.set_step(count)
        before = step.obs
        kept.append(rows)
    return kept


def test_shuffled_percentages_are_put_in_order() -> None:
    """The model answers by what it sees (25 percent a step), in whatever order: Phi rises so."""

    def answer(question: dict[str, Any]) -> Any:
        return percent(*(25 * step for step in bright(question)[1:])).body

    rows = {"reward": torch.tensor([0.0, 0.0, 0.0, 1.0]), "discount": torch.full((4,), 0.9)}
    with serving(Told(answer)) as server:
        for shuffle in (True, False):
            reward = made_video(server, shuffle=shuffle)
            numbers = reward.augment_episode({"front": film(5)})[VIDEO_INDEX]
            rows |= {f"obs/{VIDEO_INDEX}": numbers[:-1], f"next_obs/{VIDEO_INDEX}": numbers[1:]}
            torch.testing.assert_close(reward(rows), torch.tensor([0.25, 0.25, 0.25, 1.25]))
            assert float(reward.update({})["voc"]) == pytest.approx(1.0)
    shuffled, ordered = map(bright, server.asked)
    assert ordered == [0, 1, 2, 3, 4] != shuffled and sorted(shuffled) == ordered
    assert shuffled[0] == 0
    words = server.asked[0]["messages"][0]["content"][0]["text"]
    assert "count" in words and "random order" in words and "4 images" in words


def test_random_answers_have_no_order() -> None:
    """The frame that is given as 0 percent, and what lies between the asked ones, do not count."""
    random = np.random.default_rng(0)
    with serving(Told(lambda _: percent(*random.integers(0, 101, 7).tolist()).body)) as server:
        reward = made_video(server)
        for _ in range(200):
            reward.augment_episode({"front": film(20)})
    assert abs(float(reward.update({})["voc"])) < 0.08  # its standard error: 1 / sqrt(6 * 200)


def test_shares_of_outcomes_are_the_same_in_any_window() -> None:
    script = [percent(50, 100), *(says("no idea"),) * 2, percent(50, 100)]
    with serving(*script) as server:
        reward = made_video(server)
        for _ in range(3):
            reward.augment_episode({"front": film(3)})
    facts = reward.update({})
    assert float(facts["labelled"]) == pytest.approx(2 / 3)
    assert float(facts["abstained"]) == pytest.approx(1 / 3)


def test_episodes_of_training_are_rewarded_when_they_are_answered() -> None:
    """Env 0 ends after three steps: its transitions have 1/3 each after; env 1 is running."""
    with serving(percent(33, 67, 100)) as server:
        reward = made_video(server, shuffle=False)
        env = reward.augment_env(Filmed(CounterConfig(ends=(3, 9))))
        assert "front" in env.spec.obs and VIDEO_INDEX in env.spec.obs
        rows = played(reward, 3, env)
    assert [bright(question) for question in server.asked] == [[0, 1, 2, 3]]
    paid = torch.stack([reward(each) for each in rows], 1)
    torch.testing.assert_close(paid, torch.tensor([[0.33, 0.34, 0.33], [0.0, 0.0, 0.0]]))


def test_the_probability_is_that_of_the_first_word() -> None:
    with serving(token(**{"True": 0.6, "False": 0.2, " true": 0.1, "Maybe": 0.1})) as server:
        reward = made_video(server, SUCCESS)
        numbers = reward.augment_episode({"front": film(5)})[VIDEO_INDEX]
    torch.testing.assert_close(reward.phi[numbers], torch.tensor([0, 0, 0, 0, 7 / 9]))
    body = server.asked[0]
    assert body["logprobs"] is True and body["top_logprobs"] == 20 and body["max_tokens"] < 10


def test_growing_prefixes_give_progress() -> None:
    answers = [token(**{"True": p, "False": 1 - p}) for p in (0.1, 0.3, 0.8)]
    with serving(*answers) as server:
        reward = made_video(server, SUCCESS, prefixes=3, frames=7)
        numbers = reward.augment_episode({"front": film(7)})[VIDEO_INDEX]
    assert [len(bright(question)) for question in server.asked] == [3, 5, 7]
    expected = torch.tensor([0, 0.05, 0.1, 0.2, 0.3, 0.55, 0.8])
    torch.testing.assert_close(reward.phi[numbers], expected)


def test_words_of_an_answer() -> None:
    for tokens, expected in (
        ([{"\n": 0.0}, {"True": math.log(0.9), "False": math.log(0.1)}], 0.9),
        ([{"TRUE": math.log(0.5), "no": math.log(0.1)}], 0.5 / 0.6),
        ([{"False.": math.log(0.8), "Well": math.log(0.2)}], 0.2),
    ):
        assert probability_of_true(tokens, "") == pytest.approx(expected)
    for listed in ({"True": -0.01}, {"Well": -0.1, "True": -2.5, " true": -4.0}):
        with pytest.raises(ChatError, match="the other word may be as likely"):
            probability_of_true([listed], "")
    with pytest.raises(ChatError, match='neither True nor False, but "Well'):
        probability_of_true([{"Well": 0.0}], "Well, it seems")
    with pytest.raises(ChatError, match="blank"):
        probability_of_true([{" ": 0.0}], " ")


def test_a_server_without_log_probabilities_says_what_to_do() -> None:
    with serving(says("True")) as server, pytest.raises(ConfigError, match=r"reward\.ask=score"):
        made_video(server, SUCCESS).augment_episode({"front": film(3)})
    with serving(says('{"score": 4}')) as server:
        reward = made_video(server, SUCCESS, ask="score")
        numbers = reward.augment_episode({"front": film(3)})[VIDEO_INDEX]
    assert reward.phi[numbers].tolist() == [0, 0, 0.75]
    assert "logprobs" not in server.asked[0]


@pytest.mark.parametrize(
    "told", [says(None, refusal="I cannot"), says("no idea"), Told({}, 500), Told(b"", 200)]
)
def test_no_answer_is_no_progress(told: Told) -> None:
    """A refusal, prose, a failing server: the episode counts as unanswered; the run goes on."""
    with serving(told) as server:
        reward = made_video(server)
        rows = played(reward, 6)
    metrics = reward.update({})
    assert float(metrics["abstained"]) == 1 and float(metrics["labelled"]) == 0
    assert not torch.stack([reward(each) for each in rows]).any()


def test_a_slow_server_does_not_stop_training() -> None:
    """Transitions come while the model thinks; they are rewarded once it has answered."""
    gate = threading.Event()
    slow = percent(33, 67, 100)
    slow.event = gate
    with serving(slow) as server:
        reward = made_video(server, shuffle=False, synchronous=False)
        rows = played(reward, 4, reward.augment_env(Filmed(CounterConfig(ends=(3, 9)))))
        assert not reward(rows[0]).any() and int(reward.update({})["queue"]) == 1
        gate.set()
        assert reward.pool.drain(10)
        reward.set_step(5)
    torch.testing.assert_close(reward(rows[0]), torch.tensor([0.33, 0.0]))


def test_a_spent_budget_ends_the_questions_and_not_the_run() -> None:
    with serving(percent(50, 75, 100)) as server:
        reward = made_video(server, chat={"limits": FAST | {"calls": 2}}, parallel=1)
        played(reward, 12, reward.augment_env(Filmed(CounterConfig(ends=(3, 3)))))
        assert len(server.asked) == 2 and "2 calls" in reward.spent
        with pytest.raises(ConfigError, match="budget of 2 calls"):
            reward.augment_episode({"front": film(4)})


def test_it_goes_on_from_its_state() -> None:
    """Running frames, waiting episodes and answers are kept: the same rewards as without a stop."""
    with serving(percent(33, 67, 100)) as server:
        one, two = made_video(server), made_video(server)
        worlds = [Filmed(CounterConfig(ends=(3, 3))) for _ in range(2)]
        env, other = one.augment_env(worlds[0]), two.augment_env(worlds[1])
        rows = played(one, 4, env)
        other.reset(0)
        obs = other.set_state(env.get_state())
        two.set_state(copy.deepcopy(one.get_state()))
        more = [played(*each, obs=obs) for each in ((one, 4, env), (two, 4, other))]
    for a, b in zip(*more, strict=True):
        assert torch.equal(a[f"next_obs/{VIDEO_INDEX}"], b[f"next_obs/{VIDEO_INDEX}"])
        assert torch.equal(one(a), two(b))
    assert torch.equal(one(rows[0]), two(rows[0])) and one(more[0][0]).any()


def test_long_episodes_are_thinned_and_keep_both_ends() -> None:
    video = Video()
    for i in range(100):
        video.append(i, torch.full((2, 2, 3), i), 8)
        assert len(video.images) <= 17
    places, images = video.sampled(5)
    assert places[0] == 0 and places[-1] == 99 and len(places) == 5
    assert images[:, 0, 0, 0].tolist() == places
    assert max(b - a for a, b in pairwise(places)) <= 32


def test_images_are_shrunk_to_their_limit() -> None:
    images = torch.zeros(2, 300, 600, 3, dtype=torch.uint8)
    assert shrunk(images, 200).shape == (2, 100, 200, 3)
    assert shrunk(images, 600) is images


def test_settings_are_checked() -> None:
    silent = Spec({"front": Leaf((8, 8, 3), "uint8", 0, 255)}, Leaf((1,)), dt=0.1)
    with serving(says("x")) as server:
        for settings, message in (
            ({"picture": "rear"}, "reward.picture=rear"),
            ({"target": SUCCESS, "prefixes": 9}, "reward.prefixes=9"),
            ({"spec": silent}, r"reward\.goal"),
        ):
            with pytest.raises(ConfigError, match=message):
                made_video(server, **settings)
