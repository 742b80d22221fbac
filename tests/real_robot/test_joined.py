"""Two arms as one robot: joint vectors, hands, faults, what is between them, a deployment."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from embodied.core.build import ConfigError, allow, build
from embodied.core.checkpoint import save
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import read_episodes
from embodied.embodiments import so101
from embodied.embodiments.controller import Controller
from embodied.embodiments.kinematics.arm import forward_of
from embodied.real_robot.assemble import build_chain, build_regions
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.drivers.joined import Config, JoinedDriver
from embodied.real_robot.emulators.process import Emulator, JoinedEmulators, Process
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.checks import Enabled
from embodied.real_robot.kernel.driver import DriverError
from tests.builders import make_policy, node_of, wait_until
from tests.real_robot.test_decide import deployment
from tests.real_robot.test_deploy import ends, said, start
from tests.tiers import only_all

HOME = np.array([0.0, -0.45, 0.62, 0.55, 0.0, 0.035] * 2)
POSITIONS = node_of("embodiments.joint_position.JointPosition", arm="so101")


def two_arms() -> Deployment:
    """With joint positions as actions."""
    made = deployment("two_so101_sim")
    controllers = {"left": POSITIONS, "right": POSITIONS}
    return replace(made, controller={**made.controller, "controllers": controllers})


@dataclass(frozen=True)
class WireConfig:
    offset: float


class Wire(Driver):
    """One arm of two joints and a hand, which follows at once."""

    joints = ("a", "b")
    sensed = ("force",)

    def __init__(self, config: WireConfig) -> None:
        self.offset = config.offset
        self.q, self._width, self.t = np.array([0.1, 0.2]) + self.offset, 0.03, 0.0
        self.broken, self.stopped, self.log = "", 0, list[Floats]()

    def connect(self) -> None:
        if self.broken:
            raise DriverError(self.broken)

    def read(self) -> ArmState:
        self.connect()
        return ArmState(self.q.copy(), np.zeros(2), np.ones(2), self.t + self.offset)

    def write(self, q: Floats, width: float) -> None:
        self.connect()
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
    allow("tests.")
    wire = {"_target_": "tests.real_robot.test_joined.Wire"}
    robots = {"left": {**wire, "offset": 0.0}, "right": {**wire, "offset": 0.5}}
    made = JoinedDriver(Config(robots, hands=("left", "right")))
    made.connect()
    left, right = (part.driver for part in made.parts)
    assert isinstance(left, Wire) and isinstance(right, Wire)
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
    low, high = tuple(np.arange(6.0) - 9), tuple(np.arange(6.0) + 9)
    arm.check(Limits(low, high, (0.1,) * 6, *((1.0 + k,) * 6 for k in range(5))))
    assert seen[0].low == (-6.0, -5.0) and len(seen[0]) == 2


def test_the_controller_is_each_arms_own() -> None:
    made = two_arms()
    both = build(made.controller, Controller)
    assert both.names[0] == "left_shoulder_pan.pos" and both.names[11] == "right_gripper.pos"
    q, reference = HOME[None], both.begin(HOME[None], np.zeros(1))
    left, right = [0.1, -0.2, 0.3, 0.4, 0.1, 1.0], [-0.1, 0.2, 0.1, 0.2, -0.1, -1.0]
    for _ in range(200):
        q, width, reference = both(np.array([left + right]), q, reference)
    upper = np.array(so101.UPPER)
    assert q[0, :6] == pytest.approx([*left[:5] * upper, so101.OPEN], abs=1e-9)
    assert q[0, 6:] == pytest.approx([*right[:5] * upper, 0.0], abs=1e-9) and width[0] == 0.0
    for controllers, says in (
        ({"left": POSITIONS | {"dt": 0.1}, "right": {}}, r"left\.dt=0\.1 should be dt=0\.05"),
        ({"right": {}, "left": {}}, "left, right, in this order"),
    ):
        with pytest.raises(ConfigError, match=says):
            build({**made.controller, "controllers": controllers}, Controller)
    node = node_of("real_robot.drivers.sim.Sim")
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
    made = two_arms()
    geometry = build_regions(made)[1]
    left, right = ([pan, 0.6, -0.1, 0.0, *HOME[4:6]] for pan in (-0.75, 0.75))
    meeting = np.array(left + right)
    assert geometry.depths(HOME[None])[0] > 0 > geometry.depths(meeting[None])[0]
    _, what = geometry.nearest(meeting)  # type: ignore[attr-defined]
    assert "left" in what and "right" in what
    chain, still = build_chain(made), np.zeros(12)
    chain.begin(ArmState(HOME.copy(), still, still, 0.0))
    chain.required(Enabled).on = True
    sent = [HOME]
    for now in np.arange(200) * 0.02:
        sent.append(chain(meeting.copy(), now, ArmState(sent[-1], still, still, now), now).copy())
    assert geometry.depths(np.stack(sent)).min() > -2e-3
    assert np.abs(sent[-1] - HOME).max() > 0.2, "they went, and stopped short"


def test_two_buses_one_of_which_breaks() -> None:
    """Emulated servo buses: the left one dies, the right one goes on as it is told."""
    made = two_arms()
    emulators = build(made.emulator or {}, Emulator)
    assert isinstance(emulators, JoinedEmulators)
    with ExitStack() as stack:
        stack.callback(emulators.stop)
        node = {**made.driver, **emulators.start()}
        node["robots"] = {k: v | {"timeout": 0.3} for k, v in node["robots"].items()}
        arm = build(node, JoinedDriver)
        arm.connect()
        stack.callback(arm.close)
        q = arm.read().q
        skew = [float((arm.read(), arm.sense())[1][-1]) for _ in range(50)]
        assert len(arm.joints) == 12 and min(skew) > 0, "one after the other"
        left = emulators.parts["left"]
        assert isinstance(left, Process) and left.process is not None
        left.process.kill()
        left.process.wait()
        target = q.copy()
        target[6] += 0.2

        def moved() -> bool:
            with pytest.raises(DriverError, match="left: "):
                arm.write(target, 0.0)
            arm.stop()
            with pytest.raises(DriverError, match="left: ") as caught:
                arm.read()
            measured = caught.value.measured
            return measured is not None and bool(measured.q[6] > q[6] + 0.15)

        wait_until(moved, "the right arm moves on", tick=0.02)


def two_arm_words(place: Path) -> list[str]:
    """Words that name a policy of random weights, saved below `place`, for both arms."""
    names = tuple(build(two_arms().controller, Controller).names)
    seen = tuple(f"q{i}" for i in range(1, 13))
    act = Leaf((12,), low=-1.0, high=1.0, names=names)
    spec = Spec({"state": Leaf((12,), names=seen)}, act, dt=0.05)
    policy = make_policy("deterministic.Deterministic", spec)
    save(place / "run" / "checkpoints" / "00000000", policy, 0)
    node = "{_target_: embodied.embodiments.joint_position.JointPosition, arm: so101}"
    words = [f"robot.controller.controllers.{side}={node}" for side in ("left", "right")]
    return [f"policy={place / 'run'}", *words]


@only_all
def test_a_policy_of_both_arms_is_deployed(tmp_path: Path, folder: Path) -> None:
    """Two emulated buses, the joined controller, one recording; how far apart they are measured."""
    words = ("robot=two_so101_sim", "seconds=3", *two_arm_words(tmp_path))
    text, out = said(start(tmp_path, folder, *words)), tmp_path / "out"
    assert ends(out) == ["time"], text
    episode = read_episodes(out / "recording").episode(0)
    assert episode["action"].shape[1] == 12
    q = episode["obs/state"]
    assert float((q[-1] - q[0]).abs()[[0, 1, 2, 6, 7, 8]].max()) > 0.05, "both arms moved"
