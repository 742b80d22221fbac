"""Parts of the daemon: folders of robots, systemd, what is kept of a log, requests as bytes, the
checksum of the safety parameters."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.deploy.session import Session
from embodied.real_robot import deployment as deployments
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.daemon import requests
from embodied.real_robot.daemon.child import last_words
from embodied.real_robot.daemon.daemon import ANSWER, Commands
from embodied.real_robot.daemon.requests import Reply, Request, RequestError, Verb, parse
from embodied.real_robot.daemon.server import (
    Asked,
    FolderError,
    RpcServer,
    RpcServerError,
    default_folder,
    find,
    make_private,
    running,
)
from embodied.real_robot.daemon.status import Notifier, StatusMonitor
from embodied.real_robot.deployment import Deployment, checksum, compared
from embodied.real_robot.ipc.channels import Role
from embodied.real_robot.kernel.mailbox import memory_folder
from embodied.real_robot.kernel.messages import Command
from embodied.real_robot.watchdog.client import Config as WatchdogConfig
from embodied.viewer.robot.app import monitor
from embodied.viewer.robot.monitor import RobotMonitor
from tests.builders import exit_of, spawn
from tests.real_robot.deployment_fuzz import bases
from tests.real_robot.test_daemon import PATIENT, deployment, simulated
from tests.real_robot.test_daemon_hangs import quiet
from tests.real_robot.test_deploy import robot

__all__ = ["deployment"]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in memory where the folders of robots are. Its name is short, as a socket's path
    has to be."""
    with TemporaryDirectory(dir=memory_folder()) as name:
        monkeypatch.setattr("embodied.real_robot.daemon.server.memory_folder", lambda: Path(name))
        yield Path(name)


def desk(name: str) -> RpcServer:
    """What a daemon of the robot `name` answers at."""
    return RpcServer(make_private(default_folder(name)))


def test_each_robot_has_its_own_private_folder(memory: Path) -> None:
    one = default_folder("sim")
    assert one == memory / f"embodied-robot-{os.geteuid()}" / "sim"
    assert default_folder("lab/arm").name == "lab.arm"
    assert default_folder("../x").parent == one.parent
    make_private(one)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (one, one.parent)] == [0o700] * 2
    with pytest.raises(RpcServerError, match="use a shorter one"):
        desk("x" * 100)
    one.parent.chmod(0o755)
    with pytest.raises(RpcServerError, match="chmod 700"):
        make_private(default_folder("so101"))


def test_only_daemons_that_listen_count(memory: Path) -> None:
    assert running() == [] and find() == memory / f"embodied-robot-{os.geteuid()}"
    desk("dead").server.close()  # its socket's file stays
    assert (default_folder("dead") / "daemon.sock").exists() and running() == []
    one = desk("sim")
    assert running() == [find()] == [default_folder("sim")]
    other = desk("so101")
    with pytest.raises(FolderError, match="say which: robot=sim, robot=so101"):
        find()
    assert find("so101") == default_folder("so101")
    one.close()
    other.close()
    assert running() == []


