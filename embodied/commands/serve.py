"""Serve a policy to other processes, adopt one of LeRobot's, export one to other formats."""

from __future__ import annotations

import argparse
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from embodied.commands import require_at_least, require_folders, take, yaml_values
from embodied.core.bounds import Bound, Count, Positive
from embodied.core.build import ConfigError, parse

if TYPE_CHECKING:
    from embodied.core.policy import Policy
    from embodied.export.decision import Decision
    from embodied.serve.protocol import Offer
    from embodied.serve.server import Server


@dataclass(frozen=True)
class Settings:
    """Settings of `embodied serve`."""

    port: Annotated[int, Bound(0, 65535)] = 8000  # TCP port; 0: any free one
    host: str = "127.0.0.1"  # address to listen at; default: this machine only
    token: bool = True  # false: no token is needed, at a loopback address only
    token_file: str | None = None  # null: ~/.cache/embodied/serve/PORT.token, which is made
    connections: Count = 16  # clients at a time
    message_mb: Positive = 64.0  # largest request, MB
    device: str = "auto"  # torch device
    threads: Count = 1  # CPU threads
    chunks: Literal["guided", "hard"] | None = None  # real-time chunking of the policy; null: none


def run(args: argparse.Namespace) -> None:
    from embodied.compose import allow_from

    allow_from(args.words)
    path, settings = parsed(args.words)
    import torch

    from embodied.core import checkpoint
    from embodied.core.device import pick_device
    from embodied.policies.abilities import with_real_time_chunking

    torch.set_num_threads(settings.threads)
    saved = checkpoint.find(path)
    policy = checkpoint.load_policy(saved, device=pick_device(settings.device))
    if settings.chunks is not None:
        policy = with_real_time_chunking(policy, settings.chunks)
    with serving(policy, settings) as server:
        for line in lines(policy, saved, server, settings):
            print(line, flush=True)
        threading.Event().wait()  # until Ctrl-C


def parsed(words: list[str]) -> tuple[Path, Settings]:
    """The run to serve, and the settings; ConfigError."""
    runs = [word for word in words if "=" not in word or Path(word).exists()]
    if len(runs) != 1:
        raise ConfigError("name the run to serve: embodied serve RUN [port=8000]")
    require_folders(runs)
    given = yaml_values(word for word in words if word not in runs)
    given.pop("allow", None)
    return Path(runs[0]), parse(Settings, given, "serve")


def serving(policy: Policy, settings: Settings) -> Server:
    """The server of `policy`, which does not listen yet."""
    from embodied.serve.access import make_token
    from embodied.serve.policy_service import PolicyService
    from embodied.serve.server import Limits, Server

    token = make_token(token_path(settings)) if settings.token else None
    limits = Limits(int(settings.message_mb * 2**20), settings.connections)
    return Server(PolicyService(policy), settings.host, settings.port, token, limits)


def token_path(settings: Settings) -> Path:
    """The file of the access token."""
    from embodied.serve.access import token_file

    given = settings.token_file
    return token_file(settings.port) if given is None else Path(given).expanduser()


def lines(policy: Policy, saved: Path, server: Server, settings: Settings) -> list[str]:
    """What is served, where, and what to type next."""
    from embodied.serve.access import is_loopback
    from embodied.serve.policy_service import PolicyService

    assert isinstance(server.service, PolicyService)
    said = [
        f"  policy   {type(policy).__name__}, {saved}",
        f"  offers   {offered(server.service.offer)}",
        f"  address  {server.url}",
    ]
    if not settings.token:
        said.append("  token    none: every user of this machine may ask")
    else:
        path = token_path(settings)
        finds = " (clients of this user on this machine find it)"
        found = finds if settings.token_file is None and is_loopback(settings.host) else ""
        said.append(f"  token    {path}{found}")
    if not is_loopback(settings.host):
        said.append(
            "  note     the wire is not encrypted; better leave host out, and type on the other "
            f"machine: ssh -N -L {server.port}:127.0.0.1:{server.port} THIS_MACHINE"
        )
    return [*said, f"next: embodied eval {server.url} env=NAME (Ctrl-C ends the server)"]


def offered(offer: Offer) -> str:
    """Chunk, noise and features in words."""
    if offer.noise is None:
        noise = "noise that the server samples"
    else:
        noise = f"{'normal ' if offer.normal else ''}noise {list(offer.noise)}"
    return f"chunks of {offer.chunk}, {noise}, {offer.features or 'no'} features"


