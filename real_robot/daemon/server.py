"""Unix-socket RPC server for several clients of one user.

The folder has mode 0700, the socket 0600, and the peer must be the same user. A line that is no
request is refused with a reason; a client that sends many of them is disconnected. Nothing blocks,
and one client can delay the others by a moment at most.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from embodied.real_robot.daemon.requests import (
    FOREIGN,
    MOST_BYTES,
    Reply,
    Request,
    RequestError,
    Verb,
    parse,
)
from embodied.real_robot.kernel.mailbox import memory_folder

LOG = logging.getLogger("embodied.robot")
SOCKET = "daemon.sock"
MOST_CLIENTS, MOST_UNREAD = 16, 1 << 18
PER_SECOND = 100  # requests of a client
PATIENCE = 8  # refused lines before a client is disconnected


class RpcServerError(RuntimeError):
    """The socket cannot be opened: one line that says why and what to do."""


@dataclass(eq=False)
class Client:
    """`number` is its last request's; `since` (s) and `lines` count its lines per second."""

    line: socket.socket
    heard: float
    came: bytes = b""
    goes: bytes = b""
    number: int = 0
    refused: int = 0
    since: float = 0.0
    lines: int = 0
    gone: bool = False


@dataclass(frozen=True)
class Asked:
    """A request, and who waits for its answer (None: the daemon itself asked)."""

    request: Request
    client: Client | None = None


def make_private(folder: Path) -> Path:
    """Create `folder` for this user alone. RpcServerError where it belongs to others or is open."""
    if folder.parent == robots_folder():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise RpcServerError(f"{folder} does not belong to you; choose another")
    if about.st_mode & 0o077:
        raise RpcServerError(f"other users may read {folder}; type: chmod 700 {folder}")
    return folder


