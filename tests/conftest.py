"""Before anything imports mujoco: `envs` chooses the off-screen renderer."""

import ctypes
import gc
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import embodied.envs  # noqa: F401
from embodied.core import build
from tests import tiers

if TYPE_CHECKING:
    from tests.docs.shared import Shared

GROWTH = 80 * 2**20  # bytes since the last time, from which on it is worth 0.3 s
STATM = Path("/proc/self/statm")
PAGE = 4096  # bytes


def resident() -> int:
    """The memory of this process, in bytes."""
    return int(STATM.read_text().split()[1]) * PAGE


class Memory:
    """A plugin that gives memory back after a test with which the process has grown: closed
    simulators stay in cycles of references, and glibc keeps what was freed in the arenas of their
    threads. Without this a worker grows to 6 GB."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        self.libc.mallopt(-8, 2)  # M_ARENA_MAX: two arenas for all threads
        self.before = resident()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> object:
        result = yield
        if resident() > self.before + GROWTH:
            gc.collect()
            self.libc.malloc_trim(0)
            self.before = resident()
        return result


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """A job in the background of a shell ignores Ctrl-C, and so would all of its children: here it
    interrupts, as in a terminal."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):  # glibc
        config.pluginmanager.register(Memory(), "memory")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker takes neighbours, so that what the tests of a file share is made once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Other packages ask an emulated servo once and give up, which a busy machine makes them do:
    their tests are tried once more, and the summary names each one that was."""
    tiers.leave_out(config, items)
    interop = Path(__file__).parent / "interop"
    for item in items:
        if item.path.is_relative_to(interop):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """What is there now stays until the end: collections of garbage need not go through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _allowed_packages_of_one_test() -> Iterator[None]:
    """A package that a test allows, by `allow` or `allow=[...]`, is not allowed in the next."""
    before = [*build.ALLOWED], [*build.ASKED]
    yield
    build.ALLOWED[:], build.ASKED[:] = before


@pytest.fixture(scope="session", autouse=True)
def _state_folder_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands remember for the user stays out of the home folder; other processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process for EnvPool, which keeps what it loads for each family: 1 GB for all of ours."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> "Shared":
    """Runs and datasets of debug size, by name, made when a test asks (tests/docs/pages.yaml)."""
    from tests.docs.shared import Shared

    return Shared(tmp_path_factory)


@pytest.fixture(scope="session")
def sentence_package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.builders import tiny_sentence_encoder

    return tiny_sentence_encoder(tmp_path_factory.mktemp("sentences"))


@pytest.fixture
def tiny_encoder(sentence_package: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sentences become vectors by a small model with random weights."""
    from embodied.nn.sentences import _encoder

    monkeypatch.setitem(sys.modules, sentence_package.__name__, sentence_package)
    _encoder.cache_clear()
    yield
    _encoder.cache_clear()
