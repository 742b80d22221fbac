"""Recordings as robots: what is read was recorded, at the time it was recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import EpisodeWriter
from embodied.real_robot.drivers.replay import Config, Replay
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.messages import state_record
from tests.builders import Clock, recorded


def black_box(path: Path) -> Path:
    state = np.zeros(5, state_record(2, 3, 1))
    state["measured"] = [0.0, 7.0, 7.1, 7.1, 7.3]  # before the first, and one that came twice
    state["q"] = [[9, 9], [1, 2], [3, 4], [3, 4], [5, 6]]
    state["dq"], state["tau"], state["width"] = 0.5, 2.0, [0, 0.01, 0.02, 0.02, 0.03]
    state["sensed"][:, 0] = [0, 10, 20, 20, 30]
    np.savez(path, state=state)
    return path


def replay(path: Path, **more: object) -> tuple[Replay, Clock]:
    clock = Clock(100.0)
    settings = {"joints": ("a", "b"), "sensed": ("x",)} | more
    driver = Replay(Config(str(path), **settings), clock)  # type: ignore[arg-type]
    driver.connect()
    return driver, clock


def test_black_box_by_the_clock(tmp_path: Path) -> None:
    driver, clock = replay(black_box(tmp_path / "b.npz"))
    for since, q, stamp, sensed in ((0.0, 1, 0.0, 10), (0.15, 3, 0.1, 20), (0.29, 3, 0.1, 20)):
        clock.now = 100 + since
        arm = driver.read()
        assert (arm.q[0], driver.sense()[0]) == (q, sensed)
        assert arm.t == pytest.approx(100 + stamp) and arm.dq.tolist() == [0.5, 0.5]
    clock.now = 109.0  # at its end it stands there, and is measured still
    arm = driver.read()
    assert (arm.q.tolist(), arm.dq.tolist(), arm.t) == ([5, 6], [0, 0], 109.0)
    assert driver.width == 0.03
    driver.write(np.array([7.0, 8.0]), 0.0)
    assert driver.sent.tolist() == [7, 8] and driver.read().q[0] == 5
    driver.renew()
    assert driver.read().q[0] == 1


def test_episode_of_a_dataset(tmp_path: Path) -> None:
    names = ("q1", "q2", "dq1", "dq2", "width", "x")
    spec = Spec({"state": Leaf((6,), names=names)}, Leaf((1,), low=-1.0, high=1.0), 0.1)
    with EpisodeWriter(tmp_path / "d", spec) as writer:
        for e in range(2):
            state = torch.arange(24.0).reshape(4, 6) + 100 * e
            writer.add(recorded({"state": state}, torch.zeros(3, 1)))
    driver, clock = replay(tmp_path / "d", episode=1)
    clock.now += 0.11
    arm = driver.read()
    assert arm.q.tolist() == [106, 107] and arm.dq.tolist() == [108, 109]
    assert (driver.width, driver.sense().tolist()) == (110, [111])
    with pytest.raises(ConfigError, match="no q3"):
        replay(tmp_path / "d", joints=("a", "b", "c"))


def test_what_cannot_be_played(tmp_path: Path) -> None:
    (tmp_path / "no.npz").write_bytes(b"no")
    for path in (tmp_path / "no.npz", tmp_path / "absent.npz", tmp_path):
        with pytest.raises(DriverError):
            replay(path)
    with pytest.raises(DriverError, match="2 joints and 1 sensed"):
        replay(black_box(tmp_path / "b.npz"), joints=("a",))
    with pytest.raises(DriverError, match="not open"):
        Replay(Config("x")).read()
