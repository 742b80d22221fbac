"""Draws the pictures of the gallery: every environment whose packages are installed.

MUJOCO_GL=egl python scripts/docs/option_pictures.py docs/images/options [NAME ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch
import yaml
from PIL import Image

import embodied as em
from embodied.compose import options, search_folders
from embodied.core.env import VecEnv
from embodied.mistakes import mistake
from embodied.viewer.scene.detect import MujocoScene, detect_scene

WIDTH, HEIGHT = 320, 240
STEPS = 12  # of random actions: a policy at work, not the initial state
SKY = (226, 232, 240)
SEEDS = {"quadrotor_goto": 15}  # of an initial state near the camera; others 0
CAMERAS = {"envpool_myo_hand_cup": 5}  # others: the free camera of EnvPool


def made(name: str) -> VecEnv:
    """The environment `name`, able to draw."""
    node: Any = yaml.safe_load(options("env", search_folders())[name].read_text())
    settings: dict[str, Any] = {"num_envs": 1}
    if node["_target_"].endswith(".EnvPool"):
        drawn = {"render_mode": "rgb_array", "render_camera_id": CAMERAS.get(name, -1)}
        settings["kwargs"] = {**node.get("kwargs", {}), **drawn}
    return em.make_env(name, **settings)


def picture(name: str) -> Image.Image:
    """The environment `name` after some random steps."""
    torch.manual_seed(0)
    env = made(name)
    try:
        env.reset(seed=SEEDS.get(name, 0))
        for _ in range(STEPS):
            env.step(env.spec.act.sample(1).to(env.device))
        scene = detect_scene(env)
        if isinstance(scene, MujocoScene) and not has_sky(scene.scene()[0]):
            return Image.fromarray(under_a_sky(*scene.scene()))
        return Image.fromarray(env.render(0, WIDTH, HEIGHT).cpu().numpy())
    finally:
        env.close()


def has_sky(model: mujoco.MjModel) -> bool:
    return bool((model.tex_type == mujoco.mjtTexture.mjTEXTURE_SKYBOX.value).any())


def under_a_sky(model: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
    """A scene that has no sky, which is black, and perhaps no light: before a light ground."""
    if not model.nlight:
        model.vis.headlight.ambient[:] = model.vis.headlight.diffuse[:] = 0.6
    with mujoco.Renderer(model, HEIGHT, WIDTH) as renderer:
        camera = 0 if model.ncam else -1
        renderer.update_scene(data, camera)
        drawn = renderer.render().copy()
        renderer.enable_segmentation_rendering()
        renderer.update_scene(data, camera)
        drawn[renderer.render()[..., 0] < 0] = SKY
    return drawn


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
