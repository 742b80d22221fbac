"""Records of other processes, machines and servers, each as the content of a file, and what reads
them here."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import yaml

from embodied.core.build import ConfigError
from embodied.datasets.mapping import Mapping
from embodied.embodiments.kinematics.arm import read_arms_file
from embodied.envs.toy import two_gap
from embodied.llm.chat import ChatError, Message, parse_json
from embodied.llm.client import CachedChat, CachedConfig, ChatClient, answer_from
from embodied.llm.client import Config as ChatConfig
from embodied.policies.remote.address import remote_node
from embodied.policies.remote.policy import Config as RemoteConfig
from embodied.policies.remote.policy import RemotePolicy
from embodied.real_robot.daemon import requests
from embodied.real_robot.drivers.replay import Config as ReplayConfig
from embodied.real_robot.drivers.replay import Replay
from embodied.real_robot.drivers.servos import calibration
from embodied.real_robot.drivers.servos.bus import MAKES
from embodied.real_robot.drivers.servos.calibration import Progress, driver_settings, load_lerobot
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.kernel.mailbox import Mailbox, MailboxError, memory_folder
from embodied.real_robot.kernel.messages import REQUEST, VERSION, Command, Mode, state_record
from embodied.real_robot.safety.geometry import read_model
from embodied.real_robot.watchdog.client import take_status
from embodied.sandbox.program import Rejected
from embodied.sandbox.program import read as read_program
from embodied.sandbox.worker import HEADER, pack, unpack
from embodied.serve.policy_service import PolicyService
from embodied.serve.protocol import CodecError, Offer, decode, encode
from embodied.serve.protocol import RequestError as ServedError
from tests.attacks.doors import DOORS, Door
from tests.attacks.files import Content
from tests.builders import ROOT, make_policy
from tests.real_robot.chunk_fuzz import without_physics
from tests.real_robot.deployment_fuzz import WHOLE, bases, outcome
from tests.real_robot.test_control import Bench, within
from tests.real_robot.test_replay import black_box

KEPT = ROOT / "embodied" / "embodiments"


class Refused(ConfigError):
    """One of the errors of a reader that is no door by itself: its caller makes a line of it."""


def reader(read: Callable[[Path], object], *errors: type[Exception]) -> Door:
    """A door of what raises `errors`, each with one line, where the file is wrong."""

    def door(path: Path, _: Path) -> None:
        try:
            read(path)
        except errors as error:
            raise Refused(str(error)) from error

    return door


def of_bytes(read: Callable[[bytes], object], *errors: type[Exception]) -> Door:
    return reader(lambda path: read(path.read_bytes()), *errors)


def copied(name: str, open: Callable[[Path], object]) -> Door:
    """A door of a file that is opened for writing: memory that is shared with another process, a
    cache."""

    def door(path: Path, out: Path) -> None:
        out.mkdir()
        (out / name).write_bytes(path.read_bytes())
        try:
            open(out / name)
        except MailboxError as error:
            raise Refused(str(error)) from error

    return door


def look_in_mailbox(path: Path) -> None:
    box = Mailbox(path, REQUEST, VERSION, create=False, write=True)
    with closing(box):
        box.receive()
        box.fields[0]["number"] += 1
        box.send()
        box.receive()


def look_in_ring(path: Path) -> None:
    box = BlackBox.left(path)
    with closing(box):
        box.records()
        box.since(0)


def whole_mailbox(path: Path) -> None:
    with closing(Mailbox(path, REQUEST, VERSION, create=True)) as box:
        box.send()


def whole_ring(path: Path) -> None:
    record = state_record(2, 1)
    with closing(BlackBox(path, record, 4, create=True)) as box:
        for _ in range(6):
            box.add(np.zeros(1, record))


def played(path: Path) -> None:
    driver = Replay(ReplayConfig(str(path), joints=("a", "b"), sensed=("x",)), lambda: 0.0)
    driver.connect()
    driver.read()
    driver.sense()
    driver.renew()


@cache
def bench() -> Bench:
    made = Bench(Path(tempfile.mkdtemp(dir=memory_folder())))
    without_physics(made.driver)
    made.run(2)
    return made


MESSAGES = {
    "chunk": {
        **{"number": 1, "seen": 0.0, "start": 0.0, "steps": 4, "size": 4, "noise_size": 0},
        **{"actions": 0.1, "noise": 0.0, "image_times": 0.0},
    },
    "takeover": {"number": 1, "over": 1, "seen": 0.0, "start": 0.0, "size": 4, "action": 0.1},
    "request": {"number": 1, "command": 1, "seconds": 0.0, "stop": 0},
    "heartbeat": {"count": 1, "time": 0.0},
}
"""One number for all elements of a field; times are counted from now."""
AGO = ("seen", "start", "time", "image_times")


def resting() -> Bench:
    """The bench after a reset; another one where the last try ended or released it."""
    for _ in range(50):
        here = bench()
        if here.ask(Command.RESET) == Mode.IDLE:
            return here
    bench.cache_clear()
    return bench()


def control(path: Path, _: Path) -> None:
    """Messages to a control process whose arm is moving."""
    try:
        told = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError):  # of this test's own format
        return
    here = resting()
    here.speak(np.array([0.0, 0, 0, 1]))
    here.ask(Command.ARM)
    here.ask(Command.START)
    for name, fields in told.items():
        box = getattr(here.there, name, None)
        if not isinstance(box, Mailbox) or not isinstance(fields, dict):
            continue
        for field in box.fields.dtype.names or ():
            late = here.now if field in AGO else 0
            with suppress(ValueError, TypeError, OverflowError):
                box.fields[field] = np.asarray(fields.get(field, 0)) + late
        box.send()
    here.run(2)
    assert not here.control.internal_error, here.fault
    assert "\n" not in here.fault
    within(here.sent)
    del here.sent[:-4]


def deployed(path: Path, out: Path) -> None:
    out.mkdir()
    if line := outcome(path.read_bytes(), out):
        raise Refused(line)


SPEC = two_gap.TwoGap(two_gap.Config(num_envs=1)).spec


@cache
def service() -> PolicyService:
    return PolicyService(make_policy("generative.flow.Flow", SPEC, width=8, steps=2))


def served(data: bytes) -> None:
    request = decode(data)
    if not isinstance(request, dict):
        raise CodecError("no map")  # as the server does
    memory: dict[str, Any] = {}
    encode(service().infer(request, memory))


class Wire:
    """A server that says this of its policy, and answers so."""

    def __init__(self, offer: Offer, answer: Any) -> None:
        self.offer, self.answer = offer, answer

    def ask(self, messages: list[Any]) -> list[Any]:
        return [self.answer] * len(messages)


def from_server(data: bytes) -> None:
    """What a policy server says of its policy when one connects, and its answers."""
    told = decode(data)
    metadata, answer = (told.get(key) if isinstance(told, dict) else 0 for key in SAYS)
    if not (isinstance(metadata, dict) and isinstance(answer, dict)):
        raise CodecError("no map")  # as the client does
    wire = Wire(Offer.from_metadata(metadata), answer)
    with patch("embodied.policies.remote.policy.Connection.to", lambda *_: wire):
        policy = RemotePolicy(RemoteConfig(url="ws://a:1"), SPEC)
        obs = {name: leaf.sample(1) for name, leaf in SPEC.obs.items()}
        policy.act(obs, policy.initial(1), policy.sample_noise(1))


SAYS = ("metadata", "answer")


def server_says() -> bytes:
    answer = service().infer({**zeros(), "embodied": {"batch": 1}})
    return encode({"metadata": dict(service().metadata), "answer": answer})


def zeros() -> dict[str, Any]:
    return {name: np.zeros((1, *leaf.shape), leaf.dtype) for name, leaf in SPEC.obs.items()}


def client_says() -> bytes:
    noise = np.zeros((1, *(service().offer.noise or ())), np.float32)
    extra = {"batch": 1, "verb": "act", "carry": {}}
    return encode({**zeros(), "noise": noise, "embodied": extra, "reset": True})


def written(make: Callable[[], bytes]) -> Callable[[Path], object]:
    """A file that is made when it is needed."""
    return lambda path: path.write_bytes(make())


def received(data: bytes) -> None:
    """The answer of a program in the sandbox."""
    text, body = HEADER.unpack(data[: HEADER.size])
    if text > 1 << 16 or body > 1 << 16:
        return
    rest = data[HEADER.size :]
    unpack(rest[:text], rest[text:])


SCHEMA = {"type": "object", "properties": {"score": {"type": "number"}}, "required": ["score"]}
ANSWER = {
    **{"model": "a", "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}},
    "choices": [
        {
            "message": {"content": 'so: {"score": 1}', "refusal": None},
            "finish_reason": "stop",
            "logprobs": {"content": [{"top_logprobs": [{"token": "a", "logprob": -0.5}]}]},
        }
    ],
}


def answered(data: bytes) -> None:
    chat = ChatClient(ChatConfig("http://127.0.0.1:1/v1", "a"))
    assert chat.http is not None
    object.__setattr__(chat.http.limits, "retries", 0)
    chat.http.client = httpx.Client(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, content=data))
    )
    said = [Message("user", "how good is it?")]
    try:
        chat.ask(said, SCHEMA)
    except ChatError:
        chat.ask(said, top_logprobs=2)


def remembered(path: Path) -> None:
    chat = CachedChat(CachedConfig(str(path)))
    for record in chat.cache.records.values() if chat.cache else ():
        answer_from(record)


CACHE = {
    **{"key": "k", "request": {"model": "a"}, "text": "t", "data": None, "error": None},
    **{"served": "a", "usage": {"total_tokens": 3}, "seconds": 0.5},
}
PROGRAM = """import torch
SCALE = 2.0
class Task:
    def helper(self, x: float = 1.0):
        return x
    def compute_reward(self, state, action) -> tuple:
        near = torch.exp(-SCALE * state.norm(dim=-1))
        return near + self.helper(), {"near": near}