def test_operators_and_the_viewer_find_the_only_daemon(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(*words: str) -> tuple[int, str]:
        """The exit code, and what is said where it is not 0: one line."""
        code, text = robot(capsys, "status", *words)
        assert code == 0 or len(text.strip().splitlines()) == 1
        return code, text

    code, text = status()
    assert code == 2 and "no daemon runs in" in text and "start one first" in text
    seen = RobotMonitor(None)
    assert not seen.poll() and "waiting for one" in seen.condition
    (memory / "out").mkdir()
    with Session(default_folder("sim"), simulated(tmp_path), memory / "out", quiet) as session:
        session.ready()
        assert status()[0] == status("robot=sim")[0] == 0
        code, text = status("robot=so101")
        assert code == 2 and "so101" in text
        seen.poll()
        assert seen.number == 1 and seen.folder == default_folder("sim")
        other = desk("so101")
        code, text = status()
        assert code == 2 and "robot=sim, robot=so101" in text, text
        with pytest.raises(FolderError):
            monitor(block=False, port=0)
        other.close()
    seen.close()


def test_a_second_deploy_of_the_same_robot_is_refused(
    memory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(memory)
    one = desk("sim")
    one.server.close()  # nobody answers there, but its lock is held
    assert exit_of("deploy", "robot=sim", "demonstrator=reach", "yes=true", "out=out") == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert "a daemon runs in" in error and "/sim" in error
    one.close()


def test_a_command_without_an_answer_is_withdrawn(folder: Path, deployment: Deployment) -> None:
    """Who heard "no answer" would be surprised by an arm that moves later."""
    channels = open_channels(deployment, folder, Role.ALL, create=True)
    told, now = open_channels(deployment, folder).request, [0.0]
    monitor = StatusMonitor(channels, ("q",), deque(), deployment.step, lambda: now[0])
    heard: list[tuple[Verb, bool]] = []
    commands = Commands(
        channels, monitor, lambda it, ok, _: heard.append((it.request.verb, ok)), lambda: now[0]
    )
    for verb, then in ((Verb.START, Command.STOP), (Verb.ESTOP, Command.ESTOP)):
        commands.put(Asked(Request(1, now[0], verb)))
        commands.poll()
        assert told.receive() and told.fields["command"] == Command[verb.name]
        now[0] += ANSWER
        commands.poll()
        assert heard.pop(0) == (verb, False)
        told.receive()
        assert told.fields["command"] == then
        now[0] += ANSWER
        commands.poll()
        heard.clear()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """Its end of the line, and the environment of a service that it starts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(PATIENT)
        yield line, {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}


def test_systemd_hears_a_service_four_times_in_its_time_limit(
    systemd: tuple[socket.socket, dict[str, str]],
) -> None:
    """Another process and a socket that is gone are no trouble."""
    (line, about), now = systemd, 50.0
    notifier = Notifier(about, lambda: now)
    notifier.ready()
    for _ in range(20):  # 2 s
        notifier.alive()
        now += 0.1
    notifier.ending()
    said = [line.recv(100) for _ in range(6)]
    assert said == [b"READY=1", *[b"WATCHDOG=1"] * 4, b"STOPPING=1"]
    assert Notifier({**about, "WATCHDOG_PID": "1"}).period is None
    Notifier({}).ready()
    Notifier({**about, "NOTIFY_SOCKET": "/nowhere/at/all"}).ready()
    assert Notifier({"NOTIFY_SOCKET": "@embodied"}).place == "\0embodied"


def test_systemd_hears_a_daemon(
    systemd: tuple[socket.socket, dict[str, str]], folder: Path, deployment: Deployment
) -> None:
    replace(deployment, metrics=None).write(folder)
    line, about = systemd
    program = ("-m", "embodied.real_robot.daemon.daemon", folder)
    daemon = spawn(*program, env={**about, "WATCHDOG_USEC": "200000"})
    try:
        assert [line.recv(100) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
        daemon.send_signal(signal.SIGTERM)
        while (said := line.recv(100)) != b"STOPPING=1":
            assert said == b"WATCHDOG=1"
        assert daemon.wait(PATIENT) == 0
    finally:
        daemon.kill()


LEAKS = """nanobind: leaked 1 instances!
 - leaked instance 0x5562c9733bd8 of type "ruckig.InputParameter"
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def test_what_a_library_prints_at_exit_does_not_hide_the_reason(tmp_path: Path) -> None:
    log, reason = tmp_path / "control.log", "control: wrist_roll: make limits.low narrower"
    for text, words in (f"starting\n{reason}\n{LEAKS}", reason), ("a\nb\n\n", "b"), (LEAKS, ""):
        log.write_text(text)
        assert last_words(log) == words


GOOD: dict[str, Any] = {"version": 1, "number": 7, "time": 12.5, "verb": "stop"}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
calmly = settings(deadline=None, max_examples=200)  # machines may be busy


def line(**changed: Any) -> bytes:
    return json.dumps({**GOOD, **changed}).encode()


def parsed(data: bytes) -> Request | None:
    """The request; None where it is refused in a line."""
    try:
        return parse(data)
    except RequestError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
        return None


@calmly
@given(st.integers(1, 2**53), st.floats(-(2.0**53), 2.0**53), st.sampled_from(list(Verb)))
def test_a_request_comes_back_as_it_was(number: int, time: float, verb: Verb) -> None:
    about: dict[Verb, dict[str, Any]] = {
        Verb.START: {"seconds": 2.5, "session": "abc"},
        Verb.LOAD: {"policy": "/a b"},
        Verb.ESTOP: {"session": "abc"},
        Verb.RELEASE: {"supported": True},
        Verb.RESET: {"stop": 2**50},
    }
    for more in ({}, about.get(verb, {})):
        request = Request(number, time, verb, **more)
        assert parse(request.line()) == request


def test_an_arm_that_falls_is_released_only_by_who_says_that_it_is_held() -> None:
    assert Request(1, 0.5, Verb.RELEASE).command == Command.RELEASE
    held = parse(line(verb="release", supported=True))
    assert held.command == Command.RELEASE_SUPPORTED


@calmly
@given(st.binary(max_size=6000) | json_values.map(lambda value: json.dumps(value).encode()))
def test_bytes_and_json_that_are_no_request_are_refused(data: bytes) -> None:
    assert parsed(data) is None


@calmly
@given(st.sampled_from(sorted(GOOD)), json_values)
def test_one_wrong_value_is_refused_or_is_a_right_one(key: str, value: Any) -> None:
    if (request := parsed(line(**{key: value}))) is not None:
        assert json.loads(request.line()) == {**GOOD, key: value}


@calmly
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_never_does_more_than_be_refused(at: int, byte: int) -> None:
    data = bytearray(Request(7, 12.5, Verb.STOP).line())
    data[at % len(data)] = byte
    request = parsed(bytes(data))
    assert request is None or request.verb == Verb.STOP, "one byte makes no other verb"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (line(verb="strat"), 'did you mean "start"'),
        (line(version=2), "version 2 is not supported, only 1"),
        (line(version=True), "version True"),
        (line(version=1.0), "version 1.0"),
        *((line(number=wrong), "count up from 1") for wrong in (0, True, 2**53 + 1, 1.5)),
        *((line(time=wrong), "should be s") for wrong in ("now", 10**400)),
        (line(time=float("nan")), "NaN is no number"),
        (line(time=float("inf")), "Infinity is no number"),
        *((line(**{key: 1}), f"'{key}'") for key in ("wish", "seconds")),
        *((line(verb="start", seconds=wrong), "above 0") for wrong in (0, None, "3", True)),
        *((line(session=wrong), "should be a token") for wrong in (3, "x" * 65, "\ud800")),
        *((line(verb="load", policy=no), "a folder's name") for no in ("a\0b", "\ud800")),
        *(
            (line(verb="reset", stop=no), "number of a press")
            for no in (-1, 2**60, True, "3", None)
        ),
        (line(verb="release", supported=1), "supported 1 should be true or false"),
        (line(verb="reset", supported=True), "wrong: "),
        (line(verb="load"), "'policy'"),
        (line(verb="reset"), "'stop'"),
        (b'{"version": 1, "number": 1, "time": 0}', "'verb'"),
        (b'{"version": 1, "version": 1}', "twice"),
        (b"{" + b" " * requests.MOST_BYTES + b"}", "too long"),
        (b"[]", "not a JSON object"),
        *((data, "not JSON") for data in (b"", b"[" * 4000, b"\xff\xfe", b"\x80\x04\x95\x05")),
    ],
)
def test_the_reason_says_what_was_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(data)
    assert reason in str(caught.value)


