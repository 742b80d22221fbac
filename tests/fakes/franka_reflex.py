"""An arm that stops itself: franky-sim, which knows no errors, made to say what a real one says.

A process of its own: the maker's library holds Python's lock while it says goodbye.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any, Self

from franky_sim import SimulationServer
from franky_sim.franka_robot_protocol import MoveStatus, RobotCommand, RobotMode
from franky_sim.franka_server import BaseCommand
from franky_sim.mujoco_simulator import MujocoSimulator

from embodied.real_robot.emulators.process import loopback_address

ERRORS = 41
CARTESIAN_REFLEX = 7  # its place in libfranka's list of errors


class ReflexArm:
    """`reflex(error)` aborts what runs, as a collision does; the arm then reports that mode and
    that error until its own error recovery is asked for. `pose(mode, error)` has it begin so."""

    def __init__(self) -> None:
        self.host = loopback_address()

    def reflex(self, error: int) -> None:
        self._say({"reflex": error})

    def pose(self, mode: RobotMode | None, error: int | None) -> None:
        self._say({"mode": mode, "error": error})

    @property
    def recovered(self) -> int:
        """How often it was asked to recover."""
        return self._say({})["recovered"]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.franka_reflex", self.host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(600)
        self._process.stdout.close()

    def _say(self, words: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


class _Arm:
    """The process's side."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.mode: RobotMode | None = None
        self.recovered = 0
        self.due: int | None = None
        self.over = threading.Event()

    def hear(self) -> None:
        for line in sys.stdin:
            words = json.loads(line)
            if "reflex" in words:
                self.due = words["reflex"]
            elif "mode" in words:
                self.mode = None if words["mode"] is None else RobotMode(words["mode"])
                self.error = words["error"]
            time.sleep(0.01)  # ten states with it
            print(json.dumps({"recovered": self.recovered}), flush=True)
        self.over.set()

    def teach(self, robot: Any) -> None:
        """States with the error in them, and a recovery that ends it."""
        arm, plain = self, type(robot).robot_state.fget
        known = robot._FrankaServer__command_class_map
        recovery = known[RobotCommand.kAutomaticErrorRecovery]

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

        known[RobotCommand.kAutomaticErrorRecovery] = Recovery
        robot.__class__ = Erring

    def abort(self, robot: Any) -> None:
        if self.due is None:
            return
        self.error, self.due, self.mode = self.due, None, RobotMode.kReflex
        running = robot.current_motion_id
        robot.stop_motion(send_preemption_signal=False)
        robot.reset_current_motion_id()
        robot.send_state()
        status = MoveStatus.kReflexAborted
        BaseCommand.send_response(robot._tcp_socket, RobotCommand.kMove, running, status)


def _main(host: str) -> None:
    arm = _Arm()
    with MujocoSimulator() as sim:
        sim.add_robot(initial_q=(0, -0.785, 0, -2.356, 0, 1.571, 0.785))
        with SimulationServer(sim, hostname_candidates=[host]) as server:
            robot = server.robot_servers[0]
            arm.teach(robot)
            threading.Thread(target=arm.hear, daemon=True).start()
            print("up", flush=True)
            while not arm.over.is_set():
                server.run_once(realtime=True)
                arm.abort(robot)


if __name__ == "__main__":
    _main(sys.argv[1])
