"""Makes a MiniGrid environment with its wrappers and names its observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import minigrid  # registers MiniGrid's and BabyAI's ids
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker
from minigrid import wrappers
from minigrid.core.mission import MissionSpace
from minigrid.minigrid_env import MiniGridEnv

from embodied.core.env import NotSavable
from embodied.envs.gym_errors import require_known_id
from embodied.envs.minigrid.settings import DIRECTION, Config, cells_leaf
from embodied.envs.minigrid.view import attach
from embodied.envs.spaces import Entry, entries

__all__ = ["Tap", "line", "make", "minigrid", "named_entries", "parts", "require_stateless"]

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
            f"cannot find the MiniGrid environment {config.id!r}: {line(error)}"
        ) from error
    except TypeError as error:
        given = dict(config.kwargs)
        raise ValueError(f"{config.id} does not accept kwargs {given}: {line(error)}") from error
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
        known = [word for word, part in vars(wrappers).items() if _is_wrapper(part)]
        if name not in known:
            raise ValueError(f"MiniGrid has no wrapper {name!r}; it has {', '.join(sorted(known))}")
        try:
            env = getattr(wrappers, name)(env, **settings)
        except TypeError as error:
            raise ValueError(f"{name} does not accept {dict(settings)}: {line(error)}") from error
    return env


def _is_wrapper(part: Any) -> bool:
    return (
        isinstance(part, type)
        and issubclass(part, gymnasium.Wrapper)
        and part.__module__ == wrappers.__name__
    )


def named_entries(space: spaces.Space, config: Config) -> tuple[Entry, ...]:
    """Leaves of the wrapped observation; MiniGrid's own picture and compass are symbols."""
    names = {n for w in config.wrappers for n in ([w] if isinstance(w, str) else w)}
    symbolic = names <= SYMBOLIC
    if isinstance(space, spaces.Dict):
        kept = {k: v for k, v in space.items() if not isinstance(v, MissionSpace)}
        space = spaces.Dict(kept)
    found = []
    name = "image" if len(space.shape or ()) == 3 else "state"
    for entry in entries(space, name, config.id):
        if symbolic and entry.path in ((), ("image",)):
            entry = Entry("cells", entry.path, cells_leaf(entry.leaf.shape))
        elif entry.path == ("direction",):
            entry = Entry("direction", entry.path, DIRECTION)
        found.append(entry)
    return tuple(found)


def parts(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def line(error: Exception) -> str:
    return " ".join(str(error).split())


def require_stateless(env: gymnasium.Env, name: str) -> None:
    """NotSavable when a wrapper of `env` may hold state of its own."""
    for part in parts(env):
        kind = type(part).__name__
        if isinstance(part, gymnasium.Wrapper) and kind not in {*STATELESS, "Tap"}:
            raise NotSavable(f"{name} cannot save its state: {kind} may hold state of its own")
