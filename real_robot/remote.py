"""Operators on other machines: CURVE keys, their client, and the process that relays their requests
(`python -m embodied.real_robot.remote FOLDER`, started by the daemon).

A folder of keys (CurveZMQ, rfc.zeromq.org/spec/26) holds `server.key` and `server.key_secret`,
`NAME.key_secret` of every client that was made there, and `clients/NAME.key`: who may connect (ZAP,
spec/27). An operator's machine needs `server.key` and `NAME.key_secret`, and nothing else.

Requests that move an arm must carry a recent time on the robot's clock. The client asks for that
clock first: when `now` has arrived, the robot's clock is at least `now`, and the request says
`now`. So a request looks too old by the round trip, and never too new.

Each client gets its own connection to the daemon's Unix socket, and its requests are relayed
unchanged. An emergency stop is also pressed in shared memory, and answered from here where the
daemon hangs. The relay does not control the arm and may die at any time.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import stat
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

from embodied.core.build import ConfigError
from embodied.real_robot.control.main import DaemonWatch
from embodied.real_robot.daemon.client import (
    MAX_REPLY_BYTES,
    ClientError,
    Stopped,
    latched_after,
    press,
)
from embodied.real_robot.daemon.requests import (
    ALWAYS,
    MOST_BYTES,
    Reply,
    Request,
    RequestError,
    Verb,
    parse,
    parse_reply,
)
from embodied.real_robot.daemon.server import SOCKET
from embodied.real_robot.deployment import Deployment, Remote

try:
    import zmq
    from zmq.utils import z85
    from zmq.utils.monitor import recv_monitor_message
except ImportError as error:
    raise ConfigError('remote operators need pyzmq: pip install "embodied-rl[robot]"') from error

SERVER, CLIENT = "server", "client"
CLIENTS = "clients"


class KeyFileError(RuntimeError):
    """A key cannot be created or used: one line that says why and what to do."""


@dataclass(frozen=True)
class Pair:
    """Both halves, as 40 printable characters each."""

    public: bytes
    secret: bytes


def make(folder: Path, name: str = CLIENT) -> list[Path]:
    """Create a client's key pair, and the server's where there is none. KeyFileError."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name) or name == SERVER:
        raise KeyFileError(f"name={name} should be letters and digits, and not {SERVER!r}")
    secret, public = folder / f"{name}.key_secret", folder / CLIENTS / f"{name}.key"
    for path in (secret, public):
        if path.exists():
            raise KeyFileError(f"{path} exists already; name=OTHER makes another key")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    public.parent.mkdir(mode=0o700, exist_ok=True)
    server, told = folder / f"{SERVER}.key_secret", folder / f"{SERVER}.key"
    if server.exists() != told.exists():
        raise KeyFileError(
            f"{folder} has only one half of the server's keys; choose another folder"
        )
    made = [] if server.exists() else _write(server, told)
    return made + _write(secret, public)