"""
MOTORS = {
    name: {"id": id, "drive_mode": 0, "homing_offset": 5, "range_min": 100, "range_max": 4000}
    for id, name in enumerate(("pan", "lift", "gripper"), 1)
}
PROGRESS = {"motors": MOTORS, "zeros": {"pan": 2000}, "done": ["middle"]}
ROBOTS = {node["driver"]["_target_"].split(".")[-1]: node for node in bases()}


def calibrated(path: Path) -> None:
    motors = load_lerobot(path)
    calibration.motors_of(driver_settings(motors))


def noise(codec: Any) -> Callable[[bytes], None]:
    """A serial line's bytes."""

    def read(data: bytes) -> None:
        buffer = bytearray(data)
        while (packet := codec.take(buffer)) is not None:
            codec.reply(packet)

    return read


def board(data: bytes) -> None:
    buffer = bytearray(data)
    while take_status(buffer):
        pass


MAPPING = {
    "obs": {"state": {"name": "observation.state", "scale": [0.1, 0.2], "elements": ["x", "y"]}},
    "action": {"low": [-90, -90], "high": [90, 90], "elements": ["x", "y"]},
}
REMOTE = {
    "url": "ws://127.0.0.1:1",
    "spec": {"obs": {"state": {"shape": [7]}}, "act": {"shape": [7]}, "dt": 0.1},
}


