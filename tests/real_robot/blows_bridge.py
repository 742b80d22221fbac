"""Blows to the bridge from within and from beside it: a daemon that hangs, what a policy may say, a
file that is no policy, another deploy."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml

from embodied.real_robot.assemble import open_channels
from embodied.real_robot.daemon.client import call, emergency_stop
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.deployment import FILE
from tests.real_robot.blows import BRAKE, TURN
from tests.real_robot.chaos import Blow, Scene
from tests.real_robot.test_daemon import PATIENT
from tests.real_robot.test_decide import SPEC

HUNG = 12.0  # s
POLL = 0.1  # s between two beats of the daemon, at most
ANSWER = 0.2  # s that a stop without the daemon may take
BRAKES = "control: brakes within the limits"


def hang(scene: Scene) -> None:
    """The daemon is there and does nothing; then it goes on."""
    os.kill(scene.bridge.process.pid, signal.SIGSTOP)
    time.sleep(HUNG)
    os.kill(scene.bridge.process.pid, signal.SIGCONT)


def press_beside(scene: Scene) -> float:
    """Stop is pressed while the daemon hangs, as `embodied robot estop` does it."""
    os.kill(scene.bridge.process.pid, signal.SIGSTOP)
    time.sleep(0.1)
    began = time.monotonic()
    stopped = emergency_stop(scene.folder, patience=1.0)
    assert stopped.done and stopped.reply is None, stopped.line()
    os.kill(scene.bridge.process.pid, signal.SIGCONT)
    return began


def say(change: Callable[[np.void], None]) -> Callable[[Scene], float]:
    """The policy process posts one more record; `change` has made it wrong."""

    def strike(scene: Scene) -> float:
        scene.send("policy", signal.SIGSTOP)  # it is the record's only writer
        chunk = open_channels(scene.deployment, scene.folder).chunk
        assert chunk.receive()
        fields = chunk.fields[0]
        fields["number"] += 1
        fields["start"] = fields["seen"] = time.monotonic()
        change(fields)
        began = time.monotonic()
        chunk.send()
        return began

    return strike


def short(fields: np.void) -> None:
    fields["size"] = 3


def timeless(fields: np.void) -> None:
    fields["start"] = fields["seen"] = np.nan


def go_on(scene: Scene) -> None:
    scene.send("policy", signal.SIGCONT)


def attacked(scene: Scene) -> Path:
    """A checkpoint as the arm's own, but that its policy.yaml names our command line, which is to
    run a shell command."""
    evil, proof = scene.folder / "evil", scene.folder / "ran"
    shutil.copytree(scene.deployment.policy, evil)
    words = ["demos", "collect", "env=contact_maze", "demonstrator=random"]
    words += [
        "demonstrator._target_=subprocess.Popen",
        f"+demonstrator.args=[sh,-c,'id > {proof}']",
    ]
    words += ["allow=[subprocess]", f"out={scene.folder / 'evil_demos'}"]
    node = {"_target_": "embodied.cli.main", "argv": words}
    (evil / "policy.yaml").write_text(yaml.safe_dump(node))
    return evil


def load_attack(scene: Scene) -> None:
    reply = call(scene.folder, Verb.LOAD, timeout=PATIENT, policy=str(attacked(scene)))
    assert not reply.ok and "\n" not in reply.reason, reply.reason
    assert not (scene.folder / "ran").exists(), "the file ran a command"
    assert not (scene.folder / "evil_demos").exists(), "the file ran our command line"
    scene.said = reply.reason


def deploy_again(scene: Scene) -> None:
    """Somebody types `embodied deploy` once more, for another robot, in the same folder."""
    file = scene.folder / FILE
    before = file.read_bytes()
    words = ["robot=sim", "demonstrator=reach", "yes=true", f"folder={scene.folder}"]
    words += [f"out={scene.folder / 'second'}", "record=false"]
    done = subprocess.run(
        [sys.executable, "-m", "embodied.cli", "deploy", *words],
        capture_output=True,
        text=True,
        timeout=PATIENT,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert file.read_bytes() == before, f"the second deploy changed {FILE}"
    scene.said = done.stderr.strip().splitlines()[-1].removeprefix("embodied: ")


def break_controller(scene: Scene) -> None:
    scene.trouble.broken = 1


BRIDGE = (
    Blow(
        f"the daemon hangs for {HUNG:.0f} s (SIGSTOP)",
        "control: holds, then latches",
        hang,
        lambda s: (s.beat.hold + POLL + BRAKE, s.beat.stop + POLL + TURN),
        "latched",
        "the daemon has not answered for",
    ),
    Blow(
        "the daemon hangs; 0.1 s later an operator presses stop",
        BRAKES,
        press_beside,
        lambda s: (ANSWER + BRAKE, ANSWER),
        "latched",
        "an operator pressed stop",
    ),
    Blow(
        "the policy posts 3 numbers where the robot takes 4",
        BRAKES,
        say(short),
        lambda s: (TURN + BRAKE, TURN),
        "latched",
        "3",
        mend=go_on,
    ),
    Blow(
        "the policy's times are no numbers (NaN)",
        BRAKES,
        say(timeless),
        lambda s: (TURN + BRAKE, TURN),
        "latched",
        "",
        mend=go_on,
    ),
    Blow(
        "a part of the control process raises in every tick (its controller)",
        BRAKES,
        break_controller,
        lambda s: (SPEC.dt + BRAKE, SPEC.dt + TURN),
        "latched",
        "broken on purpose",
    ),
)
"""On the simulated arm, in this order."""

REFUSED = (
    Blow(
        "`embodied robot load` of a file whose policy.yaml names a command-line function",
        "nothing has to: it is refused, the policy before goes on",
        load_attack,
        lambda s: (0.0, 0.0),
        "goes on",
        "embodied.cli has no class main",
    ),
    Blow(
        "a second `embodied deploy` in the same folder",
        "nothing has to: it is refused and touches nothing",
        deploy_again,
        lambda s: (0.0, 0.0),
        "goes on",
        "already",
    ),
)
"""What is refused in one line, while the arm goes on."""
