"""What hangs beside the control process: a disk, a child, the daemon, the session, the operator's
terminal. The arm rests, the stop works, and who waits is told."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.deploy.session import Session, Stopped
from embodied.real_robot.assemble import open_channels, open_flight_recorder
from embodied.real_robot.daemon import client
from embodied.real_robot.daemon.client import call
from embodied.real_robot.daemon.requests import Reply, Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import Role
from embodied.real_robot.kernel.checks import Heartbeat
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.rl.session import RobotSession, RobotSessionError
from tests.real_robot.test_control import LIMITS
from tests.real_robot.test_daemon import (
    HERTZ,
    PATIENT,
    Bridge,
    bridging,
    gone,
    in_mode,
    simulated,
    until,
)
from tests.real_robot.test_deploy import robot
from tests.tiers import only_all, usually

SITE = Path(__file__).parent / "slow_disk_site"
SLOW = 2.0  # s that the disk takes


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """The control process waits for its daemon for as long as a test may take."""
    long = Heartbeat(hold=60.0, stop=120.0)
    return simulated(tmp_path_factory.mktemp("policy"), heartbeat=long)


@contextmanager
def beating(made: Deployment, folder: Path, limit: float) -> Generator[None]:
    """Meanwhile the control process hears from the daemon at least every `limit` s."""
    heartbeat, seen, over = open_channels(made, folder, Role.ALL).heartbeat, [], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            if heartbeat.receive():
                seen.append(float(heartbeat.fields["time"][0]))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()
    assert np.diff(seen).max() < limit


def test_a_slow_disk_does_not_stop_the_beats(
    folder: Path, deployed: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SITE), prepend=os.pathsep)
    monkeypatch.setenv("SLOW_DISK", str(SLOW))
    about = replace(deployed, records=str(folder / "records"))

    def saved() -> list[str]:
        """The files that the daemon told of."""
        notes = [note for note in bridge.status["notes"] if " records are in " in note]
        return [note.rpartition(" ")[2] for note in notes]

    with bridging(folder, about) as bridge:
        bridge.running()
        with beating(about, folder, 0.5 * SLOW):
            for _ in range(2):  # the second is saved when the first is
                assert bridge.ask(Verb.ESTOP).ok
                time.sleep(1.0)  # a stop is in its black box
                bridge.done(Verb.RESET)
                bridge.running()
            bridge.done(Verb.STOP)
            until(lambda: len(saved()) == 2, "both are saved")
        assert saved() == sorted(map(str, (folder / "records").glob("*.npz")))
        assert bridge.ask(Verb.ESTOP).ok
        time.sleep(0.7)  # it is being saved
    assert len(list((folder / "records").glob("*.npz"))) == 3, "the last is waited for at the end"


@only_all
def test_a_child_that_does_not_end_does_not_stop_the_daemon(
    folder: Path, tmp_path: Path, deployed: Deployment
) -> None:
    about = replace(deployed, recording=str(tmp_path / "recording"))
    with bridging(folder, about) as bridge:
        status = bridge.running()
        with beating(about, folder, 5.0):
            os.kill(status["recorder"]["pid"], signal.SIGSTOP)  # it will be killed after 10 s
            os.kill(status["control"]["pid"], signal.SIGKILL)
            bridge.mode("DISCONNECTED")
            replies: list[Any] = []
            ask = threading.Thread(target=lambda: replies.append(bridge.ask(Verb.RESET)))
            ask.start()
            until(lambda: "asks: reset" in str(bridge.status["notes"]), "it was heard")
            again = bridge.ask(Verb.RESET)
            assert not again.ok and "are being started" in again.reason
            assert bridge.ask(Verb.STATUS).ok and not replies, "it answers others meanwhile"
            ask.join()
        assert replies[0].ok and gone(status["recorder"]["pid"])
        assert bridge.running()["control"]["pid"] not in (0, status["control"]["pid"])


def test_an_episode_without_a_limit_ends_with_its_session(
    folder: Path, deployed: Deployment
) -> None:
    daemon = client.DaemonProcess(folder, deployed)

    def started(seconds: float | None = None) -> None:
        def done(verb: Verb, limit: float | None = None) -> bool:
            with suppress(RuntimeError):
                return daemon.call(verb, PATIENT, limit).ok
            return False

        until(lambda: done(Verb.ARM), "it is armed")
        until(lambda: done(Verb.START, seconds), "it runs")

    try:
        started()
        began = time.monotonic()
        while time.monotonic() < began + 2.5:  # who looks at it says something
            assert daemon.call(Verb.STATUS, PATIENT).status["mode"] == "RUNNING"
            time.sleep(0.1)
        status = until(lambda: in_mode(folder, "IDLE"), "the arm is at rest")
        assert "was silent for 2 s" in status["stopped"]
        assert status["stopped"] in str(status["notes"])
        started(4.0)
        time.sleep(2.5)
        assert in_mode(folder, "RUNNING"), "it has a limit"
        until(lambda: call(folder, Verb.STATUS, PATIENT).status["ended"] == "TIME", "it is over")
    finally:
        daemon.stop(PATIENT)


def test_a_learner_that_posts_actions_and_asks_nothing_goes_on(
    folder: Path, deployed: Deployment
) -> None:
    with closing(RobotSession(replace(deployed, policy=""), folder)) as learner:
        rest = np.zeros(4)
        learner.start()
        began = time.monotonic()
        while time.monotonic() < began + 2.5:
            learner.update()
            learner.send_action(rest, float(learner.state["measured"]))
            time.sleep(0.05)
        assert learner.mode == Mode.RUNNING, learner.fault


def quiet(status: Any, ran: float, success: bool | None) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return simulated(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def stranger(tmp_path: Path) -> Deployment:
    """Another robot's settings in all that could hurt: limits and policy."""
    fast = replace(LIMITS, velocity=(9.0,) * 7, acceleration=(40.0,) * 7)
    return simulated(tmp_path / "other", limits=fast, robot="other", records="")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, plain: Deployment) -> Iterator[Session]:
    """A session whose arm is held and idle."""
    folder, out = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("out")
    with Session(folder, plain, out, quiet) as session:
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


