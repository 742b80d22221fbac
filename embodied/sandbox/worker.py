"""The sandbox's locked process: one per program, able to compute and nothing else.

`python -m embodied.sandbox.worker` is a template: it imports torch once and never runs a program.
For each program it forks a child, which locks itself (`lock`) before it reads any request. Frames
are a length, a JSON header and raw arrays; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from embodied.sandbox import evaluate as run
from embodied.sandbox.allow_list import Rejected, check
from embodied.sandbox.lock import lock, self_test

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
    header = json.loads(text)
    arrays: list[np.ndarray] = []
    at = 0
    for kind, shape in header.pop("arrays"):
        if kind not in KINDS:
            raise ValueError(f"arrays of {kind} are not sent")
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
        arrays.append(np.frombuffer(body[at : at + size], kind).reshape(shape))
        at += size
    if at != len(body):
        raise ValueError("a frame with more bytes than arrays")
    return header, arrays


def template(given: int, raw: bool) -> None:
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
                _child(handles, order["limits"], raw)
            for handle in handles:
                os.close(handle)
            link.send(json.dumps({"pid": pid}).encode())
        else:
            link.send(json.dumps({"status": _end(order["pid"])}).encode())


def _warm() -> None:
    """Trigger torch's lazy initialisation, while files can still be opened."""
    checked = check("def reward(x):\n    return torch.exp(-torch.norm(x, dim=-1))")
    run.call(run.compiled(checked), [torch.rand(4096, 3)], 4096)


def _end(pid: int) -> int:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    _, status = os.waitpid(pid, 0)
    return status


def _child(handles: Sequence[int], limits: dict[str, float], raw: bool) -> None:
    """Runs in the child and never returns. `handles`: requests, answers, print."""
    try:
        state = lock(handles, limits)
        requests, answers = 3, 4
        write(answers, pack(state | {"test": self_test()}))
        programs: dict[str, Any] = {}
        while True:
            frame = read(requests)
            if frame is None:
                os._exit(0)
            write(answers, _answer(*unpack(*frame), programs, raw))
    except BaseException:  # a program in raw mode may raise anything
        os._exit(3)
    finally:
        os._exit(4)


def _answer(
    order: dict[str, Any], arrays: list[np.ndarray], programs: dict[str, Any], raw: bool
) -> bytes:
    try:
        source = order["source"]
        if source not in programs:
            programs[source] = _raw(source) if raw else run.compiled(check(source))
        inputs = [torch.from_numpy(array.copy()) for array in arrays]
        output = run.call(programs[source], inputs, order["rows"], "process" if raw else "result")
        for value, array in zip(inputs, arrays, strict=True):
            if not np.array_equal(value.numpy(), array, equal_nan=value.is_floating_point()):
                raise Rejected("result", "it changes its inputs")
    except Rejected as error:
        return pack({"layer": error.layer, "reason": run.clean(error.reason)})
    except Exception as error:  # raw programs only
        return pack({"layer": "process", "reason": run.described(error)})
    columns = [output.total, *output.components.values()]
    return pack({"names": list(output.components)}, [column.numpy() for column in columns])


def _raw(source: str) -> Any:
    """Plain Python, for tests which show that the process alone is sufficient."""
    names: dict[str, Any] = {}
    exec(compile(source, "<program>", "exec"), names)
    return names["reward"]


def read(handle: int) -> tuple[bytes, bytes] | None:
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
    template(int(sys.argv[1]), raw="raw" in sys.argv[2:])
