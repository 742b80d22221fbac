"""Ask a policy of every reward for one, by reward, goal, demonstration or frames; no training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from embodied.commands import require_datasets, yaml_values
from embodied.core import checkpoint, formats
from embodied.core.build import ConfigError, parse
from embodied.core.policy import Policy
from embodied.evaluation import prompts
from embodied.evaluation.loading import trained_with
from embodied.policies.abilities import TakesPrompts

USAGE = "embodied prompt RUN reward=DIR | goal={ELEMENT: VALUE} | demos=DIR | frames=DIR, out=DIR"


def run(args: argparse.Namespace) -> None:
    (run,) = args.names
    if not args.words:
        raise ConfigError(USAGE)
    config: prompts.Config = parse(prompts.Config, yaml_values(args.words), "embodied prompt")
    require_one(config)
    source = next(s for s in (config.reward, config.demos, config.among) if s is not None)
    require_datasets([s for s in (source, config.frames) if s is not None])
    saved = checkpoint.find(run)
    policy = checkpoint.load_policy(saved)
    if not isinstance(policy, TakesPrompts):
        raise ConfigError(f"{run} has one task: prompts are for a policy of every reward")
    u, said = prompts.vector(policy, config, source)
    policy.prompt(u)
    write(policy, saved, Path(config.out), {k: v for k, v in vars(config).items() if v})
    print(f"{said}\nwrote     {config.out}\nnext      embodied eval {config.out}")


def require_one(config: prompts.Config) -> None:
    named = [name for name in ("reward", "goal", "demos", "frames") if getattr(config, name)]
    if len(named) != 1:
        raise ConfigError(f"one prompt is needed, and {named or 'none'} given: {USAGE}")
    looked_up = named[0] in ("goal", "frames")
    if looked_up and config.among is None:
        raise ConfigError(f"{named[0]}= is looked up in recordings: among=DIR")
    if config.among is not None and not looked_up:
        raise ConfigError(f"among= has no effect with {named[0]}=")
    if config.last is not None and named[0] not in ("demos", "frames"):
        raise ConfigError(f"last= has no effect with {named[0]}=")
    if Path(config.out).exists():
        raise ConfigError(f"out={config.out} exists; give the prompted run another folder")


def write(policy: Policy, saved: Path, out: Path, prompt: dict[str, Any]) -> None:
    step = int(checkpoint.read_about(saved)["step"])
    settings = {"format": formats.RUN, **trained_with(saved), "name": out.name, "out": str(out)}
    about = {"prompt": prompt, "metrics": {}}
    checkpoint.save(out / "checkpoints" / saved.name, policy, step, about=about)
    (out / "run.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
