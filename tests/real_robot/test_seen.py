"""What another process measures: the newest values, and never old ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.real_robot.drivers.driver import DriverError
from embodied.real_robot.ipc.external_state import Config, ExternalStateReader, ExternalStateWriter
from tests.builders import Clock


def test_newest_values_and_their_age(tmp_path: Path) -> None:
    clock = Clock(50.0)
    writer = ExternalStateWriter(tmp_path, ("cube_x", "cube_y"))
    seen = ExternalStateReader(Config(str(tmp_path), ("cube_x", "cube_y"), age=0.5), clock)
    seen.connect()
    with pytest.raises(DriverError, match="cube_x was last measured"):
        seen.read()  # never
    writer.publish(np.array([1.0, 2.0]), 50.0)
    assert seen.read().tolist() == [1, 2]
    writer.publish(np.array([3.0, 4.0]), 50.2)
    clock.now = 50.6
    assert seen.read().tolist() == [3, 4]
    clock.now = 50.8
    with pytest.raises(DriverError, match=r"0\.6 s ago"):
        seen.read()


def test_things_are_laid_out_again_when_asked(tmp_path: Path) -> None:
    writer = ExternalStateWriter(tmp_path, ("x",))
    seen = ExternalStateReader(Config(str(tmp_path), ("x",)))
    seen.connect()
    assert not writer.renew_requested()
    seen.renew()
    assert writer.renew_requested() and not writer.renew_requested()


def test_nobody_measures_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="no process measures x"):
        ExternalStateReader(Config(str(tmp_path), ("x",))).connect()
    ExternalStateWriter(tmp_path, ("x", "y"))
    with pytest.raises(DriverError, match="another version"):
        ExternalStateReader(Config(str(tmp_path), ("x",))).connect()
    with pytest.raises(ConfigError):
        Config("f", ())
