"""Learned reflex: a safety critic that may replace a policy's step by a recovery step at any tick.

Bresa (2025); trained in simulation, run here at the control rate, without torch. Its input is
[q, dq, tau, set-point - q], normalised as in training, and the step about to be taken: the
set-point's step in units of `stride`, then the stiffness that the arm is held with. Where the risk
is above the threshold the recovery's step is taken instead, with the recovery's stiffness:

    K = springs softest^((1 - s) / 2)           s in [-1, 1]: the action's element for stiffness

The stage runs before the hard limits and is no safety guarantee: it can only ask for steps, and the
limits clip them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import yaml
from safetensors import SafetensorError
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

from embodied.core.bounds import Bound, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.policies.wrappers.reflex_rule import reflexing
from embodied.real_robot.control.arm_state import ArmState, Floats
from embodied.real_robot.drivers.springs import SOFTEST, Springs
from embodied.real_robot.safety.chain import Tick

OVERRIDE = "embodied.policies.wrappers.reflex_override.ReflexOverride"
"""The policy that a run with a reflex has saved."""


@dataclass(frozen=True)
class Config:
    """The run of a reflex, and the springs that it was trained with.

    A `stiffness` s in [-1, 1] means the stiffness K = springs softest^((1 - s) / 2)."""

    run: str  # training run whose policy has a reflex, or one of its checkpoints
    stride: tuple[Positive, ...]  # step that an action of 1 means, of each joint and tick, rad (m)
    stiffness: tuple[Annotated[float, Bound(-1.0, 1.0)], ...] = ()  # while it does not act: 0, 1, n
    springs: tuple[Positive, ...] = ()  # the driver's stiffness [n], N m/rad; empty: no stiffness
    softest: PositiveFraction = 0.1  # lowest stiffness as a share of the springs

    def __post_init__(self) -> None:
        if not all(-1 <= value <= 1 for value in self.stiffness) or not 0 < self.softest <= 1:
            raise ConfigError(
                "safety.reflex: stiffness should be from -1 to 1, softest above 0, up to 1"
            )
        if bool(self.springs) != bool(self.stiffness) or min(self.springs, default=1.0) <= 0:
            raise ConfigError(
                "safety.reflex: a reflex with stiffness needs springs (N m/rad above 0, one number "
                "a joint), one without has none"
            )


class Layers:
    """A network of linear layers with ReLU between them, in memory of its own."""

    def __init__(self, weights: list[tuple[Floats, Floats]]) -> None:
        """`weights`: matrix [in, out] and bias [out] of every layer."""
        self.weights = weights
        self._rooms = [np.zeros(bias.shape) for _, bias in weights]

    def __call__(self, x: Floats) -> Floats:
        """[out] of `x` [in]; valid until the next call."""
        for i, ((matrix, bias), room) in enumerate(zip(self.weights, self._rooms, strict=True)):
            np.dot(x, matrix, out=room)
            room += bias
            if i < len(self._rooms) - 1:
                np.maximum(room, 0.0, out=room)
            x = room
        return x


class Reflex:
    """`risk` is the newest; `acting` whether the recovery's step was taken, `age` for how many
    ticks by now; `stiffness` what the arm should be held with, as the action has it."""

    name: ClassVar[str] = "reflex"

    def __init__(self, config: Config, joints: int, dt: float) -> None:
        if len(config.stride) != joints or min(config.stride) <= 0:
            raise ConfigError(f"safety.reflex.stride needs {joints} numbers above 0, one a joint")
        if config.springs and len(config.springs) != joints:
            raise ConfigError(f"safety.reflex.springs needs {joints} numbers, one a joint")
        if len(config.stiffness) not in (0, 1, joints):
            raise ConfigError(f"safety.reflex.stiffness should be none, 1 or {joints} numbers")
        node, spec, weights = _read(Path(config.run))
        _require_fit(config, node, spec, joints, dt)
        size, act = 4 * joints, joints + len(config.stiffness)
        self.on, self.off = node["threshold"], node["threshold"] * node["release_ratio"]
        self.least = int(node["min_duration_steps"])
        self.stride, self.held = np.asarray(config.stride), np.asarray(config.stiffness, float)
        self._springs, self._softest = np.asarray(config.springs), config.softest
        self._mean, self._std = weights["encoder.norm.mean"], weights["encoder.norm.std"]
        self._clip = float(weights["encoder.norm.limit"])
        self._risks = [Layers(_ensemble(weights, j)) for j in range(2)]
        self._recovery = Layers(_plain(weights))
        self._state, self._x = np.zeros(size), np.zeros(size + act)
        self.stiffness, self._asked = self.held.copy(), np.full(len(self.held), np.nan)
        self._wanted = np.zeros(len(config.springs))
        self._forget()

    def check(self, springs: Springs | None) -> None:
        """ConfigError where the driver cannot hold the arm with the stiffness that the recovery may
        ask for, or holds it with another one than in training."""
        if not len(self._springs):
            return
        if springs is None or springs.frame != "joints":
            raise ConfigError(
                "safety.reflex: this driver has no joint springs that it could change while it "
                "holds the arm; train the reflex in a world without an action for stiffness"
            )
        if not np.allclose(springs.stiffness, self._springs, rtol=0.01) or self._softest < SOFTEST:
            raise ConfigError(
                f"safety.reflex: springs are {self._springs.tolist()} N m/rad and {self._softest:g}"
                f" of that, the driver's {springs.stiffness.tolist()} and at least {SOFTEST:g}"
            )

    def begin(self, arm: ArmState) -> None:
        self._forget()

    def _forget(self) -> None:
        self.risk, self.acting, self.age = 0.0, False, 0
        np.copyto(self.stiffness, self.held)
        self._asked[:] = np.nan  # the driver's springs may have been changed meanwhile

    def __call__(self, tick: Tick) -> None:
        self._act(tick)
        if (self.stiffness != self._asked).any():
            np.copyto(self._asked, self.stiffness)
            np.copyto(self._wanted, 0.5 * (1.0 - self.stiffness))
            np.power(self._softest, self._wanted, out=self._wanted)
            self._wanted *= self._springs
            tick.stiffness = self._wanted

    def _act(self, tick: Tick) -> None:
        """Take the recovery's step where the risk is too high; nothing while the arm is to rest."""
        n = len(self.stride)
        if tick.hold:
            self.acting, self.age = False, 0
            np.copyto(self.stiffness, self.held)
            return
        self._see(tick)
        # Decisions are of actions in [-1, 1]; limits cut longer steps off in any case.
        step = self._x[4 * n : 5 * n]
        np.subtract(tick.q, tick.last, out=step)
        np.clip(step, -self.stride, self.stride, out=step)
        step /= self.stride
        self._x[5 * n :] = self.held
        self.risk = max(_sigmoid(float(net(self._x)[0])) for net in self._risks)
        if not np.isfinite(self.risk):
            tick.fault = tick.fault or "the reflex's risk is not a finite number"
            return
        self.acting = bool(
            reflexing(self.risk, self.acting, self.age, self.on, self.off, self.least)
        )
        self.age = self.age + 1 if self.acting else 0
        if self.acting:
            self._recover(tick, n)
        else:
            np.copyto(self.stiffness, self.held)

    def _see(self, tick: Tick) -> None:
        """The state of now, normalised, into the networks' input."""
        n, arm = len(self.stride), tick.arm
        state = self._state
        state[:n], state[n : 2 * n], state[2 * n : 3 * n] = arm.q, arm.dq, arm.tau
        np.subtract(tick.last, arm.q, out=state[3 * n :])
        seen = self._x[: 4 * n]
        np.subtract(state, self._mean, out=seen)
        seen /= self._std
        np.clip(seen, -self._clip, self._clip, out=seen)

    def _recover(self, tick: Tick, n: int) -> None:
        action = self._recovery(self._x[: 4 * n])
        np.tanh(action, out=action)
        np.multiply(action[:n], self.stride, out=tick.q)
        tick.q += tick.last
        np.copyto(self.stiffness, action[n:])


