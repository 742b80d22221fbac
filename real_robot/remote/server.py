"""Remote process: `python -m embodied.real_robot.remote.server FOLDER`, started by the daemon.

A ROUTER socket over TCP with CURVE encryption (rfc.zeromq.org/spec/26). A client without a key in
`clients/` is not admitted (ZAP, spec/27). Each client gets its own connection to the daemon's Unix
socket, and its requests are relayed unchanged: the daemon's server reads, checks and refuses them
as any other client's. An emergency stop is also pressed in shared memory, and answered from here
where the daemon hangs. This process does not control the arm and may die at any time.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from embodied.core.build import ConfigError
from embodied.real_robot.control.main import DaemonWatch
from embodied.real_robot.daemon.client import Stopped, latched_after, press
from embodied.real_robot.daemon.requests import MOST_BYTES, Reply, RequestError, Verb, parse
from embodied.real_robot.daemon.server import SOCKET
from embodied.real_robot.deployment import Deployment, Remote
from embodied.real_robot.remote.keys import (
    CLIENTS,
    SERVER,
    KeyFileError,
    Pair,
    public_of,
    secret_of,
)

ZAP = "inproc://zeromq.zap.01"
MAX_MESSAGE_BYTES = 16 * MOST_BYTES  # larger ones are not read at all: the connection is closed
MOST_QUEUED = 64
HANDSHAKE_MS = 10_000
FAILED = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "refused: it disconnected before it was admitted",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "refused: it has no key, or not the right server's",
    zmq.Event.DISCONNECTED: "a connection ended (its client's doing, or a message far too large)",
}


def guarded(context: zmq.Context[zmq.Socket[bytes]], keys: Pair) -> zmq.Socket[bytes]:
    """A ROUTER socket with CURVE encryption that admits only authenticated clients."""
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_publickey = keys.public
    router.curve_secretkey = keys.secret
    router.zap_domain = b"robot"
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator no client is admitted
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.maxmsgsize = MAX_MESSAGE_BYTES
    router.linger = 0
    router.handshake_ivl = HANDSHAKE_MS
    router.rcvhwm = router.sndhwm = MOST_QUEUED
    router.tcp_keepalive = 1
    router.heartbeat_ivl = 5_000
    router.heartbeat_timeout = 30_000
    return router


class Authenticator:
    """Admits clients whose key is known (ZAP, rfc.zeromq.org/spec/27), and logs refusals. The
    folder of public keys is read again for every new connection: adding or removing a file takes
    effect at once.

    `zmq.auth` is not used, for three reasons. Its callback gets the key without the client's
    address, which the log of refusals names. It answers in a thread or an asyncio loop of its own,
    while the relay polls all its sockets in one loop. It does not report failed handshakes, so the
    socket monitor below would be needed beside it.

    Call `poll` when `requests` or `events` is readable. Create it before binding the ROUTER.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Path) -> None:
        self.clients = clients
        self.requests = context.socket(zmq.REP)
        self.requests.linger = 0
        self.requests.bind(ZAP)

    def monitor(self, router: zmq.Socket[bytes]) -> None:
        """Log handshakes that fail at `router` before authentication."""
        self.router = router
        self.events = router.get_monitor_socket(sum(FAILED))

    def poll(self) -> None:
        """Answer pending ZAP requests and log failed handshakes."""
        while self.requests.poll(0):
            self._admit(self.requests.recv_multipart())
        while self.events.poll(0):
            LOG.info(FAILED[zmq.Event(recv_monitor_message(self.events)["event"])])

    def close(self) -> None:
        """Admit no more clients."""
        self.router.disable_monitor()
        self.events.close(0)
        self.requests.close()

    def _admit(self, message: list[bytes]) -> None:
        _, number, _, address, _, mechanism, *credentials = message
        name, where = None, address.decode(errors="replace")
        if mechanism == b"CURVE" and len(credentials) == 1:
            name = self._name(z85.encode(credentials[0]))
        if name is None:
            LOG.warning("refused: a client at %s whose key is not in %s", where, self.clients)
            said = [b"400", b"this key is not known", b""]
        else:
            LOG.info("a client at %s is admitted (key %s)", where, name)
            said = [b"200", b"", name.encode()]
        self.requests.send_multipart([b"1.0", number, *said, b""])

    def _name(self, key: bytes) -> str | None:
        """The name of the file that holds `key`; None where there is none."""
        for path in sorted(self.clients.glob("*.key")):
            try:
                if public_of(path) == key:
                    return path.stem
            except KeyFileError as error:
                LOG.warning("%s", error)
        return None


