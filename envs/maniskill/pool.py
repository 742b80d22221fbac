"""Parallel ManiSkill environments: single ones on the CPU, with worker processes, or a GPU batch.

A step of one env takes milliseconds and its observation has at most a few hundred kilobytes:
sending it costs less than 1% of a step, so shared memory would gain nothing.

On the CPU, PhysX holds one environment per scene. The saved state of an env is the seed of its
episode and the actions since then: PhysX has contact caches that cannot be read, so restoring poses
is not exact, while replaying the episode from its seed is. To make that work, the contacts of the
previous episode are flushed by one physics step at the new initial state. PhysX still numbers
contacts by what came before, which changed the last bits in 3 of 18 trials of two episodes; a scene
that is built anew for each episode (`kwargs: {reconfiguration_freq: 1}`, 0.2 s) changed none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.device import forked
from embodied.core.native import nested
from embodied.core.tensors import Tensors
from embodied.envs.maniskill.factory import Settings, make, require_driver
from embodied.envs.maniskill.observations import element_names, flat, picture, words
from embodied.envs.row_rng import pack, unpack
from embodied.envs.spaces import action_of
from embodied.envs.workers import Worker, WorkerPool, receive_all, split

Arrays = dict[str, NDArray[Any]]


class Row:
    """One environment, the generator of its episode seeds, and the recorded actions of
    the episode.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.env = make(settings, 1)
        self.action = action_of(self.env.single_action_space, settings.id)
        self.generator = np.random.Generator(np.random.PCG64(0))
        self.seed = 0
        self.tape: list[NDArray[np.float32]] = []

    def begin(self) -> Tensors:
        """Start the env's next episode."""
        return self.play(int(self.generator.integers(2**31)))

    def play(self, seed: int) -> Tensors:
        """Start the episode of `seed`, independent of previous episodes."""
        self.seed = seed
        self.tape = []
        obs, info = self.env.reset(seed=seed)
        if not info.get("reconfigure", False):
            self.env.scene.step()
            obs, _ = self.env.reset(seed=seed)
        return flat(obs, self.settings.cameras)

    def step(self, action: NDArray[np.float32]) -> tuple[Tensors, Tensors]:
        """Apply one action [A] in [-1, 1]; returns observations [1, ...] and the reward."""
        self.tape.append(action.copy())
        native = self.action.native(torch.from_numpy(action[None]), self.settings.id)
        obs, reward, over, _, info = self.env.step(native)
        return flat(obs, self.settings.cameras), worth(reward, over, info, self.settings)


def worth(reward: Any, over: Tensor, info: Mapping[str, Any], settings: Settings) -> Tensors:
    """Reward, termination and log [n] of a step; without `end_on_success` nothing terminates."""
    reward = torch.as_tensor(reward)
    ended = over.bool() if settings.end_on_success else torch.zeros_like(over, dtype=torch.bool)
    log = {f"log/{key}": info[key].bool() for key in ("success", "fail") if key in info}
    return {"reward": reward.float().reshape(-1), "terminated": ended, **log}


