"""Which environment YAMLs the contract checks build, and what their files leave to the user."""

from __future__ import annotations

from pathlib import Path

import yaml

from embodied.core.build import Node
from tests.linear_system import roughly_fitted

# A robot is one row that no seed decides: tests/real_robot/test_env.py.
WIRED = {Path(f"configs/env/{name}.yaml") for name in ("robot", "robot_reach", "robot_shuttle")}
# They need packages of their own: tests/envs/test_process.py, test_ogbench.py, test_robosuite.py.
APART = {
    file
    for name in ("mjlab", "pusht", "ogbench_*", "robosuite_*")
    for file in Path("configs/env").glob(f"{name}.yaml")
}
FILES = sorted({*Path("configs/env").glob("*.yaml")} - WIRED - APART)

SLOW = (
    *("crafter_pickaxe", "maniskill_peg_insertion", "maniskill_pick_cube"),
    *("maniskill_pick_cube_rgb", "fr3_channel", "fr3_detour", "fr3_lift_delayed"),
    *(
        "fr3_clutter",
        "fr3_lift_magnet",
        "fr3_lift_points",
        "fr3_lift_random",
        "fr3_reach",
        "fr3_slalom",
    ),
    *("contact_maze", "so101_pick", "envpool_adroit_door", "envpool_metaworld_door_open"),
)
"""Slow ones, of classes that other files have too; tests/envs has what is their own."""


def settings_of(file: Path) -> Node:
    """The node of a file, with what the file leaves to the user."""
    given: Node = {}
    if file.stem == "gym":
        given = {"id": "MountainCarContinuous-v0"}
    if file.stem == "imagined":
        given = roughly_fitted()
    return yaml.safe_load(file.read_text()) | given
