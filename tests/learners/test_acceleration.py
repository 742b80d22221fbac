"""What is put around a learner, the hooks where papers differ, and the bounds of settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, allow, build, parse, resolve
from embodied.core.tensors import Tensors, under
from embodied.learners import acceleration
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import Learner, RunPlan, frozen
from embodied.learners.off_policy.sac import Sac
from embodied.learners.off_policy.td3 import Td3
from embodied.policies.gaussian import Gaussian
from tests.builders import SPEC, make_policy
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
    assert native_obstacle(make("iql")) == ""
    assert native_obstacle(make("redq")) is None
    assert native_obstacle(make("td3_bc")) == "Rebrac has other losses"


def test_parameters_are_trainable_again_after_an_error() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="in the loss"), frozen([weight]):
        assert not weight.requires_grad
        raise RuntimeError("in the loss")
    assert weight.requires_grad


allow("tests")


class MirrorSac(Sac):
    """SAC with its own policy of before as the prior (mirror descent)."""

    weight: float
    before: Gaussian

    def prior(self, obs: Tensors, action: Tensor) -> Tensor:
        return self.weight * self.before.log_prob(obs, action.clamp(-0.999, 0.999))


class NearTd3(Td3):
    """TD3 whose policy is held near 0.3."""

    def prior(self, obs: Tensors, action: Tensor) -> Tensor:
        return -100.0 * (action - 0.3).square().sum(1)


def make_hooks(kind: type[Any], policy: str, **settings: Any) -> Any:
    made = make_policy(policy, SPEC, hidden=[32])
    node = {"_target_": f"{kind.__module__}.{kind.__name__}", "hidden": [32], "batch_size": 16}
    run = RunPlan(updates=100)
    return build({**node, **settings}, Learner, policy=made, spec=SPEC, run=run)


def batch_of(n: int = 16, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, n, 3, generator=generator)
    return {
        "obs/state": states[0],
        "action": torch.rand(n, 2, generator=generator) * 2 - 1,
        "reward": torch.randn(n, generator=generator),
        "discount": torch.full((n,), 0.9),
        "next_obs/state": states[1],
    }


def trained(kind: type[Sac], weight: float) -> tuple[list[Tensor], float]:
    """The policy's parameters after 30 updates, and how far its mean actions moved, squared."""
    learner = make_hooks(kind, "gaussian.Gaussian", actor_lr=3e-3)
    before = copy.deepcopy(learner.policy)
    if isinstance(learner, MirrorSac):
        learner.weight, learner.before = weight, before.requires_grad_(False)
    for seed in range(30):
        torch.manual_seed(seed)
        learner.update(batch_of(seed=seed))
    obs = {"state": batch_of(64)["obs/state"]}
    now, then = (policy.act(obs, {}, torch.zeros(64, 2))[0] for policy in (learner.policy, before))
    return list(learner.policy.parameters()), (now - then).square().mean().item()


def test_a_prior_without_weight_is_plain_sac_and_with_weight_holds_the_policy() -> None:
    plain, moved = trained(Sac, 0.0)
    same, _ = trained(MirrorSac, 0.0)
    held, moved_less = trained(MirrorSac, 30.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, held, strict=True))
    assert moved_less < moved / 2


def test_a_prior_of_td3() -> None:
    learner = make_hooks(NearTd3, "deterministic.Deterministic", actor_lr=1e-2)
    for _ in range(200):
        learner._actor_step(batch_of())
    action = learner.policy(under(batch_of(), "obs"))
    assert (action - 0.3).abs().max() < 0.1


NONSENSE = [
    ("sac", "gamma", 99.0),
    ("sac", "actor_lr", -1.0),
    ("sac", "tau", 5.0),
    ("sac", "hidden", [0]),
    ("sac", "utd", 0),
    ("td3", "policy_delay", 0),
    ("td3", "target_delay", 0),
    ("dsac_t", "delay", 0),
    ("flashsac", "atoms", 1),
    ("dsrl_na", "actor_share", 1.5),
    ("iql", "expectile", 0.0),
    ("iql", "expectile", 1.0),
    ("bresa", "violation_fraction", 1.0),
    ("bresa", "risk_gamma", 0.0),
    ("bresa", "violation_buffer", 7),
    ("ppo", "lam", 1.5),
    ("ppo_rapid", "size", 0),
    ("ppo_rapid", "bc_steps", -1),
    ("ppo_rapid", "weights", [1.0, 0.1, -0.1]),
    ("reinflow", "hold", 1.0),
]


@pytest.mark.parametrize(("stem", "setting", "value"), NONSENSE)
def test_nonsense_is_refused(stem: str, setting: str, value: Any) -> None:
    kind: Any = resolve(node("learner", stem)["_target_"], Learner)
    with pytest.raises(ConfigError, match=setting):
        parse(get_type_hints(kind.__init__)["config"], {setting: value}, "learner")
