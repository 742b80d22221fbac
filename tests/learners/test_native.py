"""PPO and TD3 in native code equal the PyTorch reference; what they do not support runs it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import Learner, RunPlan
from embodied.learners.off_policy.td3 import Td3
from embodied.learners.on_policy.ppo import Ppo
from embodied.nn import native
from tests.builders import node_of, require_same

TIMES, ENVS, OBS, ACT = 25, 8, 5, 3  # 200 decisions
GAUSSIAN = "embodied.policies.diagonal_gaussian.DiagonalGaussian"
PPO = "embodied.learners.on_policy.ppo.Ppo"
# 300 updates of each: settings of the learner, and of the policy.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "relu, two widths": (
        {"value": {"hidden": [33, 7], "activation": "relu"}},
        {"activation": "relu"},
    ),
    "one layer, no layer": ({"value": {"hidden": []}}, {"hidden": [70]}),
    "value clip, entropy": ({"value_clip": 0.05, "entropy": 0.02, "value_weight": 0.8}, {}),
    "two rates, linear": ({"critic_lr": 1e-3, "schedule": "linear"}, {}),
    "adaptive": ({"schedule": "adaptive", "target_kl": 0.004}, {}),
    "adaptive, two rates": ({"schedule": "adaptive", "critic_lr": 1e-3}, {}),
    "advantages of the batch": ({"advantage": "batch", "grad_clip": 0.0}, {}),
    "raw advantages": ({"advantage": "raw", "scale_rewards": True, "clip": 0.05}, {}),
    "fixed std": ({"normalize": False}, {"learn_std": False, "log_std": -0.5}),
    "large minibatches": ({"batch_size": 150, "epochs": 100}, {}),
    "larger than the batch": ({"batch_size": 200, "epochs": 100}, {"chunk": 2}),
    "stops at a divergence": ({"stop_kl": 0.002}, {}),
}


def make(learner: dict[str, Any], policy: dict[str, Any], seed: int = 0, **build_with: Any) -> Ppo:
    torch.manual_seed(seed)
    spec = Spec(
        {"state": Leaf((OBS,)), "critic/more": Leaf((2,))}, Leaf((ACT,), low=-1.0, high=1.0), dt=0.1
    )
    usual = {} if "inner" in policy else {"_target_": GAUSSIAN, "hidden": [20, 20]}
    node = {**usual, **policy}
    given = {"_target_": PPO, "horizon": TIMES, "batch_size": 20, "epochs": 10, **learner}
    made = build(node, Policy, spec=spec)
    return build(given, Learner, policy=made, spec=spec, run=RunPlan(decisions=4000), **build_with)


def batch(learner: Ppo, some: bool = False) -> Tensors:
    """Decisions with random rewards; `some` of them not to be learned from."""
    shape = (TIMES, ENVS)
    obs = {"state": 2 * torch.randn(*shape, OBS), "critic/more": torch.randn(*shape, 2)}
    policy = learner.policy
    flat = {key: value.flatten(0, 1) for key, value in obs.items()}
    noise = policy.sample_noise(TIMES * ENVS, explore=True)
    _, carry = policy.act(flat, policy.initial(TIMES * ENVS), noise)
    return {
        **{f"obs/{key}": value for key, value in obs.items()},
        **{f"next_obs/{key}": value.roll(-1, 0) for key, value in obs.items()},
        "action": carry["row/action"].detach().view(*shape, -1),
        "reward": torch.randn(shape) + obs["state"][..., 0],
        "discount": torch.full(shape, 0.9),
        "ended": torch.rand(shape) < 0.1,
        "first": torch.zeros(shape, dtype=torch.bool),
        "valid": torch.rand(shape) < 0.9 if some else torch.ones(shape, dtype=torch.bool),
    }


def apart(one: Learner, other: Learner) -> float:
    """The largest difference of parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(distance(a, b) for a, b in pairs)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())


def both(learner: Ppo, updates: int, some: bool = False) -> tuple[Ppo, Ppo, list[Any]]:
    """The learner by the reference and by native code, from the same batches and generator."""
    fast = copy.deepcopy(learner)
    accelerate(fast, native=True)
    assert native_obstacle(fast) is None
    found: list[Any] = []
    for i in range(updates):
        torch.manual_seed(100 + i)
        rows = batch(learner, some)
        torch.manual_seed(i)
        expected = learner.update(dict(rows))
        torch.manual_seed(i)
        found.append((expected, fast.update(dict(rows))))
    return learner, fast, found


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seed", [0, 2])
def test_parameters_and_metrics_equal_the_reference_after_300_updates(name: str, seed: int) -> None:
    learner = make(*OPTIONS[name], seed=seed)
    before = [p.detach().clone() for p in learner.parameters()]
    slow, fast, found = both(learner, 3)
    moved = max(distance(a, b) for a, b in zip(before, slow.parameters(), strict=True))
    assert moved > 0.01 and apart(slow, fast) < 1e-5
    for expected, metrics in found:
        assert expected.keys() == metrics.keys()
        for key, value in expected.items():
            torch.testing.assert_close(metrics[key], value, rtol=1e-3, atol=1e-5, msg=key)
    require_same(slow.get_state(), fast.get_state())


