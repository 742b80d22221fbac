"""Contacts of running arms: `python -m tests.real_robot.contacts ROBOT [COUNT] [SEED]` drives the
tool of a simulated robot into walls, in random directions and at random speeds, with the chain,
limits and controller of its YAML, on a clock of its own. Drive number k has the seed SEED + k, and
is one line of JSON.

    sim         MuJoCo's FR3 as deployed
    franka_sim  the same arm with the springs of franka_sim.yaml and the bound of their pull
    ur_sim      the joints of the emulated controller, and a wall of `WALL` N/m that only they feel
    so101_sim   the emulated servos, one of which a wall holds

The force is the simulation's own, at every step of it; the stage sees what the driver estimates.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import yaml

from embodied.core.build import build
from embodied.embodiments.controller import Controller
from embodied.real_robot.assemble import build_chain, forward_kinematics
from embodied.real_robot.control.chunk_follower import Chunk, ChunkFollower, control_loop
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.drivers.servos.bus import MAKES
from embodied.real_robot.drivers.sim import Config as SimConfig
from embodied.real_robot.drivers.sim import Sim, arm_spec
from embodied.real_robot.emulators.servos.bus import STIFF, FeetechServo
from embodied.real_robot.emulators.ur.controller import UrJoints
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.checks import DaemonAlive
from embodied.real_robot.kernel.measured import ToolJacobian
from embodied.real_robot.kernel.messages import Command, Mode
from tests.real_robot.test_decide import deployment

ARMS = ("sim", "franka_sim", "ur_sim", "so101_sim")
MOST_OVER, LONGEST = 1.2, 0.05  # share of the limit; s for which it may be exceeded
WALL = 25e3  # N/m, of what a UR runs into: a body region of ISO/TS 15066 has 10 to 150
STALL = 3.0  # N m of an emulated servo at STIFF ticks from its goal
LONG, WATCHED = 3.0, 1.5  # s of a drive, and of it after the stop
BEGIN = 5  # ticks before it is armed
PUSH = (45.0, 45.0, 45.0, 45.0, 11.0, 11.0, 9.0)  # N m of a Franka's springs: its driver's own
HAND = 0.06  # m that a hand is wider than its tool's point
NEAR, FAR = 0.02, 0.08  # m to the wall


@dataclass
class Wall:
    """A wall before the tool: a place on it and the unit normal that points at the arm."""

    place: Floats
    normal: Floats

    def depth(self, place: Floats) -> float:
        """How far behind the wall `place` [3] is, m."""
        return float((self.place - place) @ self.normal)


class SimArm(Sim):
    """An FR3 before a wall; where the robot has springs, `PUSH` is the bound of their pull."""

    def __init__(self, bench: Bench, wall: Wall, q: Floats) -> None:
        super().__init__(SimConfig(noise=1e-4), lambda: bench.now)
        settings: Any = bench.made.driver
        self.bench, self.start, self.wall = bench, q, wall
        own = settings.get("stiffness")
        self.pull = np.inf if own is None else np.array(PUSH) / own

    def connect(self) -> None:
        world, self.world = self.world, self
        self.config = replace(self.config, start=tuple(self.start))
        super().connect()
        self.world = world

    def compile(self) -> mujoco.MjModel:
        if self.bench.model is None:
            settings: Any = self.bench.made.driver
            names = ("stiffness", "damping")
            spec = arm_spec(*(settings[name] for name in names if name in settings))
            body = spec.worldbody.add_body(name="wall", mocap=True)
            box = mujoco.mjtGeom.mjGEOM_BOX
            body.add_geom(name="wall", type=box, size=[0.2, 0.2, 0.02], pos=[0, 0, -0.02])
            self.bench.model = spec.compile()
        return self.bench.model

    def begin(self, model: Any, data: Any, random: Any) -> None:
        """Put the wall up."""
        x = np.cross(np.eye(3)[np.argmin(np.abs(self.wall.normal))], self.wall.normal)
        x /= np.linalg.norm(x)
        frame = np.stack([x, np.cross(self.wall.normal, x), self.wall.normal], 1)
        data.mocap_pos[0] = self.wall.place
        mujoco.mju_mat2Quat(data.mocap_quat[0], frame.ravel())

    def write(self, q: Floats, width: float) -> None:
        here = self.data.qpos[self.at]  # as the driver of a Franka bounds the pull
        super().write(here + np.clip(q - here, -self.pull, self.pull), width)

    def touches(self) -> Iterator[int]:
        """The contacts of the wall."""
        wall = self.model.geom("wall").id
        return (i for i in range(self.data.ncon) if wall in self.data.contact.geom[i])

    def pushed(self) -> Iterator[float]:
        """The force on the wall (N), step by step up to now."""
        now, force = self.clock(), np.zeros(6)
        while self.last + self.model.opt.timestep <= now:
            self._step()
            total = 0.0
            for i in self.touches():
                mujoco.mj_contactForce(self.model, self.data, i, force)
                total += float(np.linalg.norm(force[:3]))
            yield total


class Wireless(Driver):
    """A driver of an emulated arm, without its wire."""

    bench: Bench
    last = 0.0

    def connect(self) -> None:
        self.last = self.bench.now

    def stop(self) -> None:
        """Nothing moves on."""

    def close(self) -> None:
        """There is no wire."""


class UrDriver(Wireless):
    """The emulated controller's joints, which follow servoj whatever is in their way."""

    def __init__(self, bench: Bench, wall: Wall, q: Floats) -> None:
        settings: Any = bench.made.driver
        self.bench, self.wall = bench, wall
        self.model = UrJoints(settings["frequency"], q.tolist())
        self.lookahead = settings.get("lookahead", 0.1)
        self.target, self.force = q.tolist(), np.zeros(3)
        self.joints = tuple(f"joint{i}" for i in range(6))

    def read(self) -> ArmState:
        q, dq = np.array(self.model.q), np.array(self.model.dq)
        return ArmState(q, dq, np.zeros(6), self.last, self.force.copy())

    def write(self, q: Floats, width: float) -> None:
        self.target = q.tolist()

    def stop(self) -> None:
        self.target = list(self.model.q)

    def pushed(self) -> Iterator[float]:
        tick = 1 / self.model.frequency
        while self.last + tick <= self.bench.now + 1e-9:
            self.model.follow(self.target, self.lookahead)
            self.last += tick
            depth = self.wall.depth(self.bench.forward(np.array([self.model.q]))[0])
            self.force = WALL * max(depth, 0.0) * self.wall.normal
            yield float(np.linalg.norm(self.force))


