"""The process that lends a robot: `python -m embodied.deploy.external_main HANDLE`.

HANDLE is a stream socket. A message is its length (4 bytes, big-endian) and JSON; images follow an
observation as such messages of raw bytes (uint8, red first), in the order of `images`. Each request
is answered once, with `error` (one line) where it was not done:

    {"do": "begin", ...settings}    what goes in and out; nothing is opened
    {"do": "connect"}               the arm is held
    {"do": "observe"}               numbers, images
    {"do": "act", "action": {...}}  sent
    {"do": "rest"}                  the arm comes to rest

Measurements go out and actions come in, behind the daemon and its limits. The other program may
have another interpreter; it never speaks with a driver. When it falls silent the arm is brought to
rest and held; the next action moves it again. When it closes its end, this process ends too. After
a latched fault nothing moves until an operator's reset.

All names end in `.pos` or `.vel`: LeRobot's rollout command passes no others between a robot and a
policy. `tool_x.pos` is the policies' `tool_x`, `dx.vel` the controller's `dx`.
"""

from __future__ import annotations

import json
import math
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from embodied.compose import compose
from embodied.core.bounds import Bound
from embodied.core.build import ConfigError, build, nearest, parse
from embodied.core.errors import RobotError
from embodied.core.spec import Leaf, Spec
from embodied.deploy.site import as_trained, emulated, opening_of, outside_of, robot_of
from embodied.embodiments.controller import Controller
from embodied.real_robot.assemble import tool_target
from embodied.real_robot.cameras.shared_frames import FrameReader
from embodied.real_robot.cameras.sources import FIRST_IMAGE, Frame, fitted
from embodied.real_robot.daemon.server import default_folder
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import Driver, in_degrees
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.policy.decider import observe_state
from embodied.real_robot.policy.observer import names_of, observer
from embodied.real_robot.rl.rehearsal import require_rehearsed
from embodied.real_robot.rl.session import DeadmanTimer, RobotSession, RobotSessionError

TARGETS = "embodied.embodiments.joint_position.JointTargets"
Numbers = dict[str, float]


@dataclass(frozen=True)
class Config:
    """Settings of an arm that another program moves. `numbers` are observations beyond the joints,
    by the names that policies see (tool_x, goal_x, dq1, ...)."""

    words: tuple[str, ...]  # as for `embodied deploy`: robot=NAME and settings of it
    config_dir: tuple[str, ...] = ()  # more folders of configurations
    actions: Literal["joints", "controller"] = "joints"  # joint targets, or actions in [-1, 1]
    units: Literal["degrees", "radians"] = "degrees"  # degrees: the driver's own, if it has some
    numbers: tuple[str, ...] = ()  # observations beyond the joints
    fps: Annotated[float, Bound(1.0, 200.0)] = 30.0  # actions a second that come
    home: bool = True  # whether to go to the home pose on connecting
    patience: Annotated[float, Bound(0.0, 86400.0)] = 0.0  # s for an operator to reset a fault
    out: str = ""  # folder of the black box; empty: outputs/deploy/ROBOT-TIME


