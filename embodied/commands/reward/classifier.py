"""Train and calibrate a success classifier on labelled episodes, for reward=classifier."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError, nearest, parse


def run(args: argparse.Namespace) -> None:
    import torch
    import yaml

    from embodied.rewards.success.model import Training, load_labelled, made, mark_of, write

    folders = [word for word in args.words if "=" not in word]
    pairs = (word.partition("=") for word in args.words if "=" in word)
    given: dict[str, Any] = {key: yaml.safe_load(value) for key, _, value in pairs}
    out, seed = given.pop("out", None), int(given.pop("seed", 0))
    if not folders or out is None:
        raise ConfigError("no dataset or no out=DIR: embodied reward classifier DATASET... out=DIR")
    known = [field.name for field in fields(Training)]
    for key in given:
        if key not in known:
            raise ConfigError(f'no setting "{key}"{nearest(key, [*known, "out", "seed"])}')
    how: Training = parse(Training, given, "embodied reward")
    torch.set_num_threads(1)
    whole, leaves = load_labelled(folders, how, seed)
    net, c = made(whole, leaves, how, seed)
    mark = mark_of(whole, how, seed)
    facts = {"version": 1, "fingerprint": mark, "data": folders, "training": asdict(how)}
    write(Path(out), net, leaves, c, json.loads(json.dumps(facts)))
    print(f"{out}: version 1, held-out frames: {c.successes} positive, {c.others} negative")
    print(f"  temperature  {c.temperature:.2f}, log loss {c.loss_before:.3f} to {c.loss:.3f}")
    print(f"  calibration  expected calibration error {c.error_before:.3f} to {c.error:.3f}")
    print(
        f"  threshold    {c.threshold:.3f}: true positives {c.found:.0%}, false "
        f"positives {c.mistaken:.2%}"
    )
    print(f"next: embodied train ... reward.trained={out}")
