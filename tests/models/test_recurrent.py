"""The recurrent latent model, and policies of its latents outside of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import read_episodes
from embodied.models import dynamics, latent_policy
from embodied.models.dynamics import LATENT, LatentDynamics
from embodied.models.latent_policy import LatentPolicy
from embodied.models.recurrent import RecurrentModel, balanced_kl
from embodied.models.train import TrainConfig, train
from embodied.policies.wrappers.translated import joined
from tests.builders import make_policy, node_of
from tests.linear_system import SPEC, record

SMALL = {"width": 24, "groups": 4, "classes": 4, "hidden": [32], "length": 8, "batch_size": 16}


def node(**settings: Any) -> dict[str, Any]:
    return node_of("models.recurrent.RecurrentModel", **SMALL, **settings)


def base(spec: Spec, **settings: Any) -> Policy:
    return make_policy("diagonal_gaussian.DiagonalGaussian", spec, **settings)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model of the linear system that is hardly trained, and its dataset."""
    folder = tmp_path_factory.mktemp("recurrent")
    demos, out = str(record(folder / "demos", 20)), str(folder / "model")
    train(TrainConfig(node(most_updates=40), demos, out, device="cpu"))
    return {"model": out, "starts": demos}


def test_balanced_kl_by_hand() -> None:
    """q = (3/4, 1/4), p = (1/2, 1/2): KL = 3/4 ln 3/2 + 1/4 ln 1/2. The gradient of the prior's
    logits is b (p - q), that of the posterior's (1 - b) q_i (ln q_i / p_i - KL)."""
    q = torch.tensor([[0.75, 0.25]]).log().requires_grad_()
    p = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    kl = balanced_kl(q, p, 0.8)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl.item() == pytest.approx(expected)
    kl.backward()
    assert p.grad is not None and q.grad is not None
    assert p.grad.tolist()[0] == pytest.approx([0.8 * -0.25, 0.8 * 0.25])
    by_hand = [0.2 * 0.75 * (math.log(1.5) - expected), 0.2 * 0.25 * (math.log(0.5) - expected)]
    assert q.grad.tolist()[0] == pytest.approx(by_hand)


def test_a_step_by_hand() -> None:
    """h is the GRU's, z the prior's most likely classes for zero noise, another class for noise
    that favours it; the reward is scaled back."""
    torch.manual_seed(0)
    model = build(node(groups=1, classes=2), RecurrentModel, spec=SPEC)
    model.shift.fill_(3.0)
    model.scale.fill_(2.0)
    latent, action = torch.rand(1, 26), torch.tensor([[0.5]])
    h, z = latent[:, :24], latent[:, 24:]
    entered = torch.nn.functional.silu(model.enter[0](torch.cat([z, action], 1)))
    expected = model.cell(entered, h)
    with torch.no_grad():
        model.prior[-1].weight.zero_()
        model.prior[-1].bias.copy_(torch.tensor([0.0, 1.0]))
    found = model.step({LATENT: latent}, action, torch.zeros(1, 3))
    assert torch.allclose(found.next_obs[LATENT][:, :24], expected)
    assert found.next_obs[LATENT][:, 24:].tolist() == [[0.0, 1.0]]
    out = model.reward_head(found.next_obs[LATENT])[:, 0]
    assert torch.allclose(found.reward, 3 + 2 * out) and not found.terminated
    other = model.step({LATENT: latent}, action, torch.tensor([[3.0, -3.0, 0.0]]))
    assert other.next_obs[LATENT][:, 24:].tolist() == [[1.0, 0.0]]
    # P(class) of Gumbel-max samples is the softmax.
    many = model.step(
        {LATENT: latent.expand(20_000, -1)}, action.expand(20_000, 1), torch.randn(20_000, 3)
    )
    share = float(many.next_obs[LATENT][:, 25].mean())
    assert share == pytest.approx(1 / (1 + math.exp(-1)), abs=0.02)


