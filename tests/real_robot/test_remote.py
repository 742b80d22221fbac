"""Operators over TCP: who has a key is heard as at the Unix socket, and nobody else. A real daemon
with its processes, and real sockets on this machine; nothing here is timed."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import pytest
import zmq

from embodied.core.build import ConfigError
from embodied.real_robot.daemon.client import ClientError
from embodied.real_robot.daemon.requests import MOST_BYTES, Reply, Request, Verb, parse_reply
from embodied.real_robot.deployment import Deployment, Remote
from embodied.real_robot.remote import (
    MAX_MESSAGE_BYTES,
    KeyFileError,
    Pair,
    Relay,
    RemoteClient,
    call_remote,
    make,
    public_of,
    secret_of,
)
from tests.builders import python
from tests.real_robot.test_daemon import PATIENT, Bridge, deployment, gone, until
from tests.real_robot.test_deploy import robot

__all__ = ["deployment"]
SHORT = 2.0  # s for what is never answered


class Afar(Bridge):
    """The operator asks over TCP."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.keys = keys
        super().__init__(folder)

    @property
    def log(self) -> str:
        path = self.folder / "remote.log"
        return path.read_text() if path.exists() else ""

    @property
    def host(self) -> str:
        """Where the newest relay listens."""
        found = until(lambda: re.findall(r"listening at tcp://(\S+)", self.log), "it listens")
        return found[-1]

    @property
    def own(self) -> Pair:
        """The operator's keys."""
        return secret_of(self.keys / "client.key_secret")

    def call(self, verb: Verb, timeout: float = PATIENT, name: str = "client") -> Reply:
        return call_remote(self.host, self.keys, verb, timeout, name=name)

    def caller(self, own: Pair | None = None, server: Path | None = None) -> RemoteClient:
        key = public_of((server or self.keys) / "server.key")
        return RemoteClient(self.host, own or self.own, key, PATIENT)

    def logged(self, words: str, times: int = 1) -> None:
        until(lambda: self.log.count(words) >= times, f"the log says: {words}")


@pytest.fixture(scope="module")
def afar(tmp_path_factory: pytest.TempPathFactory, deployment: Deployment) -> Iterator[Afar]:
    folder = tmp_path_factory.mktemp("d")
    folder.chmod(0o700)
    keys = folder / "keys"
    make(keys)
    remote = Remote(port=0, keys=str(keys), address="127.0.0.1")
    replace(deployment, metrics=None, remote=remote).write(folder)
    made = Afar(folder, keys)
    yield made
    relay = made.status["remote"]["pid"]
    made.process.terminate()
    assert made.process.wait(PATIENT) == 0
    assert gone(relay)


