"""Tasks of the FR3 environment by name."""

from embodied.envs.fr3.tasks.clutter import Clutter
from embodied.envs.fr3.tasks.goal import Channel, Course, Reach
from embodied.envs.fr3.tasks.objects import Detour, Insert, Lift, Push, Slalom
from embodied.envs.fr3.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    "channel": Channel,
    "clutter": Clutter,
    "course": Course,
    "detour": Detour,
    "insert": Insert,
    "lift": Lift,
    "push": Push,
    "reach": Reach,
    "slalom": Slalom,
}
