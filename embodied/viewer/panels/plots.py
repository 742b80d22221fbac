"""Plots of the running episode: rewards, actions, observations, values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from viser import GuiImageHandle, GuiUplotHandle, PointCloudHandle, ViserServer, uplot

from embodied.core.actor import Actor
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.viewer.scene.types import cloud_of, is_cloud, is_picture, picture_of
from embodied.viewer.session.episode import CURVES, IMAGINED, MOVED, SAFETY, TERM, Episode
from embodied.viewer.session.overlays import heated, pictures_of, saliency
from embodied.viewer.session.session import Session

POINTS = 400
"""Points per curve."""
NAMED = 24
"""Largest number of discrete actions whose names fit on the axis."""
COLOURS = (
    "#2563eb", "#dc2626", "#16a34a", "#d97706", "#9333ea", "#0891b2", "#db2777", "#65a30d",
)  # fmt: skip
GROUPED = {
    TERM: ("reward terms, stacked", True),
    SAFETY: ("safety: ticks changed per step, stacked", True),
    MOVED: ("target change, largest joint (rad)", False),
    IMAGINED: ("imagined by the model, beside real", False),
}
"""Name prefixes of numbers that share a plot: its title, and whether they are stacked."""
Range = tuple[float, float]


class Plots:
    """Reward and actions over the time of the episode."""

    def __init__(self, server: ViserServer, spec: Spec) -> None:
        act, self.dt = spec.act, spec.dt
        self.range: Range = (-0.05, 1.05)
        self.rewards = plot(server, "reward", ["reward"], 130, self.range)
        bounds, named = (-1.05, 1.05), tuple[str, ...]()
        if is_discrete(act) and isinstance(act.high, int | float):
            bounds, named = (-0.5, act.high + 0.5), act.names[:NAMED]
        elif act.classes:
            bounds = (-1.05, max(act.classes) - 0.95)
        height = max(160, 50 + 17 * len(named))
        self.actions = plot(
            server, titled("action", act), curve_names("action", act), height, bounds, named
        )

    def draw(self, episode: Episode) -> None:
        rewards = np.array(episode.rewards or [0.0], np.float64)
        wanted = reward_range(rewards)
        if wanted != self.range:
            self.range, self.rewards.scales = wanted, _scales(wanted)
        self.rewards.data = curves(rewards[:, None], self.dt)
        self.actions.data = curves(episode.actions or [[0.0] * len(self.actions.data[1:])], self.dt)


class ValuePlots:
    """Further numbers of each step: stacked reward components, the critic's value, safety."""

    def __init__(self, server: ViserServer, dt: float) -> None:
        self.server, self.dt = server, dt
        self.folder = server.gui.add_folder("ValuePlots", visible=False)
        self.plots: dict[str, tuple[GuiUplotHandle, list[str]]] = {}

    def draw(self, episode: Episode) -> None:
        """Send the curves of `episode`; a plot is made when there is first something to show."""
        for title, (members, stacked) in groups_of(episode.number_names).items():
            if self.plots.get(title, (None, []))[1] != members:
                self.folder.visible = True
                if title in self.plots:
                    self.plots[title][0].remove()
                with self.folder:
                    shown = [name.partition("/")[2] or name for name in members][:CURVES]
                    self.plots[title] = plot(self.server, title, shown, 150, None), members
            rows = np.array(
                [
                    [moment.numbers.get(name, np.nan) for name in members]
                    for moment in episode.actions_taken
                ]
            )
            self.plots[title][0].data = curves(np.cumsum(rows, 1) if stacked else rows, self.dt)


def groups_of(names: Sequence[str]) -> dict[str, tuple[list[str], bool]]:
    """Plots of the numbers `names`: title, members, and whether they are stacked."""
    found: dict[str, tuple[list[str], bool]] = {}
    for name in names:
        begins = next((prefix for prefix in GROUPED if name.startswith(prefix)), None)
        title, stacked = (name, False) if begins is None else GROUPED[begins]
        found.setdefault(title, ([], stacked))[0].append(name)
    return found


def is_discrete(act: Leaf) -> bool:
    return act.dtype == "int64" and not act.shape


