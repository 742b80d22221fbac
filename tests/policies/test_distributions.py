"""Gaussian, diagonal, beta and categorical policies: densities and samples by hand and by torch;
normalised blocks and held noise.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as Theirs
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.spec import MASK, NORMALIZED, Leaf, Spec, mixed_leaf
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes
from embodied.datasets.transitions import chunks
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import RunPlan
from embodied.nn.optim import fit
from embodied.policies import categorical, gaussian
from embodied.policies.block_gaussian import BatchNorm, BlockGaussian, Blocks
from embodied.policies.categorical import Categorical
from embodied.policies.diagonal_beta import TRIES, DiagonalBeta, gamma
from embodied.policies.diagonal_gaussian import DiagonalGaussian
from embodied.policies.gaussian import Gaussian
from tests.builders import make_learner, make_policy, recorded

SPEC = Spec({"state": Leaf((4,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


@pytest.fixture
def policy() -> Gaussian:
    torch.manual_seed(0)
    return Gaussian(gaussian.Config(chunk=3, hidden=(32,)), SPEC)


def theirs(policy: Gaussian, obs: dict[str, Tensor]) -> TransformedDistribution:
    mean, log_std = policy(obs)
    normal = Independent(Normal(mean.double(), log_std.double().exp()), 1)
    return TransformedDistribution(normal, [TanhTransform()])


def test_log_probabilities_are_those_of_torch(policy: Gaussian) -> None:
    obs = {"state": torch.randn(50, 4)}
    action, log_prob = policy.sample(obs, 0.5 * policy.sample_noise(50, explore=True))
    assert action.shape == (50, 6) and log_prob.shape == (50,)
    expected = theirs(policy, obs).log_prob(action.detach().double())
    torch.testing.assert_close(log_prob.double(), expected, atol=1e-3, rtol=1e-3)
    again = policy.log_prob(obs, action.detach())
    torch.testing.assert_close(again, log_prob, atol=1e-2, rtol=1e-3)


def test_one_log_probability_by_hand(policy: Gaussian) -> None:
    for parameter in policy.parameters():
        torch.nn.init.zeros_(parameter)  # mean 0, log std the middle of its bounds, -1.5
    noise = torch.zeros(1, 6)
    noise[0, 0] = 2.0
    action, log_prob = policy.sample({"state": torch.zeros(1, 4)}, noise)
    u = 2 * math.exp(-1.5)
    normal = -0.5 * 2**2 + 6 * (1.5 - 0.5 * math.log(2 * math.pi))
    expected = normal - math.log(1 - math.tanh(u) ** 2)
    assert action[0, 0].item() == pytest.approx(math.tanh(u))
    assert log_prob.item() == pytest.approx(expected, rel=1e-5)


def test_far_out_the_density_stays_finite_and_has_a_gradient(policy: Gaussian) -> None:
    obs = {"state": torch.randn(3, 4)}
    action, log_prob = policy.sample(obs, torch.full((3, 6), 100.0))
    assert torch.isfinite(log_prob).all()
    log_prob.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)
    assert torch.isfinite(policy.log_prob(obs, torch.ones(3, 6))).all()
    assert (action.abs() <= 1).all()


def test_acting_is_sampling_with_the_same_noise(policy: Gaussian) -> None:
    obs, noise = {"state": torch.randn(5, 4)}, policy.sample_noise(5, explore=True)
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions.flatten(1), policy.sample(obs, noise)[0])
    assert not policy.sample_noise(5, explore=False).any()


def test_likelihood_learns_the_deviation_and_squared_error_does_not() -> None:
    torch.manual_seed(0)
    wanted = 0.3
    batch = {
        "obs/state": torch.zeros(2000, 4),
        "action": torch.tanh(0.2 + wanted * torch.randn(2000, 1, 2)),
        "valid": torch.ones(2000, 1, dtype=torch.bool),
    }
    deviations = {}
    for kind in ("nll", "mse"):
        policy = make_policy("gaussian.Gaussian", SPEC, seed=None, hidden=[8], imitate=kind)
        fit(policy.parameters(), lambda: policy.loss(batch).mean(), 200, lr=0.02)  # noqa: B023
        mean, log_std = policy({"state": torch.zeros(1, 4)})
        assert (mean - 0.2).abs().max() < 0.05
        deviations[kind] = log_std.exp()
    assert (deviations["nll"] - wanted).abs().max() < 0.03
    assert (deviations["mse"] - wanted).abs().min() > 0.03


def test_a_head_of_zeros_starts_at_the_middle() -> None:
    policy = Gaussian(gaussian.Config(zero_head=True), SPEC)
    actions, _ = policy.act({"state": torch.randn(3, 4)}, {}, policy.sample_noise(3))
    assert torch.equal(actions, torch.zeros(3, 1, 2))


def test_hard_bounds_are_clamped() -> None:
    policy = Gaussian(gaussian.Config(hidden=(), log_std=(-20.0, 2.0), soft=False), SPEC)
    for parameter in policy.parameters():
        torch.nn.init.zeros_(parameter)
    assert policy({"state": torch.zeros(1, 4)})[1].tolist() == [[0.0, 0.0]]  # a deviation of 1
    torch.nn.init.constant_(policy.net[-1].bias, 3.0)
    assert policy({"state": torch.zeros(1, 4)})[1].tolist() == [[2.0, 2.0]]


ACT = Leaf((2,), low=-1.0, high=1.0)
NORMAL_SPEC = Spec({"state": Leaf((3,))}, ACT, dt=0.1)


def make(**settings: Any) -> DiagonalGaussian:
    given = {"hidden": [8], **settings}
    return make_policy("diagonal_gaussian.DiagonalGaussian", NORMAL_SPEC, **given)


def require_theirs(policy: Any, obs: Tensors, action: Tensor, theirs: Any, near: float) -> None:
    """Density and entropy are `theirs`, and so are their gradients."""
    weight = torch.randn(len(action))
    found: list[list[Tensor]] = []
    for density, entropy in (policy.evaluate_actions(obs, action), theirs):
        loss = (density * weight).sum() + 3 * entropy.mean()
        gradients = torch.autograd.grad(loss, list(policy.parameters()))
        found.append([density, entropy, *gradients])
    torch.testing.assert_close(*found, atol=near, rtol=near)


def test_log_prob_and_entropy_are_torchs_with_their_gradients() -> None:
    policy = make(head=1.0)
    obs, action = {"state": torch.randn(7, 3)}, torch.randn(7, policy.size)
    normal = Normal(policy(obs), policy.log_std.exp())
    theirs = (normal.log_prob(action).sum(1), normal.entropy().sum(1))
    require_theirs(policy, obs, action, theirs, 1e-5)
    torch.testing.assert_close(policy.entropy(obs), theirs[1])


def test_part_of_a_chunk() -> None:
    policy = make(chunk=3, head=1.0)
    obs, action = {"state": torch.randn(5, 3)}, torch.randn(5, 6)
    some, _ = policy.evaluate_actions(obs, action[:, :2])
    mean = policy(obs)[:, :2]
    expected = Normal(mean, 1.0).log_prob(action[:, :2]).sum(1)
    torch.testing.assert_close(some, expected)


def test_the_robot_gets_the_clipped_action_and_the_learner_the_whole() -> None:
    policy = make(log_std=1.0)
    actor = Actor(policy, 50, explore=True)
    action = actor({"state": torch.randn(50, 3)}, torch.ones(50, dtype=torch.bool))
    assert actor.stored_action.abs().max() > 2
    assert torch.equal(action, actor.stored_action.clamp(-1, 1))


def test_it_begins_near_zero_and_orthogonal() -> None:
    obs = {"state": 5 * torch.randn(100, 3)}
    assert not make(zero_head=True)(obs).any()
    assert 1e-4 < make()(obs).std() < 0.1
    weight = make().net[0].weight
    torch.testing.assert_close(weight.T @ weight, 2 * torch.eye(3))
    assert not make(learn_std=False).log_std.requires_grad


def make_beta(**settings: Any) -> DiagonalBeta:
    return make_policy("diagonal_beta.DiagonalBeta", NORMAL_SPEC, **{"hidden": [8], **settings})


def beta_by_torch(policy: DiagonalBeta, obs: dict[str, Tensor]) -> torch.distributions.Distribution:
    """2 x - 1 with x ~ Beta, by torch."""
    alpha, beta = policy(obs).unbind(2)
    base = torch.distributions.Beta(alpha, beta)
    affine = torch.distributions.AffineTransform(-1.0, 2.0)
    return torch.distributions.TransformedDistribution(base, [affine])


def test_beta_log_prob_and_entropy_are_torchs_with_their_gradients() -> None:
    policy = make_beta(head=2.0)
    obs, action = {"state": torch.randn(7, 3)}, 1.9 * torch.rand(7, 2) - 0.95
    alpha, beta = policy(obs).unbind(2)
    entropy = torch.distributions.Beta(alpha, beta).entropy().sum(1) + 2 * math.log(2)
    density = beta_by_torch(policy, obs).log_prob(action).sum(1)
    require_theirs(policy, obs, action, (density, entropy), 1e-4)


@pytest.mark.parametrize("shape", [1.0, 1.7, 6.0, 200.0])
def test_gamma_samples_have_the_distribution(shape: float) -> None:
    """Kolmogorov and Smirnov's distance to the exact distribution, at a level of 0.1%."""
    torch.manual_seed(1)
    n = 20_000
    noise = torch.stack([torch.randn(n, TRIES), 1 - torch.rand(n, TRIES)], 2)
    drawn = gamma(torch.full((n,), shape), noise).double().sort().values
    exact = torch.special.gammainc(torch.full((n,), shape, dtype=torch.float64), drawn)
    ranks = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (exact - ranks).abs().max().item() < 1.95 / math.sqrt(n)


