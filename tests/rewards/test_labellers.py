"""Judges and what is learned from them: losses by hand, scores out of comparisons, HERON."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf
from embodied.rewards.preferences.heron import preference_loss, preferences
from embodied.rewards.preferences.labellers import (
    ABSTAIN,
    FIRST,
    SECOND,
    SKIPPED,
    TIE,
    EmbeddingConfig,
    EmbeddingLabeller,
    Labeller,
    SimulatedConfig,
    SimulatedLabeller,
    VisionLanguageConfig,
    VisionLanguageLabeller,
)
from embodied.rewards.preferences.ranker import FitConfig, Ranker, loss_of, scores_of
from embodied.vision.image_text import ImageText
from tests.builders import node_of
from tests.llm.server import Server, Told, says, serving
from tests.rewards.rows import drawn, make

CPU, PLANE = torch.device("cpu"), Leaf((2,))


def test_the_loss_by_hand() -> None:
    """-log sigmoid(0.5) and log 2, in mean over the pairs; members are summed."""
    first, second = torch.tensor([[0.2, 0.0]]), torch.tensor([[0.7, 0.0]])
    target = torch.tensor([[1.0, 0.5]])
    expected = (math.log(1 + math.exp(-0.5)) + math.log(2)) / 2
    for members in (1, 2):
        loss = loss_of(*(each.expand(members, -1) for each in (first, second, target)))
        assert float(loss) == pytest.approx(members * expected)


def labels(n: int, seed: int, error: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Points on a plane of which the one with the larger sum is preferred."""
    random = torch.Generator().manual_seed(seed)
    first, second = torch.rand(2, n, 2, generator=random)
    wrong = torch.rand(n, generator=random) < error
    target = ((second.sum(1) > first.sum(1)) ^ wrong).float()
    return first[:, None], second[:, None], target  # segments of one step


def ranker(leaf: Leaf = PLANE, **fit: Any) -> Ranker:
    return Ranker(leaf, FitConfig(**{"hidden": (32,), "rate": 1e-2} | fit), CPU, 0)


def test_scores_order_what_was_never_compared() -> None:
    """And their accuracy on new labels is foretold, not fitted."""
    model = ranker()
    metrics = model.learn(labels(200, 0))
    assert float(metrics["train_accuracy"]) > 0.97 and "new_accuracy" not in metrics
    assert model.accuracy(labels(1000, 1)) > 0.95
    assert model.score(torch.rand(50, 2)).abs().max() <= 1
    first, second, target = labels(100, 1)
    metrics = model.learn((first, second, 1 - target))  # everything the other way round
    assert float(metrics["new_accuracy"]) < 0.1
    assert len(model) == 300


def test_beginning_anew_keeps_wrong_labels_from_being_learned_by_heart() -> None:
    told = {}
    for fresh in (True, False):
        model = ranker(hidden=(64,), rate=3e-3, epochs=20, fresh=fresh)
        for seed in range(6):
            model.learn(labels(60, seed, error=0.3))
        told[fresh] = model.accuracy(labels(1000, 99))
    assert told[True] > told[False] + 0.02 and told[True] > 0.85


def test_ties_are_a_half_and_not_counted_as_told() -> None:
    model = ranker(epochs=1)
    first, second, target = labels(10, 0)
    half = torch.full((10,), 0.5)
    both = (torch.cat([first, first]), torch.cat([second, second]), torch.cat([target, half]))
    assert model.accuracy(both) == model.accuracy((first, second, target))
    assert math.isnan(model.accuracy((first, second, half)))


def test_members_are_apart() -> None:
    """The groups of the convolutions, and the two ways to show pictures, are one computation."""
    net = scores_of(Leaf((40, 40, 3), "uint8", 0, 255), FitConfig(members=3), 0)
    pictures = torch.randint(0, 256, (5, 40, 40, 3), dtype=torch.uint8)
    each = pictures.expand(3, -1, -1, -1, -1).clone()
    shared = net(pictures)
    torch.testing.assert_close(shared, net(each, per_member=True))
    each[1] = 0
    changed = net(each, per_member=True)
    torch.testing.assert_close(changed[[0, 2]], shared[[0, 2]])
    assert not torch.allclose(shared[0], shared[1]) and not torch.allclose(changed[1], shared[1])


