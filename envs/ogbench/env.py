"""Ogbench: the single-task environments of OGBench (Park et al., 2025) in this process.

The package's environments as they are: rewards are 0 once all is done and -1 for each thing that is
not (`cube-single`: -1 or 0), success ends the episode. The package steps twice with unseeded random
actions while it resets a manipulation scene, and the solver's start and the contact forces of these
steps reach the first observation: here they are cleared, so that the seed decides the whole
episode. Each env has a generator of its own behind `numpy.random`, which the package uses too.

With `play` an oracle moves what is there to one random target after another, as in the paper's
appendix on data collection: an episode of 1,001 steps in a random scene, the package's plan oracle
with its own correlated noise, a new target whenever it is done. Rewards are those of a single task,
computed by the package (`relabel_dataset`) from the state before the step. A step at the task's
goal is a success, with which returns end (the published data's masks), and the play goes on. In
`scene` an episode is cut when the cube leaves the part of the table that can be seen; the authors
draw it again. The oracle's action is the observation `privileged/demonstrator`, so an episode can
also be played by another policy.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.env import RETURN_ENDS, Step
from embodied.core.spec import DEMONSTRATOR

try:
    import ogbench  # registers the ids
    from ogbench.manipspace.envs.manipspace_env import ManipSpaceEnv
    from ogbench.manipspace.oracles.plan.button_plan import ButtonPlanOracle
    from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle
    from ogbench.manipspace.oracles.plan.drawer_plan import DrawerPlanOracle
    from ogbench.manipspace.oracles.plan.window_plan import WindowPlanOracle
    from ogbench.relabel_utils import relabel_dataset
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"OGBench cannot be imported ({error}); type: pip install 'embodied-rl[ogbench]'",
        name=error.name,
    ) from error

from embodied.envs import gym

assert ogbench


class Task(gymnasium.Env[Any, Any]):
    """A manipulation scene or a maze, made by the package."""

    def __init__(self, made: gymnasium.Env[Any, Any]) -> None:
        self.made = made
        self.drawn = NumpyRandom()
        self.metadata = made.metadata
        self.render_mode = made.render_mode
        self.action_space = made.action_space
        self.observation_space = made.observation_space

    @property
    def dt(self) -> float:
        """Seconds per step."""
        made: Any = self.made.unwrapped
        return float(made.control_timestep() if is_scene(made) else made.dt)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.drawn.seed(seed)
        with self.drawn.used():
            obs, info = self.made.reset(seed=seed, options=options)
        return (cleared(self.made.unwrapped) if is_scene(self.made.unwrapped) else obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self.made.step(action)

    def render(self) -> Any:
        return self.made.render()

    def close(self) -> None:
        self.made.close()


def is_scene(env: Any) -> bool:
    """Whether it is a manipulation scene (else a maze)."""
    return isinstance(env, ManipSpaceEnv)


def cleared(scene: Any) -> Any:
    """The observation of a scene at time 0, without traces of earlier steps."""
    data = scene._data
    data.time = 0.0
    data.ctrl[:] = 0.0
    data.qacc_warmstart[:] = 0.0
    mujoco.mj_forward(scene._model, data)
    mujoco.mj_rnePostConstraint(scene._model, data)
    return scene.compute_observation()


class NumpyRandom:
    """A state of `numpy.random` of one's own."""

    def __init__(self) -> None:
        self._state: Any = np.random.RandomState().get_state()

    def seed(self, seed: int) -> None:
        """Begin at `seed`."""
        self._state = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def used(self) -> Iterator[None]:
        """`numpy.random` draws from this state inside, and is as it was outside."""
        outside: Any = np.random.get_state()
        np.random.set_state(self._state)
        try:
            yield
        finally:
            self._state = np.random.get_state()
            np.random.set_state(outside)


STEPS = 1001
KINDS = {"cube": ["cube"], "puzzle": ["button"], "scene": ["cube", "button", "drawer", "window"]}
ORACLES: dict[str, Any] = {
    "cube": CubePlanOracle,
    "button": ButtonPlanOracle,
    "drawer": DrawerPlanOracle,
    "window": WindowPlanOracle,
}
STACK = {"single": (0.0, 0.0), "double": (0.0, 0.25), "triple": (0.05, 0.35), "quad": (0.1, 0.5)}
CUBE = slice(14, 17)  # position of the first cube in `qpos`


