"""Devices that torch finds and settings name, and their free memory; seeding, saving and forking
their generators."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied.core.build import ConfigError

WITHOUT_FLOAT64 = ("mps",)  # environments compute in float64


def accelerator() -> torch.device | None:
    """The type of GPU that torch finds on this machine ("cuda"); None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in WITHOUT_FLOAT64 else found


def pick_device(name: str) -> torch.device:
    """The torch device of `name`; "auto": the GPU of this process if there is one, else the CPU. A
    GPU without an index is the process's current one, so that devices can be compared. Raises
    ConfigError if this machine does not have it."""
    gpu = accelerator()
    if name == "auto":
        name = "cpu" if gpu is None else gpu.type
    kind, _, index = name.partition(":")
    known = ("cpu", "cuda") if gpu is None else ("cpu", gpu.type)
    if kind not in (*known, "cuda") or not (index or "0").isdigit():
        raise ConfigError(f"there is no device {name!r} (known: auto, cpu, cuda, cuda:1, ...)")
    if kind == "cpu":
        return torch.device("cpu")
    if gpu is None or gpu.type != kind:
        raise ConfigError(f"device={name}: torch finds no GPU here; use device=cpu")
    count = torch.accelerator.device_count()
    if index and int(index) >= count:
        raise ConfigError(f"device={name}: this machine has {count} GPU(s), counted from 0")
    return torch.device(kind, int(index) if index else torch.accelerator.current_device_index())


def device_of(module: torch.nn.Module) -> torch.device:
    """The device of the first parameter; the CPU without parameters, as where a server computes."""
    return next((each.device for each in module.parameters()), torch.device("cpu"))


def free_bytes(device: torch.device) -> int:
    """Bytes of `device` that this process may still take; on the CPU, and on a device that does not
    say how much it has, within the limit of its control group. A system that does not say how much
    is free counts all it has, and one that says neither (Windows) has no limit."""
    if device.type != "cpu" and hasattr(torch.get_device_module(device), "mem_get_info"):
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        if not hasattr(os, "sysconf"):
            return sys.maxsize
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, min(free, most - used + int(facts["inactive_file"])))
    except (OSError, ValueError, KeyError):  # no limit, or none that can be read
        return free


WORTH_A_LINE = 0.1  # share of what is there


def compared(what: str, needed: int, there: int, where: str, instead: str) -> str:
    """One line with the bytes that `what` needs and those that are `there`, in `where`; empty where
    it needs few. ConfigError with what to do `instead` if it cannot fit."""
    line = f"{what} needs {needed / 1e9:,.2f} GB, and {there / 1e9:,.2f} GB of {where} are there"
    if needed > there:
        raise ConfigError(f"{line}: {instead}")
    return line if needed > WORTH_A_LINE * there else ""


def replaced(node: Mapping[str, Any], key: str, old: Any, new: Any) -> dict[str, Any]:
    """The settings `node` with `key: old` replaced by `key: new`, at every depth."""
    made: dict[str, Any] = {}
    for name, value in node.items():
        inner = isinstance(value, dict)
        kept = new if name == key and value == old else value
        made[name] = replaced(value, key, old, new) if inner else kept  # pyright: ignore
    return made


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
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
    starts with `seed` (None: with the states as they are). `torch.manual_seed` seeds every device,
    so all have to be restored, whichever the block uses."""
    before = rng_state()
    try:
        if seed is not None:
            torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        yield
    finally:
        set_rng_state(before)
