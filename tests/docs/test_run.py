"""README and docs do what they say: each command and each Python block runs, at debug size.

A page is one test; its steps run in order in a folder of their own. `pages.yaml` has what a page
needs, what is not run and why, and which pages run without `--all`; nothing else is left out.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs import small
from tests.docs.blocks import PAGES, ROOT, Step, name_of, steps
from tests.docs.run import Page
from tests.docs.shared import TABLE, Shared
from tests.tiers import usually

STEPS = {name_of(page): steps(page.read_text()) for page in PAGES}
RUN = {name: found for name, found in STEPS.items() if found}


def reason(page: str, step: Step) -> str | None:
    found = (why for pattern, why in left_out(page).items() if re.search(pattern, step.text))
    return next(found, None) if step.kind != "file" else None


def left_out(page: str) -> dict[str, str]:
    return TABLE["not_run"].get(page, {})


def prepare(name: str, folder: Path) -> None:
    """Put the files that the page takes for granted into its folder."""
    needs = TABLE["pages"].get(name, {})
    for step in STEPS.get(needs.get("files_of", ""), ()):
        if step.kind == "file":
            write(folder / step.name, step.text)
    for place, text in needs.get("files", {}).items():
        write(folder / place, text)
    for place, file in needs.get("files_from", {}).items():
        write(folder / place, (ROOT / file).read_text())


def write(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def filled_in(name: str) -> Callable[[str], str]:
    """Words that stand for something of the user's are replaced; so are ports, by free ones."""
    words: dict[str, Any] = TABLE["pages"].get(name, {}).get("words", {})
    ports = {number: str(free_port()) for number in ("8000", "8001")}

    def fill(text: str) -> str:
        for there, here in words.items():
            text = text.replace(there, here)
        text = re.sub(r"^(embodied serve (?!.*port=).*)", r"\1 port=8000", text)
        return re.sub(r"(?<=[:=/])800[01]\b", lambda found: ports[found[0]], text)

    return fill


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize("name", usually(TABLE["usual"], RUN))
def test_a_page_runs(name: str, tmp_path: Path, shared: Shared) -> None:
    for place, made in TABLE["pages"].get(name, {}).get("given", {}).items():
        shutil.copytree(shared[made], tmp_path / place)
    prepare(name, tmp_path)
    fill = filled_in(name)
    before = STEPS.get(TABLE["pages"].get(name, {}).get("before", ""), [])
    page = Page(tmp_path)
    try:
        for step in [*before, *STEPS[name]]:
            if reason(name, step) is None:
                page.run(Step(step.kind, fill(step.text), step.name))
    finally:
        page.close()


COMMAND = re.compile(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:torchrun .* -m embodied\.cli|embodied) [a-z]")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_is_overlooked(page: Path) -> None:
    """Counted in another way: lines that begin with a command, and fences of Python."""
    text, found = page.read_text(), STEPS[name_of(page)]
    lines = [line for line in text.splitlines() if COMMAND.match(line)]
    assert len(lines) == sum(bool(COMMAND.match(step.text)) for step in found)
    python = [step for step in found if step.kind == "python" or step.name.endswith(".py")]
    fences = re.findall(r"^ *```python[^\n]*\n(?!%%writefile \S+\.yaml)", text, re.MULTILINE)
    assert len(fences) == len(python)


def test_what_is_left_out_is_in_the_table_and_exists() -> None:
    """An entry leaves out something, its reason is a sentence, and what it names is a page."""
    assert TABLE["not_run"].keys() <= RUN.keys() and TABLE["pages"].keys() <= RUN.keys()
    for page, entries in TABLE["not_run"].items():
        for pattern, why in entries.items():
            assert len(why.split()) > 2, (page, pattern)
            these = [step for step in RUN[page] if re.search(pattern, step.text)]
            assert these, (page, pattern)
            if other := re.search("the same runs in (.*)", why):
                there = [step for step in RUN[other[1]] if reason(other[1], step) is None]
                run = [words_run(step) for step in there if step.kind == "command"]
                assert all(words_run(step) in run for step in these), (page, pattern)


def words_run(step: Step) -> set[str]:
    return set(small.command(shlex.split(step.text), ""))
