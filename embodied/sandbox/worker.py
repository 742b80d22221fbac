"""The sandbox's locked process: one per program, able to compute and nothing else.

`python -m embodied.sandbox.worker` is a template: it imports torch once and never runs a program.
For each program it forks a child, which locks itself (`lock`) before it reads any request. Frames
are a length, a JSON header and raw arrays through pipes; nothing is pickled.

The lock: resource limits, no privileges, no open files, a system-call filter.

On Linux (x86-64, aarch64) the filter is a seccomp-BPF allow-list, installed with prctl via ctypes.
Elsewhere there is none, and programs do not run unless the user says so.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.seccomp import (
    ALLOW,
    EPERM,
    EQUAL,
    LOAD,
    RETURN,
    TEST,
    Line,
    argument,
    head,
    install,
    unavailable,
)
from embodied.sandbox.program import IMPORTS, LoadedProgram, Rejected, clean, read

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PROTECTION = argument(2)  # of mmap and mprotect
EXECUTABLE = 4
NOBODY = 65534

# read write close lseek munmap brk rt_sigaction rt_sigprocmask rt_sigreturn mremap sched_yield
# madvise getpid gettid exit exit_group gettimeofday getrusage sigaltstack futex sched_getaffinity
# restart_syscall clock_gettime clock_getres getrandom membarrier rseq
X86 = "0 1 3 8 11 12 13 14 15 25 24 28 39 186 60 231 96 98 131 202 204 219 228 229 318 324 334"
ARM = "63 64 57 62 215 214 134 135 139 216 124 233 172 178 93 94 169 165 132 98 123 128 113 114 278"
CALLS = {  # what may be called, and mmap and mprotect
    "x86_64": (tuple(map(int, X86.split())), (9, 10)),
    "aarch64": ((*map(int, ARM.split()), 283, 293), (222, 226)),
}


def lock(handles: Sequence[int], limits: dict[str, float]) -> dict[str, Any]:
    """Restrict this process to computing and to `handles` (requests, answers, print), which become
    file descriptors 3, 4 and 1. Returns what is in force: {"seccomp": ..., "user": ...}."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _only(handles)
    os.environ.clear()
    os.chdir(tempfile.mkdtemp(prefix="program-"))
    os.rmdir(os.getcwd())  # a deleted folder cannot be written to
    user = _drop()
    _limit(limits)
    return {"seccomp": _seccomp(), "user": user}


def _only(handles: Sequence[int]) -> None:
    """Keep three descriptors: requests as 3, answers as 4, print as 1 and 2; 0 is empty."""
    requests, answers, printed = handles
    high = [os.dup2(h, 200 + i) for i, h in enumerate((requests, answers, printed))]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, source in ((3, high[0]), (4, high[1]), (1, high[2]), (2, high[2])):
        os.dup2(source, target)
    os.closerange(5, 4096)


def _drop() -> str:
    """Switch to the user `nobody` if this is root."""
    if os.geteuid() != 0:
        return "own"
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return "nobody"


def _limit(limits: dict[str, float]) -> None:
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + int(limits["memory"])
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for kind in ("CORE", "FSIZE", "NOFILE", "NPROC"):
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (0, 0))


def _seccomp() -> str:
    """Install the filter; "on", or why it is not available."""
    if reason := unavailable():
        return reason
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return install(_filter(*CALLS[platform.machine()])) or "on"


def _filter(calls: Sequence[int], mapping: Sequence[int]) -> list[Line]:
    """Listed calls pass; memory may be mapped but not made executable; everything else returns
    EPERM."""
    lines = head()
    for call in calls:
        lines += [(EQUAL, 0, 1, call), (RETURN, 0, 0, ALLOW)]
    for call in mapping:
        lines += [
            (EQUAL, 0, 4, call),
            (LOAD, 0, 0, PROTECTION),
            (TEST, 0, 1, EXECUTABLE),
            (RETURN, 0, 0, EPERM),
            (RETURN, 0, 0, ALLOW),
        ]
    return [*lines, (RETURN, 0, 0, EPERM)]


def _succeeds(attempt: Any) -> bool:
    try:
        attempt()
    except (OSError, RuntimeError):
        return False
    return True


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


ATTEMPTS = {
    "open": lambda: os.close(os.open("/etc/hostname", os.O_RDONLY)),
    "socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
    "list": lambda: os.listdir("/"),
    "fork": _fork,
    "kill": lambda: os.kill(1, 0),
}


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
        # Forbidden operations that still succeed: none if the lock holds.
        test = [name for name, attempt in ATTEMPTS.items() if _succeeds(attempt)]
        write(answers, pack(state | {"test": test}))
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
    call = {"call": order["call"]}
    try:
        if program is None:
            found = read(order["source"], order["known"])
            return LoadedProgram(found, order["one_by_one"]), pack(call)
        total, parts, kept = program([array.copy() for array in arrays], order["rows"])
    except Rejected as error:
        return program, pack(call | {"layer": error.layer, "reason": clean(error.reason)})
    made = call | {"names": list(parts), "one_by_one": program.one_by_one is True}
    return program, pack(made, [total, *parts.values(), *kept])


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
