"""The FR3's own kinematics against MuJoCo's, and the controller's promises."""

import mujoco
import numpy as np
import pytest

from embodied.embodiments import fr3
from embodied.embodiments.cartesian_delta import CartesianDelta, Config


@pytest.fixture(scope="module")
def arm() -> mujoco.MjModel:
    spec = mujoco.MjSpec.from_file(str(fr3.mjcf()))
    spec.meshdir = str(fr3.mjcf().parent / "meshes")
    spec.body("hand").add_site(name="tool", pos=[0, 0, fr3.TOOL])
    return spec.compile()


def somewhere(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(fr3.LOWER, fr3.UPPER, (count, 7))


def at_work(count: int) -> np.ndarray:
    place = np.random.default_rng(1).uniform([0.4, -0.2, 0.1], [0.6, 0.2, 0.3], (count, 3))
    return CartesianDelta(Config()).reach(place)


def test_pose_and_jacobian_agree_with_mujoco(arm: mujoco.MjModel) -> None:
    q, data = somewhere(50), mujoco.MjData(arm)
    place, turn, jacobian = fr3.forward(q)
    linear, angular = np.zeros((3, arm.nv)), np.zeros((3, arm.nv))
    for i in range(len(q)):
        data.qpos[:7] = q[i]
        mujoco.mj_kinematics(arm, data)
        mujoco.mj_comPos(arm, data)
        mujoco.mj_jacSite(arm, data, linear, angular, arm.site("tool").id)
        np.testing.assert_allclose(place[i], data.site("tool").xpos, atol=1e-9)
        np.testing.assert_allclose(turn[i].ravel(), data.site("tool").xmat, atol=1e-9)
        np.testing.assert_allclose(jacobian[i, :3], linear[:, :7], atol=1e-9)
        np.testing.assert_allclose(jacobian[i, 3:], angular[:, :7], atol=1e-9)


def test_limits_are_those_of_the_model(arm: mujoco.MjModel) -> None:
    for i, name in enumerate(fr3.JOINTS):
        assert arm.joint(name).range.tolist() == [fr3.LOWER[i], fr3.UPPER[i]]
        assert arm.jnt_actfrcrange[arm.joint(name).id, 1] == fr3.TORQUE[i]


def test_rotation_vector_and_error_are_inverse() -> None:
    vector = np.random.default_rng(2).uniform(-1.5, 1.5, (20, 3))
    vector[0] = 0.0
    turn = fr3.rotation(vector)
    np.testing.assert_allclose(
        turn @ turn.transpose(0, 2, 1), np.tile(np.eye(3), (20, 1, 1)), atol=1e-12
    )
    start = fr3.forward(somewhere(20))[1]
    np.testing.assert_allclose(fr3.rotation_error(turn @ start, start), vector, atol=1e-9)


def test_action_moves_the_tool_by_the_step() -> None:
    controller, q = CartesianDelta(Config(step=0.01)), at_work(8)
    reference = controller.begin(q, np.full(8, 0.08))
    action = np.tile([1.0, -0.5, 0.25, 1.0], (8, 1))
    joints, width, moved = controller(action, q, reference)
    np.testing.assert_allclose(
        moved["place"] - reference["place"], np.tile([0.01, -0.005, 0.0025], (8, 1)), atol=1e-12
    )
    # Two damped steps leave a little over; the direction has to be right.
    np.testing.assert_allclose(fr3.forward(joints)[0], moved["place"], atol=5e-4)
    np.testing.assert_allclose(width, 0.08)


def test_rows_do_not_see_each_other() -> None:
    controller, q = CartesianDelta(Config()), at_work(8)
    action = np.random.default_rng(3).uniform(-1, 1, (8, 4))
    together = controller(action, q, controller.begin(q, np.full(8, 0.08)))
    for i in range(8):
        one = slice(i, i + 1)
        alone = controller(action[one], q[one], controller.begin(q[one], np.full(1, 0.08)))
        np.testing.assert_allclose(alone[0], together[0][one], atol=1e-12)


def test_reference_stays_near_the_tool_in_the_box_and_slow() -> None:
    config = Config()
    controller, q = CartesianDelta(config), at_work(4)
    reference = controller.begin(q, np.full(4, 0.08))
    stuck, _, _ = fr3.forward(q)
    for _ in range(60):
        before = reference["q"]
        joints, width, reference = controller(np.tile([1.0, 0.0, 0.0, -1.0], (4, 1)), q, reference)
        assert (np.abs(joints - before) <= config.speed * fr3.VELOCITY * config.dt + 1e-12).all()
        ahead = np.linalg.norm(reference["place"] - stuck, axis=1)
        assert (ahead <= config.lead + 1e-12).all()
    np.testing.assert_allclose(width, 0.0)
    for _ in range(60):
        q, _, reference = controller(np.tile([0.0, 0.0, -1.0, -1.0], (4, 1)), q, reference)
    np.testing.assert_allclose(reference["place"][:, 2], config.low[2], atol=1e-9)


def test_unknown_turning_is_refused() -> None:
    with pytest.raises(ValueError, match="use none, yaw or full"):
        CartesianDelta(Config(turning="roll"))  # type: ignore[arg-type]


@pytest.mark.parametrize("turning,vector", [("yaw", [0, 0, 0.08]), ("full", [0.08, 0, 0])])
def test_turning(turning: str, vector: list[float]) -> None:
    controller = CartesianDelta(Config(turning=turning))  # type: ignore[arg-type]
    q = at_work(2)
    reference = controller.begin(q, np.zeros(2))
    action = np.zeros((2, len(controller.names)))
    action[:, 3] = 1.0
    joints, _, moved = controller(action, q, reference)
    turned = fr3.rotation_error(moved["turn"], reference["turn"])
    np.testing.assert_allclose(turned, np.tile(vector, (2, 1)), atol=1e-9)
    reached = fr3.rotation_error(fr3.forward(joints)[1], reference["turn"])
    np.testing.assert_allclose(reached, np.tile(vector, (2, 1)), atol=5e-3)
