"""TD3 in native code equals the PyTorch reference; what it does not support runs the reference."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import Learner
from embodied.learners.off_policy.td3 import Td3
from embodied.nn import native
from tests.builders import require_same

OBS, ACT, UPDATES = 5, 3, 300
DETERMINISTIC = "embodied.policies.deterministic.Deterministic"
TD3 = "embodied.learners.off_policy.td3.Td3"
SMALL = {"hidden": [20, 20]}
TANH = {"activation": "tanh"}
# Settings of the learner, and of the policy.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tanh": (TANH, TANH),
    "relu": ({}, {}),
    "weight decay, delays": (
        {**TANH, "weight_decay": 1e-3, "policy_delay": 3, "target_delay": 1, "actor_start": 30},
        TANH,
    ),
    "two widths, two rates": (
        {**TANH, "hidden": [33, 7], "critic_lr": 1e-3, "tau": 0.02},
        {**TANH, "hidden": [70]},
    ),
    "no hidden layer": ({"hidden": []}, {"hidden": []}),
    "several pieces, every update": ({**TANH, "batch_size": 300, "policy_delay": 1}, TANH),
    "chunk": ({**TANH, "critic_obs": ["state"]}, {**TANH, "chunk": 2}),
    "no target noise": ({**TANH, "target_noise": 0.0, "noise_clip": 0.0}, TANH),
}


def make(
    learner: dict[str, Any], policy: dict[str, Any], seed: int = 0, act: Leaf | None = None
) -> Td3:
    torch.manual_seed(seed)
    obs = {"state": Leaf((OBS,)), "critic/more": Leaf((2,))}
    spec = Spec(obs, act or Leaf((ACT,), low=-1.0, high=1.0), dt=0.1)
    made = build({"_target_": DETERMINISTIC, **SMALL, **policy}, Policy, spec=spec)
    given = {"_target_": TD3, "batch_size": 40, **SMALL, **learner}
    found = build(given, Learner, policy=made, spec=spec)
    assert isinstance(found, Td3)
    return found


def batch(learner: Td3) -> Tensors:
    n = learner.batch_size
    obs = {f"{name}/state": 2 * torch.randn(n, OBS) for name in ("obs", "next_obs")}
    obs |= {f"{name}/critic/more": torch.randn(n, 2) for name in ("obs", "next_obs")}
    action = 2 * torch.rand(n, learner.policy.size) - 1
    discount = 0.9 * (torch.rand(n) > 0.1).float()
    return {**obs, "action": action, "reward": torch.randn(n), "discount": discount}


def distance(one: Learner, other: Learner) -> float:
    """The largest difference of parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def update_both(slow: Td3, fast: Td3, updates: int, first: int = 0) -> list[tuple[Any, Any]]:
    """Update by the reference and by native code, from the same batches and generator."""
    accelerate(fast, native=True)
    assert native_obstacle(fast) is None
    found = []
    for i in range(first, first + updates):
        torch.manual_seed(100 + i)
        rows = batch(slow)
        metrics = []
        for learner in (slow, fast):
            torch.manual_seed(i)
            metrics.append(learner.update(dict(rows)))
        found.append(tuple(metrics))
    return found


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_parameters_and_metrics_equal_the_reference_after_300_updates(name: str, seed: int) -> None:
    slow = make(*OPTIONS[name], seed=seed)
    before, fast = copy.deepcopy(slow), copy.deepcopy(slow)
    found = update_both(slow, fast, UPDATES)
    assert distance(before, slow) > 0.01 and distance(slow, fast) < 1e-5
    for expected, metrics in found:
        assert expected.keys() == metrics.keys()
        for key, value in expected.items():
            torch.testing.assert_close(metrics[key], value, rtol=1e-3, atol=1e-5, msg=key)
    require_same(slow.get_state(), fast.get_state())


def test_normalized_observations_and_unbounded_actions() -> None:
    slow = make(TANH, TANH, act=Leaf((ACT,), low=-1.0, high=1.0, names=("a", "b", "c")))
    slow.fit({key: 3 + 2 * value for key, value in batch(slow).items()})
    fast = copy.deepcopy(slow)
    update_both(slow, fast, 50)
    assert distance(slow, fast) < 1e-5


def test_resumed_updates_are_exact() -> None:
    whole = make(TANH, TANH)
    accelerate(whole, native=True)
    half = copy.deepcopy(whole)
    for learner in (whole, half):
        for i in range(5):
            torch.manual_seed(i)
            learner.update(batch(learner))
    resumed = make(TANH, TANH, seed=9)
    accelerate(resumed, native=True)
    resumed.update(batch(resumed))  # so that it has looked where its tensors are
    resumed.set_state(copy.deepcopy(half.get_state()))
    for learner in (whole, resumed):
        for i in range(5, 10):
            torch.manual_seed(i)
            learner.update(batch(learner))
    assert distance(whole, resumed) == 0
    require_same(whole.get_state(), resumed.get_state())


def test_either_continues_from_the_state_of_the_other() -> None:
    slow, fast = make(TANH, TANH), make(TANH, TANH)
    update_both(slow, fast, 4)
    again = make(TANH, TANH, seed=5)
    again.set_state(copy.deepcopy(fast.get_state()))
    update_both(again, slow, 4, first=4)
    assert distance(slow, again) < 1e-5


def test_a_wrong_slope_would_be_seen() -> None:
    """The tolerance is far below the effect of a setting that one side does not have."""
    slow, fast = make(TANH, TANH), make({**TANH, "weight_decay": 1e-3}, TANH)
    update_both(slow, fast, 50)
    assert distance(slow, fast) > 1e-4


UNSUPPORTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gelu": ({}, {"activation": "gelu"}, "linear layers"),
    "layer norm": ({"layer_norm": True}, {}, "linear layers"),
    "atoms": ({"atoms": 11}, {}, "atoms"),
    "compile": ({"compile": True}, {}, "compile"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_says_so_and_runs_the_reference(name: str) -> None:
    settings, policy, reason = UNSUPPORTED[name]
    slow, fast = make(settings, policy), make(settings, policy)
    assert reason in (native_obstacle(fast) or "")
    if name != "compile":
        accelerate(fast, native=True)
        rows = batch(slow)
        for learner in (slow, fast):
            torch.manual_seed(0)
            learner.update(dict(rows))
        assert distance(slow, fast) == 0


def test_without_a_compiler_the_reference_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    native.load.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    slow, fast = make({}, {}), make({}, {})
    accelerate(fast, native=True)
    assert "no C++ compiler" in str(native_obstacle(fast))
    rows = batch(slow)
    for learner in (slow, fast):
        torch.manual_seed(0)
        learner.update(dict(rows))
    assert distance(slow, fast) == 0
    monkeypatch.undo()
    native.load.cache_clear()
