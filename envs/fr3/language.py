"""LanguageTasks: an FR3 with ten tasks in one scene, told apart by a sentence (after LIBERO).

Every episode begins in a scene of the same distribution, whatever the task is: a policy that does
not read its instruction cannot know what to do. Success of the instruction terminates the episode
with reward 1; everything else gives 0. Sentences are word numbers of one vocabulary too; 0 is "no
word".

Blocks, bowl, plate and can stand before a cabinet with a drawer, at the far left, and a button, at
the far right; both stand where their mocap bodies are put, drawer and button cap slide on joints of
their own. The plate is in one of two rows, with room on its left; blocks, bowl and can take the
five other places in any order. Lengths are in metres.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero, Ranges
from embodied.core.build import ConfigError, nearest
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.text import encode, text_leaf
from embodied.envs.fr3 import env as fr3_env
from embodied.envs.fr3.base import TaskInstance
from embodied.envs.fr3.env import Fr3
from embodied.envs.fr3.tasks.task import (
    Flags,
    Floats,
    Parameter,
    Params,
    Rgba,
    Start,
    Task,
    Term,
    View,
    add_box,
    add_free,
    add_solid,
    centimetres,
    spread,
    upright,
    yaw_of,
)
from embodied.envs.mujoco.batch_env import Rows

BLOCK = 0.02
"""Half the side of a block."""
BOWL = 0.052
RIM = 0.037
"""Distance of the bowl's walls from its middle, and its height."""
PLATE = 0.055
THICK = 0.006
"""Radius of the plate, and half its thickness."""
CAN = 0.025
"""Half the height of the can."""
CABINET = (0.075, 0.08, 0.07)
"""Half the cabinet's width (x) and depth (y), and its height."""
KNOB = 0.112
"""Distance of the knob from the cabinet's middle when the drawer is closed."""
TRAVEL = 0.14
"""How far the drawer opens."""
PRESS = 0.01
"""How far the button's cap goes down."""

COLOURS: dict[str, Rgba] = {
    "red": (0.85, 0.13, 0.10, 1.0),
    "blue": (0.12, 0.25, 0.85, 1.0),
    "green": (0.12, 0.62, 0.22, 1.0),
}
BLOCKS = tuple(COLOURS)
MOVABLE = (*BLOCKS, "bowl", "plate", "can")
FIXED = ("cabinet", "button")
JOINTS = ("drawer", "cap")
BOX = mujoco.mjtGeom.mjGEOM_BOX
CYLINDER = mujoco.mjtGeom.mjGEOM_CYLINDER


def add_objects(spec: mujoco.MjSpec) -> None:
    # Software rendering pays for every triangle: MuJoCo draws a face of a box as 32 of them.
    quality = spec.visual.quality
    quality.numquads = 1
    quality.numslices = 16
    quality.numstacks = 2
    for name, rgba in COLOURS.items():
        add_box(spec, name, (BLOCK, BLOCK, BLOCK), rgba, 0.06)
    _bowl(add_free(spec, "bowl"))
    plate = add_free(spec, "plate")
    yellow = (0.96, 0.82, 0.20, 1.0)
    add_solid(plate, CYLINDER, (PLATE, THICK, 0.0), (0.0, 0.0, 0.0), yellow, 0.12, friction=0.3)
    can = add_free(spec, "can")
    add_solid(can, CYLINDER, (0.02, CAN, 0.0), (0.0, 0.0, 0.0), (0.95, 0.55, 0.10, 1.0), 0.08)
    # A box without a front, and a drawer that slides out towards -y, with a knob.
    wood = (0.42, 0.28, 0.18, 1.0)
    front = (0.72, 0.52, 0.32, 1.0)
    metal = (0.15, 0.15, 0.17, 1.0)
    cabinet = spec.worldbody.add_body(name="cabinet", mocap=True)
    x, y, height = CABINET
    add_solid(cabinet, BOX, (x, y, 0.004), (0.0, 0.0, height - 0.004), wood)
    add_solid(cabinet, BOX, (x, 0.004, 0.033), (0.0, y - 0.004, 0.033), wood)
    for side in (-1, 1):
        add_solid(cabinet, BOX, (0.004, y, 0.033), (side * (x - 0.004), 0.0, 0.033), wood)
    drawer = _slide(cabinet, "drawer", (0.0, -1.0, 0.0), TRAVEL, damping=4.0, friction=0.6)
    add_solid(drawer, BOX, (0.062, 0.065, 0.003), (0.0, -0.012, 0.008), front, 0.15)
    add_solid(drawer, BOX, (0.070, 0.004, 0.018), (0.0, -0.084, 0.024), front, 0.05)
    add_solid(drawer, BOX, (0.062, 0.003, 0.015), (0.0, 0.050, 0.024), front, 0.05)
    for side in (-1, 1):
        add_solid(drawer, BOX, (0.003, 0.065, 0.015), (side * 0.062, -0.012, 0.024), front, 0.05)
    add_solid(drawer, BOX, (0.008, 0.016, 0.005), (0.0, 0.024 - KNOB, 0.035), metal, 0.02)
    add_solid(drawer, BOX, (0.009, 0.008, 0.022), (0.0, -KNOB, 0.053), metal, 0.03)
    spec.add_exclude(bodyname1="cabinet", bodyname2="drawer")
    button = spec.worldbody.add_body(name="button", mocap=True)
    add_solid(button, CYLINDER, (0.032, 0.008, 0.0), (0.0, 0.0, 0.008), (0.2, 0.2, 0.22, 1.0))
    cap = _slide(button, "cap", (0.0, 0.0, -1.0), PRESS, damping=3.0, stiffness=150.0)
    add_solid(cap, CYLINDER, (0.021, 0.008, 0.0), (0.0, 0.0, 0.026), (0.62, 0.15, 0.70, 1.0), 0.03)
    cap.gravcomp = 1.0
    spec.add_exclude(bodyname1="button", bodyname2="cap")


