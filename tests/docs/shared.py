"""Folders that pages take for granted, and the table of all pages."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.builders import once
from tests.docs.run import Page

TABLE = yaml.safe_load((Path(__file__).parent / "pages.yaml").read_text())


class Shared(dict[str, str]):
    """Folders that several pages need, made when the first one asks."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory

    def __missing__(self, name: str) -> str:
        self[name] = str(once(self.factory, f"shared_{name}", partial(self.make, name)) / "out")
        return self[name]

    def make(self, name: str, folder: Path) -> None:
        """Run the command that makes the folder `name`, as `folder`/out."""
        page = Page(folder)
        out = str(folder / "out")
        page.command(TABLE["shared"][name].format_map(_With(self, out=out)))
        page.close()


class _With(dict[str, str]):
    def __init__(self, shared: Shared, **own: str) -> None:
        super().__init__(own)
        self.shared = shared

    def __missing__(self, name: str) -> str:
        return self.shared[name]
