"""Deployment files of all kinds, read and built as the control process does it.

`python -m tests.real_robot.deployment_fuzz 10000` prints what became of so many files. Each is a
robot's settings with something changed: values of other types, keys left out or added, numbers that
are none or are huge, deep nesting, lists of another length, bytes flipped, cut or random.
"""

from __future__ import annotations

import copy
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from embodied.core.build import ConfigError, build
from embodied.real_robot.assemble import build_control, open_channels, open_flight_recorder
from embodied.real_robot.deployment import FILE, Deployment
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.ipc.channels import Role
from embodied.real_robot.kernel.arm_state import ArmState
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.loop import ControlLoop
from embodied.real_robot.kernel.mailbox import MailboxError, memory_folder

Json = Any
ROBOTS = Path("configs/robot")
REFUSED = (ConfigError, DriverError, MailboxError)
LONGEST = 600  # characters of a line that says why
MOST_MEMORY = 1 << 28  # bytes of a flight recorder that is made for a test
STRANGE: tuple[Json, ...] = (
    *("a\nb", "a\tb"),
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**400, -(10**400)),
    *(0.0, -0.0, 1e-320, 1e-9, 0.5, 1e9, 1e308, -1e308, math.nan, math.inf, -math.inf),
    *("", "x", "nan", "1e3", "-inf", "\0", "\ud800", "é" * 300, "../..", "real_robot", "a.b.c"),
    *([], [0], [[]], {}, {"": 0}, {"_target_": 3}, {"_target_": "real_robot.nothing"}),
    *([math.nan] * 7, ["x"] * 7, [1e308] * 7, [0.0] * 7, list(range(40)), [[0, 0]] * 3),
)
WHOLE: dict[str, Json] = {
    "energy": {
        **{"start": 2.0, "most": 4.0, "least": 0.5, "power": 20.0, "share": 0.9},
        **{"stiffness": [100.0] * 7, "damping": [10.0] * 7},
    },
    "torque_rate": [500.0] * 7,
    "geometry": {
        "model": "fr3",
        "planes": [{"plane": [0, 0, 1, 0.0], "exempt": ["left_finger"]}],
        "boxes": [{"center": [0.5, 0.4, 0.1], "half": [0.02, 0.2, 0.1], "turn": [0, 0, 0.3]}],
        "mounted": [{"body": "hand", "start": [0, 0, 0], "end": [0, 0, 0.1], "radius": 0.03}],
        "margin": 0.01,
    },
    "workspace": {"low": [-1, -1, 0], "high": [1, 1, 1], "planes": [[0, 0, 1, 0.01]]},
    "remote": {"port": 5555, "keys": "keys", "address": "127.0.0.1"},
    "cameras": {"front": {"_target_": "embodied.real_robot.cameras.sources.Folder", "path": "x"}},
    "filmed": {"front": [96, 96]},
    "metrics": 0,
    "goal_within": 0.02,
    "heartbeat": {"hold": 0.5, "stop": 2.0},
    "hold_to_run": True,
}
"""What a robot's YAML may have besides; for seven joints."""


def bases() -> list[dict[str, Json]]:
    """The settings of robots that need nothing of a user's own."""
    found: list[dict[str, Json]] = []
    for name in ("sim", "sim_impedance", "so101_sim", "franka_sim", "ur_sim"):
        node = yaml.safe_load((ROBOTS / f"{name}.yaml").read_text())
        for key in ("_target_", "defaults", "emulator"):
            node.pop(key, None)
        driver = node["driver"]
        if driver.get("world"):
            driver["world"]["task"] = "reach"
        if name.startswith("so101"):
            driver["port"] = "/dev/null"
        found.append({**node, "policy": "", "sensed": list(build(driver, Driver).sensed)})
    return [*found, {**found[0], **WHOLE}]


