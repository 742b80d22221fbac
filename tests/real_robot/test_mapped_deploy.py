"""A policy of a dataset's own names and units, mapped to a robot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.affine import Affine
from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.deploy.site import mapped_checkpoint, trained_with
from embodied.policies.wrappers.physical_units import PhysicalUnits
from embodied.real_robot.deployment import Deployment, controller_settings
from embodied.real_robot.policy.compatibility import observer, require_actions, require_rate

JOINTS = tuple(f"joint_{i}.pos" for i in range(1, 8))
STATE = Leaf((7,), names=JOINTS)
THERE = Spec({"state": STATE}, Leaf((4,), names=("x", "y", "z", "gripper")), dt=0.05)
MAPPING = """
obs:
  state: {name: observation.state, scale: 0.0174533, elements: [q1, q2, q3, q4, q5, q6, q7]}
action: {low: [-20, -20, -20, 0], high: [20, 20, 20, 1]}
"""


def robot() -> dict:
    node = controller_settings(compose("deploy", ["robot=sim"]).node["robot"])
    node.pop("_target_")
    return node


def cloned(folder: Path, spec: Spec = THERE) -> Path:
    """A run without an environment: joints in degrees, actions in millimetres."""
    node = {
        "_target_": "embodied.policies.wrappers.physical_units.PhysicalUnits",
        "base": {"_target_": "embodied.policies.generative.flow.Flow", "width": 16, "chunk": 4},
        "action": Affine((-20.0, -20.0, -20.0, 0.0), (20.0, 20.0, 20.0, 1.0)).to_json(),
        "reach": 2.0,
    }
    policy = build(node, PhysicalUnits, spec=spec)
    checkpoint.save(folder / "run" / "checkpoints" / "00000001", policy, 1)
    (folder / "run" / "run.yaml").write_text("env: null\ndemos: their_arm\n")
    return folder / "run"


def written(folder: Path, text: str) -> str:
    file = folder / "map.yaml"
    file.write_text(text)
    return str(file)


def test_the_robot_measures_and_moves_what_the_policy_means(tmp_path: Path) -> None:
    run = cloned(tmp_path)
    saved = mapped_checkpoint(run, written(tmp_path, MAPPING), robot(), tmp_path)
    policy = checkpoint.load_policy(saved)
    deployment = Deployment.parse({**robot(), "policy": saved})
    require_rate(policy.spec, deployment)
    require_actions(policy.spec, deployment)
    assert observer(policy.spec, deployment).names["state"] == tuple(f"q{i}" for i in range(1, 8))
    base, noise = checkpoint.load_policy(run), policy.sample_noise(2)
    radians = torch.rand(2, 7)
    here, _ = policy.act({"state": radians}, {}, noise)
    there, _ = base.act({"state": radians / 0.0174533}, {}, noise)
    torch.testing.assert_close(here[..., 0] * 20, there[..., 0])
    assert trained_with(run) is None  # there is no environment to compare with


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MAPPING.replace(", q7]", "]"), r"robot's names of its 7 elements \(joint_1.pos"),
        (MAPPING.replace(", 0], high: [20, 20, 20, 1]", "], high: [20, 20, 20]"), "have 4 numbers"),
    ],
)
def test_what_does_not_fit_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        mapped_checkpoint(cloned(tmp_path), written(tmp_path, text), robot(), tmp_path)
    assert "\n" not in str(caught.value)


def test_another_rate_is_one_line(tmp_path: Path) -> None:
    slow = Spec(THERE.obs, THERE.act, dt=0.1)
    with pytest.raises(ConfigError, match="20 steps a second here and 10 there"):
        mapped_checkpoint(cloned(tmp_path, slow), written(tmp_path, MAPPING), robot(), tmp_path)
