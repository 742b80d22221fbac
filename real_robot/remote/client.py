"""RPC client for a robot's daemon on another machine, with CURVE keys.

Requests that move an arm must carry a recent time on the robot's clock. The client asks for that
clock first: when `now` has arrived, the robot's clock is at least `now`, and the request says
`now`. So a request looks too old by the round trip, and never too new.
"""

from __future__ import annotations

import time
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from embodied.real_robot.daemon.client import MAX_REPLY_BYTES, ClientError
from embodied.real_robot.daemon.requests import (
    ALWAYS,
    Reply,
    Request,
    RequestError,
    Verb,
    parse_reply,
)
from embodied.real_robot.remote.keys import CLIENT, SERVER, Pair, public_of, secret_of

BYE = b""
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

    `name` is the key in the folder `keys`; `policy` is a folder on the robot's machine.
    ClientError, RequestError, KeyFileError.
    """
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
        """Send a goodbye if connected, and close."""
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
