"""Fast: an update recorded once as a CUDA graph and replayed, without the cost of launching it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors

Update = Callable[[Tensors], Tensors]


class Graph:
    """Runs `update` a few times as it is, records it once, and replays the recording.

    The update must read nothing but its batch, parameters and the device's generator, never wait
    for the device, and change tensors in place only. Batches keep the shapes of the first one.
    """

    WARM = 3  # torch asks for a few runs on another stream before recording

    def __init__(self, update: Update) -> None:
        self.update = update
        self.forget()

    def forget(self) -> None:
        """Record again: needed when a tensor that the update writes has been replaced."""
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: Tensors = {}
        self.names: list[str] = []
        self.outputs = torch.empty(0)

    def __call__(self, batch: Tensors) -> Tensors:
        if self.calls < self.WARM:
            return self._warm(batch)
        if self.graph is None:
            self._record(batch)
        else:
            for name, value in batch.items():
                self.inputs[name].copy_(value, non_blocking=True)
        assert self.graph is not None
        self.graph.replay()
        values: tuple[Tensor, ...] = self.outputs.clone().unbind()
        return dict(zip(self.names, values, strict=True))

    def _warm(self, batch: Tensors) -> Tensors:
        device = next(iter(batch.values())).device
        if device.type != "cuda":
            raise ConfigError(f"cuda_graph=true needs a GPU, and this run is on the {device}")
        self.calls += 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            metrics = self.update(batch)
        torch.cuda.current_stream().wait_stream(side)
        return metrics

    def _record(self, batch: Tensors) -> None:
        self.inputs = {name: value.clone() for name, value in batch.items()}
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            metrics = self.update(self.inputs)
            self.names = list(metrics)
            self.outputs = torch.stack([value.float() for value in metrics.values()])
