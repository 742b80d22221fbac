"""Implicit gradients against finite differences, and the rewards that are learned by them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.nn.implicit_gradient import conjugate_gradient, implicit_gradient, neumann
from embodied.rewards.bilevel.ascent import objective, returns
from embodied.rewards.preferences.preference import IMAGE_INDEX
from tests.builders import exit_of, node_of
from tests.rewards.rows import make

SIDE, GAMMA = 5, 0.9
BANDIT = Spec({"place": Leaf((1,), "uint8", 0, 1, SYMBOL)}, Leaf((), "int64", 0, 1), dt=0.1)
HEURISTIC = {"of": "value", "a": "action"}
BARFI = node_of("rewards.bilevel.barfi.Barfi", heuristic=HEURISTIC, warmup=0, history=1)


def categorical(spec: Spec = BANDIT, **config: Any) -> Any:
    node = node_of("policies.categorical.Categorical", hidden=(), head=0.0, **config)
    return build(node, Policy, spec=spec)


def rollout(action: list[list[int]], reward: list[list[float]], **more: Tensor) -> Tensors:
    """A rollout [T, B] of the bandit that goes on."""
    a, r = torch.tensor(action), torch.tensor(reward)
    place = torch.zeros(*a.shape, 1, dtype=torch.uint8)
    no = torch.zeros_like(r, dtype=torch.bool)
    flags = {"ended": no, "first": no, "valid": ~no, "discount": torch.full_like(r, GAMMA)}
    seen = {"obs/place": place, "next_obs/place": place}
    return {**seen, "action": a[..., None], "reward": r, **flags, **more}


def test_a_quadratic_by_hand() -> None:
    """V = -theta' M theta / 2 + theta' B phi and J = c' theta: theta* = M^-1 B phi, and so
    dJ/dphi = B' M^-1 c; one term of the series of step 0.1 gives 0.1 B' c."""
    torch.manual_seed(0)
    root, b, c = torch.randn(4, 4).double(), torch.randn(4, 3).double(), torch.randn(4).double()
    m = root @ root.T + torch.eye(4)
    theta = torch.randn(4, dtype=torch.float64, requires_grad=True)
    phi = torch.randn(3, dtype=torch.float64, requires_grad=True)
    exact = b.T @ torch.linalg.solve(m, c)
    largest = float(torch.linalg.eigvalsh(m)[-1])
    for solve, expected in (
        (conjugate_gradient(4, 0.0), exact),
        (neumann(2000, 1 / largest), exact),
        (neumann(1, 0.1), 0.1 * b.T @ c),
    ):
        inner = -theta @ m @ theta / 2 + theta @ b @ phi
        (found,) = implicit_gradient(inner, [c], [theta], [phi], solve)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    inner = -theta @ m @ theta / 2 + theta @ b @ phi
    (found,) = implicit_gradient(inner, [c], [theta], [phi], conjugate_gradient(4, 0.0), 0.5)
    torch.testing.assert_close(found, b.T @ torch.linalg.solve(m + 0.5 * torch.eye(4), c))
    assert theta.grad is None


def test_negative_curvature_ends_the_solution() -> None:
    """At a minimum of V the first direction is one of negative curvature: M is left out."""
    theta, phi = (torch.ones(2, requires_grad=True) for _ in range(2))
    inner = (theta * theta).sum() / 2 + theta @ phi
    slope = torch.tensor([1.0, -2.0])
    (found,) = implicit_gradient(inner, [slope], [theta], [phi], conjugate_gradient(5))
    torch.testing.assert_close(found, slope)


def moves() -> Tensor:
    """Where each action leads [25, 4] in the grid; walls stop."""
    cells = torch.arange(SIDE * SIDE)
    row, column = cells // SIDE, cells % SIDE
    ways = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])
    there = (torch.stack([row, column], 1)[:, None] + ways).clamp(0, SIDE - 1)
    return there[..., 0] * SIDE + there[..., 1]


def grid_return(theta: Tensor, reward: Tensor) -> Tensor:
    """The discounted return from cell 0 of softmax(theta) [25, 4], with rewards [25, 4]."""
    chance = theta.view(SIDE * SIDE, 4).softmax(1)
    paths = torch.zeros(SIDE**2, SIDE**2, dtype=theta.dtype).scatter_add(1, moves(), chance)
    gains = (chance * reward).sum(1)
    return torch.linalg.solve(torch.eye(SIDE**2, dtype=theta.dtype) - GAMMA * paths, gains)[0]


@pytest.mark.parametrize("corner", [24, 0], ids=["helpful", "misleading"])
def test_a_grid_against_finite_differences(corner: int) -> None:
    """5 x 5 cells, 100 logits: the policy that maximises the return of phi_1 + phi_2 r_p +
    phi_3 r_aux, less |theta|^2 / 100, by Newton's method, for phi and for phi a little aside."""
    goal = (moves() == 24).double()
    aim = (moves() == corner).double()
    phi = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64, requires_grad=True)

    def value(theta: Tensor, phi: Tensor) -> Tensor:
        blend = phi[0] + phi[1] * goal + phi[2] * aim
        return grid_return(theta, blend) - 0.01 * theta.square().sum()

    def best(phi: Tensor, start: Tensor) -> Tensor:
        """Newton's method, from nearby."""
        theta = start
        slope = theta
        for _ in range(3):
            theta = theta.detach().requires_grad_()
            (slope,) = torch.autograd.grad(value(theta, phi), theta)
            hessian = torch.autograd.functional.hessian(
                lambda t: value(t, phi), theta, vectorize=True
            )
            theta = theta - torch.linalg.solve(hessian, slope)
        assert slope.norm() < 1e-8
        return theta.detach()

    torch.manual_seed(0)
    top = torch.randn(100, dtype=torch.float64)
    for _ in range(300):
        top = top.detach().requires_grad_()
        top = top + 10 * torch.autograd.grad(value(top, phi.detach()), top)[0]
    top = best(phi.detach(), top)
    theta = top.clone().requires_grad_()
    (slope,) = torch.autograd.grad(grid_return(theta, goal), theta)
    inner = value(theta, phi)
    (found,) = implicit_gradient(inner, [slope], [theta], [phi], conjugate_gradient(100, 1e-16))
    measured = torch.zeros(3, dtype=torch.float64)
    for i in (1, 2):  # a constant changes nothing
        aside = torch.zeros(3, dtype=torch.float64)
        aside[i] = 1e-4
        above, below = (grid_return(best(phi.detach() + s * aside, top), goal) for s in (1, -1))
        measured[i] = (above - below) / 2e-4
    assert (found - measured).norm() < 1e-3 * measured.norm()


