"""A counterpart's process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from real_robot.counterparts.process import Process
from real_robot.drivers.driver import DriverError


@dataclass(frozen=True)
class Nothing:
    """No settings."""


def test_one_that_ends_without_a_word_did_not_start() -> None:
    process = Process("__future__", Nothing(), "arm")  # a module that says nothing and ends
    with pytest.raises(DriverError, match="the counterpart of the arm did not start"):
        process.start()
    assert process.process is None
