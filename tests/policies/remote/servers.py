"""Policy servers of tests: ours in a process that can be killed, and stock ones."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import websockets.asyncio.server

from embodied.core.errors import ServerLost
from embodied.serve.client import Client


def free_port() -> int:
    with socket.socket() as wire:
        wire.bind(("127.0.0.1", 0))
        return wire.getsockname()[1]


WITHOUT_HASH = """
import sys, threading
from dataclasses import replace
from embodied.core import checkpoint
from embodied.serve.policy_service import PolicyService
from embodied.serve.server import Server
service = PolicyService(checkpoint.load_policy(sys.argv[1]))
service.offer = replace(service.offer, policy=None)
with Server(service, port=int(sys.argv[2])):
    threading.Event().wait()
"""


class Process:
    """`embodied serve RUN` in a process of its own; or, not `hashed`, a server without a token that
    does not say the hash of its policy."""

    def __init__(self, run: Path, port: int, token: Path, hashed: bool = True) -> None:
        self.url, self.token = f"ws://127.0.0.1:{port}", token
        served = ["-m", "embodied.cli", "serve", str(run), f"port={port}", f"token_file={token}"]
        bare = ["-c", WITHOUT_HASH, str(run), str(port)]
        self.process = subprocess.Popen(
            [sys.executable, *([*served, "device=cpu"] if hashed else bare)],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ready(self) -> Process:
        """Wait until it answers."""
        for _ in range(600):
            try:
                word = self.token.read_text().strip() if self.token.exists() else None
                Client(self.url, word, 10.0).close()
                return self
            except ServerLost:
                time.sleep(0.1)
        raise AssertionError("the server does not start")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def pack(message: Any) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=packed)


def unpack(message: bytes) -> Any:
    return unpacked(msgspec.msgpack.decode(message))


@contextmanager
def stock(
    infer: Callable[[dict[str, Any]], Any],
    metadata: Any = None,
    pack: Callable[[Any], bytes] = pack,
    unpack: Callable[[bytes], Any] = unpack,
) -> Iterator[str]:
    """The URL of a server written from openpi's protocol alone, with another MessagePack than
    ours: one observation at a time, no token, no additions, an error is a text frame and ends the
    connection."""
    loop = asyncio.new_event_loop()
    ready, url = threading.Event(), [""]

    async def talk(connection: websockets.asyncio.server.ServerConnection) -> None:
        await connection.send(pack(metadata or {}))
        async for message in connection:
            try:
                assert isinstance(message, bytes)
                answer = infer(unpack(message))
            except Exception as error:
                await connection.send(f"Traceback\n{type(error).__name__}: {error}")
                await connection.close(1011)
                return
            await connection.send(pack({**answer, "server_timing": {"infer_ms": 0.1}}))

    async def run() -> None:
        listening = websockets.asyncio.server.serve(
            talk, "127.0.0.1", 0, compression=None, max_size=None
        )
        async with listening as server:
            url[0] = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            ready.set()
            await asyncio.Future()

    def target() -> None:
        with suppress(RuntimeError, asyncio.CancelledError):
            loop.run_until_complete(run())

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join(5)


def packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        about = {b"dtype": value.dtype.str, b"shape": value.shape}
        return {b"__ndarray__": True, b"data": value.tobytes(), **about}
    raise TypeError(type(value))


def unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        if b"__ndarray__" in value:
            flat = np.frombuffer(value[b"data"], np.dtype(value[b"dtype"]))
            return flat.reshape(value[b"shape"])
        return {key: unpacked(each) for key, each in value.items()}
    return value
