"""The server: what opens it, who gets in, what many pages see, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from viser._messages import GuiUpdateMessage, ShareUrlRequest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.connection import Connection

from embodied.core.build import ConfigError
from embodied.core.checkpoint import CheckpointError
from embodied.viewer import ViewerError, serve
from embodied.viewer.launch import read_run, require_port
from embodied.viewer.panels.page import Viewer
from embodied.viewer.server.server import ThreadSafeEvent
from tests import toy_envs
from tests.builders import ROOT, node_of
from tests.viewer.browser import until
from tests.viewer.sessions import CAMERA, LIFT, go, line_to, page_of, received, send

WALKER = node_of("envs.mujoco.locomotion.Locomotion", id="Hopper-v5")


def test_a_port_that_cannot_be_had_is_refused_with_one_that_is_free() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ViewerError, match=rf"^port {port} is in use; try port=\d+$") as caught:
            serve(None, WALKER, port=port, block=False)
        require_port(int(str(caught.value).rpartition("=")[2]))
    with pytest.raises(ViewerError, match="between 0 and 65535"):
        require_port(70000)
    with pytest.raises(ViewerError, match=r"host=192\.0\.2\.7 is not an address of this machine"):
        require_port(0, "192.0.2.7")


def test_what_cannot_be_viewed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ViewerError, match="is not a folder"):
        serve(tmp_path / "nowhere", port=0, block=False)
    with pytest.raises(CheckpointError, match=r"^.*holds no checkpoint.*$"):
        serve(tmp_path, port=0, block=False)
    with pytest.raises(ViewerError, match="nothing to view"):
        serve(port=0, block=False)
    with pytest.raises(ConfigError) as error:
        serve(None, WALKER | {"horizn": 3}, port=0, block=False)
    assert (error.value.key, error.value.hint) == ("horizn", "horizon")


def test_a_run_without_its_configuration_needs_an_environment(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "00000010"
    folder.mkdir(parents=True)
    (folder / "about.json").write_text("{}")
    (folder / "policy.yaml").write_text("{}")
    with pytest.raises(ViewerError, match=r"has no run\.yaml"):
        read_run(tmp_path)
    assert read_run(tmp_path, WALKER).chosen == folder
    (tmp_path / "run.yaml").write_text("env: [")
    with pytest.raises(ViewerError, match=r"^.*is not YAML.*$"):
        read_run(tmp_path)
    gym = "env: {_target_: embodied.envs.gym.Gym, id: Hopper-v5}"
    (tmp_path / "run.yaml").write_text(f"{gym}\nexecute: 3")
    opened = read_run(folder)
    assert (opened.execute, opened.checkpoints) == (3, (folder,))


def test_without_viser_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "viser", None)
    with pytest.raises(ViewerError, match=r"pip install 'embodied-rl\[view\]'"):
        serve(None, WALKER, port=0, block=False)


def test_ctrl_c_ends_with_one_line(tmp_path: Path) -> None:
    code = f"from embodied.viewer import serve; serve(None, {WALKER}, port=0)"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert re.match(r"viewing .* at http://127\.0\.0\.1:", process.stdout.readline())
        assert process.stdout.readline().startswith("ready after ")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert (rest.split(), process.returncode) == (["viewer", "closed"], 0)


def test_closing_ends_the_thread_and_frees_the_port() -> None:
    with page_of(toy_envs.Reach(1)) as viewer:
        port = viewer.server.get_port()
        viewer.play()
    viewer.close()
    assert viewer._thread not in threading.enumerate()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    with pytest.raises(RuntimeError, match="closed"):
        viewer.step()


@pytest.fixture(scope="module")
def local() -> Iterator[Viewer]:
    with page_of(toy_envs.Reach(1)) as viewer:
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
    headers = {"Host": f"127.0.0.1:{viewer.server.get_port()}"} | headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    answer = said(viewer, f"GET {target} HTTP/1.1\r\n{lines}\r\n".encode())
    return int(answer.split(b" ", 2)[1])


def test_the_page_is_given_here_and_to_nobody_else(local: Viewer) -> None:
    with urllib.request.urlopen(local.url, timeout=30) as answer:
        assert answer.status == 200 and b"<html" in answer.read()[:2000].lower()
    # Another loopback address reaches what listens everywhere, but not what listens on one.
    port = local.server.get_port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    assert status(local, "/", Host="localhost:80") == 200
    # A page elsewhere whose name was given this machine's address.
    assert status(local, "/", Host="evil.example") == 403
    assert status(local, "/", Host=f"127.0.0.1:{port}\r\nHost: evil.example") == 403


def test_what_is_no_request_is_refused_and_the_page_goes_on(local: Viewer) -> None:
    post = b"POST / HTTP/1.1\r\nHost: localhost"
    long = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000
    parts = (b"hello", b"\xff\xfe\x00", b"GET /", b"GET / HTTP/2", b"GET / HTTP/1.1\r\nnocolon")
    for words in (*parts, post, long):
        assert said(local, words + b"\r\n\r\n") == b"", "it hangs up"
    assert said(local, b"GET http://x/ HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 403 ")
    outside = ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/assets/..%5c..%5cetc%5cpasswd")
    assert {status(local, path) for path in (*outside, "/a%00b")} == {400}
    assert status(local, "/") == 200


def test_other_pages_cannot_connect_through_a_browser(local: Viewer) -> None:
    with pytest.raises(InvalidStatus) as refused:
        line_to(local.url, origin="http://evil.example")
    assert refused.value.response.status_code == 403
    line_to(local.url, origin=local.url).close()


def test_a_message_that_means_nothing_ends_nothing_but_its_connection(local: Viewer) -> None:
    with line_to(local.url) as line:
        line.recv(timeout=30)
        with pytest.raises((ConnectionClosed, TimeoutError)):
            line.send(b"\xc1garbage")
            line.send(b"\x81\xa4type\xa7Nothing")
            while True:
                line.recv(timeout=3)
    local.step()
    assert local.session.episode.steps >= 1 and status(local, "/") == 200


def test_a_connection_that_is_not_used_prints_nothing(
    local: Viewer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", local.server.get_port()), timeout=5) as idle:
        idle.shutdown(socket.SHUT_WR)
        while idle.recv(1000):
            pass
    time.sleep(0.1)
    assert capfd.readouterr().err == "" and not caplog.records


def test_elsewhere_a_token_is_needed() -> None:
    """The page is open to others, and reached from here only."""
    with page_of(toy_envs.Reach(1), host="0.0.0.0") as public:
        found = re.fullmatch(r"http://\S+:\d+/\?token=(\S{20,})", public.url)
        assert found is not None
        assert status(public, "/") == status(public, "/?token=wrong") == 403
        assert status(public, "/", Cookie="embodied_view=wrong") == 403
        welcome = said(public, f"GET /?token={found[1]} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert welcome.startswith(b"HTTP/1.1 303 ") and b"\r\nLocation: /\r\n" in welcome
        cookie = re.search(rb"Set-Cookie: ([^;]+); HttpOnly; SameSite=Strict", welcome)
        assert cookie is not None
        given = cookie[1].decode()
        assert status(public, "/", Host="anything", Cookie=f"a=1; {given}") == 200
        address = f"http://127.0.0.1:{public.server.get_port()}"
        with pytest.raises(InvalidStatus):
            line_to(address)
        line_to(address, additional_headers={"Cookie": given}).close()


@contextlib.contextmanager
def pages(viewer: Viewer, count: int) -> Iterator[list[Connection]]:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(line_to(viewer.url)) for _ in range(count)]
        for each in opened:
            send(each, CAMERA)
        until(lambda: len(viewer.server.get_clients()) == count)
        yield opened


def test_a_browser_gets_the_scene_and_its_presses_count() -> None:
    with page_of(LIFT) as viewer, pages(viewer, 1) as (client,):
        page, session = viewer.page, viewer.session
        names: set[str] = set()
        while not {*page.scene.names} <= names:
            names |= {str(each.get("name")) for each in received(client)}

        def press(control: Any, value: object) -> None:
            send(client, GuiUpdateMessage(control._impl.uuid, {"value": value}))

        press(page.speed, 2.0)
        until(lambda: viewer.speed == 2.0)
        press(page.play, True)
        until(lambda: viewer.playing and session.episode.steps > 2)
        press(page.sliders[1], 0.2)
        until(lambda: session.task is not None)
        assert session.task[1] == pytest.approx(1.0)
        # Nobody on this page may open a tunnel to the internet.
        send(client, ShareUrlRequest())
        press(page.play, True)
        until(lambda: not viewer.playing)
        assert viewer.server._share_tunnel is None


def test_another_thread_may_ring_while_many_wait() -> None:
    async def many() -> list[bool]:
        bell, loop = ThreadSafeEvent(), asyncio.get_running_loop()
        waiting = [asyncio.create_task(bell.wait()) for _ in range(5)]
        await asyncio.sleep(0)
        thread = threading.Thread(target=bell.set)
        thread.start()
        thread.join()
        # Seen at once, but those who wait are woken by their own thread only.
        before = [bell.is_set(), *(task.done() for task in waiting)]
        assert await asyncio.wait_for(bell.wait(), 1.0)
        loop.call_soon(bell.set)
        woken = await asyncio.gather(*waiting)
        bell.clear()
        return [*before, *woken, bell.is_set()]

    assert asyncio.run(many()) == [True, *[False] * 5, *[True] * 5, False]


def test_ten_pages_see_the_same_end() -> None:
    with page_of(LIFT | {"horizon": 20}, seed=3) as viewer, pages(viewer, 10) as opened:
        viewer.choose("demonstrator")
        go(viewer, 19)
        hand = next(name for name in viewer.page.scene.names if name.endswith("_hand"))
        wanted = tuple(viewer.server.scene.get_handle_by_name(hand).position)
        for page in opened:
            last = None
            while last != wanted:
                for message in received(page):
                    if message["type"] == "SetPositionMessage" and message["name"] == hand:
                        last = tuple(message["position"])
        # Every buffer of messages wakes its reader from the viewer's thread.
        sockets = viewer.server._websock_server
        buffers = [each.message_buffer for each in sockets._client_state_from_id.values()]
        for buffer in (sockets._broadcast_buffer, *buffers):
            assert isinstance(buffer.message_event, ThreadSafeEvent)
        assert viewer.problem == ""


def test_what_is_kept_for_new_pages_does_not_grow() -> None:
    with page_of(LIFT | {"horizon": 8}, seed=3) as viewer, pages(viewer, 1) as opened:
        viewer.choose("demonstrator")
        buffer = viewer.server._websock_server._broadcast_buffer
        threading.Thread(target=lambda: list(opened[0]), daemon=True).start()

        def episodes(count: int) -> tuple[int, int]:
            for _ in range(count * 9):
                go(viewer)
            until(lambda: len(buffer.generator_cursors) == 1)
            gc.collect()
            return len(buffer.message_from_id), len(viewer.server.scene._handle_from_node_name)

        first = episodes(2)
        later = episodes(6)
        assert later[1] == first[1] and later[0] <= first[0] + 30
