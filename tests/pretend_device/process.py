"""A process in which the pretended device is registered, as it has to be before any `backward`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests import pretend_device

Call = Callable[..., object]


@pytest.fixture(scope="module")
def on_device() -> Iterator[Call]:
    """Calls a function of a module in that process; what it raises is raised here."""
    if shutil.which("g++") is None:
        pytest.skip("the pretended device is compiled: needs g++")
    pretend_device.compiled()
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, pretend_device.register) as pool:
        yield lambda function, *given: pool.submit(function, *given).result()
