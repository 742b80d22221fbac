"""System identification of arm joints: gains, friction, armature and delay by least squares.

Multiple shooting (Bock, 1983): short windows, each simulated from the measured state. Optimised by
Levenberg-Marquardt (1963) with finite differences that are simulated in one batch. In [0, 1]^P
between the bounds, with initial value x0, K samples per window and the variance 1/12 of a uniform
prior:

    minimise  sum |q_sim(x) - q|^2 / (K s^2) + 12 |x - x0|^2,     cov = (J'J / (K s^2) + 12 I)^-1

s is the measurement noise, or the residual where that is larger. Errors within a window are
correlated, so each window counts once. Where `cov` keeps most of the prior's width, the recording
does not determine the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from embodied.core.bounds import Count, Positive
from embodied.core.build import ConfigError
from embodied.datasets.lerobot.reader import read_episodes
from embodied.datasets.lerobot.schema import DatasetError
from embodied.embodiments import fr3
from embodied.envs.fr3.base import QUANTITIES, compile_scene, read_joints
from embodied.envs.fr3.tasks import TASKS
from embodied.real_robot.kernel.messages import Mode

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
        self.nominal = {k: np.array(v) for k, v in read_joints(self.model).items()}
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
        values = np.concatenate([np.ones(7) if k in FACTORS else now[k] for k, _ in self.sizes])
        low, high = np.where(self.log, self.low, 1.0), np.where(self.log, self.high, 2.0)
        line = (values - self.low) / (self.high - self.low)
        ratio = np.where(self.log, values, 1.0) / low
        return np.where(self.log, np.log(ratio) / np.log(high / low), line)

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
        return dict(zip(BOUNDS, np.split(values, ends, axis=-1), strict=True))

    def rms(self, x: Floats) -> float:
        return float(np.sqrt(np.mean(self(x[None]) ** 2)))

    def __call__(self, x: Floats) -> Floats:
        """Errors [C, N, 7] (rad) of candidates [C, P], at all measurements of all windows."""
        values = self.split(self.native(x))
        many = len(self.windows)
        batch = Batch(self.model, len(x) * len(self.windows), self.threads)
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


Floats = NDArray[np.float64]
MOVES = (Mode.RUNNING, Mode.STOPPING, Mode.HOMING)
NEEDED = {"obs/state", "action/sent", "stamp/measured", "stamp/sent"}
GRID = 0.01  # s, of targets between the rows of a dataset


@dataclass(frozen=True)
class Trace:
    """Joint positions `q` [n, 7] and speeds `dq` [n, 7] at times `t` [n] (s), and the targets
    `sent` [m, 7], each from its `sent_at` [m] on until the next."""

    t: Floats
    q: Floats
    dq: Floats
    sent_at: Floats
    sent: Floats


@dataclass(frozen=True)
class Window:
    """A part of a trace: it starts from `q` [7], `dq` [7]; `seen` [k, 7] are the positions measured
    `after` [k] (s) the start, at most `length`.
    """

    trace: Trace
    start: float
    q: Floats
    dq: Floats
    after: Floats
    seen: Floats


def read_traces(path: Path) -> list[Trace]:
    """The traces of a black box (.npz) or of a recording's folder; ConfigError."""
    if path.suffix == ".npz":
        try:
            state = np.load(path, allow_pickle=False)["state"]
            modes = state["mode"]
            q = state["q"]
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise ConfigError(f"{path} is not a black box: {error}") from error
        finite = np.isfinite(q).all(1) & np.isfinite(state["sent"]).all(1)
        good = np.isin(modes, MOVES) & finite
        # Where the mode changes or ticks are missing, a trace ends.
        step = np.diff(state["now"], prepend=state["now"][:1])
        broken = (step > 5 * max(float(np.median(step)), 1e-3)) | (step < 0)
        number = np.cumsum(broken | (np.diff(good, prepend=good[:1]) != 0))
        traces = [
            made
            for each in np.unique(number[good])
            if (made := _ticks(state[good & (number == each)])) is not None
        ]
    elif (path / "meta" / "info.json").exists():
        traces = _dataset(path)
    else:
        raise ConfigError(f"{path} is neither a black box (.npz) nor a recording (meta/info.json)")
    if not traces:
        raise ConfigError(f"{path} contains no motion by a policy, or too little of it")
    if traces[0].q.shape[1] != 7:
        raise ConfigError(f"{path} was recorded with {traces[0].q.shape[1]} joints; an FR3 has 7")
    return traces


