"""Look at a run, or at a robot at work, in your browser: in 3D, with what it plans."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from embodied.commands import add_overrides, take
from embodied.core.build import ConfigError

ROBOT = "robot"  # a word that is no run
WATCHING = ("port", "host", "folder")
SAID = {True: "success", False: "no success", None: "success not known"}


def add(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser, "a RUN or a checkpoint; env=NAME: a world; robot: an arm at work; port=N")
    parser.add_argument(
        "--port", type=int, default=8080, help="as port=N: on localhost (default: 8080)"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="write one page about several RUNs: curves, success, films (out=compare.html)",
    )
    parser.epilog = (
        "examples:\n"
        "  embodied view outputs/clone\n"
        "  embodied view outputs/steered against=outputs/clone   two policies, the same starts\n"
        "  embodied view outputs/steered against=demonstrator seed=3 export=replay.html\n"
        "  embodied view outputs/steered export=film.mp4         or film.gif\n"
        "  embodied view outputs/demos episode=3                  what was recorded\n"
        "  embodied view --compare outputs/clone outputs/steered out=compare.html\n"
        "  embodied view outputs/clone env.task=push port=8081\n"
        "  embodied view outputs/clone host=0.0.0.0               for others, with a token\n"
        "  embodied view env=fr3_insert\n"
        "  embodied view robot                                    what embodied deploy does now"
    )


def run(args: argparse.Namespace) -> None:
    from embodied.viewer import serve
    from embodied.viewer.launch import HOST

    own, given = _own(args.words)
    if given == [ROBOT]:
        return _watch(own, args.port)
    if own["folder"] is not None:
        raise ConfigError("folder= is a robot's: embodied view robot folder=DIR")
    if args.compare:
        return _compare([Path(word) for word in given], Path(own["out"] or "compare.html"))
    runs = [word for word in given if "=" not in word or Path(word).exists()]
    words = [word for word in given if word not in runs]
    if len(runs) > 1 or not given:
        raise ConfigError("say what to view: embodied view RUN, or embodied view env=NAME")
    path = Path(runs[0]) if runs else None
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


def _watch(own: dict[str, str | None], port: int) -> None:
    from embodied.viewer.launch import HOST
    from embodied.viewer.robot.app import watch

    others = [name for name in own if own[name] is not None and name not in WATCHING]
    if others:
        raise ConfigError(f"{others[0]}= is not for a robot at work, which is only watched")
    folder = None if own["folder"] is None else Path(own["folder"])
    watch(folder, _number(own, "port", port), own["host"] or HOST)


def _export(
    file: Path, run: Path | None, env: dict[str, Any] | None, against: str | None, seed: int
) -> None:
    from embodied.viewer.export.export import export, require_kind
    from embodied.viewer.launch import open_session

    require_kind(file)
    session = open_session(run, env, against)
    try:
        print(f"playing seed {seed} of {run or session.title}", flush=True)
        export(session, file, seed)
    finally:
        session.close()
    ends = ", ".join(
        f"{each.episode.who}: {each.episode.steps} steps, {SAID[each.episode.success]}"
        for each in session.both
    )
    print(f"{file}  {file.stat().st_size / 1e6:.1f} MB  ({ends})", flush=True)


def _compare(folders: list[Path], file: Path) -> None:
    from embodied.viewer.export.compare_runs import compare

    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a run folder: embodied view --compare RUN RUN")
    print(f"{compare(folders, file)}  {file.stat().st_size / 1e6:.1f} MB", flush=True)


def _own(words: list[str]) -> tuple[dict[str, str | None], list[str]]:
    """The values of this command's own settings (None: not given), and the other words."""
    own: dict[str, str | None] = {}
    for name in ("port", "seed", "episode", "against", "export", "out", "host", "folder"):
        own[name], words = take(words, name)
    return own, words


def _number(own: dict[str, str | None], name: str, default: int) -> int:
    value = own[name]
    if value is None:
        return default
    if not value.isdecimal():
        raise ConfigError(f"{name}={value} should be a number, such as {name}={default}")
    return int(value)


def _env(path: Path | None, words: list[str], folders: list[str]) -> dict[str, Any]:
    """The environment that `words` say, starting from that of the run."""
    from embodied.compose import compose
    from embodied.core import checkpoint

    words = [*words, "policy=null"]  # only the world is asked for
    if path is None:
        return compose("eval", words, folders).node["env"]
    if (path / "meta" / "info.json").exists():
        return compose("eval", words, folders).node["env"]
    file = checkpoint.find(path).parent.parent / "run.yaml"
    trained = yaml.safe_load(file.read_text())["env"]
    return compose("eval", words, folders, {"env/as_trained": trained}).node["env"]
