"""SAC, DSAC-T and FlashSAC: targets, bounds, losses and temperature by hand."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.actor_critic import actor_loss, temperature_gradient
from embodied.learners.critics import Support
from embodied.learners.off_policy.dsac_t import huber, loss_weights, value_loss
from embodied.learners.off_policy.sac import critic_loss
from embodied.nn.networks import ACTIVATIONS, Ensemble, redraw
from embodied.nn.optim import Adam
from embodied.policies.block_gaussian import Blocks
from tests.builders import LINE, SPEC, transitions
from tests.learners.parts import constant, copies, learner_of, moved, require_average, slopes


def make(spec: Spec = SPEC, zero_head: bool = False, **settings: Any) -> Any:
    given = {"shape": {"hidden": [32], "zero_head": zero_head}, "hidden": [32], **settings}
    return learner_of("off_policy.sac.Sac", "gaussian.Gaussian", spec, **{"batch_size": 4, **given})


FOLLOWING = {"state": torch.zeros(3, 3)}


def test_target_with_entropy() -> None:
    """A head of zeros means N(0, exp(-1.5)), half-way between the bounds -5 and 2 of log std."""
    learner = make(zero_head=True, initial_temperature=0.2)
    constant(learner.target.ensemble, [4.0, 3.0])
    torch.manual_seed(5)
    e, reward = torch.randn(3, 2), torch.tensor([1.0, 2.0, 5.0])
    discount = torch.tensor([0.0, 0.9, 0.81])  # the world ended; the clock did; two steps passed
    torch.manual_seed(5)
    backup = learner._backup(reward, discount, FOLLOWING)
    normal = -0.5 * e.square() + 1.5 - 0.5 * math.log(2 * math.pi)
    log_prob = (normal - (1 - torch.tanh(math.exp(-1.5) * e).square()).log()).sum(1)
    torch.testing.assert_close(backup, reward + discount * (3 - 0.2 * log_prob), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("subset", "low", "share"), [(1, {1, 2, 3}, 1 / 3), (2, {1, 2}, 2 / 3), (3, {1}, 1.0)]
)
def test_target_takes_the_minimum_of_a_random_subset(
    subset: int, low: set[int], share: float
) -> None:
    """`share`: how often critic 1 is among those drawn."""
    learner = make(critics=3, subset=subset, entropy_in_backup=False)
    constant(learner.target.ensemble, [3.0, 1.0, 2.0])
    one = torch.ones(3)
    seen = [round(learner._backup(0 * one, one, FOLLOWING)[0].item()) for _ in range(200)]
    assert set(seen) == low
    assert seen.count(1) / 200 == pytest.approx(share, abs=0.12)


def test_losses_by_hand() -> None:
    q = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    # ((1-2)^2 + (2-4)^2) / 2 + ((3-2)^2 + (5-4)^2) / 2
    assert critic_loss(q, torch.tensor([2.0, 4.0])).item() == 2.5 + 1.0
    value, log_prob = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 3.0])
    assert actor_loss(value, log_prob, torch.tensor(0.5)).item() == 0.5 - 1.5
    assert temperature_gradient(log_prob, -2.0).item() == 1.0  # -(mean 1 - 2): entropy is too low


@pytest.mark.parametrize(("target", "sign"), [(-50.0, -1), (50.0, 1)])
def test_temperature_moves_towards_the_target_entropy(target: float, sign: int) -> None:
    learner = make(target_entropy=target, temperature_lr=0.1)
    learner.update(transitions(4, SPEC))
    assert math.copysign(1, learner.log_alpha.item()) == sign


def test_every_critic_step_sees_its_own_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(utd=3, critics=5, tau=0.3)
    assert learner.batch_size == 12
    seen: list[list[float]] = []
    critic_step, actor_step = learner.critic_step, learner.soft_actor_step

    def critic(batch: Tensors, tau: float) -> Tensors:
        seen.append(batch["reward"].tolist())
        old = copies(learner.target_params)
        metrics = critic_step(batch, tau)
        require_average(learner.target_params, old, learner.critic_params, 0.3)
        return metrics

    def actor(batch: Tensors) -> Tensors:
        seen.append(batch["reward"].tolist())
        return actor_step(batch)

    monkeypatch.setattr(learner, "critic_step", critic)
    monkeypatch.setattr(learner, "soft_actor_step", actor)
    learner.update(transitions(12, SPEC))
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [8, 9, 10, 11]]


@pytest.mark.parametrize(("objective", "expected"), [("mean", -1.0), ("min", 0.0)])
def test_actor_objective(objective: str, expected: float) -> None:
    """With critics Q1 = a and Q2 = -3 a the mean falls with a; the minimum is best at a = 0."""
    rates = {"initial_temperature": 1e-6, "actor_lr": 0.02, "temperature_lr": 0.0}
    learner = make(LINE, hidden=[], actor_objective=objective, **rates)
    slopes(learner.critic, [1.0, -3.0])
    for _ in range(150):
        learner.soft_actor_step({"obs/state": torch.zeros(64, 1), "reward": torch.zeros(64)})
    action = learner.policy.act({"state": torch.zeros(1, 1)}, {}, torch.zeros(1, 1))[0].item()
    assert action == pytest.approx(expected, abs=0.15)


def test_critics_see_what_the_policy_may_not() -> None:
    learner = make(SPEC.with_obs(**{"critic/mass": Leaf((1,))}))
    obs, noise = {"state": torch.zeros(1, 3)}, torch.zeros(1, 2)
    light, heavy = ({**obs, "critic/mass": torch.full((1, 1), mass)} for mass in (0.0, 1.0))
    assert not torch.equal(learner.critic(light, noise), learner.critic(heavy, noise))
    acted = [learner.policy.act(seen, {}, noise)[0] for seen in (light, heavy)]
    assert torch.equal(*acted)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"subset=3 is not in 1\.\.2"):
        make(subset=3)
    with pytest.raises(ConfigError, match="continuous actions"):
        make(SPEC.with_act(Leaf((), "int64", 0, 3)))


@pytest.mark.parametrize(
    ("activation", "layer_norm", "out"),
    [("relu", False, 1), ("tanh", True, 1), ("silu", True, 3), ("relu", False, 3)],
)
def test_ensemble_is_its_members(activation: str, layer_norm: bool, out: int) -> None:
    """Values and slopes of torch's ordinary layers."""
    torch.manual_seed(0)
    ensemble = Ensemble(3, 4, (8, 6), out, layer_norm, activation)
    if layer_norm:
        for parameter in [*ensemble.scales, *ensemble.shifts]:
            torch.nn.init.normal_(parameter)
    x, parts = torch.randn(5, 4, requires_grad=True), []
    for which in range(3):
        y = x
        for i in range(3):
            y = y @ ensemble.weights[i][which] + ensemble.biases[i][which]
            if i < 2 and layer_norm:
                scale, shift = ensemble.scales[i][which, 0], ensemble.shifts[i][which, 0]
                y = torch.nn.functional.layer_norm(y, y.shape[-1:], scale, shift)
            y = ACTIVATIONS[activation]()(y) if i < 2 else y
        parts.append(y)
    found, each = ensemble(x), torch.stack(parts)
    torch.testing.assert_close(found, each)
    torch.testing.assert_close(ensemble(x, 2), each[:2])
    inputs, weights = [x, *ensemble.parameters()], torch.randn_like(found)
    for one, other in zip(
        *(torch.autograd.grad((y * weights).sum(), inputs) for y in (found, each)), strict=True
    ):
        torch.testing.assert_close(one, other)


