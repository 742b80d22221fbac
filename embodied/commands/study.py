"""Run a study: variants over seeds in parallel, with intervals, on one HTML page."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from embodied.core.build import ConfigError, nearest
from embodied.study.study import COMMANDS, Study, cores, read_study
from embodied.study.study import run as run_study

KEYS = ("out", "workers", "seeds")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the study's YAML file")
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="out=DIR workers=N seeds=[0,1,2]"
    )
    parser.epilog = (
        "a study:\n"
        "  metric: eval/return\n"
        "  seeds: [0, 1, 2]\n"
        "  base: experiment=pendulum_sac steps=4000      # words of `embodied train`\n"
        "  variants:\n"
        "    sac:\n"
        "    wide: policy.hidden=[512,512]\n\n"
        "examples:\n"
        "  embodied study my_study.yaml\n"
        "  embodied study my_study.yaml workers=4 out=outputs/my_study\n"
        "The same command goes on with a study that was interrupted."
    )


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
        text = yaml.safe_dump(yaml.safe_load(text) | {"seeds": yaml.safe_load(given["seeds"])})
    study = read_study(text, args.file.stem)
    work = Path(given.get("out") or Path("outputs") / "studies" / args.file.stem)
    try:
        workers = int(given.get("workers") or cores())
    except ValueError as error:
        raise ConfigError(f"workers={given['workers']} should be a number") from error
    for variant in study.variants:
        require_composed(study, variant, work)
    from embodied.study.page import lines, results, write_study  # torch: after the mistakes

    try:
        run_study(
            study, work, workers, lambda out: write_study(args.file.stem, study, work) and None
        )
    finally:
        page = write_study(args.file.stem, study, work)
        print(f"\n{study.metric}\n{lines(results(study, work))}\n  report  {page}", flush=True)


def require_composed(study: Study, variant: str, work: Path) -> None:
    """ConfigError with the variant's name if its settings are wrong, before anything runs."""
    from embodied.commands.train import fresh

    text = study.variants[variant]
    if text.startswith(COMMANDS) or study.in_order:
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-dir", action="append", default=[])
    line = study.line(variant, study.seeds[0], work / "no-run")
    given, words = parser.parse_known_args(shlex.split(line)[2:])
    try:
        fresh(words, given.config_dir)
    except ConfigError as error:
        raise ConfigError(f"variant {variant}: {error}") from error
