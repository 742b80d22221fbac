"""Mixtures of experts, and linear layers that grow low-rank adapters in stages (ScaleZero, 2025).

A mixture sends each token to one of E experts, beside one that all tokens go to (Switch
transformer; Fedus et al., 2022, and DeepSeekMoE, 2024):

    y = f_0(x) + p_e f_e(x),   p = softmax(W x),  e = argmax p,   f(x) = W_3 (silu(W_1 x) * W_2 x)

A staged layer has one adapter for each stage after the first (LoRA; Hu et al., 2022), whose B is 0
until it is trained, so that the output does not change when a stage begins:

    W = a_0 W_0 + sum_j a_j (alpha / r) B_j A_j,   a in [0.8, 1.2]

In stage 0 W_0 is trained. In stage s A_s, B_s and the scales a_0 .. a_{s-1} are.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

LOW, HIGH = 0.8, 1.2  # of the scales of a staged layer


class Gated(nn.Module):
    """A feed-forward layer with a gated hidden layer, SwiGLU (Shazeer, 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, 2 * hidden)
        self.leave = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.enter(x).chunk(2, -1)
        return self.leave(functional.silu(gate) * value)


class Mixture(nn.Module):
    """`count` experts and a shared one, for tokens [..., width]; two of them have as many weights
    as an MLP with four times as many hidden units as its width. All experts are computed, and of
    each token the chosen one's output is used: no token has to be sorted, so nothing waits."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        hidden = max(round(4 * width / 3), 1)
        self.gate = nn.Linear(width, count)
        self.shared = Gated(width, hidden)
        self.experts = nn.ModuleList(Gated(width, hidden) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        probability, chosen = self.gate(x).softmax(-1).max(-1, keepdim=True)
        found = torch.stack([expert(x) for expert in self.experts], -2)
        index = chosen[..., None].expand(*x.shape[:-1], 1, x.shape[-1])
        return self.shared(x) + probability * found.gather(-2, index).squeeze(-2)


class Staged(nn.Module):
    """A linear layer, and adapters of rank `rank` for the stages 1 .. `stages` - 1."""

    def __init__(self, layer: nn.Linear, stages: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.layer = layer
        self.gain = alpha / rank
        size, out = layer.in_features, layer.out_features
        later = range(stages - 1)
        self.a = nn.ParameterList(0.01 * torch.randn(rank, size) for _ in later)
        self.b = nn.ParameterList(torch.zeros(out, rank) for _ in later)
        self.scales = nn.ParameterList(torch.ones(()) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        found = self.scales[0].clamp(LOW, HIGH) * self.layer(x)
        for a, b, scale in zip(self.a, self.b, list(self.scales)[1:], strict=True):
            low = functional.linear(functional.linear(x, a), b)
            found = found + scale.clamp(LOW, HIGH) * self.gain * low
        return found

    def train_stage(self, stage: int) -> None:
        """Let the parameters of `stage`, and no others, have gradients."""
        self.layer.requires_grad_(stage == 0)
        for number, (a, b) in enumerate(zip(self.a, self.b, strict=True), start=1):
            a.requires_grad_(number == stage)
            b.requires_grad_(number == stage)
        for number, scale in enumerate(self.scales):
            scale.requires_grad_(number < stage)


def stage_layers(net: nn.Module, stages: int, rank: int, alpha: float) -> None:
    """Put every linear layer below `net` into a `Staged` one."""
    for name, part in list(net.named_children()):
        if isinstance(part, nn.Linear):
            setattr(net, name, Staged(part, stages, rank, alpha))
        else:
            stage_layers(part, stages, rank, alpha)


def staged_in(net: nn.Module) -> list[Staged]:
    """The staged layers below `net`."""
    return [cast(Staged, part) for part in net.modules() if isinstance(part, Staged)]
