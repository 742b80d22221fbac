"""Recorded episodes scored with a reward, through the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes
from tests.builders import exit_of, recorded
from tests.llm.server import Told, says, serving

CAMERA = Leaf((16, 16, 3), "uint8")
SPEC = Spec(
    obs={"state": Leaf((1,), names=("x",)), "front": CAMERA, "wrist": CAMERA},
    act=Leaf((1,), low=-1.0, high=1.0),
    dt=0.05,
)
X = "reward.potential={of: value, a: x, b: null, weight: 1.0}"


def picture(x: Tensor) -> Tensor:
    """Images [T, 16, 16, 3] that get redder with x [T]."""
    image = torch.zeros(len(x), 16, 16, 3, dtype=torch.uint8)
    image[..., 0] = (40 * x).to(torch.uint8)[:, None, None]
    return image


def episode(x: Tensor, seen: Tensor, **ends: Tensor) -> dict[str, Tensor]:
    """Of a point at x [T + 1], seen in front, and not by the wrist; cut off in the end."""
    views = {"state": x[:, None], "front": picture(seen), "wrist": picture(0 * x)}
    steps = len(x) - 1
    cut = torch.arange(steps) == steps - 1
    return recorded(views, torch.zeros(steps, 1), truncated=cut, **ends)


def record(folder: Path, ends: tuple[bool, ...], marked: bool = True) -> Path:
    """Episodes of 4 steps: a point goes right by 1 a step where it succeeds, else left."""
    with EpisodeWriter(folder, SPEC, images="png") as writer:
        for won in ends:
            x = torch.arange(5.0) if won else -torch.arange(5.0)
            over = torch.tensor([False, False, False, won])
            success = {"success": over} if marked else {}
            writer.add(episode(x, x.abs(), reward=over.float(), **success))
    return folder


def score(*words: object, code: int = 0) -> None:
    assert exit_of("reward", "score", *words) == code


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "score.json").read_text())


def test_a_reward_is_scored_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5 x' - x falls where x rises: this reward tells success the wrong way."""
    monkeypatch.setenv("COLUMNS", "60")
    source, out = record(tmp_path / "demos", (True, False, False)), tmp_path / "out"
    score(source, "reward=shaping", X, "gamma=0.5", f"out={out}", "threshold=0")
    found = read(out)
    first, second, _ = found["episodes"]
    env = torch.tensor([0.0, 0.0, 0.0, 1.0])
    values = 0.5 * torch.arange(1.0, 5.0) - torch.arange(4.0)
    assert first["values"] == pytest.approx((values + env).tolist())
    assert second["values"] == pytest.approx((-values).tolist())
    assert (first["success"], second["success"]) == (True, False)
    assert second["rise"] == pytest.approx(1.0) and first["rise"] == pytest.approx(-3 / 22.5**0.5)
    facts = found["summary"]
    assert (facts["successes"], facts["failures"]) == (1, 2)
    assert facts["auc_last"]["value"] == facts["auc_sum"]["value"] == 0.0
    outcomes = ("true positives", "false positives", "false negatives", "true negatives")
    assert facts["confusion"] == dict(zip(outcomes, (1, 2, 0, 0), strict=True))
    assert found["about"]["gamma"] == 0.5 and found["about"]["dataset"] == str(source.resolve())
    assert (out / "score.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert re.search(
        r"1\W+4 .*-0\.500 .*1\.000 .*-0\.500 .*1\.000 ", shown
    )  # not cut at 60 columns
    assert "3 episodes, 12 steps" in shown and "1 successes, 2 failures" in shown
    assert "2 false positives" in shown
    assert "failures taken for successes: episodes 1, 2" in shown


