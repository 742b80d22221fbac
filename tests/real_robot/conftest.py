"""The private folder that a control process takes requests in."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder that only this user can open."""
    place = tmp_path / "d"
    place.mkdir(mode=0o700)
    return place
