"""What is put around a learner, the hooks where papers differ, and the bounds of settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build, parse, resolve
from embodied.core.tensors import Tensors, under
from embodied.learners import acceleration
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import Learner, RunPlan, frozen
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


def with_settings(stem: str, **settings: bool) -> Learner:
    """A learner of `stem`, with the policy that it takes; BRESA hands settings to its SAC."""
    plain = make(stem)
    given = {**node("learner", stem), "batch_size": 8}
    given |= {"task": settings} if stem == "bresa" else settings
    if "horizon" in given:
        given["horizon"] = 6
    policy: Any = plain.online if stem == "expo" else plain.policy
    return build(given, Learner, policy=policy, spec=policy.spec, run=RunPlan(updates=100))


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
    called: set[str] = set()

    def compiled(loss: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (called.add(loss.__name__), loss(*given))[1]

    monkeypatch.setattr(acceleration.torch, "compile", compiled)
    learner = accelerate(with_settings(stem, compile=True))
    for _ in range(2):
        learner.update(batch_for(learner))
    part = learner.task if stem == "bresa" else learner
    assert called == set(part.losses)


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
    assert native_obstacle(make("iql")) == ""
    assert native_obstacle(make("redq")) is None
    assert native_obstacle(make("td3_bc")) == "Rebrac has other losses"


def test_parameters_are_trainable_again_after_an_error() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="in the loss"), frozen([weight]):
        assert not weight.requires_grad
        raise RuntimeError("in the loss")
    assert weight.requires_grad


@pytest.mark.parametrize(("stem", "raised"), [("sac", 2.0), ("td3", 0.0)])
def test_a_prior_is_added_to_the_values_of_the_policy(stem: str, raised: float) -> None:
    """Of a constant 2: by that in the policy's loss, and, discounted, in SAC's target."""
    learner: Any = make(stem)
    batch = batch_for(learner)
    given = batch["reward"], batch["discount"], under(batch, "next_obs")

    def found() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        loss = learner._actor_loss(batch)
        return (loss[0] if stem == "sac" else loss), learner._backup(*given)

    loss, backup = found()
    learner.prior = lambda obs, action: torch.full((len(action),), 2.0)
    held, target = found()
    torch.testing.assert_close(held, loss - 2.0)
    torch.testing.assert_close(target, backup + raised * batch["discount"])


NONSENSE = [
    ("sac", "gamma", 99.0),
    ("sac", "actor_lr", -1.0),
    ("sac", "hidden", [0]),
    ("sac", "utd", 0),
    ("flashsac", "atoms", 1),
    ("dsrl_na", "actor_share", 1.5),
    ("iql", "expectile", 0.0),
    ("iql", "expectile", 1.0),
    ("bresa", "risk_gamma", 0.0),
    ("bresa", "violation_buffer", 7),
    ("ppo_rapid", "weights", [1.0, 0.1, -0.1]),
    ("reinflow", "hold", 1.0),
]


@pytest.mark.parametrize(("stem", "setting", "value"), NONSENSE)
def test_nonsense_is_refused(stem: str, setting: str, value: Any) -> None:
    kind: Any = resolve(node("learner", stem)["_target_"], Learner)
    with pytest.raises(ConfigError, match=setting):
        parse(get_type_hints(kind.__init__)["config"], {setting: value}, "learner")
