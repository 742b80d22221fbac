"""Every robot's YAML: it is one, what it is made of fits together, and nothing that is somebody's
own has a default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied.compose import compose
from embodied.core.build import ConfigError, build
from embodied.embodiments.controller import Controller
from real_robot.assemble import build_chain, forward_kinematics
from real_robot.deployment import Deployment
from real_robot.drivers.driver import Driver
from real_robot.safety.workspace import Workspace

FILES = sorted(Path(__file__).parents[2].glob("configs/robot/*.yaml"))
MISSING = "???"


def robot(file: Path) -> dict[str, Any]:
    """As `embodied deploy` composes it, with a task in front of it where it has a world."""
    text = yaml.safe_load(file.read_text())
    words = [
        f"robot.{part}.world.task=reach"
        for part in ("driver", "emulator")
        if (text.get(part) or {}).get("world")
    ]
    return compose("deploy", [f"robot={file.stem}", *words]).node["robot"]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_it_fits_together(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# "), "a sentence for `embodied list robots`"
    if MISSING in text:
        with pytest.raises(ConfigError, match=r"robot\.\S+ is not given"):
            robot(file)
        return
    node = robot(file)
    assert node.pop("_target_") == "real_robot.deployment.Deployment"
    driver = build(node["driver"], Driver)
    made = Deployment.parse({**node, "policy": "", "sensed": list(driver.sensed)})
    assert len(driver.joints) == made.joints
    controller: Any = build(made.controller, Controller)
    assert controller.names and controller.config.dt == made.step
    assert made.fresh.hold >= 2 * made.step and made.hertz * made.step >= 1
    place = forward_kinematics(made)(np.asarray(made.home)[None])
    assert place.shape == (1, 3) and np.isfinite(place).all()
    assert made.workspace is not None, "nothing keeps the tool from the table"
    assert (
        Workspace(made.workspace, forward_kinematics(made)).depth(np.asarray(made.home)[None]) > 0
    )
    reference = controller.begin(np.asarray(made.home)[None], np.zeros(1))
    still = np.zeros((1, len(controller.names)))
    joints, _, _ = controller(still, np.asarray(made.home)[None], reference)
    assert np.abs(joints[0] - made.home).max() < 0.05, "an action of zero moves nothing"
    assert build_chain(made).names[-1] == "limits"


def test_there_are_some() -> None:
    assert {"sim", "so101_sim", "so101"} <= {file.stem for file in FILES}