ADAMS = {
    "adam": ({}, torch.optim.Adam),
    "L2": ({"weight_decay": 0.1}, torch.optim.Adam),
    "adamw": ({"weight_decay": 0.1, "decoupled": True, "local": True}, torch.optim.AdamW),
}


@pytest.mark.parametrize("name", ADAMS)
def test_adam_is_torchs(name: str) -> None:
    """Also after a state of its own and one of torch's was loaded; and, where each parameter counts
    its own steps, for a loss that leaves a parameter out."""
    settings, kind = ADAMS[name]
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    here = Adam(ours, 0.01, **settings)
    decay = settings.get("weight_decay", 0.0)
    there = kind(theirs, 0.01, weight_decay=decay, fused=True)
    every = 2 if "local" in settings else 1
    for step in range(6):
        for a, b in list(zip(ours, theirs, strict=True))[::every]:
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        here.step()
        there.step()
        assert not any(moved(ours, theirs)), step
        if step == 2 and every == 1:
            here.load_state_dict(copy.deepcopy(here.state_dict()))
        if step == 4 and every == 1:
            kept = copy.deepcopy({"state": there.state_dict()["state"]})
            here.load_state_dict(here.state_dict() | kept)
    if every == 1:
        with pytest.raises(RuntimeError, match="without a gradient"):
            here.step()


