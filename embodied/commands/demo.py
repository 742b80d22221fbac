"""From demonstrations to an improved policy on a Franka FR3, start to end, in minutes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from embodied.commands.demos import collect_command
from embodied.commands.eval import evaluate_run, print_table
from embodied.commands.train import train

EPISODES, HELD_OUT = 200, 20_000


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"), help="where it all goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*", metavar="key=value", help="for both trainings")
    parser.epilog = "An interrupted demo goes on where it stopped: type the same command again."


def run(args: argparse.Namespace) -> None:
    out, seed = args.out, args.seed
    demos, clone, steered = out / "demos", out / "clone", out / "steered"
    print("\n1/4  60 hesitant demonstrations of lifting a cube\n")
    words = ["env=fr3_lift", "demonstrator.quality=0.2", "episodes=60", f"out={demos}"]
    collect_command(argparse.Namespace(words=words, config_dir=[]))
    print("\n2/4  clone them with a flow policy\n")
    go("fr3_lift_flow", clone, seed, f"demos={demos}", *args.words)
    print("\n3/4  improve the clone by choosing its noise; the only reward is success\n")
    go("fr3_lift_dsrl", steered, seed, f"init={clone}", *args.words)
    print(f"\n4/4  {EPISODES} held-out starts for each: lift the cube within 2.25 seconds\n")
    rows = [
        evaluate_run(run, [f"episodes={EPISODES}", f"seed={HELD_OUT}"], [])
        for run in (clone, steered)
    ]
    print_table(rows)
    print(f"  the same start twice  {picture(clone, steered, out / 'demo.png')}")
    print(f"  video                 {steered / 'videos' / 'success.mp4'}")
    print(f"  reports               {clone / 'report.html'}, {steered / 'report.html'}")
    print(f"next: embodied view {steered}        the arm in your browser")


def go(experiment: str, output: Path, seed: int, *words: str) -> None:
    """Train, or go on with what an interrupted demo left, or do nothing where it is done."""
    if any(output.glob("checkpoints/[0-9]*/about.json")):
        train([f"resume={output}"])
    else:
        train([f"experiment={experiment}", f"output={output}", f"seed={seed}", *words])


def picture(before: Path, after: Path, path: Path, rows: int = 50) -> Path:
    """Two film strips, one above the other, of a start that only `after` masters."""
    import torch
    import yaml

    from embodied.core.build import build
    from embodied.core.checkpoint import load_policy
    from embodied.datasets.lerobot.video import encode_png
    from embodied.evaluation.evaluate import evaluate, film
    from embodied.evaluation.video import strip, write_mp4

    settings: dict[str, Any] = yaml.safe_load((after / "run.yaml").read_text())["env"]
    env = build(settings | {"num_envs": rows})
    policies = [load_policy(run) for run in (before, after)]
    won = [evaluate(policy, env, rows, HELD_OUT).success for policy in policies]
    assert won[0] is not None and won[1] is not None
    row = int((won[1].int() - won[0].int()).argmax())
    films = [film(policy, env, HELD_OUT, row) for policy in policies]
    env.close()
    longest = max(len(frames) for frames in films)
    # The shorter film holds its last picture, so that pictures in a column are of the same moment.
    films = [torch.cat([f, f[-1:].expand(longest - len(f), -1, -1, -1)]) for f in films]
    write_mp4(path.with_suffix(".mp4"), torch.cat(films, 2), 1 / env.spec.dt)
    path.write_bytes(encode_png(torch.cat([strip(frames) for frames in films])))
    return path
