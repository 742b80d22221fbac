"""Format numbers of what is saved, and the translation of older formats to the present ones.

Checkpoints, datasets, run folders and models each carry a number `format`. Whoever changes what one
of them holds raises its number here and translates the former format in `upgrade`; no other code
knows of former formats. A file without a number is of format 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embodied.core.build import ConfigError

CHECKPOINT = 2
DATASET = 1
RUN = 2
MODEL = 1
NEWEST = {"checkpoint": CHECKPOINT, "dataset": DATASET, "run folder": RUN, "model": MODEL}


def upgrade(kind: str, state: Mapping[str, Any], format: Any) -> dict[str, Any]:
    """What a file of `format` holds, in the present format; ConfigError for a newer one. `kind`:
    "checkpoint" (its files by name: policy, learner, loop), "dataset" (our entry in info.json),
    "run folder" (the settings in run.yaml) or "model" (those in model.yaml)."""
    if isinstance(format, bool) or not isinstance(format, int) or format < 1:
        raise ConfigError(f"the {kind} has format {format!r}, which is no number from 1 on")
    if format > NEWEST[kind]:
        raise ConfigError(
            f"the {kind} has format {format}, and this version reads up to {NEWEST[kind]}: "
            "install a newer embodied-rl"
        )
    made = dict(state)
    if kind == "run folder" and format < 2 and "wandb" in made:
        made["log"] = "wandb" if made.pop("wandb") else None
    return made
