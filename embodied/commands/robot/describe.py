"""Read an arm from an MJCF or URDF file into an arm file, and a first robot YAML."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from embodied.commands import take
from embodied.core.build import ConfigError, parse


def run(args: argparse.Namespace) -> None:
    from embodied.deploy.describe import Config, describe, robot_yaml, summary
    from embodied.embodiments.kinematics.arm import write_arm_file

    files = [word for word in args.words if "=" not in word]
    out, _ = take(args.words, "out")
    if len(files) != 1 or out is None:
        raise ConfigError(
            "say which file and where to: embodied robot describe my_arm.urdf out=mine/my_arm.yaml"
        )
    words = [word.partition("=") for word in args.words if "=" in word]
    settings = {key: yaml.safe_load(value) for key, _, value in words}
    config: Config = parse(Config, settings, "describe")
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
