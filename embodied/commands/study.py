"""Run a study, or search settings with Optuna; both end in one HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from embodied.commands import take, yaml_values
from embodied.core.atomic_write import locked
from embodied.core.build import ConfigError, nearest, parse, shell_words, typed
from embodied.core.files import SETTINGS, read_text
from embodied.study.study import COMMANDS, Study, cores, read_study
from embodied.study.study import run as run_study
from embodied.study.sweep import Sweep, launcher, require_space, searched
from embodied.study.sweep import run as run_sweep

KEYS = ("out", "workers", "seeds")


def run(args: argparse.Namespace) -> None:
    given = yaml_values(args.words)
    for key in given.keys() - {*KEYS}:
        raise ConfigError(f'a study has no setting "{key}"{nearest(key, KEYS)}')
    if not args.file.is_file():
        raise ConfigError(f"{args.file} is no file: embodied study FILE.yaml")
    text = read_text(args.file, SETTINGS)
    if "seeds" in given:
        read_study(text, args.file.stem)  # with its error
        node = yaml.safe_load(text) | {"seeds": given["seeds"]}
        text = yaml.safe_dump(node, sort_keys=False)  # the order of variants counts
    study = read_study(text, args.file.stem)
    work = Path(str(given.get("out") or f"outputs/studies/{args.file.stem}"))
    workers = typed(int, given.get("workers", cores()), "workers")
    from embodied.commands.train import fresh

    parser = argparse.ArgumentParser()
    parser.add_argument("--config-dir", action="append", default=[])
    for name, line in trainings(study, work):  # are the settings right, before anything runs?
        options, words = parser.parse_known_args(shell_words(line, name)[2:])
        try:
            fresh(words, options.config_dir)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    from embodied.study.page import lines, results, write_study  # torch: after the mistakes

    with locked(work):
        try:
            run_study(
                study, work, workers, lambda out: write_study(args.file.stem, study, work) and None
            )
        finally:
            page = write_study(args.file.stem, study, work)
            shown = lines(results(study, work))
            print(f"\n{study.metric}\n{shown}\n  report  {page}", flush=True)


def trainings(study: Study, work: Path) -> Iterator[tuple[str, str]]:
    """Titles and command lines of stages that train, and of variants that are only words."""
    seed = study.seeds[0]
    for task in study.tasks(seed, work):
        for line in task.lines.values():
            if line.startswith("embodied train ") and "resume=" not in line:
                yield f"stage {task.name}", line
    for variant, text in study.variants.items():
        if not text.startswith(COMMANDS) and not study.in_order:
            yield f"variant {variant}", study.line(variant, seed, work / "no-run")


SEARCH = {key: key for key in ("trials", "metric", "direction", "rungs", "pruner")}
SEARCH |= {"sweep_seed": "seed"}
OWN = (*SEARCH, "workers", "out", "on")


def sweep(args: argparse.Namespace) -> None:
    slurm, words = take(args.words, "slurm")
    own = yaml_values(word for word in words if word.partition("=")[0] in OWN)
    words = [word for word in words if word.partition("=")[0] not in OWN]
    sweep = sweep_of(own, words, args.config_dir)
    out = Path(str(own.get("out") or "outputs/sweep"))
    workers = typed(int, own.get("workers", cores()), "workers")
    where = launcher(own.get("on", "here"), slurm, sweep.threads, sweep.device)
    # After the mistakes: these import torch.
    from embodied.study.page import best_of, facts, write_sweep

    def done(found: Any) -> None:
        write_sweep(out.name, sweep, found, out)

    try:
        with locked(out):
            study = run_sweep(sweep, out, workers, done, where)
            page, best = write_sweep(out.name, sweep, study, out), best_of(sweep, facts(study, out))
    finally:
        where.close()
    if best is not None:
        shown = " ".join(f"{key}={value}" for key, value in best["settings"].items())
        print(f"\nbest: trial {best['trial']}, {sweep.metric} {best['value']:.4g}: {shown}")
    print(f"  report  {page}")


def sweep_of(own: dict[str, Any], words: list[str], folders: list[str]) -> Any:
    """The sweep, after one training with its first values was composed: mistakes cost nothing."""
    from embodied.commands.train import fresh

    found = {word: searched(word) for word in words}
    fixed = [word for word, space in found.items() if space is None]
    space = tuple(each for each in found.values() if each is not None)
    require_space(space)
    first = [
        f"{s.key}={s.choices[0] if s.choices else int(s.low) if s.whole else s.low}" for s in space
    ]
    node = fresh([*fixed, *first, "out=outputs/no-run"], folders)
    fixed = [word for word in fixed if word.partition("=")[0] != "steps"]
    kept = [part for folder in folders for part in ("--config-dir", folder)]
    settings = {
        "words": (*fixed, *kept),
        "space": space,
        "steps": int(node["steps"]),
        "threads": int(node["threads"]),
        "device": str(node["device"]),
        **{SEARCH[key]: value for key, value in own.items() if key in SEARCH},
    }
    return parse(Sweep, settings, "sweep")
