"""`python -m embodied.envs.hardware_sim.franka_main FOLDER`: the process of
`embodied.envs.hardware_sim.franka`.

franky-sim's own loop sleeps a millisecond less the time of a step, and so falls behind. This one
keeps deadlines and runs in real time where the machine is fast enough. Where it is not, simulated
time goes slower: a step waits for the torques that answer its state, because a late answer would be
a delay in the control loop and shake the arm.
"""

from __future__ import annotations

import itertools
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import mujoco
import numpy as np
from franky_sim import SimulationServer
from franky_sim.franka_gripper_protocol import GripperCommandStatus
from franky_sim.franka_gripper_server import FrankaGripperServer
from franky_sim.franka_server import BaseCommand
from franky_sim.mujoco_simulator import FrankaMujocoRobot, MujocoSimulator

from embodied.core.build import build
from embodied.embodiments import fr3
from embodied.envs.fr3.base import addresses, mocaps
from embodied.envs.hardware_sim.fr3_task import TaskWorld
from embodied.envs.hardware_sim.franka import Config
from embodied.real_robot.drivers.mujoco_arm import (
    MomentumObserver,
    mujoco_bias,
    mujoco_inertia,
)
from embodied.real_robot.emulators.process import Pace, answer, loopback_address, settings
from embodied.real_robot.ipc.external_state import ExternalStateWriter


def answer_all(hand: FrankaGripperServer) -> None:
    """Let `hand` answer what a stop, or the next motion, breaks off.

    A real hand replies "aborted"; that of franky-sim 1.0 does not. Then the caller's thread waits
    for ever, and in libfranka each waiting thread holds the connection for 10 ms at a time: after a
    few aborted motions every command is late by tenths of a second.
    """
    for name in ("stop", "_start_motion"):
        setattr(hand, name, _after_answering(hand, getattr(hand, name)))


def _after_answering(hand: FrankaGripperServer, do: Any) -> Any:
    def answered(*args: Any) -> None:
        kept: dict[str, Any] = vars(hand)
        if kept["_pending_command_id"] is not None:
            BaseCommand.send_response(
                kept["_pending_tcp_socket"],
                kept["_pending_command_type"],
                kept["_pending_command_id"],
                GripperCommandStatus.kAborted,
                command_type_struct="H",
                status_type_struct="H",
            )
            kept["_pending_command_id"] = None
        do(*args)

    return answered


def estimate_forces(sim: MujocoSimulator) -> None:
    """Let robots say what they push with, as libfranka does: in franky-sim (1.0) it is nothing."""
    kind, robots = cast(Any, FrankaMujocoRobot), cast(Any, sim)
    said = kind.state.fget
    observers: dict[int, MomentumObserver] = {}
    wrenches: dict[int, dict[str, tuple[float, ...]]] = {}
    steps = itertools.count()

    def observe(_: Any) -> None:
        due = next(steps) % OBSERVED == 0
        for robot in robots.robots:
            model, data, dofs = robot.model, robot.data, robot._dof_addrs
            observer = observers.setdefault(id(robot), MomentumObserver(len(dofs)))
            observer.step(mujoco_bias(model, data, dofs), robot._applied_torques)
            if not due:
                continue
            observer.update(mujoco_inertia(model, data, dofs), data.qvel[dofs], STEP)
            jacobian = fr3.forward(data.qpos[None, robot._qpos_addrs])[2][0]
            square = jacobian @ jacobian.T + SINGULAR * np.eye(6)
            wrench = np.linalg.solve(square, jacobian @ -observer.external)
            wrenches[id(robot)] = {"O_F_ext_hat_K": tuple(wrench.tolist())}
            wrenches[id(robot)]["tau_ext_hat_filtered"] = tuple((-observer.external).tolist())

    sim.register_post_step_callback(observe)
    kind.state = property(lambda robot: said(robot).replace(**wrenches.get(id(robot), {})))


STEP = 0.001  # s of physics
OBSERVED = 4  # steps from one estimate of the forces to the next
SINGULAR = 1e-4  # near a singular pose an estimated force grows no more
LOOK = 0.01  # s from one look at the things to the next
AGE = 1.0  # s: a busy machine is no fault here
ANSWER = 0.02  # s that a step waits for the controller at most: it may be gone
BEHIND = 0.05  # s that are caught up with at most: after a stall the world goes on late


class Things:
    """The things before the arm, as the simulator knows them, told to whoever looks."""

    def __init__(self, world: TaskWorld, folder: Path, seed: int) -> None:
        self.world = world
        self.writer = ExternalStateWriter(folder, world.names)
        self.random = np.random.default_rng(seed)

    def put(self, worldbody: ElementTree.Element) -> None:
        """The task's bodies, into a scene that is not yet compiled; its floor is the table."""
        spec = mujoco.MjSpec()
        self.world.task.edit(spec)
        made = ElementTree.fromstring(spec.to_xml()).find("worldbody")
        worldbody.extend(made if made is not None else [])

    def begin(self, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        task = self.world.task
        self.world.free = addresses(model, task)
        self.world.markers = mocaps(model, task)
        self._place_things(model, data)

    def look(self, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        """Tell what is so now; lay out again where that was asked for."""
        if self.writer.renew_requested():
            self._place_things(model, data)
            self.writer.acknowledge_renew()
        self.writer.publish(self.world.sense(data), time.monotonic())

    def _place_things(self, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        self.world.begin(model, data, self.random)
        mujoco.mj_forward(model, data)


def main(folder: Path) -> None:
    """Run until standard input ends. `folder` gets the states of the things."""
    config = settings(Config)
    host = config.host or loopback_address()
    said: dict[str, Any] = {"host": host}
    things = (
        None
        if config.world is None
        else Things(build(config.world, TaskWorld), folder, config.seed)
    )
    with MujocoSimulator() as sim:
        sim.add_robot(initial_q=config.q, initial_hand_width=config.width)
        estimate_forces(sim)
        if things is not None:
            things.put(sim.worldbody)
        with SimulationServer(sim, hostname_candidates=[host]) as server:
            model, data = sim.model, sim.data
            assert model is not None and data is not None
            # Firm friction, as in training; else held things creep out of the hand
            model.opt.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
            model.opt.impratio = 10.0
            for robot in server.robot_servers:
                if robot.gripper_server is not None:
                    answer_all(robot.gripper_server)
            if things is not None:
                things.begin(model, data)
                things.look(model, data)
                said["senses"] = {
                    "_target_": "embodied.real_robot.ipc.external_state.ExternalStateReader",
                    "folder": str(folder),
                    "names": things.world.names,
                    "age": AGE,
                }
            _run(server, said, (lambda: things.look(model, data)) if things is not None else None)


def _run(server: SimulationServer, said: dict[str, Any], look: Any) -> None:
    over = threading.Event()
    pace = Pace(STEP, BEHIND)
    looked = time.monotonic()
    threading.Thread(target=answer, args=(said, pace.behind, over), daemon=True).start()
    while not over.is_set():
        server.run_once(realtime=False)
        # Wait until the program of each robot has answered its newest state.
        for robot in server.robot_servers:
            if robot.current_motion_id:
                # The one thing that franky-sim (1.0) keeps to itself.
                wire = getattr(robot, "_FrankaServer__udp_socket")  # noqa: B009
                select.select([wire], [], [], ANSWER)
        now = time.monotonic()
        if look is not None and now - looked >= LOOK:
            looked = now
            look()
        time.sleep(pace.next())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
