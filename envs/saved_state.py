"""Saves and restores the exact state of one Gymnasium environment (MuJoCo, classic control).

MuJoCo's integration state alone is not enough for an exact continuation: the next reward may depend
on positions that lag the state by one substep (Ant's forward reward), so those are saved too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Env, Wrapper
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

from embodied.core.env import NotSavable
from embodied.envs.row_rng import pack, unpack

Arrays = dict[str, NDArray[Any]]
STATELESS = (OrderEnforcing, PassiveEnvChecker)
DERIVED = (
    *(
        "xpos",
        "xquat",
        "xmat",
        "xipos",
        "ximat",
        "geom_xpos",
        "geom_xmat",
        "site_xpos",
        "site_xmat",
    ),
    *("subtree_com", "cinert", "cvel", "cdof", "ten_length", "ten_velocity", "actuator_length"),
    *(
        "actuator_velocity",
        "actuator_force",
        "qfrc_actuator",
        "qfrc_constraint",
        "qacc",
        "qfrc_bias",
    ),
    *("cacc", "cfrc_int", "cfrc_ext", "sensordata"),
)


def read(env: Env, name: str) -> Arrays:
    """The complete state of `env`; NotSavable if its kind is unknown."""
    world = env.unwrapped
    clock = _clock(env, name)
    physics = _read_mujoco(world) if _kind(world, name) == "mujoco" else _read_classic(world)
    return {
        **physics,
        "generator": pack(world.np_random),
        "elapsed": np.array(0 if clock is None else clock._elapsed_steps or 0),
    }


def write(env: Env, row: Arrays, name: str) -> None:
    """Restore a state from `read` into `env`, which must have been reset once."""
    world: Any = env.unwrapped
    clock = _clock(env, name)
    if _kind(world, name) == "mujoco":
        _write_mujoco(world, row)
    else:
        world.state = row["state"].astype(np.float32 if row["single"] else np.float64)
    unpack(world.np_random, row["generator"])
    if clock is not None:
        clock._elapsed_steps = int(row["elapsed"])


def _kind(world: Any, name: str) -> str:
    parents = [cls.__module__ for cls in type(world).__mro__]
    for kind in ("mujoco", "classic_control"):
        if parents[0].startswith(f"gymnasium.envs.{kind}."):
            return kind
    raise NotSavable(
        f"{name} cannot save its state: only Gymnasium's own MuJoCo and classic-control "
        "environments can; episodes in flight restart on resume"
    )


def _clock(env: Env, name: str) -> TimeLimit | None:
    """The time limit of `env`; NotSavable when another wrapper may hold state of its own."""
    clock = None
    while isinstance(env, Wrapper):
        if isinstance(env, TimeLimit):
            clock = env
        elif not isinstance(env, STATELESS):
            raise NotSavable(
                f"{name} cannot save its state: wrapper {type(env).__name__} is unknown"
            )
        env = env.env
    return clock


def _read_mujoco(world: Any) -> Arrays:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION.value
    physics = np.empty(mujoco.mj_stateSize(world.model, kind))
    mujoco.mj_getState(world.model, world.data, physics, kind)
    return {"physics": physics, **{key: getattr(world.data, key).copy() for key in DERIVED}}


def _write_mujoco(world: Any, row: Arrays) -> None:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION.value
    mujoco.mj_setState(world.model, world.data, row["physics"], kind)
    # A forward pass fills the other fields (contacts); it changes the warm start, so set that last.
    mujoco.mj_forward(world.model, world.data)
    mujoco.mj_setState(world.model, world.data, row["physics"], kind)
    for key in DERIVED:
        getattr(world.data, key)[:] = row[key]


def _read_classic(world: Any) -> Arrays:
    state = np.asarray(world.state)
    # float32 arithmetic and float64 arithmetic part after one step: the precision is state, too.
    return {"state": state.astype(np.float64), "single": np.array(state.dtype == np.float32)}