def test_critics_learn_alone_first() -> None:
    """Policy and temperature from the fourth update on, also after a save in between."""
    learner = make(actor_start=3)
    acted: list[bool] = []
    for number in range(6):
        if number == 2:
            state = copy.deepcopy(learner.get_state())
            learner = make(actor_start=3)
            learner.set_state(state)
        actor = [*learner.actor_params, learner.log_alpha]
        before, critic = copies(actor), copies(learner.critic_params)
        assert ("actor_loss" in learner.update(transitions(4, SPEC))) == (number >= 3)
        assert all(moved(critic, learner.critic_params))
        acted.append(any(moved(before, actor)))
    assert acted == [False] * 3 + [True] * 3


make_dsac = partial(
    learner_of, "off_policy.dsac_t.DsacT", "gaussian.Gaussian", hidden=[32], batch_size=4
)
SMALL = {"width": 16, "depth": 1}


def answers(*values: tuple[float, float]) -> Tensor:
    """What a critic that says these (Q, sigma) puts out."""
    return torch.tensor([[q, math.log(math.expm1(sigma))] for q, sigma in values])


def test_target_of_dsac_t_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample comes from the critic of the smaller mean; e is cut off at 3; the end is r."""
    learner = make_dsac(initial_temperature=0.5)
    constant(learner.target.ensemble, answers((4.0, 1.0), (3.0, 2.0)))
    drawn = torch.zeros(3, 2), torch.tensor([2.0, -2.0, 1.0])
    monkeypatch.setattr(learner.target_policy, "sample", lambda obs, noise: drawn)
    monkeypatch.setattr(torch, "randn_like", lambda like: torch.tensor([1.0, 9.0, 1.0]))
    reward, discount = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.9, 0.5, 0.0])
    mean, sample = learner._backup(reward, discount, {"state": torch.zeros(3, 3)})
    torch.testing.assert_close(mean, torch.tensor([1 + 0.9 * (3 - 1), 2 + 0.5 * (3 + 1), 3.0]))
    by_hand = [1 + 0.9 * (3 + 2 - 1), 2 + 0.5 * (3 + 2 * 3 + 1), 3.0]
    torch.testing.assert_close(sample, torch.tensor(by_hand))


def test_the_target_policy_has_the_statistics_of_the_policy() -> None:
    """Of batch normalisation, in the blocks of FlashSAC's policy."""
    kind = "block_gaussian.BlockGaussian"
    learner = learner_of("off_policy.dsac_t.DsacT", kind, shape=SMALL, batch_size=8, delay=1)
    for _ in range(2):
        learner.update(transitions(8, SPEC))
    found, trained = (dict(p.named_buffers()) for p in (learner.target_policy, learner.policy))
    torch.testing.assert_close(found, trained, rtol=0, atol=0)


