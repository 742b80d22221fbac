"""Checks of one camera of one episode: films that cannot be decoded, dark and frozen pictures."""

# pyright: basic
# (pyarrow and PyAV have no types)
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from embodied.datasets.editing.source import Source
from embodied.datasets.lerobot.film_reader import FILMS
from embodied.datasets.lerobot.index import DAMAGE
from embodied.datasets.lerobot.schema import Column, DatasetError
from embodied.datasets.lerobot.video import decode_image

SAME_MEAN, SAME_MOST = 0.3, 12  # of 255: what encoding makes of two equal pictures


class PictureLimits(Protocol):
    @property
    def dark(self) -> float: ...
    @property
    def still(self) -> float: ...


def check_pictures(
    source: Source,
    episode: int,
    camera: Column,
    rows: pa.Table,
    moves: np.ndarray,
    limits: PictureLimits,
) -> Iterator[tuple[int | None, str]]:
    """(step, what is wrong); one finding of each kind at most. `moves` [T]: the robot moves."""
    length, fps = len(moves), float(source.info["fps"])
    dark = frozen = None
    before: np.ndarray | None = None
    same = 0  # steps since the picture changed
    moved = False  # whether the robot moved meanwhile
    try:
        for step, picture in enumerate(_pictures(source, episode, camera, rows)):
            if picture.shape != camera.shape:
                yield step, f"{camera.name} is {list(picture.shape)}, not {list(camera.shape)}"
                return
            if dark is None and picture[::4, ::4].mean() < limits.dark:
                dark = step
            alike = before is not None and _alike(before, picture)
            same, moved = (same + 1, moved or bool(moves[step])) if alike else (0, False)
            if frozen is None and moved and same >= limits.still * fps:
                frozen = step - same
            before = picture
    except (DatasetError, *DAMAGE, RuntimeError) as error:
        yield None, f"{camera.name}: {_reason(error)}"
    if dark is not None:
        yield dark, f"{camera.name} is dark"
    if frozen is not None and length:
        yield frozen, f"{camera.name} is frozen while the robot moves"


def _pictures(source: Source, episode: int, camera: Column, rows: pa.Table) -> Iterator[np.ndarray]:
    if camera.stored == "image":
        for value in rows[camera.name]:
            yield decode_image(value["bytes"].as_py()).numpy()
        return
    file, fps = source.film(camera.name, episode), float(source.info["fps"])
    if not file.exists():
        raise DatasetError(f"{file.parent.name}/{file.name} is missing")
    begin = source.span(camera.name, episode)[0]
    reader = FILMS.take(file, fps)
    for step in range(rows.num_rows):
        yield reader.picture(begin + step / fps)
    FILMS.give(reader)


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    change = np.abs(one[::2, ::2].astype(np.int16) - other[::2, ::2])
    return bool(change.max() <= SAME_MOST and change.mean() <= SAME_MEAN)


def _reason(error: Any) -> str:
    words = str(error)
    return words.split(" is damaged (")[1].split(");")[0] if " is damaged (" in words else words
