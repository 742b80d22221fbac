"""Tasks of the FR3, one file each."""

from envs.tasks.lift import Lift
from envs.tasks.task import Task

TASKS: dict[str, type[Task]] = {"lift": Lift}