def test_returns_by_hand() -> None:
    """The second step ends an episode: 1 + 0.9 x 2, 2, 4."""
    ended = torch.tensor([[False], [True], [False]])
    reward, discount = torch.tensor([[1.0], [2.0], [4.0]]), torch.full((3, 1), 0.9)
    torch.testing.assert_close(returns(reward, discount, ended)[:, 0], torch.tensor([2.8, 2, 4]))


def test_the_policy_gradient_by_hand() -> None:
    """Equal chances: d log pi(0) / d logit_0 = 1/2, d log pi(1) / d logit_0 = -1/2; gains 3 and 1
    give (3/2 - 1/2) / 2 = 1/2. A step that is not valid does not count."""
    policy = categorical()
    batch = rollout([[0, 1, 1]], [[0.0, 0.0, 0.0]])
    batch["valid"][0, 2] = False
    gain = torch.tensor([[3.0, 1.0, 100.0]])
    head = policy.net[-1].bias
    (slope,) = torch.autograd.grad(objective(policy, batch, gain), head)
    torch.testing.assert_close(slope, torch.tensor([0.5, -0.5]))


def test_barfi_begins_as_the_sum() -> None:
    reward = make(BARFI, BANDIT)
    batch = {k: v[0] for k, v in rollout([[0, 1]], [[1.0, 0.25]]).items()}
    parts = reward.components(batch)
    assert {k: v.tolist() for k, v in parts.items()} == {
        "bias": [0, 0],
        "primary": [1, 0.25],
        "auxiliary": [0, 1],
    }
    torch.testing.assert_close(reward(batch), torch.tensor([1.0, 1.25]))


