"""Hooks of MkDocs: generated pages, notebooks, links out of docs/, titles of fences."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import cli_reference  # noqa: E402
import option_pages  # noqa: E402
import results_page  # noqa: E402
import settings_reference  # noqa: E402

NOTEBOOKS = ("fine_tune", "own_environment", "dataset_to_robot")
"""Tutorials that the site offers as notebooks."""
FENCE = re.compile(r"^```(\w+) file=(\S+)$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)#\s]*)(?:#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of the code, and the tutorials as notebooks."""
    made = {"reference/settings_train.md": settings_reference.page()}
    made["reference/cli.md"] = cli_reference.page()
    made["results.md"] = results_page.page()
    made["what_works.md"] = results_page.works()
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for path, text in option_pages.pages().items():
        alone = InclusionLevel.NOT_IN_NAV if path.count("/") > 1 else InclusionLevel.UNDEFINED
        files.append(File.generated(config, path, content=text, inclusion=alone))
    for name in NOTEBOOKS:
        text = notebook(ROOT / "docs" / "tutorials" / f"{name}.md")
        files.append(File.generated(config, f"tutorials/{name}.ipynb", content=text))
    return files


def notebook(page: Path) -> str:
    """A tutorial as a Jupyter notebook: its Python blocks are the cells."""
    import jupytext

    made = jupytext.writes(jupytext.reads(page.read_text(), fmt="md"), fmt="ipynb")
    return str(made)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """`file=NAME` of a fence becomes its title; a link out of docs/ becomes its path."""
    markdown = FENCE.sub(r'```\1 title="\2"', markdown)
    if (name := Path(page.file.src_uri).stem) in NOTEBOOKS:
        offer = f"*This page is also a notebook: [download it]({name}.ipynb).*"
        markdown = markdown.replace("\n\n", f"\n\n{offer}\n\n", 1)

    def outside(found: re.Match[str]) -> str:
        target = (ROOT / "docs" / page.file.src_uri).parent / (found[2] + found[3])
        target = target.resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {found[2]}{found[3]}")
        path = f"`{target.relative_to(ROOT)}`"
        return path if path.strip("`") in found[1] else f"{found[1]} ({path})"

    return OUTSIDE.sub(outside, markdown)
