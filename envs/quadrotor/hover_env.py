"""Quadrotor: hovers a quadrotor by rotor speed commands, in thousands of parallel envs.

Learning to Fly in Seconds (Eschmann et al., 2024): rigid-body dynamics with motor lag at 100 Hz, a
constant disturbance per episode, noisy observations and the last 32 actions for the policy,
noise-free state and disturbance for the critic. Leaving a box of 1.2 m around the target terminates
the episode. The reward is a survival bonus minus squared errors,

    r = 2 - 1/2 (w_p |p|^2 + 5 (1 - q_w^2) + w_v |v|^2 + w_a |a - a_hover|^2)

and 0 in the step that leaves the box. The weights may be increased during training.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Fraction, NonNegative
from embodied.core.build import nearest, registered
from embodied.core.device import pick_device
from embodied.core.env import NotFinite, StateRoles, Step
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.embodiments.crazyflie import BOX, GRAVITY, MOTORS, PAPER, RATE, VEHICLES
from embodied.envs.batched import turned
from embodied.envs.quadrotor.dynamics import NAMES as PARAMETERS
from embodied.envs.quadrotor.dynamics import Body, Physics, Vehicles, numbers, tilted
from embodied.envs.quadrotor.flights import Flights
from embodied.envs.row_rng import RowRng
from embodied.nn import native

TARGET = {"position": 40.0, "velocity": 1.0, "action": 1.0}
"""The weights that flights are judged by."""


def hover(
    state: Tensor, action: Tensor, weights: Mapping[str, float], level: float = PAPER.hover
) -> Tensor:
    """Rewards [N] of noise-free states [N, 15 or more] (place, rotation row by row, velocity, ...)
    and the actions [N, 4] taken in them; `level` is the action that carries the weight."""
    tilt = 5 * 0.25 * (3 - state[:, 3:12:4].sum(1))  # 4 q_w^2 is the trace + 1
    place = state[:, :3].square().sum(1)
    velocity = state[:, 12:15].square().sum(1)
    effort = (action - level).square().sum(1)
    wrong = weights["position"] * place + weights["velocity"] * velocity
    return 2 - 0.5 * (wrong + tilt + weights["action"] * effort)


@registered("scheduled reward")
def hover_rows(rows: Tensors, weights: Mapping[str, float], level: float = PAPER.hover) -> Tensor:
    """`hover` of stored rows of one step each: `obs/critic/state`, `action`, `discount`."""
    return hover(rows["obs/critic/state"], rows["action"], weights, level) * (rows["discount"] > 0)


STATE = (
    *("x", "y", "z"),
    *(f"R_{row}{column}" for row in "xyz" for column in "xyz"),
    *("v_x", "v_y", "v_z"),
    *("omega_x", "omega_y", "omega_z"),
)
HIDDEN = (
    *("force_x", "force_y", "force_z"),
    *("torque_x", "torque_y", "torque_z"),
    *(f"speed_{motor}" for motor in MOTORS),
)
SEEN = len(STATE)
KNOWN = len(STATE) + len(HIDDEN)
SPREAD = 0.2
NOISE = (0.001,) * 12 + (0.002,) * 6
START = 0.5
"""Speed of the rotors at the start, as a fraction of the highest."""


Flown = tuple[Tensors, Tensor, Tensor, Tensor]
"""Observations, rewards, terminated and truncated."""
Factors = tuple[NonNegative, NonNegative]  # lowest and highest


@dataclass(frozen=True)
class Config:
    """Settings of the hover environment.

    `ranges` randomizes the vehicle and adds task parameters: multipliers of mass, inertia, thrust,
    torque, lag and disturbance, and `blend`, the interpolation (0 to 1) to the vehicle `other`.
    `compile` halves the time on a CPU, after most of a minute of compilation. `native` uses
    hover.cpp on a CPU if there is a compiler for it; it agrees with PyTorch to rounding.
    """

    num_envs: Count = 16  # parallel environments
    history: CountOrZero = 32  # past actions in the observation
    horizon: Count = 500  # steps of 10 ms of an episode
    guidance: Fraction = 0.1  # share of episodes that start level at the target
    noise: NonNegative = 1.0  # factor of the sensor noise
    disturbance: NonNegative = 1.0  # factor of the constant force and torque
    weights: dict[str, NonNegative] = field(default_factory=lambda: dict(TARGET))  # of the reward
    vehicle: str = "paper"  # of `embodied.embodiments.crazyflie.VEHICLES`
    other: str = "library"  # vehicle that `blend` interpolates to
    ranges: dict[str, Factors] = field(default_factory=dict)  # ranges of task parameters
    device: str = "auto"  # torch device of the simulation: auto, cpu, cuda:0
    compile: bool = False  # fuse the physics with torch.compile
    native: bool = False  # on a CPU, simulate in native code
    seed: CountOrZero = 0  # of the random numbers


class Quadrotor(Flights):
    """Observations: `state` [18 + 4 history]: position, rotation, velocity, angular velocity (all
    noisy), actions (oldest first); `critic/state` [28]: the same 18 without noise, force, torque,
    rotor speeds; `privileged/vehicle`: the task parameters, if there are any. Actions are rotor
    commands.
    """

    name = "quadrotor"
    kept: ClassVar = {
        **{"flight": "state", "hidden": "hidden", "body": "bodies", "task": "task"},
        **{"count": "count", "stream": "streams.state"},
    }
    columns = ("flight", "hidden", "body", "task")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.device = pick_device(config.device)
        if unknown := [name for name in config.weights if name not in TARGET]:
            raise ValueError(f"unknown reward weight {unknown[0]!r}{nearest(unknown[0], TARGET)}")
        self.weights: Mapping[str, float] = TARGET | config.weights
        self.vehicles = Vehicles(config.vehicle, config.other, config.ranges, self.device)
        self.parameters = self.vehicles.parameters
        self.vehicle = VEHICLES[config.vehicle]
        past = [f"{m}_{age}" for age in range(self.config.history, 0, -1) for m in MOTORS]
        obs = {
            "state": Leaf((SEEN + len(past),), names=(*STATE, *past)),
            "critic/state": Leaf((KNOWN,), names=STATE + HIDDEN),
        }
        task = None
        if self.parameters:
            names = tuple(parameter.name for parameter in self.parameters)
            task = Leaf((len(names),), low=0.0, high=1.0, names=names)
            obs["privileged/vehicle"] = Leaf((len(names),), names=names)
        act = Leaf((len(MOTORS),), low=-1.0, high=1.0, names=MOTORS)
        self.spec = Spec(obs, act, dt=1 / RATE, task=task, text="hover at the target")
        n = config.num_envs
        device = self.device
        self.physics = Physics(self.vehicle, device)
        self.deviation = config.noise * torch.tensor(NOISE, device=device)[:, None]
        weight = self.vehicle.weight
        upset = torch.tensor([weight / 20] * 3 + [weight / 10_000] * 3, device=device)
        self.upset = config.disturbance * upset[:, None]
        self.every = torch.arange(n, device=device)
        self.streams = RowRng(config.seed, n, device)
        self.state = torch.zeros(17, n, device=device)
        self.hidden = torch.zeros(6, n, device=device)
        self.task = torch.zeros(len(self.parameters), n, device=device)
        self.count = torch.zeros(n, dtype=torch.int64, device=device)
        still = numbers(self.vehicle).to(device).expand(-1, n)
        self.bodies = self.physics.body(still, self.hidden[:3], self.hidden[3:]).packed()
        self.fly = torch.compile(self.physics.fly) if config.compile else self.physics.fly
        self.native = None
        if self.native_obstacle() is None:
            self.native = NativeHover(self)

    def native_obstacle(self) -> str | None:
        """Why the steps are not native code; None if they are."""
        if not self.config.native or self.config.compile:
            return f"native={self.config.native}, compile={self.config.compile}".lower()
        return obstacle(self.device)

    def step(self, action: Tensor) -> Step:
        seen = self.checked(action)
        if self.native is None:
            flown = self._advance(action, seen)
        else:
            flown = self.native.step(action, seen["state"])
        truncated = flown[-1]
        return self.finish(*flown, {"success": truncated})

    def _advance(self, action: Tensor, before: Tensors) -> Flown:
        """One step without resets, after the observations `before` [B, ...]."""
        # On a GPU the host would wait; the observations that follow are not finite either.
        if self.device.type == "cpu" and not bool(torch.isfinite(action.sum())):
            raise NotFinite("quadrotor: the action is not finite; the run stops here")
        act = action.detach().to(self.device, torch.float32).clamp(-1, 1)
        reward = hover(before["critic/state"], act, self.weights, self.vehicle.hover)
        self.state = self.fly(self.state, act.T, Body.of(self.bodies), self.spec.dt)
        self.count = self.count + 1
        terminated = self.state[:3].abs().amax(0) > BOX
        truncated = (self.count >= self.config.horizon) & ~terminated
        following = self._observe(None)
        if self.config.history:
            past = following["state"][:, SEEN:]
            width = len(MOTORS)
            past[:, :-width] = before["state"][:, SEEN + width :]
            past[:, -width:] = act
        return following, reward * ~terminated, terminated, truncated

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"count": None}, {"stream": None})

    def set_state(self, state: Tensors) -> Tensors:
        super().set_state(state)
        # The same strides as before: sums and matrix products round by layout.
        self.obs = {
            key: state["obs/state"].to(self.device).clone(memory_format=torch.contiguous_format)
            if key == "state"
            else turned(state[f"obs/{key}"].to(self.device)).T
            for key in self.spec.obs
        }
        return self.obs

    def describe(self, row: int = 0) -> str:
        return described(self.state[:, row].cpu(), int(self.count[row]) * self.spec.dt)

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        if self.native is not None:
            self.native.start(rows, task)
            return
        size = len(self.parameters)
        # The task is always drawn, so that a fixed one does not shift the row's later draws.
        lots, wanted = self.streams.uniform(11 + size, rows).split([11, size])
        if task is not None:
            wanted = task[rows].T
        vehicle, stirred = self.vehicles.made(wanted)
        upset = self.streams.normal(9, rows)
        hidden = upset[:6] * self.upset * stirred
        away = (lots[0] >= self.config.guidance).float()
        attitude = tilted(upset[6:], lots[1] * away)
        centred = 2 * lots[2:] - 1
        place = centred[:3] * (SPREAD * away)
        motion = centred[3:]
        speeds = torch.full((4, len(rows)), START, device=self.device)
        self.state.index_copy_(1, rows, torch.cat([place, attitude, motion, speeds]))
        made = self.physics.body(vehicle, hidden[:3], hidden[3:])
        self.bodies.index_copy_(1, rows, made.packed())
        self.hidden.index_copy_(1, rows, hidden)
        self.task.index_copy_(1, rows, wanted)
        self.count.index_fill_(0, rows, 0)

    def _observe(self, rows: Tensor | None) -> Tensors:
        """Fresh observations of all rows or of `rows` [n]; the past actions are left to fill in."""
        state = self.state if rows is None else self.state[:, rows]
        hidden = self.hidden if rows is None else self.hidden[:, rows]
        place, _, motion, speeds = state.split([3, 4, 6, 4])
        known = torch.cat([place, self.physics.turn(state), motion, hidden, 2 * speeds - 1])
        noise = self.streams.normal(SEEN, rows)
        seen = known.new_empty(known.shape[1], self.spec.obs["state"].size)
        seen[:, :SEEN] = torch.addcmul(known[:SEEN], noise, self.deviation).T
        obs = {"state": seen, "critic/state": known.T}
        if self.parameters:
            task = self.task if rows is None else self.task[:, rows]
            obs["privileged/vehicle"] = self.vehicles.native(task).T
        return obs

    def observe(self, rows: Tensor) -> Tensors:
        """Observations of `rows` [n] at the start of a flight."""
        fresh = self._observe(rows)
        fresh["state"][:, SEEN:] = 2 * START - 1  # the commands that keep the rotors as they are
        return fresh

    def begun(self, obs: Tensors | None, rows: Tensor) -> Tensors:
        if self.native is not None:
            return self.native.observe(obs, rows)
        return super().begun(obs, rows)

    def checked_task(self, task: Tensor) -> Tensor:
        return super().checked_task(task).float()


SOURCE = Path(__file__).with_name("hover.cpp")
MOST = len(PARAMETERS)
KEPT = 31 << 20
"""Bytes of a block that is freed once: after that glibc keeps blocks up to this size. Otherwise it
gives the observations of thousands of flights back to the system in every step."""


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


class FlightArrays(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("state", "body", "hidden", "task")),
        *((name, ctypes.c_void_p) for name in ("count", "stream")),
        ("size", ctypes.c_int64),
    )


class NativeHover:
    """The steps of `Quadrotor`, which is the reference, in native code (hover.cpp): on a CPU
    PyTorch spends its time between the operations. Both draw the same random numbers and agree to
    rounding. The tensors of `env` are changed in place; new observations are new tensors."""

    def __init__(self, env: Quadrotor) -> None:
        self.env = env
        self.library = native.load(SOURCE)
        torch.empty(KEPT, dtype=torch.uint8)
        self.width, self.known = (env.spec.obs[key].size for key in ("state", "critic/state"))
        self.settings = ctypes.byref(settings(env))

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
        return ctypes.byref(
            FlightArrays(*(native.address(tensor) for tensor in tensors), env.num_envs)
        )


def settings(env: Quadrotor) -> Settings:
    """The constants of native code, which stay the same while `env` lives."""
    config = env.config
    vehicles = env.vehicles
    parameters = vehicles.parameters
    return Settings(
        *(env.spec.dt, BOX, GRAVITY, SPREAD, START, env.vehicle.hover),
        *(env.weights[name] for name in ("position", "velocity", "action")),
        config.guidance,
        tuple(env.deviation.flatten().tolist()),
        tuple(env.upset.flatten().tolist()),
        tuple(share for row in env.vehicle.mixer for share in row),
        *(tuple(numbers.flatten().tolist()) for numbers in vehicles.ends),
        tuple(p.low for p in parameters),
        tuple(p.high - p.low for p in parameters),
        tuple(PARAMETERS.index(p.name) for p in parameters),
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


def described(state: Tensor, seconds: float) -> str:
    """One column [17] of a state, `seconds` after the start."""
    x, y, z = state[:3].tolist()
    upright = 1 - 2 * state[4:6].square().sum().clamp(0, 1)
    climb = float(state[9])
    going = "climbing" if climb > 0.05 else "sinking" if climb < -0.05 else "level"
    speeds = " ".join(f"{100 * speed:.0f}" for speed in state[13:].tolist())
    return (
        f"The quadrotor is {state[:3].norm():.2f} m from the target, at ({x:.2f}, {y:.2f}, "
        f"{z:.2f}) m, tilted {torch.rad2deg(upright.acos()):.0f} degrees, moves "
        f"{state[7:10].norm():.2f} m/s, {going}, and turns "
        f"{state[10:13].norm():.1f} rad/s; rotors at {speeds} % of their highest speed; "
        f"{seconds:.2f} s in the air."
    )
