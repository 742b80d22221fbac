"""What PPO computes from a batch: advantages, the clipped loss, running statistics, estimates."""

from __future__ import annotations

import pytest
import torch

from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors, take
from embodied.learners.on_policy.ppo_parts import (
    Moments,
    ObservationStats,
    RewardScaler,
    clip_loss,
    gae,
    normalized,
    variance,
)
from embodied.policies.networks.encoders import Encoder
from tests.learners.test_ppo import ALL, OBS, carry_of, make, played


def columns(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).mT.contiguous()


def test_gae_over_three_steps() -> None:
    """Gamma 0.5, lambda 0.5. Row 0 is cut by the clock at step 1, row 1 ends at step 1, row 2 has
    two decisions and padding."""
    reward = columns([1.0, 2, 3], [1, 2, 3], [1, 2, 9])
    discount = columns([0.5, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.25, 0.5])
    ended = columns([0.0, 1, 0], [0, 1, 0], [0, 0, 1]).bool()
    valid = columns([1.0, 1, 1], [1, 1, 1], [1, 1, 0]).bool()
    value = columns([1.0, 1, 1], [1, 1, 1], [1, 1, 7])
    following = columns([2.0, 4, 6], [2, 4, 6], [2, 4, 8])
    got = gae(reward, discount, ended, valid, value, following, 0.5)
    # delta: r + d V(s') - V(s)
    cut = [1 + 1 - 1 + 0.25 * 3, 2 + 2 - 1, 3 + 3 - 1]  # the time limit still bootstraps
    over = [1 + 1 - 1 + 0.25 * 1, 2 + 0 - 1, 3 + 3 - 1]
    short = [1 + 1 - 1 + 0.25 * 2, 2 + 1 - 1, 0]  # its second decision is a chunk of two steps
    torch.testing.assert_close(got, columns(cut, over, short))


def test_clip_loss_and_its_slope() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantage = torch.tensor([1.0, -1, 1, -1, 2])
    loss, log_ratio = clip_loss(ratio.log(), torch.zeros(5), advantage, 0.2)
    # Clipped where it would gain: up with a good action, down with a bad one.
    torch.testing.assert_close(loss, torch.tensor([-1.2, 1.5, -0.5, 0.8, -2.2]))
    torch.testing.assert_close(log_ratio, ratio.log())
    each = clip_loss(ratio.log(), torch.zeros(5), advantage, torch.tensor([0.1, 9, 9, 0.1, 0.05]))
    torch.testing.assert_close(each[0], torch.tensor([-1.1, 1.5, -0.5, 0.9, -2.1]))
    torch.manual_seed(0)
    log_prob = torch.randn(200).requires_grad_()
    old, advantage = log_prob.detach() + 0.3 * torch.randn(200), torch.randn(200)
    loss, log_ratio = clip_loss(log_prob, old, advantage, 0.2)
    loss.sum().backward()
    gain = log_ratio.detach().exp() * advantage
    slope = torch.where(-gain >= loss.detach(), -gain, 0)  # -rho A, and 0 where clipping decided
    assert 0.1 < (slope == 0).float().mean() < 0.5
    torch.testing.assert_close(slope, log_prob.grad)


def test_normalized_looks_at_valid_ones_only() -> None:
    share = torch.tensor([[1.0, 1.0], [1.0, 0.0]]) / 3
    got = normalized(torch.tensor([[1.0, 2.0], [3.0, 100.0]]), share)
    torch.testing.assert_close(got[0], torch.tensor([-1.0, 0.0]) * 1.5**0.5)
    values = torch.tensor([[1.0, 2.0], [3.0, 100.0]])
    assert variance(values, share).item() == pytest.approx(2 / 3)


def test_moments_of_pieces_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    values = 1e4 + torch.randn(100, 3).double()
    valid = torch.rand(100) < 0.7
    moments = Moments(3)
    for at in (0, 1, 30, 31):
        until = {0: 1, 1: 30, 30: 31, 31: 100}[at]
        moments.add(values[at:until], valid[at:until])
    torch.testing.assert_close(moments.mean, values[valid].mean(0))
    torch.testing.assert_close(moments.variance, values[valid].var(0, correction=0))


def test_observed_sets_the_encoder_and_goes_on_from_one_that_was_set() -> None:
    encoder = Encoder({"a": Leaf((1,)), "b": Leaf((2,))})
    seen = ObservationStats(encoder)
    obs = {"a": torch.tensor([[1.0], [3.0], [50.0]]), "b": torch.ones(3, 2)}
    seen.follow(encoder, obs, torch.tensor([True, True, False]))
    assert not seen.given
    assert encoder.norm.mean.tolist() == [2, 1, 1]
    assert encoder.norm.std.tolist() == [1, 1, 1]  # a constant keeps scale 1
    encoder.norm.std[0] = 5.0
    again = ObservationStats(encoder)
    again.follow(encoder, obs, torch.tensor([True, False, False]))
    assert again.given
    torch.testing.assert_close(encoder.norm.mean[0].item(), 2 - 1 / 10_001, rtol=0, atol=1e-6)
    torch.testing.assert_close(encoder.norm.std[0].item(), 5.0, rtol=0, atol=1e-3)


