"""Run a complete example on a Franka FR3: demonstrations, a base policy, and what improves it."""

from __future__ import annotations

import argparse

from embodied.commands import improve
from embodied.commands.demos import collect
from embodied.commands.train import train

OPEN = "env.ranges={can_distance: [0.2, 0.26]}"  # both ways are open, as recorded
DEMOS = ["env=fr3_detour", OPEN, "demonstrator.quality=0.6", "episodes=60"]
UPDATES = 2000  # of each cloning
CLONE = ["experiment=fr3_detour_flow", f"steps={UPDATES}", "video=false", "eval.episodes=50"]
WAYS = "ways=[own_successes,ticket,dsrl_shared]"
RECIPES = f"recipes={{own_successes: {{updates: {UPDATES}}}}}"
RACE = ["env=fr3_detour", WAYS, RECIPES, "steps=24000", "episodes=50", "workers=2"]


def run(args: argparse.Namespace) -> None:
    out = args.out
    seed = f"seed={args.seed}"
    demos = out / "demos"
    clone = out / "clone"
    print("\n1/3  collect 60 demonstrations of lifting a cube behind a can, left or right of it\n")
    collect([*DEMOS, f"out={demos}"])
    print("\n2/3  train a flow policy by behavior cloning\n")
    begun = any(clone.glob("checkpoints/[0-9]*/about.json"))
    train([f"resume={clone}"] if begun else [*CLONE, f"demos={demos}", seed, f"out={clone}"])
    print("\n3/3  one way is closed by a second can, and a can knocked over has failed; ways to")
    print("     improve the policy race, with a sparse success reward\n")
    words = [*RACE, f"demos={demos}", f"out={out / 'improved'}", seed, *args.words]
    improve.report(improve.improve(str(clone), words, tell=improve.print_line))