class Rows:
    """A list of envs stepped one after the other; returned tensors are [envs, ...]."""

    def __init__(self, settings: Settings, count: int) -> None:
        require_driver(settings.backend)
        self.settings = settings
        self.rows = [Row(settings) for _ in range(count)]

    def about(self) -> tuple[Any, Tensors, tuple[str, ...], float]:
        """The action space, an observation, the names of the flat state, the control period."""
        env = self.rows[0].env
        obs = flat(env._init_raw_obs, self.settings.cameras)
        return env.single_action_space, obs, element_names(env), float(env.control_timestep)

    def reset(self, seeds: Mapping[int, tuple[int, int] | None]) -> Tensors:
        """Start episodes in the given envs: the first of a (seed, env), or (None) the next."""
        fresh = []
        for row, seed in seeds.items():
            if seed is not None:
                self.rows[row].generator = np.random.Generator(np.random.PCG64(seed))
            fresh.append(self.rows[row].begin())
        return joined(fresh)

    def step(self, actions: NDArray[np.float32]) -> tuple[Tensors, Tensors]:
        played = [row.step(action) for row, action in zip(self.rows, actions, strict=True)]
        return joined([obs for obs, _ in played]), joined([told for _, told in played])

    def read(self) -> Arrays:
        """The state of every env as arrays [envs, ...]."""
        return {
            "generator": np.stack([pack(row.generator) for row in self.rows]),
            "episode": np.array([row.seed for row in self.rows], np.int64),
            "count": np.array([len(row.tape) for row in self.rows], np.int64),
            "tape": np.stack([self._taped(row) for row in self.rows]),
        }

    def write(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Replay every env's episode up to the state that `read` returned."""
        for at, row in enumerate(self.rows):
            unpack(row.generator, state["generator"][at])
            row.play(int(state["episode"][at]))
            for action in state["tape"][at][: int(state["count"][at])]:
                row.step(action)

    def _taped(self, row: Row) -> NDArray[np.float32]:
        whole = np.zeros((self.settings.horizon, row.action.leaf.size), np.float32)
        if row.tape:
            whole[: len(row.tape)] = row.tape
        return whole

    def draw(self, row: int, width: int, height: int) -> Tensor:
        return picture(self.rows[row].env, 0, width, height)

    def tell(self, row: int) -> str:
        one = self.rows[row]
        return words(one.env, 0, len(one.tape), self.settings.horizon)

    def close(self) -> None:
        for row in self.rows:
            row.env.close()


class Batch:
    """All envs in one GPU simulation. ManiSkill draws initial states together, so the initial state
    of one env depends on the others; contact caches cannot be saved.
    """

    def __init__(self, settings: Settings, count: int) -> None:
        require_driver(settings.backend)
        self.settings = settings
        self.env = make(settings, count)
        self.action = action_of(self.env.single_action_space, settings.id)
        self.bounds = [
            tuple(torch.tensor(end, device=self.env.device) for end in (part.low, part.high))
            for _, part in self.action.parts
        ]
        self.counts = torch.zeros(count, dtype=torch.int64)
        self.generator = np.random.Generator(np.random.PCG64(0))

    def about(self) -> tuple[Any, Tensors, tuple[str, ...], float]:
        env = self.env
        obs = flat(env._init_raw_obs, self.settings.cameras)
        return env.single_action_space, obs, element_names(env), float(env.control_timestep)

    def reset(self, seeds: Mapping[int, tuple[int, int] | None]) -> Tensors:
        """Start episodes in the given envs; returns their observations."""
        rows = torch.tensor(list(seeds), device=self.env.device)
        first = next(iter(seeds.values()), None)
        if first is not None:
            self.generator = np.random.Generator(np.random.PCG64(first))
        self.counts[rows.cpu()] = 0
        with forked(int(self.generator.integers(2**31))):
            obs, _ = self.env.reset(options={"env_idx": rows})
        return {key: value[rows] for key, value in flat(obs, self.settings.cameras).items()}

    def step(self, actions: Tensor) -> tuple[Tensors, Tensors]:
        """Apply actions [B, A] in [-1, 1]."""
        self.counts += 1
        obs, reward, over, _, info = self.env.step(self._native(actions))
        told = worth(reward, over, info, self.settings)
        # The simulator overwrites its output buffers in the next step or reset.
        seen = {key: value.clone() for key, value in flat(obs, self.settings.cameras).items()}
        return seen, {key: value.clone() for key, value in told.items()}

    def _native(self, actions: Tensor) -> Any:
        """As `NativeAction.native`, of numbers only and without leaving the device."""
        columns = actions.clamp(-1, 1).split([len(low) for low, _ in self.bounds], 1)
        ends = zip(columns, self.bounds, strict=True)
        values = [(high + low) / 2 + (high - low) / 2 * column for column, (low, high) in ends]
        paths = (path for path, _ in self.action.parts)
        return nested(list(zip(paths, values, strict=True)))

    def draw(self, row: int, width: int, height: int) -> Tensor:
        return picture(self.env, row, width, height)

    def tell(self, row: int) -> str:
        return words(self.env, row, int(self.counts[row]), self.settings.horizon)

    def close(self) -> None:
        self.env.close()


def joined(parts: list[Tensors]) -> Tensors:
    """Row after row, by name."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else {}


class Pool(WorkerPool):
    """The methods of `Rows`, for `count` envs in `workers` processes."""

    def __init__(self, settings: Settings, count: int, workers: int) -> None:
        self.bounds = split(count, workers)
        given = [(settings, high - low) for low, high in self.bounds]
        self.parts = [Worker("ManiSkill", _make_rows, each, _arrays, _tensors) for each in given]
        receive_all(self.parts)

    def about(self) -> tuple[Any, Tensors, tuple[str, ...], float]:
        self.parts[0].send("about")
        return self.parts[0].receive()

    def reset(self, seeds: Mapping[int, tuple[int, int] | None]) -> Tensors:
        asked = []
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            mine = {row - low: seed for row, seed in seeds.items() if low <= row < high}
            if mine:
                part.send("reset", mine)
                asked.append(part)
        return joined(receive_all(asked))

    def step(self, actions: NDArray[np.float32]) -> tuple[Tensors, Tensors]:
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            part.send("step", actions[low:high])
        played = receive_all(self.parts)
        return joined([obs for obs, _ in played]), joined([told for _, told in played])

    def draw(self, row: int, width: int, height: int) -> Tensor:
        return self.ask("draw", row, width, height)

    def tell(self, row: int) -> str:
        return self.ask("tell", row)


def _make_rows(settings: Settings, count: int) -> Rows:
    """The envs of a worker process."""
    torch.set_num_threads(1)
    return Rows(settings, count)


class _Array:
    """Marks an array that was a tensor."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values


def _arrays(node: Any) -> Any:
    """A result in which tensors are arrays: torch would open a file for each tensor."""
    if isinstance(node, Tensor):
        return _Array(node.contiguous().numpy())
    if isinstance(node, dict):
        return {key: _arrays(part) for key, part in node.items()}
    return tuple(_arrays(part) for part in node) if isinstance(node, tuple) else node


def _tensors(node: Any) -> Any:
    if isinstance(node, _Array):
        return torch.from_numpy(node.values)
    if isinstance(node, dict):
        return {key: _tensors(part) for key, part in node.items()}
    return tuple(_tensors(part) for part in node) if isinstance(node, tuple) else node
