"""Every socket at which a command listens, and what a web page or another user gets there."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.builders import ROOT, node_of, run_folder, wait_until
from tests.tiers import usually
from tests.training.actors.helper import left_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LISTEN, ACCEPTS = "0A", 0x10000  # of /proc/net/tcp and /proc/net/unix
LOOPBACK = ("0100007F", f"{'0' * 24}01000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as they are written there."""
UPGRADE = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
UPGRADE += "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"


def family(pid: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found, more = set[int](), {pid}
    while more:
        found |= more
        more = {child for child, parent in parents.items() if parent in more}
    return found


def sockets(pids: set[int]) -> set[str]:
    found = set[str]()
    for handle in (each for pid in pids for each in Path(f"/proc/{pid}/fd").glob("*")):
        with suppress(OSError):
            found |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(handle)))
    return found


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """Address, as the kernel writes it, and port of each TCP socket at which they listen; an
    abstract Unix socket, which every user of the machine reaches, is ("@NAME", 0)."""
    theirs, found = sockets(pids), set[tuple[str, int]]()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = row.split()
            if cells[3] == LISTEN and cells[9] in theirs:
                address, port = cells[1].split(":")
                found.add((address, int(port, 16)))
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        cells = row.split()
        if len(cells) > 7 and int(cells[3], 16) & ACCEPTS and cells[6] in theirs:
            found |= {(cells[7], 0)} if cells[7].startswith("@") else set()
    return found


def status(port: int, path: str, headers: str) -> int:
    """The HTTP status of an answer; 0 where there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\n{headers}\r\n".encode())
        try:
            answer = line.recv(4096)
        except OSError:  # it says nothing, or hangs up
            return 0
    found = re.match(rb"HTTP/1\.[01] (\d+)", answer)
    return int(found[1]) if found else 0


def attacked(found: set[tuple[str, int]], needs_token: bool) -> None:
    """Fail if a socket answers a web page of another site, or a stranger where it `needs_token`."""
    for address, port in found:
        assert not address.startswith("@"), f"every user reaches {address}"
        here = f"Host: 127.0.0.1:{port}\r\n"
        attacks = {
            "another name": ("/", "Host: evil.com\r\n"),
            "another name's figures": ("/metrics", "Host: evil.com\r\n"),
            "another page": ("/", f"{here}{UPGRADE}Origin: http://evil.com\r\n"),
            "another name's page": ("/", f"Host: evil.com\r\n{UPGRADE}Origin: http://evil.com\r\n"),
        }
        if needs_token:
            attacks["nobody"] = ("/", here)
            attacks["no token"] = ("/", f"{here}{UPGRADE}")
            attacks["a wrong token"] = ("/?token=x", f"{here}{UPGRADE}Authorization: Api-Key x\r\n")
        for name, (path, headers) in attacks.items():
            code = status(port, path, headers)
            assert code == 0 or code >= 400, f"port {port} answered {name}: {code}"


@contextmanager
def command(folder: Path, said: str, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """`embodied WORDS`, from when its output has `said`; interrupted at the end."""
    log = folder / "said.txt"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-u", "-m", "embodied.cli", *map(str, words)]
    with log.open("wb") as sink:
        process = subprocess.Popen(line, cwd=folder, env=env, stdout=sink, stderr=sink)
    try:
        wait_until(lambda: said in log.read_text() or process.poll() is not None, said, tick=0.05)
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        finally:
            process.kill()


def trained(folder: Path) -> Path:
    env = node_of("envs.toy.two_gap.TwoGap", num_envs=1)
    return run_folder(folder / "run", env, node_of("policies.gaussian.Gaussian", chunk=2), (1,))


def port_in(folder: Path) -> int:
    return int(re.findall(r":(\d+)", (folder / "said.txt").read_text())[0])


DOORS = [("view", "0.0.0.0"), ("robot", "127.0.0.1"), ("view", "127.0.0.1")]


@pytest.mark.parametrize(("what", "host"), usually(DOORS[:2], DOORS))
def test_the_viewer_has_no_second_door(what: str, host: str, tmp_path: Path) -> None:
    pytest.importorskip("viser")
    words = ["robot", f"folder={tmp_path / 'none'}"] if what == "robot" else [trained(tmp_path)]
    said = "http://" if what == "robot" else "ready after"
    with command(tmp_path, said, "view", *words, "port=0", f"host={host}") as process:
        found = listening(family(process.pid))
        assert [port for _, port in found] == [port_in(tmp_path)]
        attacked(found, needs_token=host != "127.0.0.1")


def test_a_policy_server_asks_for_its_token(tmp_path: Path) -> None:
    pytest.importorskip("websockets")
    words = ["serve", trained(tmp_path), "port=0", f"token_file={tmp_path / 'token'}"]
    with command(tmp_path, "ws://", *words) as process:
        found = listening(family(process.pid))
        assert len(found) == 1 and {address for address, _ in found} <= {*LOOPBACK}
        attacked(found, needs_token=True)


def test_a_deployment_shows_its_figures_to_no_web_page(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir(mode=0o700)
    crowded = "robot.driver.world.ranges={goal_x: [0.9, 0.91]}"  # nobody gets there
    words = ["deploy", "robot=sim", "demonstrator=reach", "robot.metrics=0", "seconds=900", crowded]
    words += ["yes=true", f"folder={folder}", f"out={tmp_path / 'out'}", "record=false"]
    with command(tmp_path, "RUNNING", *words) as process:
        found = listening(family(process.pid))
        assert len(found) == 1 and {address for address, _ in found} <= {*LOOPBACK}
        attacked(found, needs_token=False)


def test_a_cluster_that_a_run_starts_is_this_machines_and_asks_for_a_token(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = ["train", "env=two_gap", "policy=gaussian", "learner=sac", "size=debug"]
    words += ["steps=1000000", "data.actors=1", "data.actors_on=ray", f"out={tmp_path / 'run'}"]
    with command(tmp_path, " s left", *words) as process:
        pids = {int(file.parent.name) for file in left_of(process.pid)}
        assert len(pids) > 2, "Ray's own processes"
        found = listening(pids | family(process.pid))
        assert found and {address for address, _ in found} <= {*LOOPBACK}
        attacked(found, needs_token=True)
        for pid in pids:
            given = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"RAY_AUTH_MODE=token\0" in given and b"RAY_AUTH_TOKEN=" in given
    wait_until(lambda: not left_of(process.pid), "it ends with the run")
