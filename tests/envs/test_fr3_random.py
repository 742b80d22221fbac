"""Domain randomisation: the numbers are in the model, and they matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.envs.fr3.env import Config, Fr3

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


def test_a_row_goes_back_with_its_world() -> None:
    env = made(randomize=EVERYTHING)
    env.reset(1)
    state = env.get_state()
    action = torch.full((2, env.spec.act.size), 0.3)
    first = env.step(action).next_obs["state"]
    env.reset(8)
    env.set_state(state)
    assert torch.equal(env.step(action).next_obs["state"], first)


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
