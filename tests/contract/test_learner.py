"""Every learner in configs/learner keeps the contract; found by listing the folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.core.build import ConfigError, build, resolve
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, nest, under
from embodied.learners.learner import Learner
from policies.steering.steered import Steered

CONFIGS = Path(__file__).parents[2] / "configs"
LEARNERS = sorted(path.stem for path in (CONFIGS / "learner").glob("*.yaml"))
SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
ROWS = 8  # of one gradient step
HORIZON = 6  # decisions of an on-policy batch, of each of 4 rows
KINDS = ("policy", "finetune")


def node(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())


def make(name: str, seed: int = 0) -> Learner:
    """The learner with the first policy that it accepts, or fine-tuner of a small flow policy."""
    settings, reasons = node("learner", name) | {"batch_size": ROWS}, []
    if "horizon" in settings:
        settings["horizon"] = HORIZON
    for group, path in candidates():
        torch.manual_seed(seed)
        try:
            policy = (
                build(node(group, path.stem), Policy, spec=SPEC)
                if group == "policy"
                else steer(path)
            )
            return build(settings, Learner, policy=policy, spec=SPEC, total_steps=100)
        except ConfigError as error:
            reasons.append(str(error))
    raise AssertionError(f"{name} takes no policy of configs/policy: {reasons}")


def candidates() -> list[tuple[str, Path]]:
    """Every policy, "gaussian" first, then every fine-tuner."""
    found = [(group, path) for group in KINDS for path in (CONFIGS / group).glob("*.yaml")]
    return sorted(found, key=lambda f: (KINDS.index(f[0]), f[1].stem != "gaussian", f[1].stem))


def steer(path: Path) -> Policy:
    """What a learner is given of a fine-tuner over a flow policy."""
    steering: dict[str, Any] = yaml.safe_load(path.read_text())
    kind = "diffusion.Diffusion" if "Diffusion" in steering["_target_"] else "flow.Flow"
    small = {"chunk": 2, "width": 16}
    base = build({"_target_": f"policies.generative.{kind}", **small}, Policy, spec=SPEC)
    wrapper = resolve(steering["_target_"], PolicyWrapper)
    inner = (node("policy", "gaussian"),) if issubclass(wrapper, Steered) else ()
    return wrapper.wrap(base, steering, *inner).trainable()


def batch_for(learner: Learner, seed: int = 0) -> Tensors:
    """Rows of the kind that it says it is fed."""
    n, generator = learner.batch_size, torch.Generator().manual_seed(seed)
    states = torch.randn(2, n, 3, generator=generator)
    if learner.data == "on_policy":
        return segment(learner, generator)
    if learner.rows == "chunks":
        steps = learner.policy.chunk
        action = torch.rand(n, steps, 2, generator=generator) * 2 - 1
        valid = torch.ones(n, steps, dtype=torch.bool)
        return {"obs/state": states[0], "action": action, "valid": valid}
    rows = {
        "obs/state": states[0],
        "action": torch.rand(n, 2 * learner.policy.chunk, generator=generator) * 2 - 1,
        "reward": torch.randn(n, generator=generator),
        "discount": 0.99 * (torch.rand(n, generator=generator) > 0.1),
        "next_obs/state": states[1],
        "violated": torch.rand(n, generator=generator) < 0.2,
    }
    foreseen = {
        "next_action": torch.rand(n, 2 * learner.policy.chunk, generator=generator) * 2 - 1,
        "returns": torch.randn(n, generator=generator),
    }
    return rows | {key: foreseen[key] for key in learner.columns}


def segment(learner: Learner, generator: torch.Generator, rows: int = 4) -> Tensors:
    """Decisions of the policy itself, in the order of time, as the rollout loop hands them out."""
    policy, times = learner.policy, (HORIZON, rows)
    states = torch.randn(*times, 2, 3, generator=generator)
    with torch.no_grad():
        obs, noise = (
            {"state": states[:, :, 0].flatten(0, 1)},
            policy.sample_noise(HORIZON * rows, True),
        )
        plan, carry = policy.act(*policy.observe(obs, policy.initial(len(noise)), noise), noise)
    kept = {"action": plan.flatten(1), **under(carry, "row")}
    ended = torch.rand(times, generator=generator) < 0.2
    over = ended & (torch.rand(times, generator=generator) < 0.5)
    first = torch.cat([torch.ones(1, rows, dtype=torch.bool), ended[:-1]])
    return {
        "obs/state": states[:, :, 0],
        **{key: value.unflatten(0, times) for key, value in kept.items()},
        "reward": torch.randn(times, generator=generator),
        "discount": 0.99 * ~over,
        "next_obs/state": states[:, :, 1],
        "ended": ended,
        "first": first,
        "valid": torch.ones(times, dtype=torch.bool),
        **nest(policy.initial(rows), "carry"),
    }


def updates(learner: Learner, first: int, last: int) -> None:
    for seed in range(first, last):
        torch.manual_seed(seed)
        learner.update(batch_for(learner, seed))


def weights(learner: Learner) -> Tensors:
    return {key: value.clone() for key, value in learner.state_dict().items()}


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", LEARNERS)
def test_metrics_are_finite_detached_scalars(name: str) -> None:
    learner = make(name)
    assert learner.data in ("offline", "off_policy", "on_policy")
    assert learner.batch_size % ROWS == 0
    metrics = learner.update(batch_for(learner))
    assert metrics
    for key, value in metrics.items():
        assert value.ndim == 0, key
        assert not value.requires_grad, key
        assert torch.isfinite(value), key


@pytest.mark.parametrize("name", LEARNERS)
def test_updates_change_the_policy_and_not_the_batch(name: str) -> None:
    learner = make(name)
    before = {key: value.clone() for key, value in learner.policy.state_dict().items()}
    batch = batch_for(learner)
    kept = {key: value.clone() for key, value in batch.items()}
    learner.update(batch)
    learner.update(batch)
    assert not same(before, dict(learner.policy.state_dict()))
    assert same(batch, kept)


@pytest.mark.parametrize("name", LEARNERS)
def test_same_seed_same_parameters(name: str) -> None:
    one, other, third = make(name), make(name), make(name, seed=1)
    for learner in (one, other, third):
        updates(learner, 0, 4)
    assert same(weights(one), weights(other))
    assert not same(weights(one), weights(third))


@pytest.mark.parametrize("name", LEARNERS)
def test_resumes_exactly(name: str, tmp_path: Path) -> None:
    whole = make(name)
    updates(whole, 0, 3)
    torch.save(whole.get_state(), tmp_path / "learner.pt")
    updates(whole, 3, 6)
    other = make(name, seed=1)
    updates(other, 7, 8)
    other.set_state(torch.load(tmp_path / "learner.pt", weights_only=True))
    updates(other, 3, 6)
    assert same(weights(whole), weights(other))


@pytest.mark.parametrize("name", LEARNERS)
def test_a_copy_learns_on_its_own(name: str) -> None:
    learner = make(name)
    updates(learner, 0, 1)
    other, before = copy.deepcopy(learner), weights(learner)
    updates(other, 1, 2)
    assert same(before, weights(learner))
    assert not same(before, weights(other))


@pytest.mark.parametrize("name", LEARNERS)
def test_unknown_settings_are_refused(name: str) -> None:
    policy = build(node("policy", "gaussian"), Policy, spec=SPEC)
    wrong = node("learner", name) | {"batch_sise": 4}
    with pytest.raises(ConfigError, match='did you mean "batch_size"'):
        build(wrong, Learner, policy=policy, spec=SPEC, total_steps=100)
