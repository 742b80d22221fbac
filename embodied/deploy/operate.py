"""What an operator does with a robot: checks, a rehearsal of a new calibration, a question, and a
session from its first process to its summary."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError, Node
from embodied.core.checkpoint import file_hash, find
from embodied.deploy.check import calibration, check
from embodied.deploy.session import WHOLE, Session, Status, Stopped
from embodied.deploy.site import Site, site
from embodied.real_robot.daemon.server import default_folder
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.rl.rehearsal import is_rehearsed, known_folder, rehearse, remember
from embodied.real_robot.teleop.hold_to_run import HoldToRun
from embodied.real_robot.teleop.takeover import Takeover

PLAIN = 2.0  # s between two lines where there is no terminal
SLOW = 0.95  # of real time; below it, results say more about this machine than about the policy


def known_file(site: Site) -> Path:
    """The file of the last good calibration of that robot."""
    return known_folder() / f"{site.deployment.robot}.json"


def fingerprint(policy: str) -> str:
    """What says which policy a checkpoint holds: a hash of its node, its spec and its weights."""
    names = ("policy.yaml", "spec.json", "policy.safetensors")
    parts = [file_hash(find(policy) / name) for name in names]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def known_policies(made: Deployment) -> Path:
    """The file of the policies that have ended an episode on that robot, one fingerprint a line."""
    return known_folder() / f"{made.robot}.policies"


def is_first_run(made: Deployment) -> bool:
    """Whether the policy has yet to end an episode on that robot."""
    file = known_policies(made)
    known = file.read_text().split() if file.exists() else []
    return fingerprint(made.policy) not in known


def remember_policy(session: Session) -> None:
    """Keep that the policy has run on that robot, where an episode came to its end and moved it."""
    made = session.deployment
    ended = any(episode.end in WHOLE for episode in session.episodes)
    if not ended or made.dry or not is_first_run(made):
        return
    file = known_policies(made)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as kept:
        kept.write(f"{fingerprint(made.policy)}\n")


def show_checks(site: Site, connect: bool = False) -> bool:
    fine = True
    known = None if site.simulated else known_file(site)  # a simulated robot has no calibration
    for line in check(site, known, connect):
        print(line, flush=True)
        fine = fine and line.fine is not False
    return fine


@contextmanager
def output_folder(given: str | None, robot: str | None, setting: str = "out") -> Iterator[Path]:
    """The folder of what the session leaves, created. ConfigError where there is something. Where
    nothing was begun, it is taken away again."""
    usual = Path("outputs") / "deploy" / f"{robot}-{datetime.now():%Y%m%d-%H%M%S}"
    output = Path(given) if given else usual
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} exists already; choose another folder: {setting}=DIR")
    output.mkdir(parents=True, exist_ok=True)
    output = output.resolve()
    try:
        yield output
    except BaseException:
        if not any((output / name).exists() for name in ("summary.json", "recording", "blackbox")):
            shutil.rmtree(output, ignore_errors=True)
        raise


def rehearse_new(site: Site, node: Node, made: Deployment, folder: Path) -> None:
    """Try the joints of an arm whose calibration is new, one by one. ConfigError where there is
    nobody to ask, or one turns the wrong way."""
    if site.simulated or is_rehearsed(made):
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"the calibration of {made.robot} is new: each joint has to be tried with somebody who "
            "looks on; run this once at a terminal, which asks joint by joint"
        )
    print(f"the calibration of {made.robot} is new: each joint turns by 3 degrees and back")

    def ask(line: str) -> bool:
        return input(f"{line} [y/N] ").strip().lower() == "y"

    if not ask("nothing may stand in the arm's way, and a hand is on its own stop. Go on?"):
        raise ConfigError("not started: the calibration was not rehearsed")
    rehearse(made, folder, node["hold"], ask)
    remember(made)


def settings_of(site: Site, node: Node, output: Path, recording: str) -> Deployment:
    """What the command line adds to the robot's settings."""
    # A person who drives (teleop, record) is no policy.
    policy = not site.simulated and "full_speed" in node
    first = policy and is_first_run(site.deployment)
    if first and not node["full_speed"]:
        print(
            "the first run of this policy on this robot: the tool moves at 0.25 m/s at most, until "
            "an episode has come to its end (full_speed=true lifts that)"
        )
    return replace(
        site.deployment,
        first_run=first and not node["full_speed"],
        records=str(output / "blackbox"),
        recording=recording,
        dry=site.deployment.dry or node["dry"],
        hold_to_run=site.deployment.hold_to_run or node["hold_to_run"],
    )


@dataclass(frozen=True)
class Prepared:
    """A robot whose checks are printed and whose operator has what is needed at hand."""

    site: Site
    node: Node  # the settings of the command
    output: Path
    made: Deployment
    folder: Path  # of the daemon
    hold: HoldToRun | None
    teleop: Takeover | None

    def conduct(self, session: Session) -> None:
        """Run `session` from its first process to its summary. ConfigError with what ended it."""
        site = self.site
        node = self.node
        problem = ""
        share = 1.0
        pace = Pace(site.behind)
        with session:
            try:
                if _begin(node, session, self.hold, self.teleop):
                    pace = Pace(site.behind)
                    session.run(node["episodes"], node["seconds"], node["home"])
            except Stopped as error:
                problem = str(error)
                session.stop()
            except KeyboardInterrupt:
                print("\nstopping: the arm comes to rest (Ctrl-C again: emergency stop)")
                session.stop()
            try:
                share = pace.share()
            except DriverError as error:
                problem = f"{problem}; {error}" if problem else str(error)
        problem = problem or session.unrecorded
        _summarize(session, session.output, problem, share)
        if not site.simulated and "full_speed" in node:
            remember_policy(session)
        if problem:
            raise ConfigError(problem)
        if not site.simulated and (found := calibration(site)):
            known_file(site).parent.mkdir(parents=True, exist_ok=True)
            known_file(site).write_text(json.dumps(found, indent=1))  # for the next check


