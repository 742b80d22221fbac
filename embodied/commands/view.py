"""View a run, a dataset or a running robot in the browser: 3D scene, plans, plots."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from embodied.commands import require_folders
from embodied.core.build import ConfigError
from embodied.core.saved_node import read_run_settings

ROBOT = "robot"  # instead of a run
ROBOT_SETTINGS = ("port", "host", "folder", "robot")
OUTCOME = {True: "success", False: "no success", None: "success not reported"}


def run(args: argparse.Namespace) -> None:
    own = args.own
    names = args.names
    words = args.words
    if names == [ROBOT]:
        return _monitor(own, words, args.port)
    for key in ("folder", "robot"):
        if own[key] is not None:
            raise ConfigError(f"{key}= is only for embodied view robot folder=DIR")
    require_folders([*names, *words] if args.compare else names)
    if args.compare:
        from embodied.viewer.export.compare_runs import compare

        page = compare([Path(name) for name in names], Path(own["out"] or "compare.html"))
        print(f"{page}  {page.stat().st_size / 1e6:.1f} MB", flush=True)
        return None
    if len(names) == 2 and own["against"] is None:
        *names, own["against"] = names
    if len(names) > 1 or not (names or words):
        what = "two runs at most" if names else "nothing to view"
        raise ConfigError(f"{what}; type: embodied view RUN, or embodied view env=NAME")
    from embodied.viewer import serve
    from embodied.viewer.launch import HOST

    path = Path(names[0]) if names else None
    env = _env(path, words, args.config_dir) if words else None
    seed = _number(own, "episode" if own["episode"] is not None else "seed", 0)
    if own["export"] is not None:
        return _export(Path(own["export"]), path, env, own["against"], seed)
    serve(
        path,
        env,
        _number(own, "port", args.port),
        seed=seed,
        against=own["against"],
        host=own["host"] or HOST,
    )


def _monitor(own: dict[str, str | None], words: list[str], port: int) -> None:
    from embodied.real_robot.daemon.server import default_folder
    from embodied.viewer.launch import HOST
    from embodied.viewer.robot.app import monitor

    others = [key for key in own if own[key] is not None and key not in ROBOT_SETTINGS]
    others += [word.partition("=")[0] for word in words]
    if others:
        raise ConfigError(
            f"{others[0]}= is not a setting of embodied view robot (settings: "
            f"{', '.join(ROBOT_SETTINGS)})"
        )
    place = default_folder(own["robot"]) if own["robot"] else None
    folder = place if own["folder"] is None else Path(own["folder"])
    monitor(folder, _number(own, "port", port), own["host"] or HOST)


def _export(
    file: Path, run: Path | None, env: dict[str, Any] | None, against: str | None, seed: int
) -> None:
    from embodied.viewer.export.export import export, label, require_kind
    from embodied.viewer.launch import open_session

    require_kind(file)
    session = open_session(run, env, against)
    try:
        print(f"playing seed {seed} of {run or session.title}", flush=True)
        export(session, file, seed)
    finally:
        session.close()
    ends = ", ".join(
        f"{label(each)}: {each.episode.steps} steps, {OUTCOME[each.episode.success]}"
        for each in session.sessions
    )
    print(f"{file}  {file.stat().st_size / 1e6:.1f} MB  ({ends})", flush=True)


def _number(own: dict[str, str | None], name: str, default: int) -> int:
    value = own[name]
    if value is None:
        return default
    if not value.isdecimal():
        raise ConfigError(f"{name}={value} must be a number, for example {name}={default}")
    return int(value)


def _env(path: Path | None, words: list[str], folders: list[str]) -> dict[str, Any]:
    from embodied.compose import compose
    from embodied.core import checkpoint

    given = {}
    if path is not None and not (path / "meta" / "info.json").exists():
        file = checkpoint.find(path).parent.parent / "run.yaml"
        given = {"env/as_trained": read_run_settings(file)["env"]}
    words = [*words, "policy=null"]  # only the environment is composed
    return compose("eval", words, folders, given).node["env"]