def test_what_makes_an_arm_move_is_not_obeyed_late() -> None:
    for verb in (Verb.ARM, Verb.START, Verb.RESET):
        request = Request(1, 100.0, verb)
        assert not request.late(100.0 + requests.STALE)
        assert "is 2.1 s old" in request.late(102.1)
        assert request.late(97.0), "nor from a clock that is ahead"
    for verb in (Verb.STOP, Verb.ESTOP, Verb.STATUS):
        assert not Request(1, 100.0, verb).late(900.0)


def test_a_session_is_known_by_its_token() -> None:
    for token, foreign in (("abc", False), ("abd", True), ("", True)):
        assert Request(1, 0.5, Verb.STATUS, session="abc").foreign(token) == foreign
        assert not Request(1, 0.5, Verb.STATUS).foreign(token), "an operator's"


def test_a_reply_comes_back_as_it_was() -> None:
    reply = Reply(3, False, "it moves", {"mode": "RUNNING", "q": [0.5, None]})
    assert requests.parse_reply(reply.line()) == reply
    for bad in (b"", b"[]", b'{"version": 9}', b'{"version": 1, "number": 1, "ok": 1}'):
        with pytest.raises(RequestError):
            requests.parse_reply(bad)


def test_what_limits_an_arm_counts_and_nothing_else(tmp_path: Path) -> None:
    assert {field.name for field in fields(Deployment)} >= deployments.OTHERS
    made = Deployment.parse(bases()[-1])
    said = checksum(made)
    elsewhere = {**made.driver, "host": "10.0.0.2", "port": "/dev/ttyUSB1"}
    other_policy = {"policy": "another", "recording": "there", "given": {"goal_x": 1.0}}
    for same in (other_policy, {"driver": elsewhere, "dry": True}):
        assert checksum(replace(made, **same)) == said
    for other in (
        {"limits": replace(made.limits, velocity=(0.5,) * 7)},
        {"fresh": replace(made.fresh, stop=0.9)},
        {"workspace": None},
        {"hold_to_run": not made.hold_to_run},
        {"watchdog": WatchdogConfig("/dev/ttyACM0")},
        {"driver": {**made.driver, "noise": 0.5}},
    ):
        assert checksum(replace(made, **other)) != said
    arm = tmp_path / "arm.yaml"
    arm.write_text("one")
    named = replace(made, kinematics=str(arm))
    before = checksum(named)
    arm.write_text("two")
    assert checksum(named) != before, "the content of a file that is named counts"
    assert "driver.host" not in deployments.acting(replace(made, driver=elsewhere))


def test_the_next_session_in_the_folder_says_what_changed(tmp_path: Path) -> None:
    made = Deployment.parse(bases()[-1])
    assert "nothing to compare with" in compared(made, tmp_path)
    assert "unchanged since the last session" in compared(replace(made, policy="x"), tmp_path)
    faster = replace(made, limits=replace(made.limits, velocity=(0.5,) * 7), torque_rate=None)
    assert compared(faster, tmp_path) == (
        f"safety parameters {checksum(faster)}: CHANGED since the last session"
        " in this folder: limits.velocity, torque_rate"
    )
    (tmp_path / deployments.SAFETY_FILE).write_text("{")
    assert "nothing to compare with" in compared(made, tmp_path)
