"""Small runs on the pretended device, of any parts: train, evaluate, save, resume."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.build import parse
from embodied.core.tensors import Tensors
from embodied.datasets.collect import CollectConfig, collect
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.logger import Log
from embodied.training.train import train
from embodied.training.trainer import Every, Trainer
from tests import pretend_device

HALF, WHOLE = 96, 192  # environment steps
SMALL: dict[str, Any] = {"hidden": [16, 16], "width": 16, "batch_size": 8, "horizon": 6}
SMALL |= {"epochs": 2, "critics": 2, "channels": [8, 16], "segment": 5, "agents": 4}


def shrunk(node: dict[str, Any]) -> dict[str, Any]:
    """A policy's or learner's settings with small networks and batches, inner ones too."""
    inner = {k: shrunk(v) if isinstance(v, dict) else v for k, v in node.items()}
    return {k: SMALL.get(k, v) if v is not None else v for k, v in inner.items()}


def run_node(folder: Path, *words: str) -> dict[str, Any]:
    """The settings of a short run, from words as on the command line, on the pretended device."""
    fixed = ["size=debug", "device=pretend", f"out={folder}", "name=x", "save_every=0"]
    node = compose("train", [*words, *fixed]).node
    for part in ("policy", "learner"):
        if node.get(part) is not None:
            node[part] = shrunk(node[part])
    node |= {"steps": WHOLE, "log_every": 48, "eval_every": 0}
    node["eval"] |= {"episodes": 1, "num_envs": 1}
    if node["data"]["regime"] == "off_policy":
        node["data"] |= {"warmup_steps": 48, "utd_ratio": 0.1}
        node["data"] |= {"pretrain_steps": min(4, node["data"].get("pretrain_steps", 0))}
    elif node["data"]["regime"] == "offline":
        node["steps"] = 8
    if node["demos"] is None:
        node["demo_episodes"] = None
    node["env"]["num_envs"] = 4
    if "horizon" in node["env"]:
        node["env"]["horizon"] = 20
    return node


@cache
def demonstrations(env: str, folder: Path) -> Path:
    """A few random episodes of `env`, on the CPU."""
    out = folder / f"demos-{env}"
    made = compose("train", [f"env={env}", "policy=gaussian", "learner=sac", "size=debug"]).node
    short = {"horizon": 20} if "horizon" in made["env"] else {}
    settings = {"env": made["env"] | {"num_envs": 4} | short, "episodes": 4, "out": str(out)}
    settings |= {"demonstrator": {"_target_": "embodied.policies.random.Random"}, "num_envs": 4}
    settings |= {"success_only": False, "images": "png"}
    collect(parse(CollectConfig, settings, "collect"), lambda kept, played: None)
    return out


@cache
def base_run(env: str, policy: str, folder: Path) -> Path:
    """A run of `policy`, cloned from demonstrations, on the CPU: what is fine-tuned."""
    out = folder / f"base-{env}-{policy}"
    words = [f"env={env}", f"policy={policy}", "learner=imitate", "policy.chunk=2"]
    node = run_node(out, *words, f"demos={demonstrations(env, folder)}", "device=cpu")
    return train(node | {"device": "cpu", "steps": 4}, Log(out, silent=True))


def run(node: dict[str, Any]) -> Path:
    return train(node, Log(Path(node["out"]), silent=True))


def weights(folder: Path) -> Tensors:
    return checkpoint.load_state(folder, "learner")["module"]


def resumed(node: dict[str, Any]) -> None:
    """Half a run, and its resume; what they leave can be loaded without the device."""
    folder, steps = Path(node["out"]), node["steps"]
    run(node | {"steps": steps // 2})
    run(node | {"resume": str(folder)})
    policy = checkpoint.load_policy(folder)
    assert all(p.device.type == "cpu" for p in policy.parameters())
    assert all(torch.isfinite(p).all() for p in policy.parameters())


def steps_of(node: dict[str, Any], warm: int, steps: int) -> tuple[pretend_device.Traffic, int]:
    """What happens in `steps` vector steps after `warm` of them, and the updates among them."""
    components = RunComponents(read_config(node))
    log, every = Log(Path(node["out"]), silent=True), Every(0, 0, 0)
    stride, learner = node["env"]["num_envs"], components.learner
    trainer = Trainer(log, warm * stride, every, lambda step: None, lambda step: None)
    components.loop.run(trainer)
    updates, update = [0], learner.update

    def counted(batch: Tensors) -> Tensors:
        updates[0] += 1
        return update(batch)

    learner.update = counted
    trainer.steps = (warm + steps) * stride
    with pretend_device.watched() as traffic:
        components.loop.run(trainer)
    return traffic, updates[0]