def test_samples_have_the_policys_moments() -> None:
    policy = make_beta(head=2.0)
    obs = {"state": torch.randn(1, 3).expand(50_000, 3)}
    with torch.no_grad():
        action, _ = policy.act(obs, {}, policy.sample_noise(50_000, explore=True))
        exact = beta_by_torch(policy, obs)
        drawn = exact.sample()
    assert action.abs().max() <= 1
    torch.testing.assert_close(action[:, 0].mean(0), drawn.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(action[:, 0].std(0), drawn.std(0), atol=0.01, rtol=0)


def test_the_mean_acts_in_evaluation() -> None:
    policy = make_beta(head=2.0).eval()
    obs = {"state": torch.randn(5, 3)}
    action = Actor(policy, 5)(obs, torch.ones(5, dtype=torch.bool))
    alpha, beta = policy(obs).unbind(2)
    torch.testing.assert_close(action, (2 * alpha / (alpha + beta) - 1).detach())
    mode = 2 * (alpha - 1) / (alpha + beta - 2) - 1
    assert (action - mode).abs().max() > 0.01


def test_beta_part_of_a_chunk() -> None:
    policy = make_beta(chunk=3, head=2.0)
    obs, action = {"state": torch.randn(4, 3)}, 2 * torch.rand(4, 6) - 1
    density, entropy = policy.evaluate_actions(obs, action[:, :2])
    alpha, beta = policy(obs)[:, :2].unbind(2)
    exact = torch.distributions.Beta(alpha, beta)
    expected = exact.log_prob((action[:, :2] + 1) / 2).sum(1) - 2 * math.log(2)
    torch.testing.assert_close(density, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(entropy, exact.entropy().sum(1) + 2 * math.log(2))


def test_actions_at_the_bounds_have_finite_densities() -> None:
    policy = make_beta(head=2.0)
    density, _ = policy.evaluate_actions(
        {"state": torch.zeros(2, 3)}, torch.tensor([[-1.0, 1.0]] * 2)
    )
    assert density.isfinite().all()


@pytest.mark.parametrize(
    ("target", "leaf", "match"),
    [
        ("diagonal_gaussian.DiagonalGaussian", Leaf((), "int64", 0, 3), "continuous"),
        ("diagonal_beta.DiagonalBeta", Leaf((2,), unit=NORMALIZED), "actions have bounds"),
        ("diagonal_beta.DiagonalBeta", Leaf((), "int64", 0, 3), "continuous actions"),
        ("categorical.Categorical", ACT, "needs discrete actions"),
    ],
)
def test_actions_of_another_kind_are_refused(target: str, leaf: Leaf, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_policy(target, NORMAL_SPEC.with_act(leaf))


def test_ppo_takes_it_without_native_code() -> None:
    learner = make_learner("on_policy.ppo.Ppo", make_beta(), run=RunPlan(decisions=1))
    accelerate(learner, native=True)
    assert native_obstacle(learner) == "the policy is DiagonalBeta, not DiagonalGaussian"


CELLS = Leaf((2, 2), "uint8", 0, 3, unit="symbol")
CATEGORICAL_SPEC = Spec(
    {"cells": CELLS}, Leaf((), "int64", 0, 4), dt=1.0, text="press the right key"
)


def cells(n: int) -> dict[str, torch.Tensor]:
    return {"cells": torch.randint(4, (n, 2, 2)).to(torch.uint8)}


@pytest.fixture
def discrete() -> Categorical:
    torch.manual_seed(0)
    built = Categorical(categorical.Config(chunk=2, hidden=(16,)), CATEGORICAL_SPEC)
    head = built.net[-1]
    assert isinstance(head, nn.Linear)
    nn.init.normal_(head.weight)  # far from uniform
    return built


def test_probabilities_are_those_of_torch(discrete: Categorical) -> None:
    obs = cells(30)
    action = torch.randint(5, (30, 2))
    theirs = Theirs(logits=discrete.net(discrete.encoder(obs)).view(30, 2, 5))
    torch.testing.assert_close(discrete.log_prob(obs, action), theirs.log_prob(action).sum(1))
    torch.testing.assert_close(discrete.entropy(obs), theirs.entropy().sum(1))


def test_gumbel_noise_draws_from_the_distribution(discrete: Categorical) -> None:
    one = {"cells": cells(1)["cells"].expand(40_000, 2, 2)}
    action, _ = discrete.act(one, {}, discrete.sample_noise(40_000, explore=True))
    probability = discrete(one)[0][0, :, 0].exp()
    for step in range(2):
        share = torch.bincount(action[:, step], minlength=5) / 40_000
        assert (share - probability[step]).abs().max() < 0.012  # over four deviations
    best, _ = discrete.act(one, {}, discrete.sample_noise(40_000))
    assert (best == probability.argmax(1)).all()


def test_who_is_sampled_draws_in_evaluation_too() -> None:
    policy = Categorical(categorical.Config(hidden=(4,), sampled=True), CATEGORICAL_SPEC)
    assert policy.sample_noise(5).abs().min() > 0 and policy.sample_noise(5).shape == (5, 1, 5)


def test_choices_beside_numbers_have_torchs_density_under_a_mask() -> None:
    spec = Spec({"state": Leaf((4,)), MASK: Leaf((5,))}, mixed_leaf((3, 0, 2)), dt=0.1)
    policy = make_policy("categorical.Categorical", spec, hidden=[16], log_std=-0.5, head=2.0)
    obs = {"state": torch.randn(30, 4), MASK: (torch.rand(30, 5) < 0.5).float()}
    obs[MASK][:, [2, 3]] = 1.0
    _, kept = policy.act(obs, policy.initial(30), 2 * policy.sample_noise(30, explore=True))
    action = kept["row/action"]
    assert action[:, 1].abs().max() > 1, "numbers are stored before they are clipped"
    out = policy.net(policy.encoder(obs))
    forbidden = torch.where(obs[MASK] > 0, 0.0, -torch.inf)
    parts = [  # three classes, two of the three places of the second choice, a number
        Theirs(logits=out[:, :3] + forbidden[:, :3]),
        Normal(out[:, 6], math.exp(-0.5)),
        Theirs(logits=out[:, 3:5] + forbidden[:, 3:]),
    ]
    logs = sum(part.log_prob(action[:, i]) for i, part in enumerate(parts))
    spread = sum(part.entropy() for part in parts)
    found = policy.evaluate_actions(obs, action)
    torch.testing.assert_close(found, (logs, spread))
    torch.testing.assert_close(policy.entropy(obs), spread)


def test_loss_by_hand(discrete: Categorical) -> None:
    for parameter in discrete.parameters():
        nn.init.zeros_(parameter)
    head = discrete.net[-1]
    assert isinstance(head, nn.Linear)
    head.bias.data = torch.tensor([math.log(4), 0, 0, 0, 0, 0, 0, 0, 0, math.log(6)])
    batch = {
        "obs/cells": cells(3)["cells"],
        "action": torch.tensor([[0, 4], [1, 0], [0, 2]]),
        "valid": torch.tensor([[True, True], [True, False], [False, False]]),
    }
    # First action: weights 4 1 1 1 1 of 8; second: 1 1 1 1 6 of 10.
    expected = [(math.log(8 / 4) + math.log(10 / 6)) / 2, math.log(8), 0.0]
    assert discrete.loss(batch).tolist() == pytest.approx(expected, rel=1e-5)


def test_equally_likely_at_the_start_if_asked() -> None:
    policy = Categorical(categorical.Config(head=0.0), CATEGORICAL_SPEC)
    assert policy.entropy(cells(4)).tolist() == pytest.approx([math.log(5)] * 4)


def test_discrete_demonstrations_go_to_disk_and_back(tmp_path: Path) -> None:
    seen, action = torch.randint(4, (41, 2, 2)).to(torch.uint8), torch.randint(5, (40,))
    with EpisodeWriter(tmp_path, CATEGORICAL_SPEC) as writer:
        for _ in range(2):
            writer.add(recorded({"cells": seen}, action))
    episodes = read_episodes(tmp_path)
    assert episodes.spec == CATEGORICAL_SPEC and episodes.spec.obs["cells"].is_symbol
    assert torch.equal(episodes.steps["action"], torch.cat([action, action]))
    assert episodes.steps["obs/cells"].dtype == torch.uint8
    assert chunks(episodes, 1)["action"].shape == (80, 1)


BLOCK_SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def make_blocks(**settings: object) -> BlockGaussian:
    return make_policy("block_gaussian.BlockGaussian", BLOCK_SPEC, **{"width": 16, **settings})


def test_blocks_are_the_equation() -> None:
    """One network, written out with torch's own functions; each of several is its own."""
    torch.manual_seed(0)
    blocks = Blocks(2, 5, 6, 2, 3, expansion=2)
    for parameter in blocks.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(8, 5)
    found = blocks(x, fresh=True)
    for i in range(2):

        def norm(v: torch.Tensor, layer: BatchNorm) -> torch.Tensor:
            scale, shift = layer.scale[i, 0], layer.shift[i, 0]  # noqa: B023
            return torch.nn.functional.batch_norm(v, None, None, scale, shift, training=True)

        w = [weight[i] for weight in blocks.weights]
        n = list(blocks.norms)
        h = norm(x, n[0]) @ w[0]
        for a, b in ((1, 2), (3, 4)):
            inner = torch.relu(norm(h @ w[a], n[a]))
            h = h + torch.relu(norm(inner @ w[b], n[b]))
        h = h / h.square().mean(1, keepdim=True).sqrt() * blocks.scale[i]
        torch.testing.assert_close(found[i], h @ blocks.head[i] + blocks.bias[i])


def test_running_statistics_by_hand() -> None:
    norm = BatchNorm(1, 1, momentum=0.1)
    x = torch.tensor([[[1.0], [3.0]]])  # mean 2, variance 1 (2 where it is estimated from both)
    torch.testing.assert_close(norm(x, True), torch.tensor([[[-1.0], [1.0]]]), atol=1e-4, rtol=0)
    assert norm.mean.item() == pytest.approx(0.2)
    assert norm.var.item() == pytest.approx(0.9 * 1 + 0.1 * 2)
    expected = (x - 0.2) / math.sqrt(1.1)
    torch.testing.assert_close(norm(x, False), expected, atol=1e-3, rtol=0)
    assert norm.mean.item() == pytest.approx(0.2)  # looking does not move it


def test_projection_brings_the_norms_back() -> None:
    blocks = Blocks(2, 5, 6, 1, 3)
    for parameter in blocks.parameters():
        torch.nn.init.normal_(parameter)
    heading = copy.deepcopy(blocks.weights[1].detach())
    blocks.project()
    for weight in [*blocks.weights, blocks.head]:
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(2, weight.shape[2]))
    torch.testing.assert_close(blocks.weights[1], heading / heading.norm(dim=1, keepdim=True))
    torch.testing.assert_close(blocks.scale.square().mean(-1), torch.ones(2, 1))
    for norm in blocks.norms:
        whole = norm.scale.square().mean(-1) + norm.shift.square().mean(-1)
        torch.testing.assert_close(whole, torch.ones(2, 1))


def test_statistics_are_fresh_only_while_learning() -> None:
    policy, obs = make_blocks(), {"state": 5 + torch.randn(16, 3)}
    before = copy.deepcopy(policy.state_dict())
    with torch.no_grad():
        policy.sample(obs, policy.sample_noise(16, True))
    policy.eval().sample(obs, policy.sample_noise(16, True))
    assert all(torch.equal(before[k], v) for k, v in policy.state_dict().items())
    policy.train().sample(obs, policy.sample_noise(16, True))
    norm = policy.net.norms[0]
    torch.testing.assert_close(norm.mean[0, 0], 0.01 * obs["state"].mean(0))


def test_noise_is_held_for_as_long_as_was_drawn() -> None:
    policy = make_blocks(hold=3)
    # P(1), P(2), P(3) are 36/49, 9/49, 4/49: bounds 0.735 and 0.918, at 0.63 and 1.39 deviations
    lasts = policy.lasts(torch.tensor([-3.0, 0.0, 0.62, 0.64, 1.38, 1.40, 9.0]))
    assert lasts.tolist() == [1, 1, 1, 2, 2, 3, 3]
    carry, used = policy.initial(2), []
    longs = [(2.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    for step, (one, other) in enumerate(longs):
        fresh = torch.full((2, 2), float(step))
        noise = torch.cat([fresh, torch.tensor([[one], [other]])], 1)
        with torch.no_grad():
            _, carry = policy.act({"state": torch.zeros(2, 3)}, carry, noise)
        used.append(carry["explore/noise"][:, 0].tolist())
    # row 0 draws for 3 decisions at once; row 1 for 1, then for 2
    assert used == [[0, 0], [0, 1], [0, 1], [3, 3], [4, 4]]


def test_an_episode_begins_with_its_own_noise() -> None:
    policy = make_blocks(hold=16)
    actor = Actor(policy, 2, explore=True)
    obs = {"state": torch.zeros(2, 3)}
    actor(obs, torch.tensor([True, True]))
    actor.carry["explore/left"] = torch.tensor([9.0, 9.0])
    before = actor.carry["explore/noise"].clone()
    actor(obs, torch.tensor([False, True]))
    assert torch.equal(actor.carry["explore/noise"][0], before[0])
    assert not torch.equal(actor.carry["explore/noise"][1], before[1])
    assert actor.extras == {}  # nothing of it is stored


def test_density_by_hand_and_noise_is_used_as_given_without_a_carry() -> None:
    policy, obs = make_blocks(), {"state": torch.randn(1, 3)}
    noise = torch.tensor([[0.5, -1.0, 0.3]])
    with torch.no_grad():
        action, log_prob = policy.sample(obs, noise)
        acted, carry = policy.act(obs, {}, noise)
        mean, log_std = policy(obs)
    expected = 0.0
    for i, e in enumerate((0.5, -1.0)):
        u = mean[0, i].item() + math.exp(log_std[0, i].item()) * e
        expected += -0.5 * e * e - log_std[0, i].item() - 0.5 * math.log(2 * math.pi)
        expected -= math.log(1 - math.tanh(u) ** 2)
        assert action[0, i].item() == pytest.approx(math.tanh(u), rel=1e-5)
    assert log_prob.item() == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(acted[:, 0], torch.tanh(mean + log_std.exp() * noise[:, :2]))
    assert carry == {}


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="plain layers"):
        make_blocks().feedforward()
