"""What a served policy answers, and what it refuses in one line."""

from __future__ import annotations

import random
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.serve import codec
from embodied.serve.codec import CodecError, decode, encode
from embodied.serve.policy_service import PolicyService
from embodied.serve.protocol import Offer, RequestError
from tests.builders import node_of

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
    assert encode(np.zeros(2, np.float32)) == array(), "the map is openpi's"


def array(**changed: Any) -> bytes:
    """An array's map as openpi packs it, with some of it changed; for `msgspec`, keys are bytes."""
    given = {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2]} | changed
    return b"\x84" + b"".join(encode(key.encode()) + encode(v) for key, v in given.items())


@pytest.mark.parametrize(
    "changed",
    [
        *({"dtype": wrong} for wrong in ("O", "|O8", "V8", "<U2", "<M8[s]", "f4,f4", "(2,)f4")),
        *({"dtype": wrong} for wrong in ("<c8", "__import__('os')", 3, ["f4"])),
        *({"shape": wrong} for wrong in ([3], [-2], [2**40, 0], [True, 2], [1.0, 2], "2")),
        {"shape": [1] * 40},
        *({"data": wrong} for wrong in ("12345678", None, bytes(7))),
    ],
)
def test_an_array_that_is_none_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CodecError):
        decode(array(**changed))


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
        b"\x91" * (codec.MAX_DEPTH + 2) + b"\xc0",
        b"\x91" * 100_000 + b"\xc0",
        b"\xdd" + struct.pack(">I", codec.MAX_ITEMS) + b"\x80" * codec.MAX_ITEMS,
        b"\xdb" + struct.pack(">I", codec.MAX_TEXT + 1) + b"a" * (codec.MAX_TEXT + 1),
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


ACT = Leaf((2,), low=-1.0, high=1.0)
SPEC = Spec({"state": Leaf((3,)), "critic/mass": Leaf((1,))}, ACT, dt=0.1, text="go")
FLOW = node_of("policies.generative.flow.Flow", chunk=4, width=16)
INNER = node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[8])
GRU = node_of("policies.recurrent.Recurrent", inner=INNER)
GAUSSIAN = node_of("policies.gaussian.Gaussian", hidden=[8])


def service(node: dict[str, Any] = FLOW, spec: Spec = SPEC) -> PolicyService:
    torch.manual_seed(0)
    return PolicyService(build(node, Policy, spec=spec))


def state(*shape: int) -> np.ndarray[Any, Any]:
    return np.linspace(-1, 1, 3 * max(1, int(np.prod(shape)))).reshape(*shape, 3)


def test_metadata_say_what_is_served() -> None:
    offer = service().offer
    assert offer == Offer.from_metadata(service().metadata)
    assert (offer.chunk, offer.noise, offer.normal, offer.features) == (4, (8,), True, 3)
    assert offer.batch and offer.spec == SPEC.to_json() and offer.software.startswith("embodied-rl")
    other = service(FLOW | {"width": 8}).offer
    assert offer.policy != other.policy and offer.normalizer == other.normalizer
    assert Offer.from_metadata({"stock": 1}) == Offer()
    explores = service(GAUSSIAN).offer
    assert explores.noise == (2,) and not explores.normal, "noise for exploration only"


def test_the_hash_of_the_normalizer_follows_its_numbers() -> None:
    policy = build(FLOW, Policy, spec=SPEC)
    before = PolicyService(policy).offer
    obs = {"obs/state": torch.randn(50, 3), "action": torch.rand(50, 4, 2)}
    policy.fit({**obs, "valid": torch.ones(50, 4, dtype=torch.bool)})
    after = PolicyService(policy).offer
    assert before.normalizer != after.normalizer and before.policy != after.policy


def test_one_observation_and_a_batch_of_them() -> None:
    served, noise = service(), np.ones((5, 8))
    many = served.infer({"state": state(5), "noise": noise, "embodied": {"batch": 5}})
    assert many["actions"].shape == (5, 4, 2) and many["carry"] == {}
    one = served.infer({"state": state(5)[2], "noise": noise[2]})
    assert set(one) == {"actions"} and one["actions"].shape == (4, 2)
    np.testing.assert_allclose(one["actions"], many["actions"][2], atol=1e-6)


PAST = FLOW | {"obs_steps": 3}
CHUNKS = node_of("policies.wrappers.real_time_chunking.RealTimeChunking", base=FLOW, delay=1)


