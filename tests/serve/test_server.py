"""The server and the client on a loopback address: answers, tokens, limits, damage, silence; what a
served policy answers, and what it refuses in one line."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from embodied import cli
from embodied.commands import checked, serve
from embodied.commands.eval import evaluate_run
from embodied.core import build as core_build
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.errors import RemoteError, ServerLost
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec, SpecMismatch
from embodied.envs.toy.two_gap import Config, TwoGap
from embodied.evaluation.evaluate import evaluate
from embodied.mistakes import mistake
from embodied.policies.remote.address import allow_typed
from embodied.serve import protocol
from embodied.serve.client import Client
from embodied.serve.policy_service import PolicyService
from embodied.serve.protocol import CodecError, Offer, RequestError, decode, encode
from embodied.serve.server import Server
from tests.builders import make_policy, node_of, wait_until
from tests.policies.remote.servers import free_port

ROOT = Path(__file__).parents[2]
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
    wait_until(lambda: not server.connected)
    with client(server) as another:
        assert another.request(x(1))["actions"] == 2


def test_clients_that_hang_do_not_stop_the_server(server: Server) -> None:
    """One that never says a word, one that stops in the handshake, one that reads no answer."""
    silent, half = (socket.create_connection(("127.0.0.1", server.port)) for _ in range(2))
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


@contextlib.contextmanager
def answering(*parts: bytes) -> Iterator[int]:
    """A server that sends these bytes to whoever connects; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    wire, _ = listening.accept()
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
    with answering(garbage) as port, pytest.raises(RemoteError, match="no policy server"):
        Client(f"ws://127.0.0.1:{port}", None, 5.0)


def test_a_port_that_says_nothing_or_is_closed_is_lost() -> None:
    with answering() as port, pytest.raises(ServerLost, match="does not answer"):
        Client(f"ws://127.0.0.1:{port}", None, 0.3)
    port = free_port()
    with pytest.raises(ServerLost, match=f"embodied serve RUN port={port}"):
        Client(f"ws://127.0.0.1:{port}", None, 5.0)


