"""One default folder for each robot; without a name, the only daemon there is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from embodied.cli import main
from embodied.core.build import ConfigError
from embodied.deploy.session import Session
from embodied.real_robot.daemon.server import (
    SOCKET,
    FolderError,
    RpcServer,
    RpcServerError,
    default_folder,
    find,
    make_private,
    running,
)
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.mailbox import memory_folder
from embodied.viewer.robot.app import monitor
from embodied.viewer.robot.monitor import RobotMonitor
from tests.real_robot.test_daemon import simulated
from tests.real_robot.test_deploy import robot
from tests.real_robot.test_sessions import quiet


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in memory where the folders of robots are. Its name is short, as a socket's path
    has to be."""
    with TemporaryDirectory(dir=memory_folder()) as name:
        monkeypatch.setattr("embodied.real_robot.daemon.server.memory_folder", lambda: Path(name))
        yield Path(name)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return simulated(tmp_path_factory.mktemp("policy"))


def test_each_robot_has_its_own(memory: Path) -> None:
    one = default_folder("sim")
    assert one == memory / f"embodied-robot-{os.geteuid()}" / "sim"
    assert (
        default_folder("lab/arm").name == "lab.arm" and default_folder("../x").parent == one.parent
    )
    make_private(one)
    for folder in (one, one.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    one.parent.chmod(0o755)
    with pytest.raises(RpcServerError, match="chmod 700"):
        make_private(default_folder("so101"))


def test_a_path_that_is_too_long_is_said(memory: Path) -> None:
    folder = default_folder("x" * 100)
    make_private(folder)
    with pytest.raises(RpcServerError, match="use a shorter one"):
        RpcServer(folder)


def test_only_daemons_that_listen_count(memory: Path) -> None:
    assert running() == [] and find() == memory / f"embodied-robot-{os.geteuid()}"
    dead = default_folder("dead")
    RpcServer(make_private(dead)).server.close()  # its socket's file stays
    assert (dead / SOCKET).exists() and running() == []
    one = RpcServer(make_private(default_folder("sim")))
    assert running() == [default_folder("sim")] and find() == default_folder("sim")
    other = RpcServer(make_private(default_folder("so101")))
    with pytest.raises(FolderError, match="say which: robot=sim, robot=so101"):
        find()
    assert find("so101") == default_folder("so101")
    one.close()
    other.close()
    assert running() == []


def test_operators_and_the_viewer_find_the_only_daemon(
    memory: Path,
    deployed: Deployment,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = robot(capsys, "status")
    assert code == 2 and "no daemon runs in" in text and "start one first" in text
    seen = RobotMonitor(None)
    assert not seen.poll() and "waiting for one" in seen.condition
    out = memory / "out"
    out.mkdir()
    with Session(default_folder("sim"), deployed, out, quiet) as session:
        session.ready()
        assert robot(capsys, "status")[0] == 0
        assert robot(capsys, "status", "robot=sim")[0] == 0
        code, text = robot(capsys, "status", "robot=so101")
        assert code == 2 and "so101" in text and len(text.strip().splitlines()) == 1
        seen.poll()
        assert seen.number == 1 and seen.folder == default_folder("sim")
        other = RpcServer(make_private(default_folder("so101")))
        code, text = robot(capsys, "status")
        assert code == 2 and "robot=sim, robot=so101" in text, text
        assert len(text.strip().splitlines()) == 1
        with pytest.raises(FolderError):
            monitor(block=False, port=0)
        other.close()
    seen.close()


def test_a_second_deploy_of_the_same_robot_is_refused(
    memory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(memory)
    one = RpcServer(make_private(default_folder("sim")))
    words = ["deploy", "robot=sim", "demonstrator=reach", "yes=true", "out=out"]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "a daemon runs in" in error[0] and "/sim" in error[0], error
    one.close()


def test_a_wrong_word_for_the_viewer() -> None:
    from embodied.commands import view

    with pytest.raises(ConfigError, match="is not a setting of embodied view robot"):
        view._monitor(dict.fromkeys(view.OWN), ["seed=3"], 8080)
