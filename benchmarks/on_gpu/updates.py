"""Updates per second of learners at their papers' sizes, eager, compiled and captured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import ppo
from benchmarks.on_gpu.rows import Row, Scale, attempted, rate, shrunk
from benchmarks.sac import filled, world
from embodied.buffers.replay import ReplayBuffer
from embodied.core import tensors as tt
from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.learners.acceleration import accelerate
from embodied.learners.learner import Learner

OFF_POLICY = "embodied.learners.off_policy"
GAUSSIAN: dict[str, Any] = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [256, 256]}
DETERMINISTIC: dict[str, Any] = {"_target_": "embodied.policies.deterministic.Deterministic"}
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sac": (
        GAUSSIAN,
        {"_target_": f"{OFF_POLICY}.sac.Sac", "hidden": [256, 256], "batch_size": 256},
    ),
    "td3": (
        DETERMINISTIC | {"hidden": [256, 256]},
        {"_target_": f"{OFF_POLICY}.td3.Td3", "hidden": [256, 256], "batch_size": 256},
    ),
    "flashsac": (
        {"_target_": "embodied.policies.block_gaussian.BlockGaussian", "width": 128},
        {"_target_": f"{OFF_POLICY}.flashsac.Flashsac", "width": 256, "batch_size": 2048},
    ),
    "fasttd3": (
        DETERMINISTIC | {"hidden": [512, 256, 128]},
        {
            "_target_": f"{OFF_POLICY}.td3.Td3",
            "hidden": [1024, 512, 256],
            "batch_size": 32768,
            "atoms": 101,
            "values": [-250, 250],
            "target_delay": 1,
        },
    ),
}
"""Policy and learner by name, with the batches and widths of the papers (FlashSAC's and FastTD3's
for thousands of environments), on HalfCheetah's dimensions."""


def off_policy(name: str, device: torch.device, scale: Scale) -> Iterator[Row]:
    """Updates with their sampling, one row for each way to run them."""
    replay = filled(ReplayBuffer(scale.stored, device))

    def measure(backend: str) -> tuple[float, str]:
        learner, started = learner_for(name, backend, scale).to(device), time.perf_counter()
        for _ in range(10):  # compiled and recorded by then
            metrics = learner.update(replay.sample(learner.batch_size))
        torch.accelerator.synchronize()
        seconds = time.perf_counter() - started
        require_finite(metrics)
        per_second = rate(lambda: learner.update(replay.sample(learner.batch_size)), scale.calls)
        return per_second, f"batch {learner.batch_size}, first ten {seconds:.1f} s"

    yield from (
        attempted(f"{name}, {backend}", "updates/s", lambda b=backend: measure(b))
        for backend in scale.backends
    )


def learner_for(name: str, backend: str, scale: Scale) -> Learner:
    torch.manual_seed(0)
    policy, learner = SIZES[name]
    flags = {} if backend == "eager" else dict.fromkeys(backend.split("+"), True)
    spec = world()
    made = build(shrunk(policy, scale), Policy, spec=spec)
    node = {**shrunk(learner, scale), **flags}
    return accelerate(build(node, Learner, policy=made, spec=spec))


def on_policy(device: torch.device, scale: Scale) -> Iterator[Row]:
    """PPO's minibatches: 2,048 decisions, 10 epochs, minibatches of 64."""
    epochs = scale.shrink.get("epochs", ppo.EPOCHS)
    torch.manual_seed(0)
    batch = tt.to(ppo.batch_of(), device)
    minibatches = ppo.HORIZON * ppo.ROWS * epochs // ppo.BATCH

    def measure(backend: str) -> tuple[float, str]:
        flags = {} if backend == "eager" else dict.fromkeys(backend.split("+"), True)
        learner = accelerate(ppo.learner_for(world(), epochs=epochs, **flags).to(device))
        for _ in range(3):
            metrics = learner.update(batch)
        require_finite(metrics)
        each = rate(lambda: learner.update(batch), max(scale.calls // 50, 1))
        return each * minibatches, f"minibatches of {ppo.BATCH}"

    yield from (
        attempted(f"ppo, {backend}", "minibatches/s", lambda b=backend: measure(b))
        for backend in scale.backends
    )


def require_finite(metrics: tt.Tensors) -> None:
    """ValueError if an update's metrics are not finite."""
    wrong = [name for name, value in metrics.items() if not bool(value.isfinite())]
    if wrong:
        raise ValueError(f"not finite after the first updates: {', '.join(wrong)}")
