"""Tasks of the FR3, one file each."""

from envs.tasks.course import Course
from envs.tasks.insert import Insert
from envs.tasks.lift import Lift
from envs.tasks.push import Push
from envs.tasks.reach import Reach
from envs.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    "course": Course,
    "insert": Insert,
    "lift": Lift,
    "push": Push,
    "reach": Reach,
}
