"""Updates from imagined transitions, models that are tilted (MEX), the recurrent latent model and
policies of its latents."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from embodied.buffers.replay import ReplayBuffer
from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import read_episodes
from embodied.models import dynamics, latent_policy, optimistic
from embodied.models.dyna import Config, Dyna
from embodied.models.dynamics import LATENT, Dynamics, Fit, LatentDynamics, Prediction, Progress
from embodied.models.ensemble import MlpEnsemble, Rows
from embodied.models.latent_policy import LatentPolicy
from embodied.models.optimistic import OptimisticDyna
from embodied.models.recurrent import RecurrentModel, balanced_kl
from embodied.models.train import TrainConfig, train
from embodied.nn.optim import Adam
from embodied.policies.wrappers.translated import joined
from tests.builders import exit_of, make_policy, node_of
from tests.linear_system import SPEC, WALL, record, step


class Exact(Dynamics):
    """The linear system itself; counts its fits."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec, self.noise_size, self.fits = spec, 1, 0

    def fit(self, transitions: Tensors, progress: Progress = lambda *_: None) -> Fit:
        self.fits += 1
        return Fit((), (), {})

    def step(self, obs: Tensors, action: torch.Tensor, noise: torch.Tensor) -> Prediction:
        following, reward, ended = step(obs["state"], action.clamp(-1, 1))
        return Prediction({"state": following}, reward, ended)


def recorded(count: int) -> Tensors:
    """Transitions of the system, at random."""
    torch.manual_seed(0)
    state, action = 2 * torch.rand(count, 2) - 1, 2 * torch.rand(count, 1) - 1
    following, reward, ended = step(state, action)
    rows = {"obs/state": state, "action": action, "reward": reward}
    return rows | {"discount": 0.9 * (~ended).float(), "next_obs/state": following}


def parts(rows: Tensors) -> tuple[ReplayBuffer, Policy, float, torch.device]:
    """What an imagining source is built with: replay, policy, gamma and device."""
    replay = ReplayBuffer(100)
    replay.add(rows)
    policy = make_policy("gaussian.Gaussian", SPEC, seed=None, hidden=[8])
    return replay, policy, 0.9, torch.device("cpu")


@pytest.fixture
def dyna(monkeypatch: pytest.MonkeyPatch) -> Dyna:
    monkeypatch.setattr("embodied.models.dyna.build", lambda node, role, spec: Exact(spec))
    return Dyna(Config({}, steps=5, every=3), *parts(recorded(50)))


def test_the_transitions_are_those_of_the_model(dyna: Dyna) -> None:
    """As many as asked for; each row is a step of the system; a rollout goes on from where it was,
    or after a termination from the buffer; the model is fitted in every third batch."""
    batch = dyna.sample(32)
    assert set(batch) == set(dyna.replay.sample(2)) and tt.length(batch) == 32
    state, after = batch["obs/state"], batch["next_obs/state"]
    following, reward, ended = step(state, batch["action"].clamp(-1, 1))
    expected = {"next_obs/state": following, "reward": reward, "discount": 0.9 * (~ended).float()}
    torch.testing.assert_close({key: batch[key] for key in expected}, expected)
    # Rollouts of 5 steps side by side: every slice of a batch has steps of all depths.
    goes_on = (torch.arange(32) % 5 > 0) & torch.cat([torch.ones(1), batch["discount"][:-1]]).bool()
    assert torch.equal(state[goes_on], after[:-1][goes_on[1:]])
    known = dyna.replay.take(torch.arange(50))["obs/state"]
    assert (state[~goes_on][:, None] == known).all(2).any(1).all()
    assert bool((after[:, 0] > WALL).any())
    for _ in range(4):
        dyna.sample(10)
    assert isinstance(dyna.model, Exact) and dyna.model.fits == 2 and dyna.batches == 5


def test_a_run_and_its_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["data.imagined.model.hidden=[8]", "data.imagined.model.most_updates=20"]
    words = ["experiment=pendulum_sac_dyna", *small, "size=debug", "device=cpu"]
    assert exit_of("train", *words, f"out={tmp_path / 'run'}") == 0
    assert exit_of("train", f"resume={tmp_path / 'run'}", "steps=280") == 0
    assert exit_of("train", *words, "learner.n_step=2", f"out={tmp_path}/other") != 0
    assert "data.imagined replaces every batch" in capsys.readouterr().err


