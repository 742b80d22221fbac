"""What the world shows and says, left in the page: words, its camera, and every observation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from viser import GuiImageHandle, PointCloudHandle, ViserServer

from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.viewer.panels.plots import Observed
from embodied.viewer.panels.saliency import HeatPanel
from embodied.viewer.scene.images import cloud_of, is_cloud, is_picture, picture_of
from embodied.viewer.session.session import Session

LONG = 1500
"""Letters of a description that are shown."""
READ = 24
"""Numbers that are read out one by one."""
PLOTTED = 6
"""Observations that get a plot, the first ones."""
WIDE, NARROW = 560, 280
CLOUDS = "/world/clouds"


class Sights:
    """The left panel; `words`, `pictures` and `plots` each send what is now.

    With `alone` there is nothing else to look at, and the panel is wide.
    """

    def __init__(self, server: ViserServer, session: Session, alone: bool) -> None:
        self.server, self.session = server, session
        leaves = session.spec.obs
        self.images: dict[str, GuiImageHandle] = {}
        self.clouds: dict[str, PointCloudHandle] = {}
        self.points = [name for name, leaf in leaves.items() if is_cloud(name, leaf)]
        panel = server.gui.add_panel()
        with panel.add_tab("World"):
            self.text = server.gui.add_markdown("")
            blank = np.zeros((2, 2, 3), np.uint8)
            for name, leaf in leaves.items():
                if is_picture(leaf) and name not in self.points:
                    self.images[name] = server.gui.add_image(blank, label=name)
            self.heat = HeatPanel(server, session)
            with server.gui.add_folder(
                "Observations", expand_by_default=alone, visible=bool(session.curves)
            ):
                self.observed = [
                    Observed(server, name, leaves[name], session.spec.dt)
                    for name in session.curves[:PLOTTED]
                ]
        panel.dock_left()
        panel.set_width(WIDE if alone else NARROW)

    def words(self) -> None:
        """The world's own description, else the numbers of what it shows."""
        now = self.session.now
        said = now.sight.words
        if not said:
            said = readout(self.session.spec.obs, now.shown)
        said = said if len(said) <= LONG else f"{said[:LONG]} ..."
        self.text.content = said.replace("\n", "  \n")

    def pictures(self) -> None:
        """Images and clouds of points."""
        leaves = self.session.spec.obs
        for name, handle in self.images.items():
            handle.image = picture_of(self.session.now.shown[name][0], leaves[name])
        for name in self.points:
            self._cloud(name)

    def saliency(self) -> None:
        """What the decision hangs on."""
        self.heat.draw()

    def plots(self) -> None:
        """Curves of the running episode."""
        for observed in self.observed:
            observed.draw(self.session.episode)

    def _cloud(self, name: str) -> None:
        places, colours = cloud_of(self.session.now.shown[name][0])
        if name in self.clouds:
            self.clouds[name].points, self.clouds[name].colors = places, colours
            return
        self.clouds[name] = self.server.scene.add_point_cloud(
            f"{CLOUDS}/{name.replace('/', '.')}", places, colours, point_size=0.004
        )


def readout(leaves: Mapping[str, Leaf], shown: Tensors) -> str:
    """A line for each observation: name, shape, and its first numbers or its range."""
    lines = []
    for name, leaf in leaves.items():
        row = shown[name][0].reshape(-1).float()
        if leaf.size <= READ:
            said = " ".join(f"{number:.3g}" for number in row.tolist())
        else:
            said = f"{row.min():.3g} to {row.max():.3g}, mean {row.mean():.3g}"
        lines.append(f"**{name}** {list(leaf.shape)} {said}")
    return "\n".join(lines)
