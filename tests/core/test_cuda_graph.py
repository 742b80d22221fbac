"""Recorded updates: the layout of their inputs; compiled and recorded ones on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks.on_gpu import updates
from benchmarks.on_gpu.rows import TINY, Scale
from benchmarks.sac import filled
from embodied.buffers.replay import ReplayBuffer
from embodied.core import cuda_graph
from embodied.core.tensors import Tensors


class Played:
    """In place of a CUDA graph: nothing is replayed."""

    def replay(self) -> None: ...


def test_warm_ups_and_the_recording_have_inputs_of_the_same_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch.compile` compiles anew for other strides, and must not while a graph is recorded.
    Leaves of a replay buffer's batch are columns of one tensor."""
    fake = SimpleNamespace(CUDAGraph=Played, graph=lambda graph: nullcontext())
    monkeypatch.setattr(cuda_graph.torch, "cuda", fake)
    monkeypatch.setattr(cuda_graph, "require_gpu", lambda *rest: None)
    monkeypatch.setattr(cuda_graph, "on_side_stream", lambda function, given: function(given))
    strides: list[tuple[int, ...]] = []

    def update(batch: Tensors) -> Tensors:
        strides.append(batch["obs"].stride())
        return {"loss": batch["obs"].sum()}

    graph = cuda_graph.Graph(update)
    for _ in range(cuda_graph.WARM_UP + 1):
        graph({"obs": torch.zeros(5, 7)[:, 2:4]})
    assert strides == [(2, 1)] * (cuda_graph.WARM_UP + 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", updates.SIZES)
def test_a_compiled_and_recorded_update_runs(name: str) -> None:
    device = torch.device("cuda:0")
    replay = filled(ReplayBuffer(256, device))
    small = Scale(shrink={**TINY.shrink, "batch_size": 64})
    learner = updates.learner_for(name, "compile+cuda_graph", small).to(device)
    for _ in range(16):  # every kind of update is recorded by then
        metrics = learner.update(replay.sample(learner.batch_size))
    updates.require_finite(metrics)
