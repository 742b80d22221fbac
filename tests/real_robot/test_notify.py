"""What systemd is told, and that a daemon tells it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from embodied.real_robot.daemon.status import Notifier
from embodied.real_robot.deployment import Deployment
from tests.real_robot.test_daemon import PATIENT, deployment

__all__ = ["deployment"]


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(PATIENT)
        yield line


def test_four_times_in_the_time_that_it_waits(systemd: socket.socket) -> None:
    now = 50.0
    about = {"NOTIFY_SOCKET": str(systemd.getsockname()), "WATCHDOG_USEC": "2000000"}
    notifier = Notifier(about, lambda: now)
    notifier.ready()
    for _ in range(20):  # 2 s
        notifier.alive()
        now += 0.1
    notifier.ending()
    said = [systemd.recv(100).decode() for _ in range(6)]
    assert said == ["READY=1", *["WATCHDOG=1"] * 4, "STOPPING=1"]


def test_another_process_and_a_socket_that_is_gone_are_no_trouble(systemd: socket.socket) -> None:
    about = {"NOTIFY_SOCKET": str(systemd.getsockname()), "WATCHDOG_USEC": "1000000"}
    assert Notifier({**about, "WATCHDOG_PID": "1"}).period is None
    Notifier({}).ready()
    Notifier({**about, "NOTIFY_SOCKET": "/nowhere/at/all"}).ready()
    abstract = Notifier({"NOTIFY_SOCKET": "@embodied"})
    assert abstract.place == "\0embodied"


def test_a_daemon_tells(systemd: socket.socket, folder: Path, deployment: Deployment) -> None:
    replace(deployment, metrics=None).write(folder)
    about = {"NOTIFY_SOCKET": str(systemd.getsockname()), "WATCHDOG_USEC": "200000"}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "embodied.real_robot.daemon.daemon", str(folder)],
        env={**os.environ, **about, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert [systemd.recv(100) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
        daemon.send_signal(signal.SIGTERM)
        while (said := systemd.recv(100)) != b"STOPPING=1":
            assert said == b"WATCHDOG=1"
        assert daemon.wait(PATIENT) == 0
    finally:
        daemon.kill()
