"""The sandbox's locked process: one per program, able to compute and nothing else.

`python -m embodied.sandbox.worker` is a template: it imports torch once and never runs a program.
For each program it forks a child, which locks itself (`lock`) before it reads any request. Frames
are a length, a JSON header and raw arrays through pipes; nothing is pickled.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.sandbox import evaluate
from embodied.sandbox.evaluate import LoadedProgram
from embodied.sandbox.lock import lock, self_test
from embodied.sandbox.program import IMPORTS, Rejected, read

HEADER = struct.Struct("<II")  # bytes of the header, bytes of the arrays
KINDS = ("float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")


def pack(header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """One frame; shapes and dtypes of the arrays are added to the header."""
    told = header | {"arrays": [[str(a.dtype), list(a.shape)] for a in arrays]}
    text = json.dumps(told).encode()
    body = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
    return HEADER.pack(len(text), len(body)) + text + body


def unpack(text: bytes, body: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The inverse of `pack`; ValueError for an invalid frame."""
    try:
        return _unpacked(json.loads(text), body)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"an invalid frame ({type(error).__name__})") from error


def _unpacked(header: Any, body: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    arrays: list[np.ndarray] = []
    at = 0
    for kind, shape in header.pop("arrays"):
        if kind not in KINDS:
            raise ValueError("arrays of a kind that is not sent")
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
        arrays.append(np.frombuffer(body[at : at + size], kind).reshape(shape))
        at += size
    if at != len(body):
        raise ValueError("a frame with more bytes than arrays")
    return header, arrays


def template(given: int) -> None:
    """Serve the parent over the Unix socket `given`: "new", with pipes and limits, forks a child;
    "end PID" kills its process group and returns its exit status. Ends at the parent's end of file.
    """
    torch.set_num_threads(1)
    _warm()
    link = socket.socket(fileno=given)
    link.send(b"ready")
    while True:
        message, handles, _, _ = socket.recv_fds(link, 4096, 3)
        if not message:
            return
        order = json.loads(message)
        if order["order"] == "new":
            pid = os.fork()
            if pid == 0:
                link.close()
                _child(handles, order["limits"])
            for handle in handles:
                os.close(handle)
            link.send(json.dumps({"pid": pid}).encode())
        else:
            link.send(json.dumps({"status": _end(order["pid"])}).encode())


def _warm() -> None:
    """Import what torch and numpy load lazily, while files can still be opened, and make the
    decorators of TorchScript do nothing: they read the source from a file."""
    for name in (*IMPORTS, "torch.nn.functional", "numpy.linalg", "numpy.random", "numpy.fft"):
        importlib.import_module(name)
    for name in ("script", "export", "ignore", "unused", "script_if_tracing"):
        setattr(torch.jit, name, _undecorated)
    torch.compile = _undecorated
    x = torch.rand(8, 3)
    y = x.numpy()
    for attempt in WARM:
        attempt(x)
    for attempt in WARM_NUMPY:
        attempt(y)


def _undecorated(function: Any = None, *_: Any, **settings: Any) -> Any:
    """A decorator, with or without settings, that returns the function."""
    return _undecorated if function is None else function


WARM: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: (x > 0.3) * (x % 2.0) ** 2 - 1.0 / (1 + x) // 1,
    lambda x: torch.norm(x, dim=-1) + torch.linalg.norm(x, dim=-1) + x.norm(dim=-1),
    lambda x: torch.where(x > 0, x, 0.0).clamp(0, 1).min(dim=-1).values,
    lambda x: torch.einsum("ij,ij->i", x, x) + torch.nn.functional.cosine_similarity(x, x),
    lambda x: torch.nn.functional.normalize(x) + torch.cross(x, x, dim=-1) + x.softmax(-1),
    lambda x: torch.vmap(lambda row: row.sum())(x),
    lambda x: torch.cdist(x, x) @ torch.stack([x, x]).sum(0) + torch.quantile(x, 0.5),
    lambda x: torch.tensor([1.0, 2, 3]).to(x.device).repeat(2, 1).new_zeros(2),
    lambda x: repr(x) + f"{x.sum():.3f}",
    lambda x: x.numpy() * 2 + np.asarray(x),
)
"""What programs commonly use, with batches."""
WARM_NUMPY: tuple[Callable[[np.ndarray], Any], ...] = (
    lambda y: np.linalg.norm(y, axis=-1) + np.clip(np.exp(-y), 0, 1).sum(-1) + np.median(y),
    lambda y: np.where(y > 0, y, 0.0).max(axis=-1) + np.einsum("ij,ij->i", y, y),
    lambda y: np.linalg.norm(torch.from_numpy(y), axis=-1) + repr(y).count("a"),
    lambda y: np.arctan2(y, y) @ y.T + np.cross(y, y) @ y.T + np.percentile(y, 50),
)
"""The same with arrays."""


def _end(pid: int) -> int:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    _, status = os.waitpid(pid, 0)
    return status


def _child(handles: Sequence[int], limits: dict[str, float]) -> None:
    """Runs in the child and never returns. `handles`: requests, answers, print."""
    try:
        state = lock(handles, limits)
        requests, answers = 3, 4
        write(answers, pack(state | {"test": self_test()}))
        program: LoadedProgram | None = None
        while True:
            frame = read_frame(requests)
            if frame is None:
                os._exit(0)
            program, answer = _answer(program, *unpack(*frame))
            sys.stdout.flush()
            write(answers, answer)
    except BaseException:  # a program may raise anything
        os._exit(3)
    finally:
        os._exit(4)


def _answer(
    program: LoadedProgram | None, order: dict[str, Any], arrays: list[np.ndarray]
) -> tuple[LoadedProgram | None, bytes]:
    """Load the program that `order` holds, or run the loaded one."""
    try:
        if program is None:
            found = read(order["source"], order["known"])
            return LoadedProgram(found, order["one_by_one"]), pack({})
        total, parts = program([array.copy() for array in arrays], order["rows"])
    except Rejected as error:
        return program, pack({"layer": error.layer, "reason": evaluate.clean(error.reason)})
    made = {"names": list(parts), "one_by_one": program.one_by_one is True}
    return program, pack(made, [total, *parts.values()])


def read_frame(handle: int) -> tuple[bytes, bytes] | None:
    """Read one frame, blocking; None at the end of file."""
    start = _exactly(handle, HEADER.size)
    if start is None:
        return None
    text, body = HEADER.unpack(start)
    return _exactly(handle, text) or b"", _exactly(handle, body) or b""


def _exactly(handle: int, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(handle, min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


if __name__ == "__main__":
    template(int(sys.argv[1]))