class Play(gymnasium.Env[Any, Any]):
    """Play data in the scene of the single task `name`."""

    def __init__(self, name: str, horizon: int | None = None) -> None:
        self.name = name
        self.kind = name.split("-")[0]
        if self.kind not in KINDS:
            raise ConfigError(f"env.play=true: OGBench has no oracle for {name}; play=false")
        options = {"disable_env_checker": True, "terminate_at_goal": False}
        self.scene: Any = gymnasium.make(
            name.split("-singletask")[0] + "-v0",
            mode="data_collection",
            max_episode_steps=horizon or STEPS,
            **options,
        )
        self.drawn = NumpyRandom()
        # The facts that `relabel_dataset` reads of a task; its goals do not change, so one reset is
        # enough.
        task = gymnasium.make(name, **options)
        with self.drawn.used():
            task.reset()
        self.task = SimpleNamespace(unwrapped=task.unwrapped, reset=lambda: None)
        closed = {"gripper_always_closed": True} if self.kind == "puzzle" else {}
        self.oracles = {key: ORACLES[key](env=self.scene, **closed) for key in KINDS[self.kind]}
        self.oracle: Any = None
        self.metadata = self.scene.metadata
        self.action_space = self.scene.action_space
        parts = {"state": self.scene.observation_space, DEMONSTRATOR: self.action_space}
        self.observation_space = spaces.Dict(parts)

    @property
    def dt(self) -> float:
        """Seconds per step."""
        return float(self.scene.unwrapped.control_timestep())

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.drawn.seed(seed)
        with self.drawn.used():
            state, info = self.scene.reset(seed=seed)
            low, high = next((v for k, v in STACK.items() if k in self.name), (0.5, 0.5))
            self.stack = np.random.uniform(low, high)
            self._begin(state, info)
        return self._observed(state, info), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        state, _, _, late, info = self.scene.step(action)
        # Reward of the task in a state, and whether it is solved there.
        buttons = info.get("prev_button_states")
        row: dict[str, Any] = {"qpos": info["prev_qpos"][None]}
        if buttons is not None:
            row["button_states"] = np.asarray(buttons)[None]
        relabel_dataset(self.name, self.task, row)
        reward = float(row["rewards"][0])
        solved = bool(row["masks"][0] == 0)
        if self.oracle.done:
            with self.drawn.used():
                _, info = self.scene.unwrapped.set_new_target(p_stack=self.stack)
                self._begin(state, info)
        late = late or (self.kind == "scene" and _is_hidden(info["qpos"][CUBE]))
        return self._observed(state, info), reward, False, late, {"success": solved}

    def _begin(self, state: Any, info: dict[str, Any]) -> None:
        self.oracle = self.oracles[info["privileged/target_task"]]
        self.oracle.reset(state, info)

    def _observed(self, state: Any, info: dict[str, Any]) -> dict[str, Any]:
        action = np.clip(self.oracle.select_action(state, info), -1, 1)
        return {"state": state, DEMONSTRATOR: action.astype(np.float32)}

    def render(self) -> Any:
        return self.scene.render()

    def close(self) -> None:
        self.scene.close()


def _is_hidden(cube: NDArray[Any]) -> bool:
    """Whether the camera cannot see the cube (m): behind an edge, and not in the drawer."""
    _, y, z = cube
    return bool(y >= 0.29 or (y <= -0.3 and not 0.06 <= z <= 0.08))


@dataclass(frozen=True)
class Config:
    """Settings of an OGBench task."""

    id: str  # as cube-single-singletask-task2-v0 (no number: the one that the benchmark reports)
    num_envs: Count = 1  # parallel environments
    play: bool = False  # an oracle plays in the scene; the rewards are those of the task
    horizon: Count | None = None  # replaces the time limit (steps; of play: 1,001)
    text: str = ""  # task instruction as a sentence


class Ogbench(gym.Gym):
    """Separate environments; env i is seeded with (seed, i). The state cannot be saved."""

    def __init__(self, config: Config) -> None:
        self.play = config.play  # then a success is where returns end, and the episode goes on
        if "-singletask" not in config.id or config.id not in gymnasium.registry:
            known = [name for name in gymnasium.registry if "-singletask" in name]
            near = difflib.get_close_matches(config.id, known, n=3, cutoff=0.0)
            raise ConfigError(f"env.id={config.id} is no single task; {', '.join(near)} are")
        super().__init__(
            gym.Config(config.id, config.num_envs, horizon=config.horizon, text=config.text)
        )

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        if self.play:
            step.log[RETURN_ENDS] = step.log["success"]
        return step

    def make_one(self) -> gymnasium.Env:
        name = self.config.id
        horizon = self.config.horizon
        with warnings.catch_warnings():  # of the package's Boxes, about their precision
            warnings.simplefilter("ignore", UserWarning)
            if self.play:
                return Play(name, horizon)
            return Task(gymnasium.make(name, disable_env_checker=True, max_episode_steps=horizon))
