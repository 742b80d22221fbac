"""What is measured stops an arm: force, speeds and positions; and the limit of the tool's speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodied.core.checkpoint import find
from embodied.deploy import operate as deploy
from embodied.deploy.session import SUCCESS, Episode
from embodied.embodiments import fr3
from embodied.embodiments.cartesian_delta import CartesianDelta
from embodied.embodiments.cartesian_delta import Config as CartesianConfig
from embodied.embodiments.cartesian_pose import CartesianPose
from embodied.embodiments.cartesian_pose import Config as PoseConfig
from embodied.embodiments.joint_position import Config as JointConfig
from embodied.embodiments.joint_position import JointPosition
from embodied.real_robot.assemble import build_chain, forward_kinematics
from embodied.real_robot.control.chunk_follower import Chunk, ChunkFollower
from embodied.real_robot.drivers.sim import Config as SimConfig
from embodied.real_robot.drivers.sim import Sim
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.checks import Enabled, FreshConfig
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.kernel.measured import NEARER, PATIENCE, Force
from embodied.real_robot.safety.workspace import Config as Box
from tests.real_robot.contacts import ARMS, LONGEST, contacts, deployment
from tests.real_robot.test_chain import within
from tests.real_robot.test_control import DT, LIMITS
from tests.real_robot.test_daemon import simulated
from tests.tiers import usually

HOME = fr3.HOME
STILL = np.zeros(7)
TOOL = fr3.forward(HOME[None])[0][0]


def deployed(**changed: Any) -> Chain:
    """The chain of a simulated FR3 that is enabled and stands at home."""
    settings: dict[str, Any] = {"force": 20.0, "fresh": FreshConfig(1.0, 2.0, 1.0), **changed}
    made = build_chain(simulated(Path(), policy="", **settings))
    made.begin(arm())
    made.required(Enabled).on = True
    return made


def arm(q: Floats = HOME, dq: Floats = STILL, push: Floats | None = None, **more: Any) -> ArmState:
    """A measurement while `push` [3] (N) acts on the tool."""
    push = np.zeros(3) if push is None else push
    external = fr3.forward(q[None])[2][0, :3].T @ push
    return ArmState(q, dq, STILL, 0.0, **{"external": external, **more})


def measured(made: Chain, state: ArmState, ticks: int = 1) -> str:
    """The fault after `state` was measured so often, while the command stands still."""
    for _ in range(ticks):
        made(made.limiter.q.copy(), 0.0, state, 0.0)
    return made.fault


@pytest.mark.parametrize("axis", range(3))
def test_a_force_above_its_limit_is_a_fault_and_says_where_to_let_go(axis: int) -> None:
    made, push = deployed(), np.eye(3)[axis]
    before = HOME + 0.01
    assert not measured(made, arm(before, push=5.0 * push), 20)
    assert not measured(made, arm(push=11.0 * push)), "also if it is the forearm's"
    assert "pushes on the tool with" in measured(made, arm(push=20.5 * push))
    assert made.back == pytest.approx(before), "before something was touched"
    measured(made, arm(push=21.5 * push))
    assert made.back is None, "once"


def test_forces_that_the_robot_itself_estimates() -> None:
    made = deployed()
    assert not measured(made, arm(force=np.array([0.0, 12.0, 15.0]), external=None))
    assert "with 21 N" in measured(made, arm(force=np.array([0.0, 12.0, 17.0]), external=None))
    for lost in ({"external": None}, {"external": np.nan * STILL}):
        made = deployed()
        assert "pushes on the tool" in measured(made, arm(**lost)), lost
    made = deployed()
    made.guided = True
    assert not measured(made, arm(push=np.array([0.0, 0.0, 99.0])), 9), "a person's hand"


def test_a_driver_that_measures_no_force_is_refused_unless_its_yaml_says_so() -> None:
    stage = deployed().stage(Force)
    assert stage is not None
    stage.require_measured(arm())
    with pytest.raises(DriverError, match="force: unmeasured"):
        stage.require_measured(arm(external=None))
    assert deployed(force="unmeasured").stage(Force) is None


def test_an_arm_that_overspeeds_while_its_command_stands_still_is_a_fault() -> None:
    """A joint at 1.3 times its limit; and the tool at 0.6 m/s where 0.4 is its limit."""
    fast = STILL.copy()
    fast[6] = 1.3 * LIMITS.velocity[6]
    made = deployed()
    assert not measured(made, arm(dq=fast), PATIENCE - 1)
    assert not measured(made, arm())
    assert not measured(made, arm(dq=fast), PATIENCE - 1), "noise"
    assert "joint 6 moves at" in measured(made, arm(dq=fast))
    turns = STILL.copy()
    turns[0] = 0.6 / TOOL[0]
    made = deployed(tool_speed=0.4)
    assert "the tool moves at 0.60 m/s; at most 0.50" in measured(made, arm(dq=turns), PATIENCE)


def test_an_arm_measured_outside_while_its_command_stands_still_is_a_fault() -> None:
    out = HOME.copy()
    out[3] = LIMITS.low[3] - 0.04
    inside = HOME.copy()
    inside[3] = LIMITS.low[3] + 0.06
    made = deployed()
    made.begin(arm(inside))
    assert not measured(made, arm(inside))
    assert not measured(made, arm(out), PATIENCE - 1)
    assert not measured(made, arm(inside))
    assert "joint 3 is measured outside of its limits" in measured(made, arm(out), PATIENCE)
    box = Box(tuple(TOOL - 0.03), tuple(TOOL + 0.03))
    away = HOME.copy()
    away[0] = 0.08 / TOOL[0]
    made = deployed(workspace=box)
    assert not measured(made, arm())
    assert "the tool is measured outside of its workspace" in measured(made, arm(away), PATIENCE)


def test_an_arm_that_begins_outside_may_only_come_in() -> None:
    box = Box(tuple(TOOL - 0.1), tuple(TOOL + 0.1))

    def at(metres: float) -> ArmState:
        q = HOME.copy()
        q[0] = metres / TOOL[0]
        return arm(q)

    made = deployed(workspace=box)
    made.begin(at(0.2))
    for metres in (0.2, 0.18, 0.15):
        assert not measured(made, at(metres), PATIENCE)
    assert "workspace" in measured(made, at(0.2), PATIENCE)


@pytest.mark.parametrize("name", ARMS)
def test_the_commanded_tool_is_never_faster_than_its_limit(name: str) -> None:
    """Whatever is asked: jumps, bangs from limit to limit, and way to a far target."""
    made = deployment(name, tool_speed=0.25)
    chain, forward = build_chain(made), forward_kinematics(made)
    random, limiter = np.random.default_rng(0), chain.limiter
    q = wish = np.asarray(made.home, float)
    limiter.begin(q)
    sent = [q.copy()]
    for k in range(600):
        if k % 40 == 0 or k > 500:
            wish = random.uniform(limiter.low, limiter.high)
        sent.append(limiter(wish).copy())
    places = forward(np.stack(sent))
    speeds = np.linalg.norm(np.diff(places, axis=0), axis=1) * made.hertz
    assert speeds.max() <= 0.25 * 1.001, "never faster"
    assert np.quantile(speeds, 0.5) > 0.12, "and not much slower either"
    within(np.stack(sent), made.limits, 1 / made.hertz)


STEPS = 24
CORNER = np.minimum(np.arange(1, STEPS + 1), STEPS // 2)[:, None]  # steps along the first leg
AFTER = np.arange(1, STEPS + 1)[:, None] - CORNER
JOINTS = JointPosition(JointConfig())
POSE = CartesianPose(PoseConfig(rotation="none"))
LEGS = TOOL + 0.012 * (CORNER * [1.0, 0.0, 0.0] + AFTER * [0.0, 1.0, 0.0])
BENT = HOME + 0.025 * (CORNER * np.eye(7)[0] + AFTER * np.eye(7)[3])
ROUND = {
    "delta": (
        CartesianDelta(CartesianConfig()),
        0.5 * np.where(AFTER > 0, [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]),
    ),
    "pose": (POSE, POSE.encode(LEGS, np.tile(np.eye(3), (STEPS, 1, 1)))),
    "joints": (JOINTS, (BENT - JOINTS.middle) / JOINTS.half),
}
"""Controllers, and actions [STEPS, A - 1] that lead the tool round a corner, all but the hand's."""


