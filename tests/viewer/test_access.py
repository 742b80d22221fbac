"""The door: this machine only, or a token; wrong tokens, paths and messages are refused."""

from __future__ import annotations

import importlib.metadata
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from embodied.viewer.panels.page import Viewer
from tests import toy_envs
from tests.viewer.browser import until
from tests.viewer.sessions import alone

VISER = f"viser-v{importlib.metadata.version('viser')}"


@pytest.fixture(scope="module")
def local() -> Iterator[Viewer]:
    with Viewer(alone(toy_envs.Reach(1)), port=0) as viewer:
        yield viewer


@pytest.fixture(scope="module")
def public() -> Iterator[Viewer]:
    """Open to others; only reached from here."""
    with Viewer(alone(toy_envs.Reach(1)), port=0, host="0.0.0.0") as viewer:
        yield viewer


def said(viewer: Viewer, request: bytes) -> bytes:
    """What the page answers to raw bytes."""
    with socket.create_connection(("127.0.0.1", viewer.server.get_port()), timeout=30) as line:
        line.sendall(request)
        answer = b""
        while part := line.recv(65_536):
            answer += part
    return answer


def status(viewer: Viewer, target: str, **headers: str) -> int:
    given = {"Host": f"127.0.0.1:{viewer.server.get_port()}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    answer = said(viewer, f"GET {target} HTTP/1.1\r\n{lines}\r\n".encode())
    return int(answer.split(b" ", 2)[1])


def test_the_page_is_given_here_and_to_nobody_else(local: Viewer) -> None:
    with urllib.request.urlopen(local.url, timeout=30) as answer:
        assert answer.status == 200 and b"<html" in answer.read()[:2000].lower()
    # Another loopback address reaches what listens everywhere, but not what listens on one.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", local.server.get_port()), timeout=5)
    assert status(local, "/", Host="localhost:80") == 200
    # A page elsewhere whose name was given this machine's address.
    assert status(local, "/", Host="evil.example") == 403
    port = local.server.get_port()
    assert status(local, "/", Host=f"127.0.0.1:{port}\r\nHost: evil.example") == 403


def test_what_is_no_request_is_refused_and_the_page_goes_on(local: Viewer) -> None:
    for words in (
        b"hello",
        b"\xff\xfe\x00",
        b"GET /",
        b"GET / HTTP/2",
        b"GET / HTTP/1.1\r\nnocolon",
    ):
        assert said(local, words + b"\r\n\r\n") == b"", "it hangs up"
    assert said(local, b"GET http://x/ HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 403 ")
    outside = ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/assets/..%5c..%5cetc%5cpasswd")
    assert {status(local, path) for path in (*outside, "/a%00b")} == {400}
    assert said(local, b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    long = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n"
    assert said(local, long) == b""
    assert status(local, "/") == 200


def test_other_pages_cannot_connect_through_a_browser(local: Viewer) -> None:
    address = local.url.replace("http", "ws")
    with pytest.raises(InvalidStatus) as refused:
        connect(address, subprotocols=[VISER], origin="http://evil.example")
    assert refused.value.response.status_code == 403
    with connect(address, subprotocols=[VISER], origin=local.url):
        until(lambda: len(local.server.get_clients()) >= 0)


def test_a_message_that_means_nothing_ends_nothing_but_its_connection(local: Viewer) -> None:
    address = local.url.replace("http", "ws")
    with connect(address, subprotocols=[VISER], max_size=None) as line:
        line.recv(timeout=30)
        with pytest.raises((ConnectionClosed, TimeoutError)):
            line.send(b"\xc1garbage")
            line.send(b"\x81\xa4type\xa7Nothing")
            while True:
                line.recv(timeout=3)
    local.step()
    assert local.session.episode.steps >= 1 and status(local, "/") == 200


def test_elsewhere_a_token_is_needed(public: Viewer) -> None:
    found = re.fullmatch(r"http://\S+:\d+/\?token=(\S{20,})", public.url)
    assert found is not None
    token = found[1]
    assert status(public, "/") == status(public, "/?token=wrong") == 403
    assert status(public, "/", Cookie="embodied_view=wrong") == 403
    welcome = said(public, f"GET /?token={token} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert welcome.startswith(b"HTTP/1.1 303 ") and b"\r\nLocation: /\r\n" in welcome
    cookie = re.search(rb"Set-Cookie: ([^;]+); HttpOnly; SameSite=Strict", welcome)
    assert cookie is not None
    assert status(public, "/", Host="anything", Cookie=f"a=1; {cookie[1].decode()}") == 200
    address = f"ws://127.0.0.1:{public.server.get_port()}"
    with pytest.raises(InvalidStatus):
        connect(address, subprotocols=[VISER])
    with connect(address, subprotocols=[VISER], additional_headers={"Cookie": cookie[1].decode()}):
        pass
