"""MessagePack with arrays: equal to another implementation, exact for arrays, bounded."""

from __future__ import annotations

import random
import struct
from typing import Any

import msgspec
import numpy as np
import pytest

from embodied.serve import codec
from embodied.serve.codec import CodecError, decode, encode

EDGES = (0, 1, 127, 128, 255, 2**16, 2**32, 2**63, 2**64 - 1, -1, -32, -33, -(2**15), -(2**63))


def anything(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 4 else 6)
    if kind < 6:
        number = draw.choice(EDGES)
        return (None, True, number, draw.gauss(0, 1), "x" * draw.choice((0, 31, 32, 300)), b"yz")[
            kind
        ]
    size = draw.choice((0, 1, 5, 16))
    parts = [anything(draw, depth + 1) for _ in range(size)]
    return parts if kind == 6 else {f"key{i}": part for i, part in enumerate(parts)}


@pytest.mark.parametrize("seed", range(50))
def test_another_implementation_reads_what_we_write_and_we_what_it_writes(seed: int) -> None:
    value = anything(random.Random(seed))
    assert msgspec.msgpack.decode(encode(value)) == value
    assert decode(msgspec.msgpack.encode(value)) == value


@pytest.mark.parametrize(
    "dtype", ["?", "u1", "<u2", "<i4", ">i4", "<i8", "<f2", "<f4", ">f4", "<f8"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_an_array_arrives_with_its_dtype_shape_and_bits(dtype: str, shape: tuple[int, ...]) -> None:
    sent = (np.random.default_rng(0).normal(size=shape) * 50).astype(dtype)
    got = decode(encode({"a": sent}))["a"]
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.tobytes() == sent.tobytes()


def test_an_array_that_is_not_contiguous_and_a_scalar_arrive() -> None:
    sent = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3]
    got = decode(encode([sent, np.float32(1.5), np.int64(-3)]))
    np.testing.assert_array_equal(got[0], sent)
    assert got[1] == np.float32(1.5) and got[1].dtype == np.float32
    assert got[2] == -3 and got[2].dtype == np.int64


def array(**changed: Any) -> bytes:
    """An array's map as openpi packs it, with some of it changed; for `msgspec`, keys are bytes."""
    given = {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2]} | changed
    return b"\x84" + b"".join(encode(key.encode()) + encode(v) for key, v in given.items())


def test_the_map_of_an_array_is_that_of_openpi() -> None:
    assert encode(np.zeros(2, np.float32)) == array()


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "O"},
        {"dtype": "|O8"},
        {"dtype": "V8"},
        {"dtype": "<U2"},
        {"dtype": "<M8[s]"},
        {"dtype": "f4,f4"},
        {"dtype": "(2,)f4"},
        {"dtype": "<c8"},
        {"dtype": "__import__('os')"},
        {"dtype": 3},
        {"dtype": ["f4"]},
        {"shape": [3]},
        {"shape": [-2]},
        {"shape": [2**40, 0]},
        {"shape": [True, 2]},
        {"shape": [1.0, 2]},
        {"shape": "2"},
        {"shape": [1] * 40},
        {"data": "12345678"},
        {"data": None},
        {"data": bytes(7)},
    ],
)
def test_an_array_that_is_none_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CodecError):
        decode(array(**changed))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",  # no type of MessagePack
        b"\xc7\x01\x05a",  # an extension
        b"\xd9\x05ab",  # text that ends too early
        b"\xc4\xff",
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million values in five bytes
        b"\xdf\xff\xff\xff\xff\x00",
        b"\xa2\xff\xfe",  # no UTF-8
        b"\x81\x01\x02",  # a key that is a number
        b"\x81\x90\x02",  # a key that is a list
        b"\xc0\xc0",  # two messages
        b"GET / HTTP/1.1\r\n\r\n",
        nested(codec.MAX_DEPTH + 2),
        nested(100_000),
        b"\xdd" + struct.pack(">I", codec.MAX_ITEMS) + b"\x80" * codec.MAX_ITEMS,
    ],
)
def test_bytes_that_are_no_message_are_refused(message: bytes) -> None:
    with pytest.raises(CodecError):
        decode(message)


def test_any_damage_is_refused_or_read_and_never_another_error() -> None:
    draw = random.Random(1)
    whole = encode({"a": np.arange(6, dtype=np.int16), "b": [1, "text", {"c": -1.5}], "d": None})
    for _ in range(5_000):
        damaged = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            decode(bytes(damaged[: draw.randrange(1, len(damaged) + 1)]))
        except CodecError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {3, 4}, 2**64, -(2**63) - 1, np.array([None]), np.array(["a"]), 1j]
)
def test_what_cannot_be_sent_is_refused(value: Any) -> None:
    with pytest.raises(CodecError):
        encode(value)
