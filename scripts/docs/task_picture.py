"""Draws the picture of the ten tasks in docs/environments_arms.md: how each looks when it is done.

MUJOCO_GL=egl python scripts/docs/task_picture.py docs/images/world_fr3_tasks.png
"""

from __future__ import annotations

import sys

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from embodied.core.actor import Actor
from embodied.envs.fr3.language import INSTRUCTIONS, Config, LanguageTasks
from embodied.policies.scripted import fr3

WIDTH = 240
HEIGHT = 180
CAPTION = 16
COLUMNS = 5


def finished(name: str, seed: int) -> Tensor:
    """The image [HEIGHT, WIDTH, 3] (uint8) in which the demonstrator has just finished a task."""
    env = LanguageTasks(Config(tasks=(name,), num_envs=1))
    actor = Actor(fr3.ScriptedTasks(fr3.TasksConfig(mistakes=0.0), env.spec), 1)
    images: list[Tensor] = []
    env.add_pre_reset_hook(lambda rows: images.append(env.render(0, WIDTH, HEIGHT)))
    with torch.no_grad():
        obs = env.reset(seed=seed)
        first = torch.ones(1, dtype=torch.bool)
        while not images:
            step = env.step(actor(obs, first))
            obs = step.obs
            first = step.ended
    env.close()
    return images[0]


def main(path: str) -> None:
    """Write the picture to `path`."""
    torch.manual_seed(0)
    rows = -(-len(INSTRUCTIONS) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * WIDTH, rows * (HEIGHT + CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, task in enumerate(INSTRUCTIONS):
        x, y = number % COLUMNS * WIDTH, number // COLUMNS * (HEIGHT + CAPTION)
        sheet.paste(Image.fromarray(finished(task.name, seed=number).numpy()), (x, y))
        draw.text((x + 4, y + HEIGHT + 2), task.text, fill="black")
    sheet.quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
