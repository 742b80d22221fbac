"""Kernels: which code computes a run's updates on this CPU; the one home of that choice.

PyTorch's float32 matrix product is MKL's. oneDNN's is up to twice as fast on some CPUs that MKL
does not know (AMD with AVX-512), and PyTorch uses it if float32 products may be less exact
("medium"). On a CPU with bfloat16 units they then are less exact. So a test of some milliseconds
decides, once for each model of CPU.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core.build import ConfigError, shown
from embodied.core.files import cache_folder
from embodied.nn.native import processor

PRECISION = {"torch": "highest", "onednn": "medium"}
SIZE = 256  # of the test's matrices: the hidden layers and batches of SAC and TD3
PAIRS = 7
FASTER = 1.15  # at least, to be chosen
LESS_EXACT = 4.0  # times the error of torch's product, at most; bfloat16: thousands of times


@dataclass(frozen=True)
class Kernels:
    """`product`: the float32 matrix product, "torch" or "onednn"; `native`: learners may use native
    code (embodied.nn.native) that equals theirs up to rounding; `note`: why, for people."""

    product: str = "torch"
    native: bool = False
    note: str = "float32 product: PyTorch's"

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps, for exact resume."""
        return {"product": self.product, "native": self.native}

    @contextmanager
    def active(self) -> Generator[None]:
        """Use this product inside the `with` block, if it is not torch's own."""
        if self.product == "torch":
            yield
            return
        with _precision(self.product):
            yield


def choose(
    device: torch.device, deterministic: bool = False, saved: Mapping[str, Any] | None = None
) -> Kernels:
    """The kernels of a run on `device`.

    `deterministic`: PyTorch's own, as on every other machine. `saved`: of the checkpoint that is
    resumed, to go on exactly; the product only if it is exact on this machine.
    """
    if device.type != "cpu":
        return Kernels(note=f"PyTorch's, on {device}")
    if deterministic:
        return Kernels(note="PyTorch's only (deterministic=true)")
    if torch.get_float32_matmul_precision() != "highest":
        return Kernels(
            "torch", True, "float32 product: as set by torch.set_float32_matmul_precision"
        )
    if saved is None:
        return replace(pick_product(), native=True)
    product, native = saved.get("product"), saved.get("native")
    if product not in list(PRECISION) or not isinstance(native, bool):
        raise ConfigError(f"the checkpoint's kernels are damaged: {shown(dict(saved))}")
    wanted = Kernels(str(product), native, "as in the checkpoint")
    if wanted.product == "torch" or is_exact():
        return wanted
    return Kernels(
        native=wanted.native, note="float32 product: PyTorch's, oneDNN's is not exact here"
    )


def pick_product() -> Kernels:
    """The fastest exact float32 product, by a test (about 10 ms)."""
    if not torch.backends.mkldnn.is_available():
        return Kernels(note="float32 product: PyTorch's (it has no oneDNN)")
    if not is_exact():
        return Kernels(note="float32 product: PyTorch's (oneDNN's is not exact on this CPU)")
    ratio = speed_ratio()
    if ratio < FASTER:
        return Kernels(note=f"float32 product: PyTorch's (oneDNN's is {ratio:.2f} times as fast)")
    return Kernels("onednn", note=f"float32 product: oneDNN's ({ratio:.2f} times as fast)")


def is_exact() -> bool:
    """Whether oneDNN's product has the error of a float32 product."""
    a, b = _matrices()
    true = a.double() @ b.double()

    def error() -> float:
        return float(((a @ b).double() - true).abs().max())

    return _with("onednn", error) < LESS_EXACT * _with("torch", error)


@cache
def speed_ratio() -> float:
    """How many times as fast oneDNN's product is, as the first run on this CPU model measured it
    and kept it in the cache folder: where both are about as fast, two runs of one seed would differ
    in the last bits. Where that folder cannot be used, it is measured for this process."""
    system = f"{processor()} {torch.__version__} {torch.get_num_threads()} threads"
    name = hashlib.sha256(system.encode()).hexdigest()[:16]
    file = cache_folder() / "float32_product" / f"{name}.txt"
    try:
        if not file.exists():
            _keep(file, f"{_measured_ratio():.3f}")
        return float(file.read_text())
    except (OSError, ValueError):
        return _measured_ratio()


def _keep(file: Path, text: str) -> None:
    """Write `file` whole; another process that was first is right."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = file.with_suffix(f".{os.getpid()}")
    own.write_text(text)
    try:
        with suppress(FileExistsError):
            os.link(own, file)
    finally:
        own.unlink()


def _measured_ratio() -> float:
    """The lower quartile of interleaved pairs, so that a busy machine seldom chooses what an idle
    one would not."""
    a, b = _matrices()

    def seconds() -> float:
        start = _clock()
        torch.mm(a, b)
        return _clock() - start

    pairs = [(_with("torch", seconds), _with("onednn", seconds)) for _ in range(PAIRS + 1)]
    ratios = sorted(slow / max(fast, 1e-9) for slow, fast in pairs[1:])  # the first warms up
    return ratios[len(ratios) // 4]


def _clock() -> float:
    """The CPU time of this thread, which other processes do not change, if it computes alone."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _matrices() -> tuple[Tensor, Tensor]:
    a, b = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).unbind()
    return a, b


def _with(product: str, function: Callable[[], float]) -> float:
    with _precision(product):
        return function()


@contextmanager
def _precision(product: str) -> Generator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(PRECISION[product])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
