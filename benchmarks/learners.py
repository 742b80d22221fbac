"""Off-policy learners: updates per second against SB3 and plain PyTorch; replay sampling."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.command import main
from benchmarks.measure import (
    Block,
    Comparison,
    alone,
    compare,
    cpu_time,
    table,
    write_json,
)
from benchmarks.peers.plain import PlainSac, PlainTd3
from benchmarks.sac import ACT, BATCH, OBS, calling, filled, world
from embodied.buffers.augment import random_shift
from embodied.buffers.replay import ReplayBuffer
from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.learners.acceleration import accelerate
from embodied.learners.learner import Learner
from embodied.nn.kernels import Kernels, choose

STORED, HIDDEN = 100_000, (256, 256)
PICTURES = (256, 84, 84, 9)  # of DrQ: 256 stacks of three frames
POLICIES: dict[str, dict[str, Any]] = {
    "sac": {"_target_": "embodied.policies.gaussian.Gaussian"},
    "td3": {"_target_": "embodied.policies.deterministic.Deterministic"},
    "dsac_t": {"_target_": "embodied.policies.gaussian.Gaussian"},
    "flashsac": {"_target_": "embodied.policies.block_gaussian.BlockGaussian"},
}
CLASSES = {"sac": "Sac", "td3": "Td3", "dsac_t": "DsacT", "flashsac": "Flashsac"}


def run(
    out: Path | str = "bench", repeats: int = 5, device: torch.device | str = "cpu"
) -> list[Comparison]:
    """Measure all settings on one thread, print the table, write `out/learners.json`.

    Under two minutes on a CPU. On `device` "cuda" also compiled updates and CUDA graphs, and no SB3
    (its buffer copies every batch from the host, which is another comparison).
    """
    threads, device = torch.get_num_threads(), torch.device(device)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        rows = updates(repeats, device)
        rows += products(repeats) if device.type == "cpu" else []
        rows += [sampling(repeats, device), shifting(repeats, device)]
    finally:
        torch.set_num_threads(threads)
    table(rows, f"learners with replay, {device}, one thread")
    write_json(Path(out), "learners", rows)
    return rows


def updates(repeats: int, device: torch.device) -> list[Comparison]:
    """Updates including sampling, HalfCheetah's dimensions, 256 x 256, batch 256 (flashsac: its own
    settings)."""
    replay = filled(ReplayBuffer(STORED, device))
    size, plain = f"{HIDDEN[0]}x{HIDDEN[1]}, batch {BATCH}", {"sac": PlainSac, "td3": PlainTd3}
    rows = []
    for name, peer in plain.items():
        ours = updating(learner_for(name, device), replay)
        other = peer(OBS, ACT, HIDDEN, str(device))
        theirs = synchronised(calling(lambda: other.update(replay.sample(BATCH)), 30), device)  # noqa: B023
        rows.append(compare(ours, theirs, repeats, f"{name} against plain, {size}", "updates"))
        if device.type == "cpu":
            from benchmarks.peers import sb3

            row = f"{name} against SB3, {size}"
            theirs = sb3.updating(name, OBS, ACT, STORED, BATCH, 30, net_arch=list(HIDDEN))
            rows.append(compare(ours, theirs, repeats, row, "updates"))
    for name in POLICIES:
        if device.type == "cuda":
            rows += [faster(name, flag, replay, repeats) for flag in ("compile", "cuda_graph")]
        elif name not in plain:
            count = 4 if name == "flashsac" else 30
            learner = learner_for(name, device)
            ours = updating(learner, replay, count)
            row = f"{name}, batch {learner.batch_size}"
            rows.append(alone(ours, repeats, row, "updates"))
    return rows


def products(repeats: int) -> list[Comparison]:
    """The update with oneDNN's float32 product against PyTorch's; the first row's name says what a
    run chooses on this CPU."""
    device, chosen = torch.device("cpu"), choose(torch.device("cpu"))
    replay, rows = filled(ReplayBuffer(STORED, device)), []
    for name in ("sac", "td3"):
        update = updating(learner_for(name, device), replay, 10)
        sides = using("onednn", update), using("torch", update)
        row = f"{name}: oneDNN against PyTorch ({chosen.note})"
        rows.append(compare(*sides, repeats, row, "updates", clock=cpu_time))
    return rows


def using(product: str, block: Block) -> Block:
    """`block` with a float32 product of `embodied.nn.kernels`."""

    def inside() -> int:
        with Kernels(product).active():
            return block()

    return inside


def faster(name: str, flag: str, replay: ReplayBuffer, repeats: int) -> Comparison:
    """Updates with `flag` set against the same code without; notes the start-up seconds."""
    device = torch.device("cuda")
    fast, plain = learner_for(name, device, **{flag: True}), learner_for(name, device)
    started = time.perf_counter()
    for _ in range(10):  # every plan of steps is recorded by then
        fast.update(replay.sample(fast.batch_size))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    row = f"{name}, {flag} against eager"
    blocks = updating(fast, replay, 200), updating(plain, replay, 100)
    return replace(compare(*blocks, repeats, row, "updates"), notes={"start_seconds": seconds})


def learner_for(name: str, device: torch.device, **settings: object) -> Learner:
    """The learner with its default settings."""
    spec = world()
    node = {"_target_": f"embodied.learners.off_policy.{name}.{CLASSES[name]}", **settings}
    policy = build(POLICIES[name], Policy, spec=spec)
    return accelerate(build(node, Learner, policy=policy, spec=spec).to(device))


def updating(learner: Learner, replay: ReplayBuffer, count: int = 30) -> Block:
    block = calling(lambda: learner.update(replay.sample(learner.batch_size)), count)
    return synchronised(block, torch.device(replay.device))


def synchronised(block: Block, device: torch.device) -> Block:
    """`block`, followed by a GPU synchronisation."""

    def waited() -> int:
        count = block()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return count

    return waited


def sampling(repeats: int, device: torch.device) -> Comparison:
    """`sample(256)` from a million transitions against ten thousand: the ratio shows that the cost
    does not depend on the number stored (apart from CPU caches)."""
    large, small = filled(ReplayBuffer(1_000_000, device)), filled(ReplayBuffer(10_000, device))
    blocks: list[Callable[[], int]] = [
        synchronised(calling(lambda r=r: r.sample(BATCH), 3000), device) for r in (large, small)
    ]
    name = f"sample({BATCH}): 1,000,000 rows against 10,000"
    clock = cpu_time if device.type == "cpu" else time.perf_counter
    return compare(blocks[0], blocks[1], repeats, name, "samples", 0.75, clock)


def shifting(repeats: int, device: torch.device) -> Comparison:
    """Random shifts by up to 4 pixels against DrQ's implementation, `grid_sample` of padded
    floats."""
    pictures = torch.randint(256, PICTURES, dtype=torch.uint8, device=device)
    planes = pictures.permute(0, 3, 1, 2).contiguous()
    ours = synchronised(calling(lambda: random_shift(pictures, 4), 10), device)
    theirs = synchronised(calling(lambda: interpolated(planes, 4), 1), device)
    name = f"random shift of {PICTURES} against grid_sample"
    return compare(ours, theirs, repeats, name, "batches", 10.0)


def interpolated(planes: Tensor, pad: int) -> Tensor:
    """uint8 [n, C, H, W], each shifted by a random whole number of pixels, as float32."""
    n, _, height, width = planes.shape
    padded = functional.pad(planes.float(), (pad,) * 4, "replicate")
    size = torch.tensor([width + 2 * pad, height + 2 * pad], device=planes.device)
    lines = [torch.arange(length, device=planes.device) for length in (height, width)]
    y, x = torch.meshgrid(*lines, indexing="ij")
    moved = torch.randint(2 * pad + 1, (n, 1, 1, 2), device=planes.device)
    grid = (2 * (torch.stack([x, y], 2) + moved) + 1) / size - 1
    return functional.grid_sample(padded, grid, align_corners=False)


if __name__ == "__main__":
    main(run)
