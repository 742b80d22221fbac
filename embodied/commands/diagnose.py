"""Measure what can help a policy, and say which ways may improve it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from embodied.commands import print_rows, require_at_least, require_folders
from embodied.commands.eval import run_subject, runs_in, served_subject
from embodied.core.build import ConfigError, parse


def run(args: argparse.Namespace) -> None:
    runs, words = runs_in(args.words)
    if len(runs) != 1:
        raise ConfigError("give one policy: embodied diagnose RUN [env=NAME] [out=DIR]")
    from embodied.policies.remote.address import allow_typed, is_address

    if is_address(runs[0]):
        allow_typed(runs)
        subject = served_subject(runs[0], words, args.config_dir, "diagnose")
        usual = Path("outputs") / "diagnosis"
    else:
        require_folders(runs)
        subject = run_subject(Path(runs[0]), words, args.config_dir, "diagnose")
        usual = Path(subject.name) / "diagnosis"

    import torch

    from embodied.improvement import diagnosis, pages
    from embodied.improvement.advice import NOTHING, advise, measured

    node = subject.node
    require_at_least(node, {"threads": 1})
    torch.set_num_threads(node["threads"])
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {line}", flush=True)

    recorded = [] if is_address(runs[0]) else recordings(Path(runs[0]), say)
    config = parse(diagnosis.Config, {f.name: node[f.name] for f in fields(diagnosis.Config)}, "")
    found = diagnosis.diagnose(subject.make, subject.env, config, subject.execute, say)
    out = usual if node["out"] is None else Path(node["out"])
    page = pages.write_diagnosis(out, subject.name, subject.env, config, found, recorded)
    print_rows(("measured", ""), measured(found.diagnosis))
    if recorded:
        print_rows(("its recordings", ""), recorded)
    ways = [(each.way, f"+{each.gain:.0%}", each.reason) for each in advise(found.diagnosis)]
    if ways:
        print_rows(("what may help", "may add", "why"), ways)
    else:
        print(NOTHING)
    print(f"report: {page}")


def recordings(run: Path, say: Callable[[str], None]) -> list[tuple[str, str]]:
    """The quality of the recordings that a run was trained with, all together; none without any."""
    from embodied.commands.eval import trained_with
    from embodied.core import checkpoint
    from embodied.datasets.hub import local_folder
    from embodied.datasets.lerobot.reader import DatasetError, read_episodes
    from embodied.datasets.transitions import in_order_of, joined
    from embodied.reports.quality import Config, quality

    demos = trained_with(checkpoint.find(run), named=True).get("demos") or []
    paths = [demos] if isinstance(demos, str) else demos
    try:
        parts = [read_episodes(local_folder(path)) for path in paths]
        parts = [in_order_of(part, parts[0].spec, "recordings") for part in parts]
        return quality(joined(parts), Config()).rows() if parts else []
    except (ConfigError, DatasetError, OSError) as error:
        say(f"nothing is said of its recordings: {error}")
        return []
