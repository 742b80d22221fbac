"""A model that is fitted when its reward is built, and kept in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn


def fitted_once(
    module: nn.Module,
    folder: Path | None,
    name: str,
    fingerprint: str,
    fit: Callable[[], dict[str, Any]],
) -> None:
    """Load `folder/NAME.safetensors` into `module` if its card has this `fingerprint`; otherwise
    call `fit`, and write the weights and a card with the facts that it returns. Without a `folder`
    it is fitted and not written."""
    if folder is None:
        fit()
        return
    weights, card = folder / f"{name}.safetensors", folder / f"{name}.json"
    if card.exists() and json.loads(card.read_text())["fingerprint"] == fingerprint:
        module.load_state_dict(load_file(weights))
        return
    facts = {"version": 1, "fingerprint": fingerprint, **fit()}
    folder.mkdir(parents=True, exist_ok=True)
    card.unlink(missing_ok=True)
    save_file({key: value.contiguous() for key, value in module.state_dict().items()}, weights)
    card.write_text(json.dumps(facts, indent=1))
