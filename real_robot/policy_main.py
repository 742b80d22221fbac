"""The policy process: `python -m real_robot.policy_main FOLDER`, started by the daemon.

It has no hold on the arm: it may stall, die and be started again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from embodied.core.build import ConfigError
from embodied.core.checkpoint import CheckpointError, load_policy
from real_robot.control_main import when_left_alone
from real_robot.decide import Decider
from real_robot.deployment import Deployment
from real_robot.mailbox import MailboxError
from real_robot.observe import Observer
from real_robot.rate import Rate


def main(folder: Path) -> None:
    """Decide once a step of the policy, until the daemon is gone. CheckpointError, ConfigError,
    MailboxError."""
    when_left_alone(lambda reason: os._exit(0))  # also out of a policy that never comes back
    torch.set_num_threads(1)
    deployment = Deployment.read(folder)
    policy = load_policy(deployment.policy)
    spec, joints = policy.spec, deployment.joints
    if abs(spec.dt - deployment.step) > 1e-9:
        raise ConfigError(
            f"the policy decides every {spec.dt} s; the deployment's step is {deployment.step}"
        )
    observer = Observer(spec, joints, deployment.forward(), deployment.given, deployment.sensed)
    boxes = deployment.boxes(folder)
    decider = Decider(policy, observer, boxes.state, boxes.chunk, deployment.target())
    rate = Rate(1 / spec.dt)
    while True:
        rate.wait()
        decider.turn()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (CheckpointError, MailboxError, ConfigError) as error:
        sys.exit(f"policy: {error}")
