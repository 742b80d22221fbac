"""The protocol of openpi's policy servers, and what this project adds to it.

openpi: the server sends one map (metadata) when a client connects; then each request is one map of
observations and each answer one map with `actions` [H, A] and `server_timing`, or one line of text:
an error. A client with a key sends the header `Authorization: Api-Key KEY`.

A server that has the additions says so in its metadata, under the key `embodied` (see `Offer`).
Where they are offered, a request may have, beside the observations,

    noise     [*noise.shape], or [B, *noise.shape]: the noise of the decision
    embodied  {"batch": B: all arrays have a leading dimension B, and so have the answer's,
               "verb": "act" or "features": the frozen encoder's features [size] of the observation,
               "carry": {name: array}: what the policy carries between decisions}

and an answer then also has `carry`, or `features` in place of `actions`. Between two such requests
a server keeps nothing, so one can be sent again after a server was lost. For a client that sends no
`embodied`, a server keeps what the policy carries, from one request of its connection to the next,
each of which is a control step; `reset` (true) begins a new episode.

Messages are MessagePack with numpy arrays as openpi packs them: an array is a map
{b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [...]}, a numpy scalar
{b"__npgeneric__": True, b"data": value, b"dtype": ...}. Reading cannot run code and is bounded:
dtypes are numbers and booleans only, the data has exactly the size that dtype and shape say, and
one message has at most MAX_ITEMS values and MAX_DEPTH levels. General packages bound the bytes of a
message but not its values, and a megabyte of empty maps becomes 64 MB of objects.

The access token of a server is a random word in a file that only its owner can read.
"""

from __future__ import annotations

import ipaddress
import math
import os
import secrets
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.core.files import cache_folder

VERSION = 1
PORT = 8000  # where openpi's servers listen by default, and ours
MAX_MESSAGE = 64 * 2**20  # bytes
MAX_NOISE = 2**22  # numbers of the noise of a decision
OURS, NOISE, RESET = "embodied", "noise", "reset"  # keys of a request that are no observations
ACT, FEATURES = "act", "features"
HEADER, SCHEME = "Authorization", "Api-Key"

Array = NDArray[Any]
Message = Mapping[str, Any]


class RequestError(ValueError):
    """A request that a server cannot answer; one line that says what was wrong with it."""


@dataclass(frozen=True)
class Offer:
    """What a server's metadata say beyond openpi's protocol; all None, 0 or empty: nothing.

    `batch`: several observations in one request; `chunk`: actions in an answer; `noise`: the shape
    of a decision's noise, without the batch (None: it cannot be chosen); `normal`: the policy was
    trained with normal noise (else it acts without any); `noise_steps`: if > 0, the noise is one
    vector for each of that many time steps; `features`: their number (0: none);
    `carry`: of the start of an episode, by name, without the batch; `spec`: JSON of the policy's
    `Spec`; `policy`, `normalizer`: SHA-256 of its weights and of its normalisers; `software`: name
    and version.
    """

    batch: bool = False
    chunk: int | None = None
    noise: tuple[int, ...] | None = None
    normal: bool = True
    noise_steps: int = 0
    features: int = 0
    carry: Mapping[str, Array] = field(default_factory=dict[str, Array])
    spec: Mapping[str, Any] | None = None
    policy: str | None = None
    normalizer: str | None = None
    software: str = ""

    def to_metadata(self) -> dict[str, Any]:
        """The map that a server sends; other keys may be added to it."""
        shape, steps = self.noise, self.noise_steps
        noise = (
            None if shape is None else {"shape": [*shape], "normal": self.normal, "steps": steps}
        )
        rest = ("batch", "chunk", "features", "carry", "spec", "policy", "normalizer", "software")
        values = {name: getattr(self, name) for name in rest}
        return {OURS: {"version": VERSION, "noise": noise, **values}}

    @classmethod
    def from_metadata(cls, metadata: Message) -> Offer:
        """What `metadata` offer; nothing if they lack our key. RequestError if they are damaged."""
        if OURS not in metadata:
            return cls()
        said = metadata[OURS]
        version = cast(Message, said).get("version") if isinstance(said, Mapping) else None
        if not isinstance(version, int) or version != VERSION:
            raise RequestError(
                "the server speaks another version of the protocol; install the same version of "
                "embodied-rl on both machines"
            )
        try:
            return cls._parsed(cast(Message, said))
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            line = " ".join(str(error).split())[:200]
            raise RequestError(f"the server's metadata are damaged ({line})") from error

    @classmethod
    def _parsed(cls, said: Message) -> Offer:
        noise = said.get("noise")
        if noise is not None and math.prod(map(_size, noise["shape"])) > MAX_NOISE:
            raise ValueError(f"noise of more than {MAX_NOISE:,} numbers")
        return cls(
            batch=bool(said.get("batch", False)),
            chunk=None if said.get("chunk") is None else _size(said["chunk"]),
            noise=None if noise is None else tuple(_size(n) for n in noise["shape"]),
            normal=True if noise is None else bool(noise.get("normal", True)),
            noise_steps=0 if noise is None else _size(noise.get("steps", 0)),
            features=_size(said.get("features", 0)),
            carry={str(k): np.asarray(v) for k, v in dict(said.get("carry") or {}).items()},
            spec=None if said.get("spec") is None else dict(said["spec"]),
            policy=None if said.get("policy") is None else str(said["policy"]),
            normalizer=None if said.get("normalizer") is None else str(said["normalizer"]),
            software=str(said.get("software", ""))[:80],
        )


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{value!s:.20} is no size")
    return value


