"""Judges: what they say, what they keep to themselves, and what they write down."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
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
    label_of,
)
from embodied.vision.image_text import ImageText
from tests.llm.server import Server, Told, says, serving


def labelled(judge: Labeller, first: dict[str, Tensor], second: dict[str, Tensor]) -> list[int]:
    """The labels of pairs, in order, without those that were skipped."""
    tickets = range(len(next(iter(first.values()))))
    judge.submit(tickets, first, second)
    found = judge.poll(wait=True)
    assert sorted(found) == list(tickets)
    return [found[ticket] for ticket in tickets if found[ticket] != SKIPPED]


def rewards(*values: float) -> dict[str, Tensor]:
    return {"reward": torch.tensor(values)}


def test_a_simulated_judge_knows_the_reward() -> None:
    judge = SimulatedLabeller(SimulatedConfig(tie=0.1))
    labels = labelled(judge, rewards(0, 1, 2, 2), rewards(1, 0, 2.05, 1.95))
    assert labels == [SECOND, FIRST, TIE, TIE]
    counts = judge.counts
    assert (counts.asked, counts.labelled, counts.tied, counts.abstained) == (4, 2, 2, 0)


def test_errors_and_abstentions_come_as_often_as_said() -> None:
    judge = SimulatedLabeller(SimulatedConfig(error=0.3, unsure=0.1), seed=1)
    zeros = torch.zeros(20_000)
    labels = judge.label({"reward": zeros}, {"reward": zeros + 1})
    share = [float((labels == kind).float().mean()) for kind in (FIRST, SECOND, TIE, ABSTAIN)]
    assert share == pytest.approx([0.27, 0.63, 0.0, 0.1], abs=0.012)  # three deviations
    again = SimulatedLabeller(SimulatedConfig(error=0.3, unsure=0.1), seed=1)
    again.set_state(SimulatedLabeller(SimulatedConfig(), seed=1).get_state())
    assert again.label({"reward": zeros}, {"reward": zeros + 1}).equal(labels)


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
def test_an_encoder_judges_by_likeness(
    rungs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embodied.core.build.ALLOWED", ["tests."])
    judge = EmbeddingLabeller(EmbeddingConfig("red", rungs, COLOURS, tie=0.01))
    red, violet, blue = (250, 0, 0), (120, 0, 120), (0, 0, 250)
    labels = labelled(judge, flat(red, violet, blue, red), flat(blue, red, violet, red))
    assert labels == [FIRST, SECOND, SECOND, TIE]
    score = judge.score(flat(red, violet, blue)["picture"])
    if (
        len(rungs) == 2
    ):  # between two rungs: sigmoid of the sharpened difference, half in the middle
        top = 1 / (1 + torch.tensor(-30.0).exp())
        assert score.tolist() == pytest.approx([float(top), 0.5, 1 - float(top)], abs=1e-6)


def test_a_goal_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"labeller.goal is empty"):
        EmbeddingLabeller(EmbeddingConfig(""))


class Steps(Colours):
    """Knows an order of its own."""

    def ladder(self, sentence: str) -> list[list[str]] | None:
        return [["blue"], ["red", "red"]] if sentence == "red" else None


def test_an_encoder_may_bring_its_own_rungs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied.core.build.ALLOWED", ["tests."])
    node = {"_target_": "tests.rewards.test_labellers.Steps"}
    assert EmbeddingLabeller(EmbeddingConfig("red", (), node)).texts.tolist() == [[0, 1], [1, 0]]
    assert EmbeddingLabeller(EmbeddingConfig("blue", (), node)).texts.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("first", FIRST),
        ("Second.", SECOND),
        ('They look alike.\n"same"', TIE),
        ("**unsure**\n\n", ABSTAIN),
        ("The first picture", None),
        ("first and second", None),
        ("10", None),
        ("not the first", None),
        ("first\nwell, who knows?", None),
        ("", None),
    ],
)
def test_only_a_whole_line_is_a_label(text: str, label: int | None) -> None:
    assert label_of(text) == label


def model(server: Server, tmp_path: Path, **more: Any) -> VisionLanguageLabeller:
    limits = {"retries": 0, "backoff": 0.001, **more.pop("limits", {})}
    chat = {
        "_target_": "embodied.llm.client.ChatClient",
        "url": server.url,
        "model": "m",
        "cache": str(tmp_path / "cache.jsonl"),
        "limits": limits,
    }
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
    shown = [
        [part["image_url"]["url"] for part in sent["messages"][0]["content"][1:]]
        for sent in server.asked[::2]
    ]
    assert shown[0] == shown[1][::-1]
    assert "touch the ball" in server.asked[0]["messages"][0]["content"][0]["text"]
    assert "dark, light" in server.asked[1]["messages"][0]["content"]
    assert judge.counts.tokens == 40


def test_an_unsure_first_order_needs_no_second(tmp_path: Path) -> None:
    with serving(says("fog"), nearer("unsure")) as server:
        judge = model(server, tmp_path)
        assert labelled(judge, flat(DARK), flat(LIGHT)) == [ABSTAIN]
        assert len(server.asked) == 2
        assert labelled(judge, flat(DARK), flat(DARK)) == [TIE]  # the same picture is not asked
        assert len(server.asked) == 2


def test_one_line_is_read_where_there_is_no_schema(tmp_path: Path) -> None:
    with serving(says("..."), says("I would say\nsecond")) as server:
        judge = model(server, tmp_path, schema=False, swap=False)
        assert labelled(judge, flat(DARK), flat(LIGHT)) == [SECOND]
        assert "response_format" not in server.asked[1]


def test_a_refusal_costs_one_label_and_the_run_goes_on(tmp_path: Path) -> None:
    no = says(None, refusal="no pictures, please")
    with serving(says("a"), no, says("b"), nearer("first")) as server:
        judge = model(server, tmp_path, swap=False)
        labels = labelled(judge, flat(DARK, LIGHT), flat(LIGHT, DARK))
    assert labels == [ABSTAIN, FIRST]
    assert (judge.counts.failed, judge.counts.abstained, judge.stopped) == (1, 1, "")


def test_an_endpoint_that_is_down_ends_the_session_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Told({"error": "down"}, 500)) as server, caplog.at_level(logging.WARNING):
        judge = model(server, tmp_path, patience=2)
        labels = labelled(judge, flat(*[DARK] * 5), flat(*[LIGHT] * 5))
    assert labels == [ABSTAIN, ABSTAIN]
    assert judge.stopped == ""
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert "continuing in the next session" in caplog.text


def test_a_spent_budget_keeps_the_labels_so_far(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
