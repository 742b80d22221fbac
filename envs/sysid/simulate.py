"""Replay: simulates recorded commands on a batch of arms with different joint parameters."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
from mujoco.batch import Batch

from embodied.embodiments import fr3
from embodied.envs.fr3 import joint_model
from embodied.envs.fr3.scene import compile_scene
from embodied.envs.fr3.tasks import TASKS
from embodied.envs.sysid.traces import Floats, Window

BOUNDS = {
    "stiffness": (0.25, 4.0),
    "damping": (0.2, 5.0),
    "friction": (0.0, 4.0),
    "armature": (0.0, 0.8),
    "delay": (0.0, 0.06),
}
"""Of stiffness and damping times what the simulation has, N m, kg m2 and s."""
FACTORS = ("stiffness", "damping")


def nominal() -> mujoco.MjModel:
    """The arm that a fit begins from: the one of training."""
    return compile_scene(TASKS["reach"](), pictures=False)


class Replay:
    """Simulates the commands in `windows` on many arms at once: errors of many candidates."""

    def __init__(self, windows: Sequence[Window], threads: int) -> None:
        self.windows = windows
        self.threads = threads
        self.model = nominal()
        self.nominal = {k: np.array(v) for k, v in joint_model.read(self.model).items()}
        self.low, self.high = (
            np.concatenate([np.repeat(BOUNDS[k][i], n) for k, n in self.sizes]) for i in (0, 1)
        )
        self.log = np.concatenate([np.repeat(k in FACTORS, n) for k, n in self.sizes])
        self.samples = float(np.mean([len(each.after) for each in windows]))
        self.count = int(max(w.after[-1] for w in windows) / self.timestep) + 2
        dof = [int(self.model.joint(name).dofadr[0]) for name in fr3.JOINTS]
        self.dof, self.servo = dof, [self.model.actuator(name).id for name in fr3.JOINTS]

    @property
    def sizes(self) -> list[tuple[str, int]]:
        return [(name, 1 if name == "delay" else 7) for name in BOUNDS]

    @property
    def timestep(self) -> float:
        return float(self.model.opt.timestep)

    @property
    def start(self) -> Floats:
        """The initial values of the parameters, in [0, 1]."""
        now = {**self.nominal, "delay": np.zeros(1)}
        values = [np.ones(7) if k in FACTORS else now[k] for k, _ in self.sizes]
        return self._unit(np.concatenate(values))

    def native(self, x: Floats) -> Floats:
        """Values in their own units of `x` [..., P]."""
        low, high = np.where(self.log, self.low, 1.0), np.where(self.log, self.high, 1.0)
        factor = low * (high / low) ** x
        made = np.where(self.log, factor, self.low + (self.high - self.low) * x)
        base = np.ones(made.shape[-1])
        base[:14] = np.concatenate([self.nominal[name] for name in FACTORS])
        return made * base

    def split(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """[..., P] by name."""
        ends = np.cumsum([n for _, n in self.sizes])[:-1]
        parts = np.split(values, ends, axis=-1)
        return dict(zip(BOUNDS, parts, strict=True))

    def rms(self, x: Floats) -> float:
        return float(np.sqrt(np.mean(self(x[None]) ** 2)))

    def __call__(self, x: Floats) -> Floats:
        """Errors [C, N, 7] (rad) of candidates [C, P], at all measurements of all windows."""
        values = self.split(self.native(x))
        total = len(x) * len(self.windows)
        many = len(self.windows)
        batch = Batch(self.model, total, self.threads)
        value = {k: np.repeat(v, many, 0) for k, v in values.items()}
        batch.expand("actuator_gainprm")[:, self.servo, 0] = value["stiffness"]
        bias = batch.expand("actuator_biasprm")
        bias[:, self.servo, 1] = -value["stiffness"]
        bias[:, self.servo, 2] = -value["damping"]
        batch.expand("dof_frictionloss")[:, self.dof] = value["friction"]
        batch.expand("dof_armature")[:, self.dof] = value["armature"]
        batch.set_const()
        # [C * W, steps, 8]: the mean over each step of what had been sent `delays` [C] (s) before,
        # which goes smoothly with the delay; the hand stays closed.
        delays = values["delay"][:, 0]
        made = np.zeros((len(delays), len(self.windows), self.count, self.model.nu))
        edges = np.arange(self.count + 1) * self.timestep
        for i, window in enumerate(self.windows):
            trace = window.trace
            # The integral of the targets, and on after the last one.
            at = np.append(trace.sent_at, trace.sent_at[-1] + 10.0)
            area = np.cumsum(trace.sent * np.diff(at)[:, None], 0)
            area = np.concatenate([np.zeros((1, 7)), area])
            times = window.start + edges[None] - delays[:, None]
            for j, servo in enumerate(self.servo):
                whole = np.interp(times, at, area[:, j])
                made[:, i, :, servo] = np.diff(whole, axis=1) / self.timestep
        control = made.reshape(-1, self.count, self.model.nu)
        batch.reset()
        qpos = batch.bind("qpos")
        qvel = batch.bind("qvel")
        qpos[:, :7] = np.tile(np.stack([w.q for w in self.windows]), (len(x), 1))
        qvel[:, :7] = np.tile(np.stack([w.dq for w in self.windows]), (len(x), 1))
        begin = qpos[:, None, :7].copy()
        rolled = batch.rollout(self.count, control)["qpos"][..., :7]
        path = np.concatenate([begin, rolled], 1).reshape(len(x), many, self.count + 1, 7)
        return np.concatenate([self._errors(path[:, i], w) for i, w in enumerate(self.windows)], 1)

    def example(self, errors: Floats) -> tuple[Floats, Floats, Floats]:
        """Positions [N, 7]: measured, and both candidates' of errors [2, N, 7]."""
        seen = np.concatenate([w.seen for w in self.windows])
        return seen, seen + errors[0], seen + errors[1]

    def _errors(self, path: Floats, window: Window) -> Floats:
        at = window.after / self.timestep
        first = at.astype(int)
        part = (at - first)[:, None]
        return path[:, first] * (1 - part) + path[:, first + 1] * part - window.seen

    def _unit(self, values: Floats) -> Floats:
        low, high = np.where(self.log, self.low, 1.0), np.where(self.log, self.high, 2.0)
        line = (values - self.low) / (self.high - self.low)
        ratio = np.where(self.log, values, 1.0) / low
        return np.where(self.log, np.log(ratio) / np.log(high / low), line)