@contextmanager
def prepared(
    node: Node,
    policy: str | None,
    robot: str | None,
    recording: str = "",
    setting: str = "out",
    always: bool = False,
) -> Iterator[Prepared]:
    """The robot of `node` with its checks printed; ConfigError where one failed. `robot`: the name
    that was typed. `recording`: a dataset, below the output folder that `setting` names; `always`:
    a person drives."""
    with output_folder(node[setting], robot, setting) as output, site(node, policy, output) as here:
        if not show_checks(here):
            raise ConfigError("not started: a check failed, see above")
        made = settings_of(here, node, output, str(output / recording) if recording else "")
        folder = Path(node["folder"]) if node["folder"] else default_folder(robot or made.robot)
        rehearse_new(here, node, made, folder)
        device = node["hold"]
        teleop = node.get("teleop")
        if device is not None and not made.hold_to_run:
            raise ConfigError("hold=... names a device of hold-to-run; add hold_to_run=true")
        with (
            HoldToRun(device) if made.hold_to_run else nullcontext() as hold,
            nullcontext() if teleop is None else Takeover(teleop, made, always) as person,
        ):
            yield Prepared(here, node, output, made, folder, hold, person)


def _begin(node: Node, session: Session, hold: HoldToRun | None, teleop: Takeover | None) -> bool:
    """Whether the arm is held, all processes are ready, and the operator wants to go on."""
    folder = session.folder
    made = session.deployment
    print(f"starting in {folder} ...", flush=True)
    elsewhere = f" folder={folder}" if node["folder"] else ""
    print(f"to view it: embodied view robot{elsewhere}", flush=True)
    if made.watchdog is not None:
        print(f"press the button of the watchdog at {made.watchdog.device}", flush=True)
    print(session.ready()["safety"], flush=True)
    moves = (
        "nothing moves (dry run)" if made.dry else "the arm WILL MOVE; keep a hand on its own stop"
    )
    question = f"{made.robot} is held. From here on {moves}. Go on? [y/N] "
    if not node["yes"] and input(question).strip().lower() != "y":
        return False
    if hold is not None:
        hold.start(folder)
        print(f"{hold.hint}: the arm moves only then", flush=True)
    if teleop is not None:
        teleop.start(folder)
        print(teleop.hint, flush=True)
    return True


class Live:
    """Prints the state of the episode on one line, which a terminal overwrites. `hold`: the
    operator's hand on hold-to-run."""

    def __init__(self, hold: HoldToRun | None = None) -> None:
        self.said = 0.0
        self.hold = hold

    def __call__(self, status: Status, ran: float, success: bool | None) -> None:
        line = live_line(status, ran, success)
        if self.hold is not None and not self.hold.held:
            line = f"LET GO, {self.hold.hint}: {line}"
        if sys.stdout.isatty():
            print(f"\r{line:<110}", end="\n" if status["mode"] != "RUNNING" else "", flush=True)
        elif time.monotonic() > self.said + PLAIN or success:
            self.said = time.monotonic()
            print(line, flush=True)


def live_line(status: dict[str, Any], ran: float, success: bool | None) -> str:
    control = status["control"]
    acted = [
        f"{name} {stage['count']}" for name, stage in status["stages"].items() if stage["count"]
    ]
    known = "" if success is None else f"  success {'yes' if success else 'not yet'}"
    late = f"late {1e3 * control['late']:.1f} ms (worst {1e3 * control['worst']:.0f})"
    if control["silent"]:
        return f"{status['fault']}  ({ran:.1f} s)"
    mode = "TAKEOVER" if status["intervened"] else status["mode"]
    return (
        f"{mode:8} {ran:5.1f} s  {control['rate']:.1f} Hz  {late}  missed "
        f"{control['missed']}  interventions: {', '.join(acted) if acted else 'none'}{known}"
    )


class Pace:
    """The speed of a simulated robot relative to real time; `behind` returns the s it has lost."""

    def __init__(self, behind: Callable[[], float]) -> None:
        self.behind = behind
        self.began, self.lost = time.monotonic(), behind()

    def share(self) -> float:
        """Share of real time since construction; 1 for a real robot."""
        return 1 - (self.behind() - self.lost) / (time.monotonic() - self.began)


def _summarize(session: Session, output: Path, problem: str, pace: float) -> None:
    about = session.summary() | {"problem": problem, "pace": round(pace, 3)}
    (output / "summary.json").write_text(json.dumps(about, indent=1))
    print()
    for number, each in enumerate(session.episodes, 1):
        why = f": {each.unkept}" if each.unkept else ""
        kept = "recorded" if each.recorded else f"not recorded{why}"
        print(f"  episode {number}: {each.seconds:.1f} s, {each.end}, {kept}")
    if about["successes"] is not None:
        print(f"  success  {about['successes']} of {len(session.episodes)}")
    if pace < SLOW:
        print(
            f"  pace     the simulated robot ran at {pace:.2f} of real time: results "
            "depend on the machine, not only on the policy"
        )
    print(f"  folder   {output}")
    if any(each.recorded for each in session.episodes):
        print(f"next: embodied demos info {session.deployment.recording}")
