"""Policies in `embodied deploy`: of a user's own package, of a mapping, of LeRobot's data."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.compose import compose
from embodied.core import build as core_build
from embodied.core import checkpoint
from embodied.core.affine import Affine
from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import save
from embodied.core.policy import Policy
from embodied.core.spec import INSTRUCTION, SYMBOL, Leaf, Spec
from embodied.deploy.site import fitted, told_checkpoint, trained_with
from embodied.embodiments.controller import Controller
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.real_robot.deployment import Deployment, controller_settings, with_allowed
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.policy.observer import observer, require_actions, require_rate
from tests.builders import make_policy, node_of, python, write_files
from tests.real_robot.test_decide import SPEC
from tests.real_robot.test_deploy import ends, said, start
from tests.real_robot.test_deploy import robot as command
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
    write_files(tmp_path, {"my_lab/__init__.py": "", "my_lab/lift.py": SOURCE, "run/run.yaml": RUN})
    for name in ("ALLOWED", "ASKED"):
        monkeypatch.setattr(core_build, name, [*getattr(core_build, name)])
    monkeypatch.syspath_prepend(tmp_path)
    core_build.allow("my_lab")
    policy = core_build.build({"_target_": "my_lab.lift.Lift"}, Policy, spec=SPEC)
    save(tmp_path / "run" / "checkpoints" / "00000000", policy, 0)
    return tmp_path


def exported(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ("-m", "embodied.cli", "export", "run", "--to", "made", *words)
    return python(*command, folder=where, PYTHONSAFEPATH="1")


@only_all
def test_an_arm_is_moved_by_a_policy_of_my_lab_which_is_exported(where: Path, folder: Path) -> None:
    deploy = start(where, folder, "robot=sim", "policy=run", "seconds=1", "allow=[my_lab]")
    text = said(deploy)
    assert deploy.returncode == 0 and ends(where / "out") == ["time"], text
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
        Deployment.parse({**settings("sim"), "policy": "", "allow": ["os; import"]})
    assert Deployment.parse({**settings("sim"), "policy": "", "allow": ["my_lab.arms"]}).allow


JOINTS = Leaf((7,), names=tuple(f"joint_{i}.pos" for i in range(1, 8)))
THERE = Spec({"state": JOINTS}, Leaf((4,), names=("x", "y", "z", "gripper")), dt=0.05)
MAPPING = """
obs:
  state: {name: observation.state, scale: 0.0174533, elements: [q1, q2, q3, q4, q5, q6, q7]}
action: {low: [-20, -20, -20, 0], high: [20, 20, 20, 1], elements: [dx, dy, dz, gripper]}
"""


def settings(robot: str = "so101_sim") -> dict[str, Any]:
    words = [f"robot={robot}"]
    if robot == "lerobot":
        words.append("robot.driver.port=x")
        words.append("robot.driver.settings={id: a, calibration_dir: /nowhere}")
    node = controller_settings(compose("deploy", words).node["robot"])
    return {key: value for key, value in node.items() if key != "_target_"}


def run_of(folder: Path, spec: Spec, action: Affine, **how: Any) -> Path:
    """A run without an environment, of a policy whose actions have the units of `action`."""
    base = node_of("policies.generative.flow.Flow", width=16, chunk=4)
    how |= {"base": base, "action": action.to_json()}
    policy = make_policy("wrappers.translated.PhysicalUnits", spec, **how)
    checkpoint.save(folder / "run" / "checkpoints" / "00000001", policy, 1)
    write_files(folder, {"run/run.yaml": "env: null\ndemos: their_arm\n"})
    return folder / "run"


def cloned(folder: Path, spec: Spec = THERE) -> Path:
    """Joints in degrees, actions in millimetres."""
    low, high = (-20.0, -20.0, -20.0, 0.0), (20.0, 20.0, 20.0, 1.0)
    return run_of(folder, spec, Affine(low, high), reach=2.0)


def test_the_robot_measures_and_moves_what_the_policy_means(tmp_path: Path) -> None:
    run, file = cloned(tmp_path), tmp_path / "map.yaml"
    file.write_text(MAPPING)
    deployment = site_of(run, settings("sim"), tmp_path, file)
    policy = checkpoint.load_policy(deployment.policy)
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
        site_of(run, settings("sim"), tmp_path, file)
    assert "\n" not in str(caught.value)


SERVOS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
NAMES = tuple(f"{joint}.pos" for joint in SERVOS)
POSE = (20.0, 26.0, 36.0, 30.0, -20.0, 80.0)  # LeRobot's degrees, and 0 to 100
FIRST = (5, 0, 1, 2, 3, 4)  # the gripper first


def servo_run(
    folder: Path,
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5),
    named: bool = True,
    wide: float = 0.5,
    tasks: tuple[str, ...] = (),
) -> Path:
    """A run of a dataset whose arm stays within `wide` of POSE; it says its elements in `order`."""
    names = tuple(NAMES[i] for i in order) if named else ()
    obs = {"state": Leaf((6,), names=names)}
    if tasks:
        obs[INSTRUCTION] = Leaf((), "int64", 0, len(tasks) - 1, SYMBOL)
    spec = Spec(obs, Leaf((6,), names=names), dt=1 / 30, tasks=tasks)
    around = Affine(*(tuple(POSE[i] + way for i in order) for way in (-wide, wide)))
    return run_of(folder, spec, around, obs={"state": around.to_json()}, reach=1.0)


def site_of(run: Path, robot: dict[str, Any], folder: Path, file: Path | None = None) -> Deployment:
    made, policy = fitted(run, None if file is None else str(file), robot, folder)
    return Deployment.parse({**made, "policy": policy})


def outside_of(driver: dict[str, Any]) -> Any:
    """The names and units that a driver's own users have."""
    found = build(driver, Driver).outside()
    assert found is not None
    return found