@pytest.mark.parametrize("node", [GRU, PAST])
def test_a_connection_remembers_what_a_client_does_not_send(node: dict[str, Any]) -> None:
    """The answers of an episode are those to a client that sends its carry; a new connection, or
    the key `reset`, begins an episode."""
    served, noise = service(node), np.full(8 if node is PAST else 2, 0.1)
    steps = [state() + 0.1 * i for i in range(5)]
    actor = Actor(served.policy, 1, execute=1)
    served.policy.sample_noise = lambda n, explore=False: torch.full((n, len(noise)), 0.1)  # pyright: ignore
    wanted: list[Any] = []
    for i, seen in enumerate(steps):
        actor({"state": torch.tensor(seen).float()[None]}, torch.tensor([i == 0]))
        wanted.append(actor.plan[0].numpy())
    memory: dict[str, Any] = {}
    for again in range(2):
        for i, seen in enumerate(steps):
            begins = {"reset": True} if again and i == 0 else {}
            answer = served.infer({"state": seen, "noise": noise, **begins}, memory)
            np.testing.assert_allclose(answer["actions"], wanted[i], atol=1e-6)
    other = served.infer({"state": steps[4], "noise": noise}, {})["actions"]
    assert np.abs(other - wanted[4]).max() > 1e-4, "the past matters"
    with pytest.raises(RequestError, match="reset is true or false"):
        served.infer({"state": state(), "reset": 1}, memory)


def test_a_client_that_says_not_what_it_executed_gets_no_joined_chunks() -> None:
    with pytest.raises(RequestError, match="how many actions were executed: use policy=remote"):
        service(CHUNKS).infer({"state": state()}, {})


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        ({}, "state is missing"),
        ({"state": state(), "stat": 1}, 'no observation stat .did you mean "state"'),
        ({"state": state(2)}, r"state is float64\[2, 3\], and should have the shape \[3\]"),
        ({"state": "abc"}, "state is"),
        ({"state": [[1], [2, 3]]}, "state is no array"),
        ({"state": np.array([1, np.inf, 2])}, "not finite"),
        ({"state": np.array([1j, 0, 0])}, "state is complex"),
        ({"state": state(), "noise": np.ones(7)}, r"noise is float64\[7\]"),
        ({"state": state(), "noise": np.full(8, np.nan)}, "not finite"),
        ({"state": state().astype(int)}, "int64, and should be float32"),
        ({"state": state(), "embodied": {"batch": 0}}, "batch=0"),
        ({"state": state(), "embodied": {"batch": 2.5}}, "batch=2.5"),
        ({"state": state(), "embodied": {"batch": 10**6}}, "batch=1000000"),
        ({"state": state(), "embodied": {"verb": "train"}}, "no 'train'|no train"),
        ({"state": state(), "embodied": {"bach": 2}}, "batch, verb, carry"),
        ({"state": state(), "embodied": 3}, "is a map"),
        ({"state": state(), "embodied": {"carry": {"h": 1}}}, "carry is a map of nothing"),
        ({"state": state(), "prompt": "jump"}, "never saw the prompt 'jump', it knows 'go'"),
    ],
)
def test_what_cannot_be_answered_is_one_line(request_: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError, match=line) as caught:
        service().infer(request_)
    assert "\n" not in str(caught.value)


def test_pictures_are_not_rounded_silently() -> None:
    spec = Spec({"front": Leaf((8, 8, 3), "uint8")}, ACT, dt=0.1)
    gaussian, noise = service(GAUSSIAN, spec), np.zeros(2)
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3))
    wanted = gaussian.infer({"front": picture.astype(np.uint8), "noise": noise})["actions"]
    assert np.array_equal(gaussian.infer({"front": picture, "noise": noise})["actions"], wanted)
    floats = (picture / 255, picture.astype(float), picture * np.nan)
    for wrong in (*floats, picture + 300, picture - 300):
        with pytest.raises(RequestError, match="should be uint8"):
            gaussian.infer({"front": wrong})
    for other in (picture.transpose(2, 0, 1), picture[::2, ::2], picture[None]):
        with pytest.raises(RequestError, match=r"should have the shape \[8, 8, 3\]"):
            gaussian.infer({"front": other})


def test_names_that_the_protocol_needs_are_refused() -> None:
    with pytest.raises(ConfigError, match="an observation called noise cannot be served"):
        service(GAUSSIAN, Spec({"noise": Leaf((2,))}, ACT, dt=0.1))