def titled(name: str, leaf: Leaf) -> str:
    unit = f" ({leaf.unit})" if leaf.unit else ""
    return f"{name}{unit}" if leaf.size <= CURVES else f"{name}: first {CURVES} of {leaf.size}"


def curve_names(name: str, leaf: Leaf) -> list[str]:
    """One name per curve; a single discrete number has one curve, named after the observation."""
    count = min(leaf.size, CURVES)
    if len(leaf.names) == leaf.size:
        return [*leaf.names[:count]]
    return [name] if leaf.size == 1 else [f"{name} {i}" for i in range(count)]


def curves(rows: Sequence[Sequence[float]] | NDArray[Any], dt: float) -> tuple[NDArray[Any], ...]:
    """Time (s) of each of `rows` [T, K] and the K curves, thinned to POINTS."""
    kept = thinned(len(rows))
    values = np.array([rows[row][:CURVES] for row in kept], np.float64)
    return (np.asarray((kept + 1) * dt, np.float64), *values.T.copy())


def reward_range(rewards: NDArray[np.float64]) -> Range:
    """Ends of the reward axis: zero and all rewards, rounded to powers of two so that it rarely
    changes."""
    low, high = min(float(rewards.min()), 0.0), max(float(rewards.max()), 0.0)
    if low == high:
        return -0.05, 1.05
    size = float(2.0 ** np.ceil(np.log2(high - low)))
    return (-1.05 if low < 0 else -0.05) * size, (1.05 if high > 0 else 0.05) * size


def thinned(count: int) -> NDArray[np.intp]:
    """At most POINTS indices of `count`, evenly spread, with the first and the last."""
    if count <= POINTS:
        return np.arange(count)
    return np.round(np.linspace(0, count - 1, POINTS)).astype(np.intp)


def _scales(ends: Range | None) -> dict[str, uplot.Scale]:
    y = uplot.Scale(auto=True) if ends is None else uplot.Scale(auto=False, range=ends)
    return {"x": uplot.Scale(time=False), "y": y}


def plot(
    server: ViserServer,
    title: str,
    names: Sequence[str],
    height: int,
    ends: Range | None,
    values: tuple[str, ...] = (),
) -> GuiUplotHandle:
    """A plot of the curves `names`; `values` are names instead of numbers on the value axis."""
    lines = [
        uplot.Series(
            label=name,
            stroke=COLOURS[index % len(COLOURS)],
            width=1.5,
            points=uplot.Series_Points(show=False),
        )
        for index, name in enumerate(names)
    ]
    axes = None
    if values:
        places = tuple(float(i) for i in range(len(values)))
        width = 20.0 + 6.5 * max(len(value) for value in values)
        axes = uplot.Axis(), uplot.Axis(splits=places, values=values, size=width)
    return server.gui.add_uplot(
        (np.zeros(1),) * (len(names) + 1),
        (uplot.Series(label="s"), *lines),
        title=title,
        height=height,
        scales=_scales(ends),
        axes=axes,
        legend=uplot.Legend(show=True),
        padding=(10, 24, 0, 0),
    )


class SaliencyPanel:
    """A switch, visible if the policy uses images. While it is on, an image per camera is shown: as
    it was at the running decision, orange where patches matter most."""

    def __init__(self, server: ViserServer, session: Session) -> None:
        self.session = session
        self.switch = server.gui.add_checkbox(
            "Saliency",
            False,
            hint="image patches that change the action most (occlusion; slow)",
            visible=False,
        )
        blank = np.zeros((2, 2, 3), np.uint8)
        names = [name for name, leaf in session.spec.obs.items() if leaf.is_image]
        self.images: dict[str, GuiImageHandle] = {
            name: server.gui.add_image(blank, label=name, visible=False) for name in names
        }
        self._last: tuple[Any, ...] = ()

    def draw(self) -> None:
        """Of the decision that is executed at the displayed step."""
        session = self.session
        number, moments = session.decision_index, session.episode.moments
        policy_state = None if number is None else moments[number].policy_state
        if policy_state is not None and policy_state.name != session.chosen:
            number = None  # the decision of another policy
        acting = session.made[session.chosen]
        policy = acting.policy if isinstance(acting, Actor) else None
        seen = [] if policy is None else pictures_of(policy)
        self.switch.visible = bool(seen)
        now = (self.switch.value, number, id(policy), id(moments[0]))
        if now == self._last:
            return
        self._last = now
        shown = policy is not None and self.switch.value and number is not None
        for name, image in self.images.items():
            image.visible = shown and name in seen
        if policy is None or number is None or not shown:
            return
        before, after = moments[number - 1 : number + 1]
        found = saliency(policy, before, after)
        most = max(float(change.max()) for change in found.values())
        for name, change in found.items():
            leaf = session.spec.obs[name]
            self.images[name].image = heated(before.obs[name][0], leaf, change, most)
            peak = float(change.max())
            self.images[name].label = f"{name}: a grey patch moves the action by up to {peak:.2g}"