def test_barfi_by_hand() -> None:
    """One step of two actions: 0 is paid 1 by the task, 1 by the heuristic. With equal chances and
    constant phi, d log pi = (1/2, -1/2) for action 0, and so dJ_p/dtheta = (1/4, -1/4) in the
    logits (returns centred: 1/2 and -1/2). G_phi is phi_1 + phi_2 and phi_1 + phi_3, both 1, so
    its weights over the lowest are 0, H = 0, and u = dJ_p/dtheta / damping. Delta's derivative in
    phi_2 is (1/4, -1/4), in phi_3 its negative, in phi_1 0."""
    reward = make({**BARFI, "hidden": (), "damping": 0.5}, BANDIT)
    policy = categorical()
    reward.follow(policy)
    batch = rollout([[0, 1]], [[1.0, 0.0]])
    reward.rollouts.append(batch)
    theta = [policy.net[-1].bias]
    slopes = torch.autograd.grad(reward.task(batch), theta)
    torch.testing.assert_close(slopes[0], torch.tensor([0.25, -0.25]))
    phi = [reward.nets["phi"][-1].bias]
    (found,) = implicit_gradient(
        reward.inner(), slopes, theta, phi, conjugate_gradient(5), damping=0.5
    )
    torch.testing.assert_close(found, torch.tensor([0.0, 0.25, -0.25]))


def test_barfi_weighs_down_what_misleads() -> None:
    """It steps up the gradient, changes nothing of the policy, and keeps what was recorded."""
    reward = make({**BARFI, "lr": 0.01}, BANDIT)
    policy = categorical()
    reward.follow(policy)
    batch = rollout([[0, 1], [1, 0]], [[1.0, 0.0], [0.0, 1.0]])
    batch["ended"][:] = True
    kept = {key: value.clone() for key, value in batch.items()}
    for _ in range(5):
        metrics = reward.update_rollout(batch)
    assert metrics["phi_3"] < 0.99 < 1.01 < metrics["phi_2"]
    assert all(p.grad is None for p in policy.parameters())
    assert all(torch.equal(batch[key], kept[key]) for key in kept)
    torch.testing.assert_close(reward.discounts(batch), batch["discount"])


def test_barfi_learns_the_discount() -> None:
    """What the task pays later is worth less with a smaller gamma_v; a weight on gamma_v pulls it
    down; after the end of an episode the discount stays 0."""
    batch = rollout([[0, 1], [0, 0]], [[0.0, 0.0], [1.0, 0.0]])
    batch["discount"][1] = 0
    batch["ended"][1] = True
    found = []
    for weight in (0.0, 100.0):
        settings = {"discount_lr": 0.1, "discount_weight": weight}
        reward = make({**BARFI, **settings}, BANDIT)
        reward.follow(categorical())
        first = reward.discounts(batch)
        assert float(first[0, 0]) == pytest.approx(0.99 * GAMMA)
        assert not first[1].any()
        reward.update_rollout(batch)
        found.append(float(reward.discount.detach()) - float(first[0, 0]))
    assert found[1] < 0 < found[0]


