"""The FR3 tasks: success, rewards, randomised quantities; and the arm between two walls."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.env import NotFinite
from embodied.envs.fr3.contact_env import Config as ContactConfig
from embodied.envs.fr3.contact_env import Fr3Contact
from embodied.envs.fr3.env import Config, Fr3
from embodied.envs.fr3.tasks import TASKS
from embodied.policies.scripted import fr3
from embodied.policies.scripted.fr3 import Scripted


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """MuJoCo writes its warnings to a log file where it runs."""
    monkeypatch.chdir(tmp_path)


OPEN = {  # tasks with every way open
    "detour": {"can_distance": (0.2, 0.26)},
    "slalom": {"gap_width": (0.5, 0.5)},
}


def play(task: str, ranges: dict[str, tuple[float, float]]) -> dict[str, torch.Tensor]:
    """How the first episodes of 32 rows of a demonstrator end [32] (bool). Only success pays."""
    torch.manual_seed(0)
    env = Fr3(Config(task=task, num_envs=32, ranges=ranges))
    obs, actor = (
        env.reset(seed=3),
        Actor(Scripted(fr3.Config(task=task, quality=1.0), env.spec), 32),
    )
    first, over = torch.ones(32, dtype=torch.bool), torch.zeros(32, dtype=torch.bool)
    found = {"success": over.clone(), "lost": over.clone()}
    while not over.all():
        step = env.step(actor(obs, first))
        obs, first = step.obs, step.ended
        success, lost = step.log["success"], step.log["lost"]
        assert torch.equal(step.reward, success.float())
        assert torch.equal(step.terminated, success | lost) and not (lost & success).any()
        for name in found:
            found[name] |= step.log[name] & ~over
        over |= step.ended
    return found


@pytest.mark.parametrize("task", ["lift", "reach", "push", "insert", "detour", "slalom"])
def test_a_demonstrator_succeeds_and_only_success_pays(task: str) -> None:
    won = play(task, OPEN.get(task, {}))["success"].float().mean()
    assert won > (0.7 if task == "insert" else 0.9)


@pytest.mark.parametrize("task,least,most", [("detour", 8, 24), ("slalom", 16, 31)])
def test_a_can_or_wall_touched_ends_the_episode_without_reward(
    task: str, least: int, most: int
) -> None:
    """The demonstrators go somewhere whatever stands there: half of the ways around the cans are
    closed, and each gap is half as wide as the demonstrator's range."""
    assert least <= play(task, {})["lost"].sum() <= most


def test_doing_nothing_never_pays() -> None:
    for task in TASKS:
        env = Fr3(Config(task=task, num_envs=8, horizon=20))
        env.reset(seed=0)
        still = torch.zeros(8, 4)
        still[:, 3] = -1.0
        paid = sum(env.step(still).reward.sum().item() for _ in range(40))
        assert paid == 0.0, task


def test_task_vector_is_obeyed_for_one_episode() -> None:
    env = Fr3(Config(num_envs=2, horizon=5))
    task = torch.tensor([[0.0, 1.0, 0.5, 0.5, 0.5], [1.0, 0.0, 0.5, 0.5, 0.5]])
    state = env.reset(seed=0, task=task)["state"]
    at = env.spec.obs["state"].names.index("cube_x")
    torch.testing.assert_close(state[:, at : at + 2], torch.tensor([[0.38, 0.20], [0.62, -0.20]]))
    # The cube's size follows its parameter: half-way between 18 and 24 mm.
    cube = env.model.geom("cube").id
    np.testing.assert_allclose(env.batch.expand("geom_size")[:, cube], 0.021)
    steps = [env.step(torch.zeros(2, 4)) for _ in range(5)]
    assert steps[-1].truncated.all()
    assert not torch.allclose(torch.from_numpy(env.task), task.double())


def test_a_paused_env_stays_and_the_others_go_on_as_they_would() -> None:
    plain, env = (Fr3(Config(num_envs=3, threads=1, horizon=4)) for _ in range(2))
    plain.reset(1)
    env.reset(1)
    env.pause(torch.tensor([False, True, False]))
    before, action = env.get_state(), torch.full((3, 4), 0.3)
    for _ in range(5):  # an episode of the others ends
        step, other = env.step(action), plain.step(action)
        assert torch.equal(step.obs["state"][[0, 2]], other.obs["state"][[0, 2]])
    assert torch.equal(env.get_state()["physics"][1, :7], before["physics"][1, :7])
    assert env.count.tolist() == [1, 0, 1]
    env.pause(torch.zeros(3, dtype=torch.bool))
    env.step(action)
    assert env.count.tolist() == [2, 1, 2]


def test_ranges_change_the_task() -> None:
    env = Fr3(Config(num_envs=2, ranges={"cube_x": (0.5, 0.5)}))
    env.reset(seed=0)
    np.testing.assert_allclose(env.native(np.arange(2))["cube_x"], 0.5)