def _require_fit(
    config: Config, node: dict[str, Any], spec: dict[str, Any], joints: int, dt: float
) -> None:
    """ConfigError where the run was trained at another rate, or with other observations or
    actions."""
    if abs(spec["dt"] - dt) > 1e-6 * dt:
        raise ConfigError(
            f"safety.reflex: {config.run} was learned at {1 / spec['dt']:.0f} Hz, the control "
            f"loop runs at {1 / dt:.0f}: set hertz, or train it in a world of that rate"
        )
    if node.get("rate", "control") != "control":
        raise ConfigError(
            f"safety.reflex: {config.run} was learned with rate={node['rate']}; a robot's reflex "
            "runs at the control rate: learner.rate=control"
        )
    size, act = 4 * joints, joints + len(config.stiffness)
    name = node.get("reflex_obs")
    leaves: list[dict[str, Any]] = (
        list(spec["obs"].values()) if name is None else [spec["obs"][name]]
    )
    seen = sum(math.prod(leaf["shape"]) for leaf in leaves)
    if seen != size or spec["act"]["shape"] != [act]:
        raise ConfigError(
            f"safety.reflex: {config.run} sees {seen} numbers and acts by "
            f"{spec['act']['shape']}; {joints} joints and {len(config.stiffness)} of stiffness "
            f"make {size} and [{act}]"
        )
    held = [float(value) for value in node.get("held_stiffness") or ()]
    if held and held != [float(value) for value in config.stiffness]:
        raise ConfigError(
            f"safety.reflex: {config.run} was learned with the stiffness {held}, not "
            f"{list(config.stiffness)}"
        )


