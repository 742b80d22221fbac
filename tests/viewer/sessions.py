"""Environments, policies, runs, sessions and connections for tests."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import msgspec
import mujoco
import torch
import yaml
import zstandard
from viser._messages import Message, ViewerCameraMessage
from websockets.sync.client import connect
from websockets.sync.connection import Connection
from websockets.typing import Subprotocol

from embodied.core import checkpoint
from embodied.core.build import Node, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner, RunPlan
from embodied.viewer.panels.page import Viewer
from embodied.viewer.session.session import Session, choices_for
from tests.builders import node_of

LIFT = node_of("envs.fr3.env.Fr3", task="lift", num_envs=1, threads=1)
REACH = LIFT | {"task": "reach", "horizon": 6}
FLOW = node_of("policies.generative.flow.Flow", chunk=4, steps=2, width=16, depth=1)
SEVERAL = LIFT | {"num_envs": 16}  # as in training; the viewer has one
HOPPER = node_of("envs.gym.Gym", id="Hopper-v5", num_envs=1)
VISER = Subprotocol(f"viser-v{importlib.metadata.version('viser')}")
CAMERA = ViewerCameraMessage(
    wxyz=(1.0, 0.0, 0.0, 0.0), position=(1.0, 0.0, 0.0), fov=1.0, near=0.01, far=100.0,
    image_height=600, image_width=800, look_at=(0.0, 0.0, 0.0), up_direction=(0.0, 0.0, 1.0),
)  # fmt: skip


def alone(env: VecEnv | Node) -> Session:
    """A world without a run."""
    env = env if isinstance(env, VecEnv) else build(env, VecEnv)
    return Session(env, *choices_for(env, None))


def page_of(env: VecEnv | Node, **settings: Any) -> Viewer:
    """The page of a world without a run."""
    return Viewer(alone(env), port=0, **settings)


def play(session: Session, seed: int) -> Session:
    """The whole episode of `seed`, at its end."""
    session.reset(seed)
    while not session.over:
        session.advance()
    session.seek(session.length - 1)
    return session


def advance(session: Session, steps: int) -> None:
    for _ in range(steps):
        session.advance()


def go(viewer: Viewer, steps: int = 1) -> None:
    """Take steps, and show where they led."""
    viewer.step(steps)
    viewer.refresh()


def body(session: Session, name: str) -> int:
    """The number of a body of the scene."""
    scene = session.recorder.scene
    assert scene is not None
    return [each.partition("_")[2] for each in scene.bodies()].index(name)


def physics(env: Any, state: Tensors) -> mujoco.MjData:
    """Row 0 of a saved state as MuJoCo has it."""
    data = mujoco.MjData(env.model)
    spec = mujoco.mjtState.mjSTATE_INTEGRATION.value
    mujoco.mj_setState(env.model, data, state["physics"][0].numpy(), spec)
    mujoco.mj_forward(env.model, data)
    return data


def parts_of(env: VecEnv, policy: Node, learner: Node) -> tuple[Policy, Learner]:
    """A policy and what learns it, both untrained."""
    made = build(policy, Policy, spec=env.spec)
    return made, build(learner, Learner, policy=made, spec=env.spec, run=RunPlan(1, execute=2))


def run_with(folder: Path, env: Node, policy: Node, **settings: Any) -> Path:
    """A run with one checkpoint, of step 10; it has a learner if `settings` have one."""
    world = build(env | {"num_envs": 1}, VecEnv)
    torch.manual_seed(1)
    state = None
    if "learner" in settings:
        made, learner = parts_of(world, policy, settings["learner"])
        state = learner.get_state()
    else:
        made = build(policy, Policy, spec=world.spec)
    loop = {"loop": {"reward": None}}
    checkpoint.save(folder / "checkpoints" / "00000010", made, 10, state, loop)
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": env, "execute": 2, **settings}))
    world.close()
    return folder


def line_to(url: str, **settings: Any) -> Connection:
    """A connection to a page as a browser makes it."""
    address = url.replace("http", "ws")
    return connect(address, subprotocols=[VISER], max_size=None, open_timeout=60, **settings)


def send(line: Connection, *messages: Message) -> None:
    for message in messages:
        line.send(msgspec.msgpack.encode(message.as_serializable_dict()))


def received(line: Connection) -> list[dict[str, Any]]:
    """The next messages from the page."""
    data = line.recv(timeout=60)
    assert isinstance(data, bytes)
    packed = int.from_bytes(data[8:16], "little")
    return msgspec.msgpack.decode(zstandard.decompress(data[16 : 16 + packed]))["messages"]
