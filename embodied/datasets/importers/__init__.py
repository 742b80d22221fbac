"""Importers: other projects' demonstration files become our datasets (LeRobot v3 layout).

A format is one module here with `read(path, dt) -> (Spec, episodes)`.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from pathlib import Path
from typing import Literal

from embodied.core.build import nearest
from embodied.datasets.lerobot.reader import DatasetError, EpisodeWriter


def formats() -> list[str]:
    """The names `convert` takes: the modules of this package that read something."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return sorted(name for name in names if name != "hdf5")


def convert(
    source_format: str,
    in_path: Path | str,
    out_path: Path | str,
    dt: float | None = None,
    images: Literal["mp4", "png"] = "mp4",
) -> int:
    """Read `in_path`, written by robomimic, ManiSkill or Minari, and write the same episodes to the
    new dataset `out_path`; returns how many.

    `dt` is the control period (s); None takes it from the file, or 0.05 where the file does not
    say. Actions become [-1, 1]: see the format's module for how. DatasetError in one line where
    something is missing, cut off, or already there.
    """
    if source_format not in formats():
        hint = nearest(source_format, formats())
        raise DatasetError(f'there is no importer for "{source_format}"{hint}')
    path, out = Path(in_path), Path(out_path)
    if not path.exists():
        raise DatasetError(f"{path} does not exist")
    if (out / "meta").exists():
        raise DatasetError(f"{out} holds a dataset already; name a new folder")
    module = importlib.import_module(f"{__name__}.{source_format}")
    spec, episodes = module.read(path, dt)
    partial = out.with_name(f".{out.name}.partial")  # so that `out` is whole or not there
    shutil.rmtree(partial, ignore_errors=True)
    with EpisodeWriter(partial, spec, robot=source_format, images=images) as writer:
        for episode in episodes:
            writer.add(episode.rows, episode.text, episode.info)
    partial.rename(out)
    return len(writer)
