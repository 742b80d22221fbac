"""Gym: any Gymnasium environment as a VecEnv, `num_envs` copies stepped in this process.

Source: Gymnasium (Towers et al., 2024). A plain loop over single environments with little overhead
per step.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.choices import Choices
from embodied.core.env import GoalSpace, StateRoles, Step, VecEnv
from embodied.core.errors import ContractError
from embodied.core.native import OBJECT_PREFIX, Kind, Native, NativeLeaf, together
from embodied.core.spec import MASK, Leaf
from embodied.core.tensors import Tensors

try:
    import gymnasium
    from gymnasium.error import DependencyNotInstalled
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Gymnasium is not installed; type: pip install 'embodied-rl[sim]'", name="gymnasium"
    ) from error

from embodied.envs import saved_state
from embodied.envs.row_rng import row_seed
from embodied.envs.spaces import (
    achieved,
    action_of,
    entries,
    mask_in_info,
    one_line,
    replace_rows,
    require_finite_arrays,
    require_known_id,
    reset_result,
    warn_of_dtypes,
    wrong_observation,
    wrong_step,
)

SUCCESS = ("success", "is_success")
KEEP_STATE = (
    gymnasium.wrappers.DelayObservation,
    gymnasium.wrappers.FrameStackObservation,
    gymnasium.wrappers.NormalizeObservation,
    gymnasium.wrappers.NormalizeReward,
    gymnasium.wrappers.StickyAction,
)
"""Wrappers whose state goes on from step to step."""
SIM = "embodied-rl[sim]"
EXTRAS = {"pygame": "gymnasium[classic-control]", "box2d": "gymnasium[box2d]", "mujoco": SIM}


@dataclass(frozen=True)
class Config:
    """Settings of a Gymnasium environment.

    "package.module:Name-v0" imports the module first, which `allow=[package]` has to permit.
    """

    id: str  # as in `gymnasium.make`
    num_envs: Count = 1  # parallel environments
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # for `gymnasium.make`
    horizon: Count | None = None  # replaces the environment's own time limit (steps)
    obs_key: str = "state"  # name of an observation that has no name of its own
    obs_kind: Mapping[str, Kind] = field(default_factory=dict)  # by name: "picture" or "numbers"
    text: str = ""  # task instruction as a sentence


class Gym(VecEnv):
    """Separate Gymnasium environments; env i is seeded with (seed, i).

    Box observations become float32 (images stay uint8 [H, W, C]), Dict observations one leaf per
    key. `obs_kind` says what a Box is whose type, shape and bounds do not tell it; the bounds of a
    picture become 0 and 255. Box actions are rescaled from [-1, 1] to the native bounds. What
    `action_mask` of an observation or an info forbids is not chosen.
    `get_state` is exact for Gymnasium's own MuJoCo and classic-control environments, and raises
    NotSavable for others. An environment with an attribute `task_space` (a Box of vectors) has
    tasks: it gets the vector, in its own units, as `reset(options={"task": vector})`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.envs: list[gymnasium.Env] = []
        quiet_sdl()
        try:
            for _ in range(config.num_envs):
                self.envs.append(self.make_one())
            self._read_spaces(self.envs[0])
        except Exception:
            self.close()
            raise
        self._now: Tensors = {}
        self._dtypes_checked = False
        self._knows_success = False

    def _read_spaces(self, first: gymnasium.Env) -> None:
        config = self.config
        self._action = action_of(first.action_space, config.id)
        self._entries = self.named_entries(first.observation_space)
        self._action = together(self._action, self._entries)
        self._plans = [(e.name, e, e.leaf.shape, np.dtype(e.leaf.dtype)) for e in self._entries]
        spec = Native(self._entries, self._action).spec(control_period(first), config.text)
        self._tasks = task_space(first, config.id)
        task = None if self._tasks is None else Leaf(self._tasks.shape, low=0.0, high=1.0)
        self.spec = replace(spec, task=task)
        self._choices = Choices(self.spec)

    def make_one(self) -> gymnasium.Env:
        return make(self.config)

    def named_entries(self, space: gymnasium.Space) -> tuple[NativeLeaf, ...]:
        """The leaves of the observations, and of the mask of choices where the info has one."""
        config = self.config
        found = entries(space, config.obs_key, config.id, config.obs_kind)
        if any(entry.name == MASK for entry in found) or self._action.leaf.is_continuous:
            return found
        _, info = reset_result(config.id, self.envs[0], None)
        return found + mask_in_info(info, self._action)

    def added(self, rows: np.ndarray) -> Tensors:
        """Further observations [n, ...] of `rows` [n]; default: none."""
        return {}

    def succeeded(self, row: int, terminated: bool, info: Any) -> Any:
        """Whether the last step of an env was a success; None where the environment is silent."""
        known = [info[key] for key in SUCCESS if key in info]
        return known[-1] if known else None

    def begin_one(self, row: int, seed: int | None, task: Tensor | None) -> tuple[Any, Any]:
        """Start an episode in one env; its first observation and info."""
        given: dict[str, Any] | None = None
        if task is not None and (space := self._tasks) is not None:
            share = task[row].double().numpy()
            vector = space.low + share * (space.high.astype(np.float64) - space.low)
            given = {"task": vector.astype(space.dtype)}
        return reset_result(self.config.id, self.envs[row], seed, given)

    def read_one(self, row: int) -> saved_state.Arrays:
        return saved_state.read(self.envs[row], self.config.id)

    def write_one(self, row: int, state: saved_state.Arrays) -> None:
        """Restore what `read_one` returned."""
        saved_state.write(self.envs[row], state, self.config.id)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None and self.spec.task is None:
            raise ValueError(f"{self.config.id} has no task vector; call reset without `task`")
        if mask is not None and not self._now:
            raise ValueError("the first reset must reset every env; call reset without `mask`")
        rows = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask.numpy())
        fresh = self._reset_rows(rows, seed, task)
        self._now = fresh if mask is None else replace_rows(self._now, rows, fresh)
        self._require_a_choice()
        return self._now

    def step(self, action: Tensor) -> Step:
        native = self._action.native(action, self.config.id)
        n = self.num_envs
        rows = self._arrays(n)
        reward = np.empty(n, np.float32)
        terminated, truncated, success = np.zeros((3, n), np.bool_)
        for row, env in enumerate(self.envs):
            result: Any = env.step(self._action.one(native, row))
            try:
                obs, gain, over, late, info = result
                if gain is None:  # numpy takes it for NaN
                    raise TypeError("no reward")
                reward[row] = gain
                terminated[row] = over
                truncated[row] = late and not over
            except (TypeError, ValueError) as error:
                raise wrong_step(self.config.id, result) from error
            self._write(rows, row, obs, info, last=bool(over or late))
            won = self.succeeded(row, over, info)
            if won is not None:
                success[row] = achieved(self.config.id, won)
                self._knows_success = True
        require_finite_arrays(reward, rows, self.config.id)
        following = {name: torch.from_numpy(array) for name, array in rows.items()}
        following |= self.added(np.arange(n))
        now, ended = following, terminated | truncated
        if ended.any():
            self._notify_before_reset(torch.from_numpy(ended))
            done = np.flatnonzero(ended)
            now = replace_rows(following, done, self._reset_rows(done, None))
        self._now = now
        self._require_a_choice()
        return Step(
            obs=self._now,
            next_obs=following,
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            log={"success": torch.from_numpy(success)} if self._knows_success else {},
        )

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"elapsed": None}, {"generator": None})

    def get_state(self) -> Tensors:
        if not self._now:
            raise ValueError("call reset() before get_state()")
        world = [self.read_one(row) for row in range(self.num_envs)]
        stacked = {key: np.stack([row[key] for row in world]) for key in world[0]}
        state = {key: torch.from_numpy(value) for key, value in stacked.items()}
        # The observation cannot be recomputed: the simulator state has already advanced.
        return state | {f"obs/{key}": value.clone() for key, value in self._now.items()}

    def set_state(self, state: Tensors) -> Tensors:
        world = {key: value.numpy() for key, value in state.items() if not key.startswith("obs/")}
        for row, env in enumerate(self.envs):
            if not self._now:
                env.reset()
            self.write_one(row, {key: value[row] for key, value in world.items()})
        self._now = {name: state[f"obs/{name}"].clone() for name in self.spec.obs}
        return self._now

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        try:
            picture = self.envs[row].render()
        except (DependencyNotInstalled, ImportError) as error:
            raise missing(self.config.id, error) from error
        if not isinstance(picture, np.ndarray):
            raise NotImplementedError(f"{self.config.id} has no camera (no rgb_array render mode)")
        chw = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None].float()
        sized = torch.nn.functional.interpolate(chw, (height, width), mode="area")
        return sized[0].permute(1, 2, 0).round().to(torch.uint8)

    def describe(self, row: int = 0) -> str:
        values = {name: value[row].double().numpy() for name, value in self._now.items()}
        lists = {name: np.array2string(each, precision=3) for name, each in values.items()}
        shown = ", ".join(f"{name} = {' '.join(each.split())}" for name, each in lists.items())
        return f"{(self.config.text or self.config.id).rstrip('.')}: {shown}"

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def unshared_state(self) -> str:
        names: list[str] = []
        env: Any = self.envs[0]
        while isinstance(env, gymnasium.Wrapper):
            names += [type(env).__name__] if isinstance(env, KEEP_STATE) else []
            env = env.env
        if not names:
            return ""
        running = any(name.startswith("Normalize") for name in names)
        instead = "; leave it out: policies normalise observations themselves" if running else ""
        return (
            f"{' and '.join(names)} has a state of its own, which is neither saved nor shared with "
            f"the evaluation{instead}"
        )

    def goal_space(self) -> GoalSpace:
        """That of the interface GoalEnv; the first env is asked for all of them."""
        from embodied.envs.gym_goals import GymGoals

        return GymGoals(self.envs[0], self._entries, self.config.id)

    def _reset_rows(
        self, rows: np.ndarray, seed: int | None, task: Tensor | None = None
    ) -> Tensors:
        arrays = self._arrays(len(rows))
        for place, row in enumerate(rows):
            begin = None if seed is None and self._now else row_seed(seed, int(row))
            obs, info = self.begin_one(int(row), begin, task)
            if not self._dtypes_checked:
                # The first only: conversions cost little, but a wrong type may lose digits.
                self._dtypes_checked = True
                seen = [entry for entry in self._entries if not entry.in_info]
                warn_of_dtypes(self.config.id, self.envs[0].observation_space, seen, obs)
            self._write(arrays, place, obs, info)
        return {name: torch.from_numpy(array) for name, array in arrays.items()} | self.added(rows)

    def _arrays(self, n: int) -> dict[str, np.ndarray]:
        return {name: np.empty((n, *shape), dtype) for name, _, shape, dtype in self._plans}

    def _require_a_choice(self) -> None:
        """ContractError where `action_mask` allows no class of a choice that has to be made now."""
        if self._choices.masked and not self._choices.allowed(self._now).any(3).all():
            raise ContractError(
                f"{self.config.id}: {MASK} allows nothing: leave at least one class of each choice"
            )

    def _write(
        self, arrays: dict[str, np.ndarray], row: int, obs: Any, info: Any, last: bool = False
    ) -> None:
        for entry in self._entries:
            if entry.in_info and MASK not in info:
                if not last:  # nothing is chosen after the last step
                    raise ContractError(
                        f"{self.config.id}: the info of this step has no {MASK}, and that of the "
                        "first reset had one: write it in every step"
                    )
                arrays[MASK][row] = 1.0
                continue
            value = info[MASK] if entry.in_info else entry.pick(obs)
            try:
                value = self._action.mask(value) if entry.in_info else value
                arrays[entry.name][row] = value if entry.plain else entry.converted(value)
            except ValueError as error:
                raise wrong_observation(self.config.id, entry.name, entry.shape, value) from error


