"""Measure an environment: how far random exploration has to look ahead in it."""

from __future__ import annotations

import argparse
from typing import Any

from embodied.checks.choose import chosen_part
from embodied.commands import print_rows, split_words, yaml_values
from embodied.compose import allow_from, compose
from embodied.core.build import ConfigError, build, parse
from embodied.core.env import VecEnv
from embodied.evaluation.effective_horizon import Attempt, Config, Gorp

PARTS = ("env.", "allow=")  # words of the environment; the others are settings of the measure


def horizon_command(args: argparse.Namespace) -> None:
    """Print the attempts of GORP, and the effective horizon."""
    names, words = split_words(args.words)
    if len(names) != 1:
        raise ConfigError("name one environment: embodied env horizon ENV [env.KEY=VALUE]")
    allow_from(words)
    own = [word for word in words if word.startswith(PARTS)]
    chosen, given = chosen_part("env", names[0], args.config_dir)

    values = yaml_values([word for word in words if word not in own])
    config: Config = parse(Config, values, "embodied env horizon")
    words = [*chosen, *own, "learner=imitate"]  # a composition has one; it is not built
    node: Any = compose("train", words, args.config_dir, given).node["env"]
    env = build({**node, "num_envs": config.num_envs}, VecEnv)
    try:
        gorp = Gorp(config, env)
        tried = [*gorp.attempts()]
    finally:
        env.close()

    def row(each: Attempt) -> list[str]:
        solved = f"{each.solved} of {config.tries}"
        return [str(each.depth), str(each.completions), f"{each.horizon:.2f}", solved]

    print_rows(("k", "m", "k + log_A m", "solved"), map(row, tried))
    print(said(gorp, tried))


def said(gorp: Any, tried: list[Any]) -> str:
    """What the attempts mean, in one line."""
    count, length = len(gorp.actions), gorp.length
    if not tried or 2 * tried[-1].solved < gorp.config.tries:
        least = f"above {tried[-1].horizon:.2f}" if tried else "not known"
        return f"effective horizon {least}: {gorp.used:,} steps did not suffice (steps=N for more)"
    horizon = tried[-1].horizon
    cost = length**2 * count**horizon
    return (
        f"effective horizon {horizon:.2f}: {count} actions, episodes of up to {length} decisions, "
        f"about {cost:,.0f} steps of random exploration"
    )
