"""Deploy a policy on a robot (check, arm, run, record, stop), or drive it by hand."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from embodied.commands import is_given, require_at_least, take
from embodied.compose import compose
from embodied.core.build import ConfigError, Node
from embodied.policies.remote.address import allow_typed

if TYPE_CHECKING:
    from embodied.real_robot.deployment import Deployment
    from embodied.real_robot.teleop.hold_to_run import EpisodeKeys
    from embodied.real_robot.teleop.teleop import Device

SCRIPT: Node = {"_target_": "embodied.policies.scripted.simple.Still"}
FILMED = (240, 320)  # height and width of recorded pictures, unless robot.filmed says another
TERMINAL_KEY = "embodied.real_robot.teleop.hold_to_run.TerminalKey"


def run(args: argparse.Namespace) -> None:
    policy = args.own["policy"]
    node = composed(policy, args.words, args.config_dir)
    require_operator(node)
    from embodied.deploy.operate import Live, prepared
    from embodied.deploy.session import Session

    robot = take(args.words, "robot")[0]
    with prepared(node, policy, robot, "recording" if node["record"] else "") as here:
        here.conduct(Session(here.folder, here.made, here.output, Live(here.hold)))


def composed(policy: str | None, words: list[str], folders: list[str]) -> Node:
    """The `deploy` configuration for a policy (None: a script)."""
    allow_typed([policy or ""])
    node = compose("deploy", words, folders).node
    require_at_least(node, {"episodes": 1, "seconds": 0.1})
    if policy is not None and node.get("demonstrator"):
        raise ConfigError("give either policy=RUN or demonstrator=NAME, not both")
    if policy is None and not node.get("demonstrator"):
        raise ConfigError("name what to run: policy=RUN, or a script: demonstrator=reach")
    return node


def require_operator(node: Node) -> None:
    """ConfigError where the operator can neither be asked nor said yes=true. Shells start
    background programs that ignore Ctrl-C; a program that moves an arm must not."""
    if not node["yes"] and not sys.stdin.isatty():
        raise ConfigError(
            "there is no terminal to confirm on: yes=true lets the arm move without a question"
        )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def teleop(args: argparse.Namespace) -> None:
    """Nothing is recorded but the black box."""
    node = _composed("teleoperate", args)
    from embodied.deploy.operate import Live, prepared
    from embodied.deploy.session import TeleopSession

    with prepared(node, None, take(args.words, "robot")[0], always=True) as here:
        here.conduct(TeleopSession(here.folder, here.made, here.output, Live(here.hold)))


def record(args: argparse.Namespace) -> None:
    """Each episode is in the dataset before the next begins."""
    node = _composed("record", args)
    from embodied.deploy.operate import Live, prepared
    from embodied.deploy.session import RecordSession
    from embodied.real_robot.teleop.hold_to_run import HINT, EpisodeKeys

    node["robot"] = filming(node["robot"])
    dataset = Path(node["out"]).resolve()
    robot = take(args.words, "robot")[0]
    with prepared(node, None, robot, str(dataset), "logs", always=True) as here:
        assert here.teleop is not None
        device = here.teleop.device
        keys = EpisodeKeys(used=not device.reads_terminal)
        _require_keys(node, here.made, keys, device)
        session = RecordSession(
            folder=here.folder,
            deployment=here.made,
            output=here.output,
            show=Live(here.hold),
            keys=keys,
            device=device,
            there=_episodes_in(dataset, here.made, node["episodes"]),
            reset_seconds=node["reset_seconds"],
        )
        print(HINT, flush=True)
        here.conduct(session)


def filming(robot: Node) -> Node:
    """`robot` with all its cameras recorded, as films unless it says another thing."""
    cameras = robot.get("cameras") or {}
    filmed = {name: list(FILMED) for name in cameras} | (robot.get("filmed") or {})
    return {**robot, "images": robot.get("images") or "mp4", "filmed": filmed}


def _composed(primary: str, args: argparse.Namespace) -> Node:
    for word in ("policy", "demonstrator"):
        if is_given(args.words, word):
            raise ConfigError(
                f"{word}: here a person drives the arm; to run a policy with a person who takes "
                "over: embodied deploy policy=RUN teleop=NAME"
            )
    node = compose(primary, args.words, args.config_dir).node
    least = {"episodes": 1, "seconds": 0.1, "reset_seconds": 0}
    require_at_least(node, {key: low for key, low in least.items() if key in node})
    if node.get("teleop") is None:
        raise ConfigError("teleop=NAME should name the device: embodied list teleops")
    require_operator(node)
    return {"episodes": 1, **node, "demonstrator": SCRIPT}


def _episodes_in(dataset: Path, made: Deployment, wanted: int) -> int:
    """How many the dataset has by now. ConfigError where it has enough, or is of another kind."""
    from embodied.core.checkpoint import load_spec
    from embodied.datasets.lerobot.writer import EpisodeWriter
    from embodied.real_robot.recorder import recorded_spec

    spec = recorded_spec(load_spec(made.policy), made.filmed)
    with EpisodeWriter(dataset, spec, made.robot, made.images or "png") as writer:
        there = len(writer)
    if there >= wanted:
        raise ConfigError(
            f"{dataset} has {there} episodes already; for ten more: episodes={there + 10}"
        )
    return there


def _require_keys(node: Node, made: Deployment, keys: EpisodeKeys, device: Device) -> None:
    """ConfigError where neither a key nor a time ends an episode, or two want the same keys."""
    from embodied.real_robot.teleop.teleop import Device

    hold = node["hold"] or {"_target_": TERMINAL_KEY}
    if made.hold_to_run and hold["_target_"] == TERMINAL_KEY:
        raise ConfigError("this terminal's keys end episodes: give hold= another device")
    has_keys = keys.there or type(device).pressed is not Device.pressed
    if not has_keys and None in (node["seconds"], node["reset_seconds"]):
        raise ConfigError(
            "there is no terminal whose keys could end an episode: seconds=20 reset_seconds=5"
        )
