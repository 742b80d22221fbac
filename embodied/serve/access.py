"""The access token of a policy server: a random word in a file that only its owner can read."""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from pathlib import Path
from urllib.parse import urlsplit

from embodied.core.build import ConfigError

VARIABLE = "EMBODIED_TOKEN"
LEAST = 16  # characters


def token_file(port: int) -> Path:
    """The default file of the server on this machine's port `port`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "embodied" / "serve" / f"{port}.token"


def make_token(path: Path) -> str:
    """The token in `path`, which is made (mode 0600) where there is none; ConfigError."""
    if path.exists():
        return read_token(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as sink:
        sink.write(f"{token}\n")
    return token


def read_token(path: Path) -> str:
    """The token in `path`; ConfigError if it is missing, too short, or others can read it."""
    try:
        mode, token = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token {path} cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"other users can read the token: chmod 600 {path}")
    if len(token) < LEAST or not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{path} holds no token ({LEAST} printable characters or more)")
    return token


def find_token(url: str, file: str | None) -> str | None:
    """The token to send to the server at `url`: that of `file`, else of the variable
    EMBODIED_TOKEN, else, for a server on this machine, that of its default file; None if there is
    none."""
    if file is not None:
        return read_token(Path(file).expanduser())
    if os.environ.get(VARIABLE):
        return os.environ[VARIABLE]
    host, port = address(url)
    local = token_file(port)
    return read_token(local) if is_loopback(host) and local.exists() else None


def address(url: str) -> tuple[str, int]:
    """Host and port of ws://HOST:PORT or wss://HOST:PORT; ConfigError for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("ws", "wss") or not parts.hostname or parts.username is not None:
        raise ConfigError(f"{url!r:.100} is no address of a policy server: ws://HOST:PORT")
    return parts.hostname, port or {"ws": 80, "wss": 443}[parts.scheme]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
