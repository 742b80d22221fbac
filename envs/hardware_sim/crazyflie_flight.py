"""Quadrotor physics behind CRTP over UDP: the simulated Crazyflie: its body, radio and process.

The firmware's rules are in `embodied.real_robot.emulators.crazyflie`; the flight
controller is that of `embodied.envs.quadrotor.dynamics`. Time is real as far as the
machine keeps up. A policy on board is the exported C code, compiled for this machine: the same two
headers that the firmware would run, called at the same rate, within the same distance of the goal.
"""

from __future__ import annotations

import ctypes
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError, nearest
from embodied.embodiments.crazyflie import BOX, VEHICLES, Vehicle
from embodied.envs.hardware_sim.crazyflie import Config
from embodied.envs.quadrotor.dynamics import Pilot, numbers
from embodied.real_robot.emulators.crazyflie import Firmware, Measured, Server, Setpoint, Vector
from embodied.real_robot.emulators.process import Pace, answer, settings
from embodied.real_robot.ipc.external_state import ExternalStateWriter

MAIN = """\
#include "policy_flight.h"
static policy_flight_t flight;
void begin(void);
bool step(const float *, const float *, const float *, const float *, float *);
void begin(void) { policy_flight_begin(&flight); }
bool step(const float *place, const float *q, const float *v, const float *w, float *thrust)
{
    return policy_flight_step(&flight, place, q, v, w, thrust);
}
"""
HASH = re.compile(r"uint32_t hash = (0x[0-9a-f]{8})u")


class Onboard:
    """The app that `embodied export RUN --to FOLDER --crazyflie` wrote. ConfigError."""

    def __init__(self, folder: Path, vehicle: Vehicle) -> None:
        self.vehicle = vehicle
        self.flies = False
        source = folder / "src"
        try:
            found = HASH.search((source / "policy_controller.c").read_text())
        except OSError as error:
            raise ConfigError(
                f"{folder} holds no app of a Crazyflie's firmware: {error}"
            ) from error
        self.hash = 0 if found is None else int(found[1], 16)
        self.library = _compiled(source)

    def step(self, measured: Measured, attitude: Tensor, goal: Vector) -> Tensor | None:
        """Commands of the motors [4, 1] in [-1, 1]; None where it strays or what it is given is not
        finite, and another has to fly.

        `attitude` [4]: w, x, y, z.
        """
        place = [here - there for here, there in zip(measured.place, goal, strict=True)]
        if not all(abs(each) <= BOX for each in place):
            self.flies = False
            return None
        if not self.flies:
            self.library.begin()
        thrust = (ctypes.c_float * 4)()
        given = (place, attitude.tolist(), measured.velocity, measured.rates)
        self.flies = bool(
            self.library.step(*((ctypes.c_float * len(each))(*each) for each in given), thrust)
        )
        if not self.flies:
            return None
        least, *more = self.vehicle.thrust
        most = least + sum(more)
        speeds = [self.vehicle.speed(min(max(each, least), most)) for each in thrust]
        return 2 * torch.tensor(speeds)[:, None] - 1


