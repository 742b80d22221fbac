"""A policy made for the simulation moves an arm behind a driver, by the names of what it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import DEPTH, POINTS, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.embodiments import fr3
from embodied.embodiments.controller import Controller
from embodied.embodiments.named_controllers import NAMES
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.mujoco.batch_env import MujocoVecEnv
from embodied.envs.so101 import Config as So101Config
from embodied.envs.so101 import So101
from embodied.real_robot.assemble import tool_target
from embodied.real_robot.control.chunk_follower import Chunk, ChunkFollower
from embodied.real_robot.deployment import Deployment, controller_settings
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.messages import Command, Mode
from embodied.real_robot.policy.decider import Decider
from embodied.real_robot.policy.observer import Observer, observer, require_actions
from tests.builders import make_policy
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
    shown = dict(zip(names, obs.astype(np.float64).tolist(), strict=True))
    q, dq = (np.array([shown[f"{name}{i}"] for i in range(1, 8)]) for name in ("q", "dq"))
    here, lead = (np.array([shown[f"{n}_{axis}"] for axis in "xyz"]) for n in ("tool", "lead"))
    observer = Observer(SPEC, 7, tool, {name: shown[name] for name in GOAL})
    seen = observer(q, dq, here + lead, shown["width"])["state"]
    assert seen == pytest.approx(obs, abs=1e-5)


def test_the_scripted_policy_reaches_its_goal_through_the_bridge(tmp_path: Path) -> None:
    script = make_policy("scripted.fr3.Scripted", SPEC, task="reach", quality=1.0)
    arm, goal = Arm(tmp_path, script), np.array(list(GOAL.values()))
    arm.runs()
    away: list[float] = []  # the script corrects late observations: it moves around its goal
    for _ in range(30):
        arm.run(10)
        assert arm.bench.control.mode == Mode.RUNNING, arm.bench.control.fault
        away.append(float(np.linalg.norm(tool(arm.bench.driver.read().q[None])[0] - goal)))
    assert min(away) < 0.02 and max(away[-15:]) < 0.06


class Counting(Policy):
    """Says the number of its decision in the episode, as one that executes a plan does."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def initial(self, n: int) -> Tensors:
        return {"decisions": torch.zeros(n)}

    def sample_noise(self, n: int, explore: bool = False) -> torch.Tensor:
        return torch.zeros(n, 0)

    def act(self, obs: Tensors, carry: Tensors, noise: torch.Tensor) -> tuple[torch.Tensor, Any]:
        count = carry["decisions"]
        return 0.01 * count.expand(1, 1, self.spec.act.size), {"decisions": count + 1}


def test_an_episode_begins_when_the_arm_starts_however_long_it_was_armed(tmp_path: Path) -> None:
    arm = Arm(tmp_path, Counting(SPEC))
    arm.run(20)
    assert arm.obey(Command.ARM) == Mode.ARMED
    arm.run(200)
    assert float(arm.chunks[-1]["actions"][0, 0]) == 0, "nothing of it was done yet"
    assert arm.obey(Command.START) == Mode.RUNNING
    arm.run(20)
    said = [round(100 * float(chunk["actions"][0, 0])) for chunk in arm.chunks]
    begun = said[len(said) - 1 - said[::-1].index(0) :]
    assert begun == list(range(len(begun))) and len(begun) > 2
    presence = arm.bench.control.presence
    lets_go, presence.waits = presence.waits, lambda now, moving: True  # of hold-to-run
    arm.run(100)
    assert arm.bench.control.mode == Mode.RUNNING
    presence.waits = lets_go
    arm.run(20)
    assert float(arm.chunks[-1]["actions"][0, 0]) <= 0.04, "it goes on from where it stands"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"front": Leaf((8, 8, 3), "uint8", 0, 255)}, "name a camera"),
        ({"more": Leaf((2,))}, "have no names"),
        ({"seen": Leaf((8, 3), unit=POINTS)}, "the point cloud seen, and no camera here measures"),
        ({"front": Leaf((8, 8, 1), unit=DEPTH)}, "the depth picture front, and no camera here mea"),
    ],
)
def test_what_nobody_measures_is_one_line(more: dict[str, Leaf], says: str) -> None:
    with pytest.raises(ConfigError, match=r"the policy observes goal_x.* does not measure"):
        Observer(SPEC, 7, tool, {})
    with pytest.raises(ConfigError, match=says):
        Observer(SPEC.with_obs(**more), 7, tool, GOAL)


