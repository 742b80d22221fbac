"""Viewer: the page of a session, and the thread that owns both."""

from __future__ import annotations

from embodied.viewer.controls import Controls
from embodied.viewer.panels.page import Page


class Viewer(Controls):
    """The page and its session.

    The page is reachable from this machine only, unless `host` is another address; then it requires
    the token in `url`. `page_server` is a server that is already open, if any.
    """

    def setup(self) -> None:
        super().setup()
        self.page = Page(self.server, self)
        self.page.refresh(force=True)
