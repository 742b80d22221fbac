"""`embodied robot find` and `embodied robot calibrate`: servo arms on a serial bus."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from embodied.commands import require_understood, take
from embodied.core.build import ConfigError

NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
PORTS = ("/dev/serial/by-id/*", "/dev/ttyACM*", "/dev/ttyUSB*")
HAND = "gripper"


def find(args: argparse.Namespace) -> None:
    from embodied.real_robot.drivers.driver import DriverError
    from embodied.real_robot.drivers.servos.calibration import find_servos

    port, words = take(args.words, "port")
    protocol, words = take(words, "protocol")
    baud, words = take(words, "baud")
    require_understood(words, ("port=", "protocol=", "baud="))
    if protocol not in (None, "feetech", "dynamixel"):
        raise ConfigError(f"protocol={protocol} should be feetech or dynamixel")
    paths = [port] if port else _ports()
    if not paths:
        raise ConfigError(f"no serial port is there ({', '.join(PORTS)}): check the cable")
    if baud is not None and not baud.isdigit():
        raise ConfigError(f"baud={baud} should be a number")
    for path in paths:
        for make in (protocol,) if protocol else ("feetech", "dynamixel"):
            try:
                found = find_servos(path, make, int(baud or 1_000_000))
            except DriverError as error:
                print(f"{path}  {error}")
                break
            places = ", ".join(f"{each.id} (at {each.position})" for each in found)
            print(f"{path}  {make}: {f'servos {places}' if found else 'no servo answers'}")


def calibrate(args: argparse.Namespace) -> None:
    given: dict[str, str | None] = {}
    words = list(args.words)
    known = ("port", "out", "lerobot", "from", "names")
    for name in known:
        given[name], words = take(words, name)
    require_understood(words, [f"{name}=" for name in known])
    if not given["out"] and not given["lerobot"]:
        raise ConfigError("name the file to write: out=my_arm.yaml (or lerobot=my_arm.json)")
    if given["from"]:
        _convert(Path(given["from"]).expanduser(), given["out"], given["lerobot"])
    elif given["port"]:
        _by_hand(given["port"], given["out"], given["lerobot"], given["names"])
    else:
        raise ConfigError("port=PATH names the arm's serial port: embodied robot find lists them")


def _by_hand(port: str, out: str | None, lerobot: str | None, names: str | None) -> None:
    """Ask one line after the other, and write the files."""
    from embodied.real_robot.drivers.driver import DriverError
    from embodied.real_robot.drivers.servos.calibration import (
        Calibration,
        driver_settings,
        save_lerobot,
    )

    chosen = NAMES if names is None else tuple(str(each) for each in yaml.safe_load(names))
    target = Path(out or lerobot or "")
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another name")
    progress = target.with_name(f".{target.name}.progress")
    ids = {name: id for id, name in enumerate(chosen, 1)}
    try:
        found = Calibration(port, ids, progress, _ask, _wait).run()
    except DriverError as error:
        raise ConfigError(str(error)) from error
    if lerobot:
        save_lerobot(found.motors, Path(lerobot))
    if out:
        _write(driver_settings(found.motors, HAND, found.zeros), Path(out))
    progress.unlink(missing_ok=True)
    print(f"wrote {', '.join(name for name in (out, lerobot) if name)}")


def _convert(source: Path, out: str | None, lerobot: str | None) -> None:
    from embodied.real_robot.drivers.servos.calibration import (
        driver_settings,
        load_lerobot,
        motors_of,
        save_lerobot,
    )

    if source.suffix == ".json":
        motors = load_lerobot(source)
    else:
        try:
            motors = motors_of(yaml.safe_load(source.read_text()))
        except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{source} has no joints as a driver's: {error}") from error
    if lerobot:
        save_lerobot(motors, Path(lerobot))
    if out:
        _write(driver_settings(motors), Path(out))
        print("zero is the middle of each range: check it against your kinematics (docs/deploy.md)")


def _write(settings: dict[str, Any], path: Path) -> None:
    """`joints` and `hand` for the YAML of a robot."""
    text = (
        "# joints and hand of the driver: copy them into your robot's YAML; hand.width (m) too.\n"
    )
    path.write_text(text + yaml.safe_dump(settings, sort_keys=False, default_flow_style=None))


def _ask(line: str) -> None:
    input(f"{line}, then press Enter ")


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


def _ports() -> list[str]:
    """Serial ports, each once, by the name that stays where there is one."""
    from glob import glob

    seen: dict[str, str] = {}
    for pattern in PORTS:
        for path in sorted(glob(pattern)):
            seen.setdefault(str(Path(path).resolve()), path)
    return list(seen.values())
