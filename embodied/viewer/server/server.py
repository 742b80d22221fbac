"""Door: viser's server on this machine only, and the guard in front of it."""

from __future__ import annotations

import contextlib
import io
import logging
import secrets
import socket

from viser import GuiMarkdownHandle, ViserServer
from viser._messages import ShareUrlRequest

from embodied.viewer.server.auth_proxy import HOST, LOCAL, Guard
from embodied.viewer.server.viser_event_fix import hang

ANYWHERE = ("0.0.0.0", "::")


class Door:
    """`server` is what pages are made on; others reach it at `url`, through `guard`.

    It is open before there is anything to see: until then the page shows what `say` was told.
    """

    def __init__(self, host: str = HOST, port: int = 8080) -> None:
        # Browsers open connections that they do not use, each of which would be a traceback.
        logging.getLogger("websockets.server").setLevel(logging.CRITICAL)
        with contextlib.redirect_stdout(io.StringIO()):
            self.server = ViserServer(HOST, 0, label="embodied", verbose=False)
        hang(self.server)
        # The page could otherwise ask for a tunnel that shows it to the whole internet.
        self.server._websock_server.unregister_handler(ShareUrlRequest)
        self.server.gui.configure_theme(
            show_logo=False,
            show_share_button=False,
            control_width="large",
            brand_color=(37, 99, 235),
        )
        self.server.gui.main_panel.dock_right()
        self._said: GuiMarkdownHandle | None = None
        token = None if host in LOCAL else secrets.token_urlsafe(16)
        self.guard = Guard(host, port, self.server.get_port(), token)

    @property
    def url(self) -> str:
        """The address to open; off this machine, with this machine's name in place of `host`."""
        token = "" if self.guard.token is None else f"/?token={self.guard.token}"
        name = socket.gethostname() if self.guard.host in ANYWHERE else self.guard.host
        return f"http://{name}:{self.guard.port}{token}"

    def say(self, words: str) -> None:
        """Show what is being done, while there is no page yet."""
        if self._said is None:
            self._said = self.server.gui.add_markdown("")
        self._said.content = f"**Loading** · {words} ..."

    def ready(self) -> None:
        """The page is there."""
        if self._said is not None:
            self._said.remove()
            self._said = None

    def close(self) -> None:
        """Let nobody in any more; safe to call twice."""
        self.guard.close()
        # The server announces its end on the terminal, whatever it was told.
        with contextlib.redirect_stdout(io.StringIO()):
            self.server.stop()
