"""Panels: a slider per element of the task vector, its map, disturbances, and a policy's noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from viser import ViserServer
from viser.transforms import SO3

from embodied.core.actor import Actor
from embodied.core.env import HasTaskParameters
from embodied.core.wrapper import find_protocol
from embodied.teachers.plots import read_episode_log
from embodied.viewer.controls import Controls
from embodied.viewer.scene.types import SMALL, Array, Picture, Viewpoint
from embodied.viewer.session.disturbances import LATEST
from embodied.viewer.session.episode import Moment
from embodied.viewer.session.overlays import SCORE, chooses_noise
from embodied.viewer.session.session import Session

NODE = "/task_map"
SIDE, EDGE = 360, 34
"""Size of the image and of its border, pixels."""
CELLS = 24
GROUND, INK, GRID = (255, 255, 255), (55, 65, 81), (226, 232, 240)
SAMPLED, NOW = (0, 114, 178), (213, 94, 0)
NEAR = 0.5
"""Where the map stands, as a share of the way from the viewpoint to its target, in front of
everything."""
LARGE, LEFT, LOW = 0.2, 0.13, 0.14
"""Its size, and its offsets to the left and below the centre, as shares of its distance."""


class MapAxis(NamedTuple):
    """An element of the task: its index, and its name with bounds and unit."""

    number: int
    label: str


def map_picture(
    across: MapAxis, up: MapAxis, task: Sequence[float] | None, sampled: NDArray[np.floating] | None
) -> Picture:
    """Image [SIDE, SIDE, 3]: density of `sampled` tasks [N, D] in blue, the current `task` [D] in
    orange, all in [0, 1]."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (SIDE, SIDE), GROUND)
    inner = SIDE - 2 * EDGE
    if sampled is not None and len(sampled):
        often = Image.fromarray(density(sampled, across, up))
        image.paste(often.resize((inner, inner), Image.Resampling.NEAREST), (EDGE, EDGE))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    for i in range(5):
        at = EDGE + round(i * inner / 4)
        pen.line((EDGE, at, SIDE - EDGE, at), fill=GRID)
        pen.line((at, EDGE, at, SIDE - EDGE), fill=GRID)
    pen.rectangle((EDGE, EDGE, SIDE - EDGE, SIDE - EDGE), outline=INK)
    pen.text((EDGE, SIDE - EDGE + 6), f"across: {across.label}", fill=INK, font=font)
    pen.text((EDGE, 8), f"up: {up.label}", fill=INK, font=font)
    if task is not None:
        x = EDGE + task[across.number] * inner
        y = SIDE - EDGE - task[up.number] * inner
        pen.ellipse((x - 7, y - 7, x + 7, y + 7), fill=NOW, outline=INK, width=2)
    return np.asarray(image)


def density(sampled: NDArray[np.floating], across: MapAxis, up: MapAxis) -> Picture:
    """How often tasks were in each cell, white to blue [CELLS, CELLS, 3], upper end on top."""
    x, y = sampled[:, across.number], sampled[:, up.number]
    count, _, _ = np.histogram2d(y, x, CELLS, ((0, 1), (0, 1)))
    share = np.sqrt(count / max(count.max(), 1.0))[::-1, :, None]
    return ((1 - 0.8 * share) * 255 + 0.8 * share * np.array(SAMPLED)).round().astype(np.uint8)


@dataclass(frozen=True)
class MapPlane:
    """The map's plane: `middle` (m), unit vectors `right`, `down` and `away`, and `side` (m)."""

    middle: Array
    right: Array
    down: Array
    away: Array
    side: float

    @classmethod
    def beside(cls, eye: Viewpoint) -> MapPlane:
        """Lower left of the target of `eye`, facing it."""
        away = eye.target - eye.place
        distance = float(np.linalg.norm(away))
        away = away / distance
        right = np.cross(away, (0.0, 0.0, 1.0))
        right /= max(float(np.linalg.norm(right)), 1e-9)
        down = np.cross(away, right)
        middle = eye.place + NEAR * distance * (away - LEFT * right + LOW * down)
        return cls(middle, right, down, away, NEAR * LARGE * distance)

    @property
    def turn(self) -> Array:
        """Its axes (right, down, away) as a quaternion (w, x, y, z)."""
        return SO3.from_matrix(np.stack([self.right, self.down, self.away], 1)).wxyz

    def hit(self, origin: Array, way: Array) -> tuple[float, float] | None:
        """Where a ray meets it, as shares of its side from the left and the top; None if it does
        not."""
        along = float(np.dot(way, self.away))
        if abs(along) < 1e-9:
            return None
        place = origin + float(np.dot(self.middle - origin, self.away)) / along * way
        off = (place - self.middle) / self.side
        return float(np.dot(off, self.right)) + 0.5, float(np.dot(off, self.down)) + 0.5


