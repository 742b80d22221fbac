"""Mjlab: the tasks of mjlab (locomotion, manipulation on MuJoCo Warp) in a process of their own.

Source: mjlab (Zakka et al., 2025). It pins another MuJoCo than this project, so it lives in a
virtual environment of its own: `sh scripts/apart.sh mjlab`.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied.envs.process.env import ProcessEnv
from embodied.envs.process.interpreter import install, interpreter

APART = "mjlab"


@dataclass(frozen=True)
class Config:
    """`task`: an id of mjlab; `python`: the interpreter that has mjlab (empty: the variable
    EMBODIED_MJLAB_PYTHON, else .venv-mjlab); `device`: auto, cpu or cuda:N, of the simulation;
    `action_scale`: mjlab's action for an action of 1 here; `play`: its settings for playing (no
    noise); `motion`: the motion file of a tracking task; `horizon` replaces the time limit (steps);
    `timeout`: how long an answer may take, s (kernels are compiled at the first start).
    """

    task: str
    num_envs: int = 16
    python: str = ""
    device: str = "auto"
    action_scale: float = 1.0
    play: bool = False
    motion: str = ""
    horizon: int | None = None
    timeout: float = 900.0


class Mjlab(ProcessEnv):
    """Observations: mjlab's group `actor` as `state`, `critic` as `critic/state`, others by name.

    mjlab has one random generator for all rows: episodes depend on the seed, and on the other rows.
    Its state cannot be saved (NotSavable).
    """

    def __init__(self, config: Config) -> None:
        names = ("task", "device", "action_scale", "play", "motion", "horizon")
        super().__init__(
            "mjlab_rows",
            {name: getattr(config, name) for name in names},
            num_envs=config.num_envs,
            python=interpreter(APART, config.python),
            timeout=config.timeout,
            name=f"mjlab {config.task}",
            install=install(APART),
            text=config.task,
        )
