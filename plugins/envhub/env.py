"""One of embodied's environments for LeRobot's EnvHub: copy it, change ENV, SETTINGS and TASK.

LeRobot's commands load `env.py` from a repository of the hub, or from a path, and call `make_env`.
`embodied` has to be installed beside LeRobot. Other names: `embodied list envs`.
"""

from functools import partial
from typing import Any

import embodied as em
from embodied.envs.adapters.lerobot_env import vector_env

ENV = "two_gap"
SETTINGS: dict[str, Any] = {}
TASK = "go through a gap"
EPISODE_STEPS = 100


def make_env(n_envs: int = 1, use_async_envs: bool = False, cfg: Any = None) -> Any:
    """A gymnasium.vector.VectorEnv."""
    one = partial(em.make_env, ENV, num_envs=1, **SETTINGS)
    return vector_env(one, n_envs, use_async_envs, TASK, EPISODE_STEPS)