class RpcServer:
    """`refused` counts lines and clients; `token`: of the only session that is served (operators
    have none). RpcServerError where a daemon runs in `folder`."""

    def __init__(
        self, folder: Path, clock: Callable[[], float] = time.monotonic, token: str = ""
    ) -> None:
        self.path = make_private(folder) / SOCKET
        self.clock = clock
        self.refused = 0
        self.token = token
        self._lock = os.open(folder / "daemon.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise RpcServerError(f"a daemon runs in {folder} already; quit it first") from error
        self._listen()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.server, selectors.EVENT_READ)
        self.clients: list[Client] = []

    def _listen(self) -> None:
        # We hold the lock: an existing socket was left by a daemon that died.
        self.path.unlink(missing_ok=True)
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)  # never open to other users, not even briefly
        try:
            self.server.bind(str(self.path))
        except OSError as error:
            raise RpcServerError(
                f"{self.path} cannot be a socket ({error}); use a shorter one"
            ) from error
        finally:
            os.umask(before)
        self.server.listen(128)
        self.server.setblocking(False)

    def poll(self, timeout: float) -> list[Asked]:
        """The requests of the next `timeout` s, in the order of arrival."""
        asked: list[Asked] = []
        for key, events in self.selector.select(timeout):
            client: Client | None = key.data
            if client is None:
                self._accept()  # one per poll: connected clients go first
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ and not client.gone:
                self._receive(client, asked)
        return asked

    def answer(self, client: Client, reply: Reply) -> None:
        """Send without waiting; a client that does not read is disconnected."""
        if client.gone:
            return
        client.goes += reply.line()
        self._flush(client)
        if len(client.goes) > MOST_UNREAD:
            self._drop(client, "it does not read its answers")

    def close(self) -> None:
        for client in list(self.clients):
            self._drop(client)
        self.selector.close()
        self.server.close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock)

    def _accept(self) -> None:
        try:
            line, _ = self.server.accept()
        except OSError as error:
            LOG.warning("a client could not be accepted: %s", error)
            return
        if hasattr(socket, "SO_PEERCRED"):  # elsewhere the socket's mode decides
            told = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", told)[1] != os.geteuid():
                self.refused += 1
                LOG.warning("refused: a client of another user")
                line.close()
                return
        line.setblocking(False)
        if len(self.clients) >= MOST_CLIENTS:
            self._drop(min(self.clients, key=lambda c: c.heard), "there are too many clients")
        client = Client(line, self.clock())
        self.clients.append(client)
        self.selector.register(line, selectors.EVENT_READ, client)

    def _receive(self, client: Client, asked: list[Asked]) -> None:
        try:
            came = client.line.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        if not came:
            self._drop(client)
            return
        client.heard = self.clock()
        *lines, client.came = (client.came + came).split(b"\n")
        for line in lines:
            if not client.gone:
                self._parse_line(client, line, asked)
        if len(client.came) >= MOST_BYTES and not client.gone:
            self._refuse(client, 0, f"a line should have at most {MOST_BYTES} bytes")
            self._drop(client, "it sent a line without an end")

    def _parse_line(self, client: Client, line: bytes, asked: list[Asked]) -> None:
        try:
            request = parse(line)
        except RequestError as error:
            self._refuse(client, 0, str(error))
            return
        if request.number <= client.number:
            self._refuse(client, request.number, f"number {client.number} was used already")
            return
        client.number = request.number
        why = ""
        if request.verb != Verb.ESTOP and self._floods(client):
            why = f"more than {PER_SECOND} requests a second"
        elif request.foreign(self.token):
            why = FOREIGN
        if why := why or request.late(self.clock()):
            self._refuse(client, request.number, why)
        else:
            asked.append(Asked(request, client))

    def _floods(self, client: Client) -> bool:
        if client.heard - client.since > 1.0:
            client.since = client.heard
            client.lines = 0
        client.lines += 1
        return client.lines > PER_SECOND

    def _refuse(self, client: Client, number: int, reason: str) -> None:
        self.refused += 1
        client.refused += 1
        LOG.warning("refused: %s", reason)
        self.answer(client, Reply(number, False, reason))
        if client.refused >= PATIENCE:
            self._drop(client, f"{client.refused} of its lines were refused")

    def _flush(self, client: Client) -> None:
        try:
            sent = client.line.send(client.goes)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(client)
            return
        client.goes = client.goes[sent:]
        wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.goes else 0)
        if self.selector.get_key(client.line).events != wants:
            self.selector.modify(client.line, wants, client)

    def _drop(self, client: Client, reason: str = "") -> None:
        if client.gone:
            return
        if reason:
            LOG.warning("a client was disconnected: %s", reason)
        client.gone = True
        self.clients.remove(client)
        self.selector.unregister(client.line)
        client.line.close()


class FolderError(RuntimeError):
    """Several daemons may be meant: one line that lists them."""


def robots_folder() -> Path:
    """This user's; the default folder of each robot is in it, never on a disk."""
    return memory_folder() / f"embodied-robot-{os.geteuid()}"


def default_folder(robot: str) -> Path:
    """The default folder of the daemon of `robot`, by the name that `deploy robot=` got."""
    return robots_folder() / robot.replace(os.sep, ".").lstrip(".")


def running() -> list[Path]:
    """The default folders in which a daemon listens, also one that hangs."""
    place = robots_folder()
    return sorted(each for each in place.glob("*") if listens(each)) if place.is_dir() else []


def listens(folder: Path) -> bool:
    """Whether a process listens at the daemon's socket there. The kernel answers, not the daemon,
    and the daemon's lock is not touched: a daemon that starts just then would be refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.setblocking(False)
        try:
            line.connect(str(folder / SOCKET))
        except BlockingIOError:
            return True  # many wait for it
        except OSError:
            return False
    return True


def find(robot: str | None = None) -> Path:
    """The folder of the daemon of `robot`; without a name, of the only one that there is (none: the
    folder where one was looked for). FolderError where there are several."""
    if robot is not None:
        return default_folder(robot)
    found = running()
    if len(found) > 1:
        names = ", ".join(f"robot={each.name}" for each in found)
        raise FolderError(f"several robots run; say which: {names}")
    return found[0] if found else robots_folder()
