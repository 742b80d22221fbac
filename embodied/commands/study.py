"""Run a study: variants over seeds in parallel, with intervals, on one HTML page."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

from embodied.core.build import ConfigError, nearest
from embodied.study.stages import COMMANDS
from embodied.study.study import Study, cores, read_study
from embodied.study.study import run as run_study

KEYS = ("out", "workers", "seeds")


def run(args: argparse.Namespace) -> None:
    import yaml

    given = {word.partition("=")[0]: word.partition("=")[2] for word in args.words}
    for key in given.keys() - {*KEYS}:
        raise ConfigError(f'a study has no setting "{key}"{nearest(key, KEYS)}')
    if not args.file.is_file():
        raise ConfigError(f"{args.file} is no file: embodied study FILE.yaml")
    text = args.file.read_text()
    if "seeds" in given:
        read_study(text, args.file.stem)  # with its error
        node = yaml.safe_load(text) | {"seeds": yaml.safe_load(given["seeds"])}
        text = yaml.safe_dump(node, sort_keys=False)  # the order of variants counts
    study = read_study(text, args.file.stem)
    work = Path(given.get("out") or Path("outputs") / "studies" / args.file.stem)
    try:
        workers = int(given.get("workers") or cores())
    except ValueError as error:
        raise ConfigError(f"workers={given['workers']} should be a number") from error
    for name, line in trainings(study, work):
        require_composed(name, line)
    from embodied.study.page import lines, results, write_study  # torch: after the mistakes

    try:
        run_study(
            study, work, workers, lambda out: write_study(args.file.stem, study, work) and None
        )
    finally:
        page = write_study(args.file.stem, study, work)
        print(f"\n{study.metric}\n{lines(results(study, work))}\n  report  {page}", flush=True)


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


def require_composed(title: str, line: str) -> None:
    """ConfigError with the title if the settings of a training are wrong, before anything runs."""
    from embodied.commands.train import fresh

    parser = argparse.ArgumentParser()
    parser.add_argument("--config-dir", action="append", default=[])
    given, words = parser.parse_known_args(shlex.split(line)[2:])
    try:
        fresh(words, given.config_dir)
    except ConfigError as error:
        raise ConfigError(f"{title}: {error}") from error
