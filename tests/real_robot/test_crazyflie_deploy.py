"""A policy of rotor speeds in the firmware: exported, compiled, flown by set-points over the radio;
and `embodied deploy` with a drone: take-off, flight to a goal, a recording, and down again.

The policy is one linear layer whose numbers are those of the simulator's pilot near hovering, with
the rotor speeds, which nobody measures, from the actions before.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.compose import compose
from embodied.core.checkpoint import save
from embodied.datasets.lerobot.reader import read_episodes
from embodied.deploy.site import site
from embodied.embodiments.crazyflie import PAPER
from embodied.envs.hardware_sim.crazyflie_flight import CPU
from embodied.envs.quadrotor import goto_env
from embodied.envs.quadrotor.dynamics import QUICK, Pilot
from embodied.envs.quadrotor.hover_env import Config, Quadrotor
from embodied.export.crazyflie import export_app
from embodied.real_robot.assemble import build_driver
from embodied.real_robot.drivers.crazyflie.driver import Crazyflie
from embodied.real_robot.kernel.driver import DriverError
from tests.builders import make_policy, node_of
from tests.fakes.crazyflie import FakeCrazyflie
from tests.real_robot.test_crazyflie import driver, near, take_off, towards, until
from tests.real_robot.test_deploy import robot, said, start

PAST, DT = 32, 0.01
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) here")


def like_the_pilot() -> Any:
    """tanh(W obs + b) with the pilot's derivatives at hover."""
    pilot, hover = Pilot(PAPER, CPU), PAPER.hover
    still = torch.zeros(17, 1)
    still[3], still[13:] = 1.0, (hover + 1) / 2
    nothing = torch.zeros(3, 1)

    def commands(state: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros(1)
        wanted = pilot.towards(state, nothing, nothing)
        return pilot(state, wanted, pilot.turn_to(state, zero))[:, 0]

    slope: Any = torch.autograd.functional.jacobian(commands, still)[:, :, 0]
    weight = torch.zeros(4, 18 + 4 * PAST)
    weight[:, :3], weight[:, 12:18] = slope[:, :3], slope[:, 7:13]
    # A small turn is twice the quaternion's part, and half of what R has across its diagonal.
    for axis, (up, down) in enumerate(((10, 8), (5, 9), (6, 4))):
        weight[:, up], weight[:, down] = slope[:, 4 + axis] / 4, -slope[:, 4 + axis] / 4
    fade = math.exp(-DT / PAPER.rise)
    shares = torch.tensor([(1 - fade) * fade**age for age in range(PAST - 1, -1, -1)])
    for k, share in enumerate(shares / shares.sum()):
        weight[:, 18 + 4 * k : 22 + 4 * k] = torch.eye(4) * share * (1 - PAPER.rise / QUICK)
    rest = torch.zeros(18 + 4 * PAST)
    rest[3:12:4], rest[18:] = 1.0, hover
    env = Quadrotor(Config(num_envs=1, history=PAST))
    policy = make_policy("deterministic.Deterministic", env.spec, hidden=[])
    layer = policy.feedforward().net[0]
    with torch.no_grad():
        layer.weight[:] = weight / (1 - hover**2)
        layer.bias[:] = math.atanh(hover) - layer.weight @ rest
    return policy.eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save(folder / "checkpoints" / "00000000", like_the_pilot(), 0)
    node = {"_target_": "embodied.envs.quadrotor.hover_env.Quadrotor", "vehicle": "paper"}
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": node}))
    return folder


def test_it_takes_over_in_the_air_and_follows_the_setpoint(run: Path, tmp_path: Path) -> None:
    settings = export_app(run, tmp_path)
    with (
        FakeCrazyflie(onboard=str(tmp_path), vehicle="paper") as fake,
        driver(fake, **settings) as arm,
    ):
        body = fake.air.body
        take_off(arm, fake)
        assert not body.learned or fake.height > 0.25
        until(lambda: body.learned, "it takes over", towards(arm, [0, 0, 0.4, 0]))
        goal = [0.15, -0.1, 0.5]
        until(near(fake, goal, 0.05), "it follows", towards(arm, [*goal, 0.0]))
        assert body.learned and body.onboard is not None and body.onboard.flies
        arm.stop()
        until(lambda: not body.learned, "its own controller lands it", arm.read)
        until(lambda: fake.height == 0, "it is down", arm.read)


def test_another_policy_on_board_is_refused(run: Path, tmp_path: Path) -> None:
    settings = export_app(run, tmp_path)
    other = f"{int(settings['onboard'], 16) ^ 1:08x}"
    for carries, wanted, says in (
        ({"onboard": str(tmp_path)}, other, f"carries policy {settings['onboard']}, not {other}"),
        ({}, settings["onboard"], "it carries no policy"),
    ):
        with FakeCrazyflie(**carries) as fake, pytest.raises(DriverError, match=says):
            driver(fake, onboard=wanted).connect()


def test_deploy_puts_it_where_it_belongs(run: Path, tmp_path: Path) -> None:
    """By the names of its actions; a script says where to go."""
    node = compose("deploy", ["robot=crazyflie_sim"]).node
    with site(node, str(run), tmp_path) as here:
        made = here.deployment
        assert made.onboard is not None and made.onboard.policy == str(run.resolve())
        assert "policy/checkpoints" in made.policy and here.simulated
        with build_driver(made) as arm:
            assert isinstance(arm, Crazyflie) and len(arm.config.onboard) == 8
    assert (tmp_path / "onboard" / "src" / "policy_controller.c").exists()


def test_a_drone_flies_to_its_goal_and_comes_down(tmp_path: Path, folder: Path) -> None:
    """It knows its place from a motion capture system beside it."""
    outside = "robot.emulator.external=true"
    deploy = start(tmp_path, folder, "robot=crazyflie_sim", "demonstrator=fly", outside)
    text = said(deploy)
    assert deploy.returncode == 0, text
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert [each["end"] for each in summary["episodes"]] == ["success"], text
    log = (out / "daemon.log").read_text()
    assert "IDLE -> HOMING" in log and "ARMED -> RUNNING" in log and "fault" not in log
    sent = read_episodes(out / "recording").episode(0)["action/sent"].numpy()
    assert sent[0, 2] > 0.3, "the episode began in the air"
    assert np.abs(np.diff(sent, axis=0)).max() <= 0.8 * 0.05 * 1.5, "the limits were kept"
    assert np.linalg.norm(sent[-1, :3] - [0.5, -0.3, 0.8]) < 0.1


def test_a_policy_of_the_setpoint_world_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rate, actions, observations and parity: what it was trained in is what is flown."""
    spec = goto_env.QuadrotorGoto(goto_env.Config(num_envs=1)).spec
    run = tmp_path / "run"
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", spec, hidden=[16])
    save(run / "checkpoints" / "00000000", policy, 0)
    world = node_of("envs.quadrotor.goto_env.QuadrotorGoto", num_envs=4)
    (run / "run.yaml").write_text(yaml.safe_dump({"env": world, "data": {"normalize": False}}))
    code, text = robot(capsys, "check", "robot=crazyflie_sim", f"policy={run}")
    lines = {line.split()[1]: line.split()[0] for line in text.splitlines() if line[:2] == "  "}
    fine = ("policy", "rate", "actions", "observations", "parity", "limits", "workspace")
    assert code == 0 and {lines[name] for name in fine} == {"ok"}, text
