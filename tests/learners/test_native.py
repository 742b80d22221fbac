"""PPO and TD3 in native code equal the PyTorch reference; what they do not support runs it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.tiers import usually

TIMES, ENVS, OBS, ACT = 25, 8, 5, 3  # 200 decisions
SMALL = {"hidden": [20, 20]}
TANH, RELU = {"activation": "tanh"}, {"activation": "relu"}
GAUSSIAN = "embodied.policies.diagonal_gaussian.DiagonalGaussian"
PPO = "embodied.learners.on_policy.ppo.Ppo"
DETERMINISTIC = "embodied.policies.deterministic.Deterministic"
TD3 = "embodied.learners.off_policy.td3.Td3"
# Hundreds of steps of each: settings of the learner, and of the policy.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "relu, two widths": ({"value": {"hidden": [33, 7], **RELU}}, RELU),
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
    obs = {"state": Leaf((OBS,)), "critic/more": Leaf((2,))}
    spec = Spec(obs, act or Leaf((ACT,), low=-1.0, high=1.0), dt=0.1)
    made = build({"_target_": DETERMINISTIC, **SMALL, **policy}, Policy, spec=spec)
    given = {"_target_": TD3, "batch_size": 40, **SMALL, **learner}
    return build(given, Learner, policy=made, spec=spec)


def ppo_batch(learner: Ppo, some: bool = False) -> Tensors:
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


def batch_of(learner: Any, some: bool = False) -> Tensors:
    return ppo_batch(learner, some) if isinstance(learner, Ppo) else td3_batch(learner)


def td3_batch(learner: Td3) -> Tensors:
    n = learner.batch_size
    obs = {f"{name}/state": 2 * torch.randn(n, OBS) for name in ("obs", "next_obs")}
    obs |= {f"{name}/critic/more": torch.randn(n, 2) for name in ("obs", "next_obs")}
    action = 2 * torch.rand(n, learner.policy.size) - 1
    discount = 0.9 * (torch.rand(n) > 0.1).float()
    return {**obs, "action": action, "reward": torch.randn(n), "discount": discount}


def apart(one: Learner, other: Learner) -> float:
    """The largest difference of parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def update_each(seed: int, rows: Tensors, *learners: Any) -> list[Tensors]:
    """The metrics of an update of each learner, from the same batch and generator."""
    metrics: list[Tensors] = []
    for learner in learners:
        torch.manual_seed(seed)
        metrics.append(learner.update(dict(rows)))
    return metrics


def update_both(
    slow: Any, fast: Any, updates: int, first: int = 0, some: bool = False
) -> list[list[Tensors]]:
    """Update by the reference and by native code; returns the metrics of both."""
    accelerate(fast, native=True)
    assert native_obstacle(fast) is None
    found: list[list[Tensors]] = []
    for i in range(first, first + updates):
        torch.manual_seed(100 + i)
        found.append(update_each(i, batch_of(slow, some), slow, fast))
    return found


CASES = [("ppo", name) for name in OPTIONS] + [("td3", name) for name in TD3_OPTIONS]


FEW = ("relu, two widths", "value clip, entropy", "raw advantages", "adaptive, two rates")
FEW += ("larger than the batch", "weight decay, delays", "several pieces, every update", "chunk")
USUAL = [case for case in CASES if case[1] in FEW]


@pytest.mark.parametrize(("kind", "name"), usually(USUAL, CASES))
def test_parameters_and_metrics_equal_the_reference(kind: str, name: str) -> None:
    slow: Any = make(*OPTIONS[name]) if kind == "ppo" else make_td3(*TD3_OPTIONS[name])
    before, fast = copy.deepcopy(slow), copy.deepcopy(slow)
    found = update_both(slow, fast, 3 if kind == "ppo" else 100)
    assert apart(before, slow) > 0.01 and apart(slow, fast) < 1e-5
    for expected, metrics in found:
        assert expected.keys() == metrics.keys()
        for key, value in expected.items():
            torch.testing.assert_close(metrics[key], value, rtol=1e-3, atol=1e-5, msg=key)
    require_same(slow.get_state(), fast.get_state())


def test_executed_part_of_a_chunk_and_decisions_left_out() -> None:
    slow = make({}, {"chunk": 3}, execute=2)
    fast = copy.deepcopy(slow)
    update_both(slow, fast, 2, some=True)
    assert apart(slow, fast) < 1e-5