def requested() -> bytes:
    return requests.Request(7, 1.0, requests.Verb.RESET, stop=3, session="a").line()


def of_text(read: Callable[[str], object], *errors: type[Exception]) -> Door:
    return of_bytes(lambda data: read(data.decode(errors="replace")), *errors)


def described(name: str, read: Callable[[str], object]) -> tuple[str, Content, Door]:
    content = (KEPT / name).read_bytes()
    return ".yaml", content, reader(lambda path: read(str(path)))


def packets(make: Any) -> bytes:
    return make.codec.answer(1, 0, bytes(10)) + make.codec.read(2, 3, 4)


TOLD = '<think>well {"score": 0}</think> Here:\n```json\n{"score": 1.5, "b": [1, {}]}\n```\n'
FRAME = pack({"names": ["a"], "one_by_one": False}, [np.zeros(3, np.float32)] * 2)
REPLY = requests.Reply(3, True, "", {"mode": "idle", "estop": 2, "now": 1.5}).line()
WIRE_ERRORS = (CodecError, ServedError)
SENSED = ["state", "action"]
SEEN = {"pan": 1, "lift": 2, "gripper": 3}
DEPLOYMENTS = {**ROBOTS, "whole": {**bases()[0], **WHOLE}}
RECORDS: dict[str, tuple[str, Content, Door]] = {
    "arm": (".yaml", (KEPT / "so101_arm.yaml").read_bytes(), DOORS["arm"]),
    "arms": described("two_so101_arms.yaml", read_arms_file),
    "capsules": described("so101_capsules.yaml", read_model.__wrapped__),
    "mapping": (".yaml", yaml.safe_dump(MAPPING), reader(Mapping.load)),
    "remote": (".yaml", yaml.safe_dump(REMOTE), reader(lambda path: remote_node(str(path)))),
    **{
        f"deployment-{name}": (".json", json.dumps(node), deployed)
        for name, node in DEPLOYMENTS.items()
    },
    "calibration": (".json", json.dumps(MOTORS), reader(calibrated)),
    "progress": (".json", json.dumps(PROGRESS), reader(lambda path: Progress.load(path, SEEN))),
    "replay": (".npz", black_box, reader(played)),
    "mailbox": (".box", whole_mailbox, copied("box", look_in_mailbox)),
    "ring": (".ring", whole_ring, copied("ring", look_in_ring)),
    "control": (".json", json.dumps(MESSAGES), control),
    "request": (".line.json", requested(), of_bytes(requests.parse, requests.RequestError)),
    "reply": (".line.json", REPLY, of_bytes(requests.parse_reply, requests.RequestError)),
    "client": (".msgpack", written(client_says), of_bytes(served, *WIRE_ERRORS)),
    "server": (".msgpack", written(server_says), of_bytes(from_server, *WIRE_ERRORS)),
    "sandbox": (".frame", FRAME, of_bytes(received, ValueError, struct.error)),
    "program": (".py", PROGRAM, of_text(lambda text: read_program(text, SENSED), Rejected)),
    "chat": (".txt", TOLD, of_text(lambda text: parse_json(text, SCHEMA))),
    "answer": (".json", json.dumps(ANSWER), of_bytes(answered)),
    "cache": (".jsonl", f"{json.dumps(CACHE)}\n", copied("cache.jsonl", remembered)),
    **{
        f"bus-{name}": (".bytes", packets(make), of_bytes(noise(make.codec)))
        for name, make in MAKES.items()
    },
    "watchdog": (".bytes", bytes(range(30)), of_bytes(board)),
}