def refused(path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        protocol.read_token(path)


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
    own, other = "ws://127.0.0.1:8123", "ws://10.0.0.7:8123"
    assert protocol.find_token(own, None) == protocol.find_token(other, str(path)) == token
    assert protocol.find_token(other, None) is None
    monkeypatch.setenv(protocol.VARIABLE, "another one of some length")
    assert protocol.find_token(other, None) == "another one of some length"
    path.chmod(0o640)
    refused(path, "chmod 600")
    path.chmod(0o600)
    path.write_text("short\n")
    refused(path, "holds no token")
    refused(tmp_path / "none", "cannot be read")


@contextlib.contextmanager
def serving(run: Path, policy: Policy | None = None, *words: str) -> Iterator[Any]:
    """The server of a run, or of another policy in its place, and its settings."""
    settings = serve.parsed([f"port={free_port()}", *words])
    with serve.serving(policy or checkpoint.load_policy(run), settings) as server:
        allow_typed([server.url])
        yield server, settings


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
        checked(args)(args)
    said = mistake(caught.value)
    assert said is not None and "\n" not in said, repr(caught.value)
    return said


def test_it_says_what_is_served_and_needs_its_token(run: Path) -> None:
    with serving(run) as (server, settings):
        said = "\n".join(serve.lines(server.service.policy, run, server, settings))
        assert "chunks of 4, normal noise [8], 2 features" in said and server.url in said
        assert str(protocol.token_file(settings.port)) in said and "not encrypted" not in said
        token = protocol.read_token(protocol.token_file(settings.port))
        assert token not in said
        with Client(server.url, token) as client:
            assert client.metadata["embodied"]["chunk"] == 4


def test_another_address_has_a_token_and_a_warning(run: Path) -> None:
    with (
        pytest.raises(ConfigError, match="needs a token"),
        serving(run, None, *OPEN, "token=false"),
    ):
        pass
    with serving(run, None, *OPEN) as (server, settings):
        said = serve.lines(server.service.policy, run, server, settings)
        assert "not encrypted" in "\n".join(said)


OPEN = ("host=0.0.0.0",)


OVER_THE_WIRE = ["env=two_gap", "num_envs=2", "episodes=8", "policy.timeout=60"]


def test_an_evaluation_over_the_wire_is_that_in_process(run: Path) -> None:
    with serving(run) as (server, _):
        row = evaluate_run(server.url, OVER_THE_WIRE, [])
    result = evaluate(checkpoint.load_policy(run), TwoGap(Config(num_envs=2)), 8, 10_000)
    assert row["return"] == result.returns.mean().item() and row["episodes"] == 8
    assert row["length"] == result.lengths.float().mean().item()
    assert json.dumps(row)


def test_an_evaluation_over_the_wire_takes_a_mapping(run: Path, tmp_path: Path) -> None:
    other = replace(SPEC, obs={"place": SPEC.obs["state"]})
    policy, file = make_policy("generative.flow.Flow", other, chunk=4), tmp_path / "names.yaml"
    file.write_text("obs: {state: place}\naction: {low: [-1, -1], high: [1, 1]}\n")
    with serving(run, policy) as (server, _):
        with pytest.raises(SpecMismatch, match=r"obs/place: absent .* mapping=FILE"):
            evaluate_run(server.url, OVER_THE_WIRE, [])
        assert evaluate_run(server.url, [*OVER_THE_WIRE, f"mapping={file}"], [])["episodes"] == 8


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


EDGES = (0, 1, 127, 128, 255, 2**16, 2**32, 2**63, 2**64 - 1, -1, -32, -33, -(2**15), -(2**63))


def anything(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 4 else 6)
    if kind < 6:
        number = draw.choice(EDGES)
        return (None, True, number, draw.gauss(0, 1), "x" * draw.choice((0, 31, 32, 300)), b"yz")[
            kind
        ]
    size = draw.choice((0, 1, 5, 16))
    parts = [anything(draw, depth + 1) for _ in range(size)]
    return parts if kind == 6 else {f"key{i}": part for i, part in enumerate(parts)}


@pytest.mark.parametrize("seed", range(50))
def test_another_implementation_reads_what_we_write_and_we_what_it_writes(seed: int) -> None:
    value = anything(random.Random(seed))
    assert msgspec.msgpack.decode(encode(value)) == value
    assert decode(msgspec.msgpack.encode(value)) == value


@pytest.mark.parametrize(
    "dtype", ["?", "u1", "<u2", "<i4", ">i4", "<i8", "<f2", "<f4", ">f4", "<f8"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_an_array_arrives_with_its_dtype_shape_and_bits(dtype: str, shape: tuple[int, ...]) -> None:
    sent = (np.random.default_rng(0).normal(size=shape) * 50).astype(dtype)
    got = decode(encode({"a": sent}))["a"]
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.tobytes() == sent.tobytes()


def test_an_array_that_is_not_contiguous_and_a_scalar_arrive() -> None:
    sent = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3]
    got = decode(encode([sent, np.float32(1.5), np.int64(-3)]))
    np.testing.assert_array_equal(got[0], sent)
    assert got[1] == np.float32(1.5) and got[1].dtype == np.float32
    assert got[2] == -3 and got[2].dtype == np.int64
    assert encode(np.zeros(2, np.float32)) == array(), "the map is openpi's"


def array(**changed: Any) -> bytes:
    """An array's map as openpi packs it, with some of it changed; for `msgspec`, keys are bytes."""
    given = {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2]} | changed
    return b"\x84" + b"".join(encode(key.encode()) + encode(v) for key, v in given.items())


@pytest.mark.parametrize(
    "changed",
    [
        *({"dtype": wrong} for wrong in ("O", "|O8", "V8", "<U2", "<M8[s]", "f4,f4", "(2,)f4")),
        *({"dtype": wrong} for wrong in ("<c8", "__import__('os')", 3, ["f4"])),
        *({"shape": wrong} for wrong in ([3], [-2], [2**40, 0], [True, 2], [1.0, 2], "2")),
        {"shape": [1] * 40},
        *({"data": wrong} for wrong in ("12345678", None, bytes(7))),
    ],
)
def test_an_array_that_is_none_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CodecError):
        decode(array(**changed))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",  # no type of MessagePack
        b"\xc7\x01\x05a",  # an extension
        b"\xd9\x05ab",  # text that ends too early
        b"\xc4\xff",
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million values in five bytes
        b"\xdf\xff\xff\xff\xff\x00",
        b"\xa2\xff\xfe",  # no UTF-8
        b"\x81\x01\x02",  # a key that is a number
        b"\x81\x90\x02",  # a key that is a list
        b"\xc0\xc0",  # two messages
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x91" * (protocol.MAX_DEPTH + 2) + b"\xc0",
        b"\x91" * 100_000 + b"\xc0",
        b"\xdd" + struct.pack(">I", protocol.MAX_ITEMS) + b"\x80" * protocol.MAX_ITEMS,
        b"\xdb" + struct.pack(">I", protocol.MAX_TEXT + 1) + b"a" * (protocol.MAX_TEXT + 1),
    ],
)
def test_bytes_that_are_no_message_are_refused(message: bytes) -> None:
    with pytest.raises(CodecError):
        decode(message)


