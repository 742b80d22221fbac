"""Decider: the process that runs a policy; it may stall or die, and the arm does not mind.

Every `every` steps it looks at the newest state, lets the policy decide, and posts the chunk with
the time of what it saw. When that arrives is the control process's business.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from real_robot.arm import Floats
from real_robot.mailbox import Mailbox
from real_robot.messages import MOST_ACTION, MOST_STEPS, Mode
from real_robot.observe import Observer

Target = Callable[[Floats], Floats]


class Decider:
    """`turn` is one decision. The same `Actor` as in simulation keeps what the policy remembers;
    it begins an episode whenever the arm has just been armed."""

    def __init__(
        self, policy: Policy, observer: Observer, state: Mailbox, chunk: Mailbox, target: Target
    ) -> None:
        spec = policy.spec
        if policy.chunk > MOST_STEPS or spec.act.size > MOST_ACTION:
            raise ConfigError(
                f"a chunk of {policy.chunk} x {spec.act.size} is larger than a message "
                f"({MOST_STEPS} x {MOST_ACTION})"
            )
        if spec.act.dtype != "float32":
            raise ConfigError("a robot needs continuous actions")
        self.policy, self.observer, self.target = policy, observer, target
        self.state, self.chunk, self.dt = state, chunk, spec.dt
        self.actor = Actor(policy, 1, execute=1)
        self.mode, self.first, self.number = Mode.DISCONNECTED, True, 0
        self.seen: Tensors = {}

    @torch.inference_mode()
    def turn(self) -> bool:
        """Decide from the newest state; False where there is none that is new."""
        if not self.state.receive():
            return False
        fields = self.state.fields[0]
        mode = Mode(int(fields["mode"]))
        self.first = self.first or (mode == Mode.ARMED and self.mode != Mode.ARMED)
        self.mode = mode
        sent = np.array(fields["sent"])
        leaves = self.observer(
            fields["q"], fields["dq"], self.target(sent), float(fields["width"]), fields["sensed"]
        )
        self.seen = {name: torch.tensor(value)[None] for name, value in leaves.items()}
        self.actor(self.seen, torch.tensor([self.first]))
        self.first = False
        self._post(self.actor.plan[0].reshape(self.policy.chunk, -1).numpy(), fields)
        return True

    def _post(self, plan: Floats, fields: np.void) -> None:
        message = self.chunk.fields[0]
        self.number += 1
        steps, size = plan.shape
        message["number"], message["seen"] = self.number, fields["measured"]
        message["start"], message["steps"], message["size"] = fields["measured"], steps, size
        message["actions"][:steps, :size] = plan
        self.chunk.send()
