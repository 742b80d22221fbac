"""The lock of the policy process: from `lock` on it writes its chunk's mailbox, which is mapped,
and its log, which is open, and nothing else.

    Landlock    no file is opened for writing, made, moved, removed or executed, but for devices; no
                port is listened at; no other process gets a signal
    seccomp     no call that looks into, signals or slows down another process, executes a program,
                changes a file's length, owner or mode, or connects to a Unix socket (the daemon's);
                a policy that needs no network opens no socket at all

Landlock holds the thread that calls `lock`, and those that it starts later; seccomp holds all. What
a lock cannot do: files may be read, and a network that is allowed may be used.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
from glob import glob

from embodied.core import seccomp

# kernel/uapi/linux/landlock.h
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
PATH_BENEATH = 1
READS = 1 << 2 | 1 << 3  # READ_FILE, READ_DIR
RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""The version of Landlock from which on so many rights of files are known."""
OPENED = 1 << 1 | 1 << 14 | 1 << 15  # WRITE_FILE, TRUNCATE, IOCTL_DEV
BIND = 1  # to a TCP port, from version 4 on
SCOPES = 1 | 2  # abstract Unix sockets, signals; from version 6 on
DEVICES = ("/dev/null", "/dev/nvidia*", "/dev/dri", "/dev/kfd")
"""Devices that may be written: an accelerator's."""

F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15
FIOSETOWN, SIOCSPGRP = 0x8901, 0x8902

# ptrace process_vm_readv process_vm_writev pidfd_getfd process_madvise kcmp; tkill rt_sigqueueinfo
# rt_tgsigqueueinfo pidfd_send_signal; execve execveat; mount umount2 pivot_root chroot move_mount
# open_tree fsopen fsmount fspick mount_setattr setns unshare; bpf keyctl add_key request_key
# userfaultfd open_by_handle_at perf_event_open io_uring_setup init_module finit_module
# delete_module kexec_load; truncate ftruncate fchmod fchmodat fchmodat2 fchown fchownat utimensat
# setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat
NEW = (424, 425, 428, 429, 430, 432, 433, 438, 440, 442, 452, 463, 466)
X86 = """101 310 311 312 200 129 297 59 322 165 166 155 161 308 272 321 250 248 249 323 304 298 175
313 176 246 76 77 91 268 93 260 280 188 189 190 197 198 199"""
X86_ALONE = "90 92 94 132 235 261"  # chmod chown lchown utime utimes futimesat
ARM = """117 270 271 272 130 138 240 221 281 40 39 41 51 268 97 280 219 217 218 282 265 241 105 273
106 104 45 46 52 53 55 54 88 5 6 7 14 15 16"""
DENIED = {
    "x86_64": (*NEW, *map(int, X86.split()), *map(int, X86_ALONE.split())),
    "aarch64": (*NEW, *map(int, ARM.split())),
}
OWN = {"x86_64": (62, 234), "aarch64": (129, 131)}
"""kill and tgkill: their first argument has to be this process."""
ITSELF = {"x86_64": (144, 142, 314, 203, 302), "aarch64": (119, 118, 274, 122, 261)}
"""sched_setscheduler, sched_setparam, sched_setattr, sched_setaffinity and prlimit64: 0, the
caller, has to be their first argument."""
SOCKET, FCNTL, IOCTL, SETPRIORITY = range(4)
OTHER = {"x86_64": (41, 72, 16, 141), "aarch64": (198, 25, 29, 140)}


def lock(network: bool) -> str:
    """Lock this process; `network`: it may open sockets, but no Unix sockets. Returns what is not
    in force, in one line; empty where all is."""
    reasons = {"Landlock": _forbid_files(), "seccomp": seccomp.install(_filter(network))}
    return "; ".join(f"{name} is {reason}" for name, reason in reasons.items() if reason)


def missing() -> str:
    """What `lock` could not do on this machine, in one line; empty where it does all."""
    reasons = {"Landlock": "" if _version() else NONE, "seccomp": seccomp.unavailable()}
    return "; ".join(f"{name} is {reason}" for name, reason in reasons.items() if reason)


NONE = "not available: the policy process can write files"


def _version() -> int:
    """The kernel's version of Landlock; 0: it has none."""
    if seccomp.unavailable():
        return 0
    return max(0, _call(CREATE_RULESET, None, 0, VERSION_FLAG))


def _call(number: int, *arguments: int | bytes | None) -> int:
    """A system call; -1 where it fails (`ctypes.get_errno`)."""
    given = [
        ctypes.c_long(each) if isinstance(each, int) else ctypes.c_char_p(each)
        for each in arguments
    ]
    return int(LIBC.syscall(ctypes.c_long(number), *given))


LIBC = ctypes.CDLL(None, use_errno=True)


def _forbid_files() -> str:
    """Restrict this thread with Landlock; why that cannot be done, or empty."""
    version = _version()
    if not version:
        return NONE
    count = max(rights for since, rights in RIGHTS.items() if since <= version)
    handled = (1 << count) - 1 & ~READS
    attributes = struct.pack(
        "QQQ", handled, BIND if version >= 4 else 0, SCOPES if version >= 6 else 0
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _call(CREATE_RULESET, attributes, size, 0)
    if rules < 0:
        return f"refused: {os.strerror(ctypes.get_errno())}"
    try:
        for name in (found for pattern in DEVICES for found in glob(pattern)):
            device = os.open(name, os.O_PATH)
            rule = struct.pack("=Qi", handled & OPENED, device)
            failed = _call(ADD_RULE, rules, PATH_BENEATH, rule, 0)
            os.close(device)
            if failed:
                return f"refused for {name}: {os.strerror(ctypes.get_errno())}"
        LIBC.prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if _call(RESTRICT_SELF, rules, 0):
            return f"refused: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(rules)
    return ""


def _filter(network: bool) -> list[seccomp.Line]:
    """What is not allowed to this process and its threads; all else is."""
    if seccomp.unavailable():
        return []
    machine = platform.machine()
    lines = seccomp.head()
    for call in DENIED[machine]:
        lines += seccomp.denied(call)
    for call in OWN[machine]:
        lines += seccomp.denied_where(call, 0, [os.getpid()], equal=False)
    for call in ITSELF[machine]:
        lines += seccomp.denied_where(call, 0, [0], equal=False)
    other = OTHER[machine]
    lines += seccomp.denied_where(other[SETPRIORITY], 1, [0], equal=False)
    lines += seccomp.denied_where(other[FCNTL], 1, [F_SETOWN, F_SETSIG, F_SETOWN_EX])
    lines += seccomp.denied_where(other[IOCTL], 1, [FIOSETOWN, SIOCSPGRP])
    if network:
        lines += seccomp.denied_where(other[SOCKET], 0, [socket.AF_UNIX])
    else:
        lines += seccomp.denied(other[SOCKET])
    return [*lines, (seccomp.RETURN, 0, 0, seccomp.ALLOW)]
