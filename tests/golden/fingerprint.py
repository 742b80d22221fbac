"""Fingerprints of tensors: exact on the platform that recorded them, tolerant on any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
LIBRARIES = ("numpy", "mujoco", "gymnasium")
RTOL = 1e-3


def platform() -> dict[str, str]:
    """What has to be the same for numbers to be the same to the last bit."""
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": cpu_model(),
        **{name: version(name) for name in LIBRARIES},
    }


def cpu_model() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")


def digest(value: Tensor) -> str:
    """sha256 of one tensor: its type, its shape, its bytes."""
    plain = value.detach().cpu().contiguous()
    about = f"{plain.dtype} {tuple(plain.shape)} ".encode()
    return hashlib.sha256(about + plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def exact(values: Iterable[Tensor]) -> str:
    """sha256 of tensors whatever their order and their names."""
    return hashlib.sha256("".join(sorted(map(digest, values))).encode()).hexdigest()


def summary(values: Iterable[Tensor]) -> list[float]:
    """Number of tensors, of elements, of those not finite; of the others the sum, and the sum of
    absolute values."""
    flat = [value.detach().cpu().double().flatten() for value in values]
    whole = torch.cat(flat) if flat else torch.zeros(0)
    finite = whole[whole.isfinite()]
    numbers = (finite.sum().item(), finite.abs().sum().item())
    counts = (len(flat), whole.numel(), whole.numel() - finite.numel())
    return [*counts, *(float(f"{number:.9g}") for number in numbers)]


def agree(one: list[float], other: list[float]) -> bool:
    """Summaries of the same numbers as another processor computes them; sums may cancel, so both
    are compared on the scale of the absolute values."""
    slack = RTOL * max(abs(other[4]), 1e-6)
    close = all(abs(a - b) <= slack for a, b in zip(one[3:], other[3:], strict=True))
    return one[:3] == other[:3] and close


def figures(values: list[Tensor]) -> dict[str, Any]:
    return {"sha256": exact(values), "summary": summary(values)}


def compare(values: list[Tensor], then: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Fail unless values are those of the record `then` of the file `recorded`; one that was made
    anew elsewhere than the file has no sha256."""
    now = figures(values)
    if "sha256" in then and platform() == recorded["platform"]:
        assert now["sha256"] == then["sha256"], (now["summary"], then["summary"])
    assert agree(now["summary"], then["summary"]), (now["summary"], then["summary"])


def read(name: str) -> dict[str, Any]:
    """A file of records; without records where it has never been written."""
    file = FOLDER / name
    return json.loads(file.read_text()) if file.exists() else {"records": {}}


def write(name: str, records: Mapping[str, Any]) -> None:
    """A file of records, a line each, with the platform that they are of."""
    lines = [f"  {json.dumps(key)}: {json.dumps(records[key], sort_keys=True)}" for key in records]
    head = f'{{"platform": {json.dumps(platform(), sort_keys=True)},\n "records": {{\n'
    (FOLDER / name).write_text(head + ",\n".join(sorted(lines)) + "\n }\n}\n")
