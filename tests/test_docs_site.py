"""The documentation site builds without a warning, offline, and holds what it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from benchmarks import evidence
from tests.builders import once

pytest.importorskip("mkdocs", reason="the documentation's tools: pip install -e '.[docs]'")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "site", build)


def build(folder: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
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


def test_the_settings_of_every_option_are_there(site: Path) -> None:
    for group in ("env", "policy", "learner", "finetune", "reward", "teacher", "robot"):
        text = (site / "reference" / f"settings_{group}.html").read_text()
        named = set(re.findall(r'<h2 id="([^"]+)"', text))
        assert named == {file.stem for file in (ROOT / "configs" / group).glob("*.yaml")}
    sac = (site / "reference" / "settings_learner.html").read_text().split('id="sac"')[1]
    first = sac.split("<h2")[0]
    for name, default in {"actor_lr": "0.0003", "tau": "0.005", "hidden": "[256, 256]"}.items():
        assert re.search(rf"<code>{name}</code>.*?<code>{re.escape(default)}</code>", first, re.S)


def test_the_api_has_signatures_and_examples(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text()
    assert 'id="embodied.api.train"' in text and "agent = em.train(" in re.sub(r"<[^>]+>", "", text)


def test_notebooks_are_offered(site: Path) -> None:
    for name in ("fine_tune", "own_environment", "dataset_to_robot"):
        cells = json.loads((site / "tutorials" / f"{name}.ipynb").read_text())["cells"]
        assert sum(cell["cell_type"] == "code" for cell in cells) >= 5
        assert f'href="{name}.ipynb"' in (site / "tutorials" / f"{name}.html").read_text()


def test_results_are_drawn_and_withdrawn_ones_are_not(site: Path) -> None:
    text = (site / "results.html").read_text()
    assert text.count("<svg viewBox") > 30
    for file in sorted((ROOT / "docs" / "evidence").glob("*.json")):
        facts = evidence.current(file.stem, json.loads(file.read_text()))
        assert (f"<code>{file.stem}</code>" in text) == (not facts["withdrawn"]), file.stem
