"""CUDA graphs: record an update or a policy's decision once, replay it without launch overhead.

With small batches an update launches hundreds of kernels of a few microseconds each, and launching
takes longer than running; a replay launches all kernels at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import ConfigError
from embodied.core.device import device_of
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors

Update = Callable[[Tensors], Tensors]
WARM_UP = 3  # torch asks for a few runs on another stream before recording


class Recording:
    """A CUDA graph of `function` on `given`; a call copies its inputs, replays, and returns the
    static outputs, which the next replay overwrites."""

    def __init__(self, function: Update, given: Tensors) -> None:
        self.given = tt.each(given, torch.clone)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = function(self.given)

    def __call__(self, given: Tensors) -> Tensors:
        for name, value in given.items():
            self.given[name].copy_(value, non_blocking=True)
        self.graph.replay()
        return self.outputs


def on_side_stream(function: Update, given: Tensors) -> Tensors:
    """Run `function` on another stream, as torch requires before a recording."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = function(given)
    torch.cuda.current_stream().wait_stream(side)
    return result


def require_gpu(device: torch.device, what: str) -> None:
    """ConfigError unless `device` is a GPU."""
    if device.type != "cuda":
        raise ConfigError(f"cuda_graph=true needs a GPU, and this {what} is on the {device}")


class Graph:
    """A learner's update as a CUDA graph: runs normally a few times, is recorded, then replayed.
    The update may read only its batch, parameters and the device's random generator, must not
    synchronise with the device, and must change tensors in place. All batches have equal shapes."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self.forget()

    def forget(self) -> None:
        """Discard the recording; call it after a tensor that the update writes was replaced."""
        self.calls = 0
        self.recording: Recording | None = None
        self.names: list[str] = []

    def __call__(self, batch: Tensors) -> Tensors:
        if self.calls < WARM_UP:
            require_gpu(next(iter(batch.values())).device, "run")
            self.calls += 1
            # Clones, as in the recording: other strides would compile the update anew there.
            return on_side_stream(self.update, tt.each(batch, torch.clone))
        if self.recording is None:
            self.recording = Recording(self._stacked, batch)
        values: tuple[Tensor, ...] = self.recording(batch)["metrics"].clone().unbind()
        return dict(zip(self.names, values, strict=True))

    def _stacked(self, batch: Tensors) -> Tensors:
        metrics = self.update(batch)
        self.names = list(metrics)
        return {"metrics": torch.stack([value.float() for value in metrics.values()])}


class Captured:
    """A policy's decision: `decide(obs, carry, noise) -> (obs, actions, carry)`, without gradients.

    Noise is sampled outside and copied in, so the recording holds no random numbers. In-place
    changes of the weights (an optimiser, `load_state_dict`) take effect at once; after moving the
    policy to another device or changing its mode, make a new `Captured`. The batch size is that of
    the first decision. The policy must not synchronise with the device: one that branches on tensor
    values (a residual policy checks whether a plan has ended) cannot be recorded and raises a CUDA
    error. ConfigError on a CPU.
    """

    def __init__(self, policy: Policy) -> None:
        require_gpu(device_of(policy), "policy")
        self.decide = partial(decision, policy)
        self.recording: Recording | None = None

    @torch.no_grad()
    def __call__(
        self, obs: Tensors, carry: Tensors, noise: Tensor
    ) -> tuple[Tensors, Tensor, Tensors]:
        given = inputs(obs, carry, noise)
        if self.recording is None:
            for _ in range(WARM_UP):
                on_side_stream(self.decide, given)
            self.recording = Recording(self.decide, given)
        return outputs(tt.each(self.recording(given), torch.clone))


def inputs(obs: Tensors, carry: Tensors, noise: Tensor) -> Tensors:
    return {**tt.nest(obs, "obs"), **tt.nest(carry, "carry"), "noise": noise}


def decision(policy: Policy, given: Tensors) -> Tensors:
    """`observe` and `act` on `inputs`; all outputs in one dict."""
    noise = given["noise"]
    seen, carry = policy.observe(tt.under(given, "obs"), tt.under(given, "carry"), noise)
    actions, carry = policy.act(seen, carry, noise)
    return {**tt.nest(seen, "seen"), **tt.nest(carry, "carry"), "actions": actions}


def outputs(made: Tensors) -> tuple[Tensors, Tensor, Tensors]:
    """The decision's observation, actions and next carry, from the dict of `decision`."""
    return tt.under(made, "seen"), made["actions"], tt.under(made, "carry")