def secret_of(path: Path) -> Pair:
    """The key pair in a file that only this user may read; KeyFileError."""
    public, secret = _read(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise KeyFileError(f"other users may read {path}; type: chmod 600 {path}")
    if secret is None:
        raise KeyFileError(f"{path} holds no secret key")
    return Pair(public, secret)


def public_of(path: Path) -> bytes:
    return _read(path)[0]


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        found = dict(re.findall(r'^ *(public|secret)-key = "([!-~]{40})"$', path.read_text(), re.M))
        told = found["public"].encode()
    except (OSError, ValueError, KeyError) as error:
        raise KeyFileError(
            f"{path} cannot be read as a key; make one on the robot's machine: embodied robot keys "
            "folder=DIR"
        ) from error
    return told, found["secret"].encode() if "secret" in found else None


def _write(secret: Path, public: Path) -> list[Path]:
    told, kept = (key.decode() for key in zmq.curve_keypair())
    head = f'curve\n    public-key = "{told}"\n'
    texts = {secret: (0o600, f'{head}    secret-key = "{kept}"\n'), public: (0o644, head)}
    for path, (mode, text) in texts.items():
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
    return [secret, public]


BYE = b""  # either side says it to end a line
GOING = 500  # ms that the last words may take
HAPPENS = {
    zmq.Event.HANDSHAKE_SUCCEEDED: "it accepted this key and then did not answer",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it broke the handshake off: is server.key that robot's?",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it is no CURVE server: is that the daemon's port?",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it does not know this key",
}


def call_remote(
    host: str, keys: Path, verb: Verb | str, timeout: float = 10.0, policy: str = "", name: str = ""
) -> Reply:
    """Send `verb` to the daemon at `host` (ADDRESS:PORT) and return its reply, within `timeout` s.
    `name` is the key in the folder `keys`. ClientError, RequestError, KeyFileError."""
    if verb not in list(Verb):
        raise RequestError(f"unknown verb {verb!r} (known: {', '.join(Verb)})")
    own, server = secret_of(keys / f"{name or CLIENT}.key_secret"), keys / f"{SERVER}.key"
    with RemoteClient(host, own, public_of(server), timeout) as client:
        now = 0.0 if verb in ALWAYS else client.now()
        return client.call(Verb(verb), now, policy)


class RemoteClient:
    """One connection to `host`, for `timeout` s. ClientError."""

    def __init__(self, host: str, own: Pair, server: bytes, timeout: float) -> None:
        self.host = host
        self.timeout = timeout
        self.number = 0
        self.stop = 0
        """Number of the newest press of the emergency stop, when the clock was asked for."""
        self.deadline = time.monotonic() + timeout
        self.happened = "no server answers there"
        self.context = zmq.Context()
        self.line = self.context.socket(zmq.DEALER)
        self.line.curve_publickey = own.public
        self.line.curve_secretkey = own.secret
        self.line.curve_serverkey = server
        self.line.immediate = 1
        self.line.linger = GOING
        self.line.maxmsgsize = MAX_REPLY_BYTES
        self.events = self.line.get_monitor_socket(sum(HAPPENS))
        try:
            self.line.connect(f"tcp://{host}")
        except zmq.ZMQError as error:
            self.close()
            raise ClientError(f"host={host} should be ADDRESS:PORT ({error})") from error

    def now(self) -> float:
        """A lower bound of the robot's clock (s)."""
        reply = self.call(Verb.STATUS)
        self.stop = int(reply.status.get("estop", 0))
        now = reply.status.get("now")
        if not isinstance(now, float):
            raise ClientError(f"{self.host} sends no clock ({reply.reason or 'another version'})")
        return now

    def call(self, verb: Verb, now: float = 0.0, policy: str = "") -> Reply:
        """ClientError, RequestError."""
        self.number += 1
        self._wait(zmq.POLLOUT)
        self.line.send(Request(self.number, now, verb, policy, stop=self.stop).line())
        self._wait(zmq.POLLIN)
        answer = self.line.recv()
        if answer == BYE:
            raise ClientError(f"the daemon at {self.host} closed the connection before it replied")
        return parse_reply(answer)

    def close(self) -> None:
        if self.line.poll(0, zmq.POLLOUT):
            self.line.send(BYE)
        self.line.disable_monitor()
        self.events.close(0)
        self.line.close()
        self.context.term()

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, wanted: int) -> None:
        poller = zmq.Poller()
        poller.register(self.line, wanted)
        poller.register(self.events, zmq.POLLIN)
        while (left := self.deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(round(1e3 * left)))
            if self.line in ready:
                return
            if self.events in ready:
                event = zmq.Event(recv_monitor_message(self.events)["event"])
                self.happened = HAPPENS[event]
                if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                    break
        raise ClientError(
            f"{self.host} did not answer ({self.happened}); if the arm moves, use the robot's "
            "own stop"
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
    folder of public keys is read again for every new connection.

    `zmq.auth` is not used: its callback does not get the client's address, it answers in a thread
    or loop of its own, and it does not report failed handshakes.

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
        while self.requests.poll(0):
            self._admit(self.requests.recv_multipart())
        while self.events.poll(0):
            LOG.info(FAILED[zmq.Event(recv_monitor_message(self.events)["event"])])

    def close(self) -> None:
        self.router.disable_monitor()
        self.events.close(0)
        self.requests.close()

    def _admit(self, message: list[bytes]) -> None:
        _, number, _, address, _, mechanism, *credentials = message
        where = address.decode(errors="replace")
        curve = mechanism == b"CURVE" and len(credentials) == 1
        name = self._name(z85.encode(credentials[0])) if curve else None
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


@dataclass(eq=False)
class Line:
    """One client (`who`: its ROUTER identity; `user`: its key's name) and its Unix socket."""

    who: bytes
    user: str
    heard: float
    wire: socket.socket
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
        return self.router.get_string(zmq.LAST_ENDPOINT)

    def turn(self) -> None:
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
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        wire.setblocking(False)
        line = Line(who, user, self.clock(), wire)
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
