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
from embodied.learners.on_policy.ppo import Ppo
from embodied.nn import native
from tests.builders import node_of, require_same
from tests.tiers import usually

Settings = dict[str, Any]
TIMES, ENVS, OBS, ACT = 25, 8, 5, 3  # 200 decisions
BOX = Leaf((ACT,), low=-1.0, high=1.0)
TANH, RELU = {"activation": "tanh"}, {"activation": "relu"}
GAUSSIAN = "diagonal_gaussian.DiagonalGaussian"
SMALL: Settings = {"hidden": [20, 20]}
PPO: Settings = {"horizon": TIMES, "batch_size": 20, "epochs": 10}
OTHERS: Settings = {"batch_size": 40, **SMALL}
KINDS: dict[str, tuple[str, Settings, str]] = {
    "ppo": ("on_policy.ppo.Ppo", PPO, GAUSSIAN),
    "td3": ("off_policy.td3.Td3", OTHERS, "deterministic.Deterministic"),
    "sac": ("off_policy.sac.Sac", OTHERS, "gaussian.Gaussian"),
}
# Hundreds of steps of each: settings of the learner, and of the policy.
OPTIONS: dict[str, tuple[Settings, Settings]] = {
    "relu, two widths": ({"value": {"hidden": [33, 7], **RELU}}, RELU),
    "one layer, no layer": ({"value": {"hidden": []}}, {"hidden": [70]}),
    "entropy, two rates, linear": (
        {"entropy": 0.02, "value_weight": 0.8, "critic_lr": 1e-3, "schedule": "linear"},
        {},
    ),
    "adaptive, two rates": ({"schedule": "adaptive", "target_kl": 0.004, "critic_lr": 1e-3}, {}),
    "advantages of the batch": ({"advantage": "batch", "grad_clip": 0.0}, {}),
    "raw advantages": ({"advantage": "raw", "scale_rewards": True, "clip": 0.05}, {}),
    "fixed std": ({"normalize": False}, {"learn_std": False, "log_std": -0.5}),
    "large minibatches": ({"batch_size": 150, "epochs": 100}, {}),
    "larger than the batch": ({"batch_size": 200, "epochs": 100}, {"chunk": 2}),
    "stops at a divergence": ({"stop_kl": 0.002}, {}),
}


def make(
    kind: str,
    learner: Settings,
    policy: Settings,
    seed: int = 0,
    act: Leaf = BOX,
    execute: int | None = None,
) -> Any:
    """A learner of `kind` with these settings, and those of its policy."""
    torch.manual_seed(seed)
    spec = Spec({"state": Leaf((OBS,)), "critic/more": Leaf((2,))}, act, dt=0.1)
    target, usual, acting = KINDS[kind]
    own = SMALL if "inner" not in policy else {}
    made = build({**node_of(f"policies.{acting}"), **own, **policy}, Policy, spec=spec)
    given = {**node_of(f"learners.{target}"), **usual, **learner}
    run = RunPlan(decisions=4000, execute=execute)
    return build(given, Learner, policy=made, spec=spec, run=run)


TD3_OPTIONS: dict[str, tuple[Settings, Settings]] = {
    "weight decay, delays": (
        {**TANH, "weight_decay": 1e-3, "policy_delay": 3, "target_delay": 1, "actor_start": 30},
        TANH,
    ),
    "two widths, two rates": (
        {**TANH, "hidden": [33, 7], "critic_lr": 1e-3, "tau": 0.02},
        {**TANH, "hidden": [70]},
    ),
    "no hidden layer, no target noise": (
        {"hidden": [], "target_noise": 0.0, "noise_clip": 0.0},
        {"hidden": []},
    ),
    "several pieces, every update": ({**TANH, "batch_size": 300, "policy_delay": 1}, TANH),
    "chunk": ({**TANH, "critic_obs": ["state"]}, {**TANH, "chunk": 2}),
}