def target_of(deployment: Deployment) -> tuple[Any, float]:
    """Where the arm is sent from home in the end by what the policy says."""
    policy = checkpoint.load_policy(deployment.policy).eval()
    require_rate(policy.spec, deployment)
    require_actions(policy.spec, deployment)
    watch, controller = observer(policy.spec, deployment), build(deployment.controller, Controller)
    q, width = np.array([deployment.home]), np.array([0.03])
    reference = controller.begin(q, width)
    for _ in range(80):
        seen = watch(q[0], 0 * q[0], np.zeros(3), float(width[0]))
        obs = {name: torch.as_tensor(value)[None] for name, value in seen.items()}
        plan = policy.act(obs, policy.initial(1), torch.zeros_like(policy.sample_noise(1)))[0]
        q, width, reference = controller(plan[:, 0].detach().double().numpy(), q, reference)
    return q[0], float(width[0])


@pytest.mark.parametrize("robot", ["so101_sim", "lerobot"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), FIRST], ids=["own order", "gripper first"])
def test_its_names_and_units_are_those_of_the_driver(
    robot: str, order: tuple[int, ...], tmp_path: Path
) -> None:
    """Neither a mapping nor a rate nor a controller is said. The gripper said first is no joint."""
    deployment = site_of(servo_run(tmp_path, order), settings(robot), tmp_path)
    assert deployment.step == 1 / 30 and deployment.outside is not None
    q, width = target_of(deployment)
    wanted = deployment.outside.positions(np.array(POSE))
    np.testing.assert_allclose(q, wanted[:5], atol=np.radians(1.0))
    np.testing.assert_allclose(q[:2], np.radians([POSE[0], -POSE[1]]), atol=np.radians(1.0))
    assert width == pytest.approx(0.8 * 0.07, abs=1e-3)


def test_the_drivers_of_one_arm_say_the_same() -> None:
    """LeRobot's degrees begin in the middle of the range, and a turn of them has 4095 ticks."""
    ours, theirs = (outside_of(settings(r)["driver"]) for r in ("so101_sim", "lerobot"))
    assert ours.names == theirs.names == NAMES
    q = np.array([0.3, -0.4, 0.5, -0.6, 0.7])
    np.testing.assert_allclose(ours.values(q, 0.035), theirs.values(q, 0.035), atol=0.02)
    ticks = 2048 - 0.4 * 4096 / (2 * np.pi) * -1  # of shoulder_lift, whose sign is -1
    assert ours.values(q, 0.035)[1] == pytest.approx((ticks - 2048) * 360 / 4095)
    np.testing.assert_allclose(ours.positions(ours.values(q, 0.035)), [*q, 0.035], atol=1e-12)


def test_a_range_of_minus_100_to_100_is_that_of_the_calibration(tmp_path: Path) -> None:
    node, hundred = settings()["driver"] | {"units": "range"}, np.full(6, 100.0)
    ends = np.array([(j["high"] - 2048) * 2 * np.pi / 4096 for j in node["joints"]])
    ends[1] *= -1
    np.testing.assert_allclose(outside_of(node).positions(hundred)[:5], ends, rtol=1e-3)
    joints = [{**joint, "unit": "range"} for joint in settings("lerobot")["driver"]["joints"]]
    theirs = settings("lerobot")["driver"] | {"joints": joints}
    with pytest.raises(ConfigError, match=r"shoulder_pan\.pos: how far it turns is not known"):
        build(theirs, Driver).outside()
    keys = {"id": "id", "range_min": "low", "range_max": "high"}
    calibrated = {j["name"]: {key: j[of] for key, of in keys.items()} for j in node["joints"]}
    (tmp_path / "a.json").write_text(json.dumps(calibrated))
    theirs["settings"] = {"id": "a", "calibration_dir": str(tmp_path)}
    np.testing.assert_allclose(outside_of(theirs).positions(hundred)[:5], ends, rtol=1e-3)


