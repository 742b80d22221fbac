"""VecEnv: a vectorised environment with torch tensors and autoreset; Step; optional protocols.

`VecEnv` is the contract of every environment. The protocols at the end (`HasLevels`, `HasScene`,
...) are optional abilities: an environment implements one by defining its members, and code that
needs it asks `core.wrapper.find_protocol(env, HasLevels)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, to

RETURN_ENDS = "return_ends"  # key of `Step.log`, and column of recordings
REAL = "real"  # key of `Step.log`, and column (bool): the step is the real system's, not simulated


class NotSavable(RuntimeError):
    """The environment cannot save its state exactly; its running episodes restart on resume."""


class NotFinite(RuntimeError):
    """An environment returned a NaN or infinite number."""


@dataclass(slots=True)
class Step:
    """The result of one control step in B parallel envs.

    `obs`: observations to act on next; envs whose episode ended are already reset in it.
    `next_obs`: the true successor of the action, also where the episode ended (Gymnasium's
    `final_obs`); bootstrap from it only. The two share memory where no episode ended.
    `terminated` [B]: the episode ended and the value of `next_obs` is 0 (success, failure).
    `truncated` [B]: a time limit was reached; bootstrap from `next_obs`. Never both.
    `log`: tensors [B] for logging and evaluation; `log["success"]` (bool) is true in the step in
    which the task was solved, if the environment knows it. `log[RETURN_ENDS]` (bool) is for
    recordings: a return ends with this step, though the episode goes on (the masks of play data).
    """

    obs: Tensors
    next_obs: Tensors
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    log: Tensors

    def to(self, device: torch.device) -> Step:
        obs = to(self.obs, device)
        following = obs if self.next_obs is self.obs else to(self.next_obs, device)
        flags = (self.terminated.to(device), self.truncated.to(device))
        return Step(obs, following, self.reward.to(device), *flags, to(self.log, device))

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


Columns = tuple[int, ...] | None  # columns of a flattened leaf; None: all


@dataclass(frozen=True)
class StateRoles:
    """What leaves of `get_state` mean to an env that takes over the saved state of another one.

    Each maps names of leaves to columns of the flattened leaf (None: all). `clocks` (steps of the
    episode so far) are set to 0; `generators` (random generators, seeds and numbers of episodes)
    are kept; `times`, which are counted on the first clock, are moved with it. Everything else is
    taken over.
    """

    clocks: Mapping[str, Columns] = field(default_factory=dict[str, Columns])
    generators: Mapping[str, Columns] = field(default_factory=dict[str, Columns])
    times: Mapping[str, Columns] = field(default_factory=dict[str, Columns])

    def under(self, prefix: str) -> StateRoles:
        """The same roles of leaves whose names begin with `prefix`."""
        parts = (self.clocks, self.generators, self.times)
        return StateRoles(*({f"{prefix}{k}": v for k, v in part.items()} for part in parts))

    def __or__(self, other: StateRoles) -> StateRoles:
        return StateRoles(
            {**self.clocks, **other.clocks},
            {**self.generators, **other.generators},
            {**self.times, **other.times},
        )


def restored(
    state: Tensors, rows: Tensor, saved: Tensors, index: Tensor, roles: StateRoles
) -> Tensors:
    """`state` [B, ...] with the envs `rows` [n] in the states `index` [n] of `saved` [M, ...].

    Their random generators are kept; their clocks are set to 0, and the times on them moved.
    """
    new = {key: leaf.clone() for key, leaf in state.items()}
    taken = {key: saved[key][index].to(value) for key, value in new.items()}
    since = torch.zeros(())
    for key, columns in [*roles.clocks.items()][:1]:
        since = _rows(taken[key])[:, 0 if columns is None else columns[0]].clone()
    for key, columns in roles.times.items():
        _change(taken, key, columns, lambda flat: flat - since.to(flat)[:, None])
    for key, columns in roles.clocks.items():
        _change(taken, key, columns, torch.zeros_like)
    for key, columns in roles.generators.items():
        own = _rows(state[key][rows])
        kept = own if columns is None else own[:, list(columns)]
        _change(taken, key, columns, lambda _, kept=kept: kept)
    for key, value in taken.items():
        new[key][rows] = value
    return new


def _change(
    taken: Tensors, key: str, columns: Sequence[int] | None, change: Callable[[Tensor], Tensor]
) -> None:
    """Replace columns of a leaf (None: all) by what `change` makes of them."""
    flat = _rows(taken[key]).clone()
    at = list(range(flat.shape[1]) if columns is None else columns)
    flat[:, at] = change(flat[:, at])
    taken[key] = flat.view_as(taken[key])


def _rows(leaf: Tensor) -> Tensor:
    return leaf.reshape(leaf.shape[0], -1)


class VecEnv(ABC):
    """B parallel envs that exchange tensors on `device`. Autoreset: an env whose episode ended is
    reset inside `step` (new initial state, new task). Each env has its own random generator: its
    episodes depend on the seed and its index only, not on the other envs. Asymmetric observations
    use the prefixes `critic/` and `privileged/`."""

    spec: Spec
    num_envs: int
    device: torch.device = torch.device("cpu")
    _pre_reset_hooks: tuple[Callable[[Tensor], None], ...] = ()

    @abstractmethod
    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """Start new episodes in the envs of `mask` [B] (None: all); returns all observations.
        `seed`: re-seed these envs (env i from (seed, i)); None continues their generators. `task`
        [B, D] in [0, 1]: task vectors for this one episode; None samples them."""

    @abstractmethod
    def step(self, action: Tensor) -> Step:
        """Apply `action` (float32 [B, A] in [-1, 1], or int64 [B] if discrete) for `dt` seconds."""

    def get_state(self) -> Tensors:
        """The complete state, leaves [B, ...], random generators included. Single envs can be
        selected with `tensors.take`. Raises NotSavable if not supported."""
        raise NotSavable(f"{type(self).__name__} cannot save its state")

    def set_state(self, state: Tensors) -> Tensors:
        """Restore a state of `get_state`; returns the observations of all envs."""
        raise NotSavable(f"{type(self).__name__} cannot load a state")

    @property
    def state_roles(self) -> StateRoles:
        """Which leaves of `get_state` are clocks and which generators. Raises NotSavable if an env
        cannot take over the state of another one; reset teachers need it.
        """
        raise NotSavable(
            f"{type(self).__name__} does not say which leaves of its state are clocks and which "
            "are random generators: define the property `state_roles`"
        )

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """An image of env `row`, uint8 [height, width, 3]."""
        raise NotImplementedError(f"{type(self).__name__} has no camera")

    @property
    def num_views(self) -> int:
        """V: how many camera views `render_batch` puts side by side."""
        return 1

    def render_batch(self, rows: Tensor, size: int) -> Tensor:
        """Small, cheap images of the envs `rows` [n] (int64), uint8 [n, size, V size, 3]."""
        shots = [self.render(int(row), size, size) for row in rows]
        return torch.stack(shots) if shots else torch.empty(0, size, size, 3, dtype=torch.uint8)

    def describe(self, row: int = 0) -> str:
        """The state of env `row` as text, for language models and people."""
        raise NotImplementedError(f"{type(self).__name__} has no text description")

    def add_pre_reset_hook(self, call: Callable[[Tensor], None]) -> None:
        """Call `call(rows)` inside `step`, before the envs `rows` [B] (bool) are reset. It is the
        last moment in which the final states can be rendered and described."""
        self._pre_reset_hooks = (*self._pre_reset_hooks, call)

    def _notify_before_reset(self, rows: Tensor) -> None:
        """Call the pre-reset hooks. Every `step` calls this before it resets the envs `rows`."""
        for call in self._pre_reset_hooks:
            call(rows)

    def close(self) -> None:  # noqa: B027  (optional)
        """Release threads, processes and windows."""


def require_finite(reward: Tensor, obs: Tensors, name: str, rows: str = "envs") -> None:
    """Raise NotFinite if a reward or an observation contains NaN or infinity; `rows`: of what there
    is one in each row."""
    for key, value in {"reward": reward, **obs}.items():
        # A sum is NaN or infinite if any element is: one cheap reduction instead of a mask.
        if value.is_floating_point() and not math.isfinite(value.sum().item()):
            bad = ~torch.isfinite(value.flatten(1) if value.ndim > 1 else value[:, None]).all(1)
            if bad.any():
                which = [int(row) for row in bad.nonzero().flatten()[:5]]
                raise NotFinite(f"{name}: {key} is not finite in {rows} {which} (NaN or infinity)")


class FiniteCheck:
    """`require_finite` for every step of training. On a GPU the answers stay there and are read
    once in `EVERY` steps, so that the host does not wait in each; NotFinite comes that much later.
    """

    EVERY = 256

    def __init__(self, name: str, rows: str = "envs") -> None:
        self.name = name
        self.rows = rows
        self.keys: list[str] = []
        self.bad: Tensor | None = None  # [keys], since the last reading
        self.steps = 0

    def add(self, reward: Tensor, obs: Tensors) -> None:
        if reward.device.type == "cpu":
            require_finite(reward, obs, self.name, self.rows)
            return
        found = {k: v for k, v in {"reward": reward, **obs}.items() if v.is_floating_point()}
        bad = ~torch.stack([value.sum().double() for value in found.values()]).isfinite()
        self.keys, self.bad = list(found), bad if self.bad is None else self.bad | bad
        self.steps += 1
        if self.steps == self.EVERY:
            self.read()

    def read(self) -> None:
        """Raise NotFinite if a step since the last reading was not finite."""
        bad: list[bool] = [] if self.bad is None else self.bad.tolist()  # pyright: ignore
        steps, self.bad, self.steps = self.steps, None, 0
        for key, wrong in zip(self.keys, bad, strict=False):
            if wrong:
                raise NotFinite(
                    f"{self.name}: {key} was not finite (NaN or infinity) in one of the last "
                    f"{steps} steps"
                )


# Optional abilities of environments, found with `core.wrapper.find_protocol`.


@runtime_checkable
class HasLevels(Protocol):
    """The task vector encodes a level (a maze, an obstacle course). Level teachers (PLR, PAIRED,
    domain randomisation, ...) need this; `levels` is a `teachers.teacher.LevelSpace`.
    """

    @property
    def levels(self) -> Any: ...


@runtime_checkable
class HasHeldOutTasks(Protocol):
    """`held_out` [N, D]: task vectors reserved for evaluation, never sampled in training."""

    @property
    def held_out(self) -> Tensor: ...


@runtime_checkable
class HasHeldOutNames(Protocol):
    """`held_out_names` [N]: what the tasks of `held_out` are called, in results of evaluations."""

    @property
    def held_out_names(self) -> Sequence[str]: ...


@runtime_checkable
class HasEventCaptions(Protocol):
    """Describes in text what happened in a step."""

    def event_captions(self, before: Tensors, after: Tensors) -> list[str]:
        """B captions of the step from observations `before` to `after`; "" for no event."""
        ...


@runtime_checkable
class HasSubgoals(Protocol):
    """Proposes and checks subgoals of its levels (MiniGrid)."""

    def subgoals(self) -> Any:
        """An `embodied.envs.minigrid.subgoals.Guide`: prompts, an oracle, a parser and a
        checker."""
        ...


@runtime_checkable
class HasAchievements(Protocol):
    """Names what can be achieved in it, and its actions, as `wood_pickaxe` (Crafter)."""

    def goal_names(self) -> tuple[str, ...]: ...

    def action_names(self) -> tuple[str, ...]: ...


@runtime_checkable
class HasScene(Protocol):
    """Simulated by MuJoCo: the 3D viewer, rendered cameras and image randomisation use this."""

    def scene(self, row: int) -> tuple[Any, Any]:
        """(MjModel, MjData) of env `row`, with its current state."""
        ...


@runtime_checkable
class HasFiniteModel(Protocol):
    """A finite MDP whose probabilities are known."""

    def finite_model(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities of the next state [S, A, S] (zeros where the episode ends), mean rewards
        [S, A], and probabilities of the first state [S]; float64."""
        ...

    def state_numbers(self, obs: Tensors) -> Tensor:
        """The states [n] (int64) of observations [n, ...]."""
        ...