@pytest.mark.parametrize("unheard", usually([True], [False, True]))
def test_an_episode_whose_daemon_dies_at_its_start_is_in_the_summary(
    tmp_path: Path, folder: Path, plain: Deployment, unheard: bool
) -> None:
    made = replace(plain, recording=str(tmp_path / "recording"))
    with KilledAtTheStart(folder, made, tmp_path, quiet) as session:
        session.unheard = unheard
        session.ready()
        with pytest.raises(Stopped, match="the daemon died") as stopped:
            session.run(1, 5.0, home=False)
        session.stop()
    (episode,) = session.summary()["episodes"]
    assert episode["end"] == str(stopped.value) and not episode["recorded"]
    why = "the daemon ended before it said whether it was recorded"
    assert episode["unkept"] == why and session.unrecorded == (
        f"1 of 1 episodes are not (completely) recorded, the first is episode 1 ({why}); "
        f"0 are complete in {made.recording}"
    )


def asked(folder: Path) -> list[str]:
    """What operators and sessions asked of the daemon in `folder`."""
    return [each for each in call(folder, Verb.STATUS, PATIENT).status["notes"] if "asks" in each]


def test_a_second_session_or_learner_in_the_folder_touches_nothing(
    first: Session, tmp_path: Path, plain: Deployment, stranger: Deployment
) -> None:
    """Even if a program of before today wrote another deployment there, the first one's limits and
    policy act after a reset."""
    before, out = (first.folder / "deployment.json").read_bytes(), tmp_path / "second"
    out.mkdir()
    second = Session(first.folder, stranger, out, quiet)
    with pytest.raises(ConfigError, match="a daemon runs in") as refused, second:
        second.ready()
        second.run(1, 0.5, home=False)
    assert len(str(refused.value).splitlines()) == 1
    with pytest.raises(RobotSessionError, match="a daemon runs in"):
        RobotSession(replace(plain, policy=""), first.folder)
    assert (first.folder / "deployment.json").read_bytes() == before
    assert asked(first.folder) == [] and first.status["mode"] == "IDLE"
    assert not list(out.glob("*.log")), "the first one's logs are not the second one's"
    stranger.write(first.folder)
    os.kill(first.status["control"]["pid"], signal.SIGKILL)
    until(lambda: first.status["mode"] == "DISCONNECTED", "the control process is gone")
    until(lambda: call(first.folder, Verb.RESET, PATIENT).ok, "it is reset")
    assert Deployment.read(first.folder) == plain
    first.ready()
    first.run(1, 2.0, home=False)
    assert [each.end for each in first.episodes] == ["time"], "the control process ended it"
    with closing(open_flight_recorder(plain, first.folder)) as ring:
        records = ring.records()
    sent = records["sent"][records["mode"] == Mode.RUNNING]
    assert np.ptp(sent, axis=0).max() > 0.05, "it moved"
    acceleration = np.abs(np.diff(sent, 2, axis=0)) * HERTZ**2
    assert acceleration.max() <= 1.01 * max(LIMITS.acceleration)
    assert first.status["acting"] == plain.policy


