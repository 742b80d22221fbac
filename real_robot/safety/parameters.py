"""Safety parameters of a deployment: their checksum, and what changed since the session before.

Everything that a deployment sets counts, unless it is in `OTHERS`: a setting that is added later is
a safety parameter until it is listed there. Files that settings name (an arm's
kinematics or capsules) count with their content; addresses of robots do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from embodied.core.atomic_write import write_json
from embodied.real_robot.deployment import Deployment

VERSION = 1  # version of what is counted; checksums of other versions cannot be compared
FILE = "safety.json"
MOST_NAMES = 8
OTHERS = frozenset(
    {
        *("policy", "served", "sensed", "outside", "given", "goal_within", "robot", "chunks"),
        *("home", "home_width", "retreat", "blend", "grace", "spin", "dry", "onboard", "emulator"),
        *("records", "recording", "images", "picture", "cameras", "filmed", "seconds", "keep"),
        *("metrics", "remote", "allow"),
    }
)
"""Settings of a deployment that limit nothing."""
ADDRESSES = frozenset({"host", "port", "uri", "device", "senses", "more"})
"""Settings that differ from session to session where a robot is emulated."""


def acting(deployment: Deployment) -> dict[str, Any]:
    """The safety parameters by their dotted names, as JSON can say them."""
    settings = {k: v for k, v in asdict(deployment).items() if k not in OTHERS}
    found = dict(_leaves(json.loads(json.dumps(settings)), ""))
    for name, value in list(found.items()):
        if isinstance(value, str) and Path(value).is_file():
            found[f"{name} (content)"] = _digest(Path(value).read_bytes())
    return found


def _leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    """Dotted names and values of all numbers, texts and lists of them."""
    if not isinstance(value, Mapping):
        return [(name, value)]
    items = cast(Mapping[str, Any], value).items()
    found: list[tuple[str, Any]] = []
    for key, each in items:
        if key not in ADDRESSES:
            found += _leaves(each, f"{name}.{key}" if name else key)
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def checksum(deployment: Deployment) -> str:
    """Version and checksum of the safety parameters, as `1-0a1b2c3d4e5f6071`."""
    said = json.dumps(acting(deployment), sort_keys=True)
    return f"{VERSION}-{_digest(said.encode())}"


def compared(deployment: Deployment, folder: Path) -> str:
    """One line: the checksum, and what changed since the last session in `folder`, where the
    parameters of this one are stored. A file there that cannot be read counts as none."""
    now, file = acting(deployment), folder / FILE
    try:
        before: Any = json.loads(file.read_bytes())
        version = before["version"]
        old = dict(before["parameters"])
    except (OSError, ValueError, TypeError, KeyError):
        version, old = 0, {}
    line = f"safety parameters {checksum(deployment)}"
    try:
        write_json(file, {"version": VERSION, "parameters": now})
    except OSError as error:
        line = f"{line} (not stored: {error})"
    if version != VERSION:
        return f"{line}: nothing to compare with in this folder"
    changed = sorted(k for k in {*now, *old} if now.get(k) != old.get(k))
    if not changed:
        return f"{line}: unchanged since the last session in this folder"
    more = f" and {len(changed) - MOST_NAMES} more" if len(changed) > MOST_NAMES else ""
    names = ", ".join(changed[:MOST_NAMES])
    return f"{line}: CHANGED since the last session in this folder: {names}{more}"
