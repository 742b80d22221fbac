"""Native code: C++ beside its PyTorch reference, compiled once per machine and called by ctypes.

No package is needed, only a C++ compiler (`CXX`, g++, clang++ or c++); without one the PyTorch
code runs. The libraries are kept in $XDG_CACHE_HOME/embodied/native (~/.cache/embodied/native),
named by a hash of the source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from embodied.core.files import cache_folder

HEADERS = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
SECONDS = 120  # for the compiler
FLAGS = (
    "-std=c++17",
    "-O3",
    "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)


class NativeError(Exception):
    """Native code is not available; the message says why."""


@cache
def load(source: Path) -> ctypes.CDLL:
    """The library made of the C++ file `source`; it is compiled at first use (2 to 3 seconds).

    Raises NativeError without a compiler, or with its last line if it fails.
    """
    compiler = find_compiler()
    library = folder() / f"{source.stem}-{_hash(source, compiler)}.so"
    try:
        if not library.exists():
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeError(f"{library} cannot be used: {error}") from error


def find_compiler() -> str:
    """The path of a C++ compiler; NativeError without one."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if path := shutil.which(name):
            return path
    raise NativeError(f"no C++ compiler was found ({wanted or ', '.join(COMPILERS)})")


def folder() -> Path:
    """Where compiled libraries are kept."""
    return cache_folder() / "native"


def address(tensor: torch.Tensor) -> int:
    """The address of a dense float32 or int64 CPU tensor; ValueError for another."""
    dense = tensor.is_contiguous() and tensor.device.type == "cpu"
    if not dense or tensor.dtype not in (torch.float32, torch.int64):
        raise ValueError(f"native code reads dense CPU tensors, not {tensor.dtype} {tensor.device}")
    return tensor.data_ptr()


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Compile into a file of its own first: several processes may start at once."""
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, made = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    command = [compiler, *FLAGS, "-I", str(HEADERS), "-o", made, str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise NativeError(f"{compiler} failed: {lines[-1]}")
        Path(made).replace(library)
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"{compiler} took longer than {SECONDS} s") from error
    finally:
        Path(made).unlink(missing_ok=True)


def _hash(source: Path, compiler: str) -> str:
    parts = [source.read_bytes(), *(path.read_bytes() for path in sorted(HEADERS.glob("*.h")))]
    parts += [f"{os.path.realpath(compiler)} {FLAGS} {processor()}".encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def processor() -> str:
    """What native code and its speed depend on: homes can be shared by several machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return f"{platform.platform()} {platform.processor()} {sorted(set(named))}"
