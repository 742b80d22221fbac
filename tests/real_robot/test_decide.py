"""A policy made for the simulation moves an arm behind a driver, by the names of what it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import DEPTH, POINTS, Leaf
from embodied.embodiments import fr3
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.messages import Command, Mode
from embodied.real_robot.policy.decider import Decider
from embodied.real_robot.policy.observer import Observer
from tests.real_robot.test_control import DT, STEP, Bench

GOAL = {"goal_x": 0.5, "goal_y": 0.15, "goal_z": 0.2}
SPEC = Fr3(Fr3Config(task="reach", num_envs=1)).spec


def tool(q: Floats) -> Floats:
    return fr3.forward(q)[0]


def decider_of(bench: Bench, policy: Policy) -> Decider:
    """What decides by `policy` for the arm of `bench`, on its clock."""
    return Decider(
        policy,
        Observer(policy.spec, 7, tool, GOAL),
        bench.there.state,
        bench.there.chunk,
        lambda sent: tool(sent[None])[0],
        clock=lambda: bench.now,
    )


class Arm:
    """A simulated arm, its control loop and a policy, in one process and on one clock."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        folder.mkdir(exist_ok=True)
        self.bench = Bench(folder, noise=1e-4)
        self.decider = decider_of(self.bench, policy)
        self.decided: list[bool] = []
        self.chunks: list[Any] = []

    def decides(self) -> bool:
        """Whether the policy decides now."""
        return round(self.bench.now / DT) % round(STEP / DT) == 0

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.bench.now += DT
            if self.decides():
                self.decided.append(self.decider.turn())
                self.chunks.append(self.decider.chunk.fields[0].copy())
            self.bench.control.turn()

    def obey(self, *commands: Command) -> Mode:
        for command in commands:
            self.bench.request(command)
            self.run(6)
        return self.bench.control.mode

    def runs(self) -> None:
        self.run(20)
        assert self.obey(Command.ARM) == Mode.ARMED, self.bench.control.fault
        assert self.obey(Command.START) == Mode.RUNNING, self.bench.control.fault


def test_every_element_is_the_simulations() -> None:
    """What the observer makes of a joint state is what the world shows of it, name by name."""
    env = Fr3(Fr3Config(task="reach", num_envs=1))
    obs = env.reset(3)["state"][0].numpy()
    names = SPEC.obs["state"].names
    shown = dict(zip(names, obs, strict=True))
    q = np.array([shown[f"q{i}"] for i in range(1, 8)], dtype=np.float64)
    dq = np.array([shown[f"dq{i}"] for i in range(1, 8)], dtype=np.float64)
    here = np.array([shown[f"tool_{axis}"] for axis in "xyz"])
    lead = np.array([shown[f"lead_{axis}"] for axis in "xyz"])
    given = {f"goal_{axis}": float(shown[f"goal_{axis}"]) for axis in "xyz"}
    observer = Observer(SPEC, 7, tool, given)
    seen = observer(q, dq, here + lead, float(shown["width"]))["state"]
    assert seen == pytest.approx(obs, abs=1e-5)


def test_the_scripted_policy_reaches_its_goal_through_the_bridge(tmp_path: Path) -> None:
    torch.manual_seed(0)
    node = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "reach", "quality": 1.0}
    arm, goal = Arm(tmp_path, build(node, Policy, spec=SPEC)), np.array(list(GOAL.values()))
    arm.runs()
    away: list[float] = []  # the script corrects late observations: it moves around its goal
    for _ in range(30):
        arm.run(10)
        assert arm.bench.control.mode == Mode.RUNNING, arm.bench.control.fault
        away.append(float(np.linalg.norm(tool(arm.bench.driver.read().q[None])[0] - goal)))
    assert min(away) < 0.02 and max(away[-15:]) < 0.06


def test_what_nobody_measures_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"the policy observes goal_x.* does not measure"):
        Observer(SPEC, 7, tool, {})
    with pytest.raises(ConfigError, match="name a camera"):
        Observer(SPEC.with_obs(front=Leaf((8, 8, 3), "uint8", 0, 255)), 7, tool, GOAL)
    with pytest.raises(ConfigError, match="have no names"):
        Observer(SPEC.with_obs(more=Leaf((2,))), 7, tool, GOAL)
    with pytest.raises(ConfigError, match="the point cloud seen, and no camera here measures"):
        Observer(SPEC.with_obs(seen=Leaf((8, 3), unit=POINTS)), 7, tool, GOAL)
    with pytest.raises(ConfigError, match="the depth picture front, and no camera here measures"):
        Observer(SPEC.with_obs(front=Leaf((8, 8, 1), unit=DEPTH)), 7, tool, GOAL)
