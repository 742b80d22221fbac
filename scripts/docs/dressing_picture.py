"""Draws the path along the arm in four pictures, and what the camera's cloud has of the last.

MUJOCO_GL=egl python scripts/docs/dressing_picture.py docs/images/dressing.png
"""

from __future__ import annotations

import sys

import torch
from matplotlib import pyplot

from embodied.core.spec import DEMONSTRATOR
from embodied.envs.mujoco.dressing import Config, Dressing

SHOWN = (0, 20, 40, 64)  # steps
SHADES = ("tab:blue", "tab:orange", "k")  # of cloth, arm and gripper


def main(out: str) -> None:
    env = Dressing(Config(num_envs=1, regions=(16,), play=True, points=256))
    obs = env.reset(1)
    _, axes = pyplot.subplots(1, len(SHOWN) + 1, figsize=(12, 2.6))
    for step in range(SHOWN[-1] + 1):
        if step in SHOWN:
            frame = env.render_batch(torch.tensor([0]), 400)[0]
            axes[SHOWN.index(step)].imshow(frame[40:300])
        cloud = obs["points"][0]
        obs = env.step(obs[DEMONSTRATOR]).obs
    for number, shade in enumerate(SHADES):
        own = cloud[cloud[:, 3 + number] > 0]
        axes[-1].scatter(own[:, 0], own[:, 2], s=6, c=shade)
    axes[-1].set_aspect("equal")
    for each in axes:
        each.axis("off")
    pyplot.tight_layout()
    pyplot.savefig(out, dpi=80)


if __name__ == "__main__":
    main(*sys.argv[1:])
