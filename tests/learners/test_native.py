"""PPO, TD3 and SAC in native code equal the PyTorch reference; what they do not support runs it."""

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
from embodied.learners.off_policy.sac import Sac
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
    "entropy": ({"entropy": 0.02, "value_weight": 0.8}, {}),
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


SAC = "embodied.learners.off_policy.sac.Sac"
NORMED = {**TANH, "layer_norm": True}
# Settings of the learner, and of the policy.
SAC_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default sizes": ({"hidden": [256, 256]}, {"hidden": [256, 256]}),
    "layer norm": (
        {"layer_norm": True, "entropy_in_backup": False, "target_entropy": 0.0},
        {**NORMED, "hidden": [33, 20, 7]},
    ),
    "subset of five critics, three slices": (
        {"critics": 5, "utd": 3, "actor_objective": "mean", "hidden": [33, 20]},
        {"soft": False},
    ),
    "three normed critics, one in the target": (
        {"critics": 3, "subset": 1, "layer_norm": True, "hidden": [33, 20], "actor_start": 3},
        {"layer_norm": True, "soft": False, "log_std": [-1.0, 0.5]},
    ),
    "no hidden layer, chunk, constant temperature": (
        {"hidden": [], "temperature_lr": 0.0, "initial_temperature": 0.1},
        {"hidden": [], "chunk": 2},
    ),
    "several pieces, rates": (
        {"batch_size": 300, "critic_lr": 1e-3, "actor_lr": 2e-3, "tau": 0.05, "layer_norm": True},
        TANH,
    ),
}


def make_sac(
    learner: dict[str, Any], policy: dict[str, Any], seed: int = 0, act: Leaf | None = None
) -> Sac:
    torch.manual_seed(seed)
    obs = {"state": Leaf((OBS,)), "critic/more": Leaf((2,))}
    spec = Spec(obs, act or Leaf((ACT,), low=-1.0, high=1.0), dt=0.1)
    gaussian = "embodied.policies.gaussian.Gaussian"
    made = build({"_target_": gaussian, **SMALL, **policy}, Policy, spec=spec)
    given = {"_target_": SAC, "batch_size": 40, **SMALL, **learner}
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


def td3_batch(learner: Td3 | Sac) -> Tensors:
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


ALONG = [("sac", name) for name in SAC_OPTIONS]
ALONG += [("td3", "default sizes"), ("td3", "layer norm")]
WIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default sizes": ({"hidden": [256, 256]}, {"hidden": [256, 256]}),
    "layer norm": ({"layer_norm": True, "hidden": [130, 20]}, {"layer_norm": True}),
}


@pytest.mark.parametrize(("kind", "name"), ALONG)
def test_an_update_equals_the_reference_along_a_training(kind: str, name: str) -> None:
    """From the same state each: two trainings of ReLUs part after a change of 1e-7 of one weight,
    so the states after many updates say nothing."""
    made, options = (make_sac, SAC_OPTIONS) if kind == "sac" else (make_td3, WIDE)
    slow: Any = made(*options[name])
    fast = copy.deepcopy(slow)
    accelerate(fast, native=True)
    assert native_obstacle(fast) is None
    for i in range(30):
        torch.manual_seed(100 + i)
        expected, metrics = update_each(i, batch_of(slow), slow, fast)
        assert apart(slow, fast) < 2e-5
        assert expected.keys() == metrics.keys()
        for key, value in expected.items():
            torch.testing.assert_close(metrics[key], value, rtol=1e-4, atol=1e-5, msg=key)
        if i == 29:
            require_same(slow.get_state(), fast.get_state())
        fast.set_state(copy.deepcopy(slow.get_state()))


def test_sac_with_priorities_asks_the_reference() -> None:
    slow = make_sac({}, {})
    fast = copy.deepcopy(slow)
    accelerate(fast, native=True)
    rows = batch_of(slow) | {"weight": torch.rand(slow.batch_size)}
    update_each(0, rows, slow, fast)
    assert apart(slow, fast) == 0 and slow.priority is not None
    torch.testing.assert_close(fast.priority, slow.priority)


def test_sac_of_normalized_observations_and_actions_without_bounds() -> None:
    unit = Leaf((ACT,), low=-3.0, high=3.0, unit="normalized")
    slow = make_sac({"layer_norm": True}, TANH, act=unit)
    assert not slow.policy.squashes
    slow.fit({key: 3 + 2 * value for key, value in batch_of(slow).items()})
    fast = copy.deepcopy(slow)
    update_both(slow, fast, 10)
    assert apart(slow, fast) < 1e-5


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


@pytest.mark.parametrize(("made", "settings"), [(make, {}), (make_td3, TANH), (make_sac, NORMED)])
def test_either_continues_from_the_state_of_the_other(made: Any, settings: dict[str, Any]) -> None:
    learner = {
        key: value for key, value in settings.items() if made is not make_sac or key != "activation"
    }
    slow, fast, again = (made(learner, settings, seed=seed) for seed in (0, 0, 5))
    update_both(slow, fast, 4)
    again.set_state(copy.deepcopy(fast.get_state()))
    update_both(again, slow, 4, first=4)
    assert apart(slow, again) < 1e-5


@pytest.mark.parametrize("made", [make_td3, make_sac])
def test_resumed_updates_are_exact(made: Any) -> None:
    whole = made({}, TANH)
    accelerate(whole, native=True)
    half, resumed = copy.deepcopy(whole), made({}, TANH, seed=9)
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


@pytest.mark.parametrize("made", [make_td3, make_sac])
def test_moments_are_looked_for_where_they_are_after_some_have_moved(made: Any) -> None:
    """What a loaded state leaves behind is free memory, where the first of the new moments may be
    and the others not."""
    slow = made({}, TANH)
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
    "sac, gelu": (make_sac, {}, {"activation": "gelu"}, "linear layers"),
    "sac, compile": (make_sac, {"compile": True}, {}, "compile"),
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


@pytest.mark.parametrize("made", [make, make_td3, make_sac])
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