def test_it_learns_the_system(tmp_path: Path) -> None:
    demos = str(record(tmp_path / "demos", 40))
    settings = node(most_updates=400, lr=2e-3, kl_weight=0.05) | {"width": 48}
    model, fit = train(TrainConfig(settings, demos, str(tmp_path / "model"), device="cpu"))
    explained = {o.name: o.explained for o in fit.outputs}
    assert explained["reward"] > 0.5, explained
    again = dynamics.load(tmp_path / "model")
    assert again.spec == model.spec and again.data_spec.obs == SPEC.obs
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_pictures_are_decoded() -> None:
    """Of any size; and a point cloud is refused."""
    spec = SPEC.with_obs(front=Leaf((11, 14, 3), "uint8", 0, 255))
    model = build(node(images={"channels": [4, 8], "features": 8}), RecurrentModel, spec=spec)
    obs = {name: leaf.sample(2) for name, leaf in spec.obs.items()}
    latent = model.filtered(torch.zeros(2, 40), torch.zeros(2, 1), obs)
    shown, found = (
        {key: (value.shape, value.dtype) for key, value in each.items()}
        for each in (obs, model.decoded(latent))
    )
    assert found == shown
    assert float(model.reconstruction_error(latent, obs).min()) > 0
    cloud = SPEC.with_obs(points=Leaf((5, 3), unit="points"))
    with pytest.raises(ConfigError, match=r"model.obs=\[state\]"):
        build(node(obs=["points"]), RecurrentModel, spec=cloud)


@pytest.mark.parametrize(("chunk", "execute"), [(1, 1), (4, 4), (4, 3)])
def test_a_policy_outside_filters_what_the_model_encodes(
    given: dict[str, str], chunk: int, execute: int
) -> None:
    """Played from the recorded observations, with the recorded actions as its plans, it decides
    from the latents of the encoded recording."""
    model = latent_policy.load_latent(given["model"])
    data = read_episodes(given["starts"])
    seen = latent_policy.encoded(model, data, "demos").steps[f"obs/{LATENT}"]
    policy = LatentPolicy.of(base(model.spec, chunk=chunk), model).eval()
    number = int((data.length >= 13).nonzero()[0])
    rows = data.start[number] + torch.arange(13)
    actor = Actor(policy, 1, execute)
    for t in range(13):
        obs = {"state": data.steps["obs/state"][rows[t]][None]}
        actor(obs, torch.tensor([t == 0]))
        if t % execute == 0:  # what it decided is what was recorded
            assert torch.allclose(actor.carry["last_latent"], seen[rows[t]][None], atol=1e-5), t
            plan = data.steps["action"][(rows[0] + t + torch.arange(chunk))]
            actor.carry["last_plan"] = plan[None]


def test_saved_and_loaded_and_unwrapped(given: dict[str, str], tmp_path: Path) -> None:
    model = latent_policy.load_latent(given["model"])
    policy = LatentPolicy.of(inner := base(model.spec), model)
    again = build(policy.node, Policy, spec=policy.spec)
    again.load_state_dict(policy.state_dict())
    obs, zero = {"state": torch.rand(3, 2)}, torch.zeros(3, 1)
    one, other = (each.act(obs, each.initial(3), zero)[0] for each in (policy, again))
    assert torch.equal(one, other) and policy.spec.obs == SPEC.obs
    (tmp_path / "policy.yaml").touch()
    assert joined(policy, model.spec, None, tmp_path) is inner
    assert joined(policy, SPEC, None, tmp_path) is policy


def test_an_imagined_environment_of_latents(given: dict[str, str]) -> None:
    """Its episodes begin where recorded ones did."""
    settings = {"only_first": True, "num_envs": 8, "horizon": 5}
    env = build(node_of("envs.imagined.Imagined", **given, **settings), VecEnv)
    model = env.model  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(model, LatentDynamics) and [*env.spec.obs] == [LATENT]
    data = read_episodes(given["starts"])
    first = {"state": data.steps["obs/state"][data.start]}
    begun = model.filtered(torch.zeros(len(data), 40), torch.zeros(len(data), 1), first)
    for latent in env.reset(0)[LATENT]:
        assert float((begun - latent).abs().amax(1).min()) < 1e-5
    step = env.step(torch.zeros(8, 1))
    assert step.next_obs[LATENT].shape == (8, 40) and step.reward.isfinite().all()
