"""Policy process: `python -m embodied.real_robot.policy.main FOLDER [POLICY]`, started by the
daemon.

It does not control the arm: it may stall, die and be started again. It loads, runs a few decisions
without posting them, and locks itself (`lockdown`): what it posts is of a process that can write
nothing else. With POLICY it takes over from another policy process
(`embodied.real_robot.daemon.processes`): it writes a file when it is ready, and posts once the
daemon has stopped the other.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch

from embodied.core.build import ConfigError, allow
from embodied.core.checkpoint import CheckpointError, load_policy
from embodied.core.errors import RemoteError
from embodied.policies.abilities import without_reflex
from embodied.policies.remote.address import PACKAGE
from embodied.real_robot.assemble import open_channels, tool_target
from embodied.real_robot.cameras.policy_images import PolicyImages
from embodied.real_robot.cameras.sources import CameraError
from embodied.real_robot.control.main import DaemonWatch
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import READY, Role
from embodied.real_robot.kernel.mailbox import MailboxError
from embodied.real_robot.kernel.rate import Rate
from embodied.real_robot.policy.decider import Decider
from embodied.real_robot.policy.lockdown import lock
from embodied.real_robot.policy.observer import (
    observer,
    require_actions,
    require_rate,
    with_real_time_chunking,
)

WARM_UP_DECISIONS = 3
PAUSE = 0.05  # s between them, at most


def main(folder: Path, policy: str = "") -> None:
    """Decide once a step of the policy, until the daemon is gone. CheckpointError, ConfigError,
    MailboxError, CameraError, RemoteError."""
    turn = threading.Event()
    # Also out of a policy that never comes back.
    watch = DaemonWatch(lambda reason: os._exit(0), turn.set)
    torch.set_num_threads(1)
    deployment = Deployment.read(folder).allow_packages()
    if not policy and not deployment.policy:  # a guest decides (embodied.real_robot.rl.session)
        threading.Event().wait()
    if deployment.served and not policy:  # an operator typed the server's address
        allow(PACKAGE)
    acting = without_reflex(load_policy(policy if policy else deployment.policy))
    require_rate(acting.spec, deployment)
    require_actions(acting.spec, deployment)
    acting = with_real_time_chunking(acting, deployment)
    channels = open_channels(deployment, folder, Role.POLICY)
    observations = observer(acting.spec, deployment)
    with PolicyImages(acting.spec, deployment.cameras, deployment.picture, folder) as images:
        decider = Decider(
            acting, observations, channels.state, channels.chunk, tool_target(deployment), images
        )
        rate, decided = Rate(1 / min(acting.spec.dt, PAUSE)), 0
        while decided < WARM_UP_DECISIONS:
            rate.wait()
            decided += decider.warm_up(patient=not policy)
        if policy:
            (folder / READY).write_text(str(os.getpid()))
        # A server that an operator named, or a person's own code, may need connections.
        network = (deployment.served and not policy) or bool(deployment.allow)
        if missing := lock(network):
            print(f"policy: not locked: {missing}", flush=True)
        watch.renew()
        if policy:
            turn.wait()
        rate = Rate(1 / acting.spec.dt)
        while True:
            rate.wait()
            decider.turn()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:3])
    except (CheckpointError, MailboxError, ConfigError, CameraError, RemoteError) as error:
        sys.exit(f"policy: {error}")