def test_without_names_the_order_is_trusted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = servo_run(tmp_path, named=False)
    q, _ = target_of(site_of(run, settings(), tmp_path))
    np.testing.assert_allclose(np.degrees(q[0]), POSE[0], atol=1.0)
    code, text = command(capsys, "check", "robot=so101_sim", f"policy={run}")
    assert code == 0 and "the policy names none: their order is trusted" in text, text


def test_other_names_need_a_mapping(tmp_path: Path) -> None:
    run = servo_run(tmp_path)
    spec = tmp_path / "run" / "checkpoints" / "00000001" / "spec.json"
    spec.write_text(spec.read_text().replace("wrist_roll.pos", "roll"))
    checkpoint.seal(spec.parent, checkpoint.read_about(spec.parent))
    node = settings()
    with pytest.raises(ConfigError, match=r"the policy says .*roll, gripper\.pos; the robot's"):
        require_actions(checkpoint.load_spec(run), site_of(run, node, tmp_path))
    outside = outside_of(node["driver"])
    unit, zero = np.array(outside.unit), np.array(outside.zero)
    about = {"scale": unit.tolist(), "offset": (-zero * unit).tolist()}
    named = about | {"elements": [*(f"q{i}" for i in range(1, 6)), "width"]}
    targets = node_of("embodiments.joint_position.JointTargets", joints=5, dt=1 / 30)
    node |= {"controller": targets, "step": 1 / 30}
    file = tmp_path / "map.yaml"
    obs = {"state": {"name": "state", **named}}
    file.write_text(json.dumps({"obs": obs, "action": about}))
    with pytest.raises(ConfigError, match=r"action is .*roll.* write action: {elements"):
        site_of(run, node, tmp_path, file)
    file.write_text(json.dumps({"obs": obs, "action": named}))
    policy = checkpoint.load_policy(site_of(run, node, tmp_path, file).policy)
    radians = torch.as_tensor(outside.positions(np.array(POSE)), dtype=torch.float32)[None]
    chunk = policy.act({"state": radians}, policy.initial(1), policy.sample_noise(1))[0]
    np.testing.assert_allclose(chunk[0, 0, :5].detach(), radians[0, :5], atol=np.radians(2.0))


def test_a_policy_of_several_tasks_is_told_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = ("lift", "put it down, softly")
    run = servo_run(tmp_path, order=FIRST, tasks=tasks)
    words = ("check", "robot=so101_sim", f"policy={run}")
    for more, code, line in (
        ((), 2, "say what to do: task='lift' or 'put it down, softly'"),
        (("task=up",), 2, "never saw the task 'up', it knows 'lift', 'put it down, softly'"),
        ((f"task={tasks[1]}",), 0, "nothing speaks against it"),
    ):
        found, text = command(capsys, *words, *more)
        assert found == code and line in text, text
    base, state = checkpoint.load_policy(run), torch.tensor([[POSE[i] for i in FIRST]])
    noise, wanted = base.sample_noise(1), list[torch.Tensor]()
    for number, task in enumerate(tasks):
        told = told_checkpoint(run, task, tmp_path / str(number))
        assert site_of(Path(told), settings(), tmp_path).outside is not None
        policy = checkpoint.load_policy(told)
        assert policy.spec.text == task
        obs = {"state": state, INSTRUCTION: torch.tensor([number])}
        wanted.append(base.act(obs, {}, noise)[0])
        assert torch.equal(policy.act({"state": state}, {}, noise)[0], wanted[-1])
    assert not torch.equal(*wanted)


@only_all
def test_data_beyond_the_limits_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a dataset in ticks, or of another arm: one line, and no folder is left."""
    run, out = servo_run(tmp_path, wide=100.0), tmp_path / "out"
    code, text = command(capsys, "check", "robot=so101_sim", f"policy={run}")
    line = next(line for line in text.splitlines() if "units" in line)
    assert code == 1 and "FAIL units" in line and "elbow_flex.pos: action of the run" in line
    deploy = start(tmp_path, tmp_path / "d", "robot=so101_sim", f"policy={run}")
    assert "not started: a check failed" in said(deploy)
    assert deploy.returncode == 2 and not out.exists()


def test_a_drawn_camera_is_named_as_it_is_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = Fr3(Fr3Config(task="lift", num_envs=1)).spec.with_obs(front=Leaf((32, 32, 3), "uint8"))
    run = tmp_path / "run" / "checkpoints" / "00000000"
    checkpoint.save(run, make_policy("random.Random", spec), 0)
    words = ("check", "robot=sim", f"policy={run}", "robot.driver.world.task=lift")
    code, text = command(capsys, *words)
    assert code == 1 and "FAIL cameras" in text, text
    word = text.split("to draw it: '")[1].split("'")[0]
    code, text = command(capsys, *words, word)
    assert code == 0 and "ok   cameras       front (32 x 32)" in text, text
