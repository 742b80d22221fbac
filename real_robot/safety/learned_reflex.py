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

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

from embodied.core.bounds import Bound, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.files import MALFORMED, SETTINGS, read_json, read_text, reading
from embodied.core.hashes import damage
from embodied.core.saved_node import parse_yaml
from embodied.policies.wrappers.reflex_rule import reflexing
from embodied.real_robot.drivers.driver import SOFTEST
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.chain import Tick
from embodied.real_robot.kernel.driver import Springs


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
    """A network of linear layers with ReLU between them. Its outputs have memory of their own, so
    that a call allocates nothing."""

    def __init__(self, weights: list[tuple[Floats, Floats]]) -> None:
        """`weights`: matrix [in, out] and bias [out] of every layer."""
        self.weights = weights
        self._outputs = [np.zeros(bias.shape) for _, bias in weights]

    def __call__(self, x: Floats) -> Floats:
        """Outputs [out] for inputs `x` [in]; valid until the next call."""
        for i, (matrix, bias) in enumerate(self.weights):
            output = self._outputs[i]
            np.dot(x, matrix, out=output)
            output += bias
            if i < len(self._outputs) - 1:
                np.maximum(output, 0.0, out=output)
            x = output
        return x


class Reflex:
    """The stage replaces a policy's step by the recovery's while the risk is too high."""

    name: ClassVar[str] = "reflex"

    def __init__(self, config: Config, joints: int, dt: float) -> None:
        if len(config.stride) != joints or min(config.stride) <= 0:
            raise ConfigError(f"safety.reflex.stride needs {joints} numbers above 0, one a joint")
        if config.springs and len(config.springs) != joints:
            raise ConfigError(f"safety.reflex.springs needs {joints} numbers, one a joint")
        if len(config.stiffness) not in (0, 1, joints):
            raise ConfigError(f"safety.reflex.stiffness should be none, 1 or {joints} numbers")
        with reading(f"safety.reflex: {config.run}", *MALFORMED):
            self._load(config, joints, dt)
        self._forget()

    def _load(self, config: Config, joints: int, dt: float) -> None:
        node, spec, weights = _read(Path(config.run))
        _require_fit(config, node, spec, joints, dt)
        self.threshold = float(node["threshold"])  # risk from which on the recovery acts
        self.release_threshold = self.threshold * float(node["release_ratio"])
        """Risk below which it stops to act."""
        self.min_ticks = int(node["min_duration_steps"])  # ticks for which it acts at least
        self.stride = np.asarray(config.stride)
        self.idle_stiffness = np.asarray(config.stiffness, float)
        """Elements [s] of the action for stiffness while the recovery does not act."""
        self.stiffness = self.idle_stiffness.copy()
        """Elements [s] of the action for stiffness that hold the arm now."""
        self._springs = np.asarray(config.springs)
        self._min_stiffness = config.softest  # lowest stiffness, as a share of the springs
        self._mean = weights["encoder.norm.mean"]
        self._std = weights["encoder.norm.std"]
        self._clip = float(weights["encoder.norm.limit"])
        self._risks, self._recovery = _networks(weights)
        state_size = 4 * joints
        self._state = np.zeros(state_size)
        self._inputs = np.zeros(state_size + joints + len(config.stiffness))
        """Inputs of the risk networks: the normalised state, the step, the stiffness."""
        self._sent_stiffness = np.full(len(self.idle_stiffness), np.nan)
        """Elements [s] of the action for stiffness that the driver was asked for last."""
        self._spring_stiffness = np.zeros(len(config.springs))
        """Stiffness [n] (N m/rad) that they mean."""
        action = self._recovery(self._inputs[:state_size])
        if len(action) != joints + len(config.stiffness):
            raise ValueError(f"its recovery has {len(action)} outputs")
        for network in self._risks:
            network(self._inputs)

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
        same = np.allclose(springs.stiffness, self._springs, rtol=0.01)
        if not same or self._min_stiffness < SOFTEST:
            raise ConfigError(
                f"safety.reflex: springs are {self._springs.tolist()} N m/rad and "
                f"{self._min_stiffness:g} of that, the driver's {springs.stiffness.tolist()} and "
                f"at least {SOFTEST:g}"
            )

    def begin(self, arm: ArmState) -> None:
        self._forget()

    def _forget(self) -> None:
        self.risk = 0.0  # newest risk, 0 to 1
        self.acting = False  # whether the recovery's step was taken in the newest tick
        self.acting_ticks = 0  # ticks in a row in which it was taken
        np.copyto(self.stiffness, self.idle_stiffness)
        self._sent_stiffness[:] = np.nan  # the driver's springs may have been changed meanwhile

    def __call__(self, tick: Tick) -> None:
        self._act(tick)
        if (self.stiffness != self._sent_stiffness).any():
            np.copyto(self._sent_stiffness, self.stiffness)
            np.copyto(self._spring_stiffness, 0.5 * (1.0 - self.stiffness))
            np.power(self._min_stiffness, self._spring_stiffness, out=self._spring_stiffness)
            self._spring_stiffness *= self._springs
            tick.stiffness = self._spring_stiffness

    def _act(self, tick: Tick) -> None:
        """Take the recovery's step where the risk is too high; nothing while the arm is to rest."""
        n = len(self.stride)
        if tick.hold:
            self.acting = False
            self.acting_ticks = 0
            np.copyto(self.stiffness, self.idle_stiffness)
            return
        self._normalise_state(tick)
        # Networks know actions in [-1, 1]; limits cut longer steps off in any case.
        step = self._inputs[4 * n : 5 * n]
        np.subtract(tick.q, tick.last, out=step)
        np.clip(step, -self.stride, self.stride, out=step)
        step /= self.stride
        self._inputs[5 * n :] = self.idle_stiffness
        logit = max(float(network(self._inputs)[0]) for network in self._risks)
        self.risk = 0.5 * (1.0 + float(np.tanh(0.5 * logit)))
        if not np.isfinite(self.risk):
            tick.fail("the reflex's risk is not a finite number")
            return
        self.acting = bool(
            reflexing(
                self.risk,
                self.acting,
                self.acting_ticks,
                self.threshold,
                self.release_threshold,
                self.min_ticks,
            )
        )
        self.acting_ticks = self.acting_ticks + 1 if self.acting else 0
        if self.acting:
            self._recover(tick)
        else:
            np.copyto(self.stiffness, self.idle_stiffness)

    def _normalise_state(self, tick: Tick) -> None:
        """Write the normalised state [4 n] of now into the networks' inputs."""
        n = len(self.stride)
        arm = tick.arm
        state = self._state
        state[:n] = arm.q
        state[n : 2 * n] = arm.dq
        state[2 * n : 3 * n] = arm.tau
        np.subtract(tick.last, arm.q, out=state[3 * n :])
        normal = self._inputs[: 4 * n]
        np.subtract(state, self._mean, out=normal)
        normal /= self._std
        np.clip(normal, -self._clip, self._clip, out=normal)

    def _recover(self, tick: Tick) -> None:
        n = len(self.stride)
        action = self._recovery(self._inputs[: 4 * n])
        np.tanh(action, out=action)
        np.multiply(action[:n], self.stride, out=tick.q)
        tick.q += tick.last
        np.copyto(self.stiffness, action[n:])