def _sigmoid(x: float) -> float:
    return 0.5 * (1.0 + float(np.tanh(0.5 * x)))


def _read(run: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Floats]]:
    """Settings, spec and weights of a checkpoint; ConfigError in one line."""
    folders = sorted(file.parent for file in run.glob("checkpoints/[0-9]*/about.json"))
    folder = run if (run / "policy.yaml").exists() or not folders else folders[-1]
    try:
        node = yaml.safe_load((folder / "policy.yaml").read_text())
        spec = json.loads((folder / "spec.json").read_text())
        weights = load_file(folder / "policy.safetensors")
    except (OSError, ValueError, yaml.YAMLError, SafetensorError) as error:
        raise ConfigError(f"safety.reflex: {folder} cannot be read: {error}") from error
    if "recovery.0.weight" not in weights:
        raise ConfigError(
            f"safety.reflex: {folder} has no reflex; docs/safety.md says how to train one"
        )
    if not weights["armed"]:
        raise ConfigError(f"safety.reflex: the reflex of {folder} was never armed: train longer")
    exact = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    if not all(np.isfinite(v).all() for k, v in exact.items() if k != "encoder.norm.limit"):
        raise ConfigError(f"safety.reflex: {folder} holds numbers that are not finite")
    return node, cast(dict[str, Any], spec), exact


def _ensemble(weights: dict[str, Floats], member: int) -> list[tuple[Floats, Floats]]:
    """Layers of one of the risk networks."""
    depth = sum(name.startswith("risks.weights.") for name in weights)
    return [
        (
            np.ascontiguousarray(weights[f"risks.weights.{i}"][member]),
            weights[f"risks.biases.{i}"][member, 0],
        )
        for i in range(depth)
    ]


def _plain(weights: dict[str, Floats]) -> list[tuple[Floats, Floats]]:
    """Layers of the recovery."""
    names = [n for n in weights if n.startswith("recovery.") and n.endswith(".weight")]
    numbers = sorted(int(name.split(".")[1]) for name in names)
    return [
        (np.ascontiguousarray(weights[f"recovery.{i}.weight"].T), weights[f"recovery.{i}.bias"])
        for i in numbers
    ]
