"""Every fine-tuner YAML over a flow base: begins as its base, never changes it, loads alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, Node, resolve
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.steering.steered import Steered
from tests.builders import make_learner, make_policy, node_of, transitions
from tests.learners.parts import copies, moved

FILES = sorted(Path("configs/finetune").glob("*.yaml"))
NODES: dict[str, dict[str, Any]] = {file.stem: yaml.safe_load(file.read_text()) for file in FILES}
WITH_INNER = [n for n in NODES if issubclass(resolve(NODES[n]["_target_"], PolicyWrapper), Steered)]
SPEC = Spec({"state": Leaf((5,))}, Leaf((3,), low=-1.0, high=1.0), dt=0.05)
INNER = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [16], "zero_head": True}
MOVING = INNER | {"zero_head": False}


def make_base(kind: str = "flow.Flow") -> Policy:
    return make_policy(f"generative.{kind}", SPEC, chunk=4, width=16)


def make(name: str) -> PolicyWrapper:
    """The wrapper of configs/finetune/NAME.yaml around a small base policy."""
    node = NODES[name]
    base = make_base("diffusion.Diffusion" if "Diffusion" in node["_target_"] else "flow.Flow")
    return resolve(node["_target_"], PolicyWrapper).wrap(
        base, node, *[INNER] * (name in WITH_INNER)
    )


@pytest.mark.parametrize("name", NODES)
def test_the_trained_part_is_put_back_and_it_loads_without_its_base(
    name: str, tmp_path: Path
) -> None:
    wrapped = make(name)
    before = play(wrapped)
    whole = wrapped.with_trained(wrapped.trainable())
    assert isinstance(whole, PolicyWrapper)
    assert torch.equal(play(whole), before)
    checkpoint.save(tmp_path / "1", wrapped.inference_policy(), 1)
    assert torch.equal(play(checkpoint.load_policy(tmp_path / "1", SPEC)), before)


@pytest.mark.parametrize("name", NODES)
def test_it_says_whether_it_needs_an_inner_policy(name: str) -> None:
    wrong = [] if name in WITH_INNER else [INNER]
    with pytest.raises(ConfigError, match="policy="):
        resolve(NODES[name]["_target_"], PolicyWrapper).wrap(make_base(), NODES[name], *wrong)


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


@pytest.mark.parametrize("name", WITH_INNER)
def test_the_learner_sees_the_inner_action_which_moves_what_is_done(name: str) -> None:
    steered: Any = make(name)
    actor = Actor(steered, 3, explore=True)
    actor({"state": torch.zeros(3, 5)}, torch.ones(3, dtype=torch.bool))
    assert actor.stored_action.shape == (3, *steered.inner.spec.act.shape)
    assert actor.stored_action.abs().max() <= 1
    assert set(actor.decision_obs) == set(steered.inner.spec.obs)
    calm = play(steered)
    for p in steered.inner.parameters():
        torch.nn.init.normal_(p)
    acted = play(steered)
    assert acted.abs().max() <= 1 and not torch.allclose(calm, acted)


@pytest.mark.parametrize("name", WITH_INNER)
def test_the_base_is_frozen(name: str) -> None:
    steered: Any = make(name)
    assert not any(p.requires_grad for p in steered.base.parameters())
    base, inner = copies(steered.base.state_dict().values()), copies(steered.inner.parameters())
    spec = steered.inner.spec
    learner = make_learner("off_policy.sac.Sac", steered.inner, batch_size=8, hidden=[16])
    learner.update(transitions(8, spec))
    assert not any(moved(base, steered.base.state_dict().values()))
    assert any(moved(inner, steered.inner.parameters()))


def wrapping(kind: str, base: Policy, inner: Node, **settings: Any) -> Any:
    node = node_of(f"policies.steering.{kind}", **settings)
    return resolve(node["_target_"], PolicyWrapper).wrap(base, node, inner)


def test_a_residual_begins_as_its_base() -> None:
    """Same noise, no correction: the base's own chunk, step by step, bit for bit."""
    base = make_base()
    residual = wrapping("residual.Residual", base, INNER, scale=0.1)
    obs, noise = {"state": torch.randn(2, 5)}, residual.sample_noise(2)
    plan, _ = base.act(obs, {}, noise[:, residual.inner_noise :])
    carry = residual.initial(2)
    for step in range(4):
        seen, carry = residual.observe(obs, carry, residual.sample_noise(2) if step else noise)
        action, carry = residual.act(seen, carry, torch.zeros_like(noise))
        assert torch.equal(action[:, 0], plan[:, step])


def corrected(**settings: Any) -> Any:
    return wrapping("residual.Residual", make_base(), MOVING, scale=0.1, **settings)


def test_a_correction_of_some_elements_leaves_the_others_alone() -> None:
    residual = corrected(dims=[2, 0])
    assert residual.inner.spec.act.shape == (2,)
    noise = residual.sample_noise(4, explore=True)
    seen, carry = residual.observe({"state": torch.randn(4, 5)}, residual.initial(4), noise)
    assert seen["base_action"].shape == (4, 3)
    action, carry = residual.act(seen, carry, noise)
    u, base = carry["row/action"], seen["base_action"]
    wanted = torch.stack([0.1 * u[:, 1], torch.zeros(4), 0.1 * u[:, 0]], 1)
    assert torch.equal(action[:, 0], (base + wanted).clamp(-1, 1))
    for dims in ([], [3], [0, 0]):
        with pytest.raises(ConfigError, match=r"finetune\.dims=.* from 0 to 2"):
            corrected(dims=dims)


@pytest.mark.parametrize("dims", [None, [0, 1]])
def test_anothers_action_is_described_exactly(dims: list[int] | None) -> None:
    """Small corrections are of the base's own action; the rest of large ones counts as the base's,
    as does all that is not corrected."""
    residual = corrected(dims=dims)
    base = torch.tensor([[0.2, -0.5, 0.0]])
    near, far = base + torch.tensor([[0.05, -0.1, 0.0]]), torch.tensor([[0.9, -0.5, -1.0]])
    own, u = residual.described(base, near)
    torch.testing.assert_close(own, base)
    torch.testing.assert_close(u[:, :2], torch.tensor([[0.5, -1.0]]))
    own, u = residual.described(base, far)
    assert u[0, 0] == 1 and u.abs().max() <= 1
    torch.testing.assert_close(own + residual.correction(u), far)
    assert own[0, 2].item() == pytest.approx(-1.0 if dims else -0.9)
