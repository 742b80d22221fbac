"""MuJoCo draws without a screen only if `envs` is imported before it."""

from collections.abc import Iterator
from typing import Any

import pytest

from embodied import envs as envs


@pytest.fixture
def server() -> Iterator[Any]:
    from viser import ViserServer

    made = ViserServer("127.0.0.1", 0, verbose=False)
    yield made
    made.stop()
