"""Calibrating a servo arm at a terminal: a person moves it and answers each line with Enter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from embodied.core.build import ConfigError
from embodied.real_robot.drivers.servos.calibration import (
    Calibration,
    driver_settings,
    load_lerobot,
    motors_of,
    save_lerobot,
)

NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
PORTS = ("/dev/serial/by-id/*", "/dev/ttyACM*", "/dev/ttyUSB*")


def serial_ports() -> list[str]:
    """Every serial port once, by the name that stays where there is one. ConfigError without."""
    seen: dict[str, str] = {}
    for path in (path for pattern in PORTS for path in sorted(glob(pattern))):
        seen.setdefault(str(Path(path).resolve()), path)
    if not seen:
        raise ConfigError(f"no serial port is there ({', '.join(PORTS)}): check the cable")
    return list(seen.values())


def calibrate(port: str, out: str | None, lerobot: str | None, names: str | None) -> None:
    chosen = NAMES if names is None else tuple(str(each) for each in yaml.safe_load(names))
    target = Path(out or lerobot or "")
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another name")
    progress = target.with_name(f".{target.name}.progress")
    ids = {name: id for id, name in enumerate(chosen, 1)}

    def ask(line: str) -> None:
        input(f"{line}, then press Enter ")

    found = Calibration(port, ids, progress, ask, _wait).run()
    if lerobot:
        save_lerobot(found.motors, Path(lerobot))
    if out:
        _write(driver_settings(found.motors, found.zeros), Path(out))
    progress.unlink(missing_ok=True)
    print(f"wrote {', '.join(name for name in (out, lerobot) if name)}")


def convert(source: Path, out: str | None, lerobot: str | None) -> None:
    if source.suffix == ".json":
        motors = load_lerobot(source)
    else:
        try:
            motors = motors_of(yaml.safe_load(source.read_text()))
        except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError, ArithmeticError) as error:
            raise ConfigError(f"{source} has no joints as a driver's: {error}") from error
    if lerobot:
        save_lerobot(motors, Path(lerobot))
    if out:
        _write(driver_settings(motors), Path(out))
        print("zero is the middle of each range: check it against your kinematics (docs/servos.md)")


def _write(settings: dict[str, Any], path: Path) -> None:
    text = (
        "# joints and hand of the driver: copy them into your robot's YAML; hand.width (m) too.\n"
    )
    path.write_text(text + yaml.safe_dump(settings, sort_keys=False, default_flow_style=None))


def _wait(line: str, look: Callable[[], bool]) -> None:
    """Show `line`, and look until Enter."""
    done, failed = threading.Event(), list[BaseException]()

    def read() -> None:
        try:
            input(f"{line}, then press Enter ")
        except BaseException as error:
            failed.append(error)
        done.set()

    threading.Thread(target=read, daemon=True).start()
    while not done.wait(0.02):
        look()
    look()
    if failed:
        raise ConfigError("it was interrupted: the same command goes on where it was")
