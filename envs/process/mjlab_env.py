"""Mjlab: the tasks of mjlab (locomotion, manipulation on MuJoCo Warp) in a process of their own.

Source: mjlab (Zakka et al., 2025). It pins another MuJoCo than this project, so it lives in a
virtual environment of its own: `sh scripts/apart.sh mjlab`.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied.core.bounds import Count, Positive
from embodied.envs.process.env import ProcessEnv, install, interpreter

APART = "mjlab"


@dataclass(frozen=True)
class Config:
    """Settings of an mjlab task."""

    task: str  # an id of mjlab
    num_envs: Count = 16  # parallel environments
    python: str = ""  # interpreter that has it (empty: EMBODIED_MJLAB_PYTHON, .venv-mjlab)
    device: str = "auto"  # of the simulation: auto, cpu or cuda:N
    action_scale: Positive = 1.0  # mjlab's action for an action of 1 here
    play: bool = False  # its settings for playing (no noise)
    motion: str = ""  # motion file of a tracking task
    horizon: Count | None = None  # replaces the time limit (steps)
    timeout: Positive = 900.0  # longest wait, s (kernels are compiled at the first start)


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
