"""GymnasiumProcess: a Gymnasium environment that needs other package versions than this project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from embodied.core.bounds import Count, Positive
from embodied.envs.process.env import ProcessEnv, install, interpreter


@dataclass(frozen=True)
class Config:
    """Settings of a Gymnasium environment in another interpreter."""

    id: str  # for `gymnasium.make`
    num_envs: Count = 1  # parallel environments
    apart: str = ""  # virtual environment .venv-<apart> that has it (`scripts/apart.sh`)
    python: str = ""  # another interpreter that has it (both empty: this one)
    module: str = ""  # imported there first, to register ids
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # for `gymnasium.make`
    horizon: Count | None = None  # replaces the environment's time limit (steps)
    dt: Positive | None = None  # replaces its control period (s)
    timeout: Positive = 120.0  # longest wait for an answer, s
    text: str = ""  # task instruction as a sentence


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
