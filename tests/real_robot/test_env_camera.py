"""Success seen in the pictures of an arm's camera: trained in simulation, used as it is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.datasets.collect import CollectConfig, collect
from embodied.real_robot.cameras.sources import CameraError, Source
from embodied.real_robot.rl.robot_env import Config, RealEnv
from embodied.rewards.success.classifier import Classifier
from embodied.rewards.wrappers.added_observations import PICTURE
from tests.real_robot.test_env import PATIENT, robot

SIZE = 32
LIFT = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "lift", "quality": 1.0}
CAMERA = {
    "_target_": "embodied.real_robot.cameras.sources.Rendered",
    "fps": 100.0,
    "scene": {
        "_target_": "embodied.envs.fr3.rendered_camera.RenderedCamera",
        "task": "lift",
        "size": SIZE,
    },
}


@pytest.fixture(scope="module")
def env() -> Iterator[RealEnv]:
    world = {"_target_": "embodied.envs.fr3.env.Fr3", "task": "lift"}
    made = RealEnv(Config(robot(), world, horizon=200, patience=PATIENT, camera=CAMERA, age=30.0))
    yield made
    made.close()


def test_success_is_seen_on_the_arm(env: RealEnv, tmp_path: Path) -> None:
    """What a run does with reward=classifier, which has learned from pictures of the simulation."""
    world = {
        "_target_": "embodied.envs.fr3.env.Fr3",
        "task": "lift",
        "drawing": "light",
        "threads": 1,
    }
    photographed = {
        "_target_": "embodied.rewards.wrappers.added_observations.AddRenderObservation",
        "size": SIZE,
    }
    pictured = {
        "_target_": "embodied.envs.wrappers.stack.Wrapped",
        "env": world,
        "wrappers": [photographed],
    }
    config = CollectConfig(pictured, LIFT, 60, str(tmp_path / "won"), num_envs=12, images="png")
    collect(config, lambda kept, played: None)
    # The arm is told to stop within some steps of where the simulation was: all of these look won.
    how = {"views": [PICTURE], "channels": [16, 32], "hidden": [32], "lr": 0.003}
    how |= {"last": 3, "margin": 4}
    node: dict[str, Any] = {
        "_target_": "embodied.rewards.success.classifier.Classifier",
        "data": str(tmp_path / "won"),
        "training": {**how, "updates": 500, "batch_size": 64},
        "refit_every": 0,
    }
    made: Classifier = build(
        node,
        Classifier,
        spec=env.spec,
        device=torch.device("cpu"),
        seed=0,
        folder=tmp_path / "reward",
    )
    watched: VecEnv = made.augment_env(env)
    assert watched is not env and watched.spec.obs[PICTURE].shape == (SIZE, SIZE, 3)
    torch.manual_seed(0)
    actor = Actor(build(LIFT, Policy, spec=env.spec), 1)
    obs, first = watched.reset(), torch.tensor([True])
    begun = float(made.probability(obs))
    for _ in range(200):
        step = watched.step(actor(obs, first))
        if step.ended.item():
            break
        obs, first = step.obs, step.ended
    assert step.terminated.item(), "it was lifted"
    end, after = float(made.probability(step.next_obs)), float(made.probability(step.obs))
    # Its absolute value depends on the exact step in which the arm is stopped.
    assert end > 0.01 and end > 50 * max(begun, after), (begun, end, after)
    rows = {f"next_obs/{k}": v for k, v in step.next_obs.items()}
    paid = made({**rows, "discount": torch.zeros(1)})
    assert paid.tolist() == [float(end > made.calibration.threshold)]


def test_no_camera_and_an_old_picture(env: RealEnv) -> None:
    env.reset()
    other = RealEnv(env.config.__class__(env.config.robot, env.config.world))
    with pytest.raises(NotImplementedError, match="no camera"):
        other.render()
    other.close()
    picture = env.render(0, 40, 30)
    assert picture.shape == (30, 40, 3) and picture.dtype == torch.uint8
    assert env.images.reward_camera is not None
    with pytest.raises(CameraError, match="nothing new"):
        env.images.reward_camera.newest(-1.0)
    with pytest.raises(ConfigError, match="scene"):
        build({"_target_": "embodied.real_robot.cameras.sources.Rendered", "scenes": {}}, Source)
