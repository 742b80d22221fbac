"""Robosuite: tasks of robosuite (Zhu et al., 2020) in a process of their own.

It needs another numpy than this project: `sh scripts/apart.sh robosuite`.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied.envs.process.env import ProcessEnv
from embodied.envs.process.interpreter import install, interpreter

APART = "robosuite"


@dataclass(frozen=True)
class Config:
    """`task`: a name of robosuite (Lift, PickPlaceCan, NutAssemblySquare, ...); `robot`: its arm;
    `shaped`: its dense reward; `horizon`: time limit (steps of 50 ms); `python`: the interpreter
    that has it (empty: the variable EMBODIED_ROBOSUITE_PYTHON, else .venv-robosuite); `timeout`:
    how long an answer may take, s.
    """

    task: str
    num_envs: int = 1
    robot: str = "Panda"
    shaped: bool = False
    horizon: int = 400
    python: str = ""
    timeout: float = 120.0
    text: str = ""


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