def task_at(left: float, top: float) -> tuple[float, float] | None:
    """The task elements (across, up) in [0, 1] at a point of the map; None outside of the axes."""
    inner = SIDE - 2 * EDGE
    x, y = (left * SIDE - EDGE) / inner, 1 - (top * SIDE - EDGE) / inner
    if not (-0.02 <= x <= 1.02 and -0.02 <= y <= 1.02):
        return None
    return min(max(x, 0.0), 1.0), min(max(y, 0.0), 1.0)


class MapPanel:
    """For tasks of two or more elements; it is added to the open folder. Sliders and clicks set the
    same task."""

    def __init__(
        self, server: ViserServer, viewer: Controls, ranges: list[tuple[str, float, float, str]]
    ) -> None:
        self.server, self.viewer, self.session = server, viewer, viewer.session
        self.axes = {
            name: MapAxis(i, f"{name} {low:g} to {high:g} {unit}".rstrip())
            for i, (name, low, high, unit) in enumerate(ranges)
        }
        self.plane: MapPlane | None = None
        self._last: tuple[Any, ...] = ()
        self.available = len(self.axes) > 1
        if not self.available:
            return
        first, second, *_ = names = tuple(self.axes)
        gui = server.gui
        self.switch = gui.add_checkbox(
            "Map", False, hint="in the scene; click on it to set the task"
        )
        self.across = gui.add_dropdown("Across", names, initial_value=first, visible=False)
        self.up = gui.add_dropdown("Up", names, initial_value=second, visible=False)
        run = self.session.run
        past = None if run is None else read_episode_log(run.folder)
        self.sampled = None if past is None else past.task
        for control in (self.switch, self.across, self.up):
            viewer.bind(control, lambda _: viewer.page.changed())

    def draw(self) -> None:
        if not self.available:
            return
        task = self.session.current_task
        now = (self.switch.value, self.across.value, self.up.value, str(task))
        if now == self._last:
            return
        self._last = now
        self.across.visible = self.up.visible = self.switch.value
        if not self.switch.value:
            self.server.scene.remove_by_name(NODE)
            self.plane = None
            return
        picture = map_picture(
            self.axes[self.across.value], self.axes[self.up.value], task, self.sampled
        )
        if self.plane is None:
            camera = self.server.initial_camera
            self.plane = plane = MapPlane.beside(Viewpoint(camera.position, camera.look_at))
            self.image = self.server.scene.add_image(
                NODE, picture, plane.side, plane.side, wxyz=plane.turn, position=plane.middle
            )

            async def clicked(event: Any) -> None:
                place = plane.hit(np.array(event.ray_origin), np.array(event.ray_direction))
                wanted = None if place is None else task_at(*place)
                if wanted is not None:
                    self.viewer.press(lambda: self.pick(*wanted))

            self.image.on_click(clicked)
        else:
            self.image.image = picture

    def pick(self, x: float, y: float) -> None:
        """Restart with the current task, but with the elements across and up set to values in [0,
        1]."""
        current = self.session.current_task
        task = [0.5] * len(self.axes) if current is None else list(current)
        task[self.axes[self.across.value].number] = x
        task[self.axes[self.up.value].number] = y
        self.viewer.set_task(task)


