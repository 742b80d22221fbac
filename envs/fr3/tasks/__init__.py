"""Tasks of the FR3 environment, one module per task."""

from envs.fr3.tasks.channel import Channel
from envs.fr3.tasks.course import Course
from envs.fr3.tasks.detour import Detour
from envs.fr3.tasks.insert import Insert
from envs.fr3.tasks.lift import Lift
from envs.fr3.tasks.push import Push
from envs.fr3.tasks.reach import Reach
from envs.fr3.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    "channel": Channel,
    "course": Course,
    "detour": Detour,
    "insert": Insert,
    "lift": Lift,
    "push": Push,
    "reach": Reach,
}
