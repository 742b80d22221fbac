"""Format numbers of what is saved, and the translation of older formats to the present ones.

Checkpoints, datasets, run folders and models each carry a number `format`. Whoever changes what one
of them holds raises its number here and translates the former format in its `upgrade` function; no
other code knows of former formats. A file without a number is of format 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embodied.core.build import ConfigError

CHECKPOINT = 1
DATASET = 1
RUN = 1
MODEL = 1


def upgrade_checkpoint(state: Mapping[str, Any], format: int) -> dict[str, Any]:
    """The files of a checkpoint of `format` by name (policy, learner, loop), in the present format.

    Raises ConfigError for a format that is newer than this version.
    """
    _require_known("checkpoint", format, CHECKPOINT)
    return dict(state)


def upgrade_dataset(state: Mapping[str, Any], format: int) -> dict[str, Any]:
    """Our entry in a dataset's info.json of `format`, in the present format.

    Raises ConfigError for a format that is newer than this version.
    """
    _require_known("dataset", format, DATASET)
    return dict(state)


def upgrade_run(state: Mapping[str, Any], format: int) -> dict[str, Any]:
    """The settings of a run.yaml of `format`, in the present format.

    Raises ConfigError for a format that is newer than this version.
    """
    _require_known("run folder", format, RUN)
    return dict(state)


def upgrade_model(state: Mapping[str, Any], format: int) -> dict[str, Any]:
    """The settings of a model.yaml of `format`, in the present format.

    Raises ConfigError for a format that is newer than this version.
    """
    _require_known("model", format, MODEL)
    return dict(state)


def _require_known(kind: str, format: Any, newest: int) -> None:
    if isinstance(format, bool) or not isinstance(format, int) or format < 1:
        raise ConfigError(f"the {kind} has format {format!r}, which is no number from 1 on")
    if format > newest:
        raise ConfigError(
            f"the {kind} has format {format}, and this version reads up to {newest}: "
            "install a newer embodied-rl"
        )
