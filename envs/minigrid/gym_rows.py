"""Gymnasium backend of MiniGrid: any id, any MiniGrid wrapper, exact state.

A plain loop over single environments. Their saved state is grid, boxes, agent and generator.
Environment classes have additional attributes (target position, the door to open); those that
MiniGrid's classes use at runtime are listed here by name. Objects are saved by position, because
MiniGrid compares them by identity.

The view is byte-identical to `MiniGridEnv.gen_obs`, which copies, rotates and encodes a grid of
Python objects for each observation: that takes most of the time of a step. Here the cells of the
view are selected by one precomputed index table per direction, made with MiniGrid's own functions.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import minigrid  # noqa: F401, registers MiniGrid's and BabyAI's ids
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker
from minigrid import wrappers
from minigrid.core.constants import COLOR_TO_IDX, IDX_TO_OBJECT, OBJECT_TO_IDX
from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Ball, Box, Floor, Goal, Key, Lava, Wall, WorldObj
from minigrid.minigrid_env import MiniGridEnv
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.env import NotSavable, StateRoles
from embodied.core.native import NativeLeaf
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.envs.gym import Gym
from embodied.envs.minigrid.describe import described
from embodied.envs.minigrid.settings import (
    DIRECTION,
    Config,
    cells_leaf,
    mission_leaf,
    privileged,
    tokens,
    whole_leaves,
)
from embodied.envs.row_rng import pack, unpack
from embodied.envs.spaces import entries, one_line, require_known_id

# These leave the picture in MiniGrid's symbols; what others make of it is taken as it comes.
SYMBOLIC = {
    *("FullyObsWrapper", "ViewSizeWrapper", "ImgObsWrapper", "ReseedWrapper", "ActionBonus"),
    *("PositionBonus", "StochasticActionWrapper", "DirectionObsWrapper", "NoDeath"),
}
STATELESS = {
    *("FullyObsWrapper", "ViewSizeWrapper", "ImgObsWrapper", "RGBImgObsWrapper", "NoDeath"),
    *("RGBImgPartialObsWrapper", "OneHotPartialObsWrapper", "SymbolicObsWrapper"),
    *("FlatObsWrapper", "DictObservationSpaceWrapper"),
}


class Tap(gymnasium.Wrapper):
    """Records whether the environment itself gave a reward, below wrappers that change rewards."""

    paid = False

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self.paid = float(result[1]) > 0
        return result


def make(config: Config) -> gymnasium.Env:
    """Make one environment with its wrappers; configuration errors are a one-line ValueError."""
    require_known_id(config.id, config.kwargs)
    options: dict[str, Any] = {"disable_env_checker": True, **config.kwargs}
    if config.horizon is not None:
        options["max_steps"] = config.horizon
    try:
        env = gymnasium.make(config.id, **options)
    except gymnasium.error.Error as error:
        raise ValueError(
            f"cannot find the MiniGrid environment {config.id!r}: {one_line(error)}"
        ) from error
    except TypeError as error:
        given = dict(config.kwargs)
        raise ValueError(
            f"{config.id} does not accept kwargs {given}: {one_line(error)}"
        ) from error
    world = env.unwrapped
    if not isinstance(world, MiniGridEnv):
        raise ValueError(
            f"{config.id} is not a MiniGrid environment; use the adapter embodied.envs.gym.Gym"
        )
    while isinstance(env, OrderEnforcing | PassiveEnvChecker):
        env = env.env
    attach(world)
    env = Tap(env)
    for wrapper in config.wrappers:
        env = _wrapped(env, wrapper)
    return env


def _wrapped(env: gymnasium.Env, wrapper: str | Mapping[str, Any]) -> gymnasium.Env:
    named = {wrapper: {}} if isinstance(wrapper, str) else wrapper
    for name, settings in named.items():
        known = [
            word
            for word, part in vars(wrappers).items()
            if isinstance(part, type)
            and issubclass(part, gymnasium.Wrapper)
            and part.__module__ == wrappers.__name__
        ]
        if name not in known:
            raise ValueError(f"MiniGrid has no wrapper {name!r}; it has {', '.join(sorted(known))}")
        try:
            env = getattr(wrappers, name)(env, **settings)
        except TypeError as error:
            raise ValueError(
                f"{name} does not accept {dict(settings)}: {one_line(error)}"
            ) from error
    return env


def named_entries(space: spaces.Space, config: Config) -> tuple[NativeLeaf, ...]:
    """Leaves of the wrapped observation; MiniGrid's own picture and compass are symbols."""
    names = {n for w in config.wrappers for n in ([w] if isinstance(w, str) else w)}
    symbolic = names <= SYMBOLIC
    if isinstance(space, spaces.Dict):
        space = spaces.Dict({k: v for k, v in space.items() if not isinstance(v, MissionSpace)})
    found = []
    for entry in entries(space, "image" if len(space.shape or ()) == 3 else "state", config.id):
        if symbolic and entry.path in ((), ("image",)):
            entry = NativeLeaf("cells", entry.path, entry.shape, cells_leaf(entry.shape), "uint8")
        elif entry.path == ("direction",):
            entry = NativeLeaf("direction", entry.path, (), DIRECTION, "int64")
        found.append(entry)
    return tuple(found)


