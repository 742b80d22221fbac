"""Data-parallel training: several processes, each with its own environments, train one policy.

torchrun starts one process per core or GPU. Every process computes the gradient of its own batch,
and optimisers use the mean gradient,

    g = (g_1 + ... + g_N) / N,

which, for losses that are means, is the gradient of the N batches together. Parameters start equal
and stay equal. With one process every function here returns its argument.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch import Tensor, nn

SEEDS = 1_000_003  # seed offset between processes, far from those of envs and evaluations
_processes = 1


def rank() -> int:
    """The rank of this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def world() -> int:
    """The number of processes (world size), after `start` was called."""
    return _processes


def start() -> int:
    """Initialise the process group if torchrun started several processes; returns the rank."""
    global _processes
    if _processes > 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return rank()
    _processes = int(os.environ["WORLD_SIZE"])
    if _processes > 1:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        # Long timeout: the other processes wait while rank 0 evaluates.
        wait = timedelta(hours=12)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=wait)
    return rank()


def stop() -> None:
    global _processes
    if _processes > 1:
        torch.distributed.destroy_process_group()
        _processes = 1


def own_seed(seed: int) -> int:
    """The seed of this process's environments and noise, different in every process."""
    return seed + SEEDS * rank() if _processes > 1 else seed


@torch.no_grad()
def add_up(tensors: Sequence[Tensor]) -> None:
    """All-reduce: replace tensors of one dtype by their sums over processes, in place."""
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
    """All-reduce: replace tensors of one dtype by their means over processes, in place."""
    if _processes > 1:
        add_up(tensors)
        for tensor in tensors:
            tensor.div_(_processes)


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Average the gradients of `parameters` (those that have one); call it before clipping."""
    if _processes > 1:
        average([p.grad for p in parameters if p.grad is not None])


def mean(value: float) -> float:
    return _reduced(value, torch.distributed.ReduceOp.SUM) / _processes


def all_min(value: int) -> int:
    return int(_reduced(value, torch.distributed.ReduceOp.MIN))


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true in any process, so that all processes stop together."""
    return bool(_reduced(flag, torch.distributed.ReduceOp.MAX))


@torch.no_grad()
def broadcast(module: nn.Module) -> None:
    """Broadcast the parameters and buffers of rank 0 to all processes."""
    if _processes > 1:
        for tensor in module.state_dict().values():
            torch.distributed.broadcast(tensor, 0)


def _reduced(value: float, how: torch.distributed.ReduceOp.RedOpType) -> float:
    if _processes == 1:
        return value
    number = torch.tensor(float(value), dtype=torch.float64)
    torch.distributed.all_reduce(number, how)  # pyright: ignore[reportUnknownMemberType]
    return number.item()