MAX_ITEMS = 100_000
MAX_DEPTH = 16
MAX_TEXT = 2**16  # bytes of one text: a name, or a task
KINDS = "biuf"  # numpy kinds: bool, signed and unsigned integer, float
ARRAY, SCALAR = b"__ndarray__", b"__npgeneric__"
DATA, DTYPE, SHAPE = b"data", b"dtype", b"shape"


class CodecError(ValueError):
    """Bytes that are no message, or a value that cannot be one; the message is one line."""


def encode(value: Any) -> bytes:
    """MessagePack of maps, lists, text, bytes, numbers, booleans, None and numpy arrays of numbers.
    CodecError for anything else."""
    parts: list[bytes | memoryview] = []
    _write(value, parts, 0)
    return b"".join(parts)


def decode(message: bytes) -> Any:
    """The value of one message. Arrays are read-only views of its bytes; CodecError."""
    reader = _Reader(message)
    try:
        value = reader.value(0)
    except (struct.error, IndexError) as error:
        raise CodecError("the message ends too early") from error
    except UnicodeDecodeError as error:
        raise CodecError("the message has text that is not UTF-8") from error
    if reader.at != len(message):
        raise CodecError(f"{len(message) - reader.at} bytes follow the message")
    return value


def _write(value: Any, parts: list[bytes | memoryview], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise CodecError(f"the value has more than {MAX_DEPTH} levels")
    if isinstance(value, np.ndarray | np.generic):  # np.float64 is a float, too
        _write(_packed(cast(Any, value)), parts, depth)
    elif value is None or isinstance(value, bool):
        parts.append({None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value])
    elif isinstance(value, int):
        parts.append(_integer(value))
    elif isinstance(value, float):
        parts.append(struct.pack(">Bd", 0xCB, value))
    elif isinstance(value, str):
        text = value.encode()
        parts += [_header(len(text), 0xA0, 32, (0xD9, 0xDA, 0xDB)), text]
    elif isinstance(value, bytes | bytearray | memoryview):
        data = memoryview(value).cast("B")
        parts += [_header(data.nbytes, 0, 0, (0xC4, 0xC5, 0xC6)), data]
    else:
        _write_container(value, parts, depth)


def _write_container(value: Any, parts: list[bytes | memoryview], depth: int) -> None:
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value)
        parts.append(_header(len(items), 0x80, 16, (None, 0xDE, 0xDF)))
        for key, item in items.items():
            if not isinstance(key, str | bytes):
                raise CodecError(f"a key of a message is text, not {type(key).__name__}")
            _write(key, parts, depth + 1)
            _write(item, parts, depth + 1)
    elif isinstance(value, Sequence):
        parts.append(_header(len(cast(Any, value)), 0x90, 16, (None, 0xDC, 0xDD)))
        for item in cast(Sequence[Any], value):
            _write(item, parts, depth + 1)
    else:
        raise CodecError(f"a {type(value).__name__} cannot be sent")


def _packed(value: np.ndarray[Any, Any] | np.generic) -> dict[bytes, Any]:
    if value.dtype.kind not in KINDS:
        raise CodecError(f"an array of {value.dtype} cannot be sent (numbers and booleans can)")
    if isinstance(value, np.generic):
        return {SCALAR: True, DATA: value.item(), DTYPE: value.dtype.str}
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return {ARRAY: True, DATA: data, DTYPE: value.dtype.str, SHAPE: list(value.shape)}


def _integer(value: int) -> bytes:
    if 0 <= value < 128 or -32 <= value < 0:
        return struct.pack(">b", value)
    try:
        return struct.pack(">BQ", 0xCF, value) if value > 0 else struct.pack(">Bq", 0xD3, value)
    except struct.error as error:
        raise CodecError("an integer has more than 64 bits") from error


def _header(size: int, short: int, below: int, long: tuple[int | None, int, int]) -> bytes:
    """The head of text, bytes, a list or a map with `size` parts."""
    if size < below:
        return bytes([short | size])
    if size < 2**8 and long[0] is not None:
        return bytes([long[0], size])
    if size < 2**16:
        return struct.pack(">BH", long[1], size)
    if size < 2**32:
        return struct.pack(">BI", long[2], size)
    raise CodecError("a value of more than 4 GiB cannot be sent")


