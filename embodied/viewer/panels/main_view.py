"""The main view: the 3D scene if the environment has one, else its image, else nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from viser import MeshHandle, ViserServer, uplot

from embodied.viewer.controls import Controls
from embodied.viewer.panels.plots import COLOURS
from embodied.viewer.run_folder import Run
from embodied.viewer.scene.types import Array, SceneModel, Viewpoint
from embodied.viewer.scene.viser_scene import ROOT, ImagePlane, SceneCameras, ViserScene
from embodied.viewer.session.disturbances import ROBOT
from embodied.viewer.session.episode import History, history_of, moving
from embodied.viewer.session.session import Session, label


class MainView:
    """`draw` sends what moved; without a camera the largest image observation is shown.

    The window is one of `halves` beside each other.
    """

    def __init__(self, server: ViserServer, session: Session, halves: int = 1) -> None:
        self.session, self.cameras = session, SceneCameras(server, halves)
        self.plans = Plans(server, session)
        model = session.recorder.scene
        self.scene = None if model is None else ViserScene(server, model)
        if model is not None:
            self.cameras.set(viewpoint(model, session))
        self._sent = session.now.frame.picture
        self.screen = None
        if self._sent is not None:
            self.screen = ImagePlane(server, self._sent.picture())
            self.cameras.set(self.screen.viewpoint())

    @property
    def empty(self) -> bool:
        return self.scene is None and self.screen is None

    def episode_started(self) -> None:
        """A new episode: bodies may have other shapes."""
        if self.scene is not None:
            self.scene.restyle()

    def follow(self, on: bool) -> None:
        if self.scene is not None:
            self.scene.follow = on

    def draw(self, share: float = 1.0) -> None:
        """Send the displayed step; with `share` below 1, interpolated from the step before."""
        if self.scene is not None and (poses := poses_at(self.session, share)) is not None:
            self.scene.show(*poses)
        picture = self.session.now.frame.picture
        if self.screen is not None and picture is not None and picture != self._sent:
            self.screen.show(picture.picture())
            self._sent = picture


def viewpoint(model: SceneModel, session: Session) -> Viewpoint:
    """That of the scene, from which the whole episode is seen where it is there already."""
    eye, moments = model.viewpoint(), session.episode.moments
    places = moving(moments, None) if eye.seen is not None and len(moments) > 1 else None
    if eye.seen is None or places is None:
        return eye
    return replace(eye, seen=np.concatenate([eye.seen, places]))


def poses_at(player: Session, share: float) -> tuple[Array, Array] | None:
    """Positions [N, 3] and quaternions [N, 4] between two steps; None without a scene."""
    moments = player.episode.moments
    at = min(player.at, len(moments) - 1)
    now, before = moments[at].frame, moments[max(at - 1, 0)].frame
    if now.places is None or now.turns is None:
        return None
    if share >= 1.0 or before.places is None or before.turns is None or player.at > at:
        return now.places, now.turns
    # q and -q are the same rotation: take the nearer one.
    sign = np.sign((now.turns * before.turns).sum(1, keepdims=True) + 1e-12)
    turns = share * sign * now.turns + (1 - share) * before.turns
    turns /= np.maximum(np.linalg.norm(turns, axis=1, keepdims=True), 1e-9)
    return share * now.places + (1 - share) * before.places, turns


class DragControls:
    """Mouse handlers on the meshes of `scene`, the scene of `player`."""

    def __init__(
        self, viewer: Controls, scene: ViserScene, player: Session, strength: Callable[[], float]
    ) -> None:
        self.viewer, self.scene, self.player, self.strength = viewer, scene, player, strength
        self.loose = {name for name in player.pushes.names if name != ROBOT}
        self.links = set(player.pushes.links())
        if self.loose or self.links:
            scene.on_mesh(self._attach)

    def _attach(self, body: int, mesh: MeshHandle) -> None:
        name = self.scene.bodies[body].partition("_")[2]
        if name in self.loose:
            self._draggable(body, name, mesh)
        elif name in self.links:
            self._clickable(name, mesh)

    def _draggable(self, body: int, name: str, mesh: MeshHandle) -> None:
        viewer, player = self.viewer, self.player

        # Runs in order on the server's thread, as viser requires for gestures.
        async def dragged(event: Any) -> None:
            shown = self.scene.place(body)
            if event.phase == "end" or shown is None:
                viewer.press(lambda: viewer.let_go(player))
                return
            way = np.subtract(event.end_position, event.start_position)
            place = shown + way
            viewer.press(lambda: viewer.hold(player, name, place))

        mesh.on_drag(dragged)

    def _clickable(self, name: str, mesh: MeshHandle) -> None:
        viewer, player = self.viewer, self.player

        async def clicked(event: Any) -> None:
            way = np.asarray(event.ray_direction, np.float64)
            viewer.press(lambda: viewer.shove(player, name, way, self.strength()))

        mesh.on_click(clicked)


CHOSEN, DRAWN, GONE = (213, 94, 0), (230, 159, 0), (0, 114, 178)


class Paths:
    def __init__(self, server: ViserServer) -> None:
        self.server = server
        self.shown: list[str] = []

    def show(self, lines: Mapping[str, tuple[Array, Any, float]]) -> None:
        """Draw `lines` (segments [N, 2, 3], colour, width in pixels) and remove all others."""
        for name in set(self.shown) - set(lines):
            self.server.scene.remove_by_name(name)
        for name, (points, colour, width) in lines.items():
            self.server.scene.add_line_segments(
                name, points, colour, thickness=width, thickness_units="screen"
            )
        self.shown = list(lines)


class Plans:
    """Paths of the tool in one scene: past, under the executed action chunk, and under chunks for
    other noise samples."""

    def __init__(self, server: ViserServer, session: Session) -> None:
        self.session, self.on = session, True
        self.paths = Paths(server)
        self._last: tuple[Any, ...] = ()

    @property
    def available(self) -> bool:
        plan_preview = self.session.plan_preview
        known = plan_preview is not None and plan_preview.tip is not None
        return known and self.session.recorder.scene is not None

    def draw(self) -> None:
        session = self.session
        now = (self.on, id(session.now), len(session.episode.moments))
        if now == self._last or not self.available:
            return
        self._last = now
        lines: dict[str, tuple[Array, Any, float]] = {}
        ahead = session.plan_paths() if self.on else []
        if ahead:
            lines[f"{ROOT}/plan"] = segments(ahead[:1]), CHOSEN, 5.0
        if len(ahead) > 1:
            lines[f"{ROOT}/draws"] = segments(ahead[1:]), DRAWN, 2.0
        trail = session.trail() if self.on else None
        if trail is not None and session.at > 0:
            lines[f"{ROOT}/trail"] = segments([trail[: session.at + 1]]), GONE, 2.5
        self.paths.show(lines)


def segments(paths: list[Array]) -> Array:
    pairs = [np.stack([path[:-1], path[1:]], 1) for path in paths]
    return np.concatenate(pairs).astype(np.float32)


class Checkpoints:
    """The run's evaluations over training, its checkpoints on the curve, the current one marked."""

    def __init__(self, server: ViserServer, run: Run, pick: Callable[[str], None]) -> None:
        self.run, self.pick = run, pick
        self.names = [label(folder) for folder in run.checkpoints]
        self.steps = [
            int(folder.name) if folder.name.isdecimal() else 0 for folder in run.checkpoints
        ]
        self.history = history_of(run.folder)
        self.plot: Any = None
        if self.history is not None:
            self.plot = self._made(server, self.history)

    def show(self, chosen: str) -> None:
        if self.plot is None or self.history is None:
            return
        data = self._data(self.history, chosen)
        if any(
            not np.array_equal(a, b, equal_nan=True)
            for a, b in zip(data, self.plot.data, strict=True)
        ):
            self.plot.data = data

    def words(self, chosen: str) -> str:
        if self.history is None or chosen not in self.names:
            return ""
        step = self.steps[self.names.index(chosen)]
        value = self.history.at(step)
        rate = self.history.measure.endswith("success")
        shown = f"**{value:.0%}**" if rate else f"**{value:.3g}**"
        if rate and step in self.history.steps:
            row = [*self.history.steps].index(step)
            shown += f" [{self.history.low[row]:.0%}, {self.history.high[row]:.0%}]"
        return f"{self.history.measure.replace('/', ' ')} at {step:,}: {shown}"

    def move(self, chosen: str, by: int) -> None:
        at = self.names.index(chosen) if chosen in self.names else len(self.names)
        self.pick(self.names[min(max(at + by, 0), len(self.names) - 1)])

    def _data(self, history: History, chosen: str) -> tuple[Array, ...]:
        """Steps, the curve, its interval, and the marks, NaN elsewhere."""
        steps = np.array(sorted({*history.steps, *self.steps}), np.float64)
        curves = [
            np.interp(steps, history.steps, part)
            for part in (history.values, history.low, history.high)
        ]
        marks = np.where(np.isin(steps, self.steps), curves[0], np.nan)
        mine = self.steps[self.names.index(chosen)] if chosen in self.names else -1
        return steps, *curves, marks, np.where(steps == mine, curves[0], np.nan)

    def _made(self, server: ViserServer, history: History) -> Any:
        title = history.measure.replace("/", " ")
        line = uplot.Series(label=title, stroke=COLOURS[0], width=1.5, points=_points(False))
        edge = [
            uplot.Series(label=f"95% {end}", stroke="#9ab6de", width=1.0, points=_points(False))
            for end in ("low", "high")
        ]
        marks = uplot.Series(
            label="checkpoints", stroke=COLOURS[0], width=0, points=_points(True, 5)
        )
        mine = uplot.Series(label="current", stroke="#b85c00", width=0, points=_points(True, 11))
        y = uplot.Scale(auto=False, range=_ends(history))
        return server.gui.add_uplot(
            self._data(history, ""),
            (uplot.Series(label="step"), line, *edge, marks, mine),
            title=f"{title} over training",
            height=150,
            scales={"x": uplot.Scale(time=False), "y": y},
            legend=uplot.Legend(show=False),
            padding=(10, 24, 0, 0),
        )


def _ends(history: History) -> tuple[float, float]:
    """The vertical range of a history. One that the plot finds by itself is empty where a series,
    as the checkpoint that acts, has no number."""
    if history.measure.endswith("success"):
        return -0.03, 1.03
    low, high = min(history.low), max(history.high)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def _points(show: bool, size: float = 0) -> uplot.Series_Points:
    return uplot.Series_Points(show=show, size=size) if size else uplot.Series_Points(show=show)
