"""Drive a robot with an input device, or record episodes of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.commands import add_overrides, require_at_least, take
from embodied.core.build import ConfigError, Node

if TYPE_CHECKING:
    from embodied.real_robot.deployment import Deployment
    from embodied.real_robot.teleop.episode_keys import EpisodeKeys
    from embodied.real_robot.teleop.teleop import Device

SCRIPT: Node = {"_target_": "embodied.policies.scripted.still.Still"}
FILMED = (240, 320)  # height and width of recorded pictures, unless robot.filmed says another
TERMINAL_KEY = "embodied.real_robot.teleop.hold_to_run.TerminalKey"


def add(kinds: Any) -> None:
    teleop = kinds.add_parser("teleop", help="drive the arm with a device, as lerobot-teleoperate")
    add_overrides(teleop, "robot=NAME teleop=keyboard|gamepad|spacemouse|so101_leader|lerobot")
    record = kinds.add_parser("record", help="record episodes of a person, as lerobot-record")
    add_overrides(record, 'robot=NAME teleop=NAME episodes=50 out=DIR task="..."')


def teleop(args: argparse.Namespace) -> None:
    """Nothing is recorded but the black box."""
    from embodied.commands import deploy
    from embodied.deploy.session import TeleopSession

    node = _composed("teleoperate", args)
    output = deploy.output_of(node["out"], args.words)
    with deploy.checked_site(node, None, output) as here:
        made = deploy.settings_of(here, node, output, "")
        folder = deploy.folder_of(node, take(args.words, "robot")[0], made)
        with (
            deploy.hand(made, node["hold"]) as hold,
            deploy.person(made, node["teleop"], always=True) as person,
        ):
            session = TeleopSession(folder, made, output, deploy.Live(hold))
            deploy.conduct(here, node, session, hold, person)


def record(args: argparse.Namespace) -> None:
    """Each episode is in the dataset before the next begins."""
    from embodied.commands import deploy
    from embodied.deploy.session import RecordSession
    from embodied.real_robot.teleop.episode_keys import HINT, EpisodeKeys

    node = _composed("record", args)
    node["robot"] = filming(node["robot"])
    dataset = Path(node["out"]).resolve()
    output = deploy.output_of(node["logs"], args.words, "logs")
    with deploy.checked_site(node, None, output) as here:
        made = deploy.settings_of(here, node, output, str(dataset))
        there = _episodes_in(dataset, made, node["episodes"])
        folder = deploy.folder_of(node, take(args.words, "robot")[0], made)
        with (
            deploy.hand(made, node["hold"]) as hold,
            deploy.person(made, node["teleop"], always=True) as person,
        ):
            assert person is not None
            device = person.device
            keys = EpisodeKeys(used=not device.reads_terminal)
            _require_keys(node, made, keys, device)
            session = RecordSession(
                folder=folder,
                deployment=made,
                output=output,
                show=deploy.Live(hold),
                keys=keys,
                device=device,
                there=there,
                reset_seconds=node["reset_seconds"],
            )
            print(HINT, flush=True)
            deploy.conduct(here, node, session, hold, person)


def filming(robot: Node) -> Node:
    """`robot` with all its cameras recorded, as films unless it says another thing."""
    cameras = robot.get("cameras") or {}
    filmed = {name: list(FILMED) for name in cameras} | (robot.get("filmed") or {})
    return {**robot, "images": robot.get("images") or "mp4", "filmed": filmed}


def _composed(primary: str, args: argparse.Namespace) -> Node:
    from embodied.commands.deploy import hear_interrupts, require_confirmation
    from embodied.compose import compose

    for word in ("policy", "demonstrator"):
        if take(args.words, word)[0] is not None:
            raise ConfigError(
                f"{word}: here a person drives the arm; to run a policy with a person who takes "
                "over: embodied deploy policy=RUN teleop=NAME"
            )
    node = compose(primary, args.words, args.config_dir).node
    least = {"episodes": 1, "seconds": 0.1, "reset_seconds": 0}
    require_at_least(node, {key: low for key, low in least.items() if key in node})
    if node.get("teleop") is None:
        raise ConfigError("teleop=NAME should name the device: embodied list teleops")
    require_confirmation(node)
    hear_interrupts()
    return {"episodes": 1, **node, "demonstrator": SCRIPT}


def _episodes_in(dataset: Path, made: Deployment, wanted: int) -> int:
    """How many the dataset has by now. ConfigError where it has enough, or is of another kind."""
    from embodied.core.checkpoint import load_spec
    from embodied.core.spec import SpecMismatch
    from embodied.datasets.lerobot.schema import DatasetError
    from embodied.datasets.lerobot.writer import EpisodeWriter
    from embodied.real_robot.recording.recorder import recorded_spec

    spec = recorded_spec(load_spec(made.policy), made.filmed)
    try:
        with EpisodeWriter(dataset, spec, made.robot, made.images or "png") as writer:
            there = len(writer)
    except (DatasetError, SpecMismatch) as error:
        raise ConfigError(str(error)) from error
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
