"""Train SimClip, the small image-text encoder of the clip and preference rewards.

    python -m benchmarks.simclip out=DIR envs=A,B steps=N pictures=N seed=N threads=N device=...

Samples scenes of our environments, captions them from the simulators' states, trains, and writes
weights, card and a sheet of examples to DIR; the same command goes on where it stopped.

    python -m benchmarks.simclip out=outputs/encoder
    python -m benchmarks.simclip out=outputs/mine envs=fr3_reach,pendulum steps=800
    embodied train experiment=franka_reach_vlm reward.model=outputs/encoder
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from embodied.core.build import ConfigError, nearest

if TYPE_CHECKING:
    from benchmarks.simclip.captions import Scenes

# Where success is a matter of centimetres, more has to be seen.
SHARES = {"fr3_reach": 6.0, "fr3_push": 2.0, "fr3_lift": 2.0, "cartpole": 0.5, "two_gap": 0.5}
KEYS = ("out", "envs", "steps", "pictures", "seed", "threads", "device")


def run(words: list[str]) -> None:
    """Train with the settings in `words` and write the encoder."""
    given = settings(words)
    import torch

    from benchmarks.simclip.corpus import Plan
    from benchmarks.simclip.evaluate import publish
    from benchmarks.simclip.train import train
    from embodied.core.device import pick_device
    from embodied.vision.simclip import Shape

    torch.set_num_threads(int(given["threads"]))
    out, seed, shape = Path(given["out"]), int(given["seed"]), Shape(views=2)
    count = int(given["pictures"])
    names = given["envs"].split(",") if given["envs"] else known()
    began = time.monotonic()
    scenes = [
        drawn(out, env_name, int(count * SHARES.get(env_name, 1.0)), shape.side, seed)
        for env_name in names
    ]
    fresh = [drawn(out, env_name, 400, shape.side, seed + 1) for env_name in names]
    tracks = [drawn(out, env_name, 0, shape.side, seed + 2) for env_name in names]
    plan = Plan(steps=int(given["steps"]), seed=seed)
    told = Report(plan.steps + plan.polish)
    towers = train(scenes, plan, shape, out / "training.pt", told, pick_device(given["device"]))
    minutes = (time.monotonic() - began) / 60
    lines = publish(out, towers.cpu(), scenes, fresh, tracks, plan, minutes)
    print("\n".join(lines))
    print(f"{out}: simclip.safetensors, simclip.json, simclip.md, simclip.png")
    print(f"next: embodied train experiment=... reward.model={out}")


def settings(words: list[str]) -> dict[str, str]:
    """The settings with their defaults; ConfigError for an unknown one."""
    given = {"envs": "", "steps": "1800", "pictures": "3000", "seed": "0"}
    given |= {"threads": "1", "device": "cpu"}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in KEYS or not equals:
            raise ConfigError(f'"{word}" is not a setting{nearest(key, KEYS)}')
        if key in ("steps", "pictures", "seed", "threads") and not value.isdigit():
            raise ConfigError(f"{key}={value} must be an integer")
        given[key] = value
    if not given.get("out"):
        raise ConfigError("no output folder: out=DIR")
    if int(given["steps"]) < 1 or int(given["pictures"]) < 50 or int(given["threads"]) < 1:
        raise ConfigError("steps and threads must be at least 1, pictures at least 50")
    if unknown := [w for w in given["envs"].split(",") if w and w not in known()]:
        raise ConfigError(
            f"no captions for environment {unknown[0]!r}{nearest(unknown[0], known())}"
        )
    return given


def known() -> list[str]:
    """Environments that have captions."""
    from benchmarks.simclip.scenes import ENVS

    return list(ENVS)


def drawn(out: Path, env_name: str, count: int, side: int, seed: int) -> Scenes:
    """Scenes of an environment, cached in the folder; a `count` of 0 means twelve tracks."""
    from safetensors.torch import load_file, save_file

    from benchmarks.simclip.captions import Scenes
    from benchmarks.simclip.scenes import collect, facts_of

    path = out / "scenes" / f"{env_name}-{count}-{seed}.safetensors"
    told = facts_of(env_name)
    if path.exists():
        read = load_file(path)
        return Scenes(env_name, told.words, **read, moved=(told.climbs,))
    print(
        f"{env_name}: {f'{count} pictures' if count else 'scripted successful episodes'}",
        flush=True,
    )
    scenes = collect(env_name, count or 10**9, side, seed, tracks=0 if count else 12)
    names = ("pictures", "facts", "places", "track")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({name: getattr(scenes, name).contiguous() for name in names}, part)
    part.rename(path)
    return scenes


class Report:
    """Prints the losses and the remaining time every hundred steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began, self.first = steps, 0.0, 0
        self.sums: dict[str, float] = {}

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        if not self.began:
            self.began, self.first = time.monotonic(), step
        for key, value in metrics.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        if step % 100 == 0 or step == self.steps:
            pace = (time.monotonic() - self.began) / max(step - self.first, 1)
            shown = ", ".join(f"{key} {value / 100:.3f}" for key, value in self.sums.items())
            left = pace * (self.steps - step) / 60
            print(f"step {step}/{self.steps}: {shown}; {left:.1f} minutes left", flush=True)
            self.sums = {}


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    try:
        run(sys.argv[1:])
    except ConfigError as error:
        print(f"benchmarks.simclip: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
