"""A policy that sees: its pictures come from cameras, or it says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError, allow, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.real_robot.cameras.policy_images import PolicyImages
from embodied.real_robot.cameras.sources import CameraError
from embodied.real_robot.policy.decider import Decider
from embodied.real_robot.policy.observer import Observer
from embodied.real_robot.recorder import recorded_spec
from tests.builders import rendered
from tests.real_robot.test_control import Bench
from tests.real_robot.test_decide import GOAL, SPEC, tool
from tests.real_robot.trouble import Trouble

PATIENT = 60.0
SEEING = SPEC.with_obs(front=Leaf((4, 6, 3), "uint8", 0, 255))
pytest.importorskip("cv2", reason="OpenCV is not installed")


@pytest.fixture
def camera(tmp_path: Path) -> dict[str, Any]:
    allow("tests")
    Trouble(tmp_path / "trouble", create=True)
    target = "tests.real_robot.troubled.TroubledCamera"
    return {"_target_": target, "trouble": str(tmp_path / "trouble")}


def test_pictures_reach_the_policy_as_large_as_it_wants_them(
    tmp_path: Path, camera: dict[str, Any]
) -> None:
    bench = Bench(tmp_path)
    node = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "reach", "quality": 1.0}
    observer = Observer(SEEING, 7, tool, GOAL, pictures=("front",))
    with PolicyImages(SEEING, {"front": camera}, PATIENT) as eyes:
        boxes = bench.there.state, bench.there.chunk
        policy = build(node, Policy, spec=SEEING)
        decider = Decider(policy, observer, *boxes, lambda sent: tool(sent[None])[0], eyes)
        bench.control.turn()
        assert decider.turn()
        seen = decider.seen["front"]
        assert seen.shape == (1, 4, 6, 3) and seen.float().std() == 0 and int(seen.max()) > 0
        Trouble(tmp_path / "trouble").dark = 1
        with pytest.raises(CameraError, match="gives no more pictures"):
            while True:
                bench.control.turn()
                decider.turn()


def test_rendered_scenes_show_what_was_measured() -> None:
    """The same picture as the world draws of itself, with the same joints and the same cube."""
    settings = {"objects": "privileged", "cameras": ("front",), "image_size": 32, "threads": 1}
    world = Fr3(Fr3Config("lift", 1, drawing="light", **settings))  # pyright: ignore[reportArgumentType]
    obs = world.reset(4)
    names = world.spec.obs["privileged/state"].names
    values = dict(zip(names, obs["privileged/state"][0].double().tolist(), strict=True))
    with PolicyImages(world.spec, {"front": rendered("lift", 32, 20.0)}, PATIENT) as eyes:
        assert len(eyes.scenes) == 1
        with pytest.raises(RuntimeError, match="show"):
            eyes.scenes[0].picture()
        q = np.array([values[f"q{i}"] for i in range(1, 8)])
        eyes.scenes[0].show(q, values["width"], values)
        ours, theirs = eyes.read()["front"], obs["front"][0].numpy()
    world.close()
    assert np.abs(ours.astype(int) - theirs).mean() < 0.2 and np.ptp(ours) > 100


def test_what_no_camera_takes_is_one_line(camera: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"observations \(front\): name a camera for it \(robot"):
        PolicyImages(SEEING, {"wrist": camera}, 1.0)
    stack = SPEC.with_obs(front=Leaf((4, 6, 9), "uint8", 0, 255))
    with pytest.raises(ConfigError, match="9 channels"):
        PolicyImages(stack, {"front": camera}, 1.0)
    assert PolicyImages(SPEC, {"front": camera}, 1.0).read() == {}, "nobody wants it: closed"
    recorded = recorded_spec(SEEING, {"side": (6, 4), "front": (9, 9)}).obs
    assert [*recorded] == ["state", "front", "side"]
    assert recorded["front"].shape == (4, 6, 3), "as it is seen"