def cut(traces: list[Trace], length: float, history: float) -> list[Window]:
    """Consecutive windows of `length` s, each with `history` s of targets before it."""
    made: list[Window] = []
    for trace in traces:
        step = float(np.median(np.diff(trace.t)))
        count = max(1, round(length / step))
        for first in range(0, len(trace.t) - count, count):
            after = trace.t[first + 1 : first + 1 + count] - trace.t[first]
            known = trace.t[first] - history >= trace.sent_at[0]
            if known and after[-1] < 1.25 * length:
                part = slice(first + 1, first + 1 + count)
                start = float(trace.t[first])
                seen = trace.q[part]
                made.append(Window(trace, start, trace.q[first], trace.dq[first], after, seen))
    return made


def _ticks(state: NDArray[np.void]) -> Trace | None:
    """A measurement that did not come twice is what it says; a lost one repeats the last."""
    new = np.diff(state["measured"], prepend=-np.inf) > 0
    if new.sum() < 3:
        return None
    t, q, dq = (state[name][new].astype(np.float64) for name in ("measured", "q", "dq"))
    return Trace(t, q, dq, state["now"].astype(np.float64), state["sent"].astype(np.float64))


def _dataset(path: Path) -> list[Trace]:
    try:
        episodes = read_episodes(path)
    except DatasetError as error:
        raise ConfigError(str(error)) from error
    state = episodes.spec.obs.get("state")
    names = () if state is None else state.names
    joints = sum(f"q{i}" in names for i in range(1, 10))
    if not joints or NEEDED - set(episodes.steps):
        raise ConfigError(
            f"{path} lacks joint positions, sent targets or their times; record it "
            "with: embodied deploy, and a policy that observes q1, q2, ..."
        )
    made = []
    for number in range(len(episodes)):
        if number < len(episodes.info) and episodes.info[number].get("dry"):
            continue  # the arm was held
        rows = episodes.episode(number)
        part = {key: rows[key].double().numpy() for key in NEEDED}
        seen = part["obs/state"]
        q, dq = (
            seen[:, [names.index(f"{kind}{i}") for i in range(1, joints + 1)]]
            for kind in ("q", "dq")
        )
        # A row's target is the one of its last tick: shortly before the next row's first.
        at = part["stamp/sent"][1:] - GRID
        if len(at) < 3:
            continue
        grid = np.arange(at[0], at[-1], GRID)
        fine = np.stack([np.interp(grid, at, each) for each in part["action/sent"][:-1].T], 1)
        inside = part["stamp/measured"] < grid[-1]
        made.append(Trace(part["stamp/measured"][inside], q[inside], dq[inside], grid, fine))
    return made


PRIOR = 12.0  # 1 / variance of a uniform number in [0, 1]
STEP = 0.01  # of the differences, in the bounds' width
KNOWN = 1 / 3  # of the prior's deviation: what is left of it where a value is determined


@dataclass(frozen=True)
class Config:
    """Settings of the identification."""

    window: Positive = 0.3  # length of a window, s
    most: Count = 24  # most windows for fitting, and again for validation
    noise: Positive = 1e-4  # measurement noise, rad
    rounds: Count = 20  # steps of the optimizer
    threads: Count = 2  # CPU threads


@dataclass(frozen=True)
class Identified:
    """`value`, `deviation` and `known` of each quantity [7] (delay: [1], s), in its own unit;
    `before` and `after`: root mean square errors [7] (rad) in the windows that were held out, with
    the simulation as it was and as fitted. `example`: positions [N, 7] there, measured and both."""

    value: dict[str, Floats]
    deviation: dict[str, Floats]
    known: dict[str, np.ndarray]
    before: Floats
    after: Floats
    windows: int
    example: tuple[Floats, Floats, Floats]

    @property
    def arm(self) -> dict[str, list[float]]:
        """The result in the format of `embodied.envs.fr3.base.write_joints`."""
        return {name: self.value[name].tolist() for name in QUANTITIES}


