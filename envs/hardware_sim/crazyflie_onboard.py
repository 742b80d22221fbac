"""A policy on board of a simulated Crazyflie: the exported C code, compiled for this machine.

The code that would run in the firmware runs in the emulator's process: the same two headers, called
at the same rate, within the same distance of the goal.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.embodiments.crazyflie import BOX, Vehicle
from embodied.real_robot.emulators.crazyflie.firmware import Measured
from embodied.real_robot.emulators.crazyflie.setpoint import Vector

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