def _compiled(source: Path) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        raise ConfigError("a policy on board of a emulator needs a C compiler (cc)")
    with tempfile.TemporaryDirectory() as scratch:
        main = Path(scratch) / "main.c"
        library = Path(scratch) / "onboard.so"
        main.write_text(MAIN)
        words = [compiler, "-std=c99", "-O2", f"-I{source}", "-shared", "-fPIC", str(main), "-lm"]
        done = subprocess.run(
            [*words, "-o", str(library)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ConfigError(f"{compiler} refuses {source}: {done.stderr.strip()[:300]}")
        loaded = ctypes.CDLL(str(library))
        loaded.step.restype = ctypes.c_bool
        return loaded


STEP = 0.01  # s of physics, and between two looks of the firmware
BEHIND = 0.25  # s that are caught up with at most: after a stall the world goes on late
TOLD = 0.5  # s after which what somebody outside said of its place is old
PLACES = ("drone_x", "drone_y", "drone_z")
"""What a motion capture system beside it tells."""
CPU = torch.device("cpu")


class Flown:
    """The body: it stands on a floor at height 0, and flies in still air."""

    def __init__(self, config: Config) -> None:
        if config.vehicle not in VEHICLES:
            raise ConfigError(f"no vehicle {config.vehicle!r}{nearest(config.vehicle, VEHICLES)}")
        vehicle = VEHICLES[config.vehicle]
        self.config = config
        self.pilot = Pilot(vehicle, CPU)
        zero = torch.zeros(3, 1)
        self.air = self.pilot.physics.body(numbers(vehicle), zero, zero)
        self.state = torch.zeros(17, 1)
        self.state[:3, 0] = torch.tensor(config.place)
        self.state[3] = 1.0
        self.random = np.random.default_rng(config.seed)
        self.time = 0.0
        self.told_at = -1e9
        self.error = -np.asarray(config.place) if config.external else np.zeros(3)
        """What it believes of its place minus where it is, m."""
        self.onboard = Onboard(Path(config.onboard), vehicle) if config.onboard else None
        self.learned = False

    def measure(self) -> Measured:
        state = self.state[:, 0].double().numpy()
        place = state[:3] + self.error + self.random.normal(0, self.config.noise, 3)
        told = not self.config.external or self.time - self.told_at < TOLD
        motors = (float(state[13]), float(state[14]), float(state[15]), float(state[16]))
        w, x, y, z = (float(each) for each in self.state[3:7, 0])
        roll = np.arctan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y))
        pitch = np.arcsin(np.clip(2 * (w * y - z * x), -1, 1))
        yaw = np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
        return Measured(
            _vector(place),
            _vector(state[7:10]),
            (float(roll), float(pitch), float(yaw)),
            _vector(state[10:13]),
            1e-4 if told else 10.0,
            motors,
        )

    def fly(self, setpoint: Setpoint, dt: float) -> None:
        self.time += dt
        state = self.state
        action = -torch.ones(4, 1) if setpoint.across == "off" else self._action_for(setpoint)
        state = self.pilot.physics.fly(state, action, self.air, dt)
        if float(state[2]) <= 0:
            # The state on the floor: level and at rest, facing where it faced.
            half = self.pilot.heading(state) / 2
            after = state.clone()
            after[2] = 0.0
            after[7:13] = 0.0
            after[3:7] = torch.stack([half.cos(), 0 * half, 0 * half, half.sin()])
            state = after
        self.state = state

    def hint(self, place: Vector) -> None:
        if self.config.external:
            self.error = np.asarray(place) - self.state[:3, 0].double().numpy()
            self.told_at = self.time

    def choose(self, learned: bool) -> None:
        """Choose who flies to places: the learned policy, or the pilot."""
        self.learned = learned and self.onboard is not None

    def upright(self) -> bool:
        return bool(self.state[4:6].square().sum() < 0.25)  # 60 degrees

    def _action_for(self, setpoint: Setpoint) -> torch.Tensor:
        """Commands of the motors [4, 1]."""
        pilot = self.pilot
        state = self.state
        if (learned := self._learned_command(setpoint)) is not None:
            return learned
        offset = torch.tensor(self.error, dtype=torch.float32)[:, None]
        place = torch.tensor(setpoint.place)[:, None] - offset
        velocity = torch.tensor(setpoint.velocity)[:, None]
        if setpoint.across == "velocity":  # along its own axes
            yaw = pilot.heading(state)
            x, y, z = velocity
            velocity = torch.stack(
                [yaw.cos() * x - yaw.sin() * y, yaw.sin() * x + yaw.cos() * y, z]
            )
        wanted = pilot.towards(state, place, velocity)
        if setpoint.across == "velocity":
            wanted[:2] = pilot.along(state, velocity)[:2]
        elif setpoint.across == "level":
            wanted[:2] = 0.0
        wanted_yaw = torch.tensor([setpoint.yaw])
        turns = wanted_yaw if setpoint.spins else pilot.turn_to(state, wanted_yaw)
        return pilot(state, wanted, turns)

    def _learned_command(self, setpoint: Setpoint) -> torch.Tensor | None:
        """The command of the policy on board; None where it is not asked, or strays."""
        if self.onboard is None:
            return None
        if not self.learned or setpoint.across != "place":
            self.onboard.flies = False
            return None
        command = self.onboard.step(self.measure(), self.state[3:7, 0], setpoint.place)
        self.learned = command is not None  # until somebody asks again
        return command


class Air:
    """The radio: a UDP socket of this machine, behind which one drone stands."""

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.body = Flown(config)
        self.pace = Pace(STEP, BEHIND)
        self.firmware = Firmware(self.body, 0.0, config.battery)
        onboard = self.body.onboard
        self.server = Server(self.firmware, None if onboard is None else onboard.hash)
        self.writer = None if folder is None else ExternalStateWriter(folder, PLACES)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.peer: tuple[str, int] | None = None
        self.silent = False
        """Nothing goes over the air any more, in either direction."""

    @property
    def uri(self) -> str:
        return f"udp://127.0.0.1:{self.socket.getsockname()[1]}"

    def serve(self, over: threading.Event) -> None:
        """Serve packets and fly until `over` is set."""
        while not over.is_set():
            left = self.pace.due - time.monotonic()
            if left <= 0:  # one, and then it listens: it may be too slow to catch up
                self.step()
                left = self.pace.next()
            if select.select([self.socket], [], [], left)[0]:
                self._receive()
        self.socket.close()

    def step(self) -> None:
        """One look of the firmware, and what is due to be told."""
        self.firmware.tick(self.firmware.now + STEP)
        if self.writer is not None:
            self.writer.publish(self.body.state[:3, 0].double().numpy(), time.monotonic())
        for frame in self.server.tell(self.firmware.now):
            self._send(frame)

    def _receive(self) -> None:
        while True:
            try:
                frame, self.peer = self.socket.recvfrom(64)
            except (BlockingIOError, ConnectionError):  # none left, or a peer that is gone
                return
            if self.silent or self._loses(frame):
                continue
            answer = self.server.hear(frame)
            if answer is not None:
                self._send(answer)

    def _send(self, frame: bytes) -> None:
        if self.peer is None or self.silent or self._loses(frame):
            return
        try:
            self.socket.sendto(frame, self.peer)
        except OSError:
            self.peer = None  # it is gone

    def _loses(self, frame: bytes) -> bool:
        """Whether this packet is lost. Only streams lose packets: over UDP the client does not ask
        twice."""
        streams = frame[:1] in (b"\x7c", b"\x5e", b"\x6c", b"\x6d")
        return streams and self.body.random.random() < self.config.lost


def _vector(values: np.ndarray) -> Vector:
    return (float(values[0]), float(values[1]), float(values[2]))


AGE = 1.0  # s: a busy machine is no fault here


def main(folder: str) -> None:
    """Say where it can be reached, and fly; a tracker's numbers are in `folder`."""
    config = settings(Config)
    air = Air(config, Path(folder) if config.external else None)
    said: dict[str, Any] = {"uri": air.uri}
    if config.external:
        target = "embodied.real_robot.ipc.external_state.ExternalStateReader"
        said["tracker"] = {"_target_": target, "folder": folder, "names": PLACES, "age": AGE}
    over = threading.Event()
    threading.Thread(target=answer, args=(said, air.pace.behind, over), daemon=True).start()
    air.serve(over)


if __name__ == "__main__":
    main(sys.argv[1])
