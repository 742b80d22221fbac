"""NoisyDiffusion: a diffusion policy whose last denoising steps are stochastic and trainable.

DPPO (Ren et al., 2024). The frozen base policy does the first denoising steps deterministically; a
trainable copy does the `last` steps as DDIM with eta = 1, so that each is a normal distribution:

    mean_k = sqrt(abar_s) x_0 + sqrt(1 - abar_s - sigma_k^2) e,   std_k = max(sigma_k, floor),
    sigma_k^2 = (1 - abar_s) / (1 - abar_t) (1 - abar_t / abar_s),   s the level after t

With z = 0 it is the base policy's own sampler (eta = 0) with the copy in the last steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Count, Levels, Positive
from embodied.core.build import Node, build, kind_of
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.denoising_mdp import chain
from embodied.policies.denoising_mdp.chain import DenoisingMDP
from embodied.policies.denoising_mdp.partial_finetune import PartialFinetune
from embodied.policies.generative.diffusion import Step


@dataclass(frozen=True, kw_only=True)
class Config(chain.Config):
    """Settings of noisy last steps; std in units of the normalised action."""

    last: Count = 4  # trainable denoising steps K'
    steps: Levels | None = None  # all denoising steps (null: the base's; fewer are noisier)
    floor: Positive = 0.1  # smallest std of a step


class NoisyDiffusion(DenoisingMDP):
    """Diffusion policy whose last denoising steps are links; the earlier ones are frozen."""

    inner: PartialFinetune
    numbers: Tensor
    deviation: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.links = config.last
        self.calm = self.inner.grid[-self.links :]
        self.noisy = self.inner.base.ddim_steps(eta=1.0)[-self.links :]
        sigma = torch.tensor([step.sigma for step in self.noisy])
        self.register_buffer("numbers", torch.tensor(self.noisy), persistent=False)
        self.register_buffer("deviation", sigma.clamp(min=config.floor), persistent=False)

    def inside(self, config: Config, base: Node) -> Policy:
        denoises = hasattr(kind_of(base, Policy), "ddim_steps")  # others are refused
        steps = {"steps": config.steps} if denoises and config.steps is not None else {}
        node = {
            "_target_": "embodied.policies.denoising_mdp.partial_finetune.PartialFinetune",
            "base": {**base, **steps},
            "last": config.last,
        }
        return build(node, Policy, spec=self.spec)

    def load_base(self, base: Policy) -> None:
        self.inner.base.load_state_dict(base.state_dict())
        self.inner.tuned.load_state_dict(base.state_dict())

    def begin(self, obs: Tensors, x: Tensor) -> Tensor:
        return self.inner.begin(obs, x)

    def times(self) -> Tensor:
        return self.inner.tuned.embedded()[-self.links :]

    def link(
        self, x: Tensor, k: int | Tensor, time: Tensor, seen: Tensor, explores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(k, int):  # another step for each sample
            each = Step._make(self.numbers[k][..., None].unbind(1))
            x0, e = self.inner.tuned.split(x, each, time, seen)
            return each.next_keep * x0 + each.next_remain * e, self.deviation[k][:, None]
        step = self.noisy[k]
        x0, e = self.inner.tuned.split(x, step, time, seen)
        remain = step.next_remain
        if explores is not None:
            remain = torch.where(explores, remain, self.calm[k].next_remain)
        return step.next_keep * x0 + remain * e, self.deviation[k]
