"""Names of observations; plain Python, for this process and for workers."""

from __future__ import annotations

CRITIC_ONLY = ("privileged", "critic")
"""Simulators mark observations for critics so, for example `privileged_state` (Playground)."""


def flat_name(path: tuple[str, ...], alone: str) -> str:
    """The name of a leaf of nested observations; `alone` where there is no path.

    A first part that marks the leaf for critics becomes the prefix that hides it from policies:
    `privileged_state` is `privileged/state`, `critic` is `critic/state`.
    """
    if not path:
        return alone
    name = "/".join(path)
    for mark in CRITIC_ONLY:
        if name == mark:
            return f"{mark}/state"
        if name.startswith(f"{mark}_"):
            return f"{mark}/{name.removeprefix(f'{mark}_')}"
    return name
