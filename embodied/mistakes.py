"""Users' mistakes: which errors are for the user to mend, their message in one line, and what other
libraries' words are here."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator

from embodied.core.build import ConfigError, build
from embodied.core.errors import ContractError, RemoteError, RobotError

ERRORS = {
    "CheckpointError": "embodied.core.checkpoint",
    "NotFinite": "embodied.core.env",
    "SpecMismatch": "embodied.core.spec",
    "DatasetError": "embodied.datasets.lerobot.schema",
    "ChatError": "embodied.llm.chat",
    "ClientError": "embodied.real_robot.daemon.client",
    "FolderError": "embodied.real_robot.daemon.server",
    "RequestError": "embodied.real_robot.daemon.requests",
    "RpcServerError": "embodied.real_robot.daemon.server",
    "DriverError": "embodied.real_robot.kernel.driver",
    "KeyFileError": "embodied.real_robot.remote",
}
"""Errors that say in one line what to do, and the modules that define them."""
# What a RuntimeError of torch says where there is too little memory.
OUT_OF_MEMORY = re.compile("can't allocate memory|std::bad_alloc")


def answer(kind: str, word: str) -> str:
    """What to write in place of one of other libraries' "keywords" or "names"; "" if unknown."""
    from embodied.compose import other_words, ours

    here = ours(kind, word)
    if kind == "keywords" and (setting := ours("settings", word)):
        here = other_words()["python"].get(setting, f"{setting}=...")
    return here and f": write {here}"


def mistake(error: Exception) -> str | None:
    """The error message of a user error, in one line; None for a bug (which gets a traceback)."""
    if isinstance(error, tuple(_one_line_errors())):
        return " ".join(str(error).split())
    if isinstance(error, ValueError) and (where := _refused(error)) is not None:
        return f"{where}{' '.join(str(error).split())}"
    if isinstance(error, ModuleNotFoundError) and not _ours(error.name):
        return f'the package {error.name} is missing: pip install "embodied-rl[all]"'
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
        return f"this needs more memory than there is: {str(error).partition(chr(10))[0][:200]}"
    return None


def _one_line_errors() -> Iterator[type[Exception]]:
    """The errors whose message is for the user, of those modules that are imported: torch is not
    imported to classify a mistake."""
    yield from (ConfigError, ContractError, RemoteError, RobotError)
    for name, place in ERRORS.items():
        if place in sys.modules:
            yield getattr(sys.modules[place], name)


def _refused(error: ValueError) -> str | None:
    """The prefix of an error about settings; None if the error is not about settings.

    Errors raised inside `build` get the name of the class that was built; those of our own
    constructors get none.
    """
    frames = [*traceback.walk_tb(error.__traceback__)]
    for frame, _ in frames:
        if frame.f_code is build.__code__:
            return f"{frame.f_locals['node'].get('_target_')}: "
    last, _ = frames[-1]
    ours = _ours(last.f_globals.get("__name__"))
    return "" if ours and last.f_code.co_name in ("__init__", "__post_init__") else None


def _ours(module: str | None) -> bool:
    return module is None or module.split(".")[0] == "embodied"
