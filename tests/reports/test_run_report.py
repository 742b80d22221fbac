"""The report: complete in itself, with the right numbers in the right places."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml

from embodied.evaluation.video import read_mp4, strip, write_mp4
from embodied.reports import run_report
from embodied.reports.page import HEIGHT, WIDTH, chart, number, ticks
from embodied.reports.run_report import diagnosis
from embodied.training.logger import Log


def run_folder(folder: Path) -> Path:
    node = {"name": "demo <1>", "seed": 3, "steps": 200, "policy": {"_target_": "b.Acts"}}
    node |= {"env": {"_target_": "a.World", "task": "lift"}, "learner": {"_target_": "c.Learns"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(node))
    log = Log(folder)
    for step, won in ((100, 0.25), (200, 0.5)):
        log.write(step, {"train/critic_loss": 1 / step, "train/odd": float("nan")})
        log.write(step, {"eval/return": won, "eval/success": won, "eval/episodes": 20.0})
    return folder


class Links(HTMLParser):
    """Everything that a browser would fetch; every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing is open after it."""


def test_the_page_is_complete_in_itself(tmp_path: Path) -> None:
    frames = torch.zeros(9, 24, 32, 3, dtype=torch.uint8)
    write_mp4(tmp_path / "videos" / "success.mp4", frames, 20)
    page = run_report.write(run_folder(tmp_path)).read_text()
    links = Links(page).found
    assert len(links) == 2 and all(link.startswith("data:") for link in links)
    assert "http" not in page and "@import" not in page and "<script" not in page
    assert "demo &lt;1&gt;" in page and "demo <1>" not in page
    assert "prefers-color-scheme: dark" in page
    for figure in re.findall(r"<svg.*?</svg>", page):
        ElementTree.fromstring(figure)


def test_main_curves_come_first_with_numbers_and_what_they_mean(tmp_path: Path) -> None:
    """10 of 20: Wilson's 95% interval is [29.9%, 70.1%]."""
    page = run_report.write(run_folder(tmp_path)).read_text()
    said = "95% interval: 29.9% to 70.1% (held-out initial states: 20)"
    assert "50.0%" in page and said in page
    order = re.findall(r"<figcaption>([\w/]+)<", page)
    assert order == ["eval/success", "eval/return", "train/critic_loss"]
    main, _, folded = page.partition("<details>")
    assert "share of evaluation episodes that succeed" in main and "train/critic_loss" not in main
    assert "all metrics (1 more)" in folded and "error of the critics" in folded
    assert "success 50% [30%, 70%] of 20 held-out initial states" in run_report.summary(tmp_path)


@pytest.mark.parametrize(
    ("says", "curves"),
    [
        ("training 100%, evaluation 5%", {"eval/success": [0.0, 0.05], "train/success": [1.0]}),
        ("was 90% and is 40%", {"eval/success": [0.9, 0.4]}),
        ("ever succeeded", {"eval/success": [0.0, 0.0]}),
        ("nothing was learned", {"eval/return": [-5.0] * 4}),
        ("still rising", {"eval/return": [0.0, 1.0, 2.0, 4.0]}),
        ("", {"eval/success": [0.5, 0.9], "train/success": [0.8]}),
    ],
)
def test_what_to_notice_first(says: str, curves: dict[str, list[float]]) -> None:
    rows = [{"step": 0, name: value} for name, values in curves.items() for value in values]
    found = "; ".join(diagnosis(rows))
    assert says in found and bool(says) == bool(found)


def test_a_run_without_anything_yet(tmp_path: Path) -> None:
    page = run_report.write(tmp_path).read_text()
    assert "Configuration" in page and "<svg" not in page
    assert run_report.summary(tmp_path).endswith("not evaluated")


def numbers_of(text: str, name: str) -> list[tuple[float, float]]:
    found = re.search(rf'class="{name}" points="([^"]*)"', text)
    assert found
    return [(float(x), float(y)) for x, y in (p.split(",") for p in found[1].split())]


def one(points: list[tuple[float, float]], *more: Any, **keys: Any) -> str:
    return chart({"c": points}, "c", *more, legend=False, **keys)


def test_a_chart_by_hand() -> None:
    """Ranges 0..10 and 0..1: the middle of both is the middle of the plotting area."""
    drawn = one([(0, 0.0), (5, 0.5), (10, 1.0)], limits=(0.0, 1.0))
    (x0, y0), (x1, y1), (x2, y2) = numbers_of(drawn, "line")
    assert x1 == pytest.approx((x0 + x2) / 2) and y1 == pytest.approx((y0 + y2) / 2)
    assert 0 < x0 < x2 < WIDTH and 0 < y2 < y0 < HEIGHT


def test_a_band_goes_there_and_back() -> None:
    drawn = one([(0, 0.5), (10, 0.5)], {"c": [(0.25, 0.75), (0.0, 1.0)]}, limits=(0.0, 1.0))
    (x0, low), (x1, bottom), (x2, top), (x3, high) = numbers_of(drawn, "band")
    assert bottom > low > high > top  # pixels count downwards
    assert x0 == x3 and x1 == x2


def test_a_constant_and_numbers_that_are_none() -> None:
    (_, first), (_, last) = numbers_of(one([(1, 3.0), (2, float("inf")), (3, 3.0)]), "line")
    assert first == last
    assert one([(1, float("nan"))]) == ""
    ElementTree.fromstring(one([(0, 0.0)]))


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.0, 1.0, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(0.0, 60_000.0, 5) == [0.0, 20_000.0, 40_000.0, 60_000.0]
    assert ticks(-3.0, 9.0, 4) == [0.0, 5.0]
    shown = {1_200_000: "1.2M", 40_000: "40k", 0.35: "0.35", 2e-5: "2e-05", 0: "0"}
    assert {value: number(value) for value in shown} == shown


def test_a_strip_shows_first_to_last() -> None:
    frames = torch.arange(11, dtype=torch.uint8).view(11, 1, 1, 1).expand(11, 2, 4, 3)
    picture = strip(frames, 3)
    assert picture.shape == (2, 12, 3)
    assert picture[0, :, 0].tolist() == [0] * 4 + [5] * 4 + [10] * 4
    assert strip(frames[:2], 6).shape == (2, 8, 3)


def test_a_film_comes_back(tmp_path: Path) -> None:
    """Odd sides lose a line; H.264 keeps grey levels to a few in 255."""
    shade = torch.linspace(20, 230, 12).to(torch.uint8)
    frames = shade.view(12, 1, 1, 1).expand(12, 33, 48, 3)
    back = read_mp4(write_mp4(tmp_path / "a" / "film.mp4", frames, 20))
    assert back.shape == (12, 32, 48, 3)
    assert (back.float().mean((1, 2, 3)) - shade.float()).abs().max() < 4


def test_a_run_with_actors_says_what_they_did(tmp_path: Path) -> None:
    assert "actor-hours" not in run_report.write(run_folder(tmp_path)).read_text()
    done = {"steps_per_second": 9.96, "updates_per_second": 40.0, "policy_lag": 2.5}
    done |= {"waiting_steps": 1.5, "actor_deaths": 1.0, "actor_hours": 0.125}
    Log(tmp_path).write(300, {f"train/{name}": value for name, value in done.items()})
    page = run_report.write(tmp_path).read_text()
    assert "10.0</b><small>steps a second; 40.0 updates a second" in page
    assert "2.5</b><small>versions old are the weights that act; 1.5 vector steps wait" in page
    assert "0.12</b><small>1 actors died and were replaced" in page
