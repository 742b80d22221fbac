"""Tasks of the FR3 environment, one module per task."""

from embodied.envs.fr3.tasks.goal import Channel, Course, Reach
from embodied.envs.fr3.tasks.insert import Insert
from embodied.envs.fr3.tasks.lift import Detour, Lift
from embodied.envs.fr3.tasks.push import Push
from embodied.envs.fr3.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    "channel": Channel,
    "course": Course,
    "detour": Detour,
    "insert": Insert,
    "lift": Lift,
    "push": Push,
    "reach": Reach,
}
