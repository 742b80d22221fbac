"""Identification: a simulated arm with known gains, friction and delay, and what is found of it."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
import yaml

from embodied.core.build import ConfigError
from embodied.embodiments import fr3
from embodied.envs.fr3.base import read_joints, write_joints
from embodied.envs.fr3.env import Config as World
from embodied.envs.fr3.env import Fr3
from embodied.envs.sysid.fit import Config, Identified, Trace, identify, nominal, read_traces
from embodied.real_robot.kernel.messages import Mode, state_record
from tests.builders import exit_of

TRUE = {
    "stiffness": np.array(fr3.STIFFNESS) * [0.6, 0.7, 0.8, 1.2, 0.9, 0.8, 1.3],
    "damping": np.array(fr3.DAMPING) * [0.6, 0.5, 0.7, 0.8, 0.9, 0.7, 1.2],
    "friction": np.array([1.5, 1.0, 0.8, 1.2, 0.5, 0.6, 0.4]),
    "armature": np.array([0.3, 0.25, 0.2, 0.15, 0.1, 0.1, 0.08]),
}
DELAY = 0.02
HERTZ = 100
STILL = 6  # the joint, counted from 0, that hardly moves
QUICK = Config(most=6, rounds=6)


def moved(seconds: float, width: float = 0.45, still: float = 1e-5) -> Trace:
    """Sums of three sines sent to an arm with the TRUE values, DELAY late, measured with noise."""
    model = nominal()
    write_joints(model, {name: value.tolist() for name, value in TRUE.items()})
    data, random = mujoco.MjData(model), np.random.default_rng(0)
    rate, phase = random.uniform(0.3, 1.6, (3, 7)), random.uniform(0, 2 * np.pi, (3, 7))
    each = np.full(7, width / 3)
    each[STILL] = still
    at = np.arange(int(seconds * HERTZ)) / HERTZ
    waves = np.sin(2 * np.pi * rate * at[:, None, None] + phase) - np.sin(phase)
    sent = fr3.HOME + (each * waves).sum(1)
    data.qpos[:7] = fr3.HOME
    q, dq = np.zeros((len(at), 7)), np.zeros((len(at), 7))
    late, every = round(DELAY * HERTZ), round(1 / HERTZ / model.opt.timestep)
    for tick in range(len(at)):
        q[tick] = data.qpos[:7] + random.normal(0, 5e-5, 7)
        dq[tick] = data.qvel[:7]
        data.ctrl[:7] = sent[max(0, tick - late)]
        mujoco.mj_step(model, data, every)
    return Trace(at, q, dq, at, sent)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return moved(4.5)


@pytest.fixture(scope="module")
def found(trace: Trace) -> Identified:
    return identify(QUICK, [trace])


def test_what_was_changed_is_found_again(found: Identified) -> None:
    moving = np.arange(7) != STILL
    for name in ("stiffness", "damping"):
        np.testing.assert_allclose(found.value[name][moving], TRUE[name][moving], rtol=0.1)
    np.testing.assert_allclose(found.value["friction"][moving], TRUE["friction"][moving], atol=0.3)
    assert found.value["delay"][0] == pytest.approx(DELAY, abs=0.003) and found.known["delay"].all()
    # Errors fall to the noise; the joint that hardly moved says nothing of its friction.
    assert (found.before[moving] > 2e-3).all() and (found.after < 3e-4).all()
    assert found.known["stiffness"][moving].all() and found.known["friction"][moving].all()
    assert not found.known["friction"][STILL] and not found.known["damping"][STILL]
    # Deviations cover what is true.
    for name, value in TRUE.items():
        far = np.abs(found.value[name] - value) / found.deviation[name]
        assert (far[found.known[name]] < 3).all(), name


def test_too_little_is_refused(trace: Trace) -> None:
    short = Trace(*(each[:100] for each in vars(trace).values()))
    with pytest.raises(ConfigError, match="at least 4 are needed"):
        identify(QUICK, [short])


def black_box(path: Path, trace: Trace) -> Path:
    """The ticks of `trace` as the control process keeps them, among others that do not count."""
    state = np.zeros(len(trace.t), state_record(7, 1))
    state["tick"] = np.arange(len(state))
    state["now"] = state["measured"] = trace.t
    state["q"], state["dq"], state["sent"] = trace.q, trace.dq, trace.sent
    state["mode"] = Mode.RUNNING
    state["mode"][:5] = Mode.IDLE
    state["measured"][50] = state["measured"][49]  # a lost answer: the last one again
    state["q"][50] = state["q"][49]
    np.savez(path, state=state)
    return path


def test_a_black_box_gives_what_moved_and_nothing_twice(tmp_path: Path, trace: Trace) -> None:
    (read,) = read_traces(black_box(tmp_path / "box.npz", trace))
    assert len(read.sent) == len(trace.t) - 5 and len(read.t) == len(trace.t) - 6
    assert read.t[0] == trace.t[5] and (np.diff(read.t) > 0).all()


def test_the_command_writes_a_world_that_can_be_stepped(
    tmp_path: Path, trace: Trace, found: Identified, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("embodied.envs.sysid.fit.identify", lambda config, traces: found)
    box, out = black_box(tmp_path / "box.npz", trace), tmp_path / "mine" / "env" / "like.yaml"
    assert exit_of("robot", "identify", box, "robot=franka", f"out={out}") == 0
    shown = capsys.readouterr().out
    assert "?: the recording does not determine it" in shown and "env=like" in shown
    assert out.with_suffix(".png").stat().st_size > 10_000
    node = yaml.safe_load(out.read_text())
    assert "friction of joint 7" in out.read_text()
    assert node.pop("_target_") == "embodied.envs.fr3.env.Fr3"
    world = Fr3(World(**{**node, "num_envs": 2, "threads": 1}))
    got = read_joints(world.model)
    for name, value in found.arm.items():
        np.testing.assert_allclose(got[name], value, atol=1e-4)
    world.reset(0)
    assert torch.isfinite(world.step(torch.zeros(2, 4)).next_obs["state"]).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["box.npz"], "say which recording"),
        (["nowhere.npz", "robot=franka"], "is not a black box"),
        (["nowhere", "robot=franka"], "neither a black box"),
        (["nowhere", "robot=frank"], "franka"),
        (["nowhere", "robot=so101"], "only the FR3"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys) -> None:
    exit_of("robot", "identify", *words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"stifness": [1.0] * 7}, "stiffness"),
        ({"friction": [1.0] * 6}, "seven numbers"),
        ({"damping": [-1.0] * 7}, "0 or more"),
    ],
)
def test_an_arm_that_cannot_be(arm: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_joints(nominal(), arm)