@runtime_checkable
class HasNativeCode(Protocol):
    """Steps its parallel envs by native code that equals its PyTorch code to rounding."""

    def native_obstacle(self) -> str | None:
        """Why the PyTorch code is used; None if it is not."""
        ...


class GoalSpace(Protocol):
    """The goals of an environment, as functions of batches of observations [n, ...] on its device.
    The reward of a step, and whether its goal ends the episode there, depend on nothing but the
    goal and what the next observation has reached of it."""

    @property
    def leaves(self) -> tuple[str, ...]:
        """The observations that show the goal and what was reached of it; no other one depends on
        the goal. All functions take these only."""
        ...

    def reached(self, obs: Tensors) -> Tensors:
        """The goals [n, ...] that observations have reached."""
        ...

    def replaced(self, obs: Tensors, goals: Tensors) -> Tensors:
        """The observations as they would be with other `goals`, each of `reached`."""
        ...

    def outcome(self, next_obs: Tensors) -> tuple[Tensor, Tensor | None]:
        """Rewards [n] (float32) of steps to `next_obs`, and whether the goal terminates the episode
        there [n] (bool; None: the environment does not say)."""
        ...


@runtime_checkable
class HasGoals(Protocol):
    """Can be asked for the reward that a step would have had with another goal."""

    def goal_space(self) -> GoalSpace:
        """ConfigError says what is missing where there are no goals."""
        ...


