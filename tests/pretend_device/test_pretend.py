"""The pretended device keeps CUDA's rules, and counts what it says that it counts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import pretend_device
from tests.pretend_device.process import Call, on_device

__all__ = ["on_device"]
DEVICE = "pretend"
BOTH = "Expected all tensors to be on the same device, but found at least two devices"


def there(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=DEVICE)


def refused() -> dict[str, str]:
    """What each of these raises; CUDA's words."""
    x, cpu = there(3, 4), torch.ones(3, 4)
    index, mask = torch.tensor([0]), torch.ones(3, dtype=torch.bool)
    tried: dict[str, Callable[[], Any]] = {
        "add": lambda: x + cpu,
        "add in place": lambda: cpu.add_(x),
        "or": lambda: (x > 0) | (cpu > 0),
        "matmul": lambda: x @ cpu.T,
        "linear": lambda: nn.Linear(4, 2)(x),
        "cat": lambda: torch.cat([x, cpu]),
        "stack of scalars": lambda: torch.stack([x.sum(), cpu.sum()]),
        "where": lambda: torch.where(x > 0, x, cpu),
        "index_select": lambda: x.index_select(0, index),
        "index_copy": lambda: x.index_copy(0, index, cpu[:1]),
        "gather": lambda: x.gather(1, index[:, None]),
        "set by index": lambda: x.index_put_((index,), cpu[:1]),
        "cpu by device index": lambda: cpu[mask.to(DEVICE)],
        "numpy": lambda: x.numpy(),
        "cpu generator": lambda: torch.randn(2, device=DEVICE, generator=torch.Generator()),
        "device generator": lambda: torch.randn(2, generator=torch.Generator(DEVICE)),
        "cpu state": lambda: torch.Generator(DEVICE).set_state(torch.get_rng_state()),
    }
    found: dict[str, str] = {}
    for name, function in tried.items():
        try:
            function()
        except (RuntimeError, TypeError) as error:
            found[name] = str(error).splitlines()[0]
    return {name: found.get(name, "nothing") for name in tried}


def test_it_refuses_what_cuda_refuses(on_device: Call) -> None:
    found = on_device(refused)
    assert isinstance(found, dict)
    words = {
        "cpu by device index": "indices should be either on cpu or on the same device",
        "index_copy": "self, index and source expected to be in the same device",
        "numpy": "can't convert pretend:0 device type tensor to numpy. Use Tensor.cpu()",
        "cpu generator": "Expected a 'pretend' device type for generator but found 'cpu'",
        "cpu state": "RNG state is wrong size",
    }
    for name, line in found.items():
        assert words.get(name, BOTH) in line, f"{name}: {line}"


def allowed() -> None:
    x, scalar = there(3, 4), torch.tensor(2.0)
    assert (x * scalar).device.type == DEVICE and (scalar + x).device.type == DEVICE
    assert torch.where(x > 0, scalar, x).sum().item() == 24
    assert x[torch.tensor([0, 2])].shape == (2, 4)
    x[0, 1] = 3.0
    assert x.tolist()[0] == [1, 3, 1, 1]


def learnt(device: str) -> list[torch.Tensor]:
    """Weights after a few steps of Adam and what a saved copy of them answers, on the CPU."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    held = net[0].weight
    net.to(device)
    assert held is net[0].weight and held.device.type == device
    adam = torch.optim.Adam(net.parameters())
    for _ in range(3):
        x = torch.linspace(0, 1, 20, device=device).view(5, 4)
        (net(x)[:, 0] - x[:, 1]).square().mean().backward()
        adam.step()
        adam.zero_grad()
    file = io.BytesIO()
    torch.save(copy.deepcopy(net).state_dict(), file)
    file.seek(0)
    return list(torch.load(file, map_location="cpu", weights_only=True).values())


def same_as_cpu() -> None:
    for a, b in zip(learnt("cpu"), learnt(DEVICE), strict=True):
        assert torch.equal(a, b)


def views() -> None:
    x = there(3, 4)
    x[1:].mul_(2)
    x.T[0] = 7.0
    assert x.tolist() == [[7, 1, 1, 1], [7, 2, 2, 2], [7, 2, 2, 2]]
    grown = torch.empty(0, device=DEVICE)
    torch.cat([x[0], x[1]], out=grown)
    assert grown.tolist() == [7, 1, 1, 1, 7, 2, 2, 2]
    leaf = there(2).requires_grad_()
    (leaf.expand(3, 2)[1:] ** 2).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [4, 4]


def generators() -> None:
    module = torch.get_device_module(DEVICE)
    torch.manual_seed(3)
    state, first = module.get_rng_state(), torch.randn(3, device=DEVICE)
    cpu = torch.randn(3)
    assert not torch.equal(torch.randn(3, device=DEVICE), first)
    module.set_rng_state(state)
    assert torch.equal(torch.randn(3, device=DEVICE), first)
    torch.manual_seed(3)  # the device's draws do not move the CPU's generator
    assert torch.equal(torch.randn(3), cpu)
    own = torch.Generator(DEVICE).manual_seed(5)
    drawn = torch.randn(3, device=DEVICE, generator=own)
    module.manual_seed(5)
    assert torch.equal(torch.randn(3, device=DEVICE), drawn)


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "float": lambda x: float(x[0, 0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "set by mask": lambda x: x.index_put_((x > 0,), torch.ones(12, device=DEVICE)),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x[0].repeat_interleave(x[0].long()),
    "multinomial": lambda x: x.multinomial(1),
    "from the host": lambda x: torch.tensor([1.0], device=DEVICE),
    "cpu index": lambda x: x[torch.tensor([0])],
}
FREE: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda x: (x @ x.T).softmax(1).argmax(1),
    "random": lambda x: (torch.rand_like(x), torch.randint(9, (2,), device=DEVICE)),
    "select": lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int64, device=DEVICE)),
    "fill by mask": lambda x: x.masked_fill(x > 0, 2.0),
    "set a scalar": lambda x: x.__setitem__((0, 0), 2.0),
    "known repeats": lambda x: x[0].repeat_interleave(x[0].long(), output_size=4),
    "asynchronous copy": lambda x: x.to("cpu", non_blocking=True),
    "shape": lambda x: (len(x), x.shape, x.is_floating_point(), x.view(4, 3).T),
}


def counted() -> dict[str, int]:
    found: dict[str, int] = {}
    for name, function in (WAITS | FREE).items():
        x = there(3, 4)
        with pretend_device.watched() as traffic:
            function(x)
        found[name] = len(traffic.waits)
    return found


def test_it_counts_waits(on_device: Call) -> None:
    found = on_device(counted)
    assert found == dict.fromkeys(WAITS, 1) | dict.fromkeys(FREE, 0)


def moved() -> None:
    x = there(3)
    with pretend_device.watched() as traffic:
        (x + 1).cpu()
        torch.ones(2).to(DEVICE, non_blocking=True)
    assert (traffic.launches, traffic.to_host, traffic.to_device) == (1, 1, 1)
    with pretend_device.watched() as traffic:
        x[0].item()
    assert "tests/pretend_device/test_pretend.py" in traffic.report()
    with pretend_device.capturing():
        x.add_(1)
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            x.sum().item()
    assert torch.ones(2).pin_memory().is_pinned() and not torch.ones(2).is_pinned()


@pytest.mark.parametrize("check", [allowed, same_as_cpu, views, generators, moved])
def test_it_does_what_cuda_does(on_device: Call, check: Callable[[], None]) -> None:
    """What it allows, computes, shares, draws, counts and forbids."""
    on_device(check)