def make(config: Config) -> gymnasium.Env:
    """Make one Gymnasium environment, with rendering if its class supports it; errors
    are one line.
    """
    require_known_id(config.id, config.kwargs)
    options: dict[str, Any] = {"disable_env_checker": True, **config.kwargs}
    if config.horizon is not None:
        options["max_episode_steps"] = config.horizon
    try:
        env = gymnasium.make(config.id, **options)
        renders = "rgb_array" in env.metadata.get("render_modes", ())
        # A Python program's object is as its user made it.
        if env.render_mode is None and renders and not config.id.startswith(OBJECT_PREFIX):
            env.close()
            env = gymnasium.make(config.id, render_mode="rgb_array", **options)
    except (DependencyNotInstalled, ImportError) as error:
        raise missing(config.id, error) from error
    except gymnasium.error.UnregisteredEnv as error:
        if config.id.startswith(OBJECT_PREFIX):
            raise ConfigError(
                f"{config.id} was an object of the Python program that trained this run; give it "
                "again: em.load(RUN, env=...)"
            ) from error
        raise ValueError(
            f"cannot find the Gymnasium environment {config.id!r}: {one_line(error)}"
        ) from error
    except TypeError as error:
        what = f"does not accept kwargs {dict(config.kwargs)}" if config.kwargs else "is not made"
        raise ValueError(f"{config.id} {what}: {one_line(error)}") from error
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name, None), gymnasium.Space):
            raise ContractError(
                f"{config.id} has no {name}: write self.{name} = gymnasium.spaces.Box(...) in "
                "__init__"
            )
    return env


