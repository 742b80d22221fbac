"""From a run folder (or an environment alone) to a page on this machine's own address."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.core.build import build
from embodied.viewer.run_folder import Run, ViewerError, read_run
from embodied.viewer.server.auth_proxy import HOST

if TYPE_CHECKING:
    from embodied.core.env import VecEnv
    from embodied.viewer.app import Viewer
    from embodied.viewer.session.overlays import Judge
    from embodied.viewer.session.session import Session

Say = Callable[[str], None]


def serve(
    run: Path | str | None = None,
    env_node: Mapping[str, Any] | None = None,
    port: int = 8080,
    block: bool = True,
    seed: int = 0,
    against: str | None = None,
    host: str = HOST,
) -> Viewer:
    """Open the page for `run` (a run or checkpoint folder), or for an environment without a policy.

    `env_node` replaces the run's environment; `against` is a run, a checkpoint or a name among the
    policies that plays beside it from the same starts. `host` is who can reach it: this machine, or
    with another address anybody who has the token. `port` 0 takes any free port. With `block`
    the call returns after Ctrl-C, with the viewer closed; without, close it with `Viewer.close()`.
    Raises ViewerError, CheckpointError, ConfigError or SpecMismatch, one line each.
    """
    require_something(run, env_node)
    require_port(port, host)
    require_viser()
    from embodied.viewer.server.page_thread import shown
    from embodied.viewer.server.server import Door

    start = time.monotonic()
    door = Door(host, port)
    print(f"viewing {run or named(env_node)} at {door.url} (Ctrl-C ends it)", flush=True)

    def make(door: Door) -> Viewer:
        door.say("the program")
        from embodied.viewer.app import Viewer

        session = open_session(run, env_node, against, door.say, hurry=True)
        door.say("the first picture")
        try:
            viewer = Viewer(session, seed=seed, door=door)
        except BaseException:
            session.close()
            raise
        print(f"ready after {time.monotonic() - start:.1f} s", flush=True)
        return viewer

    return shown(door, make, block)


def named(env_node: Mapping[str, Any] | None) -> str:
    """A world alone, before it is there to say its name."""
    env_node = env_node or {}
    known = [str(env_node[key]) for key in ("task", "id") if key in env_node]
    return " ".join([str(env_node.get("_target_", "a world")).rpartition(".")[2], *known])


def require_something(run: Path | str | None, env_node: Mapping[str, Any] | None) -> None:
    """ViewerError, at once, where there is nothing to view."""
    if run is None and not env_node:
        raise ViewerError("nothing to view: give a run folder or an environment")
    if run is not None and not Path(run).is_dir():
        raise ViewerError(f"{run} is not a folder; give a run folder (it holds run.yaml)")


def unsaid(words: str) -> None:
    """For those who wait without a page."""


def open_session(
    run: Path | str | None,
    env_node: Mapping[str, Any] | None = None,
    against: str | None = None,
    say: Say = unsaid,
    hurry: bool = False,
) -> Session:
    """The session that `serve` shows, without a page; `say` is told what is being done. In a
    `hurry` what is not needed for the first picture is left to `Session.meet_judge`."""
    if run is not None and (Path(run) / "meta" / "info.json").exists():
        say("the recorded episodes")
        return session_of_episodes(Path(run), env_node, against)
    require_something(run, env_node)
    opened = None if run is None else read_run(Path(run), env_node)
    node = opened.env if opened else dict(env_node or {})
    session = session_of(node, opened, against, say)
    if not hurry:
        session.meet_judge()
    return session


def session_of(
    node: dict[str, Any], run: Run | None, against: str | None, say: Say = unsaid
) -> Session:
    """A session in the world of `node`, beside a rival where there is one."""
    from embodied.viewer.session.plan_preview import Foresight
    from embodied.viewer.session.policies import choices_for
    from embodied.viewer.session.session import Session

    say(f"the world {named(node)}")
    env: VecEnv = build(node | {"num_envs": 1})
    try:
        foresight = Foresight(env.spec, lambda n: build(node | {"num_envs": n}))
        name = "" if run is None else run.name
        say("who acts" if run is None else f"{name}, checkpoint {run.chosen.name}")
        session = Session(env, *choices_for(env, run), name=name, foresight=foresight)
        session.run = run
        if run is not None:
            session.judge_later = lambda: judge_of(run, env)
        if against is not None:
            other = read_run(Path(against), node) if Path(against).is_dir() else run
            rival = session_of(node, other, None, say)
            session.face(rival)
            if not Path(against).is_dir():
                rival.choose(against)
                rival.name = against
    except BaseException:
        env.close()
        raise
    return session


def judge_of(run: Run, env: VecEnv) -> Judge | None:
    """What judges the steps of `run`; much has to be imported for it."""
    from embodied.core.checkpoint import load_policy
    from embodied.viewer.session import overlays

    return overlays.judge_of(run.folder, lambda: load_policy(run.folder, env.spec), env)


def session_of_episodes(
    path: Path, env_node: Mapping[str, Any] | None, against: str | None
) -> Session:
    """A session that plays what a dataset holds; its seeds are numbers of episodes."""
    from embodied.viewer.session.plan_preview import Foresight
    from embodied.viewer.session.recorded_env import Retold, open_recorded
    from embodied.viewer.session.session import Session

    if against is not None:
        raise ViewerError("recorded episodes have no rival; leave against= out")
    env = open_recorded(path, 0, env_node)
    trail = Foresight(env.spec, lambda n: env)
    name = path.resolve().name
    session = Session(env, {"recorded": lambda: Retold(env)}, "recorded", name, trail)
    session.counts = "episode"
    return session


def require_viser() -> None:
    """ViewerError where the page's library is not installed."""
    try:
        import viser as viser
    except ModuleNotFoundError as error:
        if error.name != "viser":
            raise
        line = "the viewer needs viser; type: pip install 'embodied-rl[view]'"
        raise ViewerError(line) from error


def require_port(port: int, host: str = HOST) -> None:
    """ViewerError that names a free port where `port` is taken."""
    if _free(port, host):
        return
    others = range(port + 1, min(port + 100, 65536))
    better = next((other for other in others if _free(other, host)), 0)
    raise ViewerError(f"port {port} is taken; try port={better}")


def _free(port: int, host: str) -> bool:
    if not 0 <= port < 65536:
        raise ViewerError(f"port is {port}, it has to be between 0 and 65535 (0: any free one)")
    with socket.socket() as probe:
        # As the server itself does, or a port just left would look taken for a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise ViewerError(f"host={host} is no address of this machine") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ViewerError(f"host={host} is no address of this machine") from error
            return False
    return True
