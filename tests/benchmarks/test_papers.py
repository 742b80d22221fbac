"""The catalogue of published systems: its page, its commands and its evidence are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import evidence, papers
from embodied.compose import PACKAGED
from embodied.core.build import ConfigError
from embodied.settings_tables import Paper, published, sentence
from embodied.settings_tables import papers as papers_of
from tests.test_cli import Shell, embodied

__all__ = ["embodied"]  # a fixture

PUBLISHED = published([PACKAGED])
IDENTIFIER = re.compile(r"arXiv:\d{4}\.\d{4,5}|doi:10\.\d{4,}/\S+|https://\S+")


def test_the_page_is_that_of_the_options() -> None:
    assert papers.PAGE.read_text() == papers.page(), "python -m benchmarks.papers writes it anew"


PAGES = evidence.TABLE.read_text() + evidence.ARCHIVE.read_text()


ROWS = {*re.findall(r'<a id="([^"]+)"></a>', PAGES)}


@pytest.mark.parametrize(
    ("group", "file", "paper"), PUBLISHED, ids=[f"{g}={f.stem}" for g, f, _ in PUBLISHED]
)
def test_an_entry_is_complete_and_its_command_runs_the_option(
    group: str, file: Path, paper: Paper
) -> None:
    """tests/test_docs.py composes the command, which is on the page."""
    assert paper.title and paper.differs and 1950 < paper.year < 2100 and sentence(file)
    assert IDENTIFIER.fullmatch(paper.id)
    assert paper.evidence and set(paper.evidence) <= ROWS
    given = shlex.split(paper.run)
    words = dict(word.split("=", 1) for word in given if "=" in word)
    if group == "model":
        assert given[:3] == ["embodied", "model", "train"] and words["model"] == file.stem
        return
    assert given[:2] == ["embodied", "train"]
    experiment = (PACKAGED / "experiment" / f"{words['experiment']}.yaml").read_text()
    chosen = dict(re.findall(r"override /(\w+): (\w+)", experiment)) | words
    assert chosen[group] == file.stem


def test_list_papers_prints_them(embodied: Shell) -> None:
    shown = embodied("list", "papers").out
    assert all(paper.id in shown for _, _, paper in PUBLISHED)
    assert "evidence: docs/papers.md, " in shown


def test_a_block_is_no_setting_and_no_sentence_and_lacks_no_field(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# paper:\n#   title: Mine\n#   year: 2026\n# What it does.\na: 1\n")
    assert sentence(file) == "What it does."
    with pytest.raises(ConfigError, match=r"mine\.yaml, paper needs id, run, evidence, differs"):
        papers_of(file)
