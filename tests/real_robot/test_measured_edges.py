"""The stages that look at what is measured, at the edge of what they allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied.embodiments import fr3
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.chain import Tick
from embodied.real_robot.kernel.measured import Force, Outside, Overspeed, ToolJacobian
from embodied.real_robot.safety.workspace import Config as Box
from tests.real_robot import test_measured
from tests.real_robot.test_chain import LIMITS, START, arm
from tests.real_robot.test_measured import HOME, TOOL, deployed, measured

STILL = np.zeros(2)


def asked(stage: Any, state: ArmState, ticks: int = 1, guided: bool = False) -> Tick:
    """The last of some ticks in which `state` is measured."""
    for _ in range(ticks):
        made = Tick(START.copy(), START, state, 0.0, 0.0, guided=guided)
        stage(made)
    return made


def along(x: float, y: float) -> ToolJacobian:
    """Of a tool that the first joint moves along x, and the second along y, by so much (m/rad)."""
    return ToolJacobian(lambda q: np.stack([x * q[:, 0], y * q[:, 1], 0 * q[:, 0]], 1), 2)


def pushed(*external: float) -> ArmState:
    state = arm()
    state.external = np.array(external)
    return state


def felt(*newtons: float, q: Floats = START) -> ArmState:
    state = arm(q)
    state.force = np.array(newtons)
    return state


def test_the_jacobian_is_the_arms_and_is_made_once_for_a_pose() -> None:
    calls = 0

    def forward(q: Floats) -> Floats:
        nonlocal calls
        calls += 1
        return fr3.forward(q)[0]

    jacobian, q = ToolJacobian(forward, 7), HOME.copy()
    for turn in (0.0, 0.3):
        q[1] += turn
        for _ in range(2):
            assert jacobian(q) == pytest.approx(fr3.forward(q[None])[2][0, :3], abs=3e-6)
    assert calls == 2


@pytest.mark.parametrize(
    ("x", "y", "external", "newtons"),
    [
        (2.0, 0.0, (0.0, 1.2), 12.0),  # 0.1 m is the least lever
        (2.0, 0.0, (6.0, 0.0), 5.0),  # on the forearm, at 0.6 of the tool's distance
        (2.0, 2.0, (6.0, 8.0), 20 / 3),
        (1.0, 0.01, (0.0, 0.5), 25.0),  # near a singular pose: 0.005 / (1e-4 + 1e-4)
    ],
)
def test_what_pushes_as_hard_as_is_measured(
    x: float, y: float, external: tuple[float, float], newtons: float
) -> None:
    stage = Force(10.0, along(x, y), 0.01)
    assert stage.newtons(pushed(*external)) == pytest.approx(newtons, rel=1e-3)
    assert stage.newtons(felt(3.0, 4.0, 12.0)) == 13.0
    stage.require_measured(pushed(*external))
    stage.require_measured(felt(0.0, 0.0, 0.0))


def test_a_force_at_its_limit_and_where_it_lets_go_to() -> None:
    """Where the arm was 0.05 s before it pressed with half of the limit, in ticks of 0.01 s."""
    stage = Force(10.0, along(1.0, 1.0), 0.01)
    assert not asked(stage, felt(0.0, 6.0, 8.0)).fault
    for k in range(20):
        asked(stage, felt(3.0, 4.0, 0.0, q=START + k))
    asked(stage, felt(6.0, 7.0, 0.0, q=START + 99), 9)
    made = asked(stage, felt(6.0, 8.1, 0.0, q=START + 99))
    assert "with 10 N; its limit is 10" in made.fault and made.back is not None
    assert (made.back == START + 14).all()
    for forget in (lambda: stage.begin(arm()), lambda: asked(stage, arm(), guided=True)):
        asked(stage, felt(0.0, 0.0, 0.0, q=START + 7))
        forget()
        made = asked(stage, felt(99.0, 0.0, 0.0, q=START - 1))
        assert made.back is not None and (made.back == START - 1).all()
    assert not asked(stage, felt(99.0, 0.0, 0.0), guided=True).fault


def fast(*dq: float) -> ArmState:
    state = arm()
    state.dq = np.array(dq)
    return state


def overspeed(tool_speed: float = 8.0) -> Overspeed:
    """Limits are 2.5 and 1.25 rad/s, and 1.25 tool_speed; the first joint moves the tool."""
    jacobian: Any = lambda q: np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])  # noqa: E731
    return Overspeed(LIMITS, jacobian, tool_speed)


def test_speeds_at_their_limits_and_five_ticks_above() -> None:
    assert not asked(overspeed(), fast(2.5, -1.25), 9).fault
    for dq, fault in (
        *(((2.6, 0.0), "joint 0 moves at 2.60"), ((0.0, -1.3), "joint 1 moves at 1.30")),
        ((2.4, 2.0), "joint 1 moves at 2.00 rad/s; at most 1.25"),
    ):
        stage = overspeed()
        assert not asked(stage, fast(*dq), 4).fault and fault in asked(stage, fast(*dq)).fault
    stage = overspeed(0.5)
    assert not asked(stage, fast(0.625, 0.0), 9).fault
    assert not asked(stage, fast(0.63, 0.0), 4).fault
    assert "the tool moves at 0.63 m/s; at most 0.62" in asked(stage, fast(0.63, 0.0)).fault
    assert "joint 1" in asked(overspeed(0.5), fast(0.625, 2.0), 5).fault, "that alone"
    for forget in (
        lambda: stage.begin(arm()),
        lambda: asked(stage, fast(9.0, 9.0), 9, guided=True),
    ):
        forget()
        assert not asked(stage, fast(9.0, 9.0), 4).fault


def test_places_at_their_limits_and_five_ticks_outside() -> None:
    """0.05 rad: a tenth of what an arm may be from where it was sent."""
    for joint, place, fault in (
        *((0, -1.04, ""), (0, -1.06, "joint 0 is"), (0, 1.04, ""), (0, 1.06, "joint 0 is")),
        *((1, -0.04, ""), (1, -0.06, "joint 1 is"), (1, 2.04, ""), (1, 2.06, "joint 1 is")),
    ):
        stage, q = Outside(LIMITS, None), START.copy()
        q[joint] = place
        assert not asked(stage, arm()).fault
        assert not asked(stage, arm(q), 4).fault
        made = asked(stage, arm(q))
        assert fault in made.fault and bool(fault) == bool(made.fault), place


def test_who_begins_outside_may_go_a_little_further_and_not_more() -> None:
    stage = Outside(LIMITS, None)
    for begin in (1.3, 1.4):
        stage.begin(arm())
        for place, fault in ((begin, False), (begin + 0.015, False), (begin + 0.03, True)):
            made = asked(stage, arm(np.array([place, 1.0])), 5)
            assert bool(made.fault) == fault, place
    asked(stage, arm(np.array([1.6, 1.0])), guided=True)
    assert not asked(stage, arm(np.array([1.6, 1.0])), 9).fault, "a person led it there"


def test_the_tool_may_be_measured_three_centimetres_outside() -> None:
    made = deployed(workspace=Box(tuple(TOOL - 0.05), tuple(TOOL + 0.05)))
    for metres, fault in ((0.0, ""), (0.04, ""), (0.075, ""), (0.09, "the tool is measured")):
        q = HOME.copy()
        q[0] = metres / TOOL[0]
        found = measured(made, test_measured.arm(q), 9)
        assert fault in found and bool(fault) == bool(found), metres
