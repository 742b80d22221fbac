"""The reflex on a robot: the trained policy's numbers, without torch, and before a wall."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, nest
from embodied.embodiments.controller import Controller
from embodied.envs.fr3.contact_env import Fr3Contact
from embodied.learners.off_policy.bresa import Bresa
from embodied.policies.wrappers.reflex_override import ReflexOverride
from embodied.real_robot.assemble import build_chain
from embodied.real_robot.control.chunk_follower import ChunkFollower, control_loop
from embodied.real_robot.control.homing import Homing
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.drivers.sim import Config as SimConfig
from embodied.real_robot.drivers.sim import Sim
from embodied.real_robot.ipc.channels import Channels, Role
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Chain, Tick
from embodied.real_robot.kernel.checks import Finite
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.kernel.messages import Command, Mode
from embodied.real_robot.safety.learned_reflex import Config, Reflex
from tests.builders import make_policy, node_of
from tests.real_robot.test_control import Bench
from tests.real_robot.test_deploy import said, start
from tests.tiers import only_all

DT = 0.02
SPEC = Spec({"state": Leaf((8,))}, Leaf((3,), low=-1.0, high=1.0), dt=DT)
LIMITS = Limits(*((value,) * 2 for value in (-1.0, 1.0, 0.0, 2.0, 9.0, 90.0, 9.0, 9.0)))
STRIDE = (0.01, 0.02)
FITS: dict[str, Any] = {"stride": STRIDE, "stiffness": (0.4,), "springs": (50.0, 20.0)}


def policy(armed: bool = True) -> ReflexOverride:
    steps = {"decision_steps": 1, "min_duration_steps": 1, "threshold": 0.5, "release_ratio": 0.9}
    base = node_of("policies.gaussian.Gaussian", hidden=[8])
    about: dict[str, Any] = {**steps, "base": base, "hidden": [16, 16]}
    made: ReflexOverride = make_policy("wrappers.reflex_override.ReflexOverride", SPEC, 2, **about)
    made.fit({"obs/state": torch.randn(500, 8) * torch.linspace(0.1, 2, 8) + 0.3})
    for weight in [*made.risks.parameters(), *made.recovery.parameters()]:
        weight.data.mul_(2)
    made.risks.biases[-1].data.fill_(-0.9)  # so that some, not all, are above the threshold
    made.armed.fill_(armed)
    return made


def saved(made: ReflexOverride, folder: Path) -> str:
    checkpoint.save(folder / "checkpoints" / "00000000", made, 0)
    return str(folder)


def stage(folder: Path, made: ReflexOverride | None = None, dt: float = DT, **more: Any) -> Reflex:
    run = saved(made or policy(), folder)
    return Reflex(Config(**(FITS | {"run": run} | more)), 2, dt)


def tick(random: np.random.Generator) -> Tick:
    last, step = random.uniform(-0.5, 0.5, 2), random.uniform(-2, 2, 2) * STRIDE
    q = last + random.normal(0, 0.1, 2)
    arm = ArmState(q, random.normal(0, 1, 2), random.normal(0, 2, 2), 0.0)
    return Tick(last + step, last, arm, 0.0, 0.0)


@torch.no_grad()
def test_it_does_what_the_policy_does(tmp_path: Path) -> None:
    made, random = policy(), np.random.default_rng(0)
    reflex, acted = stage(tmp_path, made), 0
    for _ in range(300):
        now = tick(random)
        arm, wanted = now.arm, now.q.copy()
        state = np.concatenate([arm.q, arm.dq, arm.tau, now.last - arm.q])
        obs = {"state": torch.tensor(state, dtype=torch.float32)[None]}
        step = np.append(np.clip((wanted - now.last) / STRIDE, -1, 1), 0.4)
        risk = made.risk(obs, torch.tensor(step, dtype=torch.float32)[None]).item()
        reflex.begin(arm)
        reflex(now)
        assert reflex.risk == pytest.approx(risk, abs=1e-5)
        if abs(risk - 0.5) < 1e-4:
            continue
        assert reflex.acting == (risk > 0.5)
        recovery = made.recover(made.encoder(obs))[0].numpy()
        expected = now.last + recovery[:2] * STRIDE if reflex.acting else wanted
        np.testing.assert_allclose(now.q, expected, atol=1e-6)
        assert reflex.stiffness[0] == pytest.approx(recovery[2] if reflex.acting else 0.4, abs=1e-5)
        acted += reflex.acting
    assert 30 < acted < 270, "both cases were seen"


def test_the_chain_counts_it_and_the_limits_come_after_it(tmp_path: Path) -> None:
    made = policy()
    with torch.no_grad():
        for parameter in [*made.risks.biases, made.recovery[-1].bias]:
            parameter.fill_(9.0)  # always in danger, and away is up
    chain = Chain([stage(tmp_path, made), Finite()], Limiter(LIMITS, DT))
    assert chain.names == ("finite", "reflex", "limits")
    q = np.zeros(2)
    arm = ArmState(q, q, q, 0.0)
    chain.begin(arm)
    sent = chain(np.array([-0.5, -0.5]), 0.0, arm, 0.0)
    assert (sent > 0).all() and (sent <= np.array(STRIDE)).all()
    assert chain.counts[1] == 1


def test_a_state_that_is_no_number_is_a_fault_and_nothing_is_made_of_it(tmp_path: Path) -> None:
    reflex, now = stage(tmp_path), tick(np.random.default_rng(1))
    wanted = now.q.copy()
    now.arm.tau[1] = math.nan
    reflex(now)
    assert "risk is not a finite number" in now.fault
    np.testing.assert_array_equal(now.q, wanted)


def test_ticks_keep_no_memory(tmp_path: Path) -> None:
    reflex, now = stage(tmp_path), tick(np.random.default_rng(3))
    wanted = now.q.copy()

    def run(ticks: int) -> int:
        """Bytes that are in use after so many ticks."""
        for _ in range(ticks):
            np.copyto(now.q, wanted)
            reflex(now)
        return tracemalloc.get_traced_memory()[0]

    run(50)
    tracemalloc.start()
    before = run(0)
    kept = run(200) - before
    tracemalloc.stop()
    assert kept < 500, "bytes: a few Python numbers, no arrays"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"stride": (0.01,)}, "stride needs 2 numbers"),
        ({"dt": 0.01}, "learned at 50 Hz, the control loop runs at 100"),
        ({"stiffness": (), "springs": ()}, r"make 8 and \[2\]"),
        ({"springs": ()}, "needs springs"),
        ({"springs": (50.0,)}, "springs needs 2 numbers"),
        ({"stiffness": (1.5,)}, "from -1 to 1"),
        ({"run": "/nowhere"}, "/nowhere cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        stage(tmp_path, **settings)
    assert "\n" not in str(caught.value)


def test_a_reflex_that_never_learned_is_refused(tmp_path: Path) -> None:
    plain = make_policy("gaussian.Gaussian", SPEC, hidden=[8])
    for made, match in ((policy(armed=False), "was never armed"), (plain, "has no reflex")):
        with pytest.raises(ConfigError, match=match):
            stage(tmp_path / match, made)


pytest.importorskip("franky_sim", reason="franky-sim is not installed")
LIMIT = 30.0  # N
STEP = 0.1
INTO_THE_WALL = np.array([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def experience(env: Fr3Contact, steps: int) -> Tensors:
    """Transitions [steps * B] of held decisions, without a reflex."""
    random, kept = torch.Generator().manual_seed(0), list[Tensors]()
    obs, action = env.reset(0), torch.zeros(0)
    for number in range(steps):
        if number % 5 == 0:  # one decision: half of the arms turn into the wall, more or less
            action = torch.rand(env.num_envs, 8, generator=random) * 2 - 1
            action[::2, 0] = 1.0 - 0.5 * torch.rand(env.num_envs // 2, generator=random)
            action[::2, 1:7] *= 0.3
            action[:, 7] = 1.0
        step = env.step(action)
        results = {"reward": step.reward, "discount": 0.99 * (~step.terminated).float()}
        results |= {"action": action, "violated": step.log["violated"]}
        kept.append({**nest(obs, "obs"), **nest(step.next_obs, "next_obs"), **results})
        obs = step.obs
    return {name: torch.cat([rows[name] for rows in kept]) for name in kept[0]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run's folder: the safety critic and the recovery have learned for a minute, the task policy
    turns into the wall."""
    torch.manual_seed(0)
    node = compose(
        "train", ["experiment=fr3_channel_bresa", "learner.reflex_start=1", "learner.task.n_step=1"]
    ).node
    env = build({**node["env"], "num_envs": 64}, Fr3Contact)
    policy = build(node["policy"], Policy, spec=env.spec)
    learner = build(node["learner"], Bresa, policy=policy, spec=env.spec)
    rows = experience(env, 300)
    assert rows["violated"].sum() > 50
    learner.fit(rows)
    for _ in range(800):
        at = torch.randint(len(rows["reward"]), (learner.batch_size,))
        learner.update({name: column[at] for name, column in rows.items()})
    head: Any = learner.policy.base.get_submodule("net")[-1]  # pyright: ignore[reportIndexIssue]
    with torch.no_grad():
        head.weight.zero_()
        head.bias[:7] = torch.atanh(torch.tensor(INTO_THE_WALL, dtype=torch.float32) * 0.999)
    return saved(learner.policy, tmp_path_factory.mktemp("run"))


