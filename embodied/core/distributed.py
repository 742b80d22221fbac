"""Data-parallel training: processes with environments of their own train one set of parameters.

Data-parallel training as torchrun starts it (one process a core or GPU): every process computes
gradients of its own batch, optimisers step by their mean,

    g = (g_1 + ... + g_N) / N,

which for losses that are means is the gradient of the N batches as one. Parameters start equal and
stay equal. With one process every function here returns what it was given, at no cost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch import Tensor, nn

from embodied.moved import attributes

SEEDS = 1_000_003  # between processes: far from the seeds of rows and evaluations
_processes = 1


def rank() -> int:
    """Which of torchrun's processes this is, 0 without torchrun."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def world() -> int:
    """How many processes learn together, once `start` has been called."""
    return _processes


def start() -> int:
    """Meet the other processes, where torchrun started several; returns this one's rank."""
    global _processes
    if _processes > 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return rank()
    _processes = int(os.environ["WORLD_SIZE"])
    if _processes > 1:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        # The others wait for as long as the first one evaluates.
        wait = timedelta(hours=12)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=wait)
    return rank()


def stop() -> None:
    """Part from the others."""
    global _processes
    if _processes > 1:
        torch.distributed.destroy_process_group()
        _processes = 1


def own_seed(seed: int) -> int:
    """The seed of this process's worlds and draws: another one in each."""
    return seed + SEEDS * rank() if _processes > 1 else seed


@torch.no_grad()
def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace tensors of one type by their sums over the processes, in place, in one message."""
    if _processes == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    torch.distributed.all_reduce(flat)  # pyright: ignore[reportUnknownMemberType]
    at = 0
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()


@torch.no_grad()
def average(tensors: Sequence[Tensor]) -> None:
    """The same with means."""
    if _processes > 1:
        add_up(tensors)
        for tensor in tensors:
            tensor.div_(_processes)


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """`average` of the gradients, where there are any: before they are clipped."""
    if _processes > 1:
        average([p.grad for p in parameters if p.grad is not None])


def mean(value: float) -> float:
    """Of a number over the processes."""
    return _reduced(value, torch.distributed.ReduceOp.SUM) / _processes


def all_min(value: int) -> int:
    """Of a number over the processes: what all of them can do."""
    return int(_reduced(value, torch.distributed.ReduceOp.MIN))


def any_rank(flag: bool) -> bool:
    """Whether it is so in any process: they stop together or not at all."""
    return bool(_reduced(flag, torch.distributed.ReduceOp.MAX))


@torch.no_grad()
def broadcast(module: nn.Module) -> None:
    """Give every process the first one's parameters and buffers."""
    if _processes > 1:
        for tensor in module.state_dict().values():
            torch.distributed.broadcast(tensor, 0)


def _reduced(value: float, how: torch.distributed.ReduceOp.RedOpType) -> float:
    if _processes == 1:
        return value
    number = torch.tensor(float(value), dtype=torch.float64)
    torch.distributed.all_reduce(number, how)  # pyright: ignore[reportUnknownMemberType]
    return number.item()


__getattr__ = attributes(__name__)
