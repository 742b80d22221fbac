"""What is put around a learner: compiled losses, recorded updates, and nothing by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from embodied.core.build import build
from embodied.core.tensors import Tensors
from embodied.learners import acceleration
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import GradientLearner, Learner, RunPlan, frozen
from tests.contract.test_learner import batch_for, make, node

RECORDED = ["sac", "td3", "dsac_t", "flashsac", "expo", "fql", "iql", "qchunking", "ppo", "bresa"]


class Replayed:
    """In place of a CUDA graph: counts its calls."""

    made: list[Replayed]

    def __init__(self, step: Callable[[Tensors], Tensors]) -> None:
        self.step, self.calls = step, 0
        Replayed.made.append(self)

    def __call__(self, batch: Tensors) -> Tensors:
        self.calls += 1
        return self.step(batch)


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    Replayed.made = []
    monkeypatch.setattr(acceleration, "Graph", Replayed)


def with_settings(stem: str, **settings: bool) -> GradientLearner:
    """A learner of `stem`, with the policy that it takes; BRESA hands settings to its SAC."""
    plain = make(stem)
    given = {**node("learner", stem), "batch_size": 8}
    given |= {"task": settings} if stem == "bresa" else settings
    context: dict[str, Any] = {"policy": plain.policy, "spec": plain.policy.spec}
    if "horizon" in given:
        given["horizon"] = 6
    if stem == "iql":
        context |= {"run": RunPlan(updates=100)}
    if stem == "expo":
        context |= {"policy": plain.online}
    learner = build(given, Learner, **context)
    assert isinstance(learner, GradientLearner)
    return learner


@pytest.mark.parametrize("stem", RECORDED)
def test_updates_are_recorded_and_a_loaded_state_forgets_the_recordings(stem: str) -> None:
    learner = accelerate(with_settings(stem, cuda_graph=True))
    learner.update(batch_for(learner))
    assert Replayed.made and all(graph.calls for graph in Replayed.made)
    known = len(Replayed.made)
    learner.set_state(copy.deepcopy(learner.get_state()))
    learner.update(batch_for(learner))
    assert len(Replayed.made) > known


@pytest.mark.parametrize("stem", RECORDED)
def test_losses_are_compiled(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def compiled(loss: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            called.append(loss.__name__)
            return loss(*arguments)

        return run

    monkeypatch.setattr(acceleration.torch, "compile", compiled)
    learner = accelerate(with_settings(stem, compile=True))
    for _ in range(2):
        learner.update(batch_for(learner))
    part = learner.task if stem == "bresa" else learner
    assert set(called) == set(part.losses)


def test_each_kind_of_update_is_recorded_on_its_own() -> None:
    learner = accelerate(with_settings("td3", cuda_graph=True))
    for _ in range(4):
        learner.update(batch_for(learner))
    assert [graph.calls for graph in Replayed.made] == [2, 2]  # without and with the policy


def test_without_settings_nothing_is_put_around() -> None:
    learner = make("sac")
    accelerate(learner)
    assert learner.update.__func__ is type(learner).update  # type: ignore[attr-defined]


def test_native_code_is_for_exactly_its_class() -> None:
    assert native_obstacle(make("sac")) == ""
    assert native_obstacle(make("td3_bc")) == "Rebrac has other losses"


def test_parameters_are_trainable_again_after_an_error() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="in the loss"), frozen([weight]):
        assert not weight.requires_grad
        raise RuntimeError("in the loss")
    assert weight.requires_grad
