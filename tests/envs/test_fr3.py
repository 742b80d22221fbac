"""The FR3 tasks: success, rewards, bad input; randomised quantities are in the model and matter."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.env import NotFinite
from embodied.envs.fr3.env import Config, Fr3
from embodied.envs.fr3.tasks import TASKS
from embodied.policies.scripted import fr3
from embodied.policies.scripted.fr3 import Scripted


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """MuJoCo writes its warnings to a log file where it runs."""
    monkeypatch.chdir(tmp_path)


def actions(count: int, rows: int, size: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(rows, size, generator=generator) * 2 - 1 for _ in range(count)]


OPEN = {  # tasks with every way open
    "detour": {"can_distance": (0.2, 0.26)},
    "slalom": {"gap_width": (0.5, 0.5)},
}


def play(task: str, rows: int, quality: float = 1.0) -> tuple[float, float]:
    """Success rate of first episodes, and how much sparse reward came without success."""
    torch.manual_seed(0)
    env = Fr3(Config(task=task, num_envs=rows, ranges=OPEN.get(task, {})))
    obs = env.reset(seed=3)
    actor = Actor(Scripted(fr3.Config(task=task, quality=quality), env.spec), rows)
    first, over = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    won, unearned = over.clone(), 0.0
    while not over.all():
        step = env.step(actor(obs, first))
        obs, first = step.obs, step.ended
        success = step.log["success"]
        assert torch.equal(step.reward, success.float())
        assert torch.equal(step.terminated, success | step.log["lost"])
        unearned += step.reward[~success].sum().item()
        won |= success & ~over
        over |= step.ended
    return won.float().mean().item(), unearned


@pytest.mark.parametrize(
    "task,least",
    [
        ("lift", 0.9),
        ("reach", 0.9),
        ("push", 0.9),
        ("insert", 0.7),
        ("detour", 0.9),
        ("slalom", 0.9),
    ],
)
def test_demonstrator_succeeds_and_only_success_pays(task: str, least: float) -> None:
    rate, unearned = play(task, 32)
    assert rate > least and unearned == 0.0


@pytest.mark.parametrize("task,least,most", [("detour", 8, 24), ("slalom", 16, 31)])
def test_a_can_or_wall_touched_ends_the_episode_without_reward(
    task: str, least: int, most: int
) -> None:
    """The demonstrators go somewhere whatever stands there: half of the ways around the cans are
    closed, and each gap is half as wide as the demonstrator's range."""
    torch.manual_seed(0)
    env = Fr3(Config(task=task, num_envs=32))
    obs = env.reset(seed=3)
    actor = Actor(Scripted(fr3.Config(task=task, quality=1.0), env.spec), 32)
    first, over = torch.ones(32, dtype=torch.bool), torch.zeros(32, dtype=torch.bool)
    lost = over.clone()
    while not over.all():
        step = env.step(actor(obs, first))
        obs, first = step.obs, step.ended
        fell = step.log["lost"]
        assert not (fell & (step.log["success"] | step.truncated)).any()
        assert step.terminated[fell].all() and not step.reward[fell].any()
        lost |= fell & ~over
        over |= step.ended
    assert least <= lost.sum() <= most


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
    for action in actions(5, 2):
        step = env.step(action)
    assert step.truncated.all()
    assert not torch.allclose(torch.from_numpy(env.task), task.double())
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        env.reset(task=task + 1)


def test_a_paused_env_stays_and_the_others_go_on_as_they_would() -> None:
    plain, env = (Fr3(Config(num_envs=3, threads=1, horizon=4)) for _ in range(2))
    for each in (plain, env):
        each.reset(1)
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


def test_ranges_change_the_task_and_unknown_ones_are_named() -> None:
    env = Fr3(Config(num_envs=2, ranges={"cube_x": (0.5, 0.5)}))
    env.reset(seed=0)
    np.testing.assert_allclose(env.native(np.arange(2))["cube_x"], 0.5)
    with pytest.raises(ValueError, match="no parameter 'cube_z'"):
        Fr3(Config(ranges={"cube_z": (0.0, 1.0)}))
    with pytest.raises(ValueError, match="FR3 task 'lft'"):
        Fr3(Config(task="lft"))


def test_shaped_reward_is_the_weighted_sum_of_its_terms() -> None:
    env = Fr3(Config(num_envs=4, reward="shaped"))
    env.reset(seed=0)
    step = env.step(actions(1, 4)[0])
    terms = {name: step.log[f"term/{name}"] for name in ("approach", "grasp", "raised")}
    by_hand = (0.2 * terms["approach"] + 0.2 * terms["grasp"] + 0.6 * terms["raised"]) / 10
    torch.testing.assert_close(step.reward, by_hand.float())
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
    with pytest.raises(ValueError, match="expected"):
        env.step(torch.zeros(3, 7))


