"""ZAP authenticator: admits clients whose key is known (rfc.zeromq.org/spec/27), logs refusals.

The folder of public keys is read again for every new connection: adding or removing a file takes
effect at once.

`zmq.auth` is not used, for three reasons. Its callback gets the key without the client's address,
which the log of refusals names. It answers in a thread or an asyncio loop of its own, while the
relay polls all its sockets in one loop. It does not report failed handshakes, so the socket monitor
below would be needed beside it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from embodied.real_robot.daemon.requests import MOST_BYTES
from embodied.real_robot.remote.keys import KeyFileError, Pair, public_of

LOG = logging.getLogger("embodied.robot.remote")
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
    """Call `poll` when `requests` or `events` is readable. Create it before binding the ROUTER."""

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