FACTORS = [
    {"of": "above", "a": "goal_x", "than": 1.0, "margin": 0},
    {"of": "distance", "a": "tool", "b": "cube", "weight": -1, "margin": 0.5},
    {"of": "effort", "a": "other", "weight": -1, "margin": 0.1},
]
HERON = node_of("rewards.preferences.heron.Heron", factors=FACTORS, leaves=["state"])
HERON |= {"hidden": [64, 64], "every": 1}


def test_each_level_has_its_own_margin() -> None:
    """Margins 0, 1, 0.1: success decides; else distance if it differs by more than 1; else effort
    if by more than 0.1 (with level two's margin it would not); else nobody wins."""
    one = torch.tensor([[1.0, 5.0, 0.0], [0.0, 3.0, 0.0], [0.0, 3.0, 0.5], [0.0, 3.0, 0.05]])
    other = torch.tensor([[0.0, 9.0, 9.0], [0.0, 1.5, 9.0], [0.0, 2.5, 0.0], [0.0, 2.5, 0.0]])
    margins = torch.tensor([0.0, 1.0, 0.1])
    wins, level = preferences(one, other, margins)
    assert wins.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert level.tolist() == [0, 1, 2, -1]
    back, again = preferences(other, one, margins)
    assert back.tolist() == [-1.0, -1.0, -1.0, 0.0] and again.tolist() == level.tolist()


def test_the_loss_of_an_order_by_hand() -> None:
    """Scores 0, 1, 3: the first loses to the second (softplus(-1)), the third to the second by
    label (softplus(2)); a tie does not count. Huge differences stay finite."""
    scores, first = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0, 1, 2])
    second, wins = torch.tensor([1, 2, 0]), torch.tensor([-1.0, 1.0, 0.0])
    expected = (math.log1p(math.exp(-1)) + math.log1p(math.exp(2))) / 2
    loss = preference_loss(scores, first, second, wins)
    assert abs(loss.item() - expected) < 1e-6
    far = preference_loss(1e4 * scores, first, second, wins)
    assert math.isfinite(far.item())


def test_the_model_ranks_as_the_order_does() -> None:
    """On rows that it has not seen, over nine of ten pairs; and it is the reward."""
    reward = make(HERON)
    for seed in range(40):
        metrics = reward.update(drawn(256, seed))
    fresh = drawn(512, 10_000)
    values = torch.stack([factor(fresh) for factor in reward.factors], 1)
    margins = reward.margins * reward.factor_moments.std
    wins, level = preferences(values, values.roll(-200, 0), margins)
    assert (level == 0).any() and (level == 1).any()
    gain = reward.score(fresh) - reward.score(fresh).roll(-200)
    right = (gain * wins > 0)[wins != 0].float().mean()
    assert right > 0.9
    assert abs(metrics["accuracy"].item() - right.item()) < 0.1
    paid = reward(fresh)
    assert (paid <= 0).all() and paid.std() > 0.3
    assert (paid - paid.roll(-200))[wins > 0].mean() > 0.5


def test_the_other_way_round_is_another_reward() -> None:
    """Success last and effort first: the model no longer cares for success."""
    turned = HERON | {"factors": list(reversed(HERON["factors"])), "leaves": ["state", "other"]}
    reward = make(turned | {"level": "centred", "weight": 2.0})
    for seed in range(25):
        rows = drawn(256, seed)
        rows["next_obs/other"] = torch.randn(256, 2, generator=torch.Generator().manual_seed(seed))
        reward.update(rows)
    paid = reward(rows)
    effort = rows["next_obs/other"].square().mean(1)
    assert torch.corrcoef(torch.stack([paid, effort]))[0, 1] < -0.6
    assert abs(paid.mean()) < 0.3 and abs(paid.std() - 2) < 0.3