def identify(config: Config, traces: Sequence[Trace]) -> Identified:
    """Fit to every other window, validate on the rest. ConfigError if there are too few windows."""
    windows = cut(list(traces), config.window, BOUNDS["delay"][1] + 0.01)
    if len(windows) < 4:
        raise ConfigError(
            f"the recording has {len(windows)} windows of {config.window:g} s with motion; at "
            "least 4 are "
            "needed, 20 are better: record more motion"
        )
    fit, held = (_evenly_spread(windows[first::2], config.most) for first in (0, 1))
    replay = Replay(fit, config.threads)
    x0 = replay.start
    x, jacobian = _descend(replay, x0, config)
    # Where errors stay, everything is less sure.
    weight = 1 / (replay.samples * max(config.noise, replay.rms(x)) ** 2)
    cov = np.linalg.inv(weight * jacobian.T @ jacobian + PRIOR * np.eye(jacobian.shape[1]))
    judge = Replay(held, config.threads)
    errors = judge(np.stack([x0, x]))
    root = [np.sqrt(np.mean(each**2, axis=0)) for each in errors]
    split = replay.split
    deviation = np.sqrt(np.diag(cov))
    value, low, high = (split(replay.native(each)) for each in (x, x - deviation, x + deviation))
    return Identified(
        value,
        {name: (high[name] - low[name]) / 2 for name in value},
        split(deviation < KNOWN / np.sqrt(PRIOR)),
        root[0],
        root[1],
        len(fit),
        judge.example(errors),
    )


def _descend(replay: Replay, x0: Floats, config: Config) -> tuple[Floats, Floats]:
    """The best candidate that was found from `x0`, and the errors' derivatives there [N * 7, P]."""
    x = x0.copy()
    damping = 1e-2
    for _ in range(config.rounds):
        error, jacobian = _differences(replay, x)
        # Unmodelled effects (a contact, a load) must not push values to their bounds.
        s = max(config.noise, float(np.sqrt(np.mean(error**2))))
        weight = 1 / (replay.samples * s**2)
        cost = weight * error @ error + PRIOR * np.sum((x - x0) ** 2)
        slope = weight * jacobian.T @ error + PRIOR * (x - x0)
        matrix = weight * jacobian.T @ jacobian + PRIOR * np.eye(len(x))
        dampings = damping * np.array([0.01, 0.1, 1.0, 10.0, 100.0])
        tries = np.stack([_step(x, slope, matrix, each) for each in dampings])
        errors = replay(tries).reshape(len(tries), -1)
        costs = weight * np.sum(errors**2, 1) + PRIOR * np.sum((tries - x0) ** 2, 1)
        best = int(np.argmin(costs))
        if costs[best] < cost:
            x = tries[best]
            damping = float(np.clip(dampings[best], 1e-6, 1e6))
        if costs[best] > cost * (1 - 1e-3):
            break
    return x, _differences(replay, x)[1]


def _step(x: Floats, slope: Floats, matrix: Floats, damping: float) -> Floats:
    free = ~((x <= 0) & (slope > 0) | (x >= 1) & (slope < 0))
    own = matrix[np.ix_(free, free)]
    made = x.copy()
    made[free] -= np.linalg.solve(own + damping * np.diag(np.diag(own)), slope[free])
    return made.clip(0, 1)


def _differences(replay: Replay, x: Floats) -> tuple[Floats, Floats]:
    """Errors [N * 7] at `x` and their derivatives [N * 7, P]."""
    steps = np.where(x + STEP > 1, -STEP, STEP)
    errors = replay(np.concatenate([x[None], x + np.diag(steps)])).reshape(len(x) + 1, -1)
    return errors[0], ((errors[1:] - errors[0]) / steps[:, None]).T


def _evenly_spread(windows: list[Window], most: int) -> list[Window]:
    """Return at most `most` of the windows, evenly spread."""
    take = np.linspace(0, len(windows) - 1, min(most, len(windows))).round().astype(int)
    return [windows[i] for i in take]
