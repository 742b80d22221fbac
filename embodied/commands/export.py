"""Export a policy to other formats; adopt one of LeRobot's."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from embodied.adopt.adopt import Options
from embodied.adopt.adopt import adopt as adopt_checkpoint
from embodied.adopt.give_back import give_back
from embodied.commands import require_at_least
from embodied.compose import allow_from, compose
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.export.c_header import write_header
from embodied.export.crazyflie import trained_on, write_crazyflie
from embodied.export.decision import Decision, Export, facts, write_onnx, write_torchscript
from embodied.policies.wrappers.translated import with_task


def adopt(args: argparse.Namespace) -> None:
    folder = Path(args.path)
    node = compose("adopt", args.words, args.config_dir).node
    for key in ("chunk", "steps"):
        if node[key] is not None:
            require_at_least(node, {key: 1})
    out = Path(node.pop("out") or Path("outputs") / folder.resolve().name)
    ignore = node.pop("ignore") or []
    if not isinstance(ignore, list):
        raise ConfigError(f"ignore={ignore} should be names of fields: ignore=[FIELD]")
    policy = adopt_checkpoint(folder, out, Options(**node, ignore=tuple(map(str, ignore))))
    say_adopted(policy, out, node.get("env") is not None)


def say_adopted(policy: object, out: Path, env: bool) -> None:
    assert isinstance(policy, Policy)
    millions = sum(p.numel() for p in policy.parameters()) / 1e6
    shape = list(policy.sample_noise(1).shape[1:])
    print(f"policy    {type(policy).__name__}, {millions:.1f} million parameters")
    print(f"chunk     {policy.chunk} steps of {policy.spec.act.size} values; noise {shape}")
    print(f"units     {'actions in [-1, 1]' if env else 'physical, as in the training data'}")
    if unread := checkpoint.read_about(out)["adopted"]["unread"]:
        print(f"left out  {', '.join(unread)}: LeRobot's policy does not read it")
    print(f"wrote     {out}")
    print(f"next      embodied {'eval' if env else 'serve'} {out}")


def export(args: argparse.Namespace) -> None:
    task = args.own["task"]
    if (args.to is None) == (args.lerobot is None):
        raise ConfigError("say where to write: --to DIR, or --lerobot DIR (a LeRobot checkpoint)")
    allow_from(args.words)
    if args.lerobot is not None:
        if task is not None:
            raise ConfigError("task= has no place here: LeRobot's policies hear their task")
        return _export_to_lerobot(Path(args.path), Path(args.lerobot))
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
    for each in made:
        size = f"{each.path.stat().st_size / 1000:,.0f} kB"
        found = "not compared" if each.difference is None else f"{each.difference:.1e}"
        print(f"wrote     {each.path} ({size})")
        print(f"          largest difference to PyTorch: {found} ({each.checked_by})")


def _export_to_lerobot(run: Path, folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--lerobot {folder} exists already: give another folder")
    give_back(checkpoint.load_policy(run), folder)
    print(f"wrote     {folder}: config.json, model.safetensors, processors")
    print("units     those of the adopted checkpoint; actions are not clipped")
    print(f"next      lerobot-eval --policy.path={folder} --env.type=NAME")


def inputs_of(decision: Decision) -> list[str]:
    kinds = [*decision.leaves.values(), None]
    shapes = [tuple(value.shape[1:]) for value in decision.example(1)]
    return [
        f"{name} {leaf.dtype if leaf else 'float32'}[{', '.join(['n', *map(str, shape)])}]"
        for name, leaf, shape in zip(decision.inputs, kinds, shapes, strict=True)
    ]
