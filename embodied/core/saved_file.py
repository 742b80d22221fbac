"""SavedFile: a file of parameters that checkpoints may refer to, by its path and SHA-256.

A steered policy changes nothing in its frozen base. Its checkpoint then holds what was trained, and
in `references.json` the path and hash of the base's file instead of a copy of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves

from embodied.core.device import free_bytes
from embodied.core.files import FileError, reading, require_file
from embodied.core.hashes import file_hash

BASES = "EMBODIED_BASES"  # environment variable: runs (A:B) in which a moved base is looked for
WEIGHTS = "policy.safetensors"


class BaseFileError(RuntimeError):
    """A file that a checkpoint refers to is missing or has changed; one line says what to do."""


@dataclass(frozen=True)
class SavedFile:
    path: Path

    @property
    def sha256(self) -> str:
        return file_hash(self.path)

    def holds(self, state: Mapping[str, Tensor]) -> bool:
        """Whether all tensors of the file are in `state`, unchanged."""
        try:
            with safe_open(self.path, "pt") as opened:  # pyright: ignore[reportUnknownVariableType]
                file = cast(Any, opened)  # the library has no types
                names: list[str] = list(file.keys())
                return bool(names) and all(
                    name in state and _same(file.get_tensor(name), state[name]) for name in names
                )
        except (OSError, SafetensorError):
            return False  # it is gone: then a copy is written

    def names(self) -> list[str]:
        require_tensors(self.path)
        with safe_open(self.path, "pt") as opened:  # pyright: ignore[reportUnknownVariableType]
            return list(cast(Any, opened).keys())

    def reference(self, part: str, folder: Path) -> dict[str, Any]:
        """The entry of `references.json` in the checkpoint `folder` for the submodule `part`."""
        path = self.path.resolve()
        return {
            "part": part,
            "file": str(path),
            "relative": os.path.relpath(path, folder.resolve()),
            "bytes": path.stat().st_size,
            "sha256": self.sha256,
        }


HEADER = 2**23  # bytes of the names and shapes in a safetensors file: 80,000 tensors
SPARE = (2**24, 10_000)  # elements and tensors that a network may have beside four times its file's
# What the constructors of networks raise for settings that do not go together.
UNBUILDABLE = (LookupError, TypeError, AttributeError, RuntimeError, AssertionError)


def require_tensors(file: Path) -> None:
    """FileError for a safetensors file with a header or a size that cannot be meant. OSError."""
    size, free = require_file(file), free_bytes(torch.device("cpu"))
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    if header > HEADER:
        raise FileError(f"{file} has a header of {header:,} bytes, and {HEADER:,} are allowed")
    if size > free:
        raise FileError(f"{file} has {size / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free")


def load_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. OSError, SafetensorError; FileError."""
    require_tensors(file)
    return load_file(file, device="cpu")


@contextmanager
def fitting(weights: Mapping[str, Any], settings: Path) -> Generator[None]:
    """Around building the network that the file `settings` describes and `weights`, a state with
    tensors in it, are for: FileError as soon as it has far more parameters, before they take memory
    and time."""
    held = [value for value in tree_leaves(weights) if isinstance(value, Tensor)]
    most = SPARE[0] + 4 * sum(value.numel() for value in held)
    count = SPARE[1] + 4 * len(held)
    here, found = threading.get_ident(), [0, 0]

    def registered(_: object, name: str, value: Tensor | None) -> None:
        if value is None or threading.get_ident() != here:
            return
        found[0] += value.numel()
        found[1] += 1
        if found[0] > most or found[1] > count:
            raise FileError(
                f"{settings} describes a network of {found[0]:,} parameters in {found[1]:,} "
                f"tensors and more, and its weights are {len(held):,} tensors: it is damaged"
            )

    handles = (
        modules.register_module_parameter_registration_hook(registered),
        modules.register_module_buffer_registration_hook(registered),
    )
    try:
        with reading(settings, *UNBUILDABLE):
            yield
    finally:
        for handle in handles:
            handle.remove()


def referred(entry: Any, folder: Path) -> SavedFile:
    """The unchanged file of an entry of `references.json` in `folder`; BaseFileError."""
    part, file, relative, sha256 = (
        _text(entry, key, folder) for key in ("part", "file", "relative", "sha256")
    )
    # A run that was moved together with its base is found by the relative path.
    candidates = [Path(file), folder / relative]
    for path in map(Path, filter(None, os.environ.get(BASES, "").split(":"))):
        candidates += [path, path / WEIGHTS, *sorted(path.glob(f"checkpoints/[0-9]*/{WEIGHTS}"))]
    present = [path for path in candidates if path.suffix == ".safetensors" and path.is_file()]
    for path in present:
        if file_hash(path) == sha256:
            return SavedFile(path)
    told = f"tell where its run is now: {BASES}=RUN (before the command)"
    if not present:
        raise BaseFileError(f"{folder} needs its {part} policy {file}, which is not there: {told}")
    raise BaseFileError(
        f"{present[0]} has changed and is no longer the {part} policy of {folder} (its SHA-256 "
        f"should begin with {sha256[:12]}): restore it, or {told}"
    )


def _same(saved: Tensor, now: Tensor) -> bool:
    return saved.dtype == now.dtype and torch.equal(saved, now.detach().cpu())


def _text(entry: Any, key: str, folder: Path) -> str:
    value = cast(dict[str, Any], entry).get(key) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.isprintable():
        raise BaseFileError(f"{folder}/references.json is damaged; use an earlier checkpoint")
    return value
