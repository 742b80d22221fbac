"""ProcessEnv: a VecEnv whose environments run in a process of another Python.

The worker (`embodied.envs.process.worker`) resets and steps rows when it is told to; this class
resets ended rows in the same step, and saves states. A state is, for every row, the seed of its
episode and the actions since: it is restored by playing them again, and compared with the
observation that was saved. Backends that cannot step single rows raise NotSavable. The channel's
answers are JSON and arrays of sizes that were agreed on before: nothing that the worker sends can
run code here.

mjlab (Zakka et al., 2025) pins another MuJoCo than this project and robosuite (Zhu et al., 2020)
another numpy, so each has a virtual environment of its own: `sh scripts/apart.sh NAME`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.bounds import Count, Positive
from embodied.core.build import ConfigError
from embodied.core.env import NotFinite, NotSavable, StateRoles, Step, VecEnv, require_finite
from embodied.core.native import (
    Native,
    NativeAction,
    NativeLeaf,
    NestedAction,
    discrete_action,
    discrete_leaf,
    mask_leaf,
    native_action,
    native_leaf,
    picked,
    together,
)
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.process.worker.memory import Layout, mapped, total

HERE = Path(__file__).parent
# Only the package `worker` is found there: other names would hide modules of the other Python.
START = """
import sys
sys.path.insert(0, sys.argv.pop())
import worker.main
del sys.path[0]
worker.main.main()
"""
LONGEST = 1 << 20  # bytes of an answer
SHARED = Path("/dev/shm")


class WorkerError(RuntimeError):
    """The worker process failed, ended, did not answer in time, or answered nonsense."""


class Channel:
    """One worker process. `timeout` (s) is how long an answer may take."""

    def __init__(self, python: str, timeout: float) -> None:
        self.python = python
        self.timeout = timeout
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        command = [python, "-I", "-c", START, str(HERE)]
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._said)
        except OSError as error:
            raise ConfigError(
                f"env.python: cannot start {python} ({error.strerror}); env.python=PATH"
            ) from error
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self.process.stdout, selectors.EVENT_READ)
        self._rest = b""
        self._file: str | None = None

    def share(self, layout: Layout) -> dict[str, NDArray[Any]]:
        """Map arrays of `layout` into both processes."""
        folder = SHARED if SHARED.is_dir() else Path(tempfile.gettempdir())
        handle, path = tempfile.mkstemp(prefix="embodied_env_", dir=folder)
        self._file = path
        os.truncate(handle, total(layout))
        os.close(handle)
        self.ask({"memory": path, "layout": [list(each) for each in layout]})
        arrays = mapped(path, layout)
        self._unlink()  # both have it open; the memory goes with the processes
        return arrays

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer; WorkerError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            if len(self._rest) > LONGEST:
                raise WorkerError("the worker's answer is too long")
            if not self._ready.select(self.timeout):
                raise WorkerError(f"the worker did not answer in {self.timeout:g} s; env.timeout=")
            part = self.process.stdout.read(LONGEST)
            if part == b"":
                raise self._ended()
            self._rest += part or b""
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkerError(f"the worker answered no JSON: {line[:100]!r}") from error
        if not isinstance(answer, dict):
            raise WorkerError(f"the worker answered no JSON object: {line[:100]!r}")
        if "error" in answer:
            raise WorkerError(str(answer["error"])[:2000])
        return answer

    def close(self) -> None:
        """End the worker; it is killed after 5 s."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                # A worker that has died leaves a request that cannot be flushed.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._ready.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._said.close()
        self._unlink()

    def _ended(self) -> WorkerError:
        code = self.process.wait()
        self._said.seek(0)
        lines = self._said.read()[-4000:].decode(errors="replace").strip().splitlines()
        last = f"; it said: {lines[-1]}" if lines else ""
        return WorkerError(f"the worker process ended (exit code {code}){last}")

    def _unlink(self) -> None:
        if self._file is not None:
            Path(self._file).unlink(missing_ok=True)
            self._file = None