def test_any_damage_is_refused_or_read_and_never_another_error() -> None:
    draw = random.Random(1)
    whole = encode({"a": np.arange(6, dtype=np.int16), "b": [1, "text", {"c": -1.5}], "d": None})
    for _ in range(5_000):
        damaged = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            decode(bytes(damaged[: draw.randrange(1, len(damaged) + 1)]))
        except CodecError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {3, 4}, 2**64, -(2**63) - 1, np.array([None]), np.array(["a"]), 1j]
)
def test_what_cannot_be_sent_is_refused(value: Any) -> None:
    with pytest.raises(CodecError):
        encode(value)


ACT = Leaf((2,), low=-1.0, high=1.0)
STATE_SPEC = Spec({"state": Leaf((3,)), "critic/mass": Leaf((1,))}, ACT, dt=0.1, text="go")
FLOW = node_of("policies.generative.flow.Flow", chunk=4, width=16)
INNER = node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[8])
GRU = node_of("policies.recurrent.Recurrent", inner=INNER)
GAUSSIAN = node_of("policies.gaussian.Gaussian", hidden=[8])


def service(node: dict[str, Any] = FLOW, spec: Spec = STATE_SPEC) -> PolicyService:
    torch.manual_seed(0)
    return PolicyService(build(node, Policy, spec=spec))


def state(*shape: int) -> np.ndarray[Any, Any]:
    return np.linspace(-1, 1, 3 * max(1, int(np.prod(shape)))).reshape(*shape, 3)


def test_metadata_say_what_is_served() -> None:
    offer = service().offer
    assert offer == Offer.from_metadata(service().metadata)
    assert (offer.chunk, offer.noise, offer.normal, offer.features) == (4, (8,), True, 3)
    assert (
        offer.batch
        and offer.spec == STATE_SPEC.to_json()
        and offer.software.startswith("embodied-rl")
    )
    other = service(FLOW | {"width": 8}).offer
    assert offer.policy != other.policy and offer.normalizer == other.normalizer
    assert Offer.from_metadata({"stock": 1}) == Offer()
    explores = service(GAUSSIAN).offer
    assert explores.noise == (2,) and not explores.normal, "noise for exploration only"


def test_the_hash_of_the_normalizer_follows_its_numbers() -> None:
    policy = build(FLOW, Policy, spec=STATE_SPEC)
    before = PolicyService(policy).offer
    obs = {"obs/state": torch.randn(50, 3), "action": torch.rand(50, 4, 2)}
    policy.fit({**obs, "valid": torch.ones(50, 4, dtype=torch.bool)})
    after = PolicyService(policy).offer
    assert before.normalizer != after.normalizer and before.policy != after.policy


def test_one_observation_and_a_batch_of_them() -> None:
    served, noise = service(), np.ones((5, 8))
    many = served.infer({"state": state(5), "noise": noise, "embodied": {"batch": 5}})
    assert many["actions"].shape == (5, 4, 2) and many["carry"] == {}
    one = served.infer({"state": state(5)[2], "noise": noise[2]})
    assert set(one) == {"actions"} and one["actions"].shape == (4, 2)
    np.testing.assert_allclose(one["actions"], many["actions"][2], atol=1e-6)


PAST = FLOW | {"obs_steps": 3}
CHUNKS = node_of("policies.wrappers.real_time_chunking.RealTimeChunking", base=FLOW, delay=1)


@pytest.mark.parametrize("node", [GRU, PAST])
def test_a_connection_remembers_what_a_client_does_not_send(node: dict[str, Any]) -> None:
    """The answers of an episode are those to a client that sends its carry; a new connection, or
    the key `reset`, begins an episode."""
    served, noise = service(node), np.full(8 if node is PAST else 2, 0.1)
    steps = [state() + 0.1 * i for i in range(5)]
    actor = Actor(served.policy, 1, execute=1)
    served.policy.sample_noise = lambda n, explore=False: torch.full((n, len(noise)), 0.1)  # pyright: ignore
    wanted: list[Any] = []
    for i, seen in enumerate(steps):
        actor({"state": torch.tensor(seen).float()[None]}, torch.tensor([i == 0]))
        wanted.append(actor.plan[0].numpy())
    memory: dict[str, Any] = {}
    for again in range(2):
        for i, seen in enumerate(steps):
            begins = {"reset": True} if again and i == 0 else {}
            answer = served.infer({"state": seen, "noise": noise, **begins}, memory)
            np.testing.assert_allclose(answer["actions"], wanted[i], atol=1e-6)
    other = served.infer({"state": steps[4], "noise": noise}, {})["actions"]
    assert np.abs(other - wanted[4]).max() > 1e-4, "the past matters"
    with pytest.raises(RequestError, match="reset is true or false"):
        served.infer({"state": state(), "reset": 1}, memory)