def test_nobody_else_learns_the_token(first: Session) -> None:
    pids = [first.daemon.pid, *(first.status[name]["pid"] for name in ("control", "policy"))]
    seen = [Path(f"/proc/{pid}/{about}") for pid in pids for about in ("cmdline", "environ")]
    seen += [path for path in first.folder.iterdir() if path.is_file()]
    assert all(first.daemon.token.encode() not in path.read_bytes() for path in seen)
    assert first.daemon.token not in json.dumps(first.status)


def test_a_daemon_that_no_session_started_refuses_all_sessions(bridge: Bridge) -> None:
    bridge.idle()
    before = asked(bridge.folder)
    with pytest.raises(client.ForeignDaemonError, match="belongs to another session"):
        call(bridge.folder, Verb.ESTOP, PATIENT, session="0" * 32)
    assert bridge.status["mode"] == "IDLE" and asked(bridge.folder) == before
    assert bridge.ask(Verb.ESTOP).ok, "an operator's"
    bridge.done(Verb.RESET)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory, deployed: Deployment) -> Iterator[Bridge]:
    with bridging(tmp_path_factory.mktemp("d"), deployed) as made:
        yield made


def test_estop_says_what_it_did(bridge: Bridge, capsys: pytest.CaptureFixture[str]) -> None:
    def estop(folder: Path) -> tuple[int, str]:
        return robot(capsys, "estop", f"folder={folder}")

    bridge.running()
    stopped = client.emergency_stop(bridge.folder, PATIENT)
    assert stopped.done and stopped.latched is not None and stopped.reply is not None
    code, text = estop(bridge.folder)
    assert code == 0 and "latched after" in text, "it stays latched"
    bridge.done(Verb.RESET)
    pid = bridge.idle()["control"]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert bridge.mode("DISCONNECTED")["fault"] == "the control process died (SIGKILL)"
    code, text = estop(bridge.folder)
    assert code == 2 and "the control process died (SIGKILL)" in text
    assert "the robot's own stop" in text and len(text.strip().splitlines()) == 1
    assert bridge.status["control"]["pid"] == 0, "only a reset starts it"
    bridge.done(Verb.RESET)
    assert bridge.running()["control"]["pid"] not in (0, pid)
    code, text = estop(bridge.folder / "nobody")
    assert code == 2 and "no daemon runs" in text


def test_a_control_process_that_hangs_is_told_of(bridge: Bridge) -> None:
    pid = bridge.idle()["control"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: bridge.status["control"]["silent"], "it is noticed")
        fault = bridge.status["fault"]
        assert "has not ticked for" in fault and "own stop" in fault
        assert "has not ticked for 1 s" in str(bridge.status["notes"])
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not bridge.status["control"]["silent"], "it ticks again")