def _require_fit(
    config: Config, node: dict[str, Any], spec: dict[str, Any], joints: int, dt: float
) -> None:
    """ConfigError where the run has another rate, or other observations or actions."""
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


def _read(run: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Floats]]:
    """Settings, spec and weights of the newest checkpoint of `run`; ConfigError in one line."""
    folders = sorted(file.parent for file in run.glob("checkpoints/[0-9]*/about.json"))
    folder = run if (run / "policy.yaml").exists() or not folders else folders[-1]
    if wrong := damage(folder, ("policy.yaml", "spec.json", "policy.safetensors")):
        raise ConfigError(f"safety.reflex: {folder} cannot be read: {wrong}")
    try:
        node = parse_yaml(read_text(folder / "policy.yaml", SETTINGS), "policy.yaml")
        spec = read_json(folder / "spec.json")
        weights = load_file(folder / "policy.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
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


def _networks(weights: dict[str, Floats]) -> tuple[list[Layers], Layers]:
    """The two risk networks, and the recovery's."""
    depth = sum(name.startswith("risks.weights.") for name in weights)
    pairs = [(weights[f"risks.weights.{i}"], weights[f"risks.biases.{i}"]) for i in range(depth)]
    risks = [[(np.ascontiguousarray(w[k]), b[k, 0]) for w, b in pairs] for k in range(2)]
    names = [n for n in weights if n.startswith("recovery.") and n.endswith(".weight")]
    recovery = [
        (np.ascontiguousarray(weights[f"recovery.{i}.weight"].T), weights[f"recovery.{i}.bias"])
        for i in sorted(int(name.split(".")[1]) for name in names)
    ]
    return [Layers(layers) for layers in risks], Layers(recovery)
