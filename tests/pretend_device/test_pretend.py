"""Tests on the pretended device would see nothing if it neither refused nor counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests import pretend_device
from tests.pretend_device.process import Call, on_device

__all__ = ["on_device"]
REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "add": (lambda x: x + torch.ones(3, 4), "on the same device"),
    "linear": (nn.Linear(4, 2), "on the same device"),
    "index": (lambda x: x.index_select(0, torch.tensor([0])), "on the same device"),
    "numpy": (lambda x: x.numpy(), "can't convert pretend:0 device type tensor"),
    "generator": (lambda x: x.normal_(generator=torch.Generator()), "'pretend' device type"),
}
WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "cpu": lambda x: x.cpu(),
    "mask": lambda x: x[x > 0],
    "from the host": lambda x: torch.tensor([1.0], device="pretend"),
    "cpu index": lambda x: x[torch.tensor([0])],
}
FREE: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda x: (x @ x.T).softmax(1).argmax(1),
    "random": lambda x: torch.rand_like(x),
    "asynchronous copy": lambda x: x.to("cpu", non_blocking=True),
}


def tried() -> dict[str, int]:
    x, found = torch.ones(3, 4, device="pretend"), dict[str, int]()
    for act, words in REFUSED.values():
        with pytest.raises((RuntimeError, TypeError), match=words):
            act(x)
    for name, act in (WAITS | FREE).items():
        with pretend_device.watched() as traffic:
            act(x)
        found[name] = len(traffic.waits)
    with pretend_device.capturing(), pytest.raises(RuntimeError, match="stream is capturing"):
        x.sum().item()
    return found


def test_it_refuses_and_counts_as_cuda_does(on_device: Call) -> None:
    assert on_device(tried) == dict.fromkeys(WAITS, 1) | dict.fromkeys(FREE, 0)
