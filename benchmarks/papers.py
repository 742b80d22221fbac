"""The catalogue: docs/papers.md, from the `# paper:` blocks of the options' YAML files.

python -m benchmarks.papers
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import evidence
from embodied.compose import PACKAGED
from embodied.settings_tables import Paper, published, sentence

PAGE = evidence.ROOT / "docs" / "papers.md"
HEAD = """# Published systems

Every published system of which this library has evidence: what it does in a line, the command that
runs it, the measurements, and what differs from the paper. `RUN` is the folder of a trained base
policy, `DIR` a folder of recordings. Evidence is a row of the table of [evidence](evidence.md),
good or bad: read there what it shows. WITHDRAWN: the study lacked a fair baseline. Options whose
sentence names a paper but which are missing here have not been measured.

`embodied list papers` prints this table. `python -m benchmarks.papers` writes this page, from the
block `# paper:` in the YAML file of each option (`configs/GROUP/NAME.yaml`).

| option | paper | what it does | command | evidence | what differs |
|---|---|---|---|---|---|"""


def page() -> str:
    """docs/papers.md."""
    withdrawn = {name for name, facts in evidence.results().items() if facts["withdrawn"]}
    rows = [row(group, file, paper, withdrawn) for group, file, paper in published([PACKAGED])]
    return "\n".join([HEAD, *rows, ""])


def row(group: str, file: Path, paper: Paper, withdrawn: set[str]) -> str:
    """A row of the table; `withdrawn` studies are named so."""
    links = [
        f"[{anchor}](evidence_withdrawn.md#{anchor}) WITHDRAWN"
        if anchor.partition("-")[0] in withdrawn
        else f"[{anchor}](evidence.md#{anchor})"
        for anchor in paper.evidence
    ]
    cells = [
        f"`{group}={file.stem}`",
        f"{paper.title}, {paper.year}, [{paper.id}]({paper.address})",
        sentence(file),
        f"`{paper.run}`",
        ", ".join(links),
        paper.differs,
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
