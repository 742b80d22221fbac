"""Gaussian, diagonal, beta and categorical policies: densities and samples by hand and by torch;
normalised blocks and held noise; policies with memory: the past and the arithmetic of sequences."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import AffineTransform, Beta, Independent, Normal, TanhTransform
from torch.distributions import Categorical as Theirs
from torch.distributions import TransformedDistribution as Transformed

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.spec import MASK, NORMALIZED, Leaf, Spec, mixed_leaf
from embodied.core.tensors import Tensors, where
from embodied.nn.optim import fit
from embodied.policies import categorical, gaussian
from embodied.policies.block_gaussian import BatchNorm, BlockGaussian, Blocks
from embodied.policies.categorical import Categorical
from embodied.policies.diagonal_beta import TRIES, DiagonalBeta, gamma
from embodied.policies.gaussian import Gaussian
from embodied.policies.networks import blocks
from embodied.policies.networks.encoders import Encoder
from embodied.policies.recurrent import Memory
from embodied.policies.transformer import CausalTransformer
from tests.builders import SPEC, make_policy, node_of


@pytest.fixture
def policy() -> Gaussian:
    torch.manual_seed(0)
    return Gaussian(gaussian.Config(chunk=3, hidden=(32,)), SPEC)


def test_squashed_log_probabilities_are_those_of_torch(policy: Gaussian) -> None:
    obs = {"state": torch.randn(50, 3)}
    action, log_prob = policy.sample(obs, 0.5 * policy.sample_noise(50, explore=True))
    mean, log_std = policy(obs)
    normal = Independent(Normal(mean.double(), log_std.double().exp()), 1)
    expected = Transformed(normal, [TanhTransform()]).log_prob(action.detach().double())
    torch.testing.assert_close(log_prob.double(), expected, atol=1e-3, rtol=1e-3)
    again = policy.log_prob(obs, action.detach())
    torch.testing.assert_close(again, log_prob, atol=1e-2, rtol=1e-3)


def test_one_squashed_log_probability_by_hand(policy: Gaussian) -> None:
    for parameter in policy.parameters():
        nn.init.zeros_(parameter)  # mean 0, log std the middle of its bounds, -1.5
    obs, noise = {"state": torch.zeros(1, 3)}, torch.zeros(1, 6)
    noise[0, 0] = 2.0
    action, log_prob = policy.sample(obs, noise)
    u = 2 * math.exp(-1.5)
    normal = -0.5 * 2**2 + 6 * (1.5 - 0.5 * math.log(2 * math.pi))
    expected = normal - math.log(1 - math.tanh(u) ** 2)
    assert action[0, 0].item() == pytest.approx(math.tanh(u))
    assert log_prob.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(policy.act(obs, {}, noise)[0].flatten(1), action)


def test_far_out_the_density_stays_finite_and_has_a_gradient(policy: Gaussian) -> None:
    obs = {"state": torch.randn(3, 3)}
    action, log_prob = policy.sample(obs, torch.full((3, 6), 100.0))
    assert torch.isfinite(log_prob).all() and (action.abs() <= 1).all()
    log_prob.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)
    assert torch.isfinite(policy.log_prob(obs, torch.ones(3, 6))).all()


@pytest.mark.parametrize("kind", ["nll", "mse"])
def test_likelihood_learns_the_deviation_and_squared_error_does_not(kind: str) -> None:
    policy = make_policy("gaussian.Gaussian", SPEC, hidden=[8], imitate=kind)
    batch = {
        "obs/state": torch.zeros(2000, 3),
        "action": torch.tanh(0.2 + 0.3 * torch.randn(2000, 1, 2)),
        "valid": torch.ones(2000, 1, dtype=torch.bool),
    }
    fit(policy.parameters(), lambda: policy.loss(batch).mean(), 200, lr=0.02)
    mean, log_std = policy({"state": torch.zeros(1, 3)})
    assert (mean - 0.2).abs().max() < 0.05
    assert ((log_std.exp() - 0.3).abs() < 0.03).tolist() == [[kind == "nll"] * 2]


def test_hard_bounds_are_clamped() -> None:
    policy = Gaussian(gaussian.Config(hidden=(), log_std=(-20.0, 2.0), soft=False), SPEC)
    for value, log_std in ((0.0, 0.0), (3.0, 2.0)):
        for parameter in policy.parameters():
            nn.init.zeros_(parameter)
        nn.init.constant_(policy.net[-1].bias, value)
        assert policy({"state": torch.zeros(1, 3)})[1].tolist() == [[log_std] * 2]


KINDS = {"diagonal_gaussian.DiagonalGaussian": 1e-5, "diagonal_beta.DiagonalBeta": 1e-4}


@pytest.mark.parametrize("played", [2, 6])
@pytest.mark.parametrize("target", KINDS)
def test_density_and_entropy_are_torchs_with_their_gradients(target: str, played: int) -> None:
    """Of a whole chunk of three actions of two numbers, and of its first action."""
    policy = make_policy(target, SPEC, hidden=[8], chunk=3, head=2.0)
    obs, action = {"state": torch.randn(7, 3)}, 1.9 * torch.rand(7, played) - 0.95
    if isinstance(policy, DiagonalBeta):  # 2 x - 1 with x ~ Beta
        unit = Beta(*policy(obs)[:, :played].unbind(2))
        density = Transformed(unit, [AffineTransform(-1.0, 2.0)]).log_prob(action)
        entropy = unit.entropy() + math.log(2)
    else:
        normal = Normal(policy(obs)[:, :played], policy.log_std[:played].exp())
        density, entropy = normal.log_prob(action), normal.entropy()
        torch.testing.assert_close(policy.entropy(obs), entropy.sum(1) * 6 / played)
    weight, found = torch.randn(7), list[list[Tensor]]()
    theirs = density.sum(1), entropy.sum(1)
    for log_prob, spread in (policy.evaluate_actions(obs, action), theirs):
        loss = (log_prob * weight).sum() + 3 * spread.mean()
        gradients = torch.autograd.grad(loss, list(policy.parameters()))
        found.append([log_prob, spread, *gradients])
    torch.testing.assert_close(*found, atol=KINDS[target], rtol=KINDS[target])


def diagonal(**settings: Any) -> Any:
    return make_policy("diagonal_gaussian.DiagonalGaussian", SPEC, **{"hidden": [8], **settings})


def test_the_robot_gets_the_clipped_action_and_the_learner_the_whole() -> None:
    actor = Actor(diagonal(log_std=1.0), 50, explore=True)
    action = actor({"state": torch.randn(50, 3)}, torch.ones(50, dtype=torch.bool))
    assert actor.stored_action.abs().max() > 2
    assert torch.equal(action, actor.stored_action.clamp(-1, 1))


def test_it_begins_near_zero_and_orthogonal() -> None:
    obs = {"state": 5 * torch.randn(100, 3)}
    assert not diagonal(zero_head=True)(obs).any()
    assert 1e-4 < diagonal()(obs).std() < 0.1
    weight = diagonal().net[0].weight
    torch.testing.assert_close(weight.T @ weight, 2 * torch.eye(3))
    assert not diagonal(learn_std=False).log_std.requires_grad


def beta() -> Any:
    return make_policy("diagonal_beta.DiagonalBeta", SPEC, hidden=[8], head=2.0)


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


@torch.no_grad()
def test_beta_samples_have_the_policys_moments() -> None:
    policy, obs = beta(), {"state": torch.randn(1, 3).expand(50_000, 3)}
    action = policy.act(obs, {}, policy.sample_noise(50_000, explore=True))[0][:, 0]
    drawn = 2 * Beta(*policy(obs).unbind(2)).sample() - 1
    assert action.abs().max() <= 1
    torch.testing.assert_close(action.mean(0), drawn.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(action.std(0), drawn.std(0), atol=0.01, rtol=0)


@torch.no_grad()
def test_betas_mean_not_its_mode_acts_in_evaluation() -> None:
    policy, obs = beta().eval(), {"state": torch.randn(5, 3)}
    action = Actor(policy, 5)(obs, torch.ones(5, dtype=torch.bool))
    alpha, beta_ = policy(obs).unbind(2)
    torch.testing.assert_close(action, 2 * alpha / (alpha + beta_) - 1)
    edges = torch.tensor([[-1.0, 1.0]] * 5)
    assert policy.evaluate_actions(obs, edges)[0].isfinite().all()


def test_what_has_no_bounds_or_no_plain_layers_is_refused() -> None:
    unbounded = SPEC.with_act(Leaf((2,), unit=NORMALIZED))
    with pytest.raises(ConfigError, match="actions have bounds"):
        make_policy("diagonal_beta.DiagonalBeta", unbounded)
    with pytest.raises(ConfigError, match="plain layers"):
        make_blocks().feedforward()


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


def test_cross_entropy_by_hand(discrete: Categorical) -> None:
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


def test_a_head_of_zero_is_uniform_and_who_is_sampled_draws_in_evaluation_too() -> None:
    policy = Categorical(categorical.Config(head=0.0, sampled=True), CATEGORICAL_SPEC)
    assert policy.entropy(cells(4)).tolist() == pytest.approx([math.log(5)] * 4)
    assert policy.sample_noise(5).abs().min() > 0 and policy.sample_noise(5).shape == (5, 1, 5)


def make_blocks(**settings: object) -> BlockGaussian:
    return make_policy("block_gaussian.BlockGaussian", SPEC, **{"width": 16, **settings})


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
    longs = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    for step, long in enumerate(longs):
        noise = torch.cat([torch.full((2, 2), float(step)), long[:, None]], 1)
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


def test_without_a_carry_noise_is_used_as_it_is_given() -> None:
    policy, obs = make_blocks(), {"state": torch.randn(1, 3)}
    noise = torch.tensor([[0.5, -1.0, 0.3]])
    with torch.no_grad():
        acted, carry = policy.act(obs, {}, noise)
        action, log_prob = policy.sample(obs, noise)
        mean, log_std = policy(obs)
    u = mean + log_std.exp() * noise[:, :2]
    density = Normal(mean, log_std.exp()).log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)
    torch.testing.assert_close((acted[:, 0], action), (torch.tanh(u), torch.tanh(u)))
    torch.testing.assert_close(log_prob, density.sum(1), rtol=1e-4, atol=0)
    assert carry == {}


ACTS = {"normal": SPEC.act, "categorical": Leaf((), "int64", 0, 3)}

INNER = {
    "normal": node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[5]),
    "categorical": node_of("policies.categorical.Categorical", hidden=[5]),
}


def remembering(kind: str, inner: str, **settings: Any) -> Any:
    spec = SPEC.with_act(ACTS[inner])
    return make_policy(f"{kind.lower()}.{kind}", spec, inner=INNER[inner], **settings)


def test_the_cell_is_torchs() -> None:
    torch.manual_seed(0)
    memory = Memory(Encoder(SPEC.obs), 6)
    for bias in (memory.cell.bias_ih, memory.cell.bias_hh):
        torch.nn.init.normal_(bias)
    obs, h = {"state": torch.randn(4, 3)}, torch.randn(4, 6)
    expected = memory.cell(torch.tanh(memory.enter(obs["state"])), h)
    torch.testing.assert_close(memory(obs, h), expected)


@pytest.mark.parametrize("inner", ACTS)
@pytest.mark.parametrize("kind", ["Recurrent", "Transformer"])
def test_living_through_it_again_is_what_acting_was(kind: str, inner: str) -> None:
    """Step by step through the actor, with episodes that begin at any time and in any row."""
    sizes = {"width": 6} if kind == "Recurrent" else {"width": 8, "heads": 2, "window": 4}
    policy = remembering(kind, inner, **sizes)
    actor = Actor(policy, 4, explore=True)
    for t in range(3):
        actor({"state": torch.randn(4, 3)}, torch.full((4,), t == 0))
    carry = {key: value.clone() for key, value in actor.carry.items()}
    obs, first = torch.randn(9, 4, 3), torch.rand(9, 4) < 0.3
    first[0] = torch.tensor([True, True, False, False])
    actions, densities = [], []
    for seen, begins in zip(obs, first, strict=True):
        kept = where(begins, policy.initial(4), actor.carry)
        if kind == "Recurrent":
            memory = policy.memory({"state": seen}, kept["h"])
        else:
            memory, _ = policy.past.step(policy.enter(policy.encoder({"state": seen})), kept)
        actor({"state": seen}, begins)
        actions.append(actor.stored_action)
        inside = {"memory": memory}
        densities.append(policy.inner.evaluate_actions(inside, actor.stored_action)[0])
    log_prob, entropy = policy.evaluate_sequence({"state": obs}, torch.stack(actions), carry, first)
    near = 1e-6 if kind == "Recurrent" else 1e-5
    torch.testing.assert_close(log_prob, torch.stack(densities), atol=near, rtol=1e-5)
    assert entropy.shape == (9, 4)


def test_gradients_reach_the_first_observation_of_an_episode() -> None:
    memory = Memory(Encoder(SPEC.obs), 6)
    obs: Tensors = {"state": torch.randn(5, 2, 3).requires_grad_()}
    first = torch.zeros(5, 2, dtype=torch.bool)
    first[2, 1] = True
    memory.along(obs, memory.initial(2), first)[-1].sum().backward()
    assert obs["state"].grad is not None
    assert obs["state"].grad.any(2).int().T.tolist() == [[1] * 5, [0, 0, 1, 1, 1]]


def causal(window: int = 4) -> CausalTransformer:
    torch.manual_seed(0)
    net = CausalTransformer(8, 2, 2, window)
    for layer in net.layers:
        torch.nn.init.normal_(layer.attention.bias)
    return net


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_steps_with_the_cache_are_the_parallel_forward(cut: int) -> None:
    """Nine steps at once, in two parts, and one by one, with episodes that begin anywhere."""
    net = causal()
    x = torch.randn(5, 9, 8)
    first = torch.rand(5, 9) < 0.25
    first[:, 0] = torch.tensor([True, False, False, True, False])
    whole, last = net(x, net.empty(5), first)
    one, between = net(x[:, :cut], net.empty(5), first[:, :cut])
    parts = [one]
    if cut < 9:
        two, between = net(x[:, cut:], between, first[:, cut:])
        parts.append(two)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
    assert torch.equal(between["known"], last["known"])
    cache = net.empty(5)
    for t in range(9):
        found, cache = net.step(x[:, t], where(first[:, t], net.empty(5), cache))
        torch.testing.assert_close(found, whole[:, t], atol=1e-5, rtol=1e-5)


def test_what_a_step_depends_on() -> None:
    """On the `layers` * (`window` - 1) steps before it, up to the beginning of its episode."""
    net = causal(window=3)
    x = torch.randn(1, 8, 8, requires_grad=True)
    first = torch.zeros(1, 8, dtype=torch.bool)
    found, _ = net(x, net.empty(1), first)
    (grad,) = torch.autograd.grad(found[0, 6, 0], x)
    assert grad[0].any(1).tolist() == [False, False, True, True, True, True, True, False]
    first[0, 5] = True
    found, _ = net(x, net.empty(1), first)
    (grad,) = torch.autograd.grad(found[0, 6, 0], x)
    assert grad[0].any(1).tolist() == [False, False, False, False, False, True, True, False]


def test_both_unrolled_grus_are_torchs_cell_with_its_gradients() -> None:
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(3 * 6, 6, dtype=torch.float64)
    with torch.no_grad():
        cell.weight_ih.copy_(torch.eye(18))  # the inputs have their own layer
        cell.bias_ih.zero_()
    x = torch.randn(7, 5, 18, dtype=torch.float64).requires_grad_()
    h = torch.randn(5, 6, dtype=torch.float64).requires_grad_()
    keep = (torch.rand(7, 5, 1) > 0.3).double()  # episodes begin in the middle

    def by_torch(x: Tensor, h: Tensor, keep: Tensor, *_: Tensor) -> Tensor:
        found = list[Tensor]()
        for inputs, kept in zip(x, keep, strict=True):
            found.append(cell(inputs, (found[-1] if found else h) * kept))
        return torch.stack(found)

    weights = torch.linspace(-1, 1, 7 * 5 * 6, dtype=torch.float64).view(7, 5, 6)
    wanted = (x, h, cell.weight_hh, cell.bias_hh)
    results = list[list[Tensor]]()
    for unroll in (by_torch, blocks.unroll_gru, blocks.unroll_gru_cpu):
        out = unroll(x, h, keep, cell.weight_hh, cell.bias_hh)
        results.append([out, *torch.autograd.grad((out * weights).sum(), wanted)])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-12, rtol=1e-10)


def test_fast_tanh_is_tanh() -> None:
    x = torch.linspace(-20, 20, 10_001)
    torch.testing.assert_close(blocks.fast_tanh(x), torch.tanh(x), atol=2e-7, rtol=0)


def test_what_does_not_fit_is_refused() -> None:
    flow = node_of("policies.generative.flow.Flow")
    with pytest.raises(ConfigError, match="density"):
        make_policy("recurrent.Recurrent", SPEC, inner=flow)
    with pytest.raises(ConfigError, match="width=10 must be a multiple of heads=4"):
        remembering("Transformer", "normal", width=10, heads=4)