class _Reader:
    def __init__(self, message: bytes) -> None:
        self.message, self.view = message, memoryview(message)
        self.at, self.items = 0, 0

    def value(self, depth: int) -> Any:
        self.items += 1
        if self.items > MAX_ITEMS or depth > MAX_DEPTH:
            raise CodecError(f"a message has at most {MAX_ITEMS} values and {MAX_DEPTH} levels")
        tag = self.message[self.at]
        self.at += 1
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag < 0x90:
            return self._map(tag & 0x0F, depth)
        if tag < 0xA0:
            return self._list(tag & 0x0F, depth)
        if tag < 0xC0:
            return self._text(tag & 0x1F)
        if tag in CONSTANTS:
            return CONSTANTS[tag]
        if tag in NUMBERS:
            return self._number(NUMBERS[tag])
        if tag not in SIZED:
            raise CodecError(f"the message has a value of an unknown type ({tag:#x})")
        kind, width = SIZED[tag]
        return kind(self, self._number(width), depth)

    def _number(self, layout: struct.Struct) -> Any:
        (number,) = layout.unpack_from(self.message, self.at)
        self.at += layout.size
        return number

    def _bytes(self, size: int, depth: int = 0) -> memoryview:
        if size > len(self.message) - self.at:
            raise CodecError("the message ends too early")
        self.at += size
        return self.view[self.at - size : self.at]

    def _text(self, size: int, depth: int = 0) -> str:
        if size > MAX_TEXT:
            raise CodecError(f"a text of the message has {size} bytes, and may have {MAX_TEXT}")
        return str(self._bytes(size), "utf-8")

    def _list(self, size: int, depth: int) -> list[Any]:
        self._require_rest(size)
        return [self.value(depth + 1) for _ in range(size)]

    def _map(self, size: int, depth: int) -> Any:
        self._require_rest(size)
        found: dict[str | bytes, Any] = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if isinstance(key, memoryview):
                key = bytes(key)
            if not isinstance(key, str | bytes):
                raise CodecError("a key of the message is no text")
            found[key] = self.value(depth + 1)
        if ARRAY in found:
            return _array(found)
        return _scalar(found) if SCALAR in found else found

    def _require_rest(self, size: int) -> None:
        """Refuse a container of more values than there are bytes, before it is made."""
        if size > len(self.message) - self.at:
            raise CodecError("the message ends too early")


CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
NUMBERS = {
    tag: struct.Struct(f">{letter}")
    for tag, letter in zip(
        (0xCA, 0xCB, *range(0xCC, 0xD4)), ("f", "d", *"BHIQ", *"bhiq"), strict=True
    )
}
_SIZES = [struct.Struct(f">{letter}") for letter in "BHI"]
_Kind = Callable[[_Reader, int, int], Any]
SIZED: dict[int, tuple[_Kind, struct.Struct]] = {
    **{0xC4 + i: (_Reader._bytes, _SIZES[i]) for i in range(3)},  # pyright: ignore[reportPrivateUsage]
    **{0xD9 + i: (_Reader._text, _SIZES[i]) for i in range(3)},  # pyright: ignore[reportPrivateUsage]
    **{0xDC + i: (_Reader._list, _SIZES[1 + i]) for i in range(2)},  # pyright: ignore[reportPrivateUsage]
    **{0xDE + i: (_Reader._map, _SIZES[1 + i]) for i in range(2)},  # pyright: ignore[reportPrivateUsage]
}


def _dtype(found: Mapping[Any, Any]) -> np.dtype[Any]:
    name = found.get(DTYPE)
    try:
        dtype = np.dtype(name) if isinstance(name, str) and len(name) <= 8 else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in KINDS or dtype.itemsize > 8 or dtype.subdtype:
        raise CodecError(f"an array of the message has a dtype that is not a number: {name!s:.40}")
    return dtype


def _array(found: Mapping[Any, Any]) -> np.ndarray[Any, Any]:
    dtype, data, shape = _dtype(found), found.get(DATA), found.get(SHAPE)
    if not isinstance(data, memoryview) or not isinstance(shape, list) or len(shape) > 32:
        raise CodecError("an array of the message has no data, or no shape")
    sizes = cast(list[Any], shape)
    if not all(type(size) is int and 0 <= size < 2**31 for size in sizes):
        raise CodecError("an array of the message has a shape that is no list of sizes")
    if math.prod(sizes) * dtype.itemsize != data.nbytes:
        raise CodecError(f"an array of the message says {dtype}{sizes} and has {data.nbytes} bytes")
    return np.frombuffer(data, dtype).reshape(sizes)


def _scalar(found: Mapping[Any, Any]) -> np.generic:
    value = found.get(DATA)
    if not isinstance(value, bool | int | float):
        raise CodecError("a scalar of the message is no number")
    dtype = _dtype(found)
    try:
        return dtype.type(value)
    except (OverflowError, ValueError) as error:
        raise CodecError("a scalar of the message does not fit its dtype") from error


VARIABLE = "EMBODIED_TOKEN"
LEAST = 16  # characters


def token_file(port: int) -> Path:
    """The default file of the server on this machine's port `port`."""
    return cache_folder() / "serve" / f"{port}.token"


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
    """The token for the server at `url`: of `file`, of the variable EMBODIED_TOKEN, or, on this
    machine, of the server's default file; None if there is none."""
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