def labelled(judge: Labeller, first: dict[str, Tensor], second: dict[str, Tensor]) -> list[int]:
    """The labels of pairs, in order, without those that were skipped."""
    tickets = range(len(next(iter(first.values()))))
    judge.submit(tickets, first, second)
    found = judge.poll(wait=True)
    assert sorted(found) == list(tickets)
    return [found[ticket] for ticket in tickets if found[ticket] != SKIPPED]


def test_a_simulated_judge_knows_the_reward() -> None:
    judge = SimulatedLabeller(SimulatedConfig(tie=0.1))
    first, second = ({"reward": torch.tensor(r)} for r in ([0, 1, 2, 2], [1, 0, 2.05, 1.95]))
    assert labelled(judge, first, second) == [SECOND, FIRST, TIE, TIE]
    counts = judge.counts
    assert (counts.asked, counts.labelled, counts.tied, counts.abstained) == (4, 2, 2, 0)


def test_errors_and_abstentions_come_as_often_as_said() -> None:
    judge, again = (SimulatedLabeller(SimulatedConfig(error=0.3, unsure=0.1), 1) for _ in "ab")
    pair = {"reward": torch.zeros(20_000)}, {"reward": torch.ones(20_000)}
    labels = judge.label(*pair)
    share = [float((labels == kind).float().mean()) for kind in (FIRST, SECOND, TIE, ABSTAIN)]
    assert share == pytest.approx([0.27, 0.63, 0.0, 0.1], abs=0.012)  # three deviations
    again.set_state(SimulatedLabeller(SimulatedConfig(), seed=1).get_state())
    assert again.label(*pair).equal(labels)


@dataclass(frozen=True)
class ColoursConfig:
    """Nothing to set."""


class Colours(ImageText):
    """Sees only how red and how blue a picture is, in mean."""

    name, size, side = "colours", 2, 1

    def __init__(self, config: ColoursConfig) -> None:
        self.config = config

    def images(self, pictures: Tensor) -> Tensor:
        mean = pictures.float().mean((1, 2))[:, [0, 2]]
        return torch.nn.functional.normalize(mean, dim=1)

    def texts(self, sentences: Sequence[str]) -> Tensor:
        known = {"red": [1.0, 0.0], "blue": [0.0, 1.0]}
        return torch.tensor([known[sentence] for sentence in sentences])


COLOURS = {"_target_": "tests.rewards.test_labellers.Colours"}


def flat(*colours: tuple[int, int, int]) -> dict[str, Tensor]:
    return {"picture": torch.tensor(colours, dtype=torch.uint8)[:, None, None].expand(-1, 4, 4, 3)}