class TaskPanel:
    """Moving a slider restarts the episode with that task."""

    def __init__(self, server: ViserServer, viewer: Controls) -> None:
        self.viewer, self.session = viewer, viewer.session
        self.sliders: list[Any] = []
        self.ranges: list[tuple[float, float]] = []
        self.map: MapPanel | None = None
        if self.session.spec.task is None:
            return
        with server.gui.add_folder("Task", expand_by_default=False):
            self.fixed = server.gui.add_checkbox(
                "Fixed", False, hint="off: sampled for each episode"
            )
            viewer.bind(self.fixed, lambda _: self._apply())
            known = task_ranges(self.session.env)
            for name, low, high, unit in known:
                slider = server.gui.add_slider(
                    name, low, high, (high - low) / 200, low, hint=f"{low:g} to {high:g} {unit}"
                )
                viewer.bind(slider, lambda _: self._move())
                self.sliders.append(slider)
                self.ranges.append((low, high))
            self.map = MapPanel(server, viewer, known)

    def episode_started(self) -> None:
        current = self.session.current_task
        if current is not None:
            for slider, value, (low, high) in zip(self.sliders, current, self.ranges, strict=True):
                slider.value = low + value * (high - low)

    def show(self) -> None:
        if self.sliders:
            self.fixed.value = self.session.task is not None
        if self.map is not None:
            self.map.draw()

    def _move(self) -> None:
        self.fixed.value = True
        self._apply()

    def _apply(self) -> None:
        """Restart with the sliders' values; of many moves only the last counts."""
        if not self.fixed.value:
            return self.viewer.set_task(None)
        task = [
            min(max((slider.value - low) / (high - low), 0.0), 1.0)
            for slider, (low, high) in zip(self.sliders, self.ranges, strict=True)
        ]
        before = self.session.task
        if before is None or not torch.equal(before, torch.tensor(task, dtype=torch.float32)):
            self.viewer.set_task(task)


def task_ranges(env: Any) -> list[tuple[str, float, float, str]]:
    """Name, lower and upper bound, and unit of each element of the task vector: those of
    `env.parameters` where the environment declares them, else [0, 1]."""
    leaf = env.spec.task
    names = leaf.names or tuple(f"task {i}" for i in range(leaf.size))
    native = find_protocol(env, HasTaskParameters)
    known = {each.name: each for each in (() if native is None else native.parameters)}
    return [
        (name, known[name].low, known[name].high, known[name].unit)
        if name in known
        else (name, 0.0, 1.0, "")
        for name in names
    ]


DECISIONS = 60
"""How many decisions are shown at once."""


BELOW, ABOVE, WHITE = (0, 114, 178), (213, 94, 0), (255, 255, 255)
MAP, BARS, NAMES, GAP = 210, 120, 70, 6
"""Widths of the image's parts and the gap between them, in pixels."""
HIGH = 170


def decisions(moments: Sequence[Moment]) -> list[tuple[int, Tensor]]:
    """Step index and noise [D] of each decision that has one."""
    return [
        (i, moment.noise)
        for i, moment in enumerate(moments)
        if moment.is_decision and moment.noise is not None
    ]


def describe(noise: Tensor) -> str:
    size = float(noise.norm())
    return f"latent noise: norm {size:.1f} (Gaussian samples: about {math.sqrt(noise.numel()):.1f})"