def test_a_client_that_says_not_what_it_executed_gets_no_joined_chunks() -> None:
    with pytest.raises(RequestError, match="how many actions were executed: use policy=remote"):
        service(CHUNKS).infer({"state": state()}, {})


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        ({}, "state is missing"),
        ({"state": state(), "stat": 1}, 'no observation stat .did you mean "state"'),
        ({"state": state(2)}, r"state is float64\[2, 3\], and should have the shape \[3\]"),
        ({"state": "abc"}, "state is"),
        ({"state": [[1], [2, 3]]}, "state is no array"),
        ({"state": np.array([1, np.inf, 2])}, "not finite"),
        ({"state": np.array([1j, 0, 0])}, "state is complex"),
        ({"state": state(), "noise": np.ones(7)}, r"noise is float64\[7\]"),
        ({"state": state(), "noise": np.full(8, np.nan)}, "not finite"),
        ({"state": state().astype(int)}, "int64, and should be float32"),
        ({"state": state(), "embodied": {"batch": 0}}, "batch=0"),
        ({"state": state(), "embodied": {"batch": 2.5}}, "batch=2.5"),
        ({"state": state(), "embodied": {"batch": 10**6}}, "batch=1000000"),
        ({"state": state(), "embodied": {"verb": "train"}}, "no 'train'|no train"),
        ({"state": state(), "embodied": {"bach": 2}}, "batch, verb, carry"),
        ({"state": state(), "embodied": 3}, "is a map"),
        ({"state": state(), "embodied": {"carry": {"h": 1}}}, "carry is a map of nothing"),
        ({"state": state(), "prompt": "jump"}, "never saw the prompt 'jump', it knows 'go'"),
    ],
)
def test_what_cannot_be_answered_is_one_line(request_: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError, match=line) as caught:
        service().infer(request_)
    assert "\n" not in str(caught.value)


def test_pictures_are_not_rounded_silently() -> None:
    spec = Spec({"front": Leaf((8, 8, 3), "uint8")}, ACT, dt=0.1)
    gaussian, noise = service(GAUSSIAN, spec), np.zeros(2)
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3))
    wanted = gaussian.infer({"front": picture.astype(np.uint8), "noise": noise})["actions"]
    assert np.array_equal(gaussian.infer({"front": picture, "noise": noise})["actions"], wanted)
    floats = (picture / 255, picture.astype(float), picture * np.nan)
    for wrong in (*floats, picture + 300, picture - 300):
        with pytest.raises(RequestError, match="should be uint8"):
            gaussian.infer({"front": wrong})
    for other in (picture.transpose(2, 0, 1), picture[::2, ::2], picture[None]):
        with pytest.raises(RequestError, match=r"should have the shape \[8, 8, 3\]"):
            gaussian.infer({"front": other})


def test_names_that_the_protocol_needs_are_refused() -> None:
    with pytest.raises(ConfigError, match="an observation called noise cannot be served"):
        service(GAUSSIAN, Spec({"noise": Leaf((2,))}, ACT, dt=0.1))


def test_the_plug_in_of_lerobot_keeps_what_a_policy_carries_by_row_and_episode(
    tmp_path: Path,
) -> None:
    """Past observations of every control step; nothing of another row, or of the episode before."""
    file = ROOT / "plugins/lerobot_policy_embodied/lerobot_policy_embodied/deciders.py"
    about = importlib.util.spec_from_file_location("deciders", file)
    assert about is not None and about.loader is not None
    deciders = importlib.util.module_from_spec(about)
    about.loader.exec_module(deciders)
    spec = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), 0.1)
    policy = make_policy("generative.flow.Flow", spec, chunk=4, width=16, obs_steps=3).eval()
    nothing = policy.sample_noise(2) * 0
    policy.sample_noise = lambda n, explore=False: nothing
    seen = torch.randn(2, 6, 2, 2)  # episodes, steps, rows
    actor = Actor(policy, 2, execute=2)
    wanted = [
        actor({"state": obs}, torch.full((2,), step == 0))
        for episode in seen
        for step, obs in enumerate(episode)
    ]
    checkpoint.save(tmp_path / "run", policy, 0)
    with Server(PolicyService(policy), port=0) as server:
        for decider in (deciders.Here(str(tmp_path / "run")), deciders.Served(server.url, "")):
            found: list[torch.Tensor] = []
            for episode in seen:
                decider.reset()
                for step, obs in enumerate(episode):
                    if step % 2 == 0:
                        chunk = decider.decide({"state": obs}, nothing, 2)
                    decider.remember({"state": obs})
                    found.append(chunk[:, step % 2])
            assert torch.allclose(torch.stack(found), torch.stack(wanted), atol=1e-6)
