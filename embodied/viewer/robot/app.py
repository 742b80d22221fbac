"""A page that watches a deployment, for as many of them as come one after the other."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from embodied.viewer.robot.monitor import Deployed
from embodied.viewer.robot.page import DeployedPage
from embodied.viewer.server.auth_proxy import HOST
from embodied.viewer.server.page_thread import Served, shown
from embodied.viewer.server.server import Door

LOOK, ALONE = 1 / 25, 0.2  # s between two looks; where no page is open
INQUIRE = 0.5  # s between two questions to the daemon


class DeployedViewer(Served):
    """Watches the deployment in `folder`, from a thread of its own; nothing there is touched."""

    def __init__(
        self, folder: Path, port: int = 8080, host: str = HOST, door: Door | None = None
    ) -> None:
        super().__init__(Door(host, port) if door is None else door)
        self.seen = Deployed(folder)
        self._number, self._inquire_at = 0, 0.0
        self.start()

    def refresh(self) -> None:
        """Look, and send everything that the page does not show yet."""
        self.do(lambda: self._turn(force=True))

    def words(self) -> str:
        """All that the page says."""
        said: list[str] = []
        self.do(lambda: said.append(self.page.words()))
        return said[0]

    def begin(self) -> None:
        # What is watched has the other processors.
        torch.set_num_threads(1)
        self.page = DeployedPage(self.server, self.seen)
        self._turn(force=True)

    def serve(self) -> None:
        while not self.closing:
            self.obey(LOOK if self.server.get_clients() else ALONE)
            self._turn()

    def end(self) -> None:
        self.seen.close()

    def _turn(self, force: bool = False) -> None:
        new, now = self.seen.look(), time.monotonic()
        if force or now >= self._inquire_at:
            self._inquire_at = now + INQUIRE
            self.seen.inquire()
        if self.seen.number != self._number:
            self._number = self.seen.number
            self.page.begin()
        if new:
            self.page.add()
        self.page.changed()
        self.page.refresh(force)


def watch(
    folder: Path | None = None, port: int = 8080, host: str = HOST, block: bool = True
) -> DeployedViewer:
    """Open the page on the deployment in `folder` (None: where `embodied deploy` puts one), whether
    one is at work already or not. `port`, `host` and `block` as in `serve`. ViewerError."""
    from embodied.viewer.launch import require_port, require_viser
    from real_robot.daemon.client import default_folder

    require_port(port, host)
    require_viser()
    place = default_folder() if folder is None else folder
    door = Door(host, port)
    print(f"watching {place} at {door.url} (Ctrl-C ends it, not the robot)", flush=True)
    return shown(door, lambda door: DeployedViewer(place, door=door), block)
