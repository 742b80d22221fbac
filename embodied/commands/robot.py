"""Ask a robot's daemon, from any terminal, or check a robot before anything moves."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from embodied.commands import named, require_understood, split_words, take, yaml_values
from embodied.compose import options, search_folders
from embodied.core.build import ConfigError, nearest, parse

if TYPE_CHECKING:
    from embodied.envs.sysid.fit import Identified
    from embodied.real_robot.daemon.requests import Reply

LOADING = 150.0  # s
ANSWER = 10.0  # s


def run(args: argparse.Namespace) -> None:
    from embodied.real_robot.daemon.client import call

    folder, words = take(args.words, "folder")
    host, words = take(words, "host")
    policy = ""
    if args.kind == "load":
        own = [word for word in words if word.partition("=")[0] not in ("keys", "name")]
        if len(own) != 1:
            raise ConfigError("say which policy: embodied robot load RUN")
        from embodied.core.checkpoint import find  # imports torch, which no other request needs

        policy = own[0] if host else str(find(Path(own[0])).resolve())
        words.remove(own[0])
    supported = False  # whether a person holds the arm
    if args.kind == "release" and not host:
        said, words = take(words, "supported")
        if said not in (None, "true", "false"):
            raise ConfigError(f"supported={said} should be true or false")
        supported = said == "true"
    timeout = LOADING if policy else ANSWER
    if host:
        reply = _remote(host, words, args.kind, timeout, policy)
    elif args.kind == "estop":
        return _emergency_stop(daemon_folder(folder, words), args.json)
    else:
        place = daemon_folder(folder, words)
        warning = "hold the arm: it will fall" if supported else "the arm becomes limp"
        ask = args.kind == "release" and sys.stdin.isatty()
        if ask and input(f"{warning}. Type yes to release it: ").strip() != "yes":
            raise ConfigError("it was not released")
        reply = call(place, args.kind, timeout, policy, supported=supported)
    if args.json:
        print(json.dumps(reply.status, indent=1))
    elif args.kind == "status":
        print("\n".join(status_lines(reply.status)))
    if not reply.ok:
        raise ConfigError(f"{args.kind} was refused: {reply.reason}")
    if args.kind != "status":
        print(f"{args.kind}: done{f' ({reply.reason})' if reply.reason else ''}")


def _emergency_stop(folder: Path, as_json: bool) -> None:
    """Also where the daemon hangs. ConfigError where nothing was seen to stop the arm."""
    from embodied.real_robot.daemon.client import emergency_stop

    stopped = emergency_stop(folder, ANSWER)
    if as_json and stopped.reply is not None:
        print(json.dumps(stopped.reply.status, indent=1))
    if not stopped.done:
        raise ConfigError(f"estop: {stopped.line()}")
    print(f"estop: done ({stopped.line()})")


def daemon_folder(folder: str | None, words: list[str]) -> Path:
    """The folder of the daemon that is meant: `folder=`, else `robot=` in `words`, else the only
    one that runs. ConfigError where several do."""
    from embodied.real_robot.daemon.server import find

    robot, words = take(words, "robot")
    require_understood(words, ["folder=DIR"])
    return Path(folder) if folder else find(robot)


def _remote(host: str, words: list[str], verb: str, timeout: float, policy: str) -> Reply:
    """From a daemon on another machine; `policy` is a folder there."""
    from embodied.real_robot.remote import call_remote

    keys, words = take(words, "keys")
    name, words = take(words, "name")
    require_understood(words, ["keys=DIR"])
    if keys is None:
        raise ConfigError("keys=DIR should name the folder of server.key and your own key")
    if policy and not policy.startswith("/"):
        raise ConfigError(f"{policy}: write the whole path that it has on the robot's machine")
    return call_remote(host, Path(keys), verb, timeout, policy, name or "")


def keys(args: argparse.Namespace) -> None:
    from embodied.real_robot.remote import CLIENT, SERVER, make

    folder, words = take(args.words, "folder")
    name, words = take(words, "name")
    require_understood(words, ["folder=DIR"])
    if folder is None:
        raise ConfigError("folder=DIR should name the folder that the keys come into")
    name = CLIENT if name is None else name
    print("\n".join(str(path) for path in make(Path(folder), name)))
    print(f"to the operator's machine go {SERVER}.key and {name}.key_secret, and nothing else")


def status_lines(status: dict[str, Any]) -> list[str]:
    control, policy = status["control"], status["policy"]
    lines = [f"{status['robot']} is {status['mode']}{' (dry)' if status['dry'] else ''}"]
    if status["fault"]:
        then = "" if control["silent"] else "; look, then: embodied robot reset"
        lines.append(f"  fault     {status['fault']}{then}")
    late = f"late {1e3 * control['late']:.1f} ms (worst {1e3 * control['worst']:.1f})"
    lines.append(
        f"  control   {_process(control)}, {control['rate']:.1f} Hz, {late}, "
        f"{control['missed']} ticks missed"
    )
    lines.append(f"  policy    {_process(policy)}, spoke {policy['age']:.2f} s ago")
    lines.append(f"            {status['acting']}")
    if status["intervened"]:
        lines.append("            a person has taken over")
    acted = [f"{name} {each['count']}" for name, each in status["stages"].items() if each["count"]]
    lines.append(f"  safety    {', '.join(acted) if acted else 'has changed nothing'}")
    if "recorder" in status:
        about = status["recorder"]
        problem = f"; NOT the newest: {about['problem']}" if about["problem"] else ""
        saved = f"{about['episodes']} of {about['ended']} episodes on disk{problem}"
        lines.append(f"  recorder  {_process(about)}, {saved}")
    for name, camera in status.get("cameras", {}).items():
        lines.append(f"  camera    {name}: {_process(camera)}")
    joints = ["?" if value is None else f"{value:.3f}" for value in status["q"]]
    lines.append(f"  joints    {', '.join(joints)}")
    return [*lines, *(f"  note      {note}" for note in status["notes"][-5:])]


def _process(about: dict[str, Any]) -> str:
    return f"process {about['pid']}" if about["pid"] else about["died"] or "not there"


def check(args: argparse.Namespace) -> None:
    from embodied.commands.deploy import composed, show_checks
    from embodied.deploy.site import site

    connect, words = take(args.words, "connect")
    node, policy = composed(words, args.config_dir)
    with tempfile.TemporaryDirectory() as scratch, site(node, policy, Path(scratch)) as here:
        fine = show_checks(here, connect == "true")
    print("nothing speaks against it" if fine else "not like this: see what failed")
    if not fine:
        sys.exit(1)


NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
PORTS = ("/dev/serial/by-id/*", "/dev/ttyACM*", "/dev/ttyUSB*")


def find(args: argparse.Namespace) -> None:
    from embodied.real_robot.drivers.servos.calibration import find_servos
    from embodied.real_robot.kernel.driver import DriverError

    given, words = named(args.words, ("port", "protocol", "baud"))
    require_understood(words, [f"{name}=" for name in given])
    port, protocol, baud = given.values()
    if protocol not in (None, "feetech", "dynamixel"):
        raise ConfigError(f"protocol={protocol} should be feetech or dynamixel")
    paths = [port] if port else []
    if not port:  # every serial port once, by the name that stays where there is one
        from glob import glob

        seen: dict[str, str] = {}
        for path in (path for pattern in PORTS for path in sorted(glob(pattern))):
            seen.setdefault(str(Path(path).resolve()), path)
        paths = list(seen.values())
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
            places = ", ".join(f"{id} (at {position})" for id, position in found.items())
            print(f"{path}  {make}: {f'servos {places}' if found else 'no servo answers'}")


def calibrate(args: argparse.Namespace) -> None:
    given, words = named(args.words, ("port", "out", "lerobot", "from", "names"))
    require_understood(words, [f"{name}=" for name in given])
    if not given["out"] and not given["lerobot"]:
        raise ConfigError("name the file to write: out=my_arm.yaml (or lerobot=my_arm.json)")
    if given["from"]:
        _convert(Path(given["from"]).expanduser(), given["out"], given["lerobot"])
    elif given["port"]:
        _by_hand(given["port"], given["out"], given["lerobot"], given["names"])
    else:
        raise ConfigError("port=PATH names the arm's serial port: embodied robot find lists them")


def _by_hand(port: str, out: str | None, lerobot: str | None, names: str | None) -> None:
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

    def ask(line: str) -> None:
        input(f"{line}, then press Enter ")

    found = Calibration(port, ids, progress, ask, _wait).run()
    if lerobot:
        save_lerobot(found.motors, Path(lerobot))
    if out:
        _write(driver_settings(found.motors, found.zeros), Path(out))
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


def describe_command(args: argparse.Namespace) -> None:
    from embodied.deploy.describe import Config, describe, robot_yaml, summary
    from embodied.embodiments.kinematics.arm import write_arm_file

    files, words = split_words(args.words)
    out, _ = take(words, "out")
    if len(files) != 1 or out is None:
        raise ConfigError(
            "say which file and where to: embodied robot describe my_arm.urdf out=mine/my_arm.yaml"
        )
    config: Config = parse(Config, yaml_values(words), "describe")
    for file in filter(None, (config.out, config.robot)):
        if Path(file).suffix != ".yaml":
            raise ConfigError(f"{file} should end in .yaml")
    path = Path(files[0])
    print(f"reading {path}; fitting capsules takes seconds to minutes", flush=True)
    table = describe(path, config)
    write_arm_file(table, Path(config.out))
    print("\n".join(summary(table)))
    print(f"{config.out}: kinematics, limits, home and capsules")
    if config.robot is not None:
        made = Path(config.robot)
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(robot_yaml(table, path, config))
        print(f"{made}: a simulation of it; look at its limits and workspace")
        if config.driver is not None:
            real = made.with_name(made.name.replace("_sim.yaml", ".yaml"))
            real.write_text(robot_yaml(table, path, config, config.driver))
            print(f"{real}: the same through {config.driver}")
        if made.parent.name == "robot":
            folder = made.parent.parent
            print(
                f"next: embodied deploy --config-dir {folder} robot={made.stem} demonstrator=reach"
            )


LEAST = 0.02  # of the range of a factor: nothing is known better than that
STAYS = 0.5  # of the error, where the fit explains little
SHOWN = {"stiffness": ".0f", "damping": ".1f", "friction": ".2f", "armature": ".3f"}


def identify_command(args: argparse.Namespace) -> None:
    from embodied.envs.sysid.fit import Config, identify, read_traces

    robot, words = take(args.words, "robot")
    out, words = take(words, "out")
    if robot is None or len(words) != 1:
        raise ConfigError(
            "say which recording of which arm: embodied robot identify PATH robot=NAME"
        )
    known = options("robot", search_folders(args.config_dir))
    if robot not in known:
        raise ConfigError(f'there is no robot "{robot}"{nearest(robot, known)}')
    kind = yaml.safe_load(known[robot].read_text()).get("robot")
    if kind != "fr3":
        raise ConfigError(f"robot={robot} is of the kind {kind}; only the FR3 is simulated")
    file = Path(out if out is not None else f"outputs/identify/env/{robot}_like.yaml")
    if file.suffix != ".yaml":
        raise ConfigError(f"out={file} should end in .yaml")
    traces = read_traces(Path(words[0]))
    seconds = sum(float(each.t[-1] - each.t[0]) for each in traces)
    print(f"{words[0]}: {seconds:.1f} s of motion; fitting takes seconds to a minute", flush=True)
    found = identify(Config(), traces)
    print("\n".join(table(found)))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(as_yaml(found, words[0]))
    print(f"\n{file}: a world with this arm; {_picture(found, file.with_suffix('.png'))}")
    if file.parent.name == "env":
        print(f"next: embodied train --config-dir {file.parent.parent} env={file.stem} ...")


def table(found: Identified) -> list[str]:
    """Lines for people: a joint a line, `?` after what the recording does not determine."""
    from embodied.envs.fr3.base import QUANTITIES

    heads = [f"{name} ({unit})" for name, unit in QUANTITIES.items()]
    wide = [max(len(head), 18) for head in heads]
    cells = "  ".join(head.rjust(width) for head, width in zip(heads, wide, strict=True))
    lines = [f"joint  {cells}   error, held out (mrad)"]
    for joint in range(len(found.before)):
        values = [_cell(found, name, joint, width) for name, width in zip(SHOWN, wide, strict=True)]
        error = f"{1e3 * found.before[joint]:8.2f} -> {1e3 * found.after[joint]:.2f}"
        lines.append(f"{joint + 1:5d}  {'  '.join(values)}   {error}")
    delay, spread = 1e3 * found.value["delay"][0], 1e3 * found.deviation["delay"][0]
    lines.append(f"delay  {delay:.1f} +-{spread:.1f} ms{'' if found.known['delay'][0] else ' ?'}")
    if not all(each.all() for each in found.known.values()):
        lines.append("?: the recording does not determine it; move those joints more, or faster")
    if (found.after**2).sum() > STAYS**2 * (found.before**2).sum():
        lines.append("most of the error stays: a contact, a load, or another kind of controller?")
    return lines


def _cell(found: Identified, name: str, joint: int, width: int) -> str:
    value, spread = found.value[name][joint], found.deviation[name][joint]
    mark = " " if found.known[name][joint] else "?"
    return f"{value:{SHOWN[name]}} +-{spread:{SHOWN[name]}} {mark}".rjust(width)


def as_yaml(found: Identified, source: str) -> str:
    """An environment (`configs/env/*.yaml`) with the fitted arm, and ranges around it."""
    before, after = (1e3 * float((each**2).mean() ** 0.5) for each in (found.before, found.after))
    delay, dt = float(found.value["delay"][0]), 0.05
    lines = [
        f"# An FR3 that moves like the one of {source}: joint errors over 0.3 s in windows",
        f"# that were not fitted, {before:.2f} mrad before and {after:.2f} after.",
        f"# delay: {delay:.4f} s from what is sent to what moves, {delay / dt:.1f} steps of {dt} s",
        "# (a step or more: wrap it in embodied.envs.wrappers.delays.ActionDelay, as in "
        "fr3_lift_delayed).",
    ]
    unknown = []
    for name, known in found.known.items():
        if not known.all():
            which = [str(i + 1) for i in range(len(known)) if not known[i]]
            unknown.append(name if name == "delay" else f"{name} of joint {' '.join(which)}")
    if unknown:
        lines.append(f"# Not determined by the recording: {', '.join(unknown)}.")
    arm = {name: [round(float(v), 5) for v in found.arm[name]] for name in found.arm}
    ranges = {name: _range(found, key) for name, key in RANGES.items()}
    world = {
        "_target_": "embodied.envs.fr3.env.Fr3",
        "task": "lift",
        "num_envs": 16,
        "reward": "sparse",
    }
    node = {**world, "threads": 2, "arm": arm, "randomize": ranges}
    return "\n".join(lines) + "\n" + yaml.safe_dump(node, sort_keys=False, default_flow_style=None)


RANGES = {"gain": "stiffness", "damping": "damping"}
"""What `env.randomize` calls them, factors of all joints together."""


def _range(found: Identified, name: str) -> list[float]:
    """A factor within two deviations of the least known joint, from 2% to a half."""
    share = 2 * found.deviation[name] / found.value[name]
    wide = min(0.5, max(LEAST, float(share.max())))
    return [round(1 - wide, 3), round(1 + wide, 3)]


def _picture(found: Identified, file: Path) -> str:
    """Errors of both simulations in the windows that were held out; says where it is."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no picture without matplotlib: pip install 'embodied-rl[media]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen, *played = found.example
    figure, panels = pyplot.subplots(7, 1, figsize=(10, 12), sharex=True, constrained_layout=True)
    for joint, panel in enumerate(panels):
        lines = ((seen, "measured", "#111"), (played[0], "before", "#c2410c"))
        for values, label, ink in (*lines, (played[1], "after", "#0b6bcb")):
            panel.plot(values[:, joint], label=label, color=ink, linewidth=1)
        panel.set_ylabel(f"q{joint + 1} (rad)")
    panels[0].legend(loc="upper right", ncols=3)
    panels[-1].set_xlabel("measurement, one window after the other")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return f"{file}: measured, before and after"