def places(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(each, (*path, key))


def change(settings: Json, dice: random.Random) -> None:
    """One value of `settings`, in place."""
    *way, last = dice.choice(list(places(settings)))
    inner = settings
    for key in way:
        inner = inner[key]
    kind = dice.randrange(8)
    if kind == 0 and isinstance(inner, dict):
        del inner[last]
    elif kind == 1 and isinstance(inner, dict):
        inner[dice.choice(("x", "", "limit", "_target_", str(last) + "s"))] = dice.choice(STRANGE)
    elif kind == 2 and isinstance(inner, list):
        inner.insert(last, dice.choice((inner[last], *STRANGE)))
    elif kind == 3 and isinstance(inner, list):
        del inner[last]
    elif kind == 4:
        depth = dice.choice((2, 50, 400))
        inner[last] = json.loads("[" * depth + "]" * depth)
    elif kind == 5 and isinstance(inner[last], int | float):
        inner[last] = inner[last] * dice.choice((-1, 0, 1e-6, 0.5, 2, 1e3, 1e12))
    else:
        inner[last] = copy.deepcopy(dice.choice(STRANGE))


def damaged(data: bytes, dice: random.Random) -> bytes:
    """The file's bytes: cut, flipped, doubled, or others."""
    at = dice.randrange(len(data))
    inserted = dice.choice((b"NaN", b"Infinity", b"1e999", b"\\ud800", b'"x"'))
    return dice.choice(
        (
            data[:at],
            data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :],
            data[:at] + data[dice.randrange(len(data)) :],
            dice.randbytes(dice.randrange(300)),
            dice.choice((b"[", b'{"a":')) * dice.choice((10, 900, 100_000)),
            data[:at] + inserted + data[at:],
        )
    )


def files(count: int, seed: int) -> Iterator[bytes]:
    """So many deployment files; one in five is damaged as bytes."""
    dice, known = random.Random(seed), bases()
    for _ in range(count):
        settings = copy.deepcopy(dice.choice(known))
        for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
            change(settings, dice)
        data = json.dumps(settings).encode()
        yield damaged(data, dice) if dice.random() < 0.2 else data


def outcome(data: bytes, folder: Path) -> str:
    """ "" where the file is accepted and the arm's first ticks are within the limits; else the line
    that refuses it. Every other exception is a mistake of ours."""
    for path in folder.iterdir():
        path.unlink()
    (folder / FILE).write_bytes(data)
    try:
        deployment = Deployment.read(folder)
        channels = open_channels(deployment, folder, Role.ALL, create=True)
        if deployment.seconds * deployment.hertz * channels.state.size > MOST_MEMORY:
            return "skipped"
        open_flight_recorder(deployment, folder, create=True)
        control = build_control(deployment, folder)
    except REFUSED as error:
        return str(error)
    ticks(control, deployment)
    return ""


def ticks(control: ControlLoop, deployment: Deployment) -> None:
    """The chain, as it is in the first ticks of an arm that is asked to go far away."""
    limits = deployment.limits
    middle = (np.asarray(limits.low) + np.asarray(limits.high)) / 2
    still = np.zeros(len(limits))
    control.chain.begin(ArmState(middle, still, still, 10.0))
    control.enabled.on = True
    for k in range(3):
        now = 10.0 + (k + 1) / deployment.hertz
        arm = ArmState(control.chain.limiter.q.copy(), still, still, now)
        sent = control.chain(np.asarray(limits.high, float), now, arm, now)
        assert np.isfinite(sent).all()
        assert (np.asarray(limits.low) <= sent).all() and (sent <= np.asarray(limits.high)).all()


def fuzz(count: int, seed: int = 0) -> Counter[str]:
    """How many were accepted and refused; AssertionError or another's exception otherwise."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as name:
        for number, data in enumerate(files(count, seed)):
            try:
                said = outcome(data, Path(name))
                assert len(said.splitlines()) <= 1 and len(said) <= LONGEST, said
            except Exception as error:
                kept = Path(tempfile.gettempdir()) / f"deployment-{seed}-{number}.json"
                kept.write_bytes(data)
                error.add_note(f"file {number} of seed {seed}: {kept}")
                raise
            found["refused" if said else "accepted"] += 1
    return found


if __name__ == "__main__":
    print(fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
