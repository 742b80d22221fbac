"""The whole bridge as processes: a daemon, the control process, a policy, and operators. The arm is
simulated, everything else is what runs beside a real one. A test says what has to be so, not when.
"""

from __future__ import annotations

import http.client
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import save
from embodied.core.policy import Policy
from embodied.embodiments import fr3
from embodied.real_robot.daemon import server
from embodied.real_robot.daemon.client import ClientError, call, connect
from embodied.real_robot.daemon.requests import MOST_BYTES, Reply, Request, Verb, parse_reply
from embodied.real_robot.daemon.server import SOCKET, RpcServer, RpcServerError
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.kernel.checks import FreshConfig
from embodied.real_robot.kernel.hand import Config as HandConfig
from embodied.real_robot.kernel.messages import Mode
from tests.builders import node_of, spawn
from tests.real_robot.test_control import LIMITS
from tests.real_robot.test_decide import GOAL, SPEC

PATIENT = 600.0  # s for something to become so, on a machine that does much else
HERTZ = 100.0
HAND = HandConfig(high=fr3.OPEN, speed=0.4, force=35.0, at_stop="hold")
SCRIPT = node_of("policies.scripted.fr3.Scripted", task="reach", quality=1.0)


def simulated(place: Path, node: dict[str, Any] = SCRIPT, **changed: Any) -> Deployment:
    """The simulated FR3 with the policy of `node`, which is saved below `place`."""
    settings: dict[str, Any] = {
        "driver": node_of("real_robot.drivers.sim.Sim", noise=1e-4),
        "controller": node_of("embodiments.cartesian_delta.CartesianDelta"),
        "kinematics": "embodied.embodiments.fr3.forward",
        **{"hertz": HERTZ, "step": SPEC.dt, "given": GOAL, "seconds": 20.0, "limits": LIMITS},
        **{"fresh": FreshConfig(hold=1.0, stop=3.0, state=2.0), "hand": HAND},
        **{"force": "unmeasured", "records": str(place / "records"), **changed},
    }
    if "policy" not in settings:
        settings["policy"] = str(save(place / "0", build(node, Policy, spec=SPEC), 0))
    return Deployment(**settings)


def until(so: Callable[[], Any], what: str) -> Any:
    """What `so` says once that is neither None nor False."""
    deadline = time.monotonic() + PATIENT
    while (said := so()) is None or said is False:
        assert time.monotonic() < deadline, f"never so: {what}"
        time.sleep(0.05)
    return said


def gone(pid: int) -> bool:
    """Whether a process has ended (also one that nobody has asked about)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Bridge:
    """A daemon in `folder`, and the operator who asks it."""

    process: subprocess.Popen[Any]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        self.run("embodied.real_robot.daemon.daemon", self.folder)

    def run(self, module: str, *words: object) -> None:
        """Start the program that starts the daemon, and wait for the daemon's answer."""
        errors = self.folder / "daemon.err"
        self.process = spawn("-m", module, *words, stderr=errors.open("wb"))

        def answers() -> bool:
            assert self.process.poll() is None, errors.read_text()
            try:
                return self.ask(Verb.STATUS).ok
            except ClientError:
                return False

        until(answers, "the daemon answers")

    def ask(self, verb: Verb) -> Reply:
        return call(self.folder, verb, timeout=PATIENT)

    @property
    def status(self) -> dict[str, Any]:
        return self.ask(Verb.STATUS).status

    def mode(self, name: str) -> dict[str, Any]:
        """The status once the arm is in that mode."""
        return until(lambda: s if (s := self.status)["mode"] == name else None, f"it is {name}")

    def done(self, verb: Verb) -> Reply:
        """Ask until that was done."""
        return until(lambda: r if (r := self.ask(verb)).ok else None, f"{verb} was done")

    def ticks(self, count: int) -> dict[str, Any]:
        """The status after `count` more ticks of the control loop."""
        first = self.status["control"]["tick"]
        return until(
            lambda: s if (s := self.status)["control"]["tick"] > first + count else None,
            "the loop ticks on",
        )

    def idle(self) -> dict[str, Any]:
        """From anything that a test left: both processes live, and the arm is held."""
        status = self.status
        if not status["control"]["pid"] or not status["policy"]["pid"]:
            self.done(Verb.RESET)
        until(lambda: self.status["policy"]["number"] > 0, "the policy decides")
        if self.status["mode"] in ("RUNNING", "ARMED"):
            self.done(Verb.STOP)
        until(
            lambda: self.status["mode"] != "ESTOP" or self.ask(Verb.RESET).ok, "nothing is latched"
        )
        return self.mode("IDLE")

    def running(self) -> dict[str, Any]:
        self.idle()
        self.done(Verb.ARM)
        self.done(Verb.START)
        return self.mode("RUNNING")


