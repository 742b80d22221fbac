"""CURVE key files for operators' machines and the daemon (CurveZMQ, rfc.zeromq.org/spec/26).

A folder DIR holds `server.key` and `server.key_secret`, `NAME.key_secret` of every client that was
made there, and `clients/NAME.key`: who may connect. An operator's machine needs a folder with
`server.key` and `NAME.key_secret`, and nothing else.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from embodied.core.build import ConfigError

try:
    import zmq
except ImportError as error:
    raise ConfigError('remote operators need pyzmq: pip install "embodied-rl[robot]"') from error

SERVER, CLIENT = "server", "client"
PUBLIC, SECRET = 0o644, 0o600
CLIENTS = "clients"


class KeyFileError(RuntimeError):
    """A key cannot be created or used: one line that says why and what to do."""


@dataclass(frozen=True)
class Pair:
    """Both halves, as 40 printable characters each."""

    public: bytes
    secret: bytes


def make(folder: Path, name: str = CLIENT) -> list[Path]:
    """Create a client's key pair, and the server's where there is none; the new files. KeyFileError
    where a file of that name exists."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name) or name == SERVER:
        raise KeyFileError(f"name={name} should be letters and digits, and not {SERVER!r}")
    secret, public = folder / f"{name}.key_secret", folder / CLIENTS / f"{name}.key"
    for path in (secret, public):
        if path.exists():
            raise KeyFileError(f"{path} exists already; name=OTHER makes another key")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    public.parent.mkdir(mode=0o700, exist_ok=True)
    made: list[Path] = []
    server, told = folder / f"{SERVER}.key_secret", folder / f"{SERVER}.key"
    if server.exists() != told.exists():
        raise KeyFileError(
            f"{folder} has only one half of the server's keys; choose another folder"
        )
    if not server.exists():
        made += _write(server, told)
    return made + _write(secret, public)


def secret_of(path: Path) -> Pair:
    """The key pair in a file that only this user may read; KeyFileError."""
    public, secret = _read(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise KeyFileError(f"other users may read {path}; type: chmod 600 {path}")
    if secret is None:
        raise KeyFileError(f"{path} holds no secret key")
    return Pair(public, secret)


def public_of(path: Path) -> bytes:
    """The public key in a file; KeyFileError."""
    return _read(path)[0]


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        found = dict(re.findall(r'^ *(public|secret)-key = "([!-~]{40})"$', path.read_text(), re.M))
        told = found["public"].encode()
    except (OSError, ValueError, KeyError) as error:
        raise KeyFileError(
            f"{path} cannot be read as a key; make one on the robot's machine: embodied robot keys "
            "folder=DIR"
        ) from error
    return told, found["secret"].encode() if "secret" in found else None


def _write(secret: Path, public: Path) -> list[Path]:
    told, kept = (key.decode() for key in zmq.curve_keypair())
    both = f'curve\n    public-key = "{told}"\n    secret-key = "{kept}"\n'
    _new(secret, SECRET, both)
    _new(public, PUBLIC, f'curve\n    public-key = "{told}"\n')
    return [secret, public]


def _new(path: Path, mode: int, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