def quiet_sdl() -> None:
    """Tell SDL, with which pygame draws, to leave the signals of the process alone (SIGTERM would
    end nothing) and, where there is no display, not to look for one (it prints an error)."""
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def task_space(env: gymnasium.Env, name: str) -> gymnasium.spaces.Box | None:
    """The space of the task vectors of `env`; None if it has no tasks. ContractError unless it is
    a Box of finite vectors."""
    try:
        space = env.get_wrapper_attr("task_space")
    except AttributeError:
        return None
    box = isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1 and space.is_bounded()
    if not box:
        raise ContractError(
            f"{name}: task_space is {space}, should be vectors with finite bounds: write "
            "gymnasium.spaces.Box(low, high, (D,))"
        )
    return space


def missing(name: str, error: Exception) -> ModuleNotFoundError:
    """The error for a missing package, with the install command."""
    said = one_line(error)
    absent = re.search(r"No module named '([^'.]+)", said)
    package = next((known for word, known in EXTRAS.items() if word in said.lower()), None)
    if package == SIM and importlib.util.find_spec("mujoco") is not None:
        package = None  # The package is there: the message is about something else.
    if package is None and absent:
        package = absent[1]
    advice = f"; type: pip install '{package}'" if package else ""
    return ModuleNotFoundError(f"{name} cannot be made: {said}{advice}", name=package)


def control_period(env: gymnasium.Env) -> float:
    """Seconds per step: the environment's `dt`, else one over its `render_fps`, else 1."""
    own = getattr(env.unwrapped, "dt", None)
    if isinstance(own, int | float) and own > 0:
        return float(own)
    rate = env.metadata.get("render_fps")
    return 1.0 / float(rate) if rate else 1.0