def test_the_length_of_episodes_is_a_control_of_the_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A constant reward below 0 is a perfect sum where episodes end at success; so is the length,
    which the command says."""
    source, out = tmp_path / "demos", tmp_path / "out"
    with EpisodeWriter(source, SPEC, images="png") as writer:
        for steps in (2, 3, 5, 5):  # in which nothing moves
            x, won = torch.zeros(steps + 1), torch.arange(steps) == (steps - 1 if steps < 5 else 9)
            writer.add(episode(x, x, reward=won.float(), success=won))
    one = ("reward.potential={of: value, a: [1.0], b: null}", "reward.env_weight=0", "gamma=0.5")
    score(source, "reward=shaping", *one, f"out={out}")
    facts, shown = read(out)["summary"], capsys.readouterr().out
    assert (facts["auc_length"]["value"], facts["auc_mean"]["value"]) == (1.0, 0.5)
    assert "the length alone (shorter is better), a control of the sum: 1.000" in shown


def chat(reward: str, url: str, *words: str) -> list[str]:
    """The words of a reward that asks a model behind a server."""
    chosen = [f"reward={reward}", "reward.goal=make it red", *words]
    return [*chosen, f"reward.chat.url={url}", "reward.chat.cache=null"]


def test_several_cameras_are_scored_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a model behind a server that sees redness: in front it rises, at the wrist it does not."""
    source, out = record(tmp_path / "demos", (True, False)), tmp_path / "out"
    front, wrist = (says(json.dumps({"completion": c})) for c in ([25, 50, 75, 100], [0] * 4))
    with serving(front, front, wrist) as server:
        more = ("reward.shuffle=false", "reward.value=level", "reward.env_weight=0")
        words = chat("vlm_progress", server.url, *more)
        score(source, *words, "cameras=[front,wrist]", f"out={out}")
    one, other = read(out / "front"), read(out / "wrist")
    assert one["summary"]["rise"] == pytest.approx(1.0) and other["summary"]["rise"] is None
    assert one["episodes"][0]["values"] == pytest.approx([-0.75, -0.5, -0.25, 0.0])
    assert other["about"]["node"]["picture"] == "wrist"
    assert "rank correlation of front and wrist: " in capsys.readouterr().out
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("answer", "ask", "line"),
    [
        (Told({}, status=401), "score", "check chat.url, chat.key and chat.model"),
        (says("True"), "probability", "(reward.ask=score), or another server"),
    ],
)
def test_a_server_that_cannot_answer_ends_in_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Told, ask: str, line: str
) -> None:
    """Without the advice on observations that are not recorded."""
    source = record(tmp_path / "demos", (True,))
    with serving(answer) as server:
        words = chat("vlm_success", server.url, f"reward.ask={ask}", "reward.picture=front")
        score(source, *words, f"out={tmp_path / 'out'}", code=2)
    assert capsys.readouterr().err.strip().endswith(line)


def test_without_both_outcomes_there_is_no_area(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    source = record(tmp_path / "demos", (True, True, False), marked=False)
    score(source, "reward=shaping", X, "episodes=2", f"out={out}", "threshold=0")
    facts = read(out)["summary"]
    assert facts["episodes"] == 2 and "successes" not in facts and "confusion" not in facts
    assert "success is not recorded" in capsys.readouterr().out
    source = record(tmp_path / "won", (True, True))
    score(source, "reward=shaping", X, f"out={tmp_path / 'again'}")
    assert read(tmp_path / "again")["summary"]["auc_last"] is None
    assert "the last step's reward: undefined" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "embodied reward score DATASET reward=NAME"),
        (["DATASET"], "embodied reward score DATASET reward=NAME"),
        (["DATASET", "reward=shapping"], 'did you mean "shaping"'),
        (["DATASET", "reward=rnd"], "learned during training; score with the reward of a run"),
        (["DATASET", "reward=clip", "reward.prompt=x"], "choose an image, reward.picture=NAME"),
        (["DATASET", "reward=shaping", X, "episodes=0"], "episodes=0 should be at least 1"),
        (["DATASET", "reward=shaping", X, "reward.weight=1e300"], "the reward of step"),
        (["DATASET", "reward=shaping", X, "treshold=1"], "treshold"),
        (["nowhere", "reward=shaping", X], "nowhere"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = record(tmp_path / "demos", (True,))
    words = [str(source) if word == "DATASET" else word for word in words]
    score(*words, f"out={tmp_path / 'out'}", code=2)
    shown = capsys.readouterr().err.strip()
    assert says in shown and len(shown.splitlines()) == 1
    assert not (tmp_path / "out" / "score.json").exists()


def test_a_dataset_that_no_model_answered_about_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = record(tmp_path / "demos", (True, False)), tmp_path / "out"
    with serving(Told({}, status=500)) as server:
        more = ("reward.picture=front", "reward.chat.limits={retries: 0, backoff: 0}")
        words = chat("vlm_success", server.url, "reward.ask=score", *more)
        assert exit_of("reward", "label", source, *words, f"out={out}") == 2
        score(source, *words, f"out={tmp_path / 'scores'}", code=2)
    shown = capsys.readouterr().err
    assert shown.count("answered about none of 2 episodes") == 2
    assert not out.exists() and not (tmp_path / "scores" / "score.json").exists()


def test_episodes_without_an_answer_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = record(tmp_path / "demos", (True, False, True)), tmp_path / "out"
    grades = [Told({}, status=500), says('{"score": 5}'), says('{"score": 1}')]
    more = ("reward.picture=front", "reward.chat.limits={retries: 0, backoff: 0}")
    for verb in ("label", "score"):
        with serving(*grades) as server:
            words = chat("vlm_success", server.url, "reward.ask=score", *more)
            assert exit_of("reward", verb, source, *words, f"out={out / verb}") == 0
    shown = capsys.readouterr().out
    assert "2 of 3 episodes answered (the others" in shown
    assert "2 of 3 episodes answered; the others are left out" in shown
    labelled = read_episodes(out / "label")
    assert [known.get("answered") for known in labelled.info] == [False, None, None]
    assert [row["episode"] for row in read(out / "score")["episodes"]] == [1, 2]