MAX_TEXT = 1500
"""Characters of a description that are shown."""
LISTED = 24
"""Largest observation whose numbers are listed one by one."""
PLOTTED = 6
"""How many observations are plotted, the first ones."""
WIDE, NARROW = 560, 280
CLOUDS = "/world/clouds"


class ObservationPanel:
    """The left panel; `words`, `pictures` and `plots` each send the displayed step.

    With `wide` it takes the place of the main view, which is empty; with `folded` it is a closed
    folder of the controls.
    """

    def __init__(
        self, server: ViserServer, session: Session, wide: bool, folded: bool = False
    ) -> None:
        self.server, self.session = server, session
        leaves = session.spec.obs
        self.images: dict[str, GuiImageHandle] = {}
        self.clouds: dict[str, PointCloudHandle] = {}
        self.points = [name for name, leaf in leaves.items() if is_cloud(name, leaf)]
        panel = None if folded else server.gui.add_panel()
        with (
            server.gui.add_folder("Environment", expand_by_default=False)
            if panel is None
            else panel.add_tab("Environment")
        ):
            self.text = server.gui.add_markdown("")
            blank = np.zeros((2, 2, 3), np.uint8)
            for name, leaf in leaves.items():
                if is_picture(leaf) and name not in self.points:
                    self.images[name] = server.gui.add_image(blank, label=name)
            self.saliency_panel = SaliencyPanel(server, session)
            with server.gui.add_folder(
                "Observations", expand_by_default=wide, visible=bool(session.curves)
            ):
                self.obs_plots = {  # the elements of each over time, at their own scale
                    name: plot(server, titled(name, leaf), curve_names(name, leaf), 150, None)
                    for name, leaf in leaves.items()
                    if name in session.curves[:PLOTTED]
                }
        if panel is not None:
            panel.dock_left()
            panel.set_width(WIDE if wide else NARROW)

    def words(self) -> None:
        """The environment's description, else the observations as numbers."""
        now = self.session.now
        text = now.frame.words
        if not text:
            text = readout(self.session.spec.obs, now.next_obs)
        text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."
        self.text.content = text.replace("\n", "  \n")

    def pictures(self) -> None:
        leaves = self.session.spec.obs
        for name, handle in self.images.items():
            handle.image = picture_of(self.session.now.next_obs[name][0], leaves[name])
        for name in self.points:
            places, colours = cloud_of(self.session.now.next_obs[name][0])
            if name in self.clouds:
                self.clouds[name].points, self.clouds[name].colors = places, colours
            else:
                self.clouds[name] = self.server.scene.add_point_cloud(
                    f"{CLOUDS}/{name.replace('/', '.')}", places, colours, point_size=0.004
                )

    def saliency(self) -> None:
        self.saliency_panel.draw()

    def plots(self) -> None:
        for name, handle in self.obs_plots.items():
            seen = self.session.episode.obs_curve(name)
            handle.data = curves(seen or [[0.0] * len(handle.data[1:])], self.session.spec.dt)


def readout(leaves: Mapping[str, Leaf], shown: Tensors) -> str:
    lines = []
    for name, leaf in leaves.items():
        row = shown[name][0].reshape(-1).float()
        if leaf.size <= LISTED:
            text = " ".join(f"{number:.3g}" for number in row.tolist())
        else:
            text = f"{row.min():.3g} to {row.max():.3g}, mean {row.mean():.3g}"
        lines.append(f"**{name}** {list(leaf.shape)} {text}")
    return "\n".join(lines)
