"""What is put around a learner, the hooks where papers differ, and the bounds of settings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from embodied.core.bounds import Bound
from embodied.core.build import allow, build, resolve
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.learners import acceleration
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import GradientLearner, Learner, RunPlan, frozen
from embodied.learners.off_policy.sac import Sac
from embodied.learners.off_policy.td3 import Td3
from embodied.learners.offline.iql import Iql
from embodied.learners.offline.rebrac import Rebrac
from embodied.policies.gaussian import Gaussian
from tests.builders import make_policy
from tests.contract.test_learner import LEARNERS, batch_for, make, node

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


SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
allow("tests")


class Absolute(Iql):
    """IQL whose values are the median of Q."""

    def value_loss(self, best: Tensor, value: Tensor) -> Tensor:
        return (best - value).abs().mean()


class MirrorSac(Sac):
    """SAC with its own policy of before as the prior (mirror descent)."""

    weight: float
    before: Gaussian

    def prior(self, obs: Tensors, action: Tensor) -> Tensor:
        return self.weight * self.before.log_prob(obs, action.clamp(-0.999, 0.999))


class LowTd3(Td3):
    """TD3 whose critics are pushed down at random actions, and whose policy is held near 0.3."""

    low, near = 0.0, 0.0

    def critic_terms(self, batch: Tensors, q: Tensor) -> Tensor:
        action = torch.rand_like(batch["action"]) * 2 - 1
        return self.low * self.critic(under(batch, "obs"), action).mean()

    def prior(self, obs: Tensors, action: Tensor) -> Tensor:
        return -self.near * (action - 0.3).square().sum(1)


class Elsewhere(Rebrac):
    """ReBRAC that is held near 0.3, wherever the data are."""

    def actor_penalty(self, batch: Tensors, action: Tensor) -> Tensor:
        return self.config.actor_bc * (action - 0.3).square().sum(1).mean()


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


def test_the_value_loss_of_iql_can_be_replaced() -> None:
    learner, batch = make_hooks(Absolute, "deterministic.Deterministic"), batch_of()
    obs = under(batch, "obs")
    gap = learner.target(obs, batch["action"]).amin(0), learner.value(obs)
    assert torch.equal(learner._loss(batch)[0][0], learner.value_loss(*gap))


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


def test_further_critic_terms_and_a_prior_of_td3() -> None:
    lows = []
    for low in (0.0, 5.0):
        learner = make_hooks(LowTd3, "deterministic.Deterministic", critic_lr=1e-2)
        learner.low, learner.near = low, 100.0
        for seed in range(60):
            learner.update(batch_of(seed=seed))
        lows.append(learner.critic(under(batch_of(), "obs"), batch_of()["action"]).mean().item())
    assert lows[1] < lows[0] - 0.5
    learner = make_hooks(LowTd3, "deterministic.Deterministic", actor_lr=1e-2)
    learner.near = 100.0
    for _ in range(200):
        learner._actor_step(batch_of())
    action = learner.policy(under(batch_of(), "obs"))
    assert (action - 0.3).abs().max() < 0.1


def test_the_penalty_of_rebrac_can_be_another_distance() -> None:
    """One state, data at 0.8 and -0.8: ReBRAC comes to their mean."""
    side = torch.where(torch.arange(16) % 2 == 0, 0.8, -0.8)[:, None]
    batch = batch_of() | {"obs/state": torch.zeros(16, 3), "action": side.expand(16, 2)}
    for kind, end in ((Rebrac, 0.0), (Elsewhere, 0.3)):
        settings = {"actor_bc": 100.0, "critic_bc": 0.0, "actor_lr": 1e-2}
        learner = make_hooks(kind, "deterministic.Deterministic", **settings)
        for _ in range(600):
            learner._actor_step(batch)
        assert (learner.policy(under(batch, "obs"))[0] - end).abs().max() < 0.1


NONSENSE = [
    ("sac", "gamma", 99.0),
    ("sac", "actor_lr", -1.0),
    ("sac", "tau", 5.0),
    ("sac", "hidden", 0),
    ("sac", "utd", 0),
    ("td3", "policy_delay", 0),
    ("td3", "target_delay", 0),
    ("dsac_t", "delay", 0),
    ("flashsac", "atoms", 1),
    ("dsrl_na", "distil", 0),
    ("dsrl_na", "actor_share", 1.5),
    ("iql", "expectile", 0.0),
    ("iql", "expectile", 1.0),
    ("bresa", "violation_fraction", 1.0),
    ("bresa", "risk_gamma", 0.0),
    ("bresa", "violation_buffer", 7),
    ("ppo", "lam", 1.5),
    ("ppo_rapid", "size", 0),
    ("ppo_rapid", "bc_steps", -1),
    ("ppo_rapid", "weights", -0.1),
    ("reinflow", "hold", 1.0),
]


def hints(stem: str) -> dict[str, Any]:
    """The types of a learner's settings, with their bounds."""
    kind: Any = resolve(node("learner", stem)["_target_"], Learner)
    config = get_type_hints(kind.__init__)["config"]
    return get_type_hints(config, include_extras=True)


def bounds(hint: Any) -> Iterator[Bound]:
    """The bounds anywhere in a type."""
    for part in get_args(hint):
        if isinstance(part, Bound):
            yield part
        else:
            yield from bounds(part)


@pytest.mark.parametrize(("stem", "setting", "value"), NONSENSE)
def test_nonsense_is_outside(stem: str, setting: str, value: float) -> None:
    found = list(bounds(hints(stem)[setting]))
    assert found and not any(bound.holds(value) for bound in found)


@pytest.mark.parametrize("stem", LEARNERS)
def test_what_an_option_sets_is_inside(stem: str) -> None:
    known = hints(stem)
    for setting, value in node("learner", stem).items():
        numbers = value if isinstance(value, list) else [value]
        for bound in bounds(known.get(setting)):
            assert all(bound.holds(float(number)) for number in numbers), setting