class External:
    """A robot that another program moves. `describe` opens nothing; `connect` starts the emulator,
    where there is one, and the daemon."""

    def __init__(self, config: Config) -> None:
        node = compose("deploy", list(config.words), list(config.config_dir)).node
        if node.get("teleop") is not None:
            raise ConfigError("teleop: another program moves this arm; it has devices of its own")
        robot = robot_of(node)
        self.config, self.robot, self.hold = config, as_trained(robot, None), node["hold"]
        self.folder = Path(node["folder"]) if node["folder"] else default_folder(robot["robot"])
        driver = build(self.robot["driver"], Driver)
        self.outside = outside_of(self.robot)
        if config.units == "radians":
            # Joints in rad at our zeros; the hand from 0 to 100.
            degrees = in_degrees(driver.joints, opening_of(self.robot))
            self.outside = replace(
                degrees, unit=(*(1.0,) * len(driver.joints), *degrees.unit[len(driver.joints) :])
            )
        self.robot["sensed"] = list(driver.sensed)
        if config.actions == "joints":
            joints, hand = self.outside.joints, self.outside.hand
            about = {"joints": joints, "hand": hand, "dt": 1 / config.fps}
            self.robot["controller"] = {"_target_": TARGETS, **about}
            self.robot["step"] = 1 / config.fps
        self.deployment = Deployment.parse({**self.robot, "policy": ""})
        self._spec()  # names that nobody measures are refused before anything opens
        self._open = ExitStack()
        self.session: RobotSession | None = None

    def describe(self) -> dict[str, Any]:
        """What goes in and out, by name; sizes (height, width) of images."""
        return {
            "robot": self.deployment.robot,
            "observations": [*self.outside.names, *(f"{name}.pos" for name in self.config.numbers)],
            "images": {name: [*size] for name, size in self.deployment.filmed.items()},
            "actions": self._action_keys(),
            "step": self.deployment.step,
        }

    def connect(self) -> None:
        """RobotSessionError, ConfigError, DriverError; then nothing is left over."""
        try:
            robot = self._open.enter_context(emulated(self.robot))[0]
            stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
            place = self.config.out or f"outputs/deploy/{self.deployment.robot}-{stamp}"
            output = Path(place).resolve()
            output.mkdir(parents=True, exist_ok=True)
            made = Deployment.parse({**robot, "policy": ""})
            self.deployment = replace(made, records=str(output / "blackbox"))
            require_rehearsed(self.deployment)
            self.session = RobotSession(self.deployment, self.folder, self.hold)
            self._open.callback(self.session.close)
            quiet = 0.4 * self.deployment.fresh.stop
            self.deadman = DeadmanTimer(quiet, self.session.rest, self.session.lock)
            self._open.callback(self.deadman.close)
            readers = {name: FrameReader(self.folder, name) for name in self.deployment.filmed}
            for each in readers.values():
                self._open.enter_context(each)
                each.next(0, FIRST_IMAGE)
            self.cameras = [*readers.items()]
            if self.config.home:
                self.session.home()
        except BaseException:
            self.close()
            raise
        self.observer = observer(self._spec(), self.deployment)
        self.tool = tool_target(self.deployment)
        self.seen = float(self.session.state["measured"])

    def observe(self) -> tuple[Numbers, dict[str, Frame]]:
        """The newest measurement and images. RobotSessionError (a latched fault), CameraError."""
        session = self._connected()
        with session.lock:
            session.update()
            self._require_unlatched()
            state = session.state
            self.seen = float(state["measured"])
            numbers = self._joint_numbers(state["q"], float(state["width"]))
            seen = observe_state(self.observer, state, self.tool)
            found = seen.get("state", np.zeros(0)).tolist()
            names = [f"{name}.pos" for name in self.config.numbers]
            numbers |= dict(zip(names, found, strict=True))
        age = self.deployment.picture
        sizes = self.deployment.filmed
        images = {name: fitted(each.newest(age).frame, *sizes[name]) for name, each in self.cameras}
        return numbers, images

    def act(self, action: Mapping[str, float]) -> Numbers:
        """Follow `action` for one step; the joint positions that are sent by now (with
        actions=controller: `action`). RobotSessionError after a latched fault."""
        session = self._connected()
        keys = self._action_keys()
        if missing := [key for key in keys if key not in action]:
            raise ConfigError(f"the action has no {missing[0]}{nearest(missing[0], action)}")
        values = np.array([float(action[key]) for key in keys])
        with session.lock:
            session.wait_until_held(self.config.patience)
            session.update()
            self._require_unlatched()
            if session.mode != Mode.RUNNING:
                session.rest()
                session.start()
                self.seen = float(session.state["measured"])
            if self.config.actions == "joints":
                values = self.outside.positions(values)
            session.send_action(values, self.seen)
            self.deadman.feed()
            sent = session.state["sent"], float(session.state["sent_width"])
        return self._joint_numbers(*sent) if self.config.actions == "joints" else dict(action)

    def rest(self) -> None:
        session = self._connected()
        with session.lock:
            self.deadman.pause()
            session.rest()

    def close(self) -> None:
        """The arm comes to rest and is held; all processes end. Safe to call twice."""
        self.session = None
        self._open.close()

    def _connected(self) -> RobotSession:
        if self.session is None:
            raise RobotSessionError("the robot is not connected")
        return self.session

    def _require_unlatched(self) -> None:
        """RobotSessionError where the arm latched a fault and nobody resets it in time."""
        session, deadline = self._connected(), time.monotonic() + self.config.patience
        while session.mode == Mode.ESTOP:
            if time.monotonic() > deadline:
                raise RobotSessionError(
                    f"the arm latched a fault: {session.fault}; look at it, then: "
                    f"embodied robot reset folder={self.folder}"
                )
            time.sleep(0.05)
            session.update()

    def _joint_numbers(self, q: Any, width: float) -> Numbers:
        values = self.outside.values(q, width).tolist()
        return dict(zip(self.outside.names, values, strict=True))

    def _action_keys(self) -> list[str]:
        if self.config.actions == "joints":
            return [*self.outside.names]
        names = build(self.deployment.controller, Controller).names
        position = ("gripper", "gripper.pos")  # others without an end are the speed of something
        return [
            name if name.endswith(".pos") else f"{name}.{'pos' if name in position else 'vel'}"
            for name in names
        ]

    def _spec(self) -> Spec:
        """Of the further numbers; ConfigError for one that nobody measures."""
        names, made = self.config.numbers, self.deployment
        known = names_of(made.joints, made.given, made.sensed)
        for name in names:
            if "_from_" not in name and name not in known:
                raise ConfigError(f"numbers: nobody measures {name}{nearest(name, known)}")
        obs = {"state": Leaf((len(names),), names=names)} if names else {}
        return Spec(obs=obs, act=Leaf((1,), low=-math.inf, high=math.inf), dt=made.step)