def _bowl(body: mujoco.MjsBody) -> None:
    """A round floor and eight walls; the body's origin is the middle of its underside."""
    rgba = (0.93, 0.93, 0.90, 1.0)
    add_solid(body, CYLINDER, (BOWL, 0.003, 0.0), (0.0, 0.0, 0.003), rgba, 0.12)
    # The walls do not reach the table: 32 contacts less in every step.
    half = (0.004, BOWL * math.tan(math.pi / 8) + 0.002, RIM / 2 - 0.001)
    for side in range(8):
        angle = side * math.pi / 4
        place = (BOWL * math.cos(angle), BOWL * math.sin(angle), RIM / 2 + 0.001)
        wall = add_solid(body, BOX, half, place, rgba, 0.02)
        wall.quat = [math.cos(angle / 2), 0.0, 0.0, math.sin(angle / 2)]


def _slide(
    parent: mujoco.MjsBody,
    name: str,
    axis: tuple[float, float, float],
    travel: float,
    damping: float,
    friction: float = 0.0,
    stiffness: float = 0.0,
) -> mujoco.MjsBody:
    """A body on a slide joint from 0 to `travel`, with an end stop on either side."""
    body = parent.add_body(name=name)
    joint = body.add_joint(name=name, type=mujoco.mjtJoint.mjJNT_SLIDE, axis=axis)
    joint.limited = mujoco.mjtLimited.mjLIMITED_TRUE
    joint.range = [0.0, travel]
    joint.armature = 0.05
    joint.frictionloss = friction
    joint.damping[0] = damping
    joint.stiffness[0] = stiffness
    return body


ROWS = (0.35, 0.475)
"""The x of the two rows of places, m."""
PLACES = (-0.21, -0.07, 0.07, 0.21)
"""The y of the places in the row without the plate, m; the plate's row has the last one only."""
LYING = (*BLOCKS, "bowl", "can")
HEIGHT = {**dict.fromkeys(BLOCKS, BLOCK), "bowl": 0.0, "can": CAN}
DRAWS = 35