def test_a_model_of_latents_is_refused(dyna: Dyna, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "embodied.models.dyna.build", lambda node, role, spec: Exact(SPEC.with_obs(more=spec.act))
    )
    with pytest.raises(ConfigError, match="predicts every observation"):
        Dyna(Config({}), dyna.replay, dyna.policy, 0.9, torch.device("cpu"))


class Likes:
    """Critics that value the first element of the state, and three times as much."""

    out = 1

    def __call__(self, obs: Tensors, action: Tensor) -> Tensor:
        return torch.stack([3 * obs["state"][:, 0] + 9, obs["state"][:, 0]])


def made(networks: int = 1, critic: Any = None, **settings: Any) -> tuple[OptimisticDyna, Rows]:
    rows = recorded(64)
    sizes = {"networks": networks, "elites": 1, "hidden": [8], "most_updates": 100}
    config = optimistic.Config(node_of("models.ensemble.MlpEnsemble", **sizes), **settings)
    dyna = OptimisticDyna(config, *parts(rows), critic or Likes())
    assert isinstance(dyna.model, MlpEnsemble)
    found = dyna.model.rows(rows)
    return dyna, found.take(torch.arange(64).expand(networks, 64))


def test_the_term_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    dyna, batch = made(kappa=0.5)
    model: Any = dyna.model
    noise = torch.randn(1, 64, 3)
    monkeypatch.setattr(torch, "randn_like", lambda like: noise)
    monkeypatch.setattr(dyna, "_act", lambda obs: torch.full((64, 1), 0.3))
    x = torch.cat([batch.x[0, :, :2], torch.full((64, 1), 0.3)], 1)
    mean, log_var, _ = (part.detach() for part in model(x))
    drawn = mean + (0.5 * log_var).exp() * noise
    state = x[:, :2]
    there = (state + drawn[0, :, :2]).clamp(model.low, model.high)
    # The smaller critic is the second one, wherever 2 s + 9 > 0.
    gain = drawn[0, :, 2] + 0.9 * there[:, 0] - state[:, 0]
    gain = (gain - gain.mean()) / gain.std(correction=0)
    likelihood = Normal(mean, (0.5 * log_var).exp()).log_prob(drawn)[0].sum(1)
    expected = -0.5 * (likelihood * gain).mean()
    assert dyna.tilt(batch).item() == pytest.approx(expected.item(), abs=1e-5)


def test_it_moves_the_model_to_what_is_liked() -> None:
    dyna, batch = made(networks=2, kappa=1.0)
    model: Any = dyna.model
    before = model(batch.x)[0][..., 0].mean(1).detach()
    adam = Adam(model.net.parameters(), 3e-3)
    for _ in range(60):
        dyna.tilt(batch).sum().backward()
        adam.step()
        model.min_log_var.grad = model.max_log_var.grad = None
    assert (model(batch.x)[0][..., 0].mean(1) > before + 0.1).all()
    assert all(p.grad is None for p in dyna.policy.parameters())


@pytest.mark.parametrize(("kappa", "tilted"), [(0.0, False), (0.1, True)])
def test_without_weight_it_is_dyna(kappa: float, tilted: bool) -> None:
    dyna, _ = made(kappa=kappa)
    assert isinstance(dyna.model, MlpEnsemble)
    assert (dyna.model.further_loss is not None) == tilted
    dyna.fit()
    assert dyna.sample(20)["reward"].isfinite().all()


def test_other_critics_are_refused() -> None:
    with pytest.raises(ConfigError, match="learner=sac"):
        made(critic=lambda obs, action: obs)


SMALL = {"width": 24, "groups": 4, "classes": 4, "hidden": [32], "length": 8, "batch_size": 16}


def node(**settings: Any) -> dict[str, Any]:
    return node_of("models.recurrent.RecurrentModel", **(SMALL | settings))


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
    settings = node(most_updates=400, lr=2e-3, kl_weight=0.05, width=48)
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
def test_a_policy_encodes_as_the_model(given: dict[str, str], chunk: int, execute: int) -> None:
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
