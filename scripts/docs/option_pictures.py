"""Draws the pictures of the gallery: every environment whose packages are installed.

MUJOCO_GL=egl python scripts/docs/option_pictures.py docs/images/options [NAME ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image

import embodied as em
from embodied.compose import options, search_folders
from embodied.mistakes import mistake

WIDTH, HEIGHT = 320, 240
STEPS = 12  # of random actions: a policy at work, not the initial state


def picture(name: str) -> Image.Image:
    """The environment `name` after some random steps."""
    torch.manual_seed(0)
    env = em.make_env(name, num_envs=1)
    try:
        env.reset(seed=0)
        for _ in range(STEPS):
            env.step(env.spec.act.sample(1).to(env.device))
        return Image.fromarray(env.render(0, WIDTH, HEIGHT).cpu().numpy())
    finally:
        env.close()


def main(folder: Path, names: list[str]) -> None:
    """Write FOLDER/env/NAME.webp of each; a line for each environment without a picture."""
    (folder / "env").mkdir(parents=True, exist_ok=True)
    for name in names or options("env", search_folders()):
        try:
            drawn = picture(name)
        except Exception as error:  # any simulator's
            print(f"{name}: no picture: {mistake(error) or repr(error)}", flush=True)
            continue
        drawn.save(folder / "env" / f"{name}.webp", quality=72, method=6)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