def in_mode(folder: Path, name: str) -> dict[str, Any] | None:
    """The daemon's status, where it answers and is in that mode."""
    try:
        status = call(folder, Verb.STATUS, PATIENT).status
    except ClientError:
        return None
    return status if status["mode"] == name else None


@contextmanager
def bridging(folder: Path, deployment: Deployment) -> Generator[Bridge]:
    """A daemon of `deployment` in `folder`, which ends in order when it is told to."""
    folder.chmod(0o700)
    deployment.write(folder)
    bridge = Bridge(folder)
    try:
        yield bridge
    finally:
        bridge.process.terminate()
        assert bridge.process.wait(PATIENT) == 0
    assert not (folder / SOCKET).exists() and not (folder / "state").exists()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return simulated(tmp_path_factory.mktemp("policy"), metrics=0)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory, deployment: Deployment) -> Iterator[Bridge]:
    with bridging(tmp_path_factory.mktemp("d"), deployment) as made:
        yield made


def test_a_policy_moves_the_arm_when_an_operator_says_so(bridge: Bridge) -> None:
    held = bridge.idle()["sent"]
    refused = bridge.ask(Verb.START)
    assert not refused.ok and "ARMED" in refused.reason and "it is IDLE" in refused.reason
    assert bridge.ticks(20)["sent"] == held
    bridge.running()
    until(lambda: np.abs(np.subtract(bridge.status["sent"], held)).max() > 0.1, "it moves")
    # A busy machine may be late with the steps that are smoothed.
    until(lambda: bridge.status["stages"]["limits"]["count"] > 0, "a policy in steps is smoothed")
    status = bridge.status
    assert status["mode"] == "RUNNING" and not status["fault"]
    assert status["control"]["rate"] > 0 and status["control"]["worst"] > 0
    busy = bridge.ask(Verb.QUIT)
    assert not busy.ok and "first stop" in busy.reason
    assert bridge.ask(Verb.STOP).ok
    bridge.mode("IDLE")


def test_a_killed_policy_is_held_and_latched_and_leaves_a_black_box(
    bridge: Bridge, deployment: Deployment
) -> None:
    pid = bridge.running()["policy"]["pid"]
    os.kill(pid, signal.SIGKILL)
    status = bridge.mode("ESTOP")
    assert "the policy's last observation is 3.0" in status["fault"]
    assert status["policy"]["died"] == "the policy process died (SIGKILL)"
    assert status["control"]["pid"], "the arm is still held"

    def rested() -> list[float] | None:
        """The set-point, if it stays for half a second (a second aim would come after SETTLE)."""
        sent = bridge.status["sent"]
        time.sleep(0.5)
        return sent if bridge.status["sent"] == sent else None

    held = until(rested, "the set-point has yielded to the measured pose")
    assert not bridge.ask(Verb.START).ok and rested() == held
    assert not bridge.status["policy"]["pid"], "no one started it again by itself"
    state = until(lambda: boxed(Path(deployment.records), b"observation"), "a black box")
    assert (np.diff(state["tick"]) == 1).all() and (state["mode"] == Mode.RUNNING).any()
    assert np.ptp(state["sent"][-5:], axis=0).max() == 0
    bridge.done(Verb.RESET)
    assert bridge.running()["policy"]["pid"] not in (0, pid)


