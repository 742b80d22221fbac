"""The hover environment in native code (hover.cpp): on a CPU the PyTorch code of `Quadrotor`, which
is the reference, spends its time between the operations.

Both draw the same random numbers and agree to rounding (tests/envs/test_quadrotor.py).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied.core.env import NotFinite
from embodied.core.tensors import Tensors
from embodied.embodiments.crazyflie import BOX, GRAVITY, Vehicle
from embodied.envs.quadrotor.dynamics import NAMES, Vehicles
from embodied.envs.row_rng import RowRng
from embodied.nn import native

SOURCE = Path(__file__).with_name("hover.cpp")
MOST = len(NAMES)
KEPT = 31 << 20
"""Bytes of a block that is freed once: after that glibc keeps blocks up to this size. Otherwise it
gives the observations of thousands of flights back to the system in every step."""
Flown = tuple[Tensors, Tensor, Tensor, Tensor]
"""Observations, rewards, terminated and truncated."""


class Env(Protocol):
    """The parts of `Quadrotor` that native code uses."""

    config: Any  # hover_env.Config
    num_envs: int
    device: torch.device
    spec: Any
    weights: Any
    vehicle: Vehicle
    vehicles: Vehicles
    deviation: Tensor
    upset: Tensor
    streams: RowRng
    state: Tensor
    bodies: Tensor
    hidden: Tensor
    task: Tensor
    count: Tensor


class Settings(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("dt", "box", "gravity", "spread", "start")),
        *((name, ctypes.c_double) for name in ("hover", "position", "velocity", "action")),
        ("guidance", ctypes.c_double),
        ("deviation", ctypes.c_double * 18),
        ("upset", ctypes.c_double * 6),
        ("mixer", ctypes.c_double * 16),
        ("vehicle", ctypes.c_double * 10),
        ("way", ctypes.c_double * 10),
        ("low", ctypes.c_double * MOST),
        ("span", ctypes.c_double * MOST),
        ("kinds", ctypes.c_int64 * MOST),
        *((name, ctypes.c_int64) for name in ("parameters", "horizon", "history")),
    )


class Flights(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("state", "body", "hidden", "task")),
        *((name, ctypes.c_void_p) for name in ("count", "stream")),
        ("size", ctypes.c_int64),
    )


class NativeHover:
    """Changes the tensors of `env` in place; new observations are new tensors."""

    def __init__(self, env: Env, spread: float, start: float) -> None:
        self.env = env
        self.library = native.load(SOURCE)
        torch.empty(KEPT, dtype=torch.uint8)
        self.width, self.known = (env.spec.obs[key].size for key in ("state", "critic/state"))
        self.settings = ctypes.byref(settings(env, spread, start))

    def step(self, action: Tensor, before: Tensor) -> Flown:
        """One step after the observations `before` [B, ...]. NotFinite, before anything changed."""
        n = self.env.num_envs
        obs = self._empty()
        reward = torch.empty(n)
        terminated, truncated = torch.empty(2, n, dtype=torch.bool).unbind()
        action = action.detach().to("cpu", torch.float32).contiguous()
        failed = self.library.hover_step(
            self.settings,
            self._flights(),
            *(pointer(tensor) for tensor in (action, before)),
            *self._places(obs),
            *(pointer(tensor) for tensor in (reward, terminated, truncated)),
        )
        if failed:
            raise NotFinite("quadrotor: the action is not finite; the run stops here")
        return self._with_vehicle(obs), reward, terminated, truncated

    def start(self, rows: Tensor, task: Tensor | None) -> None:
        """Start new flights in `rows` [n]; `task` [B, D] fixes their task vectors."""
        given = None if task is None else task.T.float().contiguous()
        held = None if given is None else pointer(given)
        size = ctypes.c_int64(len(rows))
        self.library.hover_start(self.settings, self._flights(), pointer(rows), size, held)

    def observe(self, obs: Tensors | None, rows: Tensor) -> Tensors:
        """A copy of `obs` in which `rows` [n] are at the start of a flight."""
        keys = ("state", "critic/state")
        made = self._empty() if obs is None else {key: obs[key].clone() for key in keys}
        size = ctypes.c_int64(len(rows))
        places = self._places(made)
        self.library.hover_observe(self.settings, self._flights(), pointer(rows), size, *places)
        return self._with_vehicle(made)

    def _empty(self) -> Tensors:
        n = self.env.num_envs
        return {"state": torch.empty(n, self.width), "critic/state": torch.empty(self.known, n).T}

    def _with_vehicle(self, obs: Tensors) -> Tensors:
        env = self.env
        if env.vehicles.parameters:
            obs["privileged/vehicle"] = env.vehicles.native(env.task).T
        return obs

    def _places(self, obs: Tensors) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return pointer(obs["state"]), pointer(obs["critic/state"])

    def _flights(self) -> Any:
        env = self.env
        tensors = (env.state, env.bodies, env.hidden, env.task, env.count, env.streams.state)
        return ctypes.byref(Flights(*(native.address(tensor) for tensor in tensors), env.num_envs))


def settings(env: Env, spread: float, start: float) -> Settings:
    """The constants of native code, which stay the same while `env` lives."""
    config = env.config
    vehicles = env.vehicles
    parameters = vehicles.parameters
    return Settings(
        *(env.spec.dt, BOX, GRAVITY, spread, start, env.vehicle.hover),
        *(env.weights[name] for name in ("position", "velocity", "action")),
        config.guidance,
        tuple(env.deviation.flatten().tolist()),
        tuple(env.upset.flatten().tolist()),
        tuple(share for row in env.vehicle.mixer for share in row),
        *(tuple(numbers.flatten().tolist()) for numbers in vehicles.ends),
        tuple(p.low for p in parameters),
        tuple(p.high - p.low for p in parameters),
        tuple(NAMES.index(p.name) for p in parameters),
        *(len(parameters), config.horizon, config.history),
    )


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def obstacle(device: torch.device) -> str | None:
    """Why flights on `device` cannot be native code; None if they can."""
    if device.type != "cpu":
        return f"the environment is on {device}"
    try:
        native.load(SOURCE)
    except native.NativeError as error:
        return str(error)
    return None