@pytest.mark.parametrize("kind", ROUND)
def test_a_slow_tool_goes_the_same_way_slower(kind: str) -> None:
    """Round a corner at 0.25 m/s and more: it is not cut where 0.1 m/s is the limit."""

    def way(tool_speed: float, stands_still: bool = True) -> Floats:
        controller, actions = ROUND[kind]
        limiter = Limiter(LIMITS, DT, (), lambda q: fr3.forward(q)[0], tool_speed)
        limiter.begin(HOME)
        follower = ChunkFollower(controller, 0.05)
        follower.take(Chunk(np.hstack([actions, np.ones((STEPS, 1))]), 0.0, 0.0))
        follower.begin(HOME, 0.08, 0.0)
        out, sent = np.zeros(7), [HOME]
        while not follower.starved or not limiter.resting or len(sent) < 9:
            follower(sent[-1], DT * len(sent), out, limiter.slowed and stands_still)
            sent.append(limiter(out).copy())
        return fr3.forward(np.stack(sent))[0]

    whole, slow, cut = way(10.0), way(0.1), way(0.1, stands_still=False)
    off, short = (
        np.linalg.norm(each[:, None] - whole[None], axis=2).min(1).max() for each in (slow, cut)
    )
    assert off < 0.01 and short > 0.02, (off, short)
    assert slow[-1] == pytest.approx(whole[-1], abs=0.004)
    assert len(slow) > 2 * len(whole)
    assert np.array_equal(whole, way(10.0, stands_still=False)), "to the last bit"