def test_a_reset_of_who_has_not_seen_the_newest_stop_is_refused(bridge: Bridge) -> None:
    """P-4: its number is in the status, and a reset carries it."""
    seen = bridge.idle()["estop"]
    bridge.done(Verb.ESTOP)
    assert bridge.mode("ESTOP")["estop"] > seen
    stale = call(bridge.folder, Verb.RESET, PATIENT, stop=seen)
    assert not stale.ok and "pressed again" in stale.reason
    assert bridge.status["mode"] == "ESTOP"
    bridge.done(Verb.RESET)


def test_a_policy_that_hangs_is_replaced_by_a_reset(bridge: Bridge) -> None:
    pid = bridge.running()["policy"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    status = bridge.mode("ESTOP")
    assert status["policy"]["pid"] == pid and not status["policy"]["died"]
    assert "said nothing" in str(status["notes"])
    bridge.done(Verb.RESET)
    assert gone(pid) and bridge.running()["policy"]["pid"] not in (0, pid)


def test_a_pause_of_the_control_process_is_counted_and_gone_on_from(bridge: Bridge) -> None:
    before = bridge.running()["control"]
    os.kill(before["pid"], signal.SIGSTOP)
    time.sleep(0.2)
    os.kill(before["pid"], signal.SIGCONT)
    until(lambda: bridge.status["control"]["missed"] >= before["missed"] + 15, "they are counted")
    after = bridge.ticks(20)
    assert after["control"]["pid"] == before["pid"] and after["mode"] == "RUNNING", after["fault"]


def test_garbage_and_floods_are_refused_and_the_loop_goes_on(bridge: Bridge) -> None:
    before = bridge.running()
    for junk in (b"hello\n" * 50, b"x" * (MOST_BYTES + 1), os.urandom(4000) * 3, b"{}\n" * 50):
        with raw(bridge) as line:
            line.sendall(junk)
            assert parse_reply(until_closed(line)[0]).ok is False
    flood = b"".join(Request(n, time.monotonic(), Verb.STATUS).line() for n in range(1, 1000))
    with raw(bridge) as line:
        line.sendall(flood)
        line.shutdown(socket.SHUT_WR)
        until_closed(line)
    many = [raw(bridge) for _ in range(200)]
    after = bridge.ticks(50)
    assert after["mode"] == "RUNNING" and not after["fault"]
    assert after["refused"] >= before["refused"] + 3 * server.PATIENCE and after["clients"] <= 16
    assert bridge.ask(Verb.ESTOP).ok, "also with a crowd at the desk"
    bridge.mode("ESTOP")
    for line in many:
        line.close()
    assert "the line is not JSON" in (bridge.folder / "daemon.log").read_text()


def test_a_client_has_so_many_new_requests_a_second(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, now = tmp_path_factory.mktemp("d"), [0.0]
    desk = RpcServer(folder, lambda: now[0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(str(folder / SOCKET))

        def heard(first: int, count: int) -> int:
            """How many of `count` requests are for the daemon."""
            requests = (Request(n, now[0], Verb.STATUS) for n in range(first, first + count))
            line.sendall(b"".join(each.line() for each in requests))
            return sum(len(desk.poll(0)) for _ in range(20))

        assert heard(1, server.PER_SECOND + 1) == server.PER_SECOND
        now[0] = 1.5
        assert heard(server.PER_SECOND + 1, 1) == 0, "a number that was used"
        assert heard(200, server.PER_SECOND) == server.PER_SECOND
        assert heard(400, server.PATIENCE) == 0 and not desk.clients
    desk.close()


def test_a_full_disk_is_told_of_and_costs_nothing_else(
    bridge: Bridge, deployment: Deployment
) -> None:
    bridge.running()
    pid, boxes = bridge.process.pid, len(list(Path(deployment.records).iterdir()))
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, hard))  # nothing larger can be written
    try:
        assert bridge.ask(Verb.ESTOP).ok
        until(lambda: "could not be saved" in str(bridge.status["notes"]), "it is told of")
        bridge.ticks(20)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert len(list(Path(deployment.records).iterdir())) == boxes, "nothing half written"
    assert bridge.idle()


def test_metrics_are_numbers_that_prometheus_reads(bridge: Bridge) -> None:
    bridge.idle()
    log = (bridge.folder / "daemon.log").read_text()
    port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/metrics", log)[-1])

    def get(path: str) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENT)) as line:
            line.request("GET", path)
            reply = line.getresponse()
            return reply.status, reply.read().decode()

    def shown() -> dict[str, float]:
        code, text = get("/metrics")
        assert code == 200
        pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    until(lambda: shown()['embodied_robot_mode{mode="IDLE"}'] == 1, "it is shown to be IDLE")
    first, ticks = shown(), "embodied_robot_ticks_total"
    assert first["embodied_robot_control_alive"] == first["embodied_robot_policy_alive"] == 1
    assert 'embodied_robot_interventions_total{stage="limits"}' in first
    until(lambda: shown()[ticks] > first[ticks], "it counts on")
    assert get("/other")[0] == 404


