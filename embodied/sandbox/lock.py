"""Locks the calling process: resource limits, no privileges, no open files, a system-call filter.

On Linux (x86-64, aarch64) the filter is a seccomp-BPF allow-list, installed with prctl via ctypes.
Elsewhere there is none, and programs do not run unless the user says so.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
FILTER = 2
ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000
LOAD, EQUAL, TEST, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, MACHINE, PROTECTION = 0, 4, 32  # offsets in seccomp_data: nr, arch, args[2]
EXECUTABLE = 4
NOBODY = 65534

# read write close lseek munmap brk rt_sigaction rt_sigprocmask rt_sigreturn mremap sched_yield
# madvise getpid gettid exit exit_group gettimeofday getrusage sigaltstack futex sched_getaffinity
# restart_syscall clock_gettime clock_getres getrandom membarrier rseq
X86 = "0 1 3 8 11 12 13 14 15 25 24 28 39 186 60 231 96 98 131 202 204 219 228 229 318 324 334"
ARM = "63 64 57 62 215 214 134 135 139 216 124 233 172 178 93 94 169 165 132 98 123 128 113 114 278"
CALLS = {  # the machine's audit number, what may be called, and mmap and mprotect
    "x86_64": (0xC000003E, tuple(map(int, X86.split())), (9, 10)),
    "aarch64": (0xC00000B7, (*map(int, ARM.split()), 283, 293), (222, 226)),
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
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
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
    machine = platform.machine()
    if sys.platform != "linux" or machine not in CALLS:
        return f"not available on {sys.platform} {machine}"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return f"refused: {os.strerror(ctypes.get_errno())}"
    code = _filter(*CALLS[machine])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.c_char_p(program), 0, 0):
        return f"refused: {os.strerror(ctypes.get_errno())}"
    return "on"


def _filter(arch: int, calls: Sequence[int], mapping: Sequence[int]) -> bytes:
    """BPF program: calls of another architecture kill; listed calls pass; memory may be mapped but
    not made executable; everything else returns EPERM."""
    lines = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
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
    lines.append((RETURN, 0, 0, EPERM))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def self_test() -> list[str]:
    """Forbidden operations that still succeed in this process; [] if the lock holds."""
    return [name for name, attempt in ATTEMPTS.items() if _succeeds(attempt)]


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