def test_bound_and_weight_of_dsac_t_by_hand() -> None:
    """S starts at the first mean deviation, moves by scale_tau; b = 3 S; w stays within its rim."""
    learner = make_dsac(scale_tau=0.1)
    bound, weight = learner._adjustment(torch.tensor([[1.0, 3.0], [4.0, 4.0]]))
    torch.testing.assert_close(bound, torch.tensor([[6.0], [12.0]]))
    torch.testing.assert_close(weight, torch.tensor([[4 / 1.1, 4 / 9.1], [16 / 16.1, 16 / 16.1]]))
    bound, _ = learner._adjustment(torch.tensor([[4.0, 4.0], [4.0, 4.0]]))
    torch.testing.assert_close(bound, 3 * torch.tensor([[2.2], [4.0]]))
    rim = loss_weights(torch.tensor([[0.01, 100.0]]), torch.tensor([[2.0]]), "huber")
    assert rim.tolist() == [[10.0, pytest.approx(0.1)]]
    free = loss_weights(torch.tensor([[0.01]]), torch.tensor([[2.0]]), "squares")
    assert free.item() == pytest.approx(4 / 0.1001)
    bound, weight = make_dsac(adjust=False, bound=7.0)._adjustment(torch.tensor([[0.1, 3.0]] * 2))
    assert bound.tolist() == [[7.0], [7.0]]
    torch.testing.assert_close(weight[0], torch.tensor([1 / 0.11, 1 / 9.1]))


@pytest.mark.parametrize(
    ("form", "weight", "loss", "slopes"),
    [
        # The sample is 8 away and counts as 5: H(5) = 12.5; H(1 - 4) = 4.5.
        ("huber", 0.7, 0.7 * (4.5 + 2 * (4 - 12.5) / 2.1), (-2.1, 0.7 * (4 - 12.5) / 2.1)),
        # S = 3: S^2 / (sigma^2 + 0.1) for the mean, S^2 / (sigma^3 + 0.1) for the deviation.
        ("squares", 9 / 4.1, 9 / 4.1 * 4.5 + 9 / 8.1 * 2 * (4 - 25), (-27 / 4.1, -189 / 8.1)),
    ],
)
def test_the_loss_of_dsac_t_and_its_slopes_by_hand(
    form: str, weight: float, loss: float, slopes: tuple[float, float]
) -> None:
    q = torch.tensor([[1.0]], requires_grad=True)
    sigma = torch.tensor([[2.0]], requires_grad=True)
    mean, sample, bound = torch.tensor([4.0]), torch.tensor([9.0]), torch.tensor([[5.0]])
    found = value_loss(q, sigma, mean, sample, bound, torch.tensor([[weight]]), form)
    assert found.item() == pytest.approx(loss)
    slope = torch.autograd.grad(found, (q, sigma))
    assert [each.item() for each in slope] == pytest.approx(slopes)


def test_huber_and_the_loss_of_several_rows_and_critics_by_hand() -> None:
    q = torch.tensor([[1.0, 2.0], [3.0, 3.0]])
    one, target = torch.ones(2, 2), torch.tensor([2.0, 2.0])
    # with bound 0 the second term is sigma (sigma^2 - 0) / (sigma + 0.1) = 1 / 1.1
    loss = value_loss(q, one, target, target, torch.zeros(2, 1), one, "huber")
    assert loss.item() == pytest.approx((0.5 + 0) / 2 + (0.5 + 0.5) / 2 + 2 / 1.1)
    found = huber(torch.tensor([3.0, -50.0, 60.0]))
    torch.testing.assert_close(found, torch.tensor([4.5, 1250.0, 50 * (60 - 25)]))


def test_one_critic_without_adjustment_whose_mean_learns_the_sample() -> None:
    """The slope of the mean, 1 - 2 or 1 - 5 at a weight of 1 / 1.1, is that of `expected`."""
    learner = make_dsac(expected=False, twin=False, adjust=False)
    learner.update(transitions(4, SPEC))
    assert learner.critic.ensemble.n == 1 and learner.scale.tolist() == [0]  # not used
    for expected, wanted in ((True, 2.0), (False, 5.0)):
        learner = make_dsac(expected=expected, adjust=False)
        learner._backup = lambda *_: (torch.full((4,), 2.0), torch.full((4,), 5.0))  # type: ignore[method-assign]
        constant(learner.critic.ensemble, answers((1.0, 1.0), (1.0, 1.0)))
        learner._critic_loss(transitions(4, SPEC))[0].backward()
        slope = learner.critic.ensemble.biases[-1].grad[..., 0].flatten()
        torch.testing.assert_close(slope, torch.full((2,), (1 - wanted) / 1.1))


