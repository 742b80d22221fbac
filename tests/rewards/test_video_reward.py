"""Rewards from a model that looks at videos: questions, answers, lateness, refusals, resume."""

from __future__ import annotations

import base64
import copy
import json
import math
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.env import Step
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, nest
from embodied.datasets.lerobot.video import decode_image
from embodied.llm.chat import ChatError
from embodied.rewards.vision_language.video_reward import VideoReward, shrunk
from embodied.rewards.vision_language.vlm_success import probability_of_true
from embodied.rewards.wrappers.added_observations import VIDEO_INDEX, Video
from tests.llm.server import Server, Told, says, serving
from tests.toy_envs import Config, Counter

PROGRESS = "embodied.rewards.vision_language.vlm_progress.VlmProgress"
SUCCESS = "embodied.rewards.vision_language.vlm_success.VlmSuccess"
FAST = {"retries": 0, "backoff": 0.0}


class Filmed(Counter):
    """A Counter whose image is as bright as the number of steps since the start."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.spec = self.spec.with_obs(front=Leaf((8, 8, 3), "uint8", 0, 255))

    def _obs(self) -> Tensors:
        bright = (10 * self.age).to(torch.uint8)
        image = bright[:, None, None, None].expand(-1, 8, 8, 3).clone()
        return {"state": (self.start + self.age)[:, None], "front": image}


def made(
    server: Server, target: str = PROGRESS, spec: Spec | None = None, **settings: Any
) -> VideoReward:
    chat = server.node(limits=FAST) | settings.pop("chat", {})
    node = {"_target_": target, "chat": chat, "picture": "front", "synchronous": True} | settings
    return build(node, VideoReward, spec=spec or Filmed(Config()).spec, seed=0, folder=None)


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
    env = env or reward.augment_env(Filmed(Config(ends=(3, 5))))
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
            reward = made(server, shuffle=shuffle)
            numbers = reward.augment_episode({"front": film(5)})[VIDEO_INDEX]
            rows |= {f"obs/{VIDEO_INDEX}": numbers[:-1], f"next_obs/{VIDEO_INDEX}": numbers[1:]}
            torch.testing.assert_close(reward(rows), torch.tensor([0.25, 0.25, 0.25, 1.25]))
            assert float(reward.update({})["voc"]) == pytest.approx(1.0)
    shuffled, ordered = map(bright, server.asked)
    assert ordered == [0, 1, 2, 3, 4] != shuffled and sorted(shuffled) == ordered
    assert shuffled[0] == 0
    words = server.asked[0]["messages"][0]["content"][0]["text"]
    assert "count" in words and "random order" in words and "4 images" in words


def test_episodes_of_training_are_rewarded_when_they_are_answered() -> None:
    """Env 0 ends after three steps: its transitions have 1/3 each after; env 1 is running."""
    with serving(percent(33, 67, 100)) as server:
        reward = made(server, shuffle=False)
        env = reward.augment_env(Filmed(Config(ends=(3, 9))))
        assert "front" in env.spec.obs and VIDEO_INDEX in env.spec.obs
        rows = played(reward, 3, env)
    assert [bright(question) for question in server.asked] == [[0, 1, 2, 3]]
    paid = torch.stack([reward(each) for each in rows], 1)
    torch.testing.assert_close(paid, torch.tensor([[0.33, 0.34, 0.33], [0.0, 0.0, 0.0]]))


def test_the_probability_is_that_of_the_first_word() -> None:
    with serving(token(**{"True": 0.6, "False": 0.2, " true": 0.1, "Maybe": 0.1})) as server:
        reward = made(server, SUCCESS)
        numbers = reward.augment_episode({"front": film(5)})[VIDEO_INDEX]
    torch.testing.assert_close(reward.phi[numbers], torch.tensor([0, 0, 0, 0, 7 / 9]))
    body = server.asked[0]
    assert body["logprobs"] is True and body["top_logprobs"] == 20 and body["max_tokens"] < 10


def test_growing_prefixes_give_progress() -> None:
    answers = [token(**{"True": p, "False": 1 - p}) for p in (0.1, 0.3, 0.8)]
    with serving(*answers) as server:
        reward = made(server, SUCCESS, prefixes=3, frames=7)
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
    with pytest.raises(ChatError, match='neither True nor False, but "Well'):
        probability_of_true([{"Well": 0.0}], "Well, it seems")
    with pytest.raises(ChatError, match="blank"):
        probability_of_true([{" ": 0.0}], " ")


def test_a_server_without_log_probabilities_says_what_to_do() -> None:
    with serving(says("True")) as server, pytest.raises(ConfigError, match=r"reward\.ask=score"):
        made(server, SUCCESS).augment_episode({"front": film(3)})
    with serving(says('{"score": 4}')) as server:
        reward = made(server, SUCCESS, ask="score")
        numbers = reward.augment_episode({"front": film(3)})[VIDEO_INDEX]
    assert reward.phi[numbers].tolist() == [0, 0, 0.75]
    assert "logprobs" not in server.asked[0]


@pytest.mark.parametrize(
    "told", [says(None, refusal="I cannot"), says("no idea"), Told({}, 500), Told(b"", 200)]
)
def test_no_answer_is_no_progress(told: Told) -> None:
    """A refusal, prose, a failing server: the episode counts as unanswered; the run goes on."""
    with serving(told) as server:
        reward = made(server)
        rows = played(reward, 6)
    metrics = reward.update({})
    assert int(metrics["abstained"]) == 3 and int(metrics["labelled"]) == 0
    assert not torch.stack([reward(each) for each in rows]).any()


def test_a_flaky_server_costs_single_episodes() -> None:
    good = percent(50, 75, 100)
    with serving(Told({}, 503), good, Told({}, 503), good) as server:
        reward = made(server, parallel=1)
        played(reward, 12, reward.augment_env(Filmed(Config(ends=(3, 3)))))
    metrics = reward.update({})
    assert (int(metrics["labelled"]), int(metrics["abstained"])) == (6, 2)


def test_a_slow_server_does_not_stop_training() -> None:
    """Transitions come while the model thinks; they are rewarded once it has answered."""
    gate = threading.Event()
    slow = percent(33, 67, 100)
    slow.event = gate
    with serving(slow) as server:
        reward = made(server, shuffle=False, synchronous=False)
        rows = played(reward, 4, reward.augment_env(Filmed(Config(ends=(3, 9)))))
        assert not reward(rows[0]).any() and int(reward.update({})["queue"]) == 1
        gate.set()
        assert reward.pool.drain(10)
        reward.set_step(5)
    torch.testing.assert_close(reward(rows[0]), torch.tensor([0.33, 0.0]))


def test_a_spent_budget_ends_the_questions_and_not_the_run() -> None:
    with serving(percent(50, 75, 100)) as server:
        reward = made(server, chat={"limits": FAST | {"calls": 2}}, parallel=1)
        played(reward, 12, reward.augment_env(Filmed(Config(ends=(3, 3)))))
        assert len(server.asked) == 2 and "2 calls" in reward.spent
        with pytest.raises(ConfigError, match="budget of 2 calls"):
            reward.augment_episode({"front": film(4)})


def test_it_goes_on_from_its_state() -> None:
    """Running frames, waiting episodes and answers are kept: the same rewards as without a stop."""
    with serving(percent(33, 67, 100)) as server:
        one, two = made(server), made(server)
        env, other = (reward.augment_env(Filmed(Config(ends=(3, 3)))) for reward in (one, two))
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
                made(server, **settings)
