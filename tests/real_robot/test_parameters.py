"""Checksum of the safety parameters: what counts, and what changed since the session before."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from embodied.real_robot.deployment import Deployment
from embodied.real_robot.safety import parameters
from embodied.real_robot.safety.parameters import OTHERS, acting, checksum, compared
from embodied.real_robot.watchdog.client import Config as WatchdogConfig
from tests.real_robot.deployment_fuzz import bases


def test_what_limits_an_arm_counts_and_nothing_else(tmp_path: Path) -> None:
    assert {field.name for field in fields(Deployment)} >= OTHERS
    made = Deployment.parse(bases()[-1])
    said = checksum(made)
    elsewhere = {**made.driver, "host": "10.0.0.2", "port": "/dev/ttyUSB1"}
    for same in (
        replace(made, policy="another", recording="there", given={"goal_x": 1.0}),
        replace(made, driver=elsewhere, dry=True),
    ):
        assert checksum(same) == said
    limits = replace(made.limits, velocity=(0.5,) * 7)
    for other in (
        replace(made, limits=limits),
        replace(made, fresh=replace(made.fresh, stop=0.9)),
        replace(made, workspace=None),
        replace(made, hold_to_run=not made.hold_to_run),
        replace(made, watchdog=WatchdogConfig("/dev/ttyACM0")),
        replace(made, driver={**made.driver, "noise": 0.5}),
    ):
        assert checksum(other) != said
    arm = tmp_path / "arm.yaml"
    arm.write_text("one")
    named = replace(made, kinematics=str(arm))
    before = checksum(named)
    arm.write_text("two")
    assert checksum(named) != before, "the content of a file that is named counts"
    assert "driver.host" not in acting(replace(made, driver=elsewhere))


def test_the_next_session_in_the_folder_says_what_changed(tmp_path: Path) -> None:
    made = Deployment.parse(bases()[-1])
    assert "nothing to compare with" in compared(made, tmp_path)
    assert "unchanged since the last session" in compared(replace(made, policy="x"), tmp_path)
    faster = replace(made, limits=replace(made.limits, velocity=(0.5,) * 7), torque_rate=None)
    line = compared(faster, tmp_path)
    assert line.startswith(f"safety parameters {checksum(faster)}: CHANGED since the last session")
    assert line.endswith(": limits.velocity, torque_rate") and "\n" not in line
    (tmp_path / parameters.FILE).write_text("{")
    assert "nothing to compare with" in compared(made, tmp_path)