def test_everything_but_the_critic_moves_at_every_second_update() -> None:
    learner = make_dsac(delay=2, tau=0.3)
    actor = [*learner.actor_params, learner.log_alpha]
    for update in range(1, 5):
        old, before = copies(learner.target_params), copies(actor)
        critic, due = copies(learner.critic_params), update % 2 == 0
        metrics = learner.update(transitions(4, SPEC))
        assert any(moved(before, actor)) == due and all(moved(critic, learner.critic_params))
        assert ("actor_loss" in metrics) == (update >= 2)
        require_average(learner.target_params, old, learner.online_params, 0.3 if due else 0.0)


FLASHSAC, BLOCKS = "off_policy.flashsac.Flashsac", "block_gaussian.BlockGaussian"
make_flashsac = partial(learner_of, FLASHSAC, BLOCKS, shape=SMALL, batch_size=4, **SMALL)


@torch.no_grad()
def test_flashsac_target_by_hand() -> None:
    """Atoms -2 .. 2; of two certain critics the lower one counts; the end is r / s alone."""
    learner = make_flashsac(atoms=5, high=2.0, scale=10.0, initial_temperature=0.5)
    net = learner.target.net
    for parameter in net.parameters():
        parameter.zero_()
    net.bias[:, 0] = 99 * torch.eye(5)[[3, 2]]  # 1 and 0
    reward, discount = torch.tensor([5.0, 5.0, 15.0]), torch.tensor([0.5, 0.5, 0.0])
    log_prob, obs = torch.tensor([0.0, -2.0, 7.0]), {"state": torch.randn(6, 3)}
    found = learner._backup(reward, discount, log_prob, obs, torch.zeros(6, 2))
    # 0.5 + 0.5 * 0; 0.5 + 0.5 * (0 + 0.5 * 2) = 1; 1.5
    by_hand = [[0, 0, 0.5, 0.5, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0.5, 0.5]]
    torch.testing.assert_close(found, torch.tensor(by_hand), atol=1e-5, rtol=0)