def test_shaped_reward_is_the_weighted_sum_of_its_terms() -> None:
    env = Fr3(Config(num_envs=4, reward="shaped"))
    env.reset(seed=0)
    step = env.step(torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    weights = {"approach": 0.02, "grasp": 0.02, "raised": 0.06}
    by_hand = sum(weight * step.log[f"term/{name}"] for name, weight in weights.items())
    torch.testing.assert_close(step.reward, torch.as_tensor(by_hand).float())
    assert (step.reward > 0).all()


def test_nan_is_refused_with_the_row() -> None:
    env = Fr3(Config(num_envs=3))
    env.reset(seed=0)
    action = torch.zeros(3, 4)
    action[1, 2] = float("nan")
    with pytest.raises(NotFinite, match=r"fr3_lift: action is not finite in envs \[1\]"):
        env.step(action)
    env.batch.qpos[2, 0] = np.nan
    with pytest.raises(NotFinite, match=r"envs \[2\]"):
        env.step(torch.zeros(3, 4))


@pytest.mark.parametrize("drawing", ["full", "light"])
def test_pictures_show_the_scene(drawing: Literal["full", "light"]) -> None:
    env = Fr3(Config(num_envs=2, cameras=("front", "wrist"), image_size=48, drawing=drawing))
    obs = env.reset(seed=0)
    for name in ("front", "wrist"):
        assert env.spec.obs[name].shape == obs[name].shape[1:] == (48, 48, 3)
        assert obs[name].dtype == torch.uint8 and obs[name].float().std() > 5
    assert not torch.equal(env.step(torch.ones(2, 4)).obs["front"], obs["front"])
    picture = env.render(row=1, width=64, height=40)
    assert picture.shape == (40, 64, 3) and picture.float().std() > 10


EVERYTHING = {
    "friction": (0.5, 1.5),
    "mass": (0.5, 2.0),
    "gain": (0.8, 1.2),
    "damping": (0.8, 1.2),
    "camera": (-0.05, 0.05),
    "camera_turn": (-0.1, 0.1),
    "light": (0.2, 1.0),
    "colour": (-0.3, 0.3),
}


def made(**settings: object) -> Fr3:
    return Fr3(Config(num_envs=2, threads=1, **settings))  # pyright: ignore[reportArgumentType]


def extremes(env: Fr3) -> torch.Tensor:
    """A task vector: the last number lowest and highest, the others in the middle."""
    task = torch.full((2, env.task.shape[1]), 0.5)
    task[:, -1] = torch.tensor([0.0, 1.0])
    return task


def test_fields_are_what_was_drawn() -> None:
    env, plain = made(randomize=EVERYTHING, reveal=True), made()
    obs = env.reset(3)
    own = len(plain.parameters)
    assert env.spec.task is not None and env.spec.task.size == own + 5 + 3 + 3 + 3
    assert torch.equal(obs["privileged/random"], torch.from_numpy(env.task[:, own:]).float())
    cube, box, table = (
        env.model.body("cube").id,
        env.model.geom("cube").id,
        env.model.geom("table").id,
    )
    for _ in range(3):
        drawn, field = env.native(np.arange(2)), env.batch.expand
        friction, bias = field("geom_friction")[:, :, 0], field("actuator_biasprm")[:, 0]
        for found, wanted in (
            (field("body_mass")[:, cube], 0.08 * drawn["mass"]),
            (friction[:, table], 0.8 * drawn["friction"]),
            (friction[:, box], drawn["cube_friction"] * drawn["friction"]),
            (field("actuator_gainprm")[:, 0, 0], 2000 * drawn["gain"]),
            (bias[:, 1], -2000 * drawn["gain"]),
            (bias[:, 2], -100 * drawn["damping"]),
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
        env.reset()
    assert np.ptp(env.native(np.arange(2))["mass"]) > 0


def test_mass_is_felt() -> None:
    """Free fall does not know the mass; what a given force does to the cube does."""
    env = made(randomize={"mass": (0.5, 2.0)})
    env.reset(0, task=extremes(env))
    free, cube = env._free["cube"], env.model.body("cube").id
    env.batch.qpos[:, free + 2] = 0.5
    env.batch.xfrc_applied[:, cube, 2] = 0.08 * 9.81
    env.batch.step(nstep=10)
    # a = F / m - g: m is half and twice 0.08 kg, so it is +g and -g / 2.
    speed = env.batch.qvel[:, env.model.joint("cube").dofadr[0] + 2]
    np.testing.assert_allclose(speed, np.array([9.81, -9.81 / 2]) * 10 * 0.0025, rtol=1e-3)


def test_a_hand_can_be_slow() -> None:
    """35 N close a finger of damping 10 x 70 with 35 / 700 = 0.05 m/s."""
    env = made(randomize={"hand": (1.0, 70.0)})
    env.reset(0, task=extremes(env))
    widths = []
    for _ in range(9):
        env.step(torch.tensor([[0.0, 0.0, 0.0, -1.0]] * 2))
        widths.append(env.view(np.arange(2)).width)
    quick, slow = np.diff(np.stack(widths)[3:7], axis=0).mean(0) / env.spec.dt
    assert quick == pytest.approx(-0.2, rel=0.1), "as fast as it is led"
    assert slow == pytest.approx(-0.1, rel=0.1)


def test_pictures_follow() -> None:
    env = made(task="reach", randomize={"light": (0.2, 1.0), "camera": (-0.05, 0.05)})
    names = env.spec.task.names if env.spec.task else ()
    task = torch.full((2, env.task.shape[1]), 0.5)
    task[:, names.index("light")] = torch.tensor([0.0, 1.0])
    task[1, names.index("camera_x")] = 1.0
    env.reset(0, task=task)
    (near, dim), (far, lit) = (
        (model.camera("front").pos.copy(), model.light_diffuse.copy())
        for model in (env.scene(row)[0] for row in (0, 1))
    )
    place = env.model.camera("front").pos
    np.testing.assert_allclose(np.array([near, far]) - place, [[0] * 3, [0.05, 0, 0]], atol=1e-12)
    np.testing.assert_allclose(dim, 0.2 * lit, rtol=1e-6)
    env.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"randomize": {"fricton": (0.5, 1.0)}}, 'did you mean "friction"'),
        ({"randomize": {"mass": (2.0, 1.0)}}, r"must be \[low, high\]"),
        ({"randomize": {"mass": (0.0, 1.0)}}, "above 0"),
        ({"ranges": {"cube_z": (0.0, 1.0)}}, "no parameter 'cube_z'"),
        ({"task": "lft"}, "FR3 task 'lft'"),
        ({"cameras": ("back",)}, "camera 'back'"),
    ],
)
def test_wrong_settings_are_one_line(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(**settings).reset(0)


def turned_into_the_wall(stiffness: float) -> tuple[float, bool]:
    """The largest force (N) of an arm that turns about its base, and whether that violated."""
    env = Fr3Contact(ContactConfig(num_envs=4, push=0.0, threads=1))
    env.reset(0)
    action = torch.zeros(4, 8)
    action[:, 0], action[:, 7] = 0.3, stiffness
    logs = []
    for step in (env.step(action) for _ in range(100)):
        logs.append(step.log)
        assert torch.equal(step.log["violated"], step.log["force"] > 30.0)
        assert (step.terminated >= step.log["violated"]).all()
    force, violated = (torch.stack([log[name] for log in logs]) for name in ("force", "violated"))
    return float(force.max()), bool(violated.any())


def test_a_stiff_arm_presses_too_hard_and_a_soft_one_does_not() -> None:
    stiff, violated = turned_into_the_wall(1.0)
    soft, soft_violated = turned_into_the_wall(-1.0)
    assert stiff > 30.0 and violated
    assert 0.0 < soft < 30.0 and not soft_violated


def test_the_reflex_sees_what_the_chain_sees() -> None:
    """Position, velocity, torque, set-point minus position; the set-point's acceleration is that
    of the limits: 8 rad/s2 are 0.0032 rad in the first tick of 20 ms."""
    env = Fr3Contact(ContactConfig(num_envs=2, push=0.0, threads=1))
    env.reset(0)
    q = env.batch.qpos[:, :7].copy()
    action = torch.zeros(2, 8)
    action[:, 0], action[:, 7] = 1.0, 1.0
    step = env.step(action)
    joints = step.next_obs["joints"].numpy()
    np.testing.assert_allclose(joints[:, :7], env.batch.qpos[:, :7], atol=1e-6)
    np.testing.assert_allclose(joints[:, 7:14], env.batch.qvel[:, :7], atol=1e-5)
    ahead = joints[:, 21:] + joints[:, :7] - q
    np.testing.assert_allclose(ahead[:, 0], 0.0032, atol=1e-5)
    assert np.abs(ahead[:, 1:]).max() < 1e-5
    assert (joints[:, 14] > 0).all(), "the spring pulls the way the set-point went"


def test_a_picture_shows_the_arm_in_the_light() -> None:
    env = Fr3Contact(ContactConfig(num_envs=1, threads=1))
    env.reset(0)
    picture = env.render(0, 80, 60).float()
    assert picture.mean() > 60 and (picture.amin(2) > 200).sum() > 50, "white links before the sky"


def test_a_push_moves_a_soft_arm_farther() -> None:
    moved = []
    for stiffness in (1.0, -1.0):
        env = Fr3Contact(ContactConfig(num_envs=1, push=20.0, threads=1))
        start = env.reset(0)["state"][:, 14:17].clone()
        action = torch.tensor([[0.0] * 7 + [stiffness]])
        places = [env.step(action).next_obs["state"][:, 14:17] for _ in range(150)]
        moved.append(float((torch.cat(places) - start).norm(dim=1).max()))
    assert moved[1] > 2 * moved[0] > 0.001


def test_a_task_without_touch_sensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="reach has no touch sensors; use channel"):
        Fr3Contact(ContactConfig(task="reach"))