def parts(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def require_stateless(env: gymnasium.Env, name: str) -> None:
    """NotSavable when a wrapper of `env` may hold state of its own."""
    for part in parts(env):
        kind = type(part).__name__
        if isinstance(part, gymnasium.Wrapper) and kind not in {*STATELESS, "Tap"}:
            raise NotSavable(f"{name} cannot save its state: {kind} may hold state of its own")


Arrays = dict[str, NDArray[Any]]
NOTHING = (OBJECT_TO_IDX["empty"], 0, 0)
POINTS = ("target_pos", "success_pos", "failure_pos", "move_pos", "goal_pos")
THINGS = ("obj", "door", "red_door", "blue_door")
LISTS = ("obstacles",)
TEXTS = ("target_color", "target_type", "targetColor", "targetType", "move_type", "moveColor")
LETTERS = {"mission": 256, **dict.fromkeys(TEXTS, 16)}
KNOWN = ("minigrid.envs.", "embodied.envs.minigrid.levels")


def read(world: MiniGridEnv, name: str) -> Arrays:
    """The complete state of `world`; NotSavable if its class is unknown."""
    require_savable(world, name)
    places = {id(thing): place for place, thing in enumerate(world.grid.grid) if thing is not None}
    if world.carrying is not None:
        places[id(world.carrying)] = len(world.grid.grid)
    marks: Arrays = {}
    for key in (key for key in POINTS if _has(world, key)):
        marks[key] = np.array(getattr(world, key), np.int64)
    for key in (key for key in THINGS if _has(world, key)):
        marks[key] = np.array(places.get(id(getattr(world, key)), -1))
    for key in (key for key in LISTS if _has(world, key)):
        marks[key] = np.array([places.get(id(thing), -1) for thing in getattr(world, key)])
    for key in (key for key in LETTERS if _has(world, key)):
        # A text as [count] bytes, zeros after its end.
        text = getattr(world, key)
        count = LETTERS[key]
        letters = text.encode()
        if len(letters) > count:
            raise NotSavable(f"{text!r} is longer than {count} characters")
        marks[key] = np.frombuffer(letters.ljust(count, b"\0"), np.uint8).copy()
    return {**symbols(world), **marks, "generator": pack(world.np_random)}


def write(world: MiniGridEnv, row: Arrays, name: str) -> None:
    """Restore a state from `read` into `world`, which must have been reset once."""
    require_savable(world, name)
    things = load(world, row)
    for key in row:
        if key in POINTS:
            setattr(world, key, tuple(int(number) for number in row[key]))
        elif key in THINGS:
            setattr(world, key, things[int(row[key])])
        elif key in LISTS:
            setattr(world, key, [things[int(place)] for place in row[key]])
        elif key in LETTERS:
            setattr(world, key, row[key].tobytes().rstrip(b"\0").decode())
    unpack(world.np_random, row["generator"])


def symbols(world: MiniGridEnv) -> Arrays:
    """What every MiniGrid world has: `grid` and `inside` [W, H, 3] (kind, colour, state of each
    cell and of what its box holds), `agent` (x, y, turn), `hand` [2, 3] (what it carries, and what
    is in that), `clock` (steps taken, steps allowed)."""
    grid = world.grid
    codes = np.array([_code(thing) for thing in grid.grid], np.uint8)
    inside = np.array([_code(getattr(thing, "contains", None)) for thing in grid.grid], np.uint8)
    shape = (grid.height, grid.width, 3)
    hand = world.carrying or None
    held = None if hand is None else hand.contains
    x, y = world.agent_pos
    return {
        "grid": codes.reshape(shape).transpose(1, 0, 2),
        "inside": inside.reshape(shape).transpose(1, 0, 2),
        "agent": np.array([x, y, world.agent_dir], np.int64),
        "hand": np.array([_code(hand), _code(held)], np.uint8),
        "clock": np.array([world.step_count, world.max_steps], np.int64),
    }


def load(world: MiniGridEnv, row: Arrays) -> list[WorldObj | None]:
    """Put what `symbols` says into `world`; returns its objects: the cells, the hand, and None."""
    grid = row["grid"].transpose(1, 0, 2)
    inside = row["inside"].transpose(1, 0, 2)
    height, width, _ = grid.shape
    world.grid = Grid(width, height)
    world.grid.grid = [
        _thing(code, held)
        for code, held in zip(
            grid.reshape(-1, 3).tolist(), inside.reshape(-1, 3).tolist(), strict=True
        )
    ]
    for place, thing in enumerate(world.grid.grid):
        if thing is not None:
            thing.cur_pos = thing.init_pos = (place % width, place // width)
    hand, held = row["hand"].tolist()
    world.carrying = _thing(hand, held)
    if world.carrying is not None:
        world.carrying.cur_pos = np.array([-1, -1])  # pyright: ignore[reportAttributeAccessIssue]
    x, y, turn = (int(number) for number in row["agent"])
    world.agent_pos = (x, y)
    world.agent_dir = turn
    world.step_count, world.max_steps = (int(number) for number in row["clock"])
    return [*world.grid.grid, world.carrying, None]


def require_savable(world: MiniGridEnv, name: str) -> None:
    """NotSavable unless all runtime attributes of the environment's class are listed here."""
    own = type(world).__module__
    if not own.startswith(KNOWN) or own.startswith("minigrid.envs.babyai"):
        raise NotSavable(
            f"{name} cannot save its state: only MiniGrid's own environments (not BabyAI's) and "
            "embodied.envs.minigrid.levels can; episodes in flight restart on resume"
        )


def _has(world: MiniGridEnv, key: str) -> bool:
    return getattr(world, key, None) is not None


def _code(thing: WorldObj | None) -> tuple[int, int, int]:
    return NOTHING if thing is None else thing.encode()


def _thing(code: list[int], held: list[int]) -> WorldObj | None:
    """An object; WorldObj.decode forgets a goal's colour and a box's contents."""
    thing = WorldObj.decode(*code)
    if thing is None:
        return None
    thing.color = next(word for word, place in COLOR_TO_IDX.items() if place == code[1])
    if isinstance(thing, Box) and IDX_TO_OBJECT[held[0]] not in ("unseen", "empty"):
        thing.contains = _thing(held, list(NOTHING))
    return thing


STILL = (Ball, Box, Floor, Goal, Key, Lava, Wall)  # what they look like never changes
EMPTY = bytes((1, 0, 0))
UNSEEN = bytes(3)


class View:
    """Replaces `world.gen_obs` for classes that use MiniGrid's own; see `attach`."""

    def __init__(self, world: MiniGridEnv) -> None:
        self.world = world
        self.size = world.agent_view_size
        self.tables = [_places(self.size, turn) for turn in range(4)]
        self.codes: dict[tuple[type, str], bytes] = {}
        self.beyond = Wall()

    def __call__(self) -> dict[str, Any]:
        """An observation as `MiniGridEnv.gen_obs` returns it."""
        world = self.world
        return {"image": self.look(), "direction": world.agent_dir, "mission": world.mission}

    def look(self) -> NDArray[np.uint8]:
        """The view [size, size, 3]: kind, colour and state of each cell, across and then along."""
        world = self.world
        size = self.size
        # The objects in view, column by column.
        grid = self.world.grid
        things = grid.grid
        width = grid.width
        height = grid.height
        x0 = int(self.world.agent_pos[0])
        y0 = int(self.world.agent_pos[1])
        cells = [
            things[y * width + x]
            if 0 <= (x := x0 + across) < width and 0 <= (y := y0 + down) < height
            else self.beyond
            for across, down in self.tables[self.world.agent_dir]
        ]
        mask = [True] * (size * size) if world.see_through_walls else seen(cells, size)
        cells[size // 2 * size + size - 1] = world.carrying or None
        parts = [
            self._code(cell) if shown else UNSEEN for cell, shown in zip(cells, mask, strict=True)
        ]
        return np.array(np.frombuffer(b"".join(parts), np.uint8).reshape(size, size, 3))

    def _code(self, cell: Any) -> bytes:
        if cell is None:
            return EMPTY
        kind = type(cell)
        if kind not in STILL:
            return bytes(cell.encode())
        code = self.codes.get((kind, cell.color))
        if code is None:
            code = self.codes[kind, cell.color] = bytes(cell.encode())
        return code


def attach(world: MiniGridEnv) -> None:
    """Replace the view of `world` by a View, unless its class overrides `gen_obs`."""
    own = type(world).gen_obs is not MiniGridEnv.gen_obs
    if not own and type(world).gen_obs_grid is MiniGridEnv.gen_obs_grid:
        world.gen_obs = View(world)  # pyright: ignore[reportAttributeAccessIssue]


def seen(cells: list[Any], size: int) -> list[bool]:
    """The lit cells [size * size] (bool), from the agent's own (middle column, last row) outwards.

    Row by row away from the agent, light runs right and then left, through whatever can be seen
    behind, and from there to the three cells ahead; the edge that it runs to passes none on.
    """
    mask = [False] * (size * size)
    mask[size // 2 * size + size - 1] = True
    order = [(i, 1) for i in range(size - 1)] + [(i, -1) for i in range(size - 1, 0, -1)]
    for j in range(size - 1, -1, -1):
        for i, way in order:
            place = i * size + j
            if not mask[place]:
                continue
            cell = cells[place]
            if cell is not None and not cell.see_behind():
                continue
            beside = place + way * size
            mask[beside] = True
            if j:
                mask[beside - 1] = True
                mask[place - 1] = True
    return mask


def _places(size: int, turn: int) -> list[tuple[int, int]]:
    """(x, y) from the agent of each cell of the view [size * size] when it looks `turn`."""
    half = size // 2
    corner = [(0, -half), (-half, 0), (1 - size, -half), (-half, 1 - size)][turn]
    grid = Grid(max(size, 3), max(size, 3))
    grid.grid = [(corner[0] + i, corner[1] + j) for j in range(size) for i in range(size)]  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(turn + 1):
        grid = grid.rotate_left()
    return [grid.get(i, j) for i in range(size) for j in range(size)]  # pyright: ignore[reportReturnType]


class Rows(Gym):
    """Separate environments; env i is seeded with (seed, i)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)  # pyright: ignore[reportArgumentType]
        self.config = config  # pyright: ignore[reportAttributeAccessIssue]
        self.worlds: list[MiniGridEnv] = [env.unwrapped for env in self.envs]  # pyright: ignore[reportAttributeAccessIssue]
        self.taps = [next(part for part in parts(env) if type(part) is Tap) for env in self.envs]
        world = self.worlds[0]
        obs = {entry.name: entry.leaf for entry in self._entries}
        if config.words:
            obs["mission"] = mission_leaf(config)
        if config.privileged:
            obs |= whole_leaves(world.width, world.height)
        names: tuple[str, ...] = getattr(world, "task_names", ())
        task = Leaf((len(names),), low=0.0, high=1.0, names=names) if names else None
        self.spec = Spec(obs, self.spec.act, config.dt, task, config.text, self.spec.native)
        self._noisy = hasattr(world, "instrs") or config.id.startswith("BabyAI")
        self._dtypes_checked = True  # MiniGrid's own types are known

    def make_one(self) -> gymnasium.Env:
        return make(self.config)

    def named_entries(self, space: spaces.Space) -> tuple[NativeLeaf, ...]:
        return named_entries(space, self.config)

    def added(self, rows: np.ndarray) -> Tensors:
        obs: Tensors = {}
        count = self.config.words
        if count:
            words = [tokens(self.worlds[row].mission, count) for row in rows]
            obs["mission"] = torch.from_numpy(np.stack(words))
        if self.config.privileged:
            obs |= privileged([symbols(self.worlds[row]) for row in rows])
        return obs

    def succeeded(self, row: int, terminated: bool, info: Any) -> bool:
        return terminated and self.taps[row].paid

    def begin_one(self, row: int, seed: int | None, task: Tensor | None) -> tuple[Any, Any]:
        options = {} if task is None else {"options": {"task": task[row].numpy()}}
        # BabyAI prints each rejected level.
        quiet = contextlib.redirect_stdout(io.StringIO())
        try:
            with quiet if self._noisy else contextlib.nullcontext():
                return self.envs[row].reset(seed=seed, **options)
        except FileNotFoundError as error:
            raise ValueError(
                f"the installed MiniGrid package lacks files of {self.config.id}: "
                f"{error.filename or one_line(error)}; try backend=envpool"
            ) from error

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        first = self.config.seed if seed is None and not self._now else seed
        return super().reset(first, task, mask)

    def whole(self) -> Tensors:
        """The whole level of every env: `grid`, `agent`."""
        return under(privileged([symbols(world) for world in self.worlds]), "privileged")

    def missions(self) -> list[str]:
        return [world.mission for world in self.worlds]

    @property
    def limit(self) -> int:
        """Steps of an episode at most; 0 where that depends on the mission."""
        return 0 if self._noisy else int(self.worlds[0].max_steps)

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"clock": (0,)}, {"generator": None})

    def read_one(self, row: int) -> dict[str, NDArray[Any]]:
        require_stateless(self.envs[0], self.config.id)
        return read(self.worlds[row], self.config.id)

    def write_one(self, row: int, state: dict[str, NDArray[Any]]) -> None:
        require_stateless(self.envs[0], self.config.id)
        write(self.worlds[row], state, self.config.id)

    def picture(self, row: int, tile: int) -> np.ndarray:
        """The level with `tile` pixels a cell, the view lit."""
        return self.worlds[row].get_frame(highlight=True, tile_size=tile)

    def describe(self, row: int = 0) -> str:
        world = self.worlds[row]
        return described(View(world).look(), int(world.agent_dir), world.mission)
