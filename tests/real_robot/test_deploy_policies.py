"""Packages of a user's own, out of the current folder: a policy in `embodied deploy`, in the policy
process, and in `embodied export`; only the command line allows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.compose import compose
from embodied.core import build as core_build
from embodied.core import checkpoint
from embodied.core.affine import Affine
from embodied.core.build import ConfigError
from embodied.core.checkpoint import save
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.deploy.site import fitted, trained_with
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.real_robot.deployment import Deployment, controller_settings, with_allowed
from embodied.real_robot.policy.observer import observer, require_actions, require_rate
from tests.builders import make_policy, node_of
from tests.real_robot.test_deploy import ENV, said, start
from tests.tiers import only_all

RUN = "env: {_target_: embodied.envs.fr3.env.Fr3, task: reach}\nexecute: null\n"
SOURCE = '''
from torch import Tensor, nn
import torch
from dataclasses import dataclass
from embodied.core.policy import Policy

@dataclass(frozen=True)
class Config:
    height: float = 0.0

class Lift(Policy):
    """Always about the same action."""
    def __init__(self, config: Config, spec) -> None:
        super().__init__()
        self.spec = spec
        self.action = nn.Parameter(torch.full((spec.act.size,), config.height))

    def sample_noise(self, n, explore=False):
        return torch.zeros(n, 0)

    def act(self, obs, carry, noise):
        seen = 1e-3 * obs["state"][:, : len(self.action)]
        return torch.tanh(self.action + seen)[:, None], carry
'''


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the package my_lab and a run with its policy."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "__init__.py").write_text("")
    (tmp_path / "my_lab" / "lift.py").write_text(SOURCE)
    monkeypatch.setattr(core_build, "ALLOWED", [*core_build.ALLOWED])
    monkeypatch.setattr(core_build, "ASKED", [*core_build.ASKED])
    monkeypatch.syspath_prepend(tmp_path)
    core_build.allow("my_lab")
    policy = core_build.build({"_target_": "my_lab.lift.Lift"}, Policy, spec=spec())
    save(tmp_path / "run" / "checkpoints" / "00000000", policy, 0)
    (tmp_path / "run" / "run.yaml").write_text(RUN)
    return tmp_path


def spec() -> Spec:
    return Fr3(Fr3Config(task="reach", num_envs=1)).spec


def exported(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "embodied.cli", "export", "run", "--to", "made", *words]
    environment = {**ENV, "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)


@only_all
def test_an_arm_is_moved_by_a_policy_of_my_lab_which_is_exported(where: Path, folder: Path) -> None:
    deploy = start(where, folder, "robot=sim", "policy=run", "seconds=1", "allow=[my_lab]")
    text = said(deploy)
    assert deploy.returncode == 0, text
    summary = json.loads((where / "out" / "summary.json").read_text())
    assert [each["end"] for each in summary["episodes"]] == ["time"], text
    assert json.loads((where / "out" / "deployment.json").read_text())["allow"] == ["my_lab"]
    done = exported(where, "allow=[my_lab]")
    assert done.returncode == 0, done.stderr
    assert (where / "made" / "policy.onnx").exists()
    done = exported(where, "steps=3")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "steps=3 has no place" in done.stderr


def test_without_the_word_nothing_of_my_lab_is_imported(where: Path, folder: Path) -> None:
    (where / "my_lab" / "lift.py").write_text("raise SystemExit('imported')")
    deploy = start(where, folder, "robot=sim", "policy=run", "seconds=1")
    text = said(deploy)
    assert deploy.returncode != 0 and 'allow=["my_lab"]' in text, text
    done = exported(where)
    assert done.returncode == 2 and 'allow=["my_lab"]' in done.stderr
    assert "Traceback" not in text + done.stderr


def test_a_robots_own_settings_allow_nothing() -> None:
    with pytest.raises(ConfigError, match="command line"):
        with_allowed({"allow": ["my_lab"]})
    with pytest.raises(ConfigError, match="no dotted name"):
        Deployment.parse({**robot(), "policy": "", "allow": ["os; import"]})
    assert Deployment.parse({**robot(), "policy": "", "allow": ["my_lab.arms"]}).allow


JOINTS = tuple(f"joint_{i}.pos" for i in range(1, 8))
JOINT_STATE = Leaf((7,), names=JOINTS)
THERE = Spec({"state": JOINT_STATE}, Leaf((4,), names=("x", "y", "z", "gripper")), dt=0.05)
MAPPING = """
obs:
  state: {name: observation.state, scale: 0.0174533, elements: [q1, q2, q3, q4, q5, q6, q7]}
action: {low: [-20, -20, -20, 0], high: [20, 20, 20, 1], elements: [dx, dy, dz, gripper]}
"""


def robot() -> dict:
    node = controller_settings(compose("deploy", ["robot=sim"]).node["robot"])
    node.pop("_target_")
    return node


def cloned(folder: Path, spec: Spec = THERE) -> Path:
    """A run without an environment: joints in degrees, actions in millimetres."""
    base = node_of("policies.generative.flow.Flow", width=16, chunk=4)
    action = Affine((-20.0, -20.0, -20.0, 0.0), (20.0, 20.0, 20.0, 1.0)).to_json()
    how: dict[str, Any] = {"base": base, "action": action, "reach": 2.0}
    policy = make_policy("wrappers.translated.PhysicalUnits", spec, **how)
    checkpoint.save(folder / "run" / "checkpoints" / "00000001", policy, 1)
    (folder / "run" / "run.yaml").write_text("env: null\ndemos: their_arm\n")
    return folder / "run"


def test_the_robot_measures_and_moves_what_the_policy_means(tmp_path: Path) -> None:
    run, file = cloned(tmp_path), tmp_path / "map.yaml"
    file.write_text(MAPPING)
    saved = fitted(run, str(file), robot(), tmp_path)[1]
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
    ("before", "after", "dt", "says"),
    [
        (", q7]", "]", 0.05, r"robot's names of its 7 elements \(joint_1.pos"),
        (", 0], high: [20, 20, 20, 1]", "], high: [20, 20, 20]", 0.05, "have 4 numbers"),
        (", elements: [dx, dy, dz, gripper]", "", 0.05, r"gripper here and x, y, z, .*elements"),
        ("", "", 0.1, "20 steps a second here and 10 there"),
    ],
)
def test_what_does_not_fit_is_one_line(
    before: str, after: str, dt: float, says: str, tmp_path: Path
) -> None:
    run, file = cloned(tmp_path, Spec(THERE.obs, THERE.act, dt=dt)), tmp_path / "map.yaml"
    file.write_text(MAPPING.replace(before, after))
    with pytest.raises(ConfigError, match=says) as caught:
        fitted(run, str(file), robot(), tmp_path)
    assert "\n" not in str(caught.value)