@pytest.mark.parametrize("drawing", ["full", "light"])
def test_pictures_show_the_scene(drawing: Literal["full", "light"]) -> None:
    env = Fr3(Config(num_envs=2, cameras=("front", "wrist"), image_size=48, drawing=drawing))
    obs = env.reset(seed=0)
    assert env.spec.obs["front"].shape == (48, 48, 3)
    for name in ("front", "wrist"):
        assert obs[name].shape == (2, 48, 48, 3) and obs[name].dtype == torch.uint8
        assert obs[name].float().std() > 5
    moved = env.step(torch.ones(2, 4)).obs
    assert not torch.equal(moved["front"], obs["front"])
    picture = env.render(row=1, width=64, height=40)
    assert picture.shape == (40, 64, 3) and picture.float().std() > 10
    with pytest.raises(ValueError, match="camera 'back'"):
        Fr3(Config(num_envs=1, cameras=("back",))).reset(seed=0)


def test_description_names_the_numbers() -> None:
    for task in TASKS:
        env = Fr3(Config(task=task, num_envs=1))
        env.reset(seed=0)
        assert "tool is at x" in env.describe() or "The tool is at x" in env.describe()
        assert env.spec.text


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


def test_fields_are_what_was_drawn() -> None:
    env, plain = made(randomize=EVERYTHING, reveal=True), made()
    obs = env.reset(3)
    own = len(plain.parameters)
    assert env.spec.task is not None and env.spec.task.size == own + 5 + 3 + 3 + 3
    assert torch.equal(obs["privileged/random"], torch.from_numpy(env.task[:, own:]).float())
    cube, table = env.model.body("cube").id, env.model.geom("table").id
    for _ in range(3):
        native, batch = env.native(np.arange(2)), env.batch
        for row in range(2):
            param = {name: value[row] for name, value in native.items()}
            assert batch.expand("body_mass")[row, cube] == pytest.approx(0.08 * param["mass"])
            friction = batch.expand("geom_friction")[row]
            assert friction[table, 0] == pytest.approx(0.8 * param["friction"])
            expected = param["cube_friction"] * param["friction"]
            assert friction[env.model.geom("cube").id, 0] == pytest.approx(expected)
            assert batch.expand("actuator_gainprm")[row, 0, 0] == pytest.approx(
                2000 * param["gain"]
            )
            bias = batch.expand("actuator_biasprm")[row, 0]
            assert bias[1] == pytest.approx(-2000 * param["gain"])
            assert bias[2] == pytest.approx(-100 * param["damping"])
        env.reset()
    assert np.ptp(env.native(np.arange(2))["mass"]) > 0


def test_mass_is_felt() -> None:
    """Free fall does not know the mass; what a given force does to the cube does."""
    env = made(randomize={"mass": (0.5, 2.0)})
    task = torch.full((2, env.task.shape[1]), 0.5)
    task[:, -1] = torch.tensor([0.0, 1.0])
    env.reset(0, task=task)
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
    task = torch.full((2, env.task.shape[1]), 0.5)
    task[:, -1] = torch.tensor([0.0, 1.0])
    env.reset(0, task=task)
    close = torch.tensor([[0.0, 0.0, 0.0, -1.0]]).expand(2, -1)
    widths = []
    for _ in range(9):
        env.step(close)
        widths.append(env.view(np.arange(2)).width)
    quick, slow = np.diff(np.stack(widths)[3:7], axis=0).mean(0) / env.spec.dt
    assert quick == pytest.approx(-0.2, rel=0.1), "as fast as it is led"
    assert slow == pytest.approx(-0.1, rel=0.1)


def test_pictures_follow() -> None:
    env = made(task="reach", randomize={"light": (0.2, 1.0), "camera": (-0.05, 0.05)})
    task = torch.full((2, env.task.shape[1]), 0.5)
    names = env.spec.task.names if env.spec.task else ()
    task[0, names.index("light")], task[1, names.index("light")] = 0.0, 1.0
    task[1, names.index("camera_x")] = 1.0
    env.reset(0, task=task)
    place = env.model.camera("front").pos
    models = []
    for row in range(2):
        model, _ = env.scene(row)
        models.append((model.camera("front").pos.copy(), model.light_diffuse.copy()))
    np.testing.assert_allclose(models[0][0], place, atol=1e-12)
    np.testing.assert_allclose(models[1][0], place + np.array([0.05, 0, 0]), atol=1e-12)
    np.testing.assert_allclose(models[0][1], 0.2 * models[1][1], rtol=1e-6)
    dark, bright = (env.render(row, 64, 64).float().mean() for row in range(2))
    assert dark < 0.8 * bright
    env.close()


def test_wrong_settings_are_one_line() -> None:
    with pytest.raises(ConfigError, match='did you mean "friction"'):
        made(randomize={"fricton": (0.5, 1.0)})
    with pytest.raises(ConfigError, match=r"must be \[low, high\]"):
        made(randomize={"mass": (2.0, 1.0)})
    with pytest.raises(ConfigError, match="above 0"):
        made(randomize={"mass": (0.0, 1.0)})


def test_objects_can_be_hidden() -> None:
    env, open_ = made(objects="privileged"), made()
    obs, seen = env.reset(2), open_.reset(2)
    assert torch.equal(obs["privileged/state"], seen["state"])
    assert torch.equal(obs["state"], seen["state"][:, :21])
    assert not any("cube" in name for name in env.spec.obs["state"].names)