def initial(draws: Floats) -> Start:
    """Initial states of n episodes from uniform numbers [n, DRAWS]."""
    n = len(draws)
    row = (draws[:, 0] < 0.5).astype(int)
    order = np.argsort(draws[:, 1:6], axis=1)
    cells = [*((1 - row, np.full(n, i)) for i in range(4)), (row, np.full(n, 3))]
    places = np.stack([np.stack(cell, 1) for cell in cells], 1)
    free = {}
    for number, name in enumerate(LYING):
        at = places[np.arange(n), order[:, number]]
        jitter = spread(draws[:, 6 + 2 * number : 8 + 2 * number], (-0.01, -0.012), (0.01, 0.012))
        x, y = np.array(ROWS)[at[:, 0]] + jitter[:, 0], np.array(PLACES)[at[:, 1]] + jitter[:, 1]
        yaw = spread(draws[:, 16 + number : 17 + number], (-0.25,), (0.25,))[:, 0]
        free[name] = (np.stack([x, y, np.full(n, HEIGHT[name])], 1), upright(yaw))
    place = spread(draws[:, 21:23], (-0.01, -0.19), (0.01, -0.06))
    plate = np.stack([np.array(ROWS)[row] + place[:, 0], place[:, 1], np.full(n, THICK)], 1)
    free["plate"] = (plate, upright(np.zeros(n)))
    fixed = spread(draws[:, 23:27], (0.63, 0.21, 0.625, -0.23), (0.65, 0.23, 0.655, -0.17))
    zero = np.zeros((n, 1))
    return Start(
        tool=spread(draws[:, 27:30], (0.40, -0.10, 0.22), (0.56, 0.10, 0.30)),
        width=np.full(n, 0.08),
        free=free,
        marker={
            "cabinet": np.concatenate([fixed[:, :2], zero], 1),
            "button": np.concatenate([fixed[:, 2:], zero], 1),
        },
        memory={
            "plate_from": plate,
            **dict(zip(JOINTS, (0.07 + 0.02 * draws[:, 30], np.zeros(n)), strict=True)),
        },
    )


Predicate = Callable[[View], Flags]


@dataclass(frozen=True)
class Instruction:
    """`name` for settings, `text` for policies, `done` of a View of n envs, [n]."""

    name: str
    text: str
    done: Predicate


def released(view: View) -> Flags:
    """The hand is open wider than a block."""
    return view.width > 2 * BLOCK + 0.008


def put(block: str, base: str, low: float, high: float, most: float) -> Predicate:
    """The block is let go with its middle `low` to `high` above the origin of `base` and at most
    `most` beside it (m)."""

    def done(view: View) -> Flags:
        away = view.place[block] - view.place[base]
        beside = np.linalg.norm(away[:, :2], axis=1) < most
        return (away[:, 2] > low) & (away[:, 2] < high) & beside & released(view)

    return done


def onto_cabinet(view: View) -> Flags:
    x, y, z = (view.place["green"] - view.place["cabinet"]).T
    height = CABINET[2] + BLOCK
    lies = (z > height - 0.006) & (z < height + 0.006)
    return lies & (np.abs(x) < CABINET[0]) & (np.abs(y) < CABINET[1]) & released(view)


def into_drawer(view: View) -> Flags:
    """The red block lies inside the drawer, which may be open or closed."""
    x, y, z = (view.place["red"] - view.place["cabinet"]).T
    y = y + view.joint["drawer"]
    inside = (np.abs(x) < 0.059) & (y > -0.08) & (y < 0.047)
    return inside & (z > 0.0) & (z < 0.045) & released(view)


def plate_left(view: View) -> Flags:
    """The plate is 10 cm further left than it began, flat on the table."""
    moved = (view.place["plate"] - view.memory["plate_from"])[:, 1]
    return (moved > 0.10) & (view.place["plate"][:, 2] < 2 * THICK)


ON_PLATE = THICK + BLOCK
ON_BLOCK = 2 * BLOCK
INSTRUCTIONS = (
    Instruction(
        "red_into_bowl", "put the red block into the bowl", put("red", "bowl", 0.0, RIM, 0.04)
    ),
    Instruction(
        "blue_into_bowl", "put the blue block into the bowl", put("blue", "bowl", 0.0, RIM, 0.04)
    ),
    Instruction(
        "green_onto_plate",
        "put the green block onto the plate",
        put("green", "plate", ON_PLATE - 0.006, ON_PLATE + 0.006, 0.05),
    ),
    Instruction(
        "blue_onto_green",
        "stack the blue block on the green block",
        put("blue", "green", ON_BLOCK - 0.006, ON_BLOCK + 0.006, 0.025),
    ),
    Instruction("red_into_drawer", "put the red block into the drawer", into_drawer),
    Instruction("green_onto_cabinet", "put the green block on top of the cabinet", onto_cabinet),
    Instruction("open_drawer", "open the drawer", lambda view: view.joint["drawer"] > 0.125),
    Instruction("close_drawer", "close the drawer", lambda view: view.joint["drawer"] < 0.012),
    Instruction("press_button", "press the button", lambda view: view.joint["cap"] > 0.007),
    Instruction("push_plate_left", "push the plate to the left", plate_left),
)
NAMES = tuple(each.name for each in INSTRUCTIONS)


