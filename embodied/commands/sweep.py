"""Search settings with Optuna: parallel trials, poor ones stopped at checkpoints, one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError, parse

OWN = ("trials", "metric", "direction", "rungs", "pruner", "sweep_seed", "workers", "out")
OWN += ("on", "slurm")


def run(args: argparse.Namespace) -> None:
    from embodied.study.launchers import launcher
    from embodied.study.study import cores

    own = dict(word.split("=", 1) for word in args.words if word.partition("=")[0] in OWN)
    words = [word for word in args.words if word.partition("=")[0] not in OWN]
    sweep = sweep_of(own, words, args.config_dir)
    out = Path(own.get("out") or "outputs/sweep")
    workers = _number(own, "workers", cores())
    where = launcher(own.get("on", "here"), own.get("slurm"), sweep.threads, sweep.device)
    # After the mistakes: these import torch.
    from embodied.study.sweep import run as run_sweep
    from embodied.study.sweep_page import best_of, facts, write_sweep

    def done(found: Any) -> None:
        write_sweep(out.name, sweep, found, out)

    try:
        study = run_sweep(sweep, out, workers, done, where)
    finally:
        where.close()
    page, best = write_sweep(out.name, sweep, study, out), best_of(sweep, facts(study, out))
    if best is not None:
        shown = " ".join(f"{key}={value}" for key, value in best["settings"].items())
        print(f"\nbest: trial {best['trial']}, {sweep.metric} {best['value']:.4g}: {shown}")
    print(f"  report  {page}")


def sweep_of(own: dict[str, str], words: list[str], folders: list[str]) -> Any:
    """The sweep, after one training with its first values was composed: mistakes cost nothing."""
    from embodied.commands.train import fresh
    from embodied.study.space import searched
    from embodied.study.sweep import Sweep, require_space

    found = {word: searched(word) for word in words}
    fixed = [word for word, space in found.items() if space is None]
    space = tuple(each for each in found.values() if each is not None)
    require_space(space)
    first = [
        f"{s.key}={s.choices[0] if s.choices else int(s.low) if s.whole else s.low}" for s in space
    ]
    node = fresh([*fixed, *first, "out=outputs/no-run"], folders)
    steps = int(node["steps"])
    fixed = [word for word in fixed if word.partition("=")[0] != "steps"]
    kept = [part for folder in folders for part in ("--config-dir", folder)]
    settings = {
        "words": (*fixed, *kept),
        "space": space,
        "steps": steps,
        "threads": int(node["threads"]),
        "device": str(node["device"]),
        **{key: own[key] for key in ("metric", "direction", "pruner") if key in own},
        **{key: _number(own, key, 0) for key in ("trials", "rungs") if key in own},
        **({"seed": _number(own, "sweep_seed", 0)} if "sweep_seed" in own else {}),
    }
    return parse(Sweep, settings, "sweep")


def _number(own: dict[str, str], key: str, usual: int) -> int:
    try:
        return int(own.get(key, usual))
    except ValueError as error:
        raise ConfigError(f"{key}={own[key]} should be a whole number") from error