@runtime_checkable
class HasModel(Protocol):
    """Its steps are the predictions of a model of another environment, the real one."""

    @property
    def real_spec(self) -> Spec:
        """The Spec of the real environment, as far as the model knows it."""
        ...

    def encoded(self, episodes: Any, where: str) -> Any:
        """Recorded `Episodes` of the real environment, read from `where`, as ones of this one."""
        ...

    def deployed(self, policy: Any) -> Any:
        """A `Policy` of this environment as one of the real environment's observations."""
        ...


@runtime_checkable
class HasSapienScene(Protocol):
    """Simulated by SAPIEN (ManiSkill)."""

    def sub_scene(self, row: int) -> Any:
        """The `sapien.Scene` of env `row`; ValueError if it lives in another process."""
        ...


class TaskParameter(Protocol):
    """One element of the task vector in its own unit."""

    @property
    def name(self) -> str: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def unit(self) -> str: ...


@runtime_checkable
class HasTaskParameters(Protocol):
    """Knows the native ranges and units of its task vector's elements."""

    @property
    def parameters(self) -> Sequence[TaskParameter]: ...


@runtime_checkable
class HasInstructions(Protocol):
    """Every parallel env has an instruction of its own (`Spec.text` is one for all)."""

    def instructions(self) -> list[str]:
        """The instruction of each env's running episode, B sentences."""
        ...


@runtime_checkable
class ExpectsGivenTasks(Protocol):
    """Draws a task at the end of each episode, which costs time, and can leave that out."""

    def expect_given_tasks(self) -> None:
        """From now on `reset(task=...)` follows each end of an episode; until then, the `obs` of
        the ended envs are those of `next_obs`."""


@runtime_checkable
class CanPause(Protocol):
    """Saves the time of steps of parallel envs from which nothing more is wanted."""

    def pause(self, rows: Tensor) -> None:
        """Leave the envs `rows` [B] (bool) where they are, from now on: their part of a step means
        nothing. The others go on as they would."""


@runtime_checkable
class HasUnsharedState(Protocol):
    """May have parts whose state is neither saved nor shared with the evaluation's environment."""

    def unshared_state(self) -> str:
        """One line that names them; empty where there are none."""
        ...


@runtime_checkable
class HasCurrentTask(Protocol):
    """`task` [B, D]: the task vectors of the running episodes."""

    @property
    def task(self) -> Tensor: ...
