"""Captured: a decision recorded once as a CUDA graph and replayed, at the cost of one launch.

At batch 1 a K-step policy is hundreds of kernels of a few microseconds, and launching them takes
longer than running them; a replay launches all of them at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors


class Captured:
    """`decide(obs, carry, noise) -> (seen, actions, carry)` of a policy, without gradients.

    Noise is drawn outside and copied in, so the recording holds no random numbers. It reads the
    parameters where they are: weights changed in place (an optimiser, `load_state_dict`) act at
    once; a policy moved to another device, or set to another mode, needs a new `Captured`. The
    number of rows is that of the first decision. The policy must not wait for the device: one that
    looks at values (a residual asks whether any plan has ended) cannot be recorded, and CUDA says
    so. On a CPU there is nothing to record: ConfigError.
    """

    WARM = 3  # torch asks for a few runs on another stream before recording

    def __init__(self, policy: Policy) -> None:
        device = next((p.device for p in policy.parameters()), torch.device("cpu"))
        if device.type != "cuda":
            raise ConfigError(f"cuda_graph=true needs a GPU, and this policy is on the {device}")
        self.policy = policy
        self.graph: torch.cuda.CUDAGraph | None = None
        self.given: Tensors = {}
        self.made: Tensors = {}

    @torch.no_grad()
    def __call__(
        self, obs: Tensors, carry: Tensors, noise: Tensor
    ) -> tuple[Tensors, Tensor, Tensors]:
        given = inputs(obs, carry, noise)
        if self.graph is None:
            self.graph = self._record(given)
        for name, value in given.items():
            self.given[name].copy_(value, non_blocking=True)
        self.graph.replay()
        return outputs(tt.each(self.made, torch.clone))  # the next replay writes over them

    def _record(self, given: Tensors) -> torch.cuda.CUDAGraph:
        self.given = tt.each(given, torch.clone)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARM):
                decision(self.policy, self.given)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.made = decision(self.policy, self.given)
        return graph


def inputs(obs: Tensors, carry: Tensors, noise: Tensor) -> Tensors:
    """All that a decision is a function of, as one dict."""
    return {**tt.nest(obs, "obs"), **tt.nest(carry, "carry"), "noise": noise}


def decision(policy: Policy, given: Tensors) -> Tensors:
    """`observe` and `act` from `inputs` to one dict of all that comes out."""
    noise = given["noise"]
    seen, carry = policy.observe(tt.under(given, "obs"), tt.under(given, "carry"), noise)
    actions, carry = policy.act(seen, carry, noise)
    return {**tt.nest(seen, "seen"), **tt.nest(carry, "carry"), "actions": actions}


def outputs(made: Tensors) -> tuple[Tensors, Tensor, Tensors]:
    """What the policy saw, its actions and its next carry, from the dict of `decision`."""
    return tt.under(made, "seen"), made["actions"], tt.under(made, "carry")
