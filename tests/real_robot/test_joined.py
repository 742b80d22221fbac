"""Two arms as one robot: joint vectors, hands, faults, what is between them, a deployment."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import save
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import read_episodes
from embodied.embodiments import so101
from embodied.embodiments.controller import Controller
from embodied.embodiments.kinematics.arm import forward_of
from embodied.real_robot.assemble import build_chain, build_regions
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.drivers.joined import Config, JoinedDriver, Part
from embodied.real_robot.emulators.process import Emulator, JoinedEmulators, Process
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.checks import Enabled
from embodied.real_robot.kernel.driver import DriverError
from tests.builders import make_policy
from tests.real_robot.test_deploy import said, start
from tests.tiers import only_all

YAML = Path(__file__).resolve().parents[2] / "configs" / "robot" / "two_so101_sim.yaml"
HOME = np.array([0.0, -0.45, 0.62, 0.55, 0.0, 0.035] * 2)


POSITIONS = {"_target_": "embodied.embodiments.joint_position.JointPosition", "arm": "so101"}


def deployment() -> Deployment:
    """With joint positions as actions."""
    node = yaml.safe_load(YAML.read_text())
    node["controller"]["controllers"] = {"left": POSITIONS, "right": POSITIONS}
    return Deployment.parse({k: v for k, v in node.items() if k != "_target_"} | {"policy": ""})


class Wire(Driver):
    """One arm of two joints and a hand, which follows at once."""

    joints = ("a", "b")
    sensed = ("force",)

    def __init__(self, offset: float) -> None:
        self.q, self._width, self.t, self.offset = np.array([0.1, 0.2]) + offset, 0.03, 0.0, offset
        self.broken, self.stopped, self.log = "", 0, list[Floats]()

    def connect(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.broken:
            raise DriverError(self.broken)

    def read(self) -> ArmState:
        self._check()
        return ArmState(self.q.copy(), np.zeros(2), np.ones(2), self.t + self.offset)

    def write(self, q: Floats, width: float) -> None:
        self._check()
        self.q, self._width = q.copy(), width
        self.log.append(q.copy())

    def sense(self) -> Floats:
        return np.array([self.offset])

    @property
    def width(self) -> float:
        return self._width

    def stop(self) -> None:
        self.stopped += 1

    def close(self) -> None:
        return


def joined() -> tuple[JoinedDriver, Wire, Wire]:
    made = JoinedDriver.__new__(JoinedDriver)
    left, right = Wire(0.0), Wire(0.5)
    made.parts = [Part("left", left, slice(0, 2), True), Part("right", right, slice(3, 5), True)]
    made.joints = ("left_a", "left_b", "left_gripper", "right_a", "right_b", "right_gripper")
    made.sensed = ("left_force", "right_force", "skew")
    made._state, made._skew = ArmState(np.zeros(6), np.zeros(6), np.zeros(6), 0.0), 0.0
    made.connect()
    return made, left, right


def test_joints_and_hands_are_one_vector_on_one_clock() -> None:
    arm, left, right = joined()
    left.t = right.t = 7.0
    state = arm.read()
    assert state.q == pytest.approx([0.1, 0.2, 0.03, 0.6, 0.7, 0.03])
    assert state.tau == pytest.approx([1, 1, 0, 1, 1, 0]) and arm.width == 0.0
    assert state.t == 7.0 and arm.sense() == pytest.approx([0.0, 0.5, 0.5]), "the older stamp"
    arm.write(np.array([1.0, 2.0, 0.01, 3.0, 4.0, 0.02]), 0.9)
    assert left.q.tolist() == [1.0, 2.0] and left.width == 0.01
    assert right.q.tolist() == [3.0, 4.0] and right.width == 0.02
    left.t = right.t = 7.5
    assert arm.read().dq[[2, 5]] == pytest.approx([-0.04, -0.02])
    arm.write(np.array([0.1, 0.2, 0.0, 0.6, 0.7, 0.0]), 0.0)
    # A hand that holds something keeps what it was sent.
    droop = arm.droop(np.array([0.1, 0.2, 0.03, 0.6, 0.7, 0.0]))
    assert droop == pytest.approx([0, 0, -0.03, 0, 0, 0])


def test_a_hand_at_rest_closes_no_further_unless_it_holds_something() -> None:
    """P-1, where openings are joints: what brakes them would close on meanwhile."""
    arm, left, right = joined()
    goal = np.array([0.1, 0.2, 0.0, 0.6, 0.7, 0.0])
    for tick in range(100):
        left.t = right.t = 7.0 + 0.01 * tick
        arm.write(goal, 0.0)
        left._width, right._width = 0.02, 0.03 - 2e-4 * tick  # one holds something, one closes
        arm.read()
    assert arm.hold(goal, 0.0)
    assert left.width == 0.0 and right.width == pytest.approx(0.03 - 2e-4 * 99)
    assert arm.droop(arm.read().q)[[2, 5]] == pytest.approx(0.0)


def test_one_broken_wire_is_a_fault_and_the_other_arm_is_still_braked() -> None:
    arm, left, right = joined()
    left.broken, right.q = "no answer from servo 3", np.array([0.9, 0.9])
    with pytest.raises(DriverError, match="left: no answer from servo 3") as caught:
        arm.read()
    assert caught.value.measured is not None
    assert caught.value.measured.q == pytest.approx([0.1, 0.2, 0.03, 0.9, 0.9, 0.03])
    with pytest.raises(DriverError, match="left"):
        arm.write(np.arange(6) / 10, 0.0)
    assert right.log[-1] == pytest.approx([0.3, 0.4]), "it was written to nevertheless"
    arm.stop()
    assert (left.stopped, right.stopped) == (1, 0), "the other one is being brought to rest"
    left.broken = ""
    arm.recover()
    arm.stop()
    assert (left.stopped, right.stopped) == (2, 1)
    arm, left, right = joined()
    right.broken = "not there"
    with pytest.raises(DriverError, match="right: not there"):
        arm.connect()
    assert left.stopped == 1, "where one does not connect, none stays connected"


def test_each_arm_checks_its_own_limits() -> None:
    arm, _, right = joined()
    seen: list[Limits] = []
    right.check = seen.append
    rows: list[tuple[float, ...]] = [tuple(np.arange(6.0) - 9), tuple(np.arange(6.0) + 9)]
    arm.check(Limits(*rows, *((0.1,) * 6,), *((1.0 + k,) * 6 for k in range(5))))
    assert seen[0].low == (-6.0, -5.0) and len(seen[0]) == 2


def test_the_controller_is_each_arms_own() -> None:
    made = deployment()
    both = build(made.controller, Controller)
    assert both.names[0] == "left_shoulder_pan.pos" and both.names[11] == "right_gripper.pos"
    q, reference = HOME[None], both.begin(HOME[None], np.zeros(1))
    goal = np.array([[0.1, -0.2, 0.3, 0.4, 0.1, 1.0, -0.1, 0.2, 0.1, 0.2, -0.1, -1.0]])
    for _ in range(200):
        q, width, reference = both(goal, q, reference)
    upper = np.array([*so101.UPPER])
    assert q[0, :5] == pytest.approx(goal[0, :5] * upper)
    assert q[0, 6:11] == pytest.approx(goal[0, 6:11] * upper)
    assert q[0, [5, 11]] == pytest.approx([so101.OPEN, 0.0], abs=1e-9) and width[0] == 0.0
    for controllers, says in (
        ({"left": POSITIONS | {"dt": 0.1}, "right": {}}, r"left\.dt=0\.1 should be dt=0\.05"),
        ({"right": {}, "left": {}}, "left, right, in this order"),
    ):
        with pytest.raises(ConfigError, match=says):
            build({**made.controller, "controllers": controllers}, Controller)
    node = {"_target_": "embodied.real_robot.drivers.sim.Sim"}
    with pytest.raises(ConfigError, match="two robots or more"):
        Config({"left": node})
    with pytest.raises(ConfigError, match="there is no robot rihgt"):
        Config({"left": node, "right": node}, hands=("rihgt",))


def test_the_first_arms_tool_is_in_the_common_frame() -> None:
    place, turn, jacobian = forward_of("two_so101")(HOME[None])
    alone = so101.forward(HOME[None, :5])[0]
    assert place == pytest.approx(alone + np.array([0.0, 0.2, 0.0]))
    assert turn.shape == (1, 3, 3) and jacobian.shape == (1, 6, 12)
    assert not jacobian[:, :, 5:].any() and jacobian[:, :, :4].any()


def test_the_arms_are_kept_off_each_other() -> None:
    """Both at home are free; turned towards each other and stretched they would meet."""
    made = deployment()
    geometry = build_regions(made)[1]
    meeting = HOME.copy()
    meeting[[0, 6]] = -0.75, 0.75
    meeting[[1, 7]], meeting[[2, 8]], meeting[[3, 9]] = 0.6, -0.1, 0.0
    assert geometry.depths(HOME[None])[0] > 0 > geometry.depths(meeting[None])[0]
    _, what = geometry.nearest(meeting)  # type: ignore[attr-defined]
    assert "left" in what and "right" in what
    chain, arm = build_chain(made), ArmState(HOME.copy(), np.zeros(12), np.zeros(12), 0.0)
    chain.begin(arm)
    chain.required(Enabled).on = True
    least, sent = np.inf, HOME
    for tick in range(200):
        arm = ArmState(sent.copy(), np.zeros(12), np.zeros(12), tick * 0.02)
        sent = chain(meeting.copy(), tick * 0.02, arm, tick * 0.02).copy()
        least = min(least, float(geometry.depths(sent[None])[0]))
    assert least > -2e-3 and np.abs(sent - HOME).max() > 0.2, "they went, and stopped short"


def test_two_buses_one_of_which_breaks() -> None:
    """Emulated servo buses: the left one dies, the right one goes on as it is told."""
    made = deployment()
    emulators = build(made.emulator or {}, Emulator)
    assert isinstance(emulators, JoinedEmulators)
    try:
        node = {**made.driver, **emulators.start()}
        node["robots"] = {k: v | {"timeout": 0.3} for k, v in node["robots"].items()}
        arm = build(node, JoinedDriver)
        arm.connect()
        q = arm.read().q
        assert len(arm.joints) == 12
        skew = [float((arm.read(), arm.sense())[1][-1]) for _ in range(50)]
        assert min(skew) > 0, "one after the other"
        left = emulators.parts["left"]
        assert isinstance(left, Process) and left.process is not None
        left.process.kill()
        left.process.wait()
        with pytest.raises(DriverError, match="left: "):
            arm.read()
        target = q.copy()
        target[6] += 0.2
        for _ in range(500):  # ten seconds at 50 Hz: it needs a fraction of one
            time.sleep(0.02)
            with pytest.raises(DriverError, match="left: "):
                arm.write(target, 0.0)
            arm.stop()
            with pytest.raises(DriverError) as caught:
                arm.read()
            if caught.value.measured is not None and caught.value.measured.q[6] > q[6] + 0.15:
                break
        else:
            pytest.fail("the right arm did not move on")
        arm.close()
    finally:
        emulators.stop()


@only_all
def test_a_policy_of_both_arms_is_deployed(tmp_path: Path, folder: Path) -> None:
    """Two emulated buses, the joined controller, one recording; how far apart they are measured."""
    names = tuple(build(deployment().controller, Controller).names)
    seen = tuple(f"q{i}" for i in range(1, 13))
    act = Leaf((12,), low=-1.0, high=1.0, names=names)
    spec = Spec({"state": Leaf((12,), names=seen)}, act, dt=0.05)
    policy = make_policy("deterministic.Deterministic", spec)
    save(tmp_path / "run" / "checkpoints" / "00000000", policy, 0)
    words = ["robot=two_so101_sim", f"policy={tmp_path / 'run'}", "seconds=3"]
    node = "{_target_: embodied.embodiments.joint_position.JointPosition, arm: so101}"
    words += [f"robot.controller.controllers.{side}={node}" for side in ("left", "right")]
    text = said(start(tmp_path, folder, *words))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [each["end"] for each in summary["episodes"]] == ["time"], text
    episode = read_episodes(tmp_path / "out" / "recording").episode(0)
    assert episode["action"].shape[1] == 12
    q = episode["obs/state"]
    assert float((q[-1] - q[0]).abs()[[0, 1, 2, 6, 7, 8]].max()) > 0.05, "both arms moved"
