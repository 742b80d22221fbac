"""ManiSkill: registered ManiSkill tasks as a VecEnv, on the CPU or as one batch on a GPU.

Source: ManiSkill 3 (Tao et al., 2024). The inner environment is stepped without ManiSkill's time
limit and vector wrapper, so that the true successor state is available before finished envs are
reset. On the CPU, PhysX holds one environment per scene, in this process or in workers, to which
observations are sent: that costs less than 1% of a step.

The saved state of an env on the CPU is the seed of its episode and the actions since then: PhysX
has contact caches that cannot be read, so restoring poses is not exact, while replaying the episode
from its seed is. To make that work, the contacts of the previous episode are flushed by one physics
step at the new initial state. PhysX still numbers contacts by what came before, which changed the
last bits in 3 of 18 trials of two episodes; a scene that is built anew for each episode (`kwargs:
{reconfiguration_freq: 1}`, 0.2 s) changed none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.device import forked, pick_device
from embodied.core.env import NotFinite, NotSavable, StateRoles, Step, VecEnv, require_finite
from embodied.core.native import Native, nested
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.envs.maniskill.factory import Config, make, require_driver, task_text
from embodied.envs.maniskill.observations import element_names, flat, leaves, picture, words
from embodied.envs.row_rng import pack, unpack
from embodied.envs.spaces import action_of
from embodied.envs.workers import Worker, WorkerPool, receive_all, split

Arrays = dict[str, NDArray[Any]]


class Row:
    """One environment, the generator of its episode seeds, and the recorded actions of
    the episode.
    """

    def __init__(self, settings: Config) -> None:
        self.settings = settings
        self.env = make(settings, 1)
        self.action = action_of(self.env.single_action_space, settings.id)
        self.generator = np.random.Generator(np.random.PCG64(0))
        self.seed = 0
        self.tape: list[NDArray[np.float32]] = []

    def begin(self) -> Tensors:
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


def worth(reward: Any, over: Tensor, info: Mapping[str, Any], settings: Config) -> Tensors:
    """Reward, termination and log [n] of a step; without `end_on_success` nothing terminates."""
    reward = torch.as_tensor(reward)
    ended = over.bool() if settings.end_on_success else torch.zeros_like(over, dtype=torch.bool)
    log = {f"log/{key}": info[key].bool() for key in ("success", "fail") if key in info}
    return {"reward": reward.float().reshape(-1), "terminated": ended, **log}


class Rows:
    """A list of envs stepped one after the other; returned tensors are [envs, ...]."""

    def __init__(self, settings: Config, count: int) -> None:
        require_driver(settings.simulator)
        self.settings = settings
        self.rows = [Row(settings) for _ in range(count)]

    def about(self) -> tuple[Any, Tensors, tuple[str, ...], float]:
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
        whole = np.zeros((self.settings.steps, row.action.leaf.size), np.float32)
        if row.tape:
            whole[: len(row.tape)] = row.tape
        return whole

    def draw(self, row: int, width: int, height: int) -> Tensor:
        return picture(self.rows[row].env, 0, width, height)

    def tell(self, row: int) -> str:
        one = self.rows[row]
        return words(one.env, 0, len(one.tape), self.settings.steps)

    def close(self) -> None:
        for row in self.rows:
            row.env.close()


class Batch:
    """All envs in one GPU simulation. ManiSkill draws initial states together, so the initial state
    of one env depends on the others; contact caches cannot be saved.
    """

    def __init__(self, settings: Config, count: int) -> None:
        require_driver(settings.simulator)
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
        return words(self.env, row, int(self.counts[row]), self.settings.steps)

    def close(self) -> None:
        self.env.close()


def joined(parts: list[Tensors]) -> Tensors:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else {}


class Pool(WorkerPool):
    """The methods of `Rows`, for `count` envs in `workers` processes."""

    def __init__(self, settings: Config, count: int, workers: int) -> None:
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


def _make_rows(settings: Config, count: int) -> Rows:
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


class ManiSkill(VecEnv):
    """ManiSkill tasks. CPU envs are separate environments, env i seeded with (seed, i); they are
    saved as the actions of the episode to replay (to the bit: see above). GPU envs share a
    generator and cannot be saved.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.horizon = config.steps
        self.on_gpu = config.simulator == "gpu"
        self.device = pick_device("cuda" if self.on_gpu else "cpu")
        self.rows = _rows(config)
        space, obs, names, period = self.rows.about()
        self._action = action_of(space, config.id)
        seen = [name for name in obs if name.startswith("sensor_data_")]
        for camera in config.cameras:
            if not any(name.startswith(f"sensor_data_{camera}_") for name in seen):
                raise ValueError(f"{config.id} with obs={config.obs} has no camera {camera!r}")
        self.spec = Spec(
            obs=leaves(obs, names),
            act=self._action.leaf,
            dt=period,
            text=config.text or task_text(config.id),
            native=Native((), self._action).to_json(),
        )
        self._count = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._seeds: dict[int, tuple[int, int] | None] = {r: (0, r) for r in range(self.num_envs)}
        self._now: Tensors = {}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None:
            raise ValueError(f"{self.config.id} has no task vector; call reset without `task`")
        if mask is not None and not self._now:
            raise ValueError("the first reset must reset every env; call reset without `mask`")
        chosen = range(self.num_envs) if mask is None else mask.nonzero().flatten().tolist()
        if seed is not None:
            self._seeds |= {row: (seed, row) for row in chosen}
        if chosen:
            fresh = self._begin(list(chosen))
            self._now = fresh if mask is None else self._replaced(self._now, list(chosen), fresh)
        return self._now

    def step(self, action: Tensor) -> Step:
        if not self._now:
            raise RuntimeError(f"{self.config.id}: call reset() before step()")
        following, told = self.rows.step(self._sent(action))
        require_finite(told["reward"], following, self.config.id)
        self._count += 1
        terminated = told["terminated"]
        truncated = (self._count >= self.horizon) & ~terminated
        ended = (terminated | truncated).nonzero().flatten().tolist()
        self._now = following
        if ended:
            self._now = self._replaced(following, ended, self._begin(ended))
        return Step(
            obs=self._now,
            next_obs=following,
            reward=told["reward"],
            terminated=terminated,
            truncated=truncated,
            log={key[4:]: value for key, value in told.items() if key.startswith("log/")},
        )

    @property
    def state_roles(self) -> StateRoles:
        raise NotSavable(
            f"{self.config.id} restores a state by repeating its episode from the start, so its "
            "clock cannot begin anew there"
        )

    def get_state(self) -> Tensors:
        if not self._now:
            raise RuntimeError(f"{self.config.id}: call reset() before get_state()")
        if isinstance(self.rows, Batch):
            raise NotSavable(
                f"{self.config.id} on the GPU cannot save its contacts; use backend=cpu"
            )
        state = {key: torch.from_numpy(value) for key, value in self.rows.read().items()}
        return state | {f"obs/{key}": value.clone() for key, value in self._now.items()}

    def set_state(self, state: Tensors) -> Tensors:
        if isinstance(self.rows, Batch):
            raise NotSavable(f"{self.config.id} on the GPU cannot load a state; use backend=cpu")
        self.rows.write({k: v.numpy() for k, v in state.items() if not k.startswith("obs/")})
        self._count = state["count"].clone()
        self._seeds = {}
        self._now = {name: state[f"obs/{name}"].clone() for name in self.spec.obs}
        return self._now

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        return self.rows.draw(self._checked(row), width, height)

    def describe(self, row: int = 0) -> str:
        return f"{self.spec.text}: {self.rows.tell(self._checked(row))}"

    def sub_scene(self, row: int = 0) -> Any:
        """The live SAPIEN scene of one env; not available for envs in worker processes."""
        self._checked(row)
        if isinstance(self.rows, Pool):
            raise ValueError(
                "the scene of an env in a worker process cannot be accessed; set workers=0"
            )
        if isinstance(self.rows, Rows):
            return self.rows.rows[row].env.scene.sub_scenes[0]
        self.rows.env.scene.px.sync_poses_gpu_to_cpu()
        return self.rows.env.scene.sub_scenes[row]

    def close(self) -> None:
        self.rows.close()

    def _checked(self, row: int) -> int:
        if not 0 <= row < self.num_envs:
            raise ValueError(f"there is no env {row}; envs are 0 to {self.num_envs - 1}")
        return row

    def _begin(self, rows: list[int]) -> Tensors:
        """New episodes: the first of a new seed, else the env's next."""
        self._count[rows] = 0
        return self.rows.reset({row: self._seeds.pop(row, None) for row in rows})

    def _replaced(self, obs: Tensors, rows: list[int], fresh: Tensors) -> Tensors:
        index = torch.tensor(rows, device=self.device)
        return {key: value.index_copy(0, index, fresh[key]) for key, value in obs.items()}

    def _sent(self, action: Tensor) -> Any:
        """The action for the rows: on the GPU where they are, else an array."""
        if not torch.isfinite(action).all():
            raise NotFinite(f"{self.config.id}: the action is not finite; the run stops here")
        if self.on_gpu:
            return action
        return np.ascontiguousarray(action.detach().numpy(), np.float32)


def _rows(config: Config) -> Rows | Pool | Batch:
    if config.simulator == "gpu":
        return Batch(config, config.num_envs)
    workers = min(config.workers, config.num_envs)
    return Pool(config, config.num_envs, workers) if workers > 1 else Rows(config, config.num_envs)