class ServoDriver(Wireless):
    """Emulated servos; the wall holds the one that the motion moves down most, in ticks."""

    make = MAKES["feetech"]

    def __init__(self, bench: Bench, wall: Wall, q: Floats) -> None:
        settings: Any = bench.made.driver
        joints = settings["joints"]
        self.bench, self.wall = bench, wall
        self.joints = tuple(joint["name"] for joint in joints)
        self.gain = np.array([joint.get("sign", 1) for joint in joints]) * 4096 / (2 * np.pi)
        ampere = MAKES[settings["protocol"]].ampere
        self.constant = np.sign(self.gain) * ampere * [joint["torque"] for joint in joints]
        ticks = 2048 + q * self.gain
        self.servos = [FeetechServo(i, tick) for i, tick in enumerate(ticks, 1)]
        self.write(q, 0.0)
        for servo in self.servos:
            servo.then = bench.now
            servo.store(servo.TORQUE, b"\x01")
        self.held: FeetechServo | None = None

    def connect(self) -> None:
        super().connect()
        for servo in self.servos:
            servo.move(self.last)

    def read(self) -> ArmState:
        at, size = self.make.state
        moved = [self.make.motion(bytes(each.table[at : at + size])) for each in self.servos]
        position, speed, current = (np.array(each, float) for each in zip(*moved, strict=True))
        torque = current * self.constant
        dq = speed / (self.gain / 4096 * 2 * np.pi)
        return ArmState((position - 2048) / self.gain, dq, torque, self.last, None, torque)

    def write(self, q: Floats, width: float) -> None:
        for servo, tick in zip(self.servos, np.rint(2048 + q * self.gain), strict=True):
            servo.store(servo.GOAL, self.make.encode(int(tick)))

    def block(self, ways: Floats) -> None:
        """Put the wall into the way of the servo that `ways` [5] (rad) moves down most."""
        self.held = self.servos[int(np.argmin(ways * self.gain))]
        self.held.wall = self.held.at + min(float((ways * self.gain).min()), -1.0)

    def pushed(self) -> Iterator[float]:
        while self.last + 0.002 <= self.bench.now + 1e-9:
            self.last += 0.002
            for servo in self.servos:
                servo.move(self.last)
            held = self.held
            if held is None or held.wall is None or held.at > held.wall + 0.5:
                yield 0.0
                continue
            torque = STALL * min(1.0, max(0.0, held.at - held.goal()) / STIFF)
            lever = np.linalg.norm(self.bench.jacobian(self.q)[:, held.id - 1])
            yield float(torque / max(lever, 0.05))

    @property
    def q(self) -> Floats:
        return (np.array([servo.at for servo in self.servos]) - 2048) / self.gain


DRIVERS = {"sim": SimArm, "franka_sim": SimArm, "ur_sim": UrDriver, "so101_sim": ServoDriver}


