"""Check that an environment, policy, learner, reward, teacher or robot keeps its contract."""

from __future__ import annotations

import argparse
import sys

from embodied.checks.choose import KINDS, chosen_part
from embodied.compose import allow_from
from embodied.core.build import ConfigError, nearest


def run(args: argparse.Namespace) -> None:
    """Exit status 1 if something is wrong."""
    kind = args.kind
    name = args.name
    if kind not in KINDS:
        raise ConfigError(f'there is nothing to check in "{kind}"{nearest(kind, KINDS)}')
    allow_from(args.words)
    chosen_part(kind, name, args.config_dir)  # ConfigError, before torch is imported
    from embodied.checks.check import run_checks
    from embodied.checks.subjects import subjects

    wrong = count = 0
    printed: set[str] = set()  # the same mistake fails several checks
    for checked in subjects(kind, name, args.words, args.config_dir):
        if checked.title:
            print(checked.title)
        for result in run_checks(checked.checks, checked.subject):
            count += 1
            wrong += result.kind == "wrong"
            if result.kind == "wrong" and result.line in printed:
                continue
            printed.add(result.line)
            line = {"ok": result.says, "skipped": f"{result.says}: not checked, {result.line}"}
            print(f"{result.kind:>7}  {line.get(result.kind, result.line)}", flush=True)
    if wrong:
        print(f"{name}: {wrong} of {count} checks found something wrong")
        sys.exit(1)
    print(f"{name}: sound")
