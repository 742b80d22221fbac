"""The tutorials that the site offers as notebooks run as notebooks, with fewer steps; tests/docs
runs the blocks of all pages, these included."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.builders import ROOT
from tests.tiers import usually

DOCS = ROOT / "docs"
DEBUG = 'size="debug", '
# Of each page: the text that asks for many steps, and what is run instead.
NOTEBOOKS = {
    "fine_tune": {
        '"experiment=two_gap_flow", ': f'"experiment=two_gap_flow", {DEBUG}',
        '"experiment=two_gap_reinflow", ': f'"experiment=two_gap_reinflow", {DEBUG}',
        "episodes=100": "episodes=8",
        "episodes=200": "episodes=10",
    },
    "own_environment": {
        "    steps=8_000,": f"    {DEBUG}",
        "steps=8_000, ": DEBUG,
        "episodes=100": "episodes=10",
    },
    "dataset_to_robot": {
        "steps=1500": "steps=40, eval_every=20",
        "episodes=100)": "episodes=10)",
        "episodes=100,": "episodes=8,",
        "episodes=3": "episodes=1 seconds=2",
    },
}


def shortened(page: str, fewer: dict[str, str]) -> str:
    text = (DOCS / f"{page}.md").read_text()
    for long, short in fewer.items():
        assert long in text, f"{page}.md has no {long!r} any more"
        text = text.replace(long, short)
    return text


# One with `%%writefile` cells stands for all: tests/docs runs the blocks of the others' pages.
PAGES = usually(["own_environment"], NOTEBOOKS)


@pytest.mark.parametrize("page", PAGES)
def test_a_notebook_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jupytext = pytest.importorskip("jupytext", reason="pip install -e '.[docs]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[docs]'")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name, value in {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    notebook = jupytext.reads(shortened(f"tutorials/{page}", NOTEBOOKS[page]), fmt="md")
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    said = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert re.search(r"success \d+%", said)
    assert list(tmp_path.glob("outputs/**/policy.safetensors"))