def test_critics_start_near_zero() -> None:
    """Without what the head adds: a normal of deviation 5 / 5 on the atoms from -5 to 5."""
    learner = make_flashsac(high=5.0)
    with torch.no_grad():
        learner.critic.net.head.zero_()
    batch = transitions(4, SPEC)
    chances = learner.critic({"state": batch["obs/state"]}, batch["action"], False).softmax(-1)
    atoms = learner.support.atoms()
    torch.testing.assert_close(chances @ atoms, torch.zeros(2, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(chances @ atoms.square(), torch.ones(2, 4), atol=1e-2, rtol=0)


def test_rewards_are_scaled_by_the_mean_return() -> None:
    """3 * E|r| / (1 - E d) / 5; it only grows."""
    learner, fixed = make_flashsac(headroom=3.0, high=5.0), make_flashsac(scale=7.0)
    discount = torch.tensor([0.9, 0.7])
    for rewards, expected in (([-2.0, 4.0], 9.0), ([0.1, 0.1], 9.0), ([-4.0, -8.0], 18.0)):
        for one in (learner, fixed):
            one._rescale({"reward": torch.tensor(rewards), "discount": discount})
        assert learner.scale.item() == pytest.approx(expected) and fixed.scale.item() == 7.0


def test_the_entropy_sought() -> None:
    """That of N(0, 0.15^2): log(0.15 * 4.1327) = -0.478 per action element."""
    assert make_flashsac().entropy == pytest.approx(2 * -0.4782, abs=1e-3)


def test_both_halves_of_a_pass_share_their_statistics() -> None:
    learner = make_flashsac()
    mean = learner.critic.net.norms[0].mean
    assert not mean.any()
    batch = transitions(4, SPEC)
    learner.update(batch)
    seen = torch.cat([batch["obs/state"], batch["next_obs/state"]]).mean(0)
    torch.testing.assert_close(mean[0, 0, :3], 0.01 * seen)


def test_weights_keep_their_norm_and_the_policy_waits() -> None:
    learner = make_flashsac(policy_delay=2)
    actor = [*learner.actor_params, learner.log_alpha]
    for update in range(1, 5):
        before = copies(actor)
        metrics = learner.update(transitions(4, SPEC))
        assert any(moved(before, actor)) == (update % 2 == 0)
        assert ("actor_loss" in metrics) == (update >= 2)
        for net in (learner.critic.net, learner.policy.net):
            for weight in [*net.weights, net.head]:
                norms = weight.norm(dim=1)
                torch.testing.assert_close(norms, torch.ones_like(norms))
    assert all(weight.grad is None and weight.requires_grad for weight in learner.critic_params)


def test_value_of_a_constant_reward() -> None:
    """r = 8 for ever with discount 0.5: Q = 16, in the units of the world."""
    rates = {"tau": 0.05, "critic_lr": 3e-3, "initial_temperature": 1e-6, "temperature_lr": 0.0}
    learner = make_flashsac(batch_size=64, headroom=3.0, **rates)
    rewards = {"reward": torch.full((64,), 8.0), "discount": torch.full((64,), 0.5)}
    for _ in range(300):
        metrics = learner.update(transitions(64, SPEC) | rewards)
    assert learner.scale.item() == pytest.approx(3 * 16 / 5)
    assert metrics["q_mean"].item() == pytest.approx(16.0, rel=0.06)


FOUR = Support(-1.0, 2.0, 4)  # atoms -1, 0, 1, 2


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [
        (0.0, 1.0, [0.1, 0.2, 0.3, 0.4]),
        # moved by one atom: what was at 2 and at 1 meets at the end of the support
        (1.0, 1.0, [0, 0.1, 0.2, 0.7]),
        # -1, 0, 1, 2 become 0.25 + 0.5 z = -0.25, 0.25, 0.75, 1.25
        (0.25, 0.5, [0.025, 0.075 + 0.15 + 0.075, 0.05 + 0.225 + 0.3, 0.1]),
        (50.0, 0.9, [0, 0, 0, 1]),
        (-50.0, 0.9, [1, 0, 0, 0]),
        (0.7, 0.0, [0, 0.3, 0.7, 0]),  # the world ended: only the reward counts
        (2.0, 0.0, [0, 0, 0, 1]),
    ],
)
def test_values_move_and_are_shared_between_atoms(
    reward: float, discount: float, expected: list[float]
) -> None:
    assert FOUR.atoms().tolist() == [-1, 0, 1, 2]
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    found = FOUR.back_up(logits, torch.tensor([reward]), torch.tensor([discount]))
    assert found.tolist() == [pytest.approx(expected)]


def test_the_lowest_distribution_is_taken_row_by_row() -> None:
    chances = [[[1.0, 0, 0, 0], [0, 0, 0, 1]], [[0, 1, 0, 0], [0, 0.5, 0.5, 0]]]
    both = torch.tensor(chances).clamp(min=1e-30).log()
    torch.testing.assert_close(FOUR.mean(both), torch.tensor([[-1.0, 2.0], [0.0, 0.5]]))
    assert torch.equal(FOUR.lowest(both), torch.stack([both[0, 0], both[1, 1]]))


def test_a_support_needs_a_width() -> None:
    for low, atoms, says in ((1.0, 5, "low < high"), (0.0, 1, "2 atoms")):
        with pytest.raises(ValueError, match=says):
            Support(low, 1.0, atoms)


def test_a_restarted_critic_is_a_new_one() -> None:
    """Parameters of critic and target, and Adam's moments; the policy stays."""
    learner = make(layer_norm=True)
    learner.update(transitions(learner.batch_size, SPEC))
    policy = copies(learner.policy.parameters())
    torch.manual_seed(3)
    learner.restart_critic()
    torch.manual_seed(3)
    new = [*Ensemble(2, 3 + 2, [32], layer_norm=True).parameters()]
    assert not any(moved(new, learner.critic_params))
    assert not any(moved(new, learner.target_params))
    assert not any(moved(policy, learner.policy.parameters()))
    moments = [v for state in learner.optims["critic"].state.values() for v in state.values()]
    assert moments and not any(value.any() for value in moments)


def test_what_cannot_be_drawn_anew_is_said() -> None:
    with pytest.raises(ConfigError, match="the parameters of Blocks cannot be drawn anew"):
        redraw(torch.nn.Sequential(Blocks(2, 3, 8, 1, 1)))