def test_what_it_cannot_follow_is_one_line() -> None:
    reward = make(BARFI, BANDIT)
    with pytest.raises(ConfigError, match="log-probabilities of single steps"):
        reward.follow(categorical(chunk=2))
    line = Spec({"place": BANDIT.obs["place"]}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
    deterministic = build(node_of("policies.deterministic.Deterministic"), Policy, spec=line)
    with pytest.raises(ConfigError, match="log-probabilities of single steps"):
        make(BARFI, line).follow(deterministic)
    terms = {"b": {"reward": BARFI}}
    composite = node_of("rewards.handcrafted.composite.CompositeReward", terms=terms)
    with pytest.raises(ConfigError, match="no term of a sum"):
        make(composite, BANDIT, folder=Path("x"))


PARL = node_of(
    "rewards.bilevel.parl.Parl",
    labeller=node_of("rewards.preferences.labellers.SimulatedLabeller"),
    leaf="state",
    fit={"members": 1, "hidden": (), "enough": 1.0, "rate": 0.05},
    policy_weight=0.3,
)
ARMS = Spec({"state": Leaf((1,))}, Leaf((), "int64", 0, 2), dt=0.1)
SEEN = torch.tensor([[0.0], [0.3], [1.0]])  # after each arm


def three_arms() -> Any:
    """PARL in a bandit of three arms: every action and every pair of actions once, as often as a
    policy with equal chances has them; of a pair the later arm is preferred."""
    reward = make(PARL, ARMS)
    policy = categorical(ARMS)
    reward.follow(policy)
    reward.ranker.net.net.weights[0].data.fill_(1.5)
    numbers = reward.store.add({"state": SEEN})
    no = torch.zeros(3, dtype=torch.bool)
    steps = {"obs/state": torch.zeros(3, 1), "action": torch.arange(3)[:, None]}
    reward.recent.append({**steps, "number": numbers, "ended": no})
    first, second = torch.cartesian_prod(torch.arange(3), torch.arange(3)).unbind(1)
    acted = torch.stack([first, second], 1)
    reward.compared = {"obs/state": torch.zeros(9, 2, 1), "action": acted[..., None]}
    target = torch.where(first == second, 0.5, (second > first).float())
    reward.ranker.labels = (SEEN[first][:, None], SEEN[second][:, None], target)
    return reward


def test_parl_against_the_exact_gradient() -> None:
    """eta dG/dtheta dV/dtheta in nu, by the probabilities of all arms and pairs, with eta = 0.3."""
    reward = three_arms()
    net, policy = reward.ranker.net, reward.policy
    nu = list(net.parameters())
    term = torch.autograd.grad(reward.policy_term(net), nu)
    one, other, target = reward.ranker.labels
    one, other = one[:, 0], other[:, 0]  # segments of one step
    first, second = reward.compared["action"][..., 0].unbind(1)
    known = target * (net(other) - net(one))[0].sigmoid().log()
    known = (known + (1 - target) * (net(one) - net(other))[0].sigmoid().log()).detach()
    logits = policy.net[-1].bias.detach().requires_grad_()
    chance = logits.softmax(0)
    ascent = torch.autograd.grad(chance @ net(SEEN)[0], logits, create_graph=True)[0]
    told = (chance[first] * chance[second] * known).sum()
    (slope,) = torch.autograd.grad(told, logits, retain_graph=True)
    exact = torch.autograd.grad(-0.3 * (slope * ascent).sum(), nu)
    assert exact[0].abs().item() > 1e-4
    for found, expected in zip(term, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_parl_has_the_actions_of_a_long_segment() -> None:
    """Action t led to the observations of step t, of which those of four steps are compared."""
    reward = make(PARL | {"recent": 2, "segment": 4}, ARMS)
    index, numbers = IMAGE_INDEX, torch.full((2,), -1)
    step: Any = SimpleNamespace(reward=torch.zeros(2), ended=torch.zeros(2, dtype=torch.bool))
    for t in range(6):
        before, numbers = numbers, reward.store.add({"state": torch.zeros(2, 1)})
        done = {"obs/state": torch.zeros(2, 1), "action": torch.full((2, 1), t)}
        marks = {f"obs/{index}": before, f"next_obs/{index}": numbers, "reward": step.reward}
        reward.observe_step(done | marks, torch.arange(2), step)
    found = reward.take(reward.store.segments(reward.store.reached(2), 4).flatten())
    assert found["action"].flatten().tolist() == [2, 3, 4, 5] * 2


def test_without_the_term_parl_is_preference_learning() -> None:
    """The same labels and seed give the same scores, and the term gives others."""
    plain = {key: value for key, value in PARL.items() if key != "policy_weight"}
    plain["_target_"] = "embodied.rewards.preferences.preference.Preference"
    found = []
    for node in (plain, PARL | {"policy_weight": 0.0}, PARL):
        reward = make(node, ARMS)
        if node is not plain:
            other = three_arms()
            reward.follow(other.policy)
            reward.store, reward.recent = other.store, other.recent
            reward.compared = other.compared
        reward.ranker.learn(three_arms().ranker.labels, reward.policy_term)
        found.append(reward.ranker.score(SEEN))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_parl_clips_what_outweighs_the_labels() -> None:
    """A gradient of the term that is longer than 1 counts as one of the length 1."""
    sizes = []
    for factor in (1.0, 1e5, 2e5):
        reward = three_arms()
        upper = reward.upper
        reward.upper = lambda net, upper=upper, factor=factor: factor * upper(net)
        net = reward.ranker.net
        gains = torch.autograd.grad(reward.policy_term(net), list(net.parameters()))
        sizes.append(float(torch.cat([gain.flatten() for gain in gains]).norm()))
    assert sizes[0] < 0.01 and sizes[1:] == pytest.approx([0.3, 0.3])


def test_rollouts_need_an_on_policy_learner(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["reward=barfi", "reward.heuristic.a=action", "reward.heuristic.b=[0.0]"]
    words += ["experiment=pendulum_sac", "size=debug", f"out={tmp_path}/run"]
    assert exit_of("train", *words) == 2
    assert "take an on-policy learner" in capfd.readouterr().err
