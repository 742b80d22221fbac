"""Opens the viewer for a run folder, a dataset or an environment."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.core.build import build
from embodied.core.checkpoint import find
from embodied.core.env import VecEnv
from embodied.viewer.run_folder import HOST, Run, ViewerError, read_run

if TYPE_CHECKING:
    from embodied.viewer.panels.page import Viewer
    from embodied.viewer.session.session import Session

Report = Callable[[str], None]


def serve(
    run: Path | str | None = None,
    env_node: Mapping[str, Any] | None = None,
    port: int = 8080,
    block: bool = True,
    seed: int = 0,
    against: str | None = None,
    host: str = HOST,
) -> Viewer:
    """Open the viewer for `run` (a run, checkpoint or dataset folder), or for an environment alone.

    `env_node` is an environment configuration that replaces the run's. `against` is a run, a
    checkpoint or the name of a policy ("random", "demonstrator", ...) that plays beside it from the
    same seeds. `host` is the address to listen on; any other than this machine's requires the
    printed token. `port` 0 takes a free port. With `block` the call returns after Ctrl-C, with the
    viewer closed; without, close it with `Viewer.close()`. Raises ViewerError, CheckpointError,
    ConfigError or SpecMismatch.
    """
    require_input(run, env_node)
    require_port(port, host)
    require_viser()
    from embodied.viewer.server.server import PageServer, run_page

    start = time.monotonic()
    page_server = PageServer(host, port)
    print(f"viewing {run or env_name(env_node)} at {page_server.url} (Ctrl-C ends it)", flush=True)

    def make(page_server: PageServer) -> Viewer:
        page_server.show_loading("the viewer")
        from embodied.viewer.panels.page import Viewer

        session = open_session(
            run, env_node, against, page_server.show_loading, postpone_critic=True
        )
        page_server.show_loading("the first image")
        try:
            viewer = Viewer(session, seed=seed, page_server=page_server)
        except BaseException:
            session.close()
            raise
        print(f"ready after {time.monotonic() - start:.1f} s", flush=True)
        return viewer

    return run_page(page_server, make, block)


def env_name(env_node: Mapping[str, Any] | None) -> str:
    """A name for an environment configuration, before the environment is built."""
    env_node = env_node or {}
    known = [str(env_node[key]) for key in ("task", "id") if env_node.get(key) is not None]
    return " ".join([str(env_node.get("_target_", "an environment")).rpartition(".")[2], *known])


def require_input(run: Path | str | None, env_node: Mapping[str, Any] | None) -> None:
    if run is None and not env_node:
        raise ViewerError("nothing to view: give a run folder, or an environment with env=NAME")
    if run is not None and not Path(run).is_dir():
        raise ViewerError(f"{run} is not a folder; give a run folder (it contains run.yaml)")
    if run is not None and not (Path(run) / "meta" / "info.json").exists():
        find(Path(run))


def silent(words: str) -> None:
    """A progress callback that does nothing."""


def open_session(
    run: Path | str | None,
    env_node: Mapping[str, Any] | None = None,
    against: str | None = None,
    report: Report = silent,
    postpone_critic: bool = False,
) -> Session:
    """The session that `serve` displays, without a page.

    `report` is called with what is being loaded. With `postpone_critic`, critic and reward are
    loaded later, by `Session.load_critic`.
    """
    if run is not None and (Path(run) / "meta" / "info.json").exists():
        report("the recorded episodes")
        return session_of_episodes(Path(run), env_node, against)
    require_input(run, env_node)
    opened = None if run is None else read_run(Path(run), env_node)
    node = opened.env if opened else dict(env_node or {})
    session = session_of(node, opened, against, report)
    if not postpone_critic:
        session.load_critic()
    return session


def session_of(
    node: dict[str, Any], run: Run | None, against: str | None, report: Report = silent
) -> Session:
    """A session in the environment `node`, with a second one beside it if `against` is given."""
    from embodied.core.checkpoint import load_policy
    from embodied.viewer.session.overlays import PlanPreview, make_step_overlay
    from embodied.viewer.session.session import Session, choices_for

    report(f"the environment {env_name(node)}")
    env = build(node | {"num_envs": 1}, VecEnv)
    try:
        plan_preview = PlanPreview(env.spec, lambda n: build(node | {"num_envs": n}, VecEnv))
        name = "" if run is None else run.name
        report("the policies" if run is None else f"{name}, checkpoint {run.chosen.name}")
        session = Session(env, *choices_for(env, run), name=name, plan_preview=plan_preview)
        session.run = run
        if run is not None:
            session.make_overlay = lambda: make_step_overlay(
                run.folder, lambda: load_policy(run.folder, env.spec), env
            )
        if against is not None:
            other_run = read_run(Path(against), node) if Path(against).is_dir() else run
            other = session_of(node, other_run, None, report)
            session.other = other
            if not Path(against).is_dir():
                other.choose(against)
                other.name = against
    except BaseException:
        env.close()
        raise
    return session


def session_of_episodes(
    path: Path, env_node: Mapping[str, Any] | None, against: str | None
) -> Session:
    """A session that plays a dataset's recorded episodes; seeds are episode numbers."""
    from embodied.viewer.session.overlays import PlanPreview
    from embodied.viewer.session.recorded_env import RecordedActions, open_recorded
    from embodied.viewer.session.session import Session

    if against is not None:
        raise ViewerError("recorded episodes cannot be compared with a policy; leave out against=")
    env = open_recorded(path, 0, env_node)
    trail = PlanPreview(env.spec, lambda n: env)
    name = path.resolve().name
    session = Session(env, {"recorded": lambda: RecordedActions(env)}, "recorded", name, trail)
    session.counts = "episode"
    return session


def require_viser() -> None:
    try:
        import viser as viser
    except ModuleNotFoundError as error:
        if error.name != "viser":
            raise
        line = "the viewer needs viser; type: pip install 'embodied-rl[view]'"
        raise ViewerError(line) from error


def require_port(port: int, host: str = HOST) -> None:
    if _free(port, host):
        return
    candidates = range(port + 1, min(port + 100, 65536))
    better = next((each for each in candidates if _free(each, host)), 0)
    raise ViewerError(f"port {port} is in use; try port={better}")


def _free(port: int, host: str) -> bool:
    if not 0 <= port < 65536:
        raise ViewerError(f"port={port} must be between 0 and 65535 (0: any free port)")
    with socket.socket() as probe:
        # As the server itself does, or a port just left would look taken for a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise ViewerError(f"host={host} is not an address of this machine") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ViewerError(f"host={host} is not an address of this machine") from error
            return False
    return True