def chosen(names: tuple[str, ...]) -> tuple[int, ...]:
    """The numbers of the named instructions, in order; ConfigError."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"env.tasks: unknown task {name!r}{nearest(name, NAMES)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"env.tasks: name each task once, at least one of {', '.join(NAMES)}")
    return tuple(NAMES.index(name) for name in names)


SENTENCES = tuple(each.text for each in INSTRUCTIONS)
WORDS = tuple(sorted({word for text in SENTENCES for word in text.split()}))
LENGTH = max(len(text.split()) for text in SENTENCES)
LEAF = Leaf((LENGTH,), "uint8", 0, len(WORDS), SYMBOL)


def tokens(text: str) -> list[int]:
    """The words of `text` as LENGTH numbers, 0 after its end; ValueError for unknown words."""
    words = text.split()
    unknown = [word for word in words if word not in WORDS]
    if unknown or len(words) > LENGTH:
        raise ValueError(f"not a sentence of these tasks: {text!r}")
    return [*(WORDS.index(word) + 1 for word in words), *[0] * (LENGTH - len(words))]


TOKENS = np.array([tokens(text) for text in SENTENCES], np.uint8)
"""The tokens of every instruction, [10, LENGTH]."""


@dataclass(frozen=True)
class Config:
    """Settings of the language tasks; what is not explained is as in `embodied.envs.fr3.env`.

    `wrong_instruction` shows the sentence of the next task of the list of ten instead of the right
    one: success must drop.
    """

    tasks: tuple[str, ...] = ()  # tasks that episodes are drawn from (empty: all ten)
    num_envs: Count = 16  # parallel environments
    cameras: tuple[str, ...] = ()  # cameras whose images are observations: front, wrist
    portraits: tuple[str, ...] = ()  # images for rewards, side by side (empty: the first camera)
    image_size: Count = 64  # pixels of an image's side
    drawing: Literal["full", "light"] = "light"  # how the scene is rendered
    horizon: Count = 200  # control steps of an episode, 20 Hz
    threads: Count = 2  # CPU threads
    seed: CountOrZero = 0  # of the random numbers
    objects: Literal["seen", "privileged"] = "privileged"  # who sees objects
    text: CountOrZero = 0  # bytes of the observation `text`, the sentence in UTF-8 (0: none)
    wrong_instruction: bool = False  # show the sentence of another task
    randomize: Ranges = field(default_factory=dict)  # ranges of physical quantities, by name
    reveal: bool = False  # observe the sampled quantities in [0, 1] as privileged/random


class Tabletop(Task):
    """The scene of the language tasks; its parameter chooses among the instructions `numbers`."""

    text = ""
    free = MOVABLE
    markers = FIXED
    names = (
        *(f"{name}_{axis}" for name in (*MOVABLE, *FIXED) for axis in "xyz"),
        *(f"{name}_{part}" for name in BLOCKS for part in ("cos_4yaw", "sin_4yaw")),
        *JOINTS,
        *(f"plate_from_{axis}" for axis in "xyz"),
    )
    terms: ClassVar[Mapping[str, Term]] = {}
    weights: ClassVar[Mapping[str, float]] = {}
    draws = DRAWS
    front = ((1.30, -0.62, 0.78), (0.47, 0.02, 0.05), 32.0)

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = np.array(numbers)
        self.parameters = (Parameter("instruction", 0.0, float(len(numbers)), ""),)

    def edit(self, spec: mujoco.MjSpec) -> None:
        add_objects(spec)

    def start(self, param: Params, draws: Floats) -> Start:
        begun = initial(draws)
        place = np.minimum(param["instruction"].astype(int), len(self.numbers) - 1)
        begun.memory["number"] = self.numbers[place].astype(np.float64)
        return begun

    def observe(self, view: View) -> Floats:
        places = [view.place[name] for name in (*MOVABLE, *FIXED)]
        yaw = 4 * np.stack([yaw_of(view.turn[name]) for name in BLOCKS], 1)
        facing = np.stack([np.cos(yaw), np.sin(yaw)], 2).reshape(len(yaw), -1)
        joints = np.stack([view.joint[name] for name in JOINTS], 1)
        return np.concatenate([*places, facing, joints, view.memory["plate_from"]], 1)

    def success(self, view: View) -> Flags:
        done = np.stack([each.done(view) for each in INSTRUCTIONS], 1)
        return done[np.arange(len(done)), numbers(view)]

    def describe(self, view: View) -> str:
        asked = INSTRUCTIONS[numbers(view)[0]].text
        where = "; ".join(f"{name} at {centimetres(at)}" for name, at in view.place.items())
        opening = 100 * view.joint["drawer"][0]
        return (
            f"The instruction is: {asked}. {where}; the drawer is {opening:.1f} cm open; the tool "
            f"is at {centimetres(view.tool)}; the hand is open {view.width[0] * 100:.1f} cm."
        )


def numbers(view: View) -> NDArray[np.intp]:
    """The number of the instruction of each env, [n]."""
    return view.memory["number"].astype(np.intp)


class LanguageTasks(Fr3):
    """B parallel FR3 robots before the same objects, each with an instruction of its own.

    The observation `instruction` is the sentence as word numbers
    of one vocabulary; the task vector's `instruction` chooses among `tasks`.
    """

    def __init__(self, config: Config) -> None:
        self.settings = config
        self._numbers = chosen(tuple(config.tasks) or NAMES)
        longest = max(len(each.text.encode()) for each in INSTRUCTIONS)
        if config.text and config.text < longest:
            raise ConfigError(f"env.text={config.text} is too small; type env.text={longest}")
        super().__init__(
            fr3_env.Config(
                num_envs=config.num_envs,
                cameras=config.cameras,
                portraits=config.portraits,
                image_size=config.image_size,
                drawing=config.drawing,
                horizon=config.horizon,
                threads=config.threads,
                seed=config.seed,
                objects=config.objects,
                randomize=config.randomize,
                reveal=config.reveal,
            )
        )
        self.name = "fr3_tasks"
        at = [self.model.joint(name).qposadr[0] for name in JOINTS]
        self._joints = dict(zip(JOINTS, map(int, at), strict=True))

    def instance(self, more: tuple[Parameter, ...]) -> TaskInstance:
        return TaskInstance(Tabletop(self._numbers), "sparse", {}, more)

    def instructions(self) -> list[str]:
        """The sentence of each env's running episode, B sentences."""
        return [INSTRUCTIONS[number].text for number in self._shown(np.arange(self.num_envs))]

    def place(self, rows: Rows, draws: Floats) -> None:
        super().place(rows, draws)
        for name, at in self._joints.items():
            self.batch.qpos[rows, at] = self.memory[name][rows]

    def view(self, rows: Rows) -> View:
        view = super().view(rows)
        view.joint = {name: self.batch.qpos[rows, at] for name, at in self._joints.items()}
        return view

    def observe(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        shown = self._shown(rows)
        number = self.memory["number"][rows].astype(np.intp)
        task = np.eye(len(NAMES), dtype=np.float32)[number]
        obs = {**super().observe(rows), "instruction": TOKENS[shown], "privileged/task": task}
        if self.settings.text:
            sentences = [INSTRUCTIONS[number].text for number in shown]
            obs["text"] = encode(sentences, self.settings.text).numpy()
        return obs

    def _shown(self, rows: Rows) -> NDArray[np.intp]:
        """The numbers of the sentences that policies are shown, [n]."""
        number = self.memory["number"][rows].astype(np.intp)
        return (number + self.settings.wrong_instruction) % len(NAMES)

    def _spec(self, drawn: tuple[str, ...]) -> Spec:
        # Apart from the objects, which policies may see (`objects: seen`): those have to read.
        names = tuple(f"task_{name}" for name in NAMES)
        task = Leaf((len(NAMES),), low=0.0, high=1.0, names=names)
        spec = super()._spec(drawn).with_obs(**{"instruction": LEAF, "privileged/task": task})
        if self.settings.text:
            spec = spec.with_obs(text=text_leaf(self.settings.text))
        if len(self._numbers) > 1:
            return spec
        text = INSTRUCTIONS[next(iter(self._numbers))].text
        return Spec(spec.obs, spec.act, spec.dt, spec.task, text)