def test_it_listens_on_loopback_unless_an_address_is_given(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    make(tmp_path / "keys")
    for about, address in (({}, "127.0.0.1"), ({"address": "0.0.0.0"}, "0.0.0.0")):
        relay = Relay(tmp_path, Remote(port=0, keys=str(tmp_path / "keys"), **about))
        assert relay.place.startswith(f"tcp://{address}:")
        relay.close()


def test_an_operator_with_a_key_moves_the_arm(afar: Afar) -> None:
    afar.idle()
    for verb in (Verb.ARM, Verb.START):
        until(lambda verb=verb: afar.call(verb).ok, f"{verb} was done")
    afar.mode("RUNNING")
    afar.logged("is admitted (key client)")


def test_what_moves_an_arm_is_not_obeyed_late(afar: Afar) -> None:
    """Nor is it released from another machine."""
    afar.idle()
    refused = afar.call(Verb.RELEASE)
    assert not refused.ok and "stands beside it" in refused.reason
    with afar.caller() as caller:
        now = caller.now()
        late = caller.call(Verb.ARM, now - 60.0)
        assert not late.ok and "s old" in late.reason
        ahead = caller.call(Verb.ARM, now + 1e6)
        assert not ahead.ok and "send it again" in ahead.reason
        assert caller.call(Verb.STOP, 0.0).reason.startswith("an arm can be stopped when")
    assert afar.status["mode"] == "IDLE"


def test_who_has_no_key_or_a_wrong_one_is_not_heard(afar: Afar, tmp_path: Path) -> None:
    make(strange := tmp_path / "strange")  # keys of another robot
    before, stop = afar.running(), Request(1, 0.0, Verb.ESTOP).line()
    unknown = afar.caller(own=secret_of(strange / "client.key_secret"))
    with pytest.raises(ClientError, match="does not know this key"), unknown:
        unknown.call(Verb.ESTOP)
    afar.logged("whose key is not in")
    with afar.caller(server=strange) as caller:
        afar.logged("not the right server's")
        assert not caller.line.poll(0, zmq.POLLOUT), "there is nobody to talk to"
    refused = afar.log.count("refused: it")
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(f"tcp://{afar.host}")
        plain.send(stop)
        afar.logged("refused: it", refused + 1)  # whichever end is the first to notice
        assert not plain.poll(0)
    address, port = afar.host.split(":")
    for junk in (b"hello\n" * 50, os.urandom(5000), stop):
        with socket.create_connection((address, int(port)), PATIENT) as line:
            line.sendall(junk)
    after = afar.status
    assert after["mode"] == "RUNNING" and after["refused"] == before["refused"]
    assert afar.call(Verb.STOP).ok, "the right one is heard"
    afar.mode("IDLE")
    make(afar.keys, "guest")
    assert afar.call(Verb.STATUS, name="guest").ok
    (afar.keys / "clients" / "guest.key").unlink()
    with pytest.raises(ClientError, match="does not know this key"):
        afar.call(Verb.STATUS, name="guest")


def test_what_is_no_request_is_refused_with_the_desks_reason(afar: Afar) -> None:
    def answer(*junk: bytes) -> bytes:
        with afar.caller() as caller:
            caller.line.send_multipart(junk)
            assert caller.line.poll(round(1e3 * PATIENT))
            return caller.line.recv()

    log = afar.folder / "daemon.log"
    for junk, reason in (
        (b'{"version": 1, "number": 1, "time": 0, "verb": "stpo"}', 'did you mean "stop"'),
        (b"\x80\x04\x95\x05", "the line is not JSON"),
        (b"x" * (MOST_BYTES + 1), "at most 4096"),
    ):
        reply = parse_reply(answer(junk))
        assert not reply.ok and reason in reply.reason
        until(lambda reason=reason: reason in log.read_text(), f"the daemon's log says: {reason}")
    assert answer(b"a", b"b") == b"", "the line is closed"
    afar.logged("sends more than is read")
    ended = afar.log.count("far too large")
    with afar.caller() as caller:
        assert caller.call(Verb.STATUS).ok
        caller.line.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        afar.logged("far too large", ended + 1)
    assert afar.call(Verb.STATUS).ok


def test_estop_works_while_the_daemon_hangs(afar: Afar) -> None:
    afar.running()
    host = afar.host
    os.kill(afar.process.pid, signal.SIGSTOP)
    try:
        reply = call_remote(host, afar.keys, Verb.ESTOP, PATIENT)
        assert reply.ok and "latched after" in reply.reason, reply.reason
        assert "the daemon did not answer" in reply.reason
    finally:
        os.kill(afar.process.pid, signal.SIGCONT)
    assert afar.mode("ESTOP")["fault"] in (
        "an operator pressed stop",
        "the daemon has not answered for 2.0 s",  # a busy machine
    )
    until(lambda: afar.call(Verb.RESET).ok, "it is reset")
    afar.idle()


def test_a_stop_gets_through_a_flood_and_a_crowd(afar: Afar) -> None:
    before = afar.running()
    enough = threading.Event()

    def flood() -> None:
        with afar.caller() as caller:
            for sent in count(2):  # every second one is refused, however slow the machine is
                with suppress(zmq.Again):
                    caller.line.send(Request(sent // 2, 0.0, Verb.STATUS).line(), zmq.NOBLOCK)
                while caller.line.poll(0):
                    caller.line.recv()
                if enough.wait(0.0):
                    break
            caller.line.linger = 0

    dropped = afar.log.count("was disconnected")
    floods = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
    crowd: list[RemoteClient] = []
    for thread in floods:
        thread.start()
    try:
        afar.logged("was disconnected", dropped + 2)  # by the desk, or before it
        crowd += [afar.caller() for _ in range(12)]
        for each in crowd:
            assert each.call(Verb.STATUS).ok
        afar.logged("there are too many clients")
        after = afar.ticks(50)
        assert after["mode"] == "RUNNING" and after["clients"] <= 16
        assert afar.call(Verb.ESTOP).ok
        afar.mode("ESTOP")
    finally:
        enough.set()
        for thread in floods:
            thread.join()
        for each in crowd:
            each.close()
    assert afar.status["refused"] > before["refused"]


def test_the_arm_does_not_mind_when_the_relay_dies(afar: Afar) -> None:
    before = afar.running()
    pid = before["remote"]["pid"]
    os.kill(pid, signal.SIGKILL)
    after = until(lambda: s if (s := afar.status)["remote"]["died"] else None, "it is noticed")
    assert after["remote"] == {"pid": 0, "died": "the remote process died (SIGKILL)"}
    assert afar.ticks(20)["mode"] == "RUNNING"
    with pytest.raises(ClientError, match="no server"):
        afar.call(Verb.STATUS, SHORT)
    assert afar.ask(Verb.STOP).ok, "here one is heard"
    afar.mode("IDLE")
    listened = afar.log.count("listening")
    afar.ask(Verb.RESET)
    afar.logged("listening", listened + 1)
    assert afar.call(Verb.STATUS).status["remote"]["pid"] not in (0, pid)


def test_the_command_line_asks_with_keys(
    afar: Afar, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    afar.idle()
    host, keys, new = f"host={afar.host}", f"keys={afar.keys}", f"folder={tmp_path / 'new'}"
    for words, exits, says in (
        (("status", host, keys), 0, "arm is IDLE"),
        (("load", "/nowhere", host, keys), 2, "/nowhere"),
        (("load", "/nowhere", host, keys), 2, "the one before goes on"),
        (("load", "runs/1", host, keys), 2, "whole path"),
        (("status", host), 2, "keys=DIR"),
        (("status", host, f"keys={tmp_path}"), 2, "client.key_secret cannot be read as a key"),
        (("keys", new), 0, "client.key_secret"),
        (("keys", new), 2, "exists already"),
    ):
        code, text = robot(capsys, *words)
        assert code == exits and says in text, text


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    before = os.umask(0)
    try:
        made = make(folder)
    finally:
        os.umask(before)
    names = ("server.key_secret", "server.key", "client.key_secret", "clients/client.key", ".")
    assert [*made, folder] == [folder / name for name in names]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (*made, folder)]
    assert modes == [0o600, 0o644, 0o600, 0o644, 0o700]
    texts = {path: path.read_text() for path in made}
    with pytest.raises(KeyFileError, match="exists already"):
        make(folder)
    assert [path.name for path in make(folder, "anna")] == ["anna.key_secret", "anna.key"]
    assert {path: path.read_text() for path in made} == texts
    for name in ("../x", "", "server"):
        with pytest.raises(KeyFileError, match="letters and digits"):
            make(folder, name)
    pair = secret_of(folder / "client.key_secret")
    assert zmq.curve_public(pair.secret) == pair.public == public_of(folder / "clients/client.key")
    (folder / "client.key_secret").chmod(0o640)
    with pytest.raises(KeyFileError, match="chmod 600"):
        secret_of(folder / "client.key_secret")
    with pytest.raises(KeyFileError, match="holds no secret"):
        (folder / "server.key").chmod(0o600)
        secret_of(folder / "server.key")


def test_a_relay_without_keys_or_a_port_says_so(deployment: Deployment, tmp_path: Path) -> None:
    def words(remote: Remote) -> str:
        replace(deployment, remote=remote).write(tmp_path)
        left = python("-m", "embodied.real_robot.remote", tmp_path)
        assert left.returncode == 1
        return left.stderr

    keys = tmp_path / "keys"
    assert "server.key_secret cannot be read as a key" in words(Remote(0, str(keys)))
    make(keys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        remote = Remote(taken.getsockname()[1], str(keys), "127.0.0.1")
        assert f"127.0.0.1:{remote.port} cannot be bound" in words(remote)
    assert Deployment.read(tmp_path).remote == remote
    with pytest.raises(ConfigError, match=r"remote\.port=70000"):
        Deployment.parse({**asdict(deployment), "remote": {"port": 70000, "keys": "k"}})


def test_a_missing_package_is_named_in_one_line(tmp_path: Path) -> None:
    program = "import sys; sys.modules['zmq'] = None; from embodied.cli import main; main()"
    left = python("-c", program, "robot", "keys", f"folder={tmp_path}")
    assert left.returncode == 2 and 'pip install "embodied-rl[robot]"' in left.stderr
    assert left.stderr.count("\n") == 1