def noise_picture(chosen: Sequence[Tensor], at: int, bound: float, names: Sequence[str]) -> Picture:
    """Image of noises `chosen`: decisions from left to right, elements [D] from top to bottom,
    grouped by the action element (`names`) they belong to. Number `at` is framed and repeated as
    bars. Blue is negative, orange positive."""
    from PIL import Image, ImageDraw, ImageFont

    values = np.stack([each.numpy() for each in chosen], 1) / bound
    values = values[grouped(len(values), len(names))]
    tall, count = values.shape
    row = max(2, HIGH // tall)
    image = Image.new("RGB", (NAMES + MAP + GAP + BARS, row * tall), GROUND)
    cells = Image.fromarray(coloured(values)).resize((MAP, row * tall), Image.Resampling.NEAREST)
    image.paste(cells, (NAMES, 0))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(11)
    left = NAMES + round(at * MAP / count)
    right = max(NAMES + round((at + 1) * MAP / count), left + 2)
    pen.rectangle((left, 0, right - 1, row * tall - 1), outline=INK)
    middle = NAMES + MAP + GAP + BARS // 2
    for i, value in enumerate(values[:, at]):
        end = middle + round(float(np.clip(value, -1, 1)) * (BARS // 2 - 2))
        low, high = sorted((middle, end))
        pen.rectangle((low, i * row, high, i * row + row - 2), fill=ABOVE if value > 0 else BELOW)
    pen.line((middle, 0, middle, row * tall), fill=INK)
    rows = tall // len(names) if names and tall % len(names) == 0 else tall
    for i, name in enumerate(names if rows < tall else ()):
        pen.text((2, i * rows * row + 1), name[:11], fill=INK, font=font)
        pen.line((0, i * rows * row, NAMES + MAP, i * rows * row), fill=INK)
    return np.asarray(image)


def grouped(size: int, elements: int) -> NDArray[np.intp]:
    """The order of D = H * A numbers, stored step by step, that groups them by action element."""
    if not elements or size % elements:
        return np.arange(size)
    return np.arange(size).reshape(-1, elements).T.reshape(-1)


def coloured(values: NDArray[np.floating]) -> Picture:
    """Numbers in [-1, 1] as colours [..., 3], white at zero."""
    strength = np.abs(np.clip(values, -1, 1))[..., None]
    ends = np.where(values[..., None] > 0, np.array(ABOVE), np.array(BELOW))
    return (strength * ends + (1 - strength) * np.array(WHITE)).round().astype(np.uint8)


class SteeringPanel:
    """Images that appear once there is something to show."""

    def __init__(self, server: ViserServer, session: Session) -> None:
        self.session = session
        blank = np.zeros((2, 2, 3), np.uint8)
        self.noise = server.gui.add_image(blank, label="latent noise", visible=False)
        self.reward_image = server.gui.add_image(blank, label="reward image", visible=False)
        self._last: tuple[Any, ...] = ()

    def draw(self) -> None:
        now = (id(self.session.now), len(self.session.episode.moments), self.session.chosen)
        if now == self._last:
            return
        self._last = now
        self._draw_noise()
        image = self.session.now.reward_image
        self.reward_image.visible = image is not None
        if image is not None:
            self.reward_image.image = enlarged(image.picture())
            score = self.session.now.numbers.get(SCORE)
            text = "" if score is None else f": {score:.3f}"
            step = self.session.now.step
            self.reward_image.label = f"image that the reward scored, step {step}{text}"

    def _draw_noise(self) -> None:
        session = self.session
        found = decisions(session.episode.moments)
        acting = session.made[session.chosen]
        policy = acting.policy if isinstance(acting, Actor) else None
        number = session.decision_index
        self.noise.visible = bool(found) and chooses_noise(policy) and number is not None
        if number is None or not found or not chooses_noise(policy):
            return
        at = max((i for i, (moment, _) in enumerate(found) if moment <= number), default=0)
        begin = max(0, min(at - DECISIONS // 2, len(found) - DECISIONS))
        shown = [noise for _, noise in found[begin : begin + DECISIONS]]
        act = session.spec.act
        names = act.names or tuple(f"action {i}" for i in range(act.size))
        self.noise.image = noise_picture(shown, at - begin, policy.bound, names)
        self.noise.label = describe(shown[at - begin])


def enlarged(picture: Picture) -> Picture:
    """A small image, each pixel as a square."""
    times = -(-SMALL // len(picture))
    return np.ascontiguousarray(picture.repeat(times, 0).repeat(times, 1))


NONE = "none"


class DisturbancePanel:
    """Settings apply from the next step on."""

    def __init__(self, server: ViserServer, viewer: Controls) -> None:
        self.viewer, self.session = viewer, viewer.session
        if self.session.counts != "seed":
            return  # recorded episodes cannot be disturbed
        names = [name for name, leaf in self.session.spec.obs.items() if leaf.size]
        with server.gui.add_folder("Disturbances", expand_by_default=False):
            self.late = server.gui.add_slider(
                "Delay", 0, LATEST, 1, 0, hint="observation delay, in steps"
            )
            self.off = server.gui.add_dropdown("Remove", (NONE, *names))
            viewer.bind(self.late, lambda _: self._changed())
            viewer.bind(self.off, lambda _: self._changed())
            if not self.session.pushes.names:
                return
            self.which = server.gui.add_dropdown("Push", tuple(self.session.pushes.names))
            self.strength = server.gui.add_slider("Strength", 0.1, 5.0, 0.1, 1.0, hint="m/s")
            button = server.gui.add_button("Push now", hint="adds a velocity at the newest step")
            button.on_click(
                lambda _: viewer.press(lambda: viewer.push(self.which.value, self.strength.value))
            )

    def _changed(self) -> None:
        off = set() if self.off.value == NONE else {self.off.value}
        self.viewer.disturb_observations(self.late.value, off)