def deployment(run: str, *words: str) -> Deployment:
    node = compose(
        "deploy", ["robot=sim_channel", "robot.driver.noise=0", f"robot.reflex.run={run}", *words]
    ).node["robot"]
    del node["_target_"]
    sensed = list(build(node["driver"], Driver).sensed)
    return Deployment.parse({**node, "policy": "", "sensed": sensed})


class ReflexBench(Bench):
    """The control process of a deployment, on the test's clock, under one and the same decision."""

    def __init__(self, folder: Path, made: Deployment) -> None:
        self.now, self.force, self.soft = 1000.0, list[float](), list[float]()
        self.action, self.sent = None, []
        settings = {k: v for k, v in made.driver.items() if k != "_target_"}
        self.driver = Sim(SimConfig(**settings), lambda: self.now)
        chain = build_chain(made)
        names, sensed = len(chain.names), len(made.sensed)
        self.control = control_loop(
            self.driver,
            chain,
            ChunkFollower(build(made.controller, Controller), made.step),
            Channels.make(folder, 7, names, sensed),
            lambda: self.now,
            homing=Homing(np.asarray(made.home), made.limits),
        )
        self.there = Channels.open(folder, 7, names, sensed, Role.ALL)
        self.control.connect()
        self.full = self.gains.copy()

    @property
    def gains(self) -> Floats:
        """The stiffness [7] of the simulated arm's springs, N m/rad."""
        return self.driver.model.actuator_gainprm[self.driver.servos, 0]

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.now += DT
            self.there.beat(self.now)
            self.control.turn()
            assert self.there.state.receive()
            fields = self.there.state.fields[0]
            self.sent.append(fields["sent"].copy())
            self.force.append(float(fields["sensed"][self.driver.sensed.index("contact_force")]))
            self.soft.append(float((self.gains / self.full).min()))

    def becomes(self, mode: Mode) -> None:
        for _ in range(500):
            self.run(1)
            if self.mode == mode:
                return
        pytest.fail(f"it is {self.mode.name}, never {mode.name}")

    def push_on(self, seconds: float) -> None:
        """From home on, `seconds` of a policy that turns into the wall."""
        self.run(2)
        assert self.ask(Command.HOME) == Mode.HOMING
        self.becomes(Mode.IDLE)
        assert self.ask(Command.ARM) == Mode.ARMED
        self.speak(INTO_THE_WALL, 2)
        self.run(1)
        assert self.ask(Command.START) == Mode.RUNNING
        self.force.clear()
        self.soft.clear()
        for _ in range(round(seconds / STEP)):
            self.speak(INTO_THE_WALL, 2)
            self.run(round(STEP / DT))