NORM: Settings = {"layer_norm": True}
NORMED = {**TANH, **NORM}
SAC_OPTIONS: dict[str, tuple[Settings, Settings]] = {
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


def batch_of(learner: Any, some: bool = False) -> Tensors:
    """Transitions; for PPO decisions, with `some` of them not to be learned from."""
    onwards = isinstance(learner, Ppo)
    shape = (TIMES, ENVS) if onwards else (learner.batch_size,)
    obs = {"state": 2 * torch.randn(*shape, OBS), "critic/more": torch.randn(*shape, 2)}
    shared = {f"obs/{key}": value for key, value in obs.items()}
    shared |= {f"next_obs/{key}": value.roll(-1, 0) for key, value in obs.items()}
    shared["reward"] = torch.randn(shape) + obs["state"][..., 0]
    policy = learner.policy
    if not onwards:
        action = 2 * torch.rand(*shape, policy.size) - 1
        return {**shared, "action": action, "discount": 0.9 * (torch.rand(shape) > 0.1).float()}
    flat = {key: value.flatten(0, 1) for key, value in obs.items()}
    noise = policy.sample_noise(TIMES * ENVS, explore=True)
    _, carry = policy.act(flat, policy.initial(TIMES * ENVS), noise)
    return {
        **shared,
        "action": carry["row/action"].detach().view(*shape, -1),
        "discount": torch.full(shape, 0.9),
        "ended": torch.rand(shape) < 0.1,
        "first": torch.zeros(shape, dtype=torch.bool),
        "valid": torch.rand(shape) < 0.9 if some else torch.ones(shape, dtype=torch.bool),
    }


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


def accelerated(slow: Any) -> Any:
    """A copy of a learner that native code updates."""
    fast = copy.deepcopy(slow)
    accelerate(fast, native=True)
    assert native_obstacle(fast) is None
    return fast


def update_both(
    slow: Any, fast: Any, updates: int, first: int = 0, some: bool = False
) -> list[list[Tensors]]:
    """Update by the reference and by native code; returns the metrics of both."""
    found: list[list[Tensors]] = []
    for i in range(first, first + updates):
        torch.manual_seed(100 + i)
        found.append(update_each(i, batch_of(slow, some), slow, fast))
    return found


def require_metrics(expected: Tensors, metrics: Tensors, rtol: float = 1e-4) -> None:
    assert expected.keys() == metrics.keys()
    for key, value in expected.items():
        torch.testing.assert_close(metrics[key], value, rtol=rtol, atol=1e-5, msg=key)


CASES = [("ppo", name) for name in OPTIONS] + [("td3", name) for name in TD3_OPTIONS]
FEW = ("relu, two widths", "raw advantages", "adaptive, two rates", "larger than the batch")
FEW += ("weight decay, delays", "several pieces, every update", "chunk")
USUAL = [case for case in CASES if case[1] in FEW]


FEW += ("larger than the batch", "weight decay, delays", "several pieces, every update", "chunk")


@pytest.mark.parametrize(("kind", "name"), usually(USUAL, CASES))
def test_parameters_and_metrics_equal_the_reference(kind: str, name: str) -> None:
    slow = make(kind, *(OPTIONS if kind == "ppo" else TD3_OPTIONS)[name])
    before, fast = copy.deepcopy(slow), accelerated(slow)
    found = update_both(slow, fast, 3 if kind == "ppo" else 100)
    assert apart(before, slow) > 0.01 and apart(slow, fast) < 1e-5
    for expected, metrics in found:
        require_metrics(expected, metrics, rtol=1e-3)
    require_same(slow.get_state(), fast.get_state())


ALONG = {("sac", name): options for name, options in SAC_OPTIONS.items()} | {
    ("td3", "default sizes"): SAC_OPTIONS["default sizes"],
    ("td3", "layer norm"): ({"layer_norm": True, "hidden": [130, 20]}, {"layer_norm": True}),
}


ALONG = {("sac", name): options for name, options in SAC_OPTIONS.items()} | {
    ("td3", "default sizes"): SAC_OPTIONS["default sizes"],
    ("td3", "layer norm"): ({"layer_norm": True, "hidden": [130, 20]}, {"layer_norm": True}),
}


@pytest.mark.parametrize("case", ALONG, ids=" ".join)
def test_an_update_equals_the_reference_along_a_training(case: tuple[str, str]) -> None:
    """From the same state each: two trainings of ReLUs part after a change of 1e-7 of one weight,
    so the states after many updates say nothing."""
    slow = make(case[0], *ALONG[case])
    fast = accelerated(slow)
    for i in range(30):
        ((expected, metrics),) = update_both(slow, fast, 1, first=i)
        assert apart(slow, fast) < 2e-5
        require_metrics(expected, metrics)
        if i == 29:
            require_same(slow.get_state(), fast.get_state())
        fast.set_state(copy.deepcopy(slow.get_state()))


def test_sac_with_priorities_asks_the_reference() -> None:
    slow = make("sac", {}, {})
    fast = accelerated(slow)
    rows = batch_of(slow) | {"weight": torch.rand(slow.batch_size)}
    update_each(0, rows, slow, fast)
    assert apart(slow, fast) == 0 and slow.priority is not None
    torch.testing.assert_close(fast.priority, slow.priority)


UNIT = Leaf((ACT,), low=-3.0, high=3.0, unit="normalized")
NAMED = Leaf((ACT,), low=-1.0, high=1.0, names=("a", "b", "c"))


def test_executed_part_of_a_chunk_and_decisions_left_out() -> None:
    slow = make("ppo", {}, {"chunk": 3}, execute=2)
    fast = accelerated(slow)
    update_both(slow, fast, 2, some=True)
    assert apart(slow, fast) < 1e-5


UNIT = Leaf((ACT,), low=-3.0, high=3.0, unit="normalized")
NAMED = Leaf((ACT,), low=-1.0, high=1.0, names=("a", "b", "c"))


@pytest.mark.parametrize(("kind", "act", "settings"), [("sac", UNIT, NORM), ("td3", NAMED, TANH)])
def test_normalized_observations_and_unbounded_actions(
    kind: str, act: Leaf, settings: Settings
) -> None:
    slow = make(kind, settings, TANH, act=act)
    assert kind == "td3" or not slow.policy.squashes
    slow.fit({key: 3 + 2 * value for key, value in batch_of(slow).items()})
    fast = accelerated(slow)
    update_both(slow, fast, 10 if kind == "sac" else 50)
    assert apart(slow, fast) < 1e-5


@pytest.mark.parametrize(
    ("kind", "learner", "policy"), [("ppo", {}, {}), ("td3", TANH, TANH), ("sac", NORM, NORMED)]
)
def test_either_continues_from_the_state_of_the_other(
    kind: str, learner: Settings, policy: Settings
) -> None:
    slow, again = (make(kind, learner, policy, seed) for seed in (0, 5))
    fast = accelerated(slow)
    update_both(slow, fast, 4)
    again.set_state(copy.deepcopy(fast.get_state()))
    onwards = accelerated(slow)
    update_both(again, onwards, 4, first=4)
    assert apart(onwards, again) < 1e-5


@pytest.mark.parametrize("kind", ["td3", "sac"])
def test_resumed_updates_are_exact(kind: str) -> None:
    whole = accelerated(make(kind, {}, TANH))
    half, resumed = copy.deepcopy(whole), accelerated(make(kind, {}, TANH, seed=9))
    for i in range(5):
        update_each(i, batch_of(whole), whole, half)
    resumed.update(batch_of(resumed))  # so that it has looked where its tensors are
    resumed.set_state(copy.deepcopy(half.get_state()))
    for i in range(5, 10):
        update_each(i, batch_of(whole), whole, resumed)
    assert apart(whole, resumed) == 0
    require_same(whole.get_state(), resumed.get_state())


@pytest.mark.parametrize("kind", ["td3", "sac"])
def test_moments_are_looked_for_where_they_are_after_some_have_moved(kind: str) -> None:
    """What a loaded state leaves behind is free memory, where the first of the new moments may be
    and the others not."""
    slow = make(kind, {}, TANH)
    fast = accelerated(slow)
    update_both(slow, fast, 2)
    left = [dict(state) for adam in fast.optims.values() for state in adam.state.values()]
    for adam in fast.optims.values():
        for place, state in adam.state.items():
            if place:
                state |= {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    update_both(slow, fast, 2, first=2)
    require_same(slow.get_state(), fast.get_state())
    assert left


RECURRENT = node_of("policies.recurrent.Recurrent", width=4, inner=node_of(f"policies.{GAUSSIAN}"))
RAPID = node_of("learners.on_policy.ppo_rapid.PpoRapid")
GELU = {"activation": "gelu"}
UNSUPPORTED: list[tuple[str, Settings, Settings, str]] = [
    *((kind, {}, GELU, "linear layers") for kind in KINDS),
    *((kind, {"compile": True}, {}, "compile") for kind in KINDS),
    ("ppo", {"value": {"layer_norm": True}}, {}, "linear layers"),
    ("ppo", {}, RECURRENT, "Recurrent"),
    ("ppo", RAPID, {}, "other losses"),
    ("td3", {"atoms": 11}, {}, "atoms"),
]


@pytest.mark.parametrize(("kind", "settings", "policy", "reason"), UNSUPPORTED)
def test_what_is_not_supported_says_so_and_runs_the_reference(
    kind: str, settings: Settings, policy: Settings, reason: str
) -> None:
    slow, fast = make(kind, settings, policy), make(kind, settings, policy)
    assert reason in (native_obstacle(fast) or "")
    if reason in ("linear layers", "atoms"):
        accelerate(fast, native=True)
        update_each(0, batch_of(slow), slow, fast)
        assert apart(slow, fast) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_compiler_the_reference_learns(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    native.load.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    slow, fast = make(kind, {}, {}), make(kind, {}, {})
    accelerate(fast, native=True)
    assert native_obstacle(fast) == "no C++ compiler was found (no-such-compiler)"
    update_each(0, batch_of(slow), slow, fast)
    assert apart(slow, fast) == 0
    monkeypatch.undo()
    native.load.cache_clear()
    assert native_obstacle(fast) is None


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
