"""The server and the client on a loopback address: answers, tokens, limits, damage, silence."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from embodied import cli
from embodied.commands import function, serve
from embodied.commands.eval import evaluate_served
from embodied.core import build as core_build
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.errors import RemoteError, ServerLost
from embodied.core.spec import SpecMismatch
from embodied.envs.toy.two_gap import Config, TwoGap
from embodied.evaluation.evaluate import evaluate
from embodied.policies.remote.address import allow_typed
from embodied.serve import protocol
from embodied.serve.client import Client
from embodied.serve.protocol import RequestError, decode, encode
from embodied.serve.server import Server
from tests.builders import make_policy
from tests.policies.remote.servers import free_port

TOKEN = "a token of more than sixteen letters"
HEADERS = {"Authorization": f"Api-Key {TOKEN}"}


class Double:
    """Twice what it gets; refuses negative numbers, and has a bug at 1300."""

    metadata: dict[str, Any] = {"name": "double"}  # noqa: RUF012

    def infer(self, request: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
        if "sleep" in request:
            time.sleep(request["sleep"])
        if (request["x"] < 0).any():
            raise RequestError("x should not\nbe negative")
        if (request["x"] == 1300).any():
            raise KeyError("a bug")
        return {"actions": 2 * request["x"]}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(Double(), port=0, token=TOKEN, message=100_000, connections=2) as it:
        yield it


def client(server: Server, timeout: float = 20.0) -> Client:
    return Client(server.url, TOKEN, timeout)


def x(*values: float) -> dict[str, Any]:
    return {"x": np.array(values)}


def test_requests_are_answered_in_order_however_many_are_sent_at_once(server: Server) -> None:
    with client(server) as one:
        assert one.metadata == {"name": "double"}
        answers = one.request_many([x(i) for i in range(50)])
    assert [answer["actions"].tolist() for answer in answers] == [[2.0 * i] for i in range(50)]
    assert answers[0]["server_timing"]["infer_ms"] >= 0


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "ü" * 20])
def test_an_unknown_token_is_refused_in_one_line_before_anything_is_sent(
    server: Server, token: str | None
) -> None:
    with pytest.raises((RemoteError, UnicodeEncodeError), match=r"token|codec"):
        Client(server.url, token, 20.0)
    assert server.connected == 0


def test_a_web_page_is_refused_also_with_the_token(server: Server) -> None:
    with pytest.raises(Exception, match="403"):
        connect(server.url, additional_headers=HEADERS, origin="http://localhost")


def test_an_error_is_one_line_and_the_connection_goes_on(server: Server) -> None:
    with client(server) as one:
        for value, line in ((-1.0, "x should not be negative"), (1300.0, "the policy failed")):
            with pytest.raises(RemoteError, match=line) as caught:
                one.request(x(value))
            assert "\n" not in str(caught.value) and not isinstance(caught.value, ServerLost)
        assert one.request(x(4))["actions"] == 8


def test_damaged_messages_are_answered_and_the_server_goes_on(server: Server) -> None:
    with connect(server.url, additional_headers=HEADERS) as raw:
        raw.recv()
        no_type = {b"__ndarray__": True, b"data": b"", b"dtype": ",", b"shape": [0]}
        no_number = {b"__npgeneric__": True, b"data": float("nan"), b"dtype": "<i8"}
        wrong = (b"", b"\xc1", encode([1]), encode({"x": 1})[:-1], encode(no_type))
        for message in (*wrong, encode(no_number), "text"):
            raw.send(message)
            answer = raw.recv(20)
            assert isinstance(answer, str) and "\n" not in answer and "failed" not in answer
        raw.send(encode(x(3)))
        answer = raw.recv(20)
        assert isinstance(answer, bytes) and decode(answer)["actions"] == 6


def test_a_message_that_is_too_large_ends_only_its_own_connection(server: Server) -> None:
    with client(server) as one, client(server) as other:
        with pytest.raises(ServerLost, match="1009"):
            one.request({"x": np.zeros(20_000)})
        assert other.request(x(1))["actions"] == 2


def test_one_client_too_many_waits_for_another_to_go(server: Server) -> None:
    wanted = pytest.raises(ServerLost, match="as many clients as it allows")
    with client(server), client(server), wanted:
        client(server)
    until = time.monotonic() + 20
    while server.connected and time.monotonic() < until:
        time.sleep(0.01)
    with client(server) as another:
        assert another.request(x(1))["actions"] == 2


def test_clients_that_hang_do_not_stop_the_server(server: Server) -> None:
    """One that never says a word, one that stops in the handshake, one that reads no answer."""
    address = ("127.0.0.1", server.port)
    silent, half = socket.create_connection(address), socket.create_connection(address)
    half.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
    deaf = connect(server.url, additional_headers=HEADERS, max_size=None)
    deaf.recv()
    deaf.recv_messages.pause()  # it reads no answer from now on

    def ask_for_ever() -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                deaf.send(encode({"x": np.zeros(10_000)}))

    asks = threading.Thread(target=ask_for_ever, daemon=True)
    asks.start()
    asks.join(1.0)
    assert asks.is_alive()  # nobody takes its requests any more
    with client(server) as one:
        assert one.request(x(1))["actions"] == 2
    for wire in (silent, half):
        wire.close()
    deaf.socket.shutdown(socket.SHUT_RDWR)


def test_a_server_that_falls_silent_is_lost_after_the_timeout(server: Server) -> None:
    with client(server, timeout=0.2) as one:
        with pytest.raises(ServerLost, match=r"no answer within 0.2 s"):
            one.request(x(1) | {"sleep": 2.0})
        with pytest.raises(ServerLost):
            one.request(x(1))


def answering(*parts: bytes) -> Iterator[int]:
    """A server that sends these bytes to whoever connects; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            while True:
                try:
                    wire, _ = listening.accept()
                except OSError:
                    return
                wire.recv(1000)
                for part in parts:
                    wire.sendall(part)
                if parts:
                    wire.close()

        threading.Thread(target=run, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


HTTP = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize("garbage", [b"\x00\xff" * 50, b"220 smtp\r\n", b"SSH-2.0-x\r\n", HTTP])
def test_garbage_is_no_policy_server(garbage: bytes) -> None:
    for port in answering(garbage):
        with pytest.raises(RemoteError, match="no policy server"):
            Client(f"ws://127.0.0.1:{port}", None, 5.0)


def test_a_port_that_says_nothing_or_is_closed_is_lost() -> None:
    for port in answering():
        with pytest.raises(ServerLost, match="does not answer"):
            Client(f"ws://127.0.0.1:{port}", None, 0.3)
    with pytest.raises(ServerLost, match=f"embodied serve RUN port={(port := free_port())}"):
        Client(f"ws://127.0.0.1:{port}", None, 5.0)


@pytest.mark.parametrize("url", ["http://h:1", "h:1", "ws://", "ws://u@h:1", "ws://h:99999", ""])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="ws://HOST:PORT"):
        protocol.address(url)