def test_the_reflex_of_a_run_keeps_the_arm_from_pressing_on_a_wall(
    run: str, tmp_path: Path, folder: Path
) -> None:
    """Without it the same policy presses with more than the limit of the task; with it the arm
    presses less, and its springs have been softer."""
    plain = ReflexBench(folder, deployment(run, "robot.reflex=null"))
    plain.push_on(3.0)
    assert max(plain.force) > LIMIT and min(plain.soft) == 1.0
    bench = ReflexBench(tmp_path, deployment(run))
    bench.push_on(3.0)
    reflex = bench.control.chain.names.index("reflex")
    assert bench.control.chain.counts[reflex] > 10 and min(bench.soft) < 0.9
    assert max(bench.force) < LIMIT
    assert bench.mode == Mode.RUNNING, bench.control.fault
    bench.ask(Command.STOP)
    bench.run(100)
    np.testing.assert_allclose(bench.gains, bench.full)  # stiff again where it is held


def test_a_driver_with_other_springs_is_refused(run: str, tmp_path: Path) -> None:
    """The reflex was trained with the stiffness that it asks for."""
    softer = "robot.driver.world.arm.stiffness=[300,300,300,300,100,100,50]"
    with pytest.raises(ConfigError, match=r"the driver's \[300") as caught:
        ReflexBench(tmp_path, deployment(run, softer))
    assert "\n" not in str(caught.value)


@only_all  # its chain: above
def test_embodied_deploy_runs_the_task_policy_and_the_reflex_of_one_run(
    run: str, tmp_path: Path, folder: Path
) -> None:
    """The policy process decides at 10 Hz, the reflex runs in the chain at 50 Hz."""
    words = ("robot=sim_channel", f"policy={run}", f"robot.reflex.run={run}", "seconds=3")
    printed = said(start(tmp_path, folder, *words, "record=false"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(summary["episodes"]) == 1, printed
    assert summary["episodes"][0]["interventions"]["reflex"] > 0, printed
