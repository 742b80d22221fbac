"""Ask a robot's daemon, from any terminal, or check a robot before anything moves."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.commands import add_overrides, require_understood, take
from embodied.commands.robot import calibrate, describe, identify, teleop
from embodied.core.build import ConfigError

if TYPE_CHECKING:
    from embodied.real_robot.daemon.requests import Reply

SAYS = {
    "status": "how it is, and what was noted last",
    "arm": "hold the arm, ready to start",
    "start": "let the policy move it",
    "stop": "to rest, within its limits",
    "estop": "the same from anything, and latched; also where the daemon hangs",
    "reset": "clear what is latched; start again what died",
    "home": "to where episodes begin",
    "load": "another policy takes over: embodied robot load RUN",
    "release": "let a person move the arm by hand, until reset (supported=true: it is held)",
    "quit": "end the daemon; the arm stays held",
}
LOADING = 150.0  # s
ANSWER = 10.0  # s


def add(parser: argparse.ArgumentParser) -> None:
    more = ("check", "teleop", "record", "keys", "identify", "describe", "find", "calibrate")
    words = "|".join([*SAYS, *more])
    kinds = parser.add_subparsers(dest="kind", metavar=words, required=True)
    for word, sentence in SAYS.items():
        own = kinds.add_parser(word, help=sentence)
        what = (
            "robot=NAME or folder=DIR where several run; host=ADDRESS:PORT keys=DIR where it is on "
            "another machine"
        )
        add_overrides(own, f"RUN, {what}" if word == "load" else what)
        own.add_argument("--json", action="store_true", help="all that is known, as JSON")
    checking = kinds.add_parser("check", help="all that can be looked at before anything moves")
    add_overrides(checking, "robot=NAME policy=RUN; connect=true: open the wire, too")
    making = kinds.add_parser("keys", help="for operators on other machines")
    add_overrides(making, "folder=DIR; name=NAME for another operator's")
    identify.add(kinds)
    describe.add(kinds)
    calibrate.add(kinds)
    teleop.add(kinds)
    parser.epilog = (
        "examples:\n"
        "  embodied robot check robot=so101 policy=outputs/RUN\n"
        "  embodied robot teleop robot=so101 teleop=gamepad\n"
        '  embodied robot record robot=so101 episodes=50 out=outputs/demos task="lift the cube"\n'
        "  embodied robot status\n"
        "  embodied robot stop\n"
        "  embodied robot load outputs/OTHER\n"
        "  embodied robot stop host=192.168.0.7:5555 keys=DIR"
    )


def run(args: argparse.Namespace) -> None:
    own = {
        "check": _check,
        "find": calibrate.find,
        "calibrate": calibrate.calibrate,
        "identify": identify.run,
        "describe": describe.run,
        "keys": _keys,
        "teleop": teleop.teleop,
        "record": teleop.record,
    }
    own.get(args.kind, _ask)(args)


def _ask(args: argparse.Namespace) -> None:
    from embodied.real_robot.daemon.client import ClientError, call
    from embodied.real_robot.daemon.requests import RequestError

    folder, words = take(args.words, "folder")
    host, words = take(words, "host")
    policy = ""
    if args.kind == "load":
        own = [word for word in words if word.partition("=")[0] not in ("keys", "name")]
        if len(own) != 1:
            raise ConfigError("say which policy: embodied robot load RUN")
        from embodied.core.checkpoint import find  # imports torch, which no other request needs

        policy = own[0] if host else str(find(Path(own[0])).resolve())
        words.remove(own[0])
    supported = args.kind == "release" and not host and _supported(words)
    timeout = LOADING if policy else ANSWER
    try:
        if host:
            reply = _remote(host, words, args.kind, timeout, policy)
        elif args.kind == "estop":
            _emergency_stop(daemon_folder(folder, words), args.json)
            return
        else:
            place = daemon_folder(folder, words)
            if args.kind == "release":
                _confirm(supported)
            reply = call(place, args.kind, timeout, policy, supported=supported)
    except (ClientError, RequestError) as error:
        raise ConfigError(str(error)) from error
    if args.json:
        print(json.dumps(reply.status, indent=1))
    elif args.kind == "status":
        print("\n".join(status_lines(reply.status)))
    if not reply.ok:
        raise ConfigError(f"{args.kind} was refused: {reply.reason}")
    if args.kind != "status":
        print(f"{args.kind}: done{f' ({reply.reason})' if reply.reason else ''}")


def _supported(words: list[str]) -> bool:
    """Whether a person holds the arm; its word is taken out of `words`."""
    said, words[:] = take(words, "supported")
    if said not in (None, "true", "false"):
        raise ConfigError(f"supported={said} should be true or false")
    return said == "true"


def _confirm(supported: bool) -> None:
    """On a terminal, ask once more before the arm becomes limp."""
    warning = "hold the arm: it will fall" if supported else "the arm becomes limp"
    if sys.stdin.isatty() and input(f"{warning}. Type yes to release it: ").strip() != "yes":
        raise ConfigError("it was not released")


def _emergency_stop(folder: Path, as_json: bool) -> None:
    """Also where the daemon hangs. ConfigError where nothing was seen to stop the arm."""
    from embodied.real_robot.daemon.client import emergency_stop

    stopped = emergency_stop(folder, ANSWER)
    if as_json and stopped.reply is not None:
        print(json.dumps(stopped.reply.status, indent=1))
    if not stopped.done:
        raise ConfigError(f"estop: {stopped.line()}")
    print(f"estop: done ({stopped.line()})")


def daemon_folder(folder: str | None, words: list[str]) -> Path:
    """The folder of the daemon that is meant: `folder=`, else `robot=` in `words`, else the only
    one that runs. ConfigError where several do."""
    from embodied.real_robot.daemon.server import FolderError, find

    robot, words = take(words, "robot")
    require_understood(words, ["folder=DIR"])
    if folder:
        return Path(folder)
    try:
        return find(robot)
    except FolderError as error:
        raise ConfigError(str(error)) from error


def _remote(host: str, words: list[str], verb: str, timeout: float, policy: str) -> Reply:
    """From a daemon on another machine; `policy` is a folder there."""
    from embodied.real_robot.remote.client import call_remote
    from embodied.real_robot.remote.keys import KeyFileError

    keys, words = take(words, "keys")
    name, words = take(words, "name")
    require_understood(words, ["keys=DIR"])
    if keys is None:
        raise ConfigError("keys=DIR should name the folder of server.key and your own key")
    if policy and not policy.startswith("/"):
        raise ConfigError(f"{policy}: write the whole path that it has on the robot's machine")
    try:
        return call_remote(host, Path(keys), verb, timeout, policy, name or "")
    except KeyFileError as error:
        raise ConfigError(str(error)) from error


def _keys(args: argparse.Namespace) -> None:
    from embodied.real_robot.remote.keys import CLIENT, SERVER, KeyFileError, make

    folder, words = take(args.words, "folder")
    name, words = take(words, "name")
    require_understood(words, ["folder=DIR"])
    if folder is None:
        raise ConfigError("folder=DIR should name the folder that the keys come into")
    name = CLIENT if name is None else name
    try:
        made = make(Path(folder), name)
    except KeyFileError as error:
        raise ConfigError(str(error)) from error
    print("\n".join(str(path) for path in made))
    print(f"to the operator's machine go {SERVER}.key and {name}.key_secret, and nothing else")


def status_lines(status: dict[str, Any]) -> list[str]:
    """What people want to know first."""
    control, policy = status["control"], status["policy"]
    lines = [f"{status['robot']} is {status['mode']}{' (dry)' if status['dry'] else ''}"]
    if status["fault"]:
        then = "" if control["silent"] else "; look, then: embodied robot reset"
        lines.append(f"  fault     {status['fault']}{then}")
    late = f"late {1e3 * control['late']:.1f} ms (worst {1e3 * control['worst']:.1f})"
    lines.append(
        f"  control   {_process(control)}, {control['rate']:.1f} Hz, {late}, "
        f"{control['missed']} ticks missed"
    )
    lines.append(f"  policy    {_process(policy)}, spoke {policy['age']:.2f} s ago")
    lines.append(f"            {status['acting']}")
    if status["intervened"]:
        lines.append("            a person has taken over")
    acted = [f"{name} {each['count']}" for name, each in status["stages"].items() if each["count"]]
    lines.append(f"  safety    {', '.join(acted) if acted else 'has changed nothing'}")
    if "recorder" in status:
        about = status["recorder"]
        problem = f"; NOT the newest: {about['problem']}" if about["problem"] else ""
        saved = f"{about['episodes']} of {about['ended']} episodes on disk{problem}"
        lines.append(f"  recorder  {_process(about)}, {saved}")
    for name, camera in status.get("cameras", {}).items():
        lines.append(f"  camera    {name}: {_process(camera)}")
    joints = ["?" if value is None else f"{value:.3f}" for value in status["q"]]
    lines.append(f"  joints    {', '.join(joints)}")
    return [*lines, *(f"  note      {note}" for note in status["notes"][-5:])]


def _process(about: dict[str, Any]) -> str:
    return f"process {about['pid']}" if about["pid"] else about["died"] or "not there"


def _check(args: argparse.Namespace) -> None:
    from embodied.commands.deploy import composed, show_checks
    from embodied.deploy.site import site

    connect, words = take(args.words, "connect")
    node, policy = composed(words, args.config_dir)
    with tempfile.TemporaryDirectory() as scratch, site(node, policy, Path(scratch)) as here:
        fine = show_checks(here, connect == "true")
    print("nothing speaks against it" if fine else "not like this: see what failed")
    if not fine:
        sys.exit(1)
