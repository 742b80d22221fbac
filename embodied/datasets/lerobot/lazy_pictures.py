"""LazyPictures: a tensor of pictures [N, H, W, C] that are decoded when they are used.

Choosing rows (`index_select`, a slice, an index) and concatenation give another LazyPictures, which
costs eight bytes a row. Every other operation decodes the rows and works on an ordinary tensor;
`load` does so for a whole batch at once, which is the fastest way. So code that only moves
transitions about need not know that their pictures are still in films.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.pictures import FrameCache, Held, Joined, Pictures, read
from embodied.datasets.lerobot.schema import DatasetError

aten = torch.ops.aten


class LazyPictures(Tensor):
    """Rows `rows` [N] of `pictures`, on `device` once they are loaded. Operations decode at most
    `limit` bytes: beyond that they raise a DatasetError. `load` decodes what it is asked for."""

    pictures: Pictures
    rows: np.ndarray
    limit: int

    @staticmethod
    def __new__(
        cls: type[LazyPictures],
        pictures: Pictures,
        rows: np.ndarray,
        limit: int,
        device: torch.device | str = "cpu",
    ) -> LazyPictures:
        make = torch.Tensor._make_wrapper_subclass  # pyright: ignore
        size = (len(rows), *pictures.shape)
        self: LazyPictures = make(cls, size, dtype=torch.uint8, device=torch.device(device))
        self.pictures, self.rows, self.limit = pictures, rows, limit
        return self

    @classmethod
    def of(cls, pictures: Pictures, limit: int) -> LazyPictures:
        """All of `pictures`."""
        return cls(pictures, np.arange(len(pictures)), limit)

    def at(self, rows: np.ndarray, device: torch.device | str | None = None) -> LazyPictures:
        """The same pictures at other `rows` or for another device."""
        return LazyPictures(self.pictures, rows, self.limit, device or self.device)

    def load(self) -> Tensor:
        """The decoded pictures."""
        return read([(self.pictures, self.rows)])[0].to(self.device)

    def require_room(self) -> None:
        """DatasetError if these are more pictures than `limit`."""
        size = len(self.rows) * int(np.prod(self.pictures.shape, dtype=int))
        if size > self.limit:
            raise DatasetError(
                f"{len(self.rows):,} pictures are {size / 1e6:,.0f} MB when decoded, which this "
                f"use of a dataset needs at once (at most {self.limit / 1e6:,.0f} MB); read fewer "
                "episodes (demo_episodes=N), or embodied demos split"
            )

    def numpy(self, *, force: bool = False) -> np.ndarray:
        self.require_room()
        return self.load().numpy(force=force)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LazyPictures({list(self.shape)}, device={self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lazy = _LAZY.get(func)
        if lazy is not None:
            result = lazy(*args, **kwargs)
            if result is not None:
                return result
        found = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, LazyPictures)]
        for one in found:
            one.require_room()
        loaded = dict(zip(map(id, found), load_all(found), strict=True))
        args, kwargs = tree_map_only(LazyPictures, lambda one: loaded[id(one)], (args, kwargs))
        return func(*args, **(kwargs or {}))


def load_all(all_: Sequence[LazyPictures]) -> list[Tensor]:
    """Decode several at once: a picture that two of them need is decoded once."""
    loaded = read([(one.pictures, one.rows) for one in all_])
    return [value.to(one.device) for value, one in zip(loaded, all_, strict=True)]


def load(rows: Tensors) -> Tensors:
    """`rows` with ordinary tensors only."""
    lazy = {key: value for key, value in rows.items() if isinstance(value, LazyPictures)}
    return {**rows, **dict(zip(lazy, load_all(list(lazy.values())), strict=True))} if lazy else rows


def _same(one: LazyPictures, *args: Any, **kwargs: Any) -> LazyPictures | None:
    return one.at(one.rows)


def _to_copy(one: LazyPictures, **kwargs: Any) -> LazyPictures | None:
    if kwargs.get("dtype") not in (None, torch.uint8):
        return None
    return one.at(one.rows, kwargs.get("device"))


def _index_select(one: LazyPictures, dim: int, index: Tensor) -> LazyPictures | None:
    return one.at(one.rows[index.cpu().numpy()]) if dim == 0 else None


def _slice(
    one: LazyPictures, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyPictures | None:
    return one.at(one.rows[start:end:step]) if dim == 0 else None


def _select(one: LazyPictures, dim: int, index: int) -> Tensor | None:
    return one.at(one.rows[index : index + 1 or None]).load()[0] if dim == 0 else None


def _index(one: Tensor, index: Sequence[Tensor | None]) -> LazyPictures | None:
    first = index[0]
    if not isinstance(one, LazyPictures) or len(index) != 1 or first is None or first.ndim != 1:
        return None
    return one.at(one.rows[first.cpu().numpy()])


def _cat(all_: Sequence[Tensor], dim: int = 0) -> LazyPictures | None:
    lazy = next((one for one in all_ if isinstance(one, LazyPictures)), None)
    alike = all(one.dtype == torch.uint8 and one.shape[1:] == all_[0].shape[1:] for one in all_)
    if lazy is None or dim != 0 or not alike:
        return None
    views = [_Chosen(one) if isinstance(one, LazyPictures) else _held(one) for one in all_]
    joined = Joined(views)
    return LazyPictures(joined, np.arange(len(joined)), lazy.limit, lazy.device)


def _held(pictures: Tensor) -> Held:
    return Held(tuple(pictures.shape[1:]), FrameCache(0), pictures.cpu().numpy())


class _Chosen:
    """The rows of a LazyPictures as `Pictures`."""

    def __init__(self, lazy: LazyPictures) -> None:
        self.lazy, self.shape = lazy, lazy.pictures.shape

    def __len__(self) -> int:
        return len(self.lazy.rows)

    def parts(self, rows: np.ndarray) -> Any:
        return self.lazy.pictures.parts(self.lazy.rows[rows])


_LAZY: dict[Any, Callable[..., Tensor | None]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _to_copy,
    aten.index_select.default: _index_select,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    aten.cat.default: _cat,
}
