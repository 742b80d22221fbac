"""SavedFile: a file of parameters that checkpoints may refer to, by its path and SHA-256.

A steered policy changes nothing in its frozen base. Its checkpoint then holds what was trained, and
in `references.json` the path and hash of the base's file instead of a copy of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from embodied.core.hashes import file_hash

BASES = "EMBODIED_BASES"
"""Environment variable: runs, separated by colons, in which a base is looked for that has moved."""
WEIGHTS = "policy.safetensors"


class BaseFileError(RuntimeError):
    """A file that a checkpoint refers to is missing or has changed; one line says what to do."""


@dataclass(frozen=True)
class SavedFile:
    """A safetensors file."""

    path: Path

    @property
    def sha256(self) -> str:
        """The hash of its present content."""
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
        """The names of its tensors."""
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