def test_at_the_edge_of_the_clip_rounding_decides_in_the_reference_too() -> None:
    """The objective has a kink there: a last digit sends the reference as far from itself."""
    learner = make(*OPTIONS["larger than the batch"], seed=1)
    moved = copy.deepcopy(learner)
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1 + 1e-7)
    slow, fast, _ = both(learner, 2)
    for i in range(2):
        torch.manual_seed(100 + i)
        rows = batch(learner)
        torch.manual_seed(i)
        moved.update(dict(rows))
    assert apart(slow, fast) < 1e-5 or apart(slow, moved) > 0.3 * apart(slow, fast)


def test_executed_part_of_a_chunk_and_decisions_left_out() -> None:
    learner = make({}, {"chunk": 3}, execute=2)
    slow, fast, _ = both(learner, 2, some=True)
    assert apart(slow, fast) < 1e-5


def test_either_continues_from_the_state_of_the_other() -> None:
    slow, fast, _ = both(make({}, {}), 1)
    again = make({}, {}, seed=5)
    again.set_state(copy.deepcopy(fast.get_state()))
    rows = batch(again)
    for learner in (slow, again):
        torch.manual_seed(7)
        learner.update(dict(rows))
    assert apart(slow, again) < 1e-5


def test_a_wrong_slope_would_be_seen() -> None:
    """The tolerance is far below the effect of a setting that one side does not have."""
    one, other = make({}, {}), make({"entropy": 1e-2}, {})
    slow, _, _ = both(one, 1)
    torch.manual_seed(100)
    rows = batch(other)
    torch.manual_seed(0)
    other.update(rows)
    assert apart(slow, other) > 1e-4