LENGTH = struct.Struct(">I")
MOST = 1 << 20  # bytes of a request
Reply = tuple[dict[str, Any], list[Frame]]


def answer(robot: External, verb: str, request: dict[str, Any]) -> Reply:
    if verb == "connect":
        robot.connect()
    elif verb == "observe":
        numbers, images = robot.observe()
        shapes = {name: image.shape for name, image in images.items()}
        return {"numbers": numbers, "images": shapes}, list(images.values())
    elif verb == "act":
        return {"sent": robot.act(request["action"])}, []
    elif verb == "rest":
        robot.rest()
    else:
        raise ConfigError(f"{verb!r} is not understood")
    return {}, []


def receive(wire: socket.socket) -> bytes:
    """One message. EOFError where the other end closed, or sends too much."""
    size = LENGTH.unpack(_exactly(wire, LENGTH.size))[0]
    if size > MOST:
        raise EOFError(f"a request of {size} bytes")
    return _exactly(wire, size)


def send(wire: socket.socket, message: bytes) -> None:
    wire.sendall(LENGTH.pack(len(message)) + message)


def _exactly(wire: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = wire.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def serve(wire: socket.socket) -> None:
    robot: External | None = None
    try:
        while True:
            request = json.loads(receive(wire))
            verb = request.pop("do", "")
            try:
                if verb == "begin":
                    robot = External(parse(Config, {"words": [], **request}, "robot"))
                    reply, images = robot.describe(), []
                elif robot is None:
                    raise ConfigError("begin first")
                else:
                    reply, images = answer(robot, verb, request)
            except (ConfigError, RobotError, DriverError) as error:
                reply, images = {"error": str(error)}, []
            send(wire, json.dumps(reply).encode())
            for image in images:
                send(wire, image.tobytes())
    except (EOFError, OSError):
        pass
    finally:
        if robot is not None:
            robot.close()


def main(handle: int) -> None:
    """Ctrl-C is for the other program, which closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=handle) as wire:
        serve(wire)


if __name__ == "__main__":
    main(int(sys.argv[1]))
