"""Traces: recorded joint targets and measurements from a black box or dataset, cut into windows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.datasets.lerobot.reader import read_episodes
from embodied.datasets.lerobot.schema import DatasetError
from embodied.real_robot.ipc.messages import Mode

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
        sent = part["action/sent"][:-1]
        fine = np.stack([np.interp(grid, at, each) for each in sent.T], 1)
        inside = part["stamp/measured"] < grid[-1]
        made.append(Trace(part["stamp/measured"][inside], q[inside], dq[inside], grid, fine))
    return made
