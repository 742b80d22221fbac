"""From a run folder (or an environment alone) to a page on this machine's own address."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import find, load_policy
from embodied.core.env import VecEnv

if TYPE_CHECKING:
    from embodied.viewer.session import Session
    from embodied.viewer.viewer import Viewer

HOST = "127.0.0.1"


class ViewerError(ConfigError):
    """The viewer cannot start, in one line that says what to type."""


@dataclass(frozen=True)
class Run:
    """What a run folder holds for the viewer: its environment's node, how many steps of a chunk it
    executes (None: all), its checkpoint folders, oldest first, the one to begin with, and the
    run's own `folder`."""

    env: dict[str, Any]
    execute: int | None
    checkpoints: tuple[Path, ...]
    chosen: Path
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.resolve().name


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
    require_port(port, host)
    require_viser()
    from embodied.viewer.viewer import Viewer

    session = open_session(run, env_node, against)
    try:
        viewer = Viewer(session, port=port, seed=seed, host=host)
    except BaseException:
        session.close()
        raise
    try:
        print(f"viewing {run or session.title} at {viewer.url} (Ctrl-C ends it)", flush=True)
        if block:
            viewer.wait()
    except KeyboardInterrupt:
        # After the ^C that the terminal shows.
        print("\nviewer closed", flush=True)
    finally:
        if block:
            viewer.close()
    return viewer


def open_session(
    run: Path | str | None, env_node: Mapping[str, Any] | None = None, against: str | None = None
) -> Session:
    """The session that `serve` shows, without a page."""
    if run is not None and (Path(run) / "meta" / "info.json").exists():
        return session_of_episodes(Path(run), env_node, against)
    opened = None if run is None else read_run(Path(run), env_node)
    node = opened.env if opened else dict(env_node or {})
    if not node:
        raise ViewerError("nothing to view: give a run folder or an environment")
    return session_of(node, opened, against)


def session_of(node: dict[str, Any], run: Run | None, against: str | None) -> Session:
    """A session in the world of `node`, beside a rival where there is one."""
    from embodied.viewer.choices import choices_for
    from embodied.viewer.foresight import Foresight
    from embodied.viewer.judge import judge_of
    from embodied.viewer.session import Session

    env: VecEnv = build(node | {"num_envs": 1})
    try:
        foresight = Foresight(env.spec, lambda n: build(node | {"num_envs": n}))
        name = "" if run is None else run.name
        session = Session(env, *choices_for(env, run), name=name, foresight=foresight)
        session.run = run
        if run is not None:
            session.judge = judge_of(run.folder, lambda: load_policy(run.folder, env.spec))
        if against is not None:
            other = read_run(Path(against), node) if Path(against).is_dir() else run
            rival = session_of(node, other, None)
            session.face(rival)
            if not Path(against).is_dir():
                rival.choose(against)
                rival.name = against
    except BaseException:
        env.close()
        raise
    return session


def session_of_episodes(
    path: Path, env_node: Mapping[str, Any] | None, against: str | None
) -> Session:
    """A session that plays what a dataset holds; its seeds are numbers of episodes."""
    from embodied.viewer.foresight import Foresight
    from embodied.viewer.recorded import Retold, open_recorded
    from embodied.viewer.session import Session

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


def read_run(path: Path, env_node: Mapping[str, Any] | None = None) -> Run:
    """What `path`, a run folder or one checkpoint in it, holds; ViewerError where it is no run."""
    if not path.is_dir():
        raise ViewerError(f"{path} is not a folder; give a run folder (it holds run.yaml)")
    chosen = find(path)
    root = path if chosen != path else path.parent.parent
    file, node = root / "run.yaml", {}
    if file.exists():
        try:
            node = yaml.safe_load(file.read_text())
        except yaml.YAMLError as error:
            raise ViewerError(f"{file} is not YAML ({str(error).splitlines()[0]})") from error
    elif env_node is None:
        raise ViewerError(f"{root} has no run.yaml; name its environment with env=...")
    if env_node is None and "env" not in node:
        raise ViewerError(f"{file} has no env; name its environment with env=...")
    every = tuple(sorted(p.parent for p in chosen.parent.glob("[0-9]*/about.json")))
    env = dict(node["env"] if env_node is None else env_node)
    return Run(env, node.get("execute"), every or (chosen,), chosen, root)


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