LOG = logging.getLogger("embodied.robot.remote")
LOOK = 50  # ms between two looks where nothing comes
BATCH, PAUSE = 32, 0.02  # messages of a look, and s after a full one: a flood costs no processor
MOST_LINES = 8  # half of the clients that the desk has
MOST_SILENT = 200.0  # s: longer than a policy takes to load
MOST_WAITING = 8 * MOST_BYTES  # of a client, while the desk does not read
MOST_REMEMBERED = 1024
HUNG = 0.5  # s that the daemon has to answer an emergency stop
BESIDE = "an arm is released by who stands beside it: type it on the robot's machine"
BYE = b""  # either side says it to end a line


@dataclass(eq=False)
class Line:
    """One client (`who`: its ROUTER identity; `user`: its key's name) and its Unix socket."""

    who: bytes
    user: str
    heard: float
    wire: socket.socket = field(
        default_factory=lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    )
    connected: bool = False
    goes: bytes = b""
    came: bytes = b""
    stop: tuple[int, float] | None = None
    """An emergency stop that the daemon has not answered: its number, and when it was pressed."""


class Relay:
    """Between `router` and the daemon's socket in `folder`; call `turn` for ever."""

    def __init__(
        self, folder: Path, remote: Remote, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self.path = folder / SOCKET
        self.clock = clock
        keys = Path(remote.keys)
        self.context = zmq.Context()
        self.authenticator = Authenticator(self.context, keys / CLIENTS)
        self.router = guarded(self.context, secret_of(keys / f"{SERVER}.key_secret"))
        self.authenticator.monitor(self.router)
        try:
            self.router.bind(f"tcp://{remote.address}:{remote.port}")
        except zmq.ZMQError as error:
            where = f"{remote.address}:{remote.port}"
            raise ConfigError(f"{where} cannot be bound ({error}); choose another") from error
        self.poller = zmq.Poller()
        for each in (self.authenticator.requests, self.authenticator.events, self.router):
            self.poller.register(each, zmq.POLLIN)
        self.lines: dict[bytes, Line] = {}
        self.refused: deque[bytes] = deque(maxlen=MOST_REMEMBERED)

    @property
    def place(self) -> str:
        """The address that it listens at."""
        return self.router.get_string(zmq.LAST_ENDPOINT)

    def turn(self) -> None:
        """Poll all sockets once."""
        ready = {each for each, _ in self.poller.poll(LOOK)}
        self.authenticator.poll()
        for line in list(self.lines.values()):
            if line.wire.fileno() in ready:
                self._answer(line)
            if line.who in self.lines:
                self._pass_on(line)
            if line.who in self.lines:
                self._answer_stop(line)
        for _ in range(BATCH):
            if not self._hear():
                return
        time.sleep(PAUSE)

    def close(self) -> None:
        """Disconnect all clients."""
        for line in list(self.lines.values()):
            self._end(line)
        self.authenticator.close()
        self.context.destroy(linger=500)  # ms: the answer to a `quit` goes out

    def _hear(self) -> bool:
        """Whether there was a message; each client's turn comes, whatever the others send."""
        try:
            who, *parts = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if who.bytes in self.refused:
            return True
        line, message = self.lines.get(who.bytes), parts[0].bytes
        if line is None and message == BYE:
            return True
        line = line or self._begin(who.bytes, str(parts[0].get("User-Id")))
        line.heard = self.clock()
        if len(parts) > 1 or len(line.goes) > MOST_WAITING:
            self._refuse(line, "it sends more than is read")
        elif message == BYE:
            self._end(line)
        elif not self._act(line, message):
            line.goes += message.removesuffix(b"\n") + b"\n"
            self._pass_on(line)
        return True

    def _act(self, line: Line, message: bytes) -> bool:
        """Press the emergency stop, if that is what is asked. Whether the daemon need not know."""
        try:
            request = parse(message)
        except RequestError:
            return False  # the daemon says what is wrong with it
        if request.verb == Verb.RELEASE:
            self._say(line, Reply(request.number, False, BESIDE).line().rstrip())
            return True
        if request.verb == Verb.ESTOP and (pressed := press(self.folder)) is not None:
            line.stop = (request.number, pressed)
        return False

    def _answer_stop(self, line: Line) -> None:
        """Instead of a daemon that hangs. What it says later is not passed on."""
        if line.stop is None or time.monotonic() < line.stop[1] + HUNG:
            return
        latched = latched_after(self.folder, line.stop[1])
        stopped = Stopped(latched, None, f"the daemon did not answer within {HUNG:.1f} s")
        self._say(line, Reply(line.stop[0], stopped.done, stopped.line()).line().rstrip())
        self._end(line)

    def _begin(self, who: bytes, user: str) -> Line:
        if len(self.lines) >= MOST_LINES:
            # Of the client with the most: a crowd with one key does not push out another's.
            has = Counter(line.user for line in self.lines.values())
            crowd = [each for each in self.lines.values() if has[each.user] == max(has.values())]
            self._refuse(min(crowd, key=lambda each: each.heard), "there are too many clients")
        line = Line(who, user, self.clock())
        line.wire.setblocking(False)
        self.lines[who] = line
        return line

    def _pass_on(self, line: Line) -> None:
        """What waits, as far as the desk takes it; who is silent for long is let go."""
        if self.clock() - line.heard > MOST_SILENT:
            self._refuse(line, "it was silent for too long")
            return
        try:
            if not line.connected:
                line.wire.connect(str(self.path))
                line.connected = True
                self.poller.register(line.wire, zmq.POLLIN)
            if line.goes:
                line.goes = line.goes[line.wire.send(line.goes) :]
        except BlockingIOError:
            return  # others stand in line
        except OSError as error:
            ended = "the daemon disconnected it" if line.connected else "the daemon does not run"
            self._refuse(line, f"{ended} ({error})")

    def _answer(self, line: Line) -> None:
        try:
            came = line.wire.recv(1 << 16)
        except OSError:
            came = b""
        *replies, line.came = (line.came + came).split(b"\n")
        line.stop = None if replies else line.stop
        for reply in replies:
            if line.who in self.lines and not self._say(line, reply):
                self._refuse(line, "it is gone, or does not read its replies")
        if not came and line.who in self.lines:
            self._refuse(line, "the daemon disconnected it")

    def _say(self, line: Line, message: bytes) -> bool:
        """Whether it could be sent; never waits."""
        try:
            self.router.send_multipart([line.who, message], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _refuse(self, line: Line, reason: str) -> None:
        """Nothing more of this client is heard before it connects again."""
        LOG.warning("a client (key %s) was disconnected: %s", line.user, reason)
        self.refused.append(line.who)
        self._end(line)
        self._say(line, BYE)

    def _end(self, line: Line) -> None:
        del self.lines[line.who]
        if line.connected:
            self.poller.unregister(line.wire)
        line.wire.close()


def main(folder: Path) -> None:
    """Until the daemon is gone. ConfigError, KeyFileError."""
    remote = Deployment.read(folder).remote
    if remote is None:
        raise ConfigError("the deployment has no remote settings")
    logging.raiseExceptions = False  # a log that cannot be written stops nothing
    log = RotatingFileHandler(folder / "remote.log", maxBytes=1 << 20, backupCount=1)
    log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOG.addHandler(log)
    LOG.setLevel(logging.INFO)
    relay = Relay(folder, remote)
    left = threading.Event()
    DaemonWatch(lambda reason: left.set())
    LOG.info("listening at %s", relay.place)
    while not left.is_set():
        relay.turn()
    relay.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (ConfigError, KeyFileError) as error:
        sys.exit(f"remote: {error}")
