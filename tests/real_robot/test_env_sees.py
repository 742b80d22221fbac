"""An arm as an environment of policies that see: its pictures follow it, and are never old."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, allow, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import require_same
from embodied.datasets.collect import CollectConfig, collect
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.fr3.rendered_camera import Config as PosedConfig
from embodied.envs.fr3.rendered_camera import RenderedCamera
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.cameras.sources import CameraError, Source
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.rl.robot_env import Config, RealEnv
from embodied.rewards.success.classifier import Classifier
from embodied.rewards.wrappers.added_observations import PICTURE
from tests.builders import make_policy, make_reward, node_of, rendered
from tests.real_robot.test_env import PATIENT, robot
from tests.real_robot.trouble import Trouble

pytest.importorskip("cv2", reason="OpenCV is not installed")
SIZE = 32
LIGHT = {"drawing": "light", "threads": 1}
WORLD = node_of("envs.fr3.env.Fr3", task="reach", cameras=["front"], image_size=SIZE, **LIGHT)
LIFT = node_of("policies.scripted.fr3.Scripted", task="lift", quality=1.0)


def seeing(**cameras: Any) -> dict[str, Any]:
    return {**robot(), "cameras": cameras}


@pytest.fixture(scope="module")
def env() -> Iterator[RealEnv]:
    front = rendered("reach", SIZE, 30.0)
    more: dict[str, Any] = {"horizon": 400, "patience": PATIENT, "age": 30.0, "camera": front}
    made = RealEnv(Config(seeing(front=front), WORLD, **more))
    yield made
    made.close()
    assert made.session.daemon.returncode == 0


def apart(
    env: RealEnv, picture: torch.Tensor, obs: dict[str, torch.Tensor], task: str = "reach"
) -> float:
    """Mean difference of `picture` from a drawing of the arm at `obs`, grey levels."""
    names = env.spec.obs["state"].names
    values = dict(zip(names, obs["state"][0].double().tolist(), strict=True))
    scene = RenderedCamera(PosedConfig(task, size=SIZE))
    scene.show(np.array([values[f"q{i}"] for i in range(1, 8)]), values["width"], values)
    drawn = scene.picture().astype(int)
    scene.close()
    return float(np.abs(picture[0].numpy().astype(int) - drawn).mean())


def test_a_camera_that_fails_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allow("tests")
    trouble = Trouble(tmp_path / "trouble", create=True)
    target = "tests.real_robot.troubled.TroubledCamera"
    node = {"_target_": target, "trouble": str(tmp_path / "trouble")}
    made = RealEnv(Config(seeing(front=node), WORLD, patience=PATIENT, age=30.0))
    try:
        made.reset()
        assert not made.step(torch.zeros(1, 4)).log["stopped"].item()
        trouble.dark = 1
        state = open_channels(made.deployment, made.session.folder).state

        def mend() -> None:
            while int(state.fields["mode"][0]) != Mode.IDLE:  # else this test never ends
                state.receive()
                time.sleep(0.05)
            trouble.dark = 0

        hand = threading.Thread(target=mend, daemon=True)
        hand.start()
        ended = False
        while not ended:  # a picture may have come before it went dark
            step = made.step(torch.zeros(1, 4))
            ended = bool(step.ended.item())
        hand.join()
        assert step.log["stopped"].item() and step.truncated.item()
        assert "the arm is held: camera of the chaos suite gives no more" in capsys.readouterr().err
        assert not made.step(torch.zeros(1, 4)).ended.item(), "and on it goes"
        made.config = replace(made.config, patience=0.0)
        trouble.dark = 1
        with pytest.raises(CameraError, match="no more pictures"):
            for _ in range(50):
                made.step(torch.zeros(1, 4))
    finally:
        made.close()


def test_a_camera_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    node = node_of("real_robot.cameras.sources.Folder", path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"observations \(front\): name a camera .*cameras.fro"):
        RealEnv(Config(seeing(wrist=node), WORLD))
    made = RealEnv(Config(seeing(front=node), WORLD, patience=PATIENT))
    try:
        with pytest.raises(ConfigError, match="no PNG or JPEG files"):
            made.reset()
    finally:
        made.close()


@pytest.fixture(scope="module")
def lifting() -> Iterator[RealEnv]:
    world, camera = node_of("envs.fr3.env.Fr3", task="lift"), rendered("lift", SIZE, 30.0)
    made = RealEnv(Config(robot(), world, horizon=200, patience=PATIENT, camera=camera, age=30.0))
    yield made
    made.close()


def test_success_is_seen_on_the_arm(lifting: RealEnv, tmp_path: Path) -> None:
    """What a run does with reward=classifier, which has learned from pictures of the simulation."""
    world = node_of("envs.fr3.env.Fr3", task="lift", **LIGHT)
    photographed = "rewards.wrappers.added_observations.AddRenderObservation"
    wrappers = [node_of(photographed, size=SIZE)]
    pictured = node_of("envs.wrappers.stack.Wrapped", env=world, wrappers=wrappers)
    config = CollectConfig(pictured, LIFT, 12, str(tmp_path / "won"), num_envs=12, images="png")
    collect(config, lambda kept, played: None)
    # The arm is told to stop within some steps of where the simulation was: all of these look won.
    how = {"views": [PICTURE], "channels": [16, 32], "hidden": [32], "lr": 0.003}
    how |= {"last": 3, "margin": 4, "updates": 60, "batch_size": 64}
    learnt = {"data": str(tmp_path / "won"), "training": how, "refit_every": 0}
    node = node_of("rewards.success.classifier.Classifier", **learnt)
    made: Classifier = make_reward(node, lifting.spec, tmp_path / "reward")
    watched: VecEnv = made.augment_env(lifting)
    assert watched is not lifting and watched.spec.obs[PICTURE].shape == (SIZE, SIZE, 3)
    torch.manual_seed(0)
    actor = Actor(build(LIFT, Policy, spec=lifting.spec), 1)
    obs, first = watched.reset(), torch.tensor([True])
    for _ in range(200):
        step = watched.step(actor(obs, first))
        if step.ended.item():
            break
        obs, first = step.obs, step.ended
    assert step.terminated.item(), "it was lifted"
    # A busy machine stops the arm later, and so higher than any success of the simulation: what is
    # asked is that the picture was taken before the arm went home, not what is thought of it.
    seen = step.next_obs[PICTURE]
    there, home = (apart(lifting, seen, at, "lift") for at in (step.next_obs, step.obs))
    assert there < home, (there, home)
    end = float(made.probability(step.next_obs))
    rows = {f"next_obs/{k}": v for k, v in step.next_obs.items()}
    paid = made({**rows, "discount": torch.zeros(1)})
    assert paid.tolist() == [float(end > made.calibration.threshold)]


def test_no_camera_and_an_old_picture(lifting: RealEnv) -> None:
    lifting.reset()
    other = RealEnv(lifting.config.__class__(lifting.config.robot, lifting.config.world))
    with pytest.raises(NotImplementedError, match="no camera"):
        other.render()
    other.close()
    picture = lifting.render(0, 40, 30)
    assert picture.shape == (30, 40, 3) and picture.dtype == torch.uint8
    assert lifting.images.reward_camera is not None
    with pytest.raises(CameraError, match="nothing new"):
        lifting.images.reward_camera.newest(-1.0)
    with pytest.raises(RuntimeError, match="show"):
        RenderedCamera(PosedConfig("lift", size=SIZE)).picture()
    with pytest.raises(ConfigError, match="scene"):
        build({"_target_": "embodied.real_robot.cameras.sources.Rendered", "scenes": {}}, Source)


def test_pictures_follow_the_arm_that_a_policy_moves(env: RealEnv) -> None:
    inner = Fr3(Fr3Config("reach", 1, cameras=("front",), image_size=SIZE))
    require_same(inner.spec, env.spec, "simulation", "arm")
    inner.close()
    images = {"channels": [8, 16], "features": 16}
    flow = make_policy("generative.flow.Flow", env.spec, chunk=1, steps=2, width=32, images=images)
    actor = Actor(flow, 1)
    first = env.reset()
    assert first["front"].shape == (1, SIZE, SIZE, 3) and first["front"].dtype == torch.uint8
    obs, begins, shown = first, torch.tensor([True]), []
    for _ in range(10):
        step = env.step(actor(obs, begins))
        assert not step.log["stopped"].item() and not step.ended.item()
        obs, begins = step.obs, step.ended
        shown.append(obs["front"])
    assert len({bytes(each.numpy().tobytes()) for each in shown}) > 3, "it is seen to move"
    away = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    for _ in range(25):
        moved = env.step(away).obs
    for _ in range(8):  # what is drawn comes a little later than what is measured
        moved = env.step(torch.zeros(1, 4)).obs
    now, before = apart(env, moved["front"], moved), apart(env, first["front"], moved)
    assert before > 1.0 and now < 0.3 * before, (now, before)
    again = env.reset()
    gone, here = apart(env, moved["front"], again), apart(env, again["front"], again)
    assert here < 0.3 * gone, "also where it went home, and its goal is another"


def test_rewards_look_through_the_same_device(env: RealEnv) -> None:
    env.reset()
    assert env.images.reward_camera is env.images.images.local_cameras[0], "opened once"
    assert env.render_batch(torch.tensor([0]), 16).shape == (1, 16, 16, 3)
    other = RealEnv(env.config)
    other.reset()
    assert other.images.reward_camera is env.images.reward_camera
    other.close()
    assert env.reset()["front"].float().std() > 10, "it is still open"
    env.images.images.age = -1.0
    with pytest.raises(CameraError, match="has shown nothing new"):
        env.images.read()
    env.images.images.age = 30.0
