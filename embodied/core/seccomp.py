"""System-call filters: seccomp-BPF on Linux (x86-64, aarch64), installed through ctypes.

A filter is a list of BPF instructions. `head` comes first: calls of another architecture kill the
process, and the number of the call is loaded. A filter is kept until the process ends, and its
children inherit it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence

# Operation, instructions to skip where it holds, and where it does not, constant.
Line = tuple[int, int, int, int]
PR_SET_NO_NEW_PRIVS = 38
SET_FILTER = 1
ALL_THREADS = 1
ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000
LOAD, EQUAL, AT_LEAST, TEST, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, MACHINE, ARGUMENTS = 0, 4, 16  # offsets in seccomp_data: nr, arch, args
X32 = 0x40000000  # calls of x86-64 with 32-bit pointers have another number
# The audit number of each machine, and its number of the call `seccomp`.
MACHINES = {"x86_64": (0xC000003E, 317), "aarch64": (0xC00000B7, 277)}


def argument(index: int) -> int:
    """The offset of the lower half of a call's argument number `index`."""
    return ARGUMENTS + 8 * index


def head() -> list[Line]:
    """The first instructions of a filter for this machine."""
    arch, _ = MACHINES[platform.machine()]
    return [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, arch),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, EPERM),
    ]


def denied(call: int) -> list[Line]:
    return [(EQUAL, 0, 1, call), (RETURN, 0, 0, EPERM)]


def denied_where(call: int, index: int, values: Sequence[int], equal: bool = True) -> list[Line]:
    """Deny `call` where its argument number `index` is one of `values` (not `equal`: is none)."""
    found, else_ = (EPERM, ALLOW) if equal else (ALLOW, EPERM)
    checks = [line for value in values for line in ((EQUAL, 0, 1, value), (RETURN, 0, 0, found))]
    block = [(LOAD, 0, 0, argument(index)), *checks, (RETURN, 0, 0, else_)]
    return [(EQUAL, 0, len(block), call), *block]


def unavailable() -> str:
    """Why no filter can be installed here; empty where one can."""
    machine = platform.machine()
    if sys.platform == "linux" and machine in MACHINES:
        return ""
    return f"not available on {sys.platform} {machine}"


def install(lines: Sequence[Line]) -> str:
    """Filter the calls of all threads of this process; why that cannot be done, or empty. It also
    gives up all privileges that a program could gain by being executed."""
    if reason := unavailable():
        return reason
    libc = ctypes.CDLL(None, use_errno=True)
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(buffer))
    number = ctypes.c_long(MACHINES[platform.machine()][1])
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
        number, ctypes.c_long(SET_FILTER), ctypes.c_long(ALL_THREADS), ctypes.c_char_p(program)
    ):
        return f"refused: {os.strerror(ctypes.get_errno())}"
    return ""
