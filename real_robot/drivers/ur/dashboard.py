"""A UR's dashboard: one line asked, one answered."""

from __future__ import annotations

import socket


def ask_dashboard(wire: socket.socket, words: str, patience: float) -> str:
    """The dashboard server's answer to `words`, on a connection of its own. OSError."""
    with wire, wire.makefile("rw", newline="\n") as lines:
        wire.settimeout(patience)
        lines.readline()  # it says who it is
        lines.write(words + "\n")
        lines.flush()
        return lines.readline().strip()
