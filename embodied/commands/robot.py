"""Ask a robot's daemon, from any terminal, or check a robot before anything moves."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from embodied.commands import is_true, yaml_values
from embodied.compose import options, search_folders
from embodied.core.build import ConfigError, nearest, parse

LOADING = 150.0  # s
ANSWER = 10.0  # s


def run(args: argparse.Namespace) -> None:
    from embodied.real_robot.daemon.client import call, emergency_stop
    from embodied.real_robot.daemon.server import find
    from embodied.real_robot.daemon.status_text import status_lines

    verb = args.kind
    own = args.own
    host = own["host"]
    for key in ("folder", "robot", "supported") if host else ("keys", "name"):
        if own.get(key) is not None:
            raise ConfigError(f"{key}= has no effect {'with' if host else 'without'} host=")
    policy = args.names[0] if verb == "load" else ""
    timeout = LOADING if policy else ANSWER
    if host:
        if own["keys"] is None:
            raise ConfigError("keys=DIR should name the folder of server.key and your own key")
        if policy and not policy.startswith("/"):
            raise ConfigError(f"{policy}: write the whole path that it has on the robot's machine")
        from embodied.real_robot.remote import call_remote

        reply = call_remote(host, Path(own["keys"]), verb, timeout, policy, own["name"] or "")
    else:
        folder = Path(own["folder"]) if own["folder"] else find(own["robot"])
        if verb == "estop":  # also where the daemon hangs
            stopped = emergency_stop(folder, ANSWER)
            if args.json and stopped.reply is not None:
                print(json.dumps(stopped.reply.status, indent=1))
            if not stopped.done:
                raise ConfigError(f"estop: {stopped.line()}")
            print(f"estop: done ({stopped.line()})")
            return
        if policy:
            from embodied.core.checkpoint import find as find_checkpoint  # needs torch

            policy = str(find_checkpoint(Path(policy)).resolve())
        supported = verb == "release" and _is_supported(own)
        reply = call(folder, verb, timeout, policy, supported=supported)
    if args.json:
        print(json.dumps(reply.status, indent=1))
    elif verb == "status":
        print("\n".join(status_lines(reply.status)))
    if not reply.ok:
        raise ConfigError(f"{verb} was refused: {reply.reason}")
    if verb != "status":
        print(f"{verb}: done{f' ({reply.reason})' if reply.reason else ''}")


def _is_supported(own: Mapping[str, str | None]) -> bool:
    """Whether a person holds the arm that is to be released; asked for once more at a terminal."""
    supported = is_true(own, "supported")
    warning = "hold the arm: it will fall" if supported else "the arm becomes limp"
    if sys.stdin.isatty() and input(f"{warning}. Type yes to release it: ").strip() != "yes":
        raise ConfigError("it was not released")
    return supported


def keys(args: argparse.Namespace) -> None:
    from embodied.real_robot.remote import CLIENT, SERVER, make

    name = CLIENT if args.own["name"] is None else args.own["name"]
    print("\n".join(str(path) for path in make(Path(args.own["folder"]), name)))
    print(f"to the operator's machine go {SERVER}.key and {name}.key_secret, and nothing else")


def check(args: argparse.Namespace) -> None:
    policy = args.own["policy"]
    connect = is_true(args.own, "connect")
    from embodied.commands.deploy import composed  # imports torch
    from embodied.deploy.operate import show_checks
    from embodied.deploy.site import site

    node = composed(policy, args.words, args.config_dir)
    with tempfile.TemporaryDirectory() as scratch, site(node, policy, Path(scratch)) as here:
        fine = show_checks(here, connect)
    print("nothing speaks against it" if fine else "not like this: see what failed")
    if not fine:
        sys.exit(1)


def find(args: argparse.Namespace) -> None:
    from embodied.real_robot.drivers.servos.by_hand import serial_ports
    from embodied.real_robot.drivers.servos.calibration import find_servos
    from embodied.real_robot.kernel.driver import DriverError

    port, protocol, baud = args.own.values()
    if protocol not in (None, "feetech", "dynamixel"):
        raise ConfigError(f"protocol={protocol} should be feetech or dynamixel")
    if baud is not None and not baud.isdigit():
        raise ConfigError(f"baud={baud} should be a number")
    for path in [port] if port else serial_ports():
        for make in (protocol,) if protocol else ("feetech", "dynamixel"):
            try:
                found = find_servos(path, make, int(baud or 1_000_000))
            except DriverError as error:
                print(f"{path}  {error}")
                break
            places = ", ".join(f"{id} (at {position})" for id, position in found.items())
            print(f"{path}  {make}: {f'servos {places}' if found else 'no servo answers'}")


def calibrate(args: argparse.Namespace) -> None:
    from embodied.real_robot.drivers.servos import by_hand

    port, out, lerobot, source, names = args.own.values()
    if not out and not lerobot:
        raise ConfigError("name the file to write: out=my_arm.yaml (or lerobot=my_arm.json)")
    if source:
        by_hand.convert(Path(source).expanduser(), out, lerobot)
    elif port:
        by_hand.calibrate(port, out, lerobot, names)
    else:
        raise ConfigError("port=PATH names the arm's serial port: embodied robot find lists them")


def describe(args: argparse.Namespace) -> None:
    from embodied.deploy.describe import Config, robot_yaml, summary
    from embodied.deploy.describe import describe as describe_arm
    from embodied.embodiments.kinematics.arm import write_arm_file

    settings = {"out": args.own["out"], **yaml_values(args.words)}
    config: Config = parse(Config, settings, "describe")
    for file in filter(None, (config.out, config.robot)):
        if Path(file).suffix != ".yaml":
            raise ConfigError(f"{file} should end in .yaml")
    path = Path(args.names[0])
    print(f"reading {path}; fitting capsules takes seconds to minutes", flush=True)
    table = describe_arm(path, config)
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


def identify(args: argparse.Namespace) -> None:
    from embodied.envs.sysid import fit, report

    robot, (recording,) = args.own["robot"], args.names
    known = options("robot", search_folders(args.config_dir))
    if robot not in known:
        raise ConfigError(f'there is no robot "{robot}"{nearest(robot, known)}')
    kind = yaml.safe_load(known[robot].read_text()).get("robot")
    if kind != "fr3":
        raise ConfigError(f"robot={robot} is of the kind {kind}; only the FR3 is simulated")
    file = Path(args.own["out"] or f"outputs/identify/env/{robot}_like.yaml")
    if file.suffix != ".yaml":
        raise ConfigError(f"out={file} should end in .yaml")
    traces = fit.read_traces(Path(recording))
    seconds = sum(float(each.t[-1] - each.t[0]) for each in traces)
    print(f"{recording}: {seconds:.1f} s of motion; fitting takes seconds to a minute", flush=True)
    found = fit.identify(fit.Config(), traces)
    print("\n".join(report.table(found)))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(report.as_yaml(found, recording))
    print(f"\n{file}: a world with this arm; {report.picture(found, file.with_suffix('.png'))}")
    if file.parent.name == "env":
        print(f"next: embodied train --config-dir {file.parent.parent} env={file.stem} ...")
