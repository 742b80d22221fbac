"""Taking over: a person with a device moves the arm while a policy runs, and gives it back.

A thread of the operator's terminal reads the device and writes what it says into the mailbox
`takeover` of the daemon's folder. The control process follows it in place of the policy, through
the same controller and safety chain, while the person has the arm. A terminal that dies or hangs
then leaves an arm that is held and latched, as a policy does (`fresh`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from embodied.core.build import Node, build
from embodied.core.spec import Leaf, Spec
from embodied.embodiments.controller import Controller
from embodied.real_robot.assemble import build_chain, forward_kinematics
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import PERSON, TAKEOVER
from embodied.real_robot.kernel.messages import MOST_ACTION, Mode, state_record
from embodied.real_robot.teleop.hold_to_run import DaemonMailbox, OperatorThread
from embodied.real_robot.teleop.teleop import GRIPPER, Device, Teleoperator

TOOL = ("tool_x", "tool_y", "tool_z")
LOOKS = 2  # in a step of the policy


class Takeover(OperatorThread):
    """`node`: of a Teleoperator. `always`: the person has the arm all the time. While the policy
    has it, the hand's command is the policy's, so that taking over neither opens nor closes it."""

    def __init__(
        self,
        node: Node,
        deployment: Deployment,
        always: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self.deployment = deployment
        self.always = always
        names = tuple(build(deployment.controller, Controller).names)
        act = Leaf((len(names),), low=-1.0, high=1.0, names=names)
        self.spec = Spec({"state": Leaf((3,), names=TOOL)}, act, dt=deployment.step)
        self.forward = forward_kinematics(deployment)
        stages = len(build_chain(deployment).names)
        self.record = state_record(deployment.joints, stages, len(deployment.sensed))
        self.hand = names.index(GRIPPER) if GRIPPER in names else None
        self.number = 0
        self.due = 0.0
        super().__init__(clock)

    @property
    def device(self) -> Device:
        return self.person.device

    @property
    def hint(self) -> str:
        name, linger = type(self.device).__name__, self.person.config.linger
        if self.always:
            return f"{name}: it moves the arm from here on"
        return f"{name}: take over by moving it; the policy goes on {linger:g} s after you let go"

    def _work(self) -> Generator[None, Path]:
        self.person = build(self.node, Teleoperator, spec=self.spec)
        with closing(self.device):
            folder = yield
            out = DaemonMailbox(folder / TAKEOVER, PERSON, write=True)
            with closing(out), closing(DaemonMailbox(folder / "state", self.record)) as state:
                try:
                    while True:
                        yield
                        self._look(state, out)
                finally:  # the arm is given back
                    self._send(out, np.zeros(len(self.spec.act.names)), False, 0.0)

    def _look(self, states: DaemonMailbox, out: DaemonMailbox) -> None:
        self.due = max(self.due + self.deployment.step / LOOKS, self.clock())
        time.sleep(max(0.0, self.due - self.clock()))
        if (state := states.newest()) is None:
            return
        state.receive()
        fields = state.fields[0]
        if self.hand is not None:
            # The hand stays as it is until the person says otherwise
            running = int(fields["mode"]) == Mode.RUNNING and int(fields["size"]) > self.hand
            if running and not self.always and not fields["intervened"]:
                self.person.grip = float(np.clip(fields["action"][self.hand], -1.0, 1.0))
            elif not running and self.deployment.home_width is not None:
                open_ = float(fields["sent_width"]) > self.deployment.home_width / 2
                self.person.grip = 1.0 if open_ else -1.0
        tool = self.forward(np.asarray(fields["q"])[None])[0]
        seen = {"state": torch.as_tensor(tool, dtype=torch.float32)[None]}
        action, carry = self.person.act(seen, {}, torch.zeros(1, 0))
        over = self.always or bool(carry["row/intervened"])
        self._send(out, action[0, 0].numpy(), over, float(fields["measured"]))

    def _send(self, out: DaemonMailbox, action: np.ndarray, over: bool, seen: float) -> None:
        if (mailbox := out.newest()) is None:
            return
        self.number += 1
        message = mailbox.fields[0]
        message["number"] = self.number
        message["over"] = over
        message["seen"] = seen
        message["start"], message["size"] = self.clock(), min(len(action), MOST_ACTION)
        message["action"][: message["size"]] = action[:MOST_ACTION]
        mailbox.send()
