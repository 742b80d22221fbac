"""Seed, save, restore and fork the random generators of training, on every device."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from embodied.core.device import accelerator


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy and random."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]


def rng_state() -> dict[str, Any]:
    """The states of torch's default generators of the CPU and, once they are used, of all GPUs, as
    CPU tensors."""
    states: list[torch.Tensor] = []
    if (gpu := accelerator()) is not None and (module := torch.get_device_module(gpu)):
        states = module.get_rng_state_all() if module.is_initialized() else []
    return {"torch": torch.get_rng_state(), "gpu": list(states)}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states that `rng_state` returned; those of GPUs as far as this machine has them
    (a run may go on where there are fewer)."""
    torch.set_rng_state(state["torch"])
    gpu = accelerator()
    if gpu is not None:
        module = torch.get_device_module(gpu)
        for index, each in enumerate(state["gpu"][: torch.accelerator.device_count()]):
            module.set_rng_state(each, index)


@contextmanager
def forked(seed: int | None = None) -> Generator[None]:
    """Restore torch's default generators, of the CPU and of all GPUs, after this block, which
    starts with `seed` (None: with the states as they are).

    `torch.manual_seed` seeds every device, so all have to be restored, whichever the block uses.
    """
    before = rng_state()
    try:
        if seed is not None:
            torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        yield
    finally:
        set_rng_state(before)
