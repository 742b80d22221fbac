"""Robosuite: tasks of robosuite (Zhu et al., 2020) in a process of their own.

It needs another numpy than this project: `sh scripts/apart.sh robosuite`.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied.core.bounds import Count, Positive
from embodied.envs.process.env import ProcessEnv, install, interpreter

APART = "robosuite"


@dataclass(frozen=True)
class Config:
    """Settings of a robosuite task."""

    task: str  # Lift, PickPlaceCan, NutAssemblySquare, ...
    num_envs: Count = 1  # parallel environments
    robot: str = "Panda"  # robosuite's name of the arm
    shaped: bool = False  # dense reward
    horizon: Count = 400  # time limit (steps of 50 ms)
    python: str = ""  # interpreter that has it (empty: EMBODIED_ROBOSUITE_PYTHON, .venv-robosuite)
    timeout: Positive = 120.0  # longest wait for an answer, s
    text: str = ""  # task instruction as a sentence


class Robosuite(ProcessEnv):
    """The task's state in robomimic's names; actions: a change of the tool's pose (5 cm, 0.5 rad)
    and the gripper. A success terminates an episode.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(
            "robosuite_rows",
            {name: getattr(config, name) for name in ("task", "robot", "shaped", "horizon")},
            num_envs=config.num_envs,
            python=interpreter(APART, config.python),
            timeout=config.timeout,
            name=f"robosuite {config.task}",
            install=install(APART),
            text=config.text,
        )
