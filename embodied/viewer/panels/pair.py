"""Two policies beside each other: viser draws one scene per server, so that the second one has a
server of its own, whose page is a frame in the first one's."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from embodied.viewer.panels.main_view import MainView
from embodied.viewer.server.server import PageServer
from embodied.viewer.session.episode import success_by
from embodied.viewer.session.session import Session

STYLE = f"<style>{Path(__file__).with_name('pair.css').read_text()}</style>"
BARE = (
    "<style>.mantine-Paper-root, .mantine-Notifications-root { display: none !important; }</style>"
)
FRAME = """<img src="data:," alt="" hidden onerror="
if (!document.getElementById('half')) {
  const frame = document.createElement('iframe');
  frame.id = 'half';
  frame.title = 'the second policy';
  frame.src = `//${location.hostname}ADDRESS`;
  document.body.append(frame);
}">"""
"""A script element would not run in inserted HTML. The frame is outside of the controls, with which
it would be hidden and loaded again."""


class Half:
    """The right half of the page: the scene of `other`, without controls. It is served at the next
    free port, with the token of the page."""

    def __init__(self, page_server: PageServer, first: MainView, other: Session) -> None:
        beside = page_server.beside()
        self.server = beside.server
        self.server.gui.main_panel.float()
        self.server.gui.add_html(BARE)
        self.view = MainView(self.server, other, halves=2)
        first.cameras.mate, self.view.cameras.mate = self.view.cameras, first.cameras
        gui = page_server.server.gui
        gui.main_panel.dock_left()
        gui.add_html(STYLE + FRAME.replace("ADDRESS", beside.address))
        self.captions = gui.add_html("")

    def show(self, sessions: Sequence[Session]) -> None:
        """Name, return and success of both episodes, up to the displayed step."""
        pairs = zip(("first", "second"), sessions, strict=True)
        self.captions.content = "".join(caption(each, place) for place, each in pairs)


def caption(session: Session, place: str) -> str:
    past = session.episode.moments[: session.at + 1]
    success = success_by(past)
    kind, words = {None: ("", "success unknown"), True: ("yes", "success")}.get(
        success, ("no", "failed") if past[-1].end else ("", "running")
    )
    name = escape(session.name or session.chosen)
    total = sum(moment.reward for moment in past)
    return (
        f'<div class="caption {place}"><strong>{name}</strong>'
        f'return <b>{total:.3g}</b> · <b class="{kind}">{words}</b></div>'
    )
