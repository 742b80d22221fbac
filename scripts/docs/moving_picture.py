"""Draws the moving picture of the README: the base policy beside the improved one.

After `embodied demo`, in the folder in which it ran:
MUJOCO_GL=egl python scripts/docs/moving_picture.py outputs/demo/improved docs/images/improved.webp
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import yaml
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

import embodied as em
from embodied.core.actor import Actor
from embodied.core.build import build
from embodied.core.device import forked
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.evaluation.evaluate import evaluate

SEED = 10_000  # the held-out initial states of `embodied improve`
WIDTH, HEIGHT = 480, 360
SHOWN = (60, 0, 480, 340)  # left, top, right, bottom: the part of the picture with the task
SECONDS = 6.0
STEP = 0.08  # s from picture to picture
MARK = 5  # px


def filmed(policy: Policy, env: VecEnv, row: int) -> list[Tensor]:
    """Pictures [HEIGHT, WIDTH, 3] of the episode that `evaluate` plays in env `row`."""
    with forked(SEED), torch.no_grad():
        actor = Actor(policy, env.num_envs, None)
        obs, first = env.reset(SEED), torch.ones(env.num_envs, dtype=torch.bool)
        last: list[Tensor] = []
        env.add_pre_reset_hook(
            lambda ending: last.append(env.render(row, WIDTH, HEIGHT)) if ending[row] else None
        )
        pictures: list[Tensor] = []
        while not last:
            pictures.append(env.render(row, WIDTH, HEIGHT))
            step = env.step(actor(obs, first))
            obs, first = step.obs, step.ended
        return [*pictures, last[0]]


def half(picture: Tensor, title: str, colour: str | None) -> Image.Image:
    """One side of a picture, with its title; a frame of `colour` says how the episode ended."""
    image = Image.fromarray(picture.numpy()).crop(SHOWN)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, image.width, 30), fill="white")
    draw.text((8, 4), title, fill="black", font=ImageFont.load_default(20))
    if colour:
        draw.rectangle((0, 0, image.width - 1, image.height - 1), outline=colour, width=MARK)
    return image


def main(improved: Path, file: Path) -> None:
    """Write the picture of `improved`, the folder of an improvement, to `file`."""
    found = yaml.safe_load((improved / "result.yaml").read_text())
    asked = yaml.safe_load((improved / "improve.yaml").read_text())
    agents = [em.load(asked["policy"]), em.load(found["policy"])]
    envs: list[VecEnv] = [build({**asked["env"], "num_envs": 32}, VecEnv) for _ in agents]
    played = [
        evaluate(agent.policy, env, env.num_envs, SEED)
        for agent, env in zip(agents, envs, strict=True)
    ]
    failed, reached = played[0].success, played[1].success
    assert failed is not None and reached is not None
    telling = (~failed & reached) * played[0].lengths  # the failure that is seen longest
    row = int(telling.argmax())
    films = [filmed(agent.policy, env, row) for agent, env in zip(agents, envs, strict=True)]
    rates = [found["held_out"][way].split()[0] for way in ("base", found["chosen"])]
    titles = [f"base policy: {rates[0]}", f"after embodied improve: {rates[1]}"]
    steps = max(map(len, films))
    stride = max(1, round(steps / (0.8 * SECONDS / STEP)))
    sheets: list[Image.Image] = []
    for at in [*range(0, steps, stride), steps]:
        sides = []
        for film, title, colour in zip(films, titles, ("#c62828", "#2e7d32"), strict=True):
            over = at >= len(film) - 1
            sides.append(half(film[min(at, len(film) - 1)], title, colour if over else None))
        sheet = Image.new("RGB", (2 * sides[0].width + 6, sides[0].height), "white")
        for number, side in enumerate(sides):
            sheet.paste(side, (number * (side.width + 6), 0))
        sheets.append(sheet)
    step = round(1000 * STEP)
    times = [step] * (len(sheets) - 1) + [round(1000 * SECONDS) - step * (len(sheets) - 1)]
    sheets[0].save(
        file, save_all=True, append_images=sheets[1:], duration=times, loop=0, quality=60, method=6
    )
    print(
        f"{file}: initial state {row}, {len(sheets)} pictures, {file.stat().st_size / 1e6:.2f} MB"
    )
    for env in envs:
        env.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
