"""GymnasiumProcess: a Gymnasium environment that needs other package versions than this project."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.process.env import ProcessEnv


@dataclass(frozen=True)
class Config:
    """`python`: the interpreter that has the environment (empty: this one); `module` is imported
    there first (a package that registers ids); `id` and `kwargs` are for `gymnasium.make`;
    `horizon` replaces the environment's time limit (steps); `timeout` is how long an answer may
    take, s.
    """

    id: str
    num_envs: int = 1
    python: str = ""
    module: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    horizon: int | None = None
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
            python=config.python or sys.executable,
            timeout=config.timeout,
            name=config.id,
            install="env.python=PATH names the interpreter that has it",
            text=config.text,
        )
