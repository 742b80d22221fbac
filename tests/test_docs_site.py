"""The documentation site builds without a warning, offline, and holds what it promises."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import evidence
from scripts.docs import screenshots
from tests.builders import ROOT, once, python
from tests.tiers import only_all
from tests.viewer.browser import Browser, program

pytest.importorskip("mkdocs", reason="the documentation's tools: pip install -e '.[docs]'")

in_a_browser = pytest.mark.skipif(program() is None, reason="no Chromium (Debian: chromium)")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "site", build)


def build(folder: Path) -> None:
    words = ("-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    done = python(*words, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stderr[-3000:]


def test_no_link_of_the_site_is_broken_and_nothing_is_loaded_from_the_network(site: Path) -> None:
    """Pages, files and anchors, the generated ones included."""
    loading = r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="https?:'
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\sid="([^"]+)"', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        assert re.findall(loading, text) == [], page
        for link in re.findall(r'\s(?:href|src)="([^"]+)"', text) if page.stem != "404" else ():
            target, _, anchor = unescape(link).partition("#")
            if re.match(r"\w+:", target):
                continue
            place = (page.parent / target).resolve() if target else page
            known = place.exists() and (not anchor or anchor in anchors.get(place, {anchor}))
            broken += [] if known or place == site else [f"{page.relative_to(site)}: {link}"]
    assert len(pages) > 50 and broken == []


def test_every_option_has_a_page_with_its_settings(site: Path) -> None:
    for group in ("env", "policy", "learner", "finetune", "reward", "teacher", "robot"):
        page = (site / f"options/{group}.html").read_text()
        cards = re.findall(rf'<a href="{group}/(\w+)\.html">', page)
        assert sorted(cards) == sorted(f.stem for f in (ROOT / "configs" / group).glob("*.yaml"))
    sac = (site / "options" / "learner" / "sac.html").read_text()
    for name, default in {"actor_lr": "0.0003", "tau": "0.005", "hidden": "[256, 256]"}.items():
        assert re.search(rf"<code>{name}</code>.*?<code>{re.escape(default)}</code>", sac, re.S)
    plain = re.sub(r"<[^>]+>", "", sac)
    parts = ("Haarnoja et al., 2018", "environment steps are not cheap", "experiment=pendulum_sac")
    assert all(part in plain for part in parts), "method, when to take it, command"
    teacher = (site / "options" / "teacher" / "settersolver.html").read_text()
    assert 'class="results"' in teacher, "what was measured"
    picture = 'src="../../images/options/env/drive.webp"'
    assert picture in (site / "options/env/drive.html").read_text()


@only_all
@in_a_browser
def test_pages_opened_from_disk_can_be_searched_and_fit_the_screen(site: Path) -> None:
    field = "document.querySelector('[data-md-component=search-query]')"
    with Browser((site / "index.html").as_uri(), (1400, 900)) as browser:
        browser.wait(f"document.readyState === 'complete' && !!{field}")
        browser.run(f"document.querySelector('[for=__search]').click(); {field}.focus()")
        browser.wait("document.querySelector('.md-search-result__meta').innerText.includes('Type')")
        browser.send("Input.insertText", text="Setter-Solver")
        browser.wait("document.querySelector('.md-search-result__link').innerText")
        for width in (1400, 375):
            browser.resize(width, 800, mobile=width < 400)
            for name in ("options/env", "options/learner/sac", "what_works", "evidence", "index"):
                page = (site / f"{name}.html").as_uri()
                browser.send("Page.navigate", url=page)
                browser.wait(f"location.href === '{page}' && document.readyState === 'complete'")
                assert browser.run("document.documentElement.scrollWidth") <= width, name


@only_all
@in_a_browser
def test_the_command_draws_pages_at_both_widths(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screenshots, "SITE", site)
    screenshots.main(tmp_path, ["readme", "gallery"])
    kept = {file.name: file for file in (ROOT / "docs" / "images" / "pages").iterdir()}
    assert kept.keys() == {f"{n}_{w}.webp" for n in screenshots.PAGES for w, _ in screenshots.SIZES}
    for name in ("readme", "gallery"):
        for size in screenshots.SIZES:
            drawn = Image.open(tmp_path / f"{name}_{size[0]}.webp")
            assert drawn.size == size == Image.open(kept[f"{name}_{size[0]}.webp"]).size
            assert np.asarray(drawn).std() > 20
    assert max(file.stat().st_size for file in kept.values()) < 150_000


def test_the_api_has_examples_and_tutorials_are_offered_as_notebooks(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text()
    assert 'id="embodied.api.train"' in text and "agent = em.train(" in re.sub(r"<[^>]+>", "", text)
    for name in ("fine_tune", "own_environment", "dataset_to_robot"):
        cells = json.loads((site / "tutorials" / f"{name}.ipynb").read_text())["cells"]
        assert sum(cell["cell_type"] == "code" for cell in cells) >= 5
        assert f'href="{name}.ipynb"' in (site / "tutorials" / f"{name}.html").read_text()


def test_results_are_drawn_and_withdrawn_ones_are_not(site: Path) -> None:
    text = (site / "results.html").read_text()
    assert text.count("<svg viewBox") > 30
    for name, facts in evidence.results().items():
        assert (f"<code>{name}</code>" in text) == (not facts["withdrawn"]), name
