"""LanguageTasks: an FR3 with ten tasks in one scene, told apart by a sentence (after LIBERO).

Every episode begins in a scene of the same distribution, whatever the task is: a policy that does
not read its instruction cannot know what to do. Success of the instruction terminates the episode
with reward 1; everything else gives 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero, Ranges
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.text import encode, text_leaf
from embodied.envs.fr3 import env as fr3_env
from embodied.envs.fr3.base import TaskInstance
from embodied.envs.fr3.env import Fr3
from embodied.envs.fr3.language import instructions
from embodied.envs.fr3.language.instructions import INSTRUCTIONS, LEAF, NAMES, TOKENS, chosen
from embodied.envs.fr3.tasks.task import (
    Flags,
    Floats,
    Parameter,
    Params,
    Start,
    Task,
    Term,
    View,
    centimetres,
    yaw_of,
)
from embodied.envs.mujoco.batch_env import Rows


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
    free = instructions.MOVABLE
    markers = instructions.FIXED
    names = (
        *(
            f"{name}_{axis}"
            for name in (*instructions.MOVABLE, *instructions.FIXED)
            for axis in "xyz"
        ),
        *(f"{name}_{part}" for name in instructions.BLOCKS for part in ("cos_4yaw", "sin_4yaw")),
        *instructions.JOINTS,
        *(f"plate_from_{axis}" for axis in "xyz"),
    )
    terms: ClassVar[Mapping[str, Term]] = {}
    weights: ClassVar[Mapping[str, float]] = {}
    draws = instructions.DRAWS
    front = ((1.30, -0.62, 0.78), (0.47, 0.02, 0.05), 32.0)

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = np.array(numbers)
        self.parameters = (Parameter("instruction", 0.0, float(len(numbers)), ""),)

    def edit(self, spec: mujoco.MjSpec) -> None:
        instructions.add_objects(spec)

    def start(self, param: Params, draws: Floats) -> Start:
        begun = instructions.initial(draws)
        place = np.minimum(param["instruction"].astype(int), len(self.numbers) - 1)
        begun.memory["number"] = self.numbers[place].astype(np.float64)
        return begun

    def observe(self, view: View) -> Floats:
        places = [view.place[name] for name in (*instructions.MOVABLE, *instructions.FIXED)]
        yaw = 4 * np.stack([yaw_of(view.turn[name]) for name in instructions.BLOCKS], 1)
        facing = np.stack([np.cos(yaw), np.sin(yaw)], 2).reshape(len(yaw), -1)
        joints = np.stack([view.joint[name] for name in instructions.JOINTS], 1)
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
    (`embodied.envs.fr3.language.instructions`); the task vector's `instruction` chooses among
    `tasks`.
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
        at = [self.model.joint(name).qposadr[0] for name in instructions.JOINTS]
        self._joints = dict(zip(instructions.JOINTS, map(int, at), strict=True))

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