def test_the_token_is_made_once_and_only_its_owner_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(protocol.VARIABLE, raising=False)
    path = protocol.token_file(8123)
    token = protocol.make_token(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600 and len(token) >= 32
    assert protocol.make_token(path) == token
    assert protocol.find_token("ws://127.0.0.1:8123", None) == token
    assert protocol.find_token("ws://10.0.0.7:8123", None) is None
    assert protocol.find_token("ws://10.0.0.7:8123", str(path)) == token
    monkeypatch.setenv(protocol.VARIABLE, "another one of some length")
    assert protocol.find_token("ws://10.0.0.7:8123", None) == "another one of some length"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        protocol.read_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="holds no token"):
        protocol.read_token(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        protocol.read_token(tmp_path / "none")


SPEC = TwoGap(Config(num_envs=1)).spec


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(protocol.VARIABLE, raising=False)
    monkeypatch.setattr(core_build, "ASKED", [])
    policy = make_policy("generative.flow.Flow", SPEC, chunk=4, width=16)
    checkpoint.save(tmp_path / "run" / "checkpoints" / "00000000", policy, 0)
    return tmp_path / "run"


def line(*words: str) -> str:
    args = cli.parse(list(words))
    with pytest.raises(Exception) as caught:
        function(args.run)(args)
    said = cli.mistake(caught.value)
    assert said is not None and "\n" not in said, repr(caught.value)
    return said


def test_it_says_what_is_served_and_needs_its_token(run: Path) -> None:
    settings = serve.parsed([str(run), f"port={free_port()}"])[1]
    policy = checkpoint.load_policy(run)
    with serve.serving(policy, settings) as server:
        said = "\n".join(serve.lines(policy, run, server, settings))
        assert "chunks of 4, normal noise [8], 2 features" in said and server.url in said
        assert str(protocol.token_file(settings.port)) in said and "not encrypted" not in said
        token = protocol.read_token(protocol.token_file(settings.port))
        assert token not in said
        with Client(server.url, token) as client:
            assert client.metadata["embodied"]["chunk"] == 4


def test_another_address_has_a_token_and_a_warning(run: Path) -> None:
    words = [str(run), "host=0.0.0.0", f"port={free_port()}", "token=false"]
    with pytest.raises(ConfigError, match="needs a token"):
        serve.serving(checkpoint.load_policy(run), serve.parsed(words)[1])
    settings = serve.parsed(words[:-1])[1]
    server = serve.serving(checkpoint.load_policy(run), settings)
    assert "not encrypted" in "\n".join(serve.lines(server.service.policy, run, server, settings))  # pyright: ignore


def test_an_evaluation_over_the_wire_is_that_in_process(run: Path) -> None:
    policy = checkpoint.load_policy(run)
    words = ["env=two_gap", "episodes=8", "num_envs=4", "policy.timeout=60"]
    with serve.serving(policy, serve.parsed([str(run), f"port={free_port()}"])[1]) as server:
        allow_typed([server.url])
        row = evaluate_served(server.url, words, [])
    result = evaluate(policy, TwoGap(Config(num_envs=4)), 8, 10_000)
    assert row["return"] == result.returns.mean().item() and row["episodes"] == 8
    assert row["length"] == result.lengths.float().mean().item()
    assert json.dumps(row)


def test_an_evaluation_over_the_wire_takes_a_mapping(run: Path, tmp_path: Path) -> None:
    other = replace(SPEC, obs={"place": SPEC.obs["state"]})
    policy, file = make_policy("generative.flow.Flow", other, chunk=4), tmp_path / "names.yaml"
    file.write_text("obs: {state: place}\naction: {low: [-1, -1], high: [1, 1]}\n")
    words = ["env=two_gap", "episodes=2", "num_envs=2", "policy.timeout=60"]
    with serve.serving(policy, serve.parsed([str(run), f"port={free_port()}"])[1]) as server:
        allow_typed([server.url])
        with pytest.raises(SpecMismatch, match=r"obs/place: absent .* mapping=FILE"):
            evaluate_served(server.url, words, [])
        row = evaluate_served(server.url, [*words, f"mapping={file}"], [])
    assert row["episodes"] == 2


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    assert "name the run to serve" in line("serve")
    assert 'no setting "prt" (did you mean "port"?)' in line("serve", str(run), "prt=1")
    assert "port=70000 should be at least 0, at most 65535" in line("serve", str(run), "port=70000")
    assert "message_mb" in line("serve", str(run), "message_mb=0")
    assert "holds no checkpoint" in line("serve", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot listen at ws://" in line("serve", str(run), f"port={port}", "device=cpu")
    assert "env=NAME" in line("eval", "ws://127.0.0.1:1")
    assert "nothing answers at ws://127.0.0.1:1 " in line("eval", "ws://127.0.0.1:1", "env=two_gap")
    address = "init=ws://127.0.0.1:1"
    assert "nothing answers" in line("train", "experiment=two_gap_dsrl", address, "size=debug")