def test_nobody_else_may_ask_and_a_second_daemon_is_refused(bridge: Bridge, tmp_path: Path) -> None:
    for name in (SOCKET, "state", "chunk", "request", "ring"):
        assert stat.S_IMODE((bridge.folder / name).stat().st_mode) == 0o600
    with pytest.raises(RpcServerError, match="runs in"):
        RpcServer(bridge.folder)
    tmp_path.chmod(0o755)
    with pytest.raises(RpcServerError, match="chmod 700"):
        RpcServer(tmp_path)
    with pytest.raises(ClientError, match="no daemon runs"):
        call(tmp_path, Verb.STATUS)


def test_a_killed_daemon_leaves_an_arm_at_rest_and_is_replaced(
    bridge: Bridge, deployment: Deployment
) -> None:
    status = bridge.running()
    bridge.ticks(30)  # there is something to keep
    bridge.process.kill()
    bridge.process.wait()
    for name in ("control", "policy"):
        until(lambda pid=status[name]["pid"]: gone(pid), f"the {name} process is gone")
    assert (bridge.folder / SOCKET).exists(), "what a dead one leaves"
    bridge.start()
    (kept,) = Path(deployment.records).glob("*-of-a-killed-daemon.npz")
    state = np.load(kept)["state"]
    assert f"its last {len(state)} records are in {kept}" in str(bridge.status["notes"])
    assert (np.diff(state["tick"]) == 1).all() and (state["mode"] == Mode.RUNNING).any()
    assert state["fault"][-1] == b"its daemon is gone"
    assert np.ptp(state["sent"][-2:], axis=0).max() < 1e-4, "brought to rest, to the end"
    bridge.idle()
    assert bridge.ask(Verb.QUIT).ok
    assert bridge.process.wait(PATIENT) == 0
    assert not (bridge.folder / SOCKET).exists()
    bridge.start()


def test_a_deployment_is_checked(deployment: Deployment) -> None:
    settings = asdict(deployment)
    with pytest.raises(ConfigError) as error:
        Deployment.parse({**settings, "limit": 3})
    assert (error.value.key, error.value.hint) == ("limit", "limits")
    with pytest.raises(ConfigError, match="deployment needs limits, fresh"):
        Deployment.parse({k: v for k, v in settings.items() if k not in ("limits", "fresh")})
    with pytest.raises(ConfigError, match="hertz"):
        Deployment.parse({**settings, "hertz": 0.0})


def boxed(folder: Path, fault: bytes) -> Any:
    """The records of the newest black box that ends with that fault; None where there is none."""
    for path in sorted(folder.glob("[0-9]*.npz"), reverse=True):
        state = np.load(path, allow_pickle=False)["state"]
        if fault in state["fault"][-1]:
            return state
    return None


def raw(bridge: Bridge) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(PATIENT)
    connect(line, bridge.folder / SOCKET, time.monotonic() + PATIENT)
    return line


def until_closed(line: socket.socket) -> list[bytes]:
    """All lines, until the other end has had enough."""
    came = b""
    try:
        while more := line.recv(1 << 16):
            came += more
    except ConnectionResetError:
        pass
    return came.splitlines()
