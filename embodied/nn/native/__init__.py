"""Native code: C++ beside its PyTorch reference, compiled once per machine and called by ctypes.

No package is needed, only a C++ compiler (`CXX`, g++, clang++ or c++); without one the PyTorch
code runs. The libraries are kept in $XDG_CACHE_HOME/embodied/native (~/.cache/embodied/native),
named by a hash of the source, the compiler and the processor.

Networks of PyTorch as native code sees them (linear.h): their tensors and Adam's moments.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from embodied.nn.networks import Ensemble
from embodied.nn.optim import Adam

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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied" / "native"


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
    parts += [f"{os.path.realpath(compiler)} {FLAGS} {_processor()}".encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: homes can be shared by several machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return f"{platform.platform()} {platform.processor()} {sorted(set(named))}"


ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.Tanh, nn.ReLU)  # by their numbers in linear.h
NAMES = ("tanh", "relu")
Moments = Mapping[int, tuple[Tensor, Tensor]]
"""Mean and mean square of the gradients, by the `id` of the parameter."""
FLOAT = 4  # bytes


class Parameter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("square", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("rate", ctypes.c_int64),
    )


class Network(ctypes.Structure):
    _fields_ = (
        ("parameters", ctypes.POINTER(Parameter)),
        *((name, ctypes.c_int64) for name in ("count", "activation", "turned")),
    )


def moments(optimizers: Iterable[Adam]) -> Moments:
    """The moments of all parameters, after `Adam.prepare`."""
    return {id(p): found for adam in optimizers for p, found in adam.moments()}


def parameter(p: Tensor, known: Moments, rate: int) -> Parameter:
    """`rate`: the number of its learning rate. Without moments it is not trained."""
    shape = tuple(p.shape) if p.ndim == 2 else (1, p.numel())
    return Parameter(*_addresses(p, known), *shape, rate)


def _addresses(p: Tensor, known: Moments, offset: int = 0) -> list[int | None]:
    """Where `p` and its moments are (None: it has none), `offset` bytes from their beginnings."""
    parts = (p.detach(), *known.get(id(p), ()))
    return [address(part) + offset for part in parts] + [None] * (3 - len(parts))


def dense(net: nn.Sequential, known: Moments, rate: int) -> ctypes.Array[Parameter]:
    """The parameters of linear layers."""
    found = [parameter(p, known, rate) for p in net.parameters()]
    return (Parameter * len(found))(*found)


def network(net: nn.Sequential, known: Moments, rate: int) -> Network:
    """A network of linear layers."""
    array = dense(net, known, rate)
    return Network(array, len(array), activation_of(net), False)


def members(ensemble: Ensemble, known: Moments, rate: int) -> list[Network]:
    """The networks of an ensemble, whose parameters are [E, in, out]."""
    parameters = [p for pair in zip(ensemble.weights, ensemble.biases, strict=True) for p in pair]
    kind = NAMES.index(ensemble.activation)
    found: list[Network] = []
    for member in range(ensemble.n):
        parts = [
            Parameter(*_addresses(p, known, member * p[0].numel() * FLOAT), *p.shape[1:], rate)
            for p in parameters
        ]
        found.append(Network((Parameter * len(parts))(*parts), len(parts), kind, True))
    return found


def activation_of(net: nn.Sequential) -> int:
    """The number of its activation in linear.h."""
    return ACTIVATIONS.index(type(net[1])) if len(net) > 1 else 0


def plain(net: nn.Sequential) -> bool:
    """Whether a network is float32 layers with one supported activation between all of them."""
    linear, between = list(net)[::2], list(net)[1::2]
    right = all(
        isinstance(layer, nn.Linear) and layer.weight.dtype == torch.float32 for layer in linear
    )
    kinds = {type(layer) for layer in between}
    return right and len(kinds) <= 1 and kinds <= set(ACTIVATIONS)


def plain_members(ensemble: Ensemble) -> bool:
    """Whether an ensemble is float32 layers with a supported activation between all of them."""
    floats = all(p.dtype == torch.float32 for p in ensemble.parameters())
    return floats and not ensemble.layer_norm and ensemble.activation in NAMES