def test_normalized_observations_and_unbounded_actions() -> None:
    slow = make_td3(TANH, TANH, act=Leaf((ACT,), low=-1.0, high=1.0, names=("a", "b", "c")))
    slow.fit({key: 3 + 2 * value for key, value in batch_of(slow).items()})
    fast = copy.deepcopy(slow)
    update_both(slow, fast, 50)
    assert apart(slow, fast) < 1e-5


@pytest.mark.parametrize(("made", "settings"), [(make, {}), (make_td3, TANH)])
def test_either_continues_from_the_state_of_the_other(made: Any, settings: dict[str, Any]) -> None:
    slow, fast, again = (made(settings, settings, seed=seed) for seed in (0, 0, 5))
    update_both(slow, fast, 4)
    again.set_state(copy.deepcopy(fast.get_state()))
    update_both(again, slow, 4, first=4)
    assert apart(slow, again) < 1e-5


def test_resumed_updates_are_exact() -> None:
    whole = make_td3(TANH, TANH)
    accelerate(whole, native=True)
    half, resumed = copy.deepcopy(whole), make_td3(TANH, TANH, seed=9)
    for i in range(5):
        torch.manual_seed(i)
        update_each(i, batch_of(whole), whole, half)
    accelerate(resumed, native=True)
    resumed.update(batch_of(resumed))  # so that it has looked where its tensors are
    resumed.set_state(copy.deepcopy(half.get_state()))
    for i in range(5, 10):
        torch.manual_seed(i)
        update_each(i, batch_of(whole), whole, resumed)
    assert apart(whole, resumed) == 0
    require_same(whole.get_state(), resumed.get_state())


def test_moments_are_looked_for_where_they_are_after_some_have_moved() -> None:
    """What a loaded state leaves behind is free memory, where the first of the new moments may be
    and the others not."""
    slow = make_td3(TANH, TANH)
    fast = copy.deepcopy(slow)
    update_both(slow, fast, 2)
    left = [dict(state) for adam in fast.optims.values() for state in adam.state.values()]
    for adam in fast.optims.values():
        for place, state in adam.state.items():
            if place:
                state |= {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    for i in range(2, 4):
        update_each(i, batch_of(slow), slow, fast)
    require_same(slow.get_state(), fast.get_state())
    assert left


RECURRENT = node_of("policies.recurrent.Recurrent", width=4, inner={"_target_": GAUSSIAN})
RAPID = {"_target_": "embodied.learners.on_policy.ppo_rapid.PpoRapid"}
UNSUPPORTED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "gelu": (make, {}, {"activation": "gelu"}, "linear layers"),
    "layer norm": (make, {"value": {"layer_norm": True}}, {}, "linear layers"),
    "compile": (make, {"compile": True}, {}, "compile"),
    "another policy": (make, {}, RECURRENT, "Recurrent"),
    "other losses": (make, RAPID, {}, "other losses"),
    "td3, gelu": (make_td3, {}, {"activation": "gelu"}, "linear layers"),
    "td3, layer norm": (make_td3, {"layer_norm": True}, {}, "linear layers"),
    "td3, atoms": (make_td3, {"atoms": 11}, {}, "atoms"),
    "td3, compile": (make_td3, {"compile": True}, {}, "compile"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_says_so_and_runs_the_reference(name: str) -> None:
    made, settings, policy, reason = UNSUPPORTED[name]
    slow, fast = made(settings, policy), made(settings, policy)
    assert reason in (native_obstacle(fast) or "")
    if reason == "linear layers" or "atoms" in settings:
        accelerate(fast, native=True)
        update_each(0, batch_of(slow), slow, fast)
        assert apart(slow, fast) == 0


@pytest.mark.parametrize("made", [make, make_td3])
def test_without_a_compiler_the_reference_learns(
    monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    native.load.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    slow, fast = made({}, {}), made({}, {})
    accelerate(fast, native=True)
    assert native_obstacle(fast) == "no C++ compiler was found (no-such-compiler)"
    update_each(0, batch_of(slow), slow, fast)
    assert apart(slow, fast) == 0
    monkeypatch.undo()
    native.load.cache_clear()
    assert native_obstacle(made({}, {})) is None


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
