"""An arm that stops itself: franky-sim, which knows no errors, made to say what a real one says."""

from __future__ import annotations

import secrets
import threading
import time
from types import TracebackType
from typing import Any, Self

from franky_sim import SimulationServer
from franky_sim.franka_robot_protocol import MoveStatus, RobotCommand, RobotMode
from franky_sim.franka_server import BaseCommand
from franky_sim.mujoco_simulator import MujocoSimulator

ERRORS = 41
JOINT_POSITION_LIMITS, SELF_COLLISION, CARTESIAN_REFLEX = 0, 2, 7  # places in libfranka's list


class ReflexArm:
    """`reflex(error)` aborts what runs, as a collision does; the arm then reports that mode and
    that error until its own error recovery is asked for."""

    def __init__(self) -> None:
        self.host = "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))
        self.error: int | None = None
        self.mode: RobotMode | None = None
        self.recovered = 0
        self._due: int | None = None
        self._over = threading.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def reflex(self, error: int) -> None:
        self._due = error

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(60)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(10)

    def _run(self) -> None:
        with MujocoSimulator() as sim:
            sim.add_robot(initial_q=(0, -0.785, 0, -2.356, 0, 1.571, 0.785))
            with SimulationServer(sim, hostname_candidates=[self.host]) as server:
                robot = server.robot_servers[0]
                self._teach(robot)
                self._up.set()
                while not self._over.is_set():
                    server.run_once(realtime=False)
                    self._abort(robot)
                    time.sleep(5e-4)

    def _teach(self, robot: Any) -> None:
        """States with the error in them, and a recovery that ends it."""
        arm, plain = self, type(robot).robot_state.fget
        recovery = robot._FrankaServer__command_class_map[RobotCommand.kAutomaticErrorRecovery]

        class Recovery(recovery):  # type: ignore[misc, valid-type]
            def handle(self, server: Any) -> None:
                arm.error, arm.mode, arm.recovered = None, None, arm.recovered + 1
                super().handle(server)

        class Erring(type(robot)):  # type: ignore[misc]
            @property
            def robot_state(self) -> Any:
                state = plain(self)
                mode = state.robot_mode if arm.mode is None else arm.mode
                flags = tuple(i == arm.error for i in range(ERRORS))
                return state.replace(robot_mode=mode, errors=flags, reflex_reason=flags)

        robot._FrankaServer__command_class_map[RobotCommand.kAutomaticErrorRecovery] = Recovery
        robot.__class__ = Erring

    def _abort(self, robot: Any) -> None:
        if self._due is None:
            return
        self.error, self._due, self.mode = self._due, None, RobotMode.kReflex
        running = robot.current_motion_id
        robot.stop_motion(send_preemption_signal=False)
        robot.reset_current_motion_id()
        robot.send_state()
        status = MoveStatus.kReflexAborted
        BaseCommand.send_response(robot._tcp_socket, RobotCommand.kMove, running, status)