def limit(name: str) -> float:
    """The force limit (N) of robot NAME's YAML."""
    force = deployment(name).force
    assert not isinstance(force, str)
    return force


@dataclass
class Touch:
    """What came of a contact: the largest force (N), for how long (s) in a row it was more than
    `MOST_OVER` times the limit, the largest from 1 s after the latch on, and the fault."""

    peak: float
    over: float
    after: float
    fault: str


class Bench:
    """One robot's control process in its own time, before walls that a random seed puts up."""

    def __init__(self, name: str, folder: Path, **changed: Any) -> None:
        self.name, self.made, self.most = name, deployment(name, **changed), limit(name)
        self.forward = forward_kinematics(self.made)
        self.jacobian = ToolJacobian(self.forward, self.made.joints)
        self.dt, self.now, self.folder = 1 / self.made.hertz, 1000.0, folder
        self.model: Any = None

    def touch(self, seed: int) -> Touch:
        """Drive into the wall of `seed`; into the next one where the arm would begin in it."""
        self.random = np.random.default_rng(seed)
        while True:
            way = self.random.normal(size=3)
            way /= np.linalg.norm(way)
            share, distance = self.random.uniform(0.3, 1.0), self.random.uniform(NEAR, FAR)
            tilt = 0.3 * self.random.normal(size=3)
            normal = tilt - (tilt @ way) * way - way
            q, wider = self.posture(), HAND if DRIVERS[self.name] is SimArm else 0.0
            place = self.forward(q[None])[0] + (distance + wider) * way
            driver = DRIVERS[self.name](self, Wall(place, normal / np.linalg.norm(normal)), q)
            if isinstance(driver, SimArm):
                driver.connect()
                if list(driver.touches()):
                    continue
            return self._drive(driver, share * way, distance)

    def posture(self) -> Floats:
        """Somewhere near home, with the tool well inside of its workspace."""
        workspace = self.made.workspace
        assert workspace is not None
        low, high = np.asarray(workspace.low), np.asarray(workspace.high)
        while True:
            q = np.asarray(self.made.home) + self.random.normal(0, 0.2, self.made.joints)
            away = self.forward(q[None])[0] - (low + high) / 2
            if (np.abs(away) < 0.35 * (high - low)).all():
                return q

    def _drive(self, driver: Any, way: Floats, distance: float) -> Touch:
        made, dt = self.made, self.dt
        chain, controller = build_chain(made), build(made.controller, Controller)
        follower = ChunkFollower(controller, made.step, made.blend, made.grace)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        channels = Channels.make(folder, made.joints, len(chain.names))
        control = control_loop(driver, chain, follower, channels, lambda: self.now)
        daemon = chain.required(DaemonAlive)
        action = np.append(way, np.zeros(len(controller.names) - 3))
        control.connect()
        if isinstance(driver, ServoDriver):
            driver.block(np.linalg.pinv(self.jacobian(driver.q)) @ way * distance)
        forces: list[float] = []
        ticks, latched, each = round(LONG / dt), None, 1
        for tick in count():
            self.now += dt
            pushed = list(driver.pushed())
            forces += pushed
            each = max(each, len(pushed))
            daemon.silence.hear(tick + 1, self.now, self.now)
            follower.take(Chunk(np.tile(action, (4, 1)), self.now, self.now))
            if tick == BEGIN:
                assert control._apply(Command.ARM, self.now)
            elif tick == BEGIN + 1:
                assert control._apply(Command.START, self.now), control.fault
            control.turn()
            if latched is None and control.mode == Mode.ESTOP:
                latched = len(forces)
            elif tick >= ticks if latched is None else len(forces) > latched + WATCHED / dt * each:
                break
        step = dt / each
        after = forces[latched + round(1 / step) :] if latched is not None else [0.0]
        fine = np.flatnonzero(np.append(forces, 0.0) <= MOST_OVER * self.most)
        over = (int(np.diff(fine, prepend=-1).max()) - 1) * step
        return Touch(max(forces), over, max(after), control.fault)


def contacts(name: str, folder: Path, drives: int, seed: int = 0, **changed: Any) -> list[Touch]:
    """What came of so many drives of robot NAME."""
    bench = Bench(name, folder, **changed)
    return [bench.touch(seed + k) for k in range(drives)]


def main(name: str, drives: str = "75", seed: str = "0", *words: str) -> None:
    changed = {key: yaml.safe_load(value) for key, value in (word.split("=") for word in words)}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(name, Path(folder), **changed)
        for each in range(int(seed), int(seed) + int(drives)):
            touch = asdict(bench.touch(each))
            print(json.dumps({"robot": name, "seed": each, **touch}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
