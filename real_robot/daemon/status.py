"""Status of the control and policy processes, read from their shared-memory messages."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from embodied.core.build import ConfigError
from embodied.real_robot.daemon.child import Child
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.kernel.messages import Ended, Mode

LOG = logging.getLogger("embodied.robot")
SILENT = 1.0  # s without a tick, or a chunk, after which that is worth a note
LOCAL = r"(localhost|127\.0\.0\.1)(:\d+)?"  # the Host of a request to this machine
UNSEEN = ": only the robot's own watchdog and its own stop act now"
WHEN = {
    Verb.ARM: "an arm can be armed when it is IDLE",
    Verb.START: "an arm can be started when it is ARMED, the policy has just spoken, and the arm "
    "is where it was sent",
    Verb.STOP: "an arm can be stopped when it is ARMED, RUNNING, HOMING or STOPPING",
    Verb.HOME: "an arm with a home can go there when it is IDLE",
    Verb.RESET: "an arm can be reset when it is in ESTOP, at rest, or RELEASED, and its wire works",
    Verb.RELEASE: "an arm can be released at rest, when it is IDLE or in ESTOP, one that falls "
    "only with supported=true while a person holds it; a drone, a recording and a dry run cannot",
    Verb.QUIT: "first stop: one can quit when the arm is IDLE, DISCONNECTED or in ESTOP",
}


@dataclass
class StatusMonitor:
    """`look` often; the rest tells what was seen. `names` are the chain's stages; `notes` are
    lines for people, with their time (s); a policy decides every `step` s."""

    channels: Channels
    names: Sequence[str]
    notes: deque[str]
    step: float
    clock: Callable[[], float]
    mode: Mode = Mode.DISCONNECTED
    fault: str = ""
    stopped: str = ""  # why the daemon itself stopped the newest episode; empty where it did not
    first: float = 0.0  # when the first tick was
    ticks: int = 0
    chunks: int = 0
    control_silent: bool = False
    policy_silent: bool = False
    intervened: bool = False

    def __post_init__(self) -> None:
        self.patience = max(SILENT, 3 * self.step)
        self.began = self.ticked = self.spoke = self.clock()

    def note(self, text: str) -> None:
        self.notes.append(f"{self.clock():.3f} {text}")
        LOG.info(text)

    def update(self) -> bool:
        """Read what is new; True where a fault has just come."""
        now, before = self.clock(), self.fault
        if self.channels.state.receive():
            self._read_state(now)
        if self.channels.chunk.receive():
            self.chunks = int(self.channels.chunk.fields["number"][0])
            self.spoke = now
        # Note once that someone who has spoken before does not any more
        control_silent = self.ticks > 0 and now - self.ticked > SILENT
        if control_silent and not self.control_silent:
            self.note(f"the control process has not ticked for {SILENT:.0f} s{UNSEEN}")
        policy_silent = self.chunks > 0 and now - self.spoke > self.patience
        if policy_silent and not self.policy_silent:
            self.note(f"the policy has said nothing for {self.patience:.1f} s")
        self.control_silent = control_silent
        self.policy_silent = policy_silent
        return bool(self.fault) and self.fault != before

    def policy_started(self) -> None:
        self.chunks, self.spoke, self.policy_silent = 0, self.clock(), False

    def answered(self, command: int) -> bool | None:
        """Whether the control process executed command number `command`; None: not answered yet."""
        fields = self.channels.state.fields[0]
        if int(fields["answered"]) == command:
            return True
        return False if int(fields["refused"]) == command else None

    def why_not(self, verb: Verb) -> str:
        if reason := bytes(self.channels.state.fields[0]["reason"]).decode(errors="replace"):
            return reason
        return f"{WHEN.get(verb, 'it was refused')}; it is {self.mode.name}"

    def status(self, control: Child, policy: Child) -> dict[str, Any]:
        """All that an operator may want to know, as JSON can say it. Ages in s."""
        fields, now = self.channels.state.fields[0], self.clock()
        ran = float(fields["now"]) - self.first
        stages = zip(self.names, fields["counts"], fields["changed"], strict=True)
        alive, trouble = control.alive, self.fault
        if self.control_silent:
            silence = now - self.ticked
            trouble = f"the control process has not ticked for {silence:.1f} s{UNSEEN}"
        return {
            "mode": self.mode.name if alive else Mode.DISCONNECTED.name,
            "fault": trouble if alive else control.died or self.fault,
            "ended": Ended(int(fields["ended"])).name,
            "stopped": self.stopped,
            "intervened": self.intervened,
            "control": {
                "pid": control.pid,
                "died": control.died,
                "tick": self.ticks,
                "age": now - self.ticked,
                "silent": alive and self.control_silent,
                "rate": (self.ticks - 1) / ran if ran > 0 else 0.0,
                "late": float(fields["late"]),
                "worst": float(fields["worst"]),
                "missed": int(fields["missed"]),
            },
            "policy": {
                "pid": policy.pid,
                "died": policy.died,
                "number": self.chunks,
                "age": now - self.spoke,
                "starved": bool(fields["starved"]),
            },
            "measured": {"age": now - float(fields["measured"]) if self.ticks else None},
            "q": [_finite(value) for value in fields["q"]],
            "sent": [_finite(value) for value in fields["sent"]],
            "sensed": [_finite(value) for value in fields["sensed"]],
            "stages": {
                name: {"count": int(count), "changed": _finite(changed)}
                for name, count, changed in stages
            },
            "up": now - self.began,
            "notes": list(self.notes),
        }

    def _read_state(self, now: float) -> None:
        fields = self.channels.state.fields[0]
        if not self.ticks:
            self.first = float(fields["now"])
        self.ticks = int(fields["tick"])
        self.ticked = now
        mode, fault = Mode(int(fields["mode"])), bytes(fields["fault"]).decode(errors="replace")
        if fault and fault != self.fault:
            self.note(f"fault: {fault}")
        if mode != self.mode:
            self.note(f"{self.mode.name} -> {mode.name}")
        intervened = mode == Mode.RUNNING and bool(fields["intervened"])
        if intervened != self.intervened:
            self.note("a person took over" if intervened else "the person gave the arm back")
        self.mode = mode
        self.fault = fault
        self.intervened = intervened


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def render(status: dict[str, Any]) -> str:
    """The numbers of `StatusMonitor.status` as Prometheus reads them, in its text exposition format
    0.0.4: `# TYPE name gauge|counter`, then `name{label="value"} number`."""
    control, policy = status["control"], status["policy"]
    mode, modes = status["mode"], [each.name for each in Mode]
    lines = [
        _one("mode", "gauge", {f'mode="{name}"': int(name == mode) for name in modes}),
        _one("fault", "gauge", {"": int(bool(status["fault"]))}),
        _one("control_alive", "gauge", {"": int(control["pid"] > 0)}),
        _one("policy_alive", "gauge", {"": int(policy["pid"] > 0)}),
        _one("ticks_total", "counter", {"": control["tick"]}),
        _one("missed_ticks_total", "counter", {"": control["missed"]}),
        _one("rate_hertz", "gauge", {"": control["rate"]}),
        _one("late_seconds", "gauge", {"": control["late"]}),
        _one("worst_late_seconds", "gauge", {"": control["worst"]}),
        _one("tick_age_seconds", "gauge", {"": control["age"]}),
        _one("chunk_age_seconds", "gauge", {"": policy["age"]}),
        _one(
            "interventions_total",
            "counter",
            {f'stage="{name}"': stage["count"] for name, stage in status["stages"].items()},
        ),
    ]
    return "".join(lines)


def _one(name: str, kind: str, values: dict[str, float]) -> str:
    samples = (f"embodied_robot_{name}{f'{{{k}}}' if k else ''} {v}\n" for k, v in values.items())
    return f"# TYPE embodied_robot_{name} {kind}\n{''.join(samples)}"


class Endpoint:
    """`http://127.0.0.1:port/metrics` shows `text`, whatever that is at the time. A thread of its
    own answers, so that no reader keeps the daemon waiting. ConfigError for a port in use."""

    def __init__(self, port: int) -> None:
        self.text = ""
        shown = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                # No web pages: one elsewhere may have been given this machine's address.
                here = re.fullmatch(LOCAL, self.headers.get("Host", "")) is not None
                known = 200 if self.path == "/metrics" else 404
                code = known if here and "Origin" not in self.headers else 403
                self.send_response(code)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                if code == 200:
                    self.wfile.write(shown.text.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Readers come every few seconds; that is no news."""

        try:
            self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ConfigError(f"metrics: port {port} cannot be had ({error})") from error
        self.port = int(self.server.server_address[1])
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Notifier:
    """Tells systemd that the daemon is ready, runs and ends (sd_notify(3)).

    A message is a datagram of `KEY=value` to the socket in NOTIFY_SOCKET. With WATCHDOG_USEC set,
    systemd expects WATCHDOG=1 at least that often and restarts the service otherwise. Says nothing
    without a listener, and never waits. `environment` is the process's own.
    """

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.next = -float("inf")
        place = environment.get("NOTIFY_SOCKET", "")
        self.place = f"\0{place[1:]}" if place.startswith("@") else place
        mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        period = environment.get("WATCHDOG_USEC", "") if mine else ""
        self.period = int(period) / 1e6 if period.isdecimal() else None

    def ready(self) -> None:
        self._say("READY=1")

    def alive(self) -> None:
        """Tell systemd that the loop runs, four times in the time that it waits. Call it often."""
        now = self.clock()
        if self.period is not None and now >= self.next:
            self.next = now + self.period / 4
            self._say("WATCHDOG=1")

    def ending(self) -> None:
        self._say("STOPPING=1")

    def _say(self, words: str) -> None:
        if not self.place:
            return
        # A systemd that cannot be told acts as if nothing had been said: that is its business.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            line.sendto(words.encode(), self.place)
