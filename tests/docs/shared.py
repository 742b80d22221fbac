"""Folders that pages take for granted, and the table of all pages."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.docs.run import Page

TABLE = yaml.safe_load((Path(__file__).parent / "pages.yaml").read_text())


class Shared(dict[str, str]):
    """Folders that several pages need, made when the first one asks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> str:
        out = self.folder / name
        command = TABLE["shared"][name].format_map(_With(self, out=str(out)))
        work = self.folder / f"{name}_work"
        work.mkdir()
        page = Page(work)
        page.command(command)
        page.close()
        self[name] = str(out)
        return self[name]


class _With(dict[str, str]):
    def __init__(self, shared: Shared, **own: str) -> None:
        super().__init__(own)
        self.shared = shared

    def __missing__(self, name: str) -> str:
        return self.shared[name]