RECURRENT = node_of("policies.recurrent.Recurrent", width=4, inner={"_target_": GAUSSIAN})
UNSUPPORTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gelu": ({}, {"activation": "gelu"}, "linear layers"),
    "layer norm": ({"value": {"layer_norm": True}}, {}, "linear layers"),
    "compile": ({"compile": True}, {}, "compile"),
    "another policy": ({}, RECURRENT, "Recurrent"),
    "other losses": (
        {"_target_": "embodied.learners.on_policy.ppo_rapid.PpoRapid"},
        {},
        "other losses",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_says_so(name: str) -> None:
    settings, policy, reason = UNSUPPORTED[name]
    assert reason in (native_obstacle(make(settings, policy)) or "")


def test_an_unsupported_learner_is_trained_by_the_reference() -> None:
    slow, fast = (make({}, {"activation": "gelu"}) for _ in range(2))
    accelerate(fast, native=True)
    rows = batch(slow)
    for learner in (slow, fast):
        torch.manual_seed(0)
        learner.update(dict(rows))
    assert apart(slow, fast) == 0


def test_without_a_compiler_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    native.load.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    learner = make({}, {})
    assert native_obstacle(learner) == "no C++ compiler was found (no-such-compiler)"
    monkeypatch.undo()
    native.load.cache_clear()
    assert native_obstacle(learner) is None


def test_a_compiler_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("int f( {")
    with pytest.raises(native.NativeError, match="failed: "):
        native.load(wrong)
    assert not list((tmp_path / "embodied" / "native").iterdir())


def test_only_dense_cpu_tensors_are_passed() -> None:
    with pytest.raises(ValueError, match="dense"):
        native.address(torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="float64"):
        native.address(torch.zeros(4, dtype=torch.float64))


TD3_OBS, TD3_ACT, UPDATES = 5, 3, 300
DETERMINISTIC = "embodied.policies.deterministic.Deterministic"
TD3 = "embodied.learners.off_policy.td3.Td3"
SMALL = {"hidden": [20, 20]}
TANH = {"activation": "tanh"}
# Settings of the learner, and of the policy.
TD3_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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


def make_td3(
    learner: dict[str, Any], policy: dict[str, Any], seed: int = 0, act: Leaf | None = None
) -> Td3:
    torch.manual_seed(seed)
    obs = {"state": Leaf((TD3_OBS,)), "critic/more": Leaf((2,))}
    spec = Spec(obs, act or Leaf((TD3_ACT,), low=-1.0, high=1.0), dt=0.1)
    made = build({"_target_": DETERMINISTIC, **SMALL, **policy}, Policy, spec=spec)
    given = {"_target_": TD3, "batch_size": 40, **SMALL, **learner}
    found = build(given, Learner, policy=made, spec=spec)
    assert isinstance(found, Td3)
    return found


def batch_of_td3(learner: Td3) -> Tensors:
    n = learner.batch_size
    obs = {f"{name}/state": 2 * torch.randn(n, TD3_OBS) for name in ("obs", "next_obs")}
    obs |= {f"{name}/critic/more": torch.randn(n, 2) for name in ("obs", "next_obs")}
    action = 2 * torch.rand(n, learner.policy.size) - 1
    discount = 0.9 * (torch.rand(n) > 0.1).float()
    return {**obs, "action": action, "reward": torch.randn(n), "discount": discount}


def distance_of(one: Learner, other: Learner) -> float:
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
        rows = batch_of_td3(slow)
        metrics = []
        for learner in (slow, fast):
            torch.manual_seed(i)
            metrics.append(learner.update(dict(rows)))
        found.append(tuple(metrics))
    return found


@pytest.mark.parametrize("name", TD3_OPTIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_td3_parameters_and_metrics_equal_the_reference_after_300_updates(
    name: str, seed: int
) -> None:
    slow = make_td3(*TD3_OPTIONS[name], seed=seed)
    before, fast = copy.deepcopy(slow), copy.deepcopy(slow)
    found = update_both(slow, fast, UPDATES)
    assert distance_of(before, slow) > 0.01 and distance_of(slow, fast) < 1e-5
    for expected, metrics in found:
        assert expected.keys() == metrics.keys()
        for key, value in expected.items():
            torch.testing.assert_close(metrics[key], value, rtol=1e-3, atol=1e-5, msg=key)
    require_same(slow.get_state(), fast.get_state())


def test_normalized_observations_and_unbounded_actions() -> None:
    slow = make_td3(TANH, TANH, act=Leaf((TD3_ACT,), low=-1.0, high=1.0, names=("a", "b", "c")))
    slow.fit({key: 3 + 2 * value for key, value in batch_of_td3(slow).items()})
    fast = copy.deepcopy(slow)
    update_both(slow, fast, 50)
    assert distance_of(slow, fast) < 1e-5


def test_resumed_updates_are_exact() -> None:
    whole = make_td3(TANH, TANH)
    accelerate(whole, native=True)
    half = copy.deepcopy(whole)
    for learner in (whole, half):
        for i in range(5):
            torch.manual_seed(i)
            learner.update(batch_of_td3(learner))
    resumed = make_td3(TANH, TANH, seed=9)
    accelerate(resumed, native=True)
    resumed.update(batch_of_td3(resumed))  # so that it has looked where its tensors are
    resumed.set_state(copy.deepcopy(half.get_state()))
    for learner in (whole, resumed):
        for i in range(5, 10):
            torch.manual_seed(i)
            learner.update(batch_of_td3(learner))
    assert distance_of(whole, resumed) == 0
    require_same(whole.get_state(), resumed.get_state())


def test_td3_either_continues_from_the_state_of_the_other() -> None:
    slow, fast = make_td3(TANH, TANH), make_td3(TANH, TANH)
    update_both(slow, fast, 4)
    again = make_td3(TANH, TANH, seed=5)
    again.set_state(copy.deepcopy(fast.get_state()))
    update_both(again, slow, 4, first=4)
    assert distance_of(slow, again) < 1e-5


def test_td3_a_wrong_slope_would_be_seen() -> None:
    """The tolerance is far below the effect of a setting that one side does not have."""
    slow, fast = make_td3(TANH, TANH), make_td3({**TANH, "weight_decay": 1e-3}, TANH)
    update_both(slow, fast, 50)
    assert distance_of(slow, fast) > 1e-4


TD3_UNSUPPORTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gelu": ({}, {"activation": "gelu"}, "linear layers"),
    "layer norm": ({"layer_norm": True}, {}, "linear layers"),
    "atoms": ({"atoms": 11}, {}, "atoms"),
    "compile": ({"compile": True}, {}, "compile"),
}


@pytest.mark.parametrize("name", TD3_UNSUPPORTED)
def test_what_is_not_supported_says_so_and_runs_the_reference(name: str) -> None:
    settings, policy, reason = TD3_UNSUPPORTED[name]
    slow, fast = make_td3(settings, policy), make_td3(settings, policy)
    assert reason in (native_obstacle(fast) or "")
    if name != "compile":
        accelerate(fast, native=True)
        rows = batch_of_td3(slow)
        for learner in (slow, fast):
            torch.manual_seed(0)
            learner.update(dict(rows))
        assert distance_of(slow, fast) == 0


def test_without_a_compiler_the_reference_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    native.load.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    slow, fast = make_td3({}, {}), make_td3({}, {})
    accelerate(fast, native=True)
    assert "no C++ compiler" in str(native_obstacle(fast))
    rows = batch_of_td3(slow)
    for learner in (slow, fast):
        torch.manual_seed(0)
        learner.update(dict(rows))
    assert distance_of(slow, fast) == 0
    monkeypatch.undo()
    native.load.cache_clear()
