"""Fit a model of an environment to recorded episodes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from embodied.commands import require_at_least, require_inputs

if TYPE_CHECKING:
    from embodied.models.dynamics import Fit


def run(args: argparse.Namespace) -> None:
    from embodied.compose import compose

    require_inputs(args.words)
    node = compose("model_train", args.words, args.config_dir).node
    require_at_least(node, {"seed": 0, "threads": 1})

    from embodied.core.build import parse
    from embodied.models.train import TrainConfig, require_new, train

    config: TrainConfig = parse(TrainConfig, node, "embodied model train")
    require_new(config.out)

    import torch
    from rich.progress import Progress

    torch.set_num_threads(config.threads)
    try:
        with Progress() as bar:
            task = bar.add_task("updates", total=None)

            def show(updates: int, most: int, error: float) -> None:
                text = f"updates (at most {most:,}), held-out error {error:.4g}"
                bar.update(task, completed=updates, total=most, description=text)

            _, fit = train(config, show)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("nothing was saved; model.most_updates=N ends sooner") from stop
    print(card(config.out, fit))
    starts = config.demos if isinstance(config.demos, str) else config.demos[0]
    print(f"next: embodied train env=imagined env.model={config.out} env.starts={starts} ...")


def card(out: str, fit: Fit) -> str:
    """The model's data and its held-out error of every output, as text."""
    head = ("output", "unit", "error", "spread", "explained")
    body = [
        (o.name, o.unit, f"{o.error:.4g}", f"{o.spread:.4g}", f"{o.explained:.1%}")
        for o in fit.outputs
    ]
    widths = [max(len(row[k]) for row in (head, *body)) for k in range(len(head))]
    facts = ", ".join(f"{key} {value}" for key, value in fit.facts.items())
    lines = [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in (head, *body)
    ]
    return "\n".join([f"{out}: {facts}", *lines])