def adopt_command(args: argparse.Namespace) -> None:
    from embodied.compose import compose

    folder = Path(args.path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give one with config.json, model.safetensors")
    node = compose("adopt", args.words, args.config_dir).node
    for key in ("chunk", "steps"):
        if node[key] is not None:
            require_at_least(node, {key: 1})
    from embodied.adopt.adopt import Options, adopt

    out = Path(node.pop("out") or Path("outputs") / folder.resolve().name)
    ignore = node.pop("ignore") or []
    if not isinstance(ignore, list):
        raise ConfigError(f"ignore={ignore} should be names of fields: ignore=[FIELD]")
    policy = adopt(folder, out, Options(**node, ignore=tuple(map(str, ignore))))
    say_adopted(policy, out, node.get("env") is not None)


def say_adopted(policy: object, out: Path, env: bool) -> None:
    """Print what was adopted and what can be typed next."""
    from embodied.core import checkpoint
    from embodied.core.policy import Policy

    assert isinstance(policy, Policy)
    millions = sum(p.numel() for p in policy.parameters()) / 1e6
    shape = list(policy.sample_noise(1).shape[1:])
    print(f"policy    {type(policy).__name__}, {millions:.1f} million parameters")
    print(f"chunk     {policy.chunk} steps of {policy.spec.act.size} values; noise {shape}")
    print(f"units     {'actions in [-1, 1]' if env else 'physical, as in the training data'}")
    if unread := checkpoint.read_about(out)["adopted"]["unread"]:
        print(f"left out  {', '.join(unread)}: LeRobot's policy does not read it")
    print(f"wrote     {out}")
    if env:
        print(f"next      embodied eval {out}")
    else:
        print(f"next      embodied serve {out}")


def export_command(args: argparse.Namespace) -> None:
    from embodied.compose import allow_from

    task, words = take(args.words, "task")
    if unknown := [word for word in words if not word.startswith("allow=")]:
        raise ConfigError(f"{unknown[0]} has no place here: embodied export RUN --to DIR")
    require_folders([str(args.path)])
    if (args.to is None) == (args.lerobot is None):
        raise ConfigError("say where to write: --to DIR, or --lerobot DIR (a LeRobot checkpoint)")
    import torch

    from embodied.core import checkpoint
    from embodied.export.c_header import write_header
    from embodied.export.crazyflie import trained_on, write_crazyflie
    from embodied.export.decision import Decision, Export, facts, write_onnx, write_torchscript
    from embodied.policies.wrappers.translated import with_task

    allow_from(words)
    if args.lerobot is not None:
        if task is not None:
            raise ConfigError("task= has no place here: LeRobot's policies hear their task")
        to_lerobot(Path(args.path), empty_folder(args.lerobot))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = checkpoint.load_policy(args.path)
    decision = Decision(policy if task is None else with_task(policy, task))
    about = facts(decision, Path(args.path))
    folder = Path(args.to)
    if folder.is_file():
        raise ConfigError(f"--to {folder} is a file: give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Export] = []
    if args.onnx or not (args.header or args.torchscript or args.crazyflie):
        made.append(write_onnx(decision, about, folder / "policy.onnx"))
    if args.header:
        made.append(write_header(decision, about, folder / "policy.h"))
    if args.torchscript:
        made.append(write_torchscript(decision, about, folder / "policy.pt"))
    if args.crazyflie:
        made.append(write_crazyflie(decision, about, trained_on(Path(args.path)), folder))
    print(f"inputs    {', '.join(inputs_of(decision))}; noise: {about['noise']}")
    act = decision.policy.spec.act
    units = "in [-1, 1]" if act.is_unit else "in its own units"
    units = units if act.is_continuous else f"of {list(act.choices)} classes (0: a number)"
    shape = ", ".join(map(str, ("n", about["chunk"], *act.shape)))
    print(f"output    actions [{shape}] {units}")
    for export in made:
        size = f"{export.path.stat().st_size / 1000:,.0f} kB"
        found = "not compared" if export.difference is None else f"{export.difference:.1e}"
        print(f"wrote     {export.path} ({size})")
        print(f"          largest difference to PyTorch: {found} ({export.checked_by})")


def to_lerobot(run: Path, folder: Path) -> None:
    """Write the policy of `run` as a LeRobot checkpoint, and print where it is."""
    from embodied.adopt.give_back import give_back
    from embodied.core import checkpoint

    give_back(checkpoint.load_policy(run), folder)
    print(f"wrote     {folder}: config.json, model.safetensors, processors")
    print("units     those of the adopted checkpoint; actions are not clipped")
    print(f"next      lerobot-eval --policy.path={folder} --env.type=NAME")


def empty_folder(path: str) -> Path:
    """A folder to write a checkpoint to; ConfigError if there is something in it."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--lerobot {folder} exists already: give another folder")
    return folder


def inputs_of(decision: Decision) -> list[str]:
    """Every input with its type and shape."""
    kinds = [*decision.leaves.values(), None]
    shapes = [tuple(value.shape[1:]) for value in decision.example(1)]
    return [
        f"{name} {leaf.dtype if leaf else 'float32'}[{', '.join(['n', *map(str, shape)])}]"
        for name, leaf, shape in zip(decision.inputs, kinds, shapes, strict=True)
    ]