def test_hold_to_run_and_a_first_run_reduce_the_speed_of_the_tool() -> None:
    for changed, speed in (({}, 1.0), ({"hold_to_run": True}, 0.25), ({"first_run": True}, 0.25)):
        assert deployed(**changed).limiter.tool_speed == pytest.approx(speed, rel=0.08)


def test_a_policy_runs_slowly_until_it_has_ended_an_episode_on_that_robot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = simulated(tmp_path)

    episode = Episode(1.0, None, "the arm's wire is broken", {}, 0)
    ran: Any = SimpleNamespace(deployment=made, episodes=[episode])
    deploy.remember_policy(ran)
    assert deploy.is_first_run(made), "that was no whole episode"
    ran.episodes.append(Episode(1.0, True, SUCCESS, {}, 0))
    ran.deployment = replace(made, dry=True)
    deploy.remember_policy(ran)
    assert deploy.is_first_run(made), "nothing moved"
    ran.deployment = made
    deploy.remember_policy(ran)
    assert not deploy.is_first_run(made)
    assert deploy.is_first_run(replace(made, robot="another"))
    weights = find(made.policy) / "policy.yaml"
    weights.write_text(weights.read_text() + "# changed\n")
    assert deploy.is_first_run(made), "another policy"


def test_the_observer_finds_what_pushes_on_the_arm() -> None:
    """20 N on the hand of an arm at rest, and none on one that moves through the air."""
    now = 1000.0
    driver = Sim(SimConfig(), lambda: now)
    driver.connect()
    force = deployed().stage(Force)
    assert force is not None

    def felt(ticks: int, target: Floats | None = None) -> float:
        nonlocal now
        for _ in range(ticks):
            now += 0.01
            state = driver.read()
            driver.write(HOME if target is None else target, 0.08)
        return force.newtons(state)

    hand = driver.model.body("hand").id
    for push in np.array([[0.0, 0.0, -20.0], [20.0, 0.0, 0.0], [0.0, 20.0, 0.0]]):
        driver.data.xfrc_applied[hand, :3] = push
        assert 16.0 < felt(60) < 24.0 / NEARER
    driver.data.xfrc_applied[hand, :3] = 0.0
    felt(60)
    most = 0.0
    for k in range(100):
        swing = 0.1 * np.sin(2 * np.pi * k / 100) * np.ones(7)
        most = max(most, felt(1, HOME + swing))
    assert most < 15.0


@pytest.mark.parametrize("name", usually(["sim", "so101_sim", "ur_sim"], ARMS))
@pytest.mark.parametrize("count", usually([6], [6, 300]))
def test_a_contact_is_let_go_of_before_it_presses_for_long(
    name: str, count: int, tmp_path: Path
) -> None:
    found = contacts(name, tmp_path, count)
    assert sum(each.peak > 1 for each in found) > 0.6 * count, "most of them touch the wall"
    worst = max(found, key=lambda each: each.over)
    assert worst.over <= LONGEST, worst
