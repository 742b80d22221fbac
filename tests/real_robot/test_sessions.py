"""A daemon serves the session that started it, and operators; nobody else's session."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.deploy.session import Session, Stopped
from embodied.real_robot.assemble import build_chain, open_flight_recorder
from embodied.real_robot.daemon.client import ForeignDaemonError, call
from embodied.real_robot.daemon.requests import Reply, Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.messages import Mode
from embodied.real_robot.rl.session import RobotSession, RobotSessionError
from tests.real_robot.test_control import LIMITS
from tests.real_robot.test_daemon import HERTZ, PATIENT, bridging, simulated, until


def quiet(status: Any, ran: float, success: bool | None) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return simulated(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def first(tmp_path: Path, folder: Path, deployed: Deployment) -> Iterator[Session]:
    """A session whose arm is held and idle."""
    out = tmp_path / "first"
    out.mkdir()
    with Session(folder, deployed, out, quiet) as session:
        session.ready()
        yield session


class KilledAtTheStart(Session):
    """Its daemon is killed as soon as (or, `unheard`, before) it has said that the arm runs."""

    unheard = False

    def _ask(self, verb: Verb, seconds: float | None = None) -> Reply:
        reply = super()._ask(verb, seconds)
        if verb == Verb.START and reply.ok:
            os.kill(self.daemon.pid, signal.SIGKILL)
            if self.unheard:
                return super()._ask(Verb.STATUS)
        return reply


@pytest.mark.parametrize("unheard", [False, True])
def test_an_episode_whose_daemon_dies_at_its_start_is_in_the_summary(
    tmp_path: Path, folder: Path, deployed: Deployment, unheard: bool
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with KilledAtTheStart(folder, deployed, out, quiet) as session:
        session.unheard = unheard
        session.ready()
        with pytest.raises(Stopped, match="the daemon died") as stopped:
            session.run(1, 5.0, home=False)
        session.stop()
    (episode,) = session.summary()["episodes"]
    assert episode["end"] == str(stopped.value) and not episode["recorded"]
    assert "whether it was recorded" in episode["unkept"]


def other(where: Path) -> Deployment:
    """Another robot's settings in all that could hurt: limits and policy."""
    fast = replace(LIMITS, velocity=(9.0,) * 7, acceleration=(40.0,) * 7)
    return simulated(where / "other", limits=fast, robot="other", records="")


def asked(folder: Path) -> list[str]:
    """What operators and sessions asked of the daemon in `folder`."""
    return [each for each in call(folder, Verb.STATUS, PATIENT).status["notes"] if "asks" in each]


def test_a_second_session_in_the_folder_touches_nothing(
    first: Session, tmp_path: Path, deployed: Deployment
) -> None:
    before = (first.folder / "deployment.json").read_bytes()
    out = tmp_path / "second"
    out.mkdir()
    second = Session(first.folder, other(tmp_path), out, quiet)
    with pytest.raises(ConfigError, match="a daemon runs in") as refused, second:
        second.ready()
        second.run(1, 0.5, home=False)
    assert len(str(refused.value).splitlines()) == 1
    assert (first.folder / "deployment.json").read_bytes() == before
    assert asked(first.folder) == [] and first.status["mode"] == "IDLE"
    assert not list(out.glob("*.log")), "the first one's logs are not the second one's"


def test_a_learner_in_the_folder_touches_nothing(first: Session, deployed: Deployment) -> None:
    before = (first.folder / "deployment.json").read_bytes()
    with pytest.raises(RobotSessionError, match="a daemon runs in"):
        learner = RobotSession(replace(deployed, policy=""), first.folder)
        try:
            learner.start(np.zeros(4))
        finally:
            learner.close()
    assert (first.folder / "deployment.json").read_bytes() == before
    assert asked(first.folder) == [] and first.status["mode"] == "IDLE"


def test_the_first_sessions_limits_and_policy_act_after_a_reset(
    first: Session, tmp_path: Path, deployed: Deployment
) -> None:
    stranger = other(tmp_path)
    out = tmp_path / "second"
    out.mkdir()
    with pytest.raises(ConfigError), Session(first.folder, stranger, out, quiet) as second:
        second.ready()
    stranger.write(first.folder)  # a program of before today did so
    os.kill(first.status["control"]["pid"], signal.SIGKILL)
    until(lambda: first.status["mode"] == "DISCONNECTED", "the control process is gone")
    until(lambda: call(first.folder, Verb.RESET, PATIENT).ok, "it is reset")
    assert Deployment.read(first.folder) == deployed
    first.ready()
    first.run(1, 2.0, home=False)
    assert [each.end for each in first.episodes] == ["time"], "the control process ended it"
    names = build_chain(deployed).names
    ring = open_flight_recorder(deployed, first.folder, len(names), create=False)
    records = ring.records()
    ring.close()
    sent = records["sent"][records["mode"] == Mode.RUNNING]
    acceleration = np.abs(np.diff(sent, 2, axis=0)) * HERTZ**2
    assert np.ptp(sent, axis=0).max() > 0.05, "it moved"
    assert acceleration.max() <= 1.01 * max(LIMITS.acceleration)
    assert first.status["acting"] == deployed.policy


def test_nobody_else_learns_the_token(first: Session) -> None:
    token = first.daemon.token
    pids = [first.daemon.pid, first.status["control"]["pid"], first.status["policy"]["pid"]]
    for pid in pids:
        for about in ("cmdline", "environ"):
            assert token.encode() not in Path(f"/proc/{pid}/{about}").read_bytes()
    for path in first.folder.iterdir():
        assert not path.is_file() or token.encode() not in path.read_bytes()
    assert token not in json.dumps(first.status)


def test_a_daemon_that_no_session_started_refuses_all_sessions(
    folder: Path, deployed: Deployment
) -> None:
    with bridging(folder, deployed) as bridge:
        bridge.mode("IDLE")
        with pytest.raises(ForeignDaemonError, match="belongs to another session"):
            call(folder, Verb.ESTOP, PATIENT, session="0" * 32)
        assert bridge.status["mode"] != "ESTOP" and asked(folder) == []
        assert bridge.ask(Verb.ESTOP).ok, "an operator's"
