"""RobotViewer: the monitoring page of a robot deployment."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from embodied.viewer.robot.monitor import RobotMonitor
from embodied.viewer.robot.page import RobotPage
from embodied.viewer.server.auth_proxy import HOST
from embodied.viewer.server.page_thread import PageThread, run_page
from embodied.viewer.server.server import PageServer

POLL, POLL_IDLE = 1 / 25, 0.2  # s between two polls, with and without an open page
QUERY = 0.5  # s between two status requests to the daemon


class RobotViewer(PageThread):
    """Monitors the deployment in `folder` (None: the only one in a default folder), and its
    successors, from a thread; read-only."""

    def __init__(
        self,
        folder: Path | None,
        port: int = 8080,
        host: str = HOST,
        page_server: PageServer | None = None,
    ) -> None:
        super().__init__(PageServer(host, port) if page_server is None else page_server)
        self.monitor = RobotMonitor(folder)
        self._number, self._query_at = 0, 0.0
        self.start()

    def refresh(self) -> None:
        """Poll, and send everything that the page does not show yet."""
        self.call(lambda: self._update(force=True))

    def words(self) -> str:
        """All text of the page."""
        text: list[str] = []
        self.call(lambda: text.append(self.page.words()))
        return text[0]

    def setup(self) -> None:
        # The other cores are for the deployment.
        torch.set_num_threads(1)
        self.page = RobotPage(self.server, self.monitor)
        self._update(force=True)

    def run_loop(self) -> None:
        while not self.closing:
            self.run_commands(POLL if self.server.get_clients() else POLL_IDLE)
            self._update()

    def teardown(self) -> None:
        self.monitor.close()

    def _update(self, force: bool = False) -> None:
        new, now = self.monitor.poll(), time.monotonic()
        if force or now >= self._query_at:
            self._query_at = now + QUERY
            self.monitor.query_daemon()
        if self.monitor.number != self._number:
            self._number = self.monitor.number
            self.page.show_deployment()
        if new:
            self.page.add()
        self.page.changed()
        self.page.refresh(force)


def monitor(
    folder: Path | None = None, port: int = 8080, host: str = HOST, block: bool = True
) -> RobotViewer:
    """Open the monitoring page for the deployment in `folder` (None: the only one in the default
    folders of `embodied deploy`), running or not yet started. `port`, `host` and `block` as in
    `serve`. Raises ViewerError; FolderError where several run."""
    from embodied.real_robot.daemon.server import find
    from embodied.viewer.launch import require_port, require_viser

    require_port(port, host)
    require_viser()
    place = find() if folder is None else folder
    page_server = PageServer(host, port)
    print(f"monitoring {place} at {page_server.url} (Ctrl-C ends it, not the robot)", flush=True)
    return run_page(
        page_server, lambda page_server: RobotViewer(folder, page_server=page_server), block
    )
