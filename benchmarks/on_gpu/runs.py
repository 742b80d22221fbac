"""Runs on the GPU: they train, evaluate, save and resume; steps a second; waits; the demo."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu.rows import Row, Scale, attempted
from embodied.compose import compose
from embodied.core.tensors import Tensors
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.logger import Log
from embodied.training.train import train
from embodied.training.trainer import Every, Trainer

CHECKED = (
    *("pendulum_sac", "pendulum_td3", "pendulum_ppo", "pendulum_flashsac", "pendulum_dsac_t"),
    *("pendulum_redq", "pendulum_td3_parallel", "pendulum_positions_ppo", "fr3_reach_goal"),
    *("two_gap_rnd", "quadrotor_ppo", "quadrotor_hover", "quadrotor_td3_parallel"),
)
"""Experiments that need no demonstrations: learners of both loops, environments on both devices."""
LOOPS: dict[str, tuple[str, ...]] = {
    "halfcheetah_sac": (),
    "halfcheetah_td3": (),
    "halfcheetah_sac, captured": ("learner.cuda_graph=true",),
    "quadrotor_ppo, 4096 envs": ("env.num_envs=4096", "learner.horizon=32"),
    "quadrotor_td3_parallel, 4096 envs": ("env.num_envs=4096", "data.utd_ratio=0.0005"),
    "maze_ued, 4096 envs": ("env.num_envs=4096", "env.device=cuda", "learner.batch_size=65536"),
}


def checks(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Each trains at debug size, evaluates, saves a checkpoint and is resumed."""
    names = CHECKED if len(scale.envs) > 1 else CHECKED[:1]
    for name in names:
        yield attempted(f"{name} resumes", "s", lambda n=name: trained(n, device))


def trained(name: str, device: torch.device) -> tuple[float, str]:
    """Seconds of a debug run and its resume."""
    began, folder = time.perf_counter(), Path("outputs") / "bench-gpu" / name
    shutil.rmtree(folder, ignore_errors=True)
    words = [f"experiment={name}", "size=debug", f"device={device}", f"out={folder}", "name=x"]
    node = compose("train", [*words, "eval_every=120"]).node
    train(node, Log(folder, silent=True))
    train(node | {"resume": str(folder), "steps": 360}, Log(folder, silent=True))
    shutil.rmtree(folder)
    return time.perf_counter() - began, "trained, evaluated, saved, resumed"


def loops(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Environment steps a second of whole training loops, updates included."""
    yield from (
        attempted(name, "env steps/s", lambda n=name, w=more: looping(n, w, device, scale))
        for name, more in LOOPS.items()
        if scale.backends != ("eager",) or not more
    )


def looping(
    name: str, more: tuple[str, ...], device: torch.device, scale: Scale
) -> tuple[float, str]:
    """Steps a second of a run past its warm-up."""
    components, trainer = started(name.partition(",")[0], more, device, scale)
    learner, updates = components.learner, [0]
    update = learner.update

    def counted(batch: Tensors) -> Tensors:
        updates[0] += 1
        return update(batch)

    learner.update = counted  # pyright: ignore[reportAttributeAccessIssue]
    before = trainer.step
    trainer.steps += scale.steps * stride(components)
    torch.accelerator.synchronize()
    began = time.perf_counter()
    components.loop.run(trainer)
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - began
    components.close()
    return (trainer.step - before) / seconds, f"{updates[0] / seconds:,.0f} updates/s"


def started(
    name: str, more: tuple[str, ...], device: torch.device, scale: Scale
) -> tuple[RunComponents, Trainer]:
    """A run after its warm-up and first updates."""
    folder = Path("outputs") / "bench-gpu" / "loop"
    words = [f"experiment={name}", f"device={device}", f"out={folder}", "name=loop", *more]
    node: dict[str, Any] = compose("train", words).node
    if node["data"]["regime"] == "off_policy":
        node["data"]["warmup_steps"] = 4 * int(node["env"].get("num_envs", 1))
    if len(scale.envs) == 1:
        node["env"]["num_envs"] = scale.envs[0]
    for part in ("policy", "learner"):
        node[part] |= {key: value for key, value in scale.shrink.items() if key in node[part]}
    components = RunComponents(read_config(node))
    first = max(scale.steps // 2, 8, 2 * components.learner.horizon) * stride(components)
    trainer = Trainer(
        Log(folder, silent=True), first, Every(0, 0, 0), lambda step: None, lambda step: None
    )
    components.loop.run(trainer)
    return components, trainer


def stride(components: RunComponents) -> int:
    """Environment steps of one vector step."""
    assert components.env is not None
    return components.env.num_envs


def waits(device: torch.device, scale: Scale) -> Iterator[Row]:
    """How often the host waits for the GPU in a vector step with its updates, by CUDA's own
    count."""
    if device.type != "cuda":
        yield Row("waits", note="only CUDA reports them")
        return
    names = ("quadrotor_ppo", "quadrotor_hover", "quadrotor_td3_parallel", "halfcheetah_sac")
    for name in names:
        yield attempted(f"waits, {name}", "a step", lambda n=name: waiting(n, device, scale))


def waiting(name: str, device: torch.device, scale: Scale) -> tuple[float, str]:
    """Waits in each vector step, and the lines of code where the most of them are."""
    components, trainer = started(name, (), device, scale)
    trainer.steps += scale.steps * stride(components)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            components.loop.run(trainer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    components.close()
    lines = [f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]
    often = sorted(set(lines), key=lines.count, reverse=True)[:3]
    return len(lines) / scale.steps, ", ".join(f"{lines.count(line)} at {line}" for line in often)


def demo(device: torch.device, scale: Scale) -> Iterator[Row]:
    """`embodied demo`: demonstrations, behaviour cloning, and what improves it."""
    few = ["steps=600", "episodes=6", "held_out=6", "num_envs=3"]
    size = few if len(scale.envs) == 1 else []
    yield attempted("embodied demo", "s", lambda: shown([*size, f"device={device}"]))


def shown(words: list[str]) -> tuple[float, str]:
    began, folder = time.perf_counter(), Path("outputs") / "bench-gpu" / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "embodied.cli", "demo", "--out", str(folder), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip() or f"exit status {ended.returncode}")
    return time.perf_counter() - began, "simulated on the CPU, learnt on the GPU"