def test_rewards_are_scaled_by_the_deviation_of_returns() -> None:
    returns = RewardScaler(clip=1.5)
    reward = columns([1.0, 1, 2], [3, 5, 0])
    discount = columns([0.5, 0.5, 0], [0.5, 0.5, 0.5])
    ended = columns([0.0, 0, 1], [0, 1, 0]).bool()
    valid = columns([1.0, 1, 1], [1, 1, 0]).bool()
    got = returns.scale(reward, discount, ended, valid)
    seen = torch.tensor([1, 1.5, 2.75, 3, 6.5])  # r + d (return so far), per row; one is padding
    deviation = float(seen.std(correction=0))
    torch.testing.assert_close(got, (reward / deviation).clamp(-1.5, 1.5))
    assert got.max().item() == 1.5
    assert returns.running.tolist() == [0, 0]  # both episodes ended
    returns.scale(reward[:1], discount[:1], ended[:1], valid[:1])
    assert returns.running.tolist() == [0.5, 1.5]


@pytest.mark.parametrize("size", [1, 5])
def test_moments_of_nothing(size: int) -> None:
    moments = Moments(size)
    moments.add(torch.ones(4, size), torch.zeros(4, dtype=torch.bool))
    assert not moments.count and not moments.variance.any()


APART = [1, 3]  # rows of the batch that are not learned from


def masked(batch: Tensors, rows: list[int]) -> Tensors:
    learn = torch.ones_like(batch["valid"])
    learn[:, rows] = False
    return batch | {"learn": learn}


@pytest.mark.parametrize(("name", "memory"), ALL)
def test_decisions_that_are_only_judged_change_nothing(name: str, memory: bool) -> None:
    """Whatever was seen, done and paid there; the others teach as they would alone."""
    after = []
    for reward in (0.0, 30.0):
        learner = make(name, memory, epochs=2, normalize=False, batch_size=24)
        batch = masked(played(learner), APART)
        batch["reward"][:, APART] = reward
        batch["obs/state"][:, APART] += reward
        torch.manual_seed(2)
        metrics = learner.update(batch)
        assert all(torch.isfinite(value) for value in metrics.values())
        after.append({k: v.clone() for k, v in learner.named_parameters()})
    start = dict(make(name, memory).named_parameters())
    for key in after[0]:
        torch.testing.assert_close(after[0][key], after[1][key], msg=key)
    assert any(not torch.equal(after[0][key], start[key]) for key in start)


@pytest.mark.parametrize("memory", [False, True])
def test_the_table_is_that_of_the_learned_rows_alone(memory: bool) -> None:
    learner = make(memory=memory, normalize=False)
    batch = played(learner)
    table, _ = learner._table(masked(batch, APART), carry_of(batch))
    if memory:
        learner = make(memory=memory, normalize=False)  # the critic remembers
    every, _ = learner._table(batch, carry_of(batch))
    if memory:
        alone = take(every, torch.tensor([0, 2]))
    else:
        wanted = masked(batch, APART)["learn"].flatten().nonzero().flatten()
        alone = take(every, wanted)
    assert table.keys() == alone.keys()
    for key in table:
        torch.testing.assert_close(table[key], alone[key], msg=key)


@pytest.mark.parametrize("memory", [False, True])
def test_nothing_to_learn_from_leaves_everything_as_it_is(memory: bool) -> None:
    learner = make(memory=memory, normalize=False)
    batch = masked(played(learner), [0, 1, 2, 3])
    before = {k: v.clone() for k, v in learner.named_parameters()}
    metrics = learner.update(batch)
    assert set(metrics) == {"explained"} and torch.isfinite(metrics["explained"])
    for key, value in learner.named_parameters():
        assert torch.equal(value, before[key])
    assert not any(adam.state for adam in learner.optims.values())
    assert learner.estimates is not None and learner.estimates["value"].shape == (6, 4)
    learner.update(played(learner))
    assert any(not torch.equal(v, before[k]) for k, v in learner.named_parameters())


@pytest.mark.parametrize("memory", [False, True])
def test_a_few_decisions_are_not_learned_from_as_if_they_were_a_minibatch(memory: bool) -> None:
    learner = make(memory=memory, normalize=False, batch_size=24)
    batch = masked(played(learner), [0, 1, 2])
    batch["learn"][:1, 3] = False  # 5 of 24 are left
    before = {k: v.clone() for k, v in learner.named_parameters()}
    learner.update(batch)
    assert all(torch.equal(v, before[k]) for k, v in learner.named_parameters())
    batch["learn"][:1, 3] = True  # 6 of 24
    learner.update(batch)
    assert any(not torch.equal(v, before[k]) for k, v in learner.named_parameters())


def test_estimates_by_hand() -> None:
    """Two steps of one row, of which the second ends: A_1 = d_1 + 0.9 0.95 A_2, A_2 = r_2 - V_2."""
    learner = make(normalize=False, batch_size=2)
    batch = {key: value[:2, :1].clone() for key, value in played(learner).items()}
    batch["ended"] = torch.tensor([[False], [True]])
    batch["discount"] = torch.tensor([[0.9], [0.0]])
    batch["reward"] = torch.tensor([[0.5], [1.0]])
    with torch.no_grad():
        v = [learner.value({k: batch[f"obs/{k}"][t] for k in OBS}) for t in (0, 1)]
        after = learner.value({k: batch[f"next_obs/{k}"][0] for k in OBS})
    learner.update(batch)
    second = 1.0 - v[1]
    first = 0.5 + 0.9 * after - v[0] + 0.9 * 0.95 * second
    assert learner.estimates is not None
    torch.testing.assert_close(learner.estimates["value"], torch.stack(v))
    torch.testing.assert_close(learner.estimates["advantage"], torch.stack([first, second]))


def test_scaled_rewards_are_not_the_worlds_own() -> None:
    learner = make(scale_rewards=True)
    learner.update(played(learner))
    assert learner.estimates is None
