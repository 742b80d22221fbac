"""A GPU on the CPU: the torch device "pretend", for tests of what only a GPU would show.

It has CUDA's rules. Its tensors do not mix with those of the CPU, are not given to numpy, and draw
from generators of their own. It counts kernel launches, the times at which the host waits for it,
and copies in both directions. Its kernels are the CPU's, so values are real. What it does not have:
CUDA's timing, streams, graphs, limits of memory, and kernels that only CUDA lacks.

`register` compiles `device.cpp` (once per PyTorch version, some 15 s of g++) and has to come before
the first `backward` of the process; `process.on_device` is a process for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import backend_registration

NAME = "pretend"
SOURCE = Path(__file__).with_name("device.cpp")
LAUNCH, WAIT, TO_DEVICE, TO_HOST = range(4)
_library: list[ctypes.CDLL] = []


def register() -> torch.device:
    """Make the device known to torch in this process; returns it."""
    if not _library:
        file = compiled()
        backend_registration.rename_privateuse1_backend(NAME)
        torch.ops.load_library(str(file))
        _library.append(ctypes.CDLL(str(file)))
        torch._register_device_module(NAME, _module())
        backend_registration.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


def compiled() -> Path:
    """The shared library of `device.cpp`, in the user's cache folder."""
    root = Path(torch.__file__).parent
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "embodied-tests"
    file = cache / f"pretend-{key}.so"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / file.name
            include, lib = root / "include", root / "lib"
            command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", "-w", f"-I{include}"]
            command += [f"-I{include}/torch/csrc/api/include", str(SOURCE), "-o", str(made)]
            command += [f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
            subprocess.run(command, check=True)
            made.rename(file)
    return file


def _module() -> ModuleType:
    """What torch looks up as `torch.pretend`."""
    ops = torch.ops.pretend
    module = ModuleType(f"torch.{NAME}")
    found = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": nullcontext,
        "synchronize": lambda device=None: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
        "manual_seed": ops.manual_seed,
        "manual_seed_all": ops.manual_seed,
        "get_rng_state": lambda device=0: ops.rng_state(),
        "get_rng_state_all": lambda: [ops.rng_state()],
        "set_rng_state": lambda state, device=0: ops.set_rng_state(state),
        "set_rng_state_all": lambda states: ops.set_rng_state(states[0]),
    }
    for name, function in found.items():
        setattr(module, name, function)
    return module


@dataclass
class Traffic:
    """Counts of one `watched` block; `waits` holds the place of each wait, innermost frame last."""

    launches: int = 0
    to_device: int = 0
    to_host: int = 0
    waits: list[tuple[str, str]] = field(default_factory=list)

    def report(self) -> str:
        """The waits, by operation and place, most frequent first."""
        lines = (f"{n:5} {what}  {place}" for (what, place), n in Counter(self.waits).most_common())
        return "\n".join(lines)


@contextmanager
def watched() -> Iterator[Traffic]:
    """Count what happens on the device in this block."""
    traffic, library = Traffic(), _library[0]

    def happened(event: int, what: bytes) -> None:
        if event == WAIT:
            traffic.waits.append((what.decode().removeprefix("aten::"), _place()))

    listener = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)(happened)
    library.pretend_listen(listener)
    before = _counts()
    try:
        yield traffic
    finally:
        library.pretend_listen(None)
        launches, _, to_device, to_host = (b - a for a, b in zip(before, _counts(), strict=True))
        traffic.launches, traffic.to_device, traffic.to_host = launches, to_device, to_host


def _counts() -> list[int]:
    held = (ctypes.c_int64 * 4)()
    _library[0].pretend_counts(held)
    return list(held)


def _place() -> str:
    """The innermost lines of this repository that led here."""
    frames = [f for f in traceback.extract_stack() if "site-packages" not in f.filename]
    root = str(SOURCE.parents[2])
    ours = [f for f in frames if f.filename.startswith(root) and f.filename != __file__]
    return " < ".join(
        f"{Path(f.filename).relative_to(root)}:{f.lineno}" for f in reversed(ours[-3:])
    )


@contextmanager
def capturing() -> Iterator[None]:
    """As while a CUDA graph is captured: an operation that waits raises RuntimeError."""
    _library[0].pretend_forbid_waits(1)
    try:
        yield
    finally:
        _library[0].pretend_forbid_waits(0)