def interpreter(apart: str, given: str = "") -> str:
    """The Python of the virtual environment `apart`: `given`, else the one that the variable
    EMBODIED_<APART>_PYTHON names, else .venv-<apart>/bin/python; this one if `apart` is empty, too.
    ConfigError if it does not exist.
    """
    if not apart:
        return given or sys.executable
    variable = os.environ.get(f"EMBODIED_{apart.upper()}_PYTHON", "")
    path = given or variable or f".venv-{apart}/bin/python"
    if not Path(path).exists():
        raise ConfigError(f"{apart} is not here ({path} does not exist); {install(apart)}")
    return str(Path(path).absolute())


def install(apart: str) -> str:
    """The advice for an environment that cannot start."""
    if not apart:
        return "env.python=PATH names the interpreter that has it"
    return f"install it with: sh scripts/apart.sh {apart}"


DTYPES = ("float32", "uint8", "int64")
MOST_LEAVES = 256
MOST_BYTES = 1 << 30


class ProcessEnv(VecEnv):
    """B rows of a `backend` of the worker, under the interpreter `python`.

    `name` is for messages, `install` what to type where the worker cannot start. Row i's k-th
    episode since `reset(seed)` is seeded with (seed, i, k).
    """

    def __init__(
        self,
        backend: str,
        settings: Mapping[str, Any],
        *,
        num_envs: int,
        python: str,
        timeout: float,
        name: str,
        install: str,
        text: str = "",
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1, got {num_envs}")
        self.num_envs = num_envs
        self.name = name
        self.channel = Channel(python, timeout)
        try:
            asked = {"backend": backend, "settings": dict(settings), "num_envs": num_envs}
            answer = self.channel.ask(asked)
            self.spec = checked_spec(answer.get("spec"), num_envs, text)
            self.native = Native.of(self.spec)
            self.partial = answer.get("partial") is True
            self._arrays = self.channel.share(self._layout())
        except WorkerError as error:
            self.channel.close()
            raise ConfigError(f"{name} cannot start under {python}: {error}; {install}") from error
        self._seed = int(np.random.SeedSequence().generate_state(1)[0] >> 1)
        self._episode = np.zeros(num_envs, np.int64)
        self._root = np.full(num_envs, self._seed, np.int64)
        self._past: list[list[NDArray[Any]]] = [[] for _ in range(num_envs)]
        self._now: Tensors = {}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None:
            raise ValueError(f"{self.name} has no task vector; call reset without `task`")
        if mask is not None and not self._now:
            raise ValueError("the first reset must reset every env; call reset without `mask`")
        rows = np.ones(self.num_envs, bool) if mask is None else mask.cpu().numpy().astype(bool)
        if seed is not None:
            self._root[rows] = seed
            self._episode[rows] = 0
        self._begin(rows, seed is not None)
        self._now = self._fresh(self._now or self._read("obs"), rows)
        return self._now

    def step(self, action: Tensor) -> Step:
        if not self._now:
            raise RuntimeError(f"{self.name}: call reset() before step()")
        self._play(self._checked(action), np.ones(self.num_envs, bool))
        following = self._read("next_obs")
        reward, terminated, truncated, success = (
            torch.from_numpy(self._arrays[key].copy())
            for key in ("reward", "terminated", "truncated", "success")
        )
        require_finite(reward, following, self.name)
        truncated = truncated & ~terminated
        self._now = following
        ended = terminated | truncated
        if ended.any():
            self._notify_before_reset(ended)
            self._begin(ended.numpy(), False)
            self._now = self._fresh(following, ended.numpy())
        log = {"success": success} if self._arrays["success_known"][0] else {}
        return Step(self._now, following, reward, terminated, truncated, log)

    @property
    def state_roles(self) -> StateRoles:
        raise NotSavable(
            f"{self.name} restores a state by repeating its episode from the start, so its "
            "clock cannot begin anew there"
        )

    def get_state(self) -> Tensors:
        if not self.partial:
            raise NotSavable(f"{self.name} cannot save its state")
        if not self._now:
            raise RuntimeError(f"{self.name}: call reset() before get_state()")
        longest = max(len(past) for past in self._past)
        actions = self.spec.act.zeros(self.num_envs * max(longest, 1))
        actions = actions.view(self.num_envs, max(longest, 1), *self.spec.act.shape)
        for row, past in enumerate(self._past):
            if past:
                actions[row, : len(past)] = torch.from_numpy(np.stack(past))
        counts = torch.tensor([len(past) for past in self._past])
        numbers = torch.from_numpy(np.stack([self._root, self._episode], 1))
        state = {"episode": numbers, "count": counts, "actions": actions}
        return state | {f"obs/{key}": value.clone() for key, value in self._now.items()}

    def set_state(self, state: Tensors) -> Tensors:
        if not self.partial:
            raise NotSavable(f"{self.name} cannot load a state")
        self._root, self._episode = state["episode"].numpy().T.copy()
        self._episode = self._episode - 1
        self._begin(np.ones(self.num_envs, bool), False)
        counts = state["count"].numpy()
        actions = state["actions"].numpy()
        saved = {name: state[f"obs/{name}"].clone() for name in self.spec.obs}
        here = self._read("obs")
        for k in range(int(counts.max(initial=0))):
            self._play(actions[:, k], counts > k)
        played = torch.from_numpy(counts > 0).nonzero().flatten()
        for name, value in self._read("next_obs").items():
            here[name].index_copy_(0, played, value[played])
        for name, value in saved.items():
            if not torch.equal(value, here[name]):
                raise NotSavable(f"{self.name} does not repeat its episodes: {name} came different")
        self._now = saved
        return self._now

    def describe(self, row: int = 0) -> str:
        values = {name: value[row].flatten()[:32].tolist() for name, value in self._now.items()}
        shown = ", ".join(f"{name} = {value}" for name, value in values.items())
        return f"{self.spec.text or self.name}: {shown}"

    def close(self) -> None:
        self.channel.close()

    def _begin(self, rows: NDArray[np.bool_], seeded: bool) -> None:
        """Begin the next episode of `rows` [B] in the worker."""
        for row in np.flatnonzero(rows):
            self._episode[row] += 1
            entropy = (int(self._root[row]), int(row), int(self._episode[row]))
            drawn = np.random.SeedSequence(entropy).generate_state(1)[0] >> 1
            self._arrays["seeds"][row] = drawn
            self._past[row] = []
        self._arrays["rows"][:] = rows
        self.channel.ask({"do": "reset", "seeded": seeded})

    def _fresh(self, obs: Tensors, rows: NDArray[np.bool_]) -> Tensors:
        """A copy of `obs` with the first observations of `rows` [B]."""
        index = torch.from_numpy(np.flatnonzero(rows))
        fresh = self._read("obs")
        return {k: value.index_copy(0, index, fresh[k][index]) for k, value in obs.items()}

    def _play(self, action: NDArray[Any], rows: NDArray[np.bool_]) -> None:
        """Step `rows` [B] in the worker, and remember what they did."""
        if self.native is None:
            self._arrays["action"][:] = action
        else:
            own = self.native.act.native(torch.from_numpy(action))
            for place, (path, _) in enumerate(self.native.act.parts):
                self._arrays[f"action/{place}"][:] = picked(own, path)
        self._arrays["rows"][:] = rows
        for row in np.flatnonzero(rows) if self.partial else ():
            self._past[row].append(np.array(action[row]))
        self.channel.ask({"do": "step"})

    def _checked(self, action: Tensor) -> NDArray[Any]:
        shape = (self.num_envs, *self.spec.act.shape)
        if tuple(action.shape) != shape:
            raise ValueError(f"{self.name}: action is {tuple(action.shape)}, expected {shape}")
        if not torch.isfinite(action).all():
            raise NotFinite(f"{self.name}: the action is not finite; the run stops here")
        values = action.detach().cpu()
        return (values.clamp(-1, 1) if self.spec.act.is_continuous else values).numpy()

    def _read(self, kind: str) -> Tensors:
        own = {name: self._arrays[f"{kind}/{name}"].copy() for name in self.spec.obs}
        if self.native is not None:
            own = {each.name: each.converted(own[each.name]) for each in self.native.obs}
        return {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in own.items()}

    def _layout(self) -> list[tuple[str, str, list[int]]]:
        n, act = self.num_envs, self.spec.act
        if self.native is None:
            parts = {name: (leaf.dtype, leaf.shape) for name, leaf in self.spec.obs.items()}
            layout = [("action", act.dtype, [n, *act.shape])]
        else:
            parts = {each.name: (each.dtype, each.shape) for each in self.native.obs}
            layout = [
                (f"action/{place}", part.dtype, [n, *part.shape])
                for place, (_, part) in enumerate(self.native.act.parts)
            ]
        for kind in ("obs", "next_obs"):
            layout += [
                (f"{kind}/{key}", dtype, [n, *shape]) for key, (dtype, shape) in parts.items()
            ]
        flags = ("terminated", "truncated", "success", "rows")
        layout += [("reward", "float32", [n]), *((name, "bool", [n]) for name in flags)]
        return [*layout, ("success_known", "bool", [1]), ("seeds", "int64", [n])]


def checked_spec(data: Any, num_envs: int, text: str) -> Spec:
    """The Spec that a worker described; WorkerError if it is malformed or too large."""
    try:
        if data.get("native"):
            leaves = tuple(_native_leaf(str(name), leaf) for name, leaf in data["obs"].items())
            leaves += mask_leaf(int(data["mask"]))
            action = together(_native_action(data["act"]), leaves)
            spec = Native(leaves, action).spec(float(data["dt"]), text)
        else:
            obs = {str(name): _leaf(leaf) for name, leaf in data["obs"].items()}
            spec = Spec(obs, _leaf(data["act"]), float(data["dt"]), text=text)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise WorkerError(f"the worker described no environment: {str(data)[:200]}") from error
    obs = spec.obs
    size = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in obs.values()) * num_envs
    if not obs or len(obs) > MOST_LEAVES or size > MOST_BYTES or not spec.dt > 0:
        raise WorkerError(f"the worker's observations are too large, or none: {str(data)[:200]}")
    return spec