@pytest.mark.parametrize("rungs", [("red",), ("blue", "red")])
def test_encoders_judge_likeness(rungs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied.core.build.ALLOWED", ["tests."])
    judge = EmbeddingLabeller(EmbeddingConfig("red", rungs, COLOURS, tie=0.01))
    red, violet, blue = (250, 0, 0), (120, 0, 120), (0, 0, 250)
    labels = labelled(judge, flat(red, violet, blue, red), flat(blue, red, violet, red))
    assert labels == [FIRST, SECOND, SECOND, TIE]
    score = judge.score(flat(red, violet, blue)["picture"])
    if len(rungs) == 2:  # sigmoid of the sharpened difference, half in the middle
        top = 1 / (1 + torch.tensor(-30.0).exp())
        assert score.tolist() == pytest.approx([float(top), 0.5, 1 - float(top)], abs=1e-6)


class Steps(Colours):
    """Knows an order of its own."""

    def ladder(self, sentence: str) -> list[list[str]] | None:
        return [["blue"], ["red", "red"]] if sentence == "red" else None


def test_an_encoder_may_bring_its_own_rungs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied.core.build.ALLOWED", ["tests."])
    node = {"_target_": "tests.rewards.test_labellers.Steps"}
    for goal, rungs in (("red", [[0, 1], [1, 0]]), ("blue", [[0, 1]])):
        assert EmbeddingLabeller(EmbeddingConfig(goal, (), node)).texts.tolist() == rungs
    with pytest.raises(ConfigError, match=r"labeller.goal is empty"):
        EmbeddingLabeller(EmbeddingConfig(""))


def model(server: Server, tmp_path: Path, **more: Any) -> VisionLanguageLabeller:
    limits = {"retries": 0, "backoff": 0.001, **more.pop("limits", {})}
    chat = server.node(cache=str(tmp_path / "cache.jsonl"), limits=limits)
    return VisionLanguageLabeller(VisionLanguageConfig(chat, "touch the ball", parallel=1, **more))


def nearer(word: str) -> Told:
    return says(json.dumps({"nearer": word}))


DARK, LIGHT = (10, 10, 10), (200, 200, 200)


@pytest.mark.parametrize(
    ("one", "two", "label"),
    [
        ("first", "second", FIRST),
        ("second", "first", SECOND),
        ("same", "same", TIE),
        ("first", "first", ABSTAIN),  # it likes the first place, whatever is there
        ("same", "first", ABSTAIN),
        ("second", "unsure", ABSTAIN),
    ],
)
def test_both_orders_have_to_agree(one: str, two: str, label: int, tmp_path: Path) -> None:
    script = (says("dark, light"), nearer(one), says("light, dark"), nearer(two))
    with serving(*script) as server:
        judge = model(server, tmp_path)
        assert labelled(judge, flat(DARK), flat(LIGHT)) == [label]
    asked = [sent["messages"][0]["content"] for sent in server.asked]
    shown = [[part["image_url"]["url"] for part in parts[1:]] for parts in asked[::2]]
    assert shown[0] == shown[1][::-1]
    assert "touch the ball" in asked[0][0]["text"] and "dark, light" in asked[1]
    assert judge.counts.tokens == 40


def test_an_unsure_first_order_needs_no_second(tmp_path: Path) -> None:
    with serving(says("fog"), nearer("unsure")) as server:
        judge = model(server, tmp_path)
        assert labelled(judge, flat(DARK), flat(LIGHT)) == [ABSTAIN]
        assert len(server.asked) == 2
        assert labelled(judge, flat(DARK), flat(DARK)) == [TIE]  # the same picture is not asked
        assert len(server.asked) == 2


def test_a_refusal_costs_one_label_and_the_run_goes_on(tmp_path: Path) -> None:
    no = says(None, refusal="no pictures, please")
    with serving(says("a"), no, says("b"), nearer("first")) as server:
        judge = model(server, tmp_path, swap=False)
        labels = labelled(judge, flat(DARK, LIGHT), flat(LIGHT, DARK))
    assert labels == [ABSTAIN, FIRST]
    assert (judge.counts.failed, judge.counts.abstained, judge.stopped) == (1, 1, "")


def test_a_dead_endpoint_ends_the_session_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Told({"error": "down"}, 500)) as server, caplog.at_level(logging.WARNING):
        judge = model(server, tmp_path, patience=2)
        labels = labelled(judge, flat(*[DARK] * 5), flat(*[LIGHT] * 5))
    assert labels == [ABSTAIN, ABSTAIN]
    assert judge.stopped == ""
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert "continuing in the next session" in caplog.text


def test_a_spent_budget_keeps_its_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(says("one"), nearer("first"), says("two"), nearer("first")) as server:
        judge = model(server, tmp_path, swap=False, limits={"calls": 3})
        with caplog.at_level(logging.WARNING):
            labels = labelled(judge, flat(DARK, LIGHT, DARK), flat(LIGHT, DARK, LIGHT))
    assert labels == [FIRST]
    assert judge.stopped.startswith("the budget of 3 calls")
    assert "the 1 labels before that are kept" in caplog.text
    # A second judge with the same cache has the first label for nothing, and the next for one call.
    with serving(nearer("second")) as server:
        silent = model(server, tmp_path, swap=False)
        assert labelled(silent, flat(DARK, LIGHT), flat(LIGHT, DARK)) == [FIRST, SECOND]
        assert len(server.asked) == 1
