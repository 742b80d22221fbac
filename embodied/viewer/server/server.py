"""PageServer: viser's server, on this machine only, behind the authenticating proxy."""

from __future__ import annotations

import contextlib
import io
import logging
import secrets
import socket

from viser import GuiMarkdownHandle, ViserServer
from viser._messages import ShareUrlRequest

from embodied.viewer.server.auth_proxy import HOST, LOCAL, AuthProxy
from embodied.viewer.server.viser_event_fix import patch_message_events

ANYWHERE = ("0.0.0.0", "::")


class PageServer:
    """`server` is the viser server that pages are built on; browsers reach it at `url`, through
    `proxy`.

    It accepts connections before the viewer is loaded; until then the page shows `show_loading`'s
    text.
    """

    def __init__(self, host: str = HOST, port: int = 8080) -> None:
        # Browsers open connections that they do not use; each would log a traceback.
        logging.getLogger("websockets.server").setLevel(logging.CRITICAL)
        with contextlib.redirect_stdout(io.StringIO()):
            self.server = ViserServer(HOST, 0, label="embodied", verbose=False)
        patch_message_events(self.server)
        # Otherwise the page could request a public share URL.
        self.server._websock_server.unregister_handler(ShareUrlRequest)
        self.server.gui.configure_theme(
            show_logo=False,
            show_share_button=False,
            control_width="large",
            brand_color=(37, 99, 235),
        )
        self.server.gui.main_panel.dock_right()
        self._loading: GuiMarkdownHandle | None = None
        token = None if host in LOCAL else secrets.token_urlsafe(16)
        self.proxy = AuthProxy(host, port, self.server.get_port(), token)

    @property
    def url(self) -> str:
        """The address to open; for all interfaces, with this machine's host name."""
        token = "" if self.proxy.token is None else f"/?token={self.proxy.token}"
        name = socket.gethostname() if self.proxy.host in ANYWHERE else self.proxy.host
        return f"http://{name}:{self.proxy.port}{token}"

    def show_loading(self, words: str) -> None:
        """Show what is being loaded."""
        if self._loading is None:
            self._loading = self.server.gui.add_markdown("")
        self._loading.content = f"**Loading** · {words} ..."

    def clear_loading(self) -> None:
        """Remove the loading message."""
        if self._loading is not None:
            self._loading.remove()
            self._loading = None

    def close(self) -> None:
        """Stop serving; safe to call twice."""
        self.proxy.close()
        # The server prints when it stops, even if it is not verbose.
        with contextlib.redirect_stdout(io.StringIO()):
            self.server.stop()