def _leaf(data: Mapping[str, Any]) -> Leaf:
    shape = tuple(int(size) for size in data["shape"])
    if data["dtype"] not in DTYPES or any(size < 1 for size in shape) or len(shape) > 4:
        raise ValueError(f"a leaf of {data['dtype']} {shape}")
    low, high = (None if data[key] is None else float(data[key]) for key in ("low", "high"))
    if data["dtype"] == "int64":
        low, high = (None if bound is None else int(bound) for bound in (low, high))
    return Leaf(shape, data["dtype"], low, high)


def _native_leaf(name: str, data: Mapping[str, Any]) -> NativeLeaf:
    shape, dtype = _checked_array(data)
    path, (low, high) = _path(data["path"]), _ends(data, shape)
    if data["discrete"]:
        return discrete_leaf(name, path, low, high, shape)
    return native_leaf(name, path, shape, dtype, low, high)


def _path(keys: Sequence[Any]) -> tuple[str | int, ...]:
    if not all(isinstance(key, str | int) for key in keys):
        raise ValueError(f"a path {keys}")
    return tuple(keys)


def _ends(data: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The bounds [*shape] of an array, of which one may stand for all, and None for none."""
    ends: list[NDArray[Any]] = []
    for key, none in (("low", -math.inf), ("high", math.inf)):
        values = np.asarray([none] if data[key] is None else data[key])
        ends.append(values.reshape(shape) if values.size > 1 else np.full(shape, values[0]))
    return ends[0], ends[1]


def _native_action(data: Sequence[Any]) -> NativeAction | NestedAction:
    """The action of arrays by their path of keys and places."""
    parts = tuple((_path(path), _array_action(array)) for path, array in data)
    if not 1 <= len(parts) <= MOST_LEAVES:
        raise ValueError(f"an action of {len(parts)} parts")
    return parts[0][1] if parts[0][0] == () else NestedAction(parts)


def _array_action(data: Mapping[str, Any]) -> NativeAction:
    shape, dtype = _checked_array(data)
    low, high = _ends(data, shape)
    if data["discrete"]:
        return discrete_action(low, high - low + 1, dtype, shape)
    return native_action(shape, dtype, low, high, "the environment")


def _checked_array(data: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    shape = tuple(int(size) for size in data["shape"])
    if np.dtype(data["dtype"]).kind not in "fiub" or min(shape, default=1) < 1 or len(shape) > 4:
        raise ValueError(f"an array of {data['dtype']} {shape}")
    return shape, str(np.dtype(data["dtype"]))


@dataclass(frozen=True)
class GymnasiumConfig:
    """Settings of a Gymnasium environment in another interpreter."""

    id: str  # for `gymnasium.make`
    num_envs: Count = 1  # parallel environments
    apart: str = ""  # virtual environment .venv-<apart> that has it (`scripts/apart.sh`)
    python: str = ""  # another interpreter that has it (both empty: this one)
    module: str = ""  # imported there first, to register ids
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # for `gymnasium.make`
    horizon: Count | None = None  # replaces the environment's time limit (steps)
    dt: Positive | None = None  # replaces its control period (s)
    timeout: Positive = 120.0  # longest wait for an answer, s
    text: str = ""  # task instruction as a sentence


class GymnasiumProcess(ProcessEnv):
    """Observations and actions are those of `env=gym`, and so is `action_mask` (of the observation
    or the info)."""

    def __init__(self, config: GymnasiumConfig) -> None:
        super().__init__(
            "gymnasium_rows",
            {key: getattr(config, key) for key in ("id", "module", "horizon")}
            | {"kwargs": dict(config.kwargs)},
            num_envs=config.num_envs,
            python=interpreter(config.apart, config.python),
            timeout=config.timeout,
            name=config.id,
            install=install(config.apart),
            text=config.text,
        )
        if config.dt is not None:
            self.spec = replace(self.spec, dt=config.dt)


MJLAB = "mjlab"


@dataclass(frozen=True)
class MjlabConfig:
    """Settings of an mjlab task."""

    task: str  # an id of mjlab
    num_envs: Count = 16  # parallel environments
    python: str = ""  # interpreter that has it (empty: EMBODIED_MJLAB_PYTHON, .venv-mjlab)
    device: str = "auto"  # of the simulation: auto, cpu or cuda:N
    action_scale: Positive = 1.0  # mjlab's action for an action of 1 here
    play: bool = False  # its settings for playing (no noise)
    motion: str = ""  # motion file of a tracking task
    horizon: Count | None = None  # replaces the time limit (steps)
    timeout: Positive = 900.0  # longest wait, s (kernels are compiled at the first start)


class Mjlab(ProcessEnv):
    """Observations: mjlab's group `actor` as `state`, `critic` as `critic/state`, others by name.

    mjlab has one random generator for all rows: episodes depend on the seed, and on the other rows.
    Its state cannot be saved (NotSavable).
    """

    def __init__(self, config: MjlabConfig) -> None:
        names = ("task", "device", "action_scale", "play", "motion", "horizon")
        super().__init__(
            "mjlab_rows",
            {name: getattr(config, name) for name in names},
            num_envs=config.num_envs,
            python=interpreter(MJLAB, config.python),
            timeout=config.timeout,
            name=f"mjlab {config.task}",
            install=install(MJLAB),
            text=config.task,
        )


ROBOSUITE = "robosuite"


@dataclass(frozen=True)
class RobosuiteConfig:
    """Settings of a robosuite task."""

    task: str  # Lift, PickPlaceCan, NutAssemblySquare, ...
    num_envs: Count = 1  # parallel environments
    robot: str = "Panda"  # robosuite's name of the arm
    shaped: bool = False  # dense reward
    horizon: Count = 400  # time limit (steps of 50 ms)
    python: str = ""  # interpreter that has it (empty: EMBODIED_ROBOSUITE_PYTHON, .venv-robosuite)
    timeout: Positive = 120.0  # longest wait for an answer, s
    text: str = ""  # task instruction as a sentence


class Robosuite(ProcessEnv):
    """The task's state in robomimic's names; actions: a change of the tool's pose (5 cm, 0.5 rad)
    and the gripper. A success terminates an episode.
    """

    def __init__(self, config: RobosuiteConfig) -> None:
        super().__init__(
            "robosuite_rows",
            {name: getattr(config, name) for name in ("task", "robot", "shaped", "horizon")},
            num_envs=config.num_envs,
            python=interpreter(ROBOSUITE, config.python),
            timeout=config.timeout,
            name=f"robosuite {config.task}",
            install=install(ROBOSUITE),
            text=config.text,
        )