ROBOTS = Path(__file__).resolve().parents[2] / "configs" / "robot"


def deployment(robot: str, **changed: Any) -> Deployment:
    """Of configs/robot/ROBOT.yaml, `changed`, without a policy."""
    node = yaml.safe_load((ROBOTS / f"{robot}.yaml").read_text())
    del node["_target_"]
    return Deployment.parse(controller_settings(node) | {"policy": ""} | changed)


@pytest.mark.parametrize("controller", NAMES)
@pytest.mark.parametrize("robot", ["sim", "so101_sim"])
def test_parity(robot: str, controller: str) -> None:
    """Thirty random actions: joint targets and hand to 1e-9, what a policy sees to 1e-6."""
    if robot == "sim":
        env: MujocoVecEnv = Fr3(Fr3Config(task="reach", num_envs=1, controller=controller))
    else:
        env = So101(So101Config(num_envs=1, controller=controller))
    obs = env.reset(0)["state"][0]
    names = env.spec.obs["state"].names
    goal = {n: float(obs[names.index(n)]) for n in ("goal_x", "goal_y", "goal_z")}
    made = deployment(robot, controller=controller, given=goal)
    require_actions(env.spec, made)
    n, seen, target = made.joints, observer(env.spec, made), tool_target(made)
    follower = ChunkFollower(build(made.controller, Controller), made.step)
    q, width = env.batch.qpos[0, :n].copy(), float(env.memory["width"][0])
    follower.begin(q, width, 0.0)
    random, out = np.random.default_rng(0), np.zeros(n)
    for k in range(30):
        action = random.uniform(-1, 1, (1, len(env.spec.act.names))).astype(np.float32)
        follower.take(Chunk(action.astype(float), k * made.step, k * made.step))
        follower.previous = None  # one step is one chunk here: nothing is blended
        follower(env.batch.qpos[0, :n].copy(), (k + 0.01) * made.step, out)
        step = env.step(torch.from_numpy(action))
        if bool(step.terminated[0]):
            break
        assert follower.step_end == pytest.approx(env.batch.ctrl[0, :n], abs=1e-9)
        hand = env.batch.ctrl[0, n] * (2 if robot == "sim" else 1)
        assert follower.width == pytest.approx(hand, abs=1e-9)
        there = step.next_obs["state"][0]
        q, dq = env.batch.qpos[0, :n], env.batch.qvel[0, :n]
        here = seen(q, dq, target(follower.step_end), float(there[names.index("width")]))["state"]
        if controller != "cartesian_delta":  # its reference is ahead of what the joints reach
            assert here == pytest.approx(there.numpy(), abs=1e-6)
    assert k >= 10


def spec(low: Any, high: Any, names: tuple[str, ...] = ()) -> Spec:
    obs = {"state": Leaf((1,), names=("q1",))}
    return Spec(obs, Leaf((6,), low=low, high=high, names=names), dt=0.05)


def test_units_that_do_not_match_are_refused_in_one_line() -> None:
    normal = deployment("so101_sim", controller="joint_position")
    node = dict(normal.controller) | {"action": "deg", "hand_values": [0.0, 100.0]}
    degrees = deployment("so101_sim", controller=node)
    require_actions(spec(-1.0, 1.0), normal)
    require_actions(spec((-1.0,) * 6, (1.0,) * 6), normal)
    require_actions(spec(-180.0, 180.0), degrees)
    require_actions(spec(None, None), degrees)
    with pytest.raises(ConfigError, match=r"controller\.action=deg"):
        require_actions(spec(-180.0, 180.0), normal)
    with pytest.raises(ConfigError, match=r"controller\.action=normalized"):
        require_actions(spec(-1.0, 1.0), degrees)
    with pytest.raises(ConfigError, match=r"robot\.controller=joint_position"):
        require_actions(spec(-1.0, 1.0, tuple("abcdef")), normal)


def test_the_yaml_takes_the_name_of_a_controller() -> None:
    made = deployment("sim", controller="joint_position", step=0.1)
    assert made.controller["arm"] == "fr3" and made.controller["dt"] == 0.1
    with pytest.raises(ConfigError, match="did you mean"):
        deployment("sim", controller="joint_pos")
