"""The observation panel: environment description, images, point clouds, plots of observations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from viser import GuiImageHandle, PointCloudHandle, ViserServer

from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.viewer.panels.plots import ObservationPlot
from embodied.viewer.panels.saliency import SaliencyPanel
from embodied.viewer.scene.images import cloud_of, is_cloud, is_picture, picture_of
from embodied.viewer.session.session import Session

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

    With `wide` it takes the place of the main view, which is empty.
    """

    def __init__(self, server: ViserServer, session: Session, wide: bool) -> None:
        self.server, self.session = server, session
        leaves = session.spec.obs
        self.images: dict[str, GuiImageHandle] = {}
        self.clouds: dict[str, PointCloudHandle] = {}
        self.points = [name for name, leaf in leaves.items() if is_cloud(name, leaf)]
        panel = server.gui.add_panel()
        with panel.add_tab("Environment"):
            self.text = server.gui.add_markdown("")
            blank = np.zeros((2, 2, 3), np.uint8)
            for name, leaf in leaves.items():
                if is_picture(leaf) and name not in self.points:
                    self.images[name] = server.gui.add_image(blank, label=name)
            self.saliency_panel = SaliencyPanel(server, session)
            with server.gui.add_folder(
                "Observations", expand_by_default=wide, visible=bool(session.curves)
            ):
                self.obs_plots = [
                    ObservationPlot(server, name, leaves[name], session.spec.dt)
                    for name in session.curves[:PLOTTED]
                ]
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
        """Images and point clouds."""
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
        """Saliency of the policy's images."""
        self.saliency_panel.draw()

    def plots(self) -> None:
        """Curves of the running episode."""
        for each in self.obs_plots:
            each.draw(self.session.episode)


def readout(leaves: Mapping[str, Leaf], shown: Tensors) -> str:
    """A line per observation: name, shape, and its numbers or their range."""
    lines = []
    for name, leaf in leaves.items():
        row = shown[name][0].reshape(-1).float()
        if leaf.size <= LISTED:
            text = " ".join(f"{number:.3g}" for number in row.tolist())
        else:
            text = f"{row.min():.3g} to {row.max():.3g}, mean {row.mean():.3g}"
        lines.append(f"**{name}** {list(leaf.shape)} {text}")
    return "\n".join(lines)
