"""Run a complete example on a Franka FR3: demonstrations, imitation, fine-tuning, evaluation."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from embodied.commands.demos import collect_command
from embodied.commands.eval import evaluate_run, print_table
from embodied.commands.train import train

EPISODES, HELD_OUT = 200, 20_000
PICTURED = 50  # initial states among which one is looked for that only the fine-tuned policy wins
SEARCH = ["episodes=50", "seed=30000"]  # initial states on which the best sampler is chosen
SAMPLERS = [f"policy.steps={k} execute={n}".split() for k, n in product((1, 4, 16), (8, 1))]
TWICE = "env.horizon=160"
OPEN = "env.ranges={can_distance: [0.2, 0.26]}"  # both ways are open, as recorded


def run(args: argparse.Namespace) -> None:
    out, seed = args.out, args.seed
    demos, clone, steered = out / "demos", out / "clone", out / "steered"
    print("\n1/4  collect 60 demonstrations of lifting a cube behind a can, left or right of it\n")
    words = ["env=fr3_detour", OPEN, "demonstrator.quality=0.6", "episodes=60", f"out={demos}"]
    collect_command(argparse.Namespace(words=words, config_dir=[]))
    print("\n2/4  train a flow policy by behavior cloning\n")
    go("fr3_detour_flow", clone, seed, f"demos={demos}", *args.words)
    print("\n3/4  one way is closed by a second can; fine-tune by latent-noise RL (DSRL) with a")
    print("     sparse success reward\n")
    go("fr3_detour_dsrl", steered, seed, f"init={clone}", *args.words)
    print(f"\n4/4  evaluate on {EPISODES} held-out initial states; a can knocked over has failed\n")
    print_table(compared(clone, steered))
    print(f"  same initial state    {picture(clone, steered, out / 'demo.png')}")
    print(f"  video                 {steered / 'videos' / 'success.mp4'}")
    print(f"  reports               {clone / 'report.html'}, {steered / 'report.html'}")
    print(f"next: embodied view {steered}        opens the 3D viewer in your browser")


def compared(clone: Path, steered: Path) -> list[dict[str, Any]]:
    """The rows of the table: the base policy as it is, with the best of SAMPLERS, with that and
    twice the time, and the fine-tuned policy."""
    best = max(SAMPLERS, key=lambda words: evaluate_run(clone, [*SEARCH, *words], [])["successes"])
    cases = {
        str(clone): (clone, []),
        f"  {' '.join(best)}": (clone, best),
        "  and twice the time": (clone, [*best, TWICE]),
        str(steered): (steered, []),
    }
    held_out = [f"episodes={EPISODES}", f"seed={HELD_OUT}"]
    rows = {
        name: evaluate_run(run, [*held_out, *words], []) for name, (run, words) in cases.items()
    }
    return [{k: v for k, v in row.items() if k != "policy"} | {"run": n} for n, row in rows.items()]


def go(experiment: str, output: Path, seed: int, *words: str) -> None:
    """Train, or resume the run of an interrupted demo; does nothing if it is complete."""
    if any(output.glob("checkpoints/[0-9]*/about.json")):
        train([f"resume={output}"])
    else:
        train([f"experiment={experiment}", f"out={output}", f"seed={seed}", *words])


def picture(before: Path, after: Path, path: Path) -> Path:
    """Write film strips of both policies from an initial state in which only `after` succeeds."""
    import torch

    from embodied.core.build import build
    from embodied.core.checkpoint import load_policy
    from embodied.core.env import VecEnv
    from embodied.core.saved_node import read_run_settings
    from embodied.datasets.lerobot.video import encode_png
    from embodied.evaluation.evaluate import evaluate, film
    from embodied.evaluation.video import strip, write_mp4

    settings: dict[str, Any] = read_run_settings(after / "run.yaml")["env"]
    env = build(settings | {"num_envs": PICTURED}, VecEnv)
    policies = [load_policy(run) for run in (before, after)]
    won = [evaluate(policy, env, PICTURED, HELD_OUT).success for policy in policies]
    assert won[0] is not None and won[1] is not None
    row = int((won[1].int() - won[0].int()).argmax())
    films = [film(policy, env, HELD_OUT, row) for policy in policies]
    env.close()
    longest = max(len(frames) for frames in films)
    # Repeat the shorter film's last frame, so that both frames in a column have the same time.
    films = [torch.cat([f, f[-1:].expand(longest - len(f), -1, -1, -1)]) for f in films]
    write_mp4(path.with_suffix(".mp4"), torch.cat(films, 2), 1 / env.spec.dt)
    path.write_bytes(encode_png(torch.cat([strip(frames) for frames in films])))
    return path
