"""Table of the functions that a reward program may call, by their torch and NumPy names.

NumPy names map to torch functions (`np.linalg.norm` to `torch.linalg.vector_norm`), and methods
(`x.norm(dim=-1)`) to the same functions. Other functions are not available.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DIM = frozenset({"dim", "keepdim"})
EITHER = {"axis": "dim", "keepdims": "keepdim", "a_min": "min", "a_max": "max"}


@dataclass(frozen=True)
class Function:
    """`ints`: positions of integer arguments (dimensions); `words`: allowed keyword arguments
    (NumPy's are translated first); `method`: whether it may be called as a method."""

    call: Callable[..., Any]
    ints: frozenset[int] = frozenset()
    words: frozenset[str] = frozenset()
    method: bool = True


def _largest(a: Tensor, b: Tensor | None = None) -> Tensor:
    return torch.max(a) if b is None else torch.maximum(*_both(a, b))


def _smallest(a: Tensor, b: Tensor | None = None) -> Tensor:
    return torch.min(a) if b is None else torch.minimum(*_both(a, b))


def _both(a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor]:
    """Both arguments as tensors on the same device; one may be a number."""
    device = next((x.device for x in (a, b) if isinstance(x, Tensor)), None)
    return torch.as_tensor(a, device=device), torch.as_tensor(b, device=device)


def _norm(x: Tensor, p: Any = 2.0, dim: Any = None, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x, 2.0 if p is None else p, dim, keepdim)


def _linalg_norm(x: Tensor, ord: Any = 2.0, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _norm(x, ord, dim, keepdim)


def _clamp(x: Tensor | float, min: Any = None, max: Any = None) -> Tensor:
    return torch.clamp(torch.as_tensor(x), min, max)


def _power(x: Tensor, n: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError("pow is of tensors")
    return torch.pow(x, n)


def _pure(call: Callable[..., Any]) -> Function:
    return Function(call)


def _along(call: Callable[..., Any], *words: str) -> Function:
    return Function(call, frozenset({1}), DIM | set(words))


_ELEMENTWISE = (
    "exp expm1 exp2 log log1p log2 log10 sqrt rsqrt square abs sign sin cos tan asin acos atan "
    "sinh cosh tanh sigmoid relu reciprocal floor ceil round trunc deg2rad rad2deg atan2 hypot "
    "fmod remainder logaddexp logical_and logical_or logical_not logical_xor clone detach"
)
_REDUCING = "sum mean prod std var any all amin amax"

TABLE: dict[str, Function] = {
    **{name: _pure(getattr(torch, name)) for name in _ELEMENTWISE.split()},
    **{name: _along(getattr(torch, name)) for name in _REDUCING.split()},
    "cumsum": _along(torch.cumsum),
    "softmax": _along(torch.softmax),
    "stack": Function(torch.stack, frozenset({1}), frozenset({"dim"}), method=False),
    "cat": Function(torch.cat, frozenset({1}), frozenset({"dim"}), method=False),
    "unsqueeze": Function(torch.unsqueeze, frozenset({1}), frozenset({"dim"})),
    "squeeze": Function(torch.squeeze, frozenset({1}), frozenset({"dim"})),
    "flatten": Function(torch.flatten, frozenset({1, 2})),
    "maximum": _pure(lambda a, b: torch.maximum(*_both(a, b))),
    "minimum": _pure(lambda a, b: torch.minimum(*_both(a, b))),
    "max": _pure(_largest),
    "min": _pure(_smallest),
    "clamp": Function(_clamp, words=frozenset({"min", "max"})),
    "where": Function(torch.where, method=False),
    "pow": _pure(_power),
    "lerp": _pure(torch.lerp),
    "norm": Function(_norm, frozenset({2}), DIM | {"p"}),
    "linalg.norm": Function(_linalg_norm, frozenset({2}), DIM | {"ord"}, method=False),
    "linalg.vector_norm": Function(_linalg_norm, frozenset({2}), DIM | {"ord"}, method=False),
    "cross": Function(torch.linalg.cross, words=frozenset({"dim"})),
    "zeros_like": Function(torch.zeros_like, method=False),
    "ones_like": Function(torch.ones_like, method=False),
    "full_like": Function(torch.full_like, method=False),
    "tensor": Function(torch.tensor, method=False),
    "float": Function(lambda x: x.float() if isinstance(x, Tensor) else float(x)),
    "bool": Function(lambda x: x.bool()),
    "nn.functional.softplus": Function(torch.nn.functional.softplus, method=False),
    "nn.functional.cosine_similarity": Function(
        torch.nn.functional.cosine_similarity, words=frozenset({"dim"}), method=False
    ),
}
SAME = {
    "absolute": "abs",
    "arctan2": "atan2",
    "arctan": "atan",
    "arcsin": "asin",
    "arccos": "acos",
    "arctanh": "atanh",
    "clip": "clamp",
    "concatenate": "cat",
    "concat": "cat",
    "power": "pow",
    "array": "tensor",
    "nn.functional.relu": "relu",
    "linalg.cross": "cross",
    "special.expit": "sigmoid",
}
CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
BUILTINS = frozenset({"abs", "min", "max", "float"})
MODULES = frozenset({"torch", "np", "numpy", "math"})


def find(name: str) -> str | None:
    """The table's name of a function written after `torch.` or `np.`; None if it is not allowed."""
    name = SAME.get(name, name)
    return name if name in TABLE else None
