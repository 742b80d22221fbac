"""GymnasiumProcess: a Gymnasium environment that needs other package versions than this project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from embodied.envs.process.env import ProcessEnv
from embodied.envs.process.interpreter import install, interpreter


@dataclass(frozen=True)
class Config:
    """`apart`: the virtual environment that has it, .venv-<apart> (`scripts/apart.sh`); `python`:
    another interpreter that has it (both empty: this one); `module` is imported there first (a
    package that registers ids); `id` and `kwargs` are for `gymnasium.make`; `horizon` replaces the
    environment's time limit (steps), `dt` its control period (s); `timeout` is how long an answer
    may take, s.
    """

    id: str
    num_envs: int = 1
    apart: str = ""
    python: str = ""
    module: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    horizon: int | None = None
    dt: float | None = None
    timeout: float = 120.0
    text: str = ""


class GymnasiumProcess(ProcessEnv):
    """Box, Discrete and Dict observations; bounded Box or Discrete actions."""

    def __init__(self, config: Config) -> None:
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
