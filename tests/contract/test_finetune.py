"""Every fine-tuner YAML over a flow base: begins as its base, never changes it, loads alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import build, resolve
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors

FILES = sorted(Path("configs/finetune").glob("*.yaml"))
SPEC = Spec({"state": Leaf((5,))}, Leaf((3,), low=-1.0, high=1.0), dt=0.05)
INNER = {"_target_": "policies.gaussian.Gaussian", "hidden": [16], "zero_head": True}


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def steered(request: pytest.FixtureRequest) -> Policy:
    torch.manual_seed(0)
    base = build({"_target_": "policies.generative.flow.Flow", "chunk": 4, "width": 16}, spec=SPEC)
    node: dict[str, Any] = yaml.safe_load(request.param.read_text())
    return resolve(node["_target_"]).on(base, node, INNER)


def play(policy: Policy, steps: int = 9, rows: int = 3) -> torch.Tensor:
    """Actions of `rows` rows, each of which begins again at another step."""
    torch.manual_seed(1)
    actor = Actor(policy, rows)
    out = []
    for t in range(steps):
        obs: Tensors = {"state": torch.sin(torch.arange(rows * 5.0) + t).view(rows, 5)}
        first = torch.arange(rows) % steps == t if t else torch.ones(rows, dtype=torch.bool)
        out.append(actor(obs, first))
    return torch.stack(out)


def test_the_learner_sees_the_inner_action(steered: Policy) -> None:
    actor = Actor(steered, 3, explore=True)
    actor({"state": torch.zeros(3, 5)}, torch.ones(3, dtype=torch.bool))
    assert actor.choice.shape == (3, *steered.inner.spec.act.shape)
    assert actor.choice.abs().max() <= 1
    assert set(actor.seen) == set(steered.inner.spec.obs)


def test_the_base_is_frozen(steered: Policy) -> None:
    assert not any(p.requires_grad for p in steered.base.parameters())
    before = {k: v.clone() for k, v in steered.base.state_dict().items()}
    spec = steered.inner.spec
    node = {"_target_": "embodied.learners.off_policy.sac.Sac", "batch_size": 8, "hidden": [16]}
    learner = build(node, policy=steered.inner, spec=spec)
    rows = {
        **{
            f"{p}/{k}": torch.randn(8, *v.shape)
            for p in ("obs", "next_obs")
            for k, v in spec.obs.items()
        },
        "action": torch.rand(8, spec.act.size) * 2 - 1,
        "reward": torch.ones(8),
        "discount": torch.full((8,), 0.9),
    }
    inner = [p.clone() for p in steered.inner.parameters()]
    learner.update(rows)
    assert all(torch.equal(before[k], v) for k, v in steered.base.state_dict().items())
    assert any(
        not torch.equal(a, b) for a, b in zip(inner, steered.inner.parameters(), strict=True)
    )


def test_it_loads_without_its_base(steered: Policy, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "1", steered, 1)
    loaded = checkpoint.load_policy(tmp_path / "1", SPEC)
    assert torch.equal(play(steered), play(loaded))


def test_actions_stay_in_the_box_and_follow_the_inner_policy(steered: Policy) -> None:
    calm = play(steered)
    for p in steered.inner.parameters():
        torch.nn.init.normal_(p)
    moved = play(steered)
    assert moved.abs().max() <= 1
    assert not torch.allclose(calm, moved)


def test_a_residual_begins_as_its_base() -> None:
    """Same noise, no correction: the base's own chunk, step by step, bit for bit."""
    torch.manual_seed(0)
    base = build({"_target_": "policies.generative.flow.Flow", "chunk": 4, "width": 16}, spec=SPEC)
    node = {"_target_": "policies.steering.residual.Residual", "scale": 0.1}
    residual = resolve(node["_target_"]).on(base, node, INNER)
    obs = {"state": torch.randn(2, 5)}
    noise = residual.draw(2)
    carry = residual.initial(2)
    plan, _ = base.act(obs, {}, noise[:, residual.inner_noise :])
    for step in range(4):
        seen, carry = residual.observe(obs, carry, residual.draw(2) if step else noise)
        action, carry = residual.act(seen, carry, torch.zeros_like(noise))
        assert torch.equal(action[:, 0], plan[:, step])


def test_latent_is_the_base_at_the_chosen_noise() -> None:
    torch.manual_seed(0)
    base = build({"_target_": "policies.generative.flow.Flow", "chunk": 4, "width": 16}, spec=SPEC)
    node = {"_target_": "policies.steering.dsrl.Latent", "bound": 1.5}
    latent = resolve(node["_target_"]).on(base, node, INNER | {"zero_head": False})
    obs = {"state": torch.randn(2, 5)}
    actions, carry = latent.act(obs, latent.initial(2), latent.draw(2, explore=True))
    expected, _ = base.act(obs, {}, 1.5 * carry["row/action"])
    assert torch.equal(actions, expected)
