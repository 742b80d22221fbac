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
from tests.learners.parts import copies, moved
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
    """Clipped where it would gain: up with a good action, down with a bad one; no slope there."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantage = torch.tensor([1.0, -1, 1, -1, 2])
    log_prob = ratio.log().requires_grad_()
    loss, log_ratio = clip_loss(log_prob, torch.zeros(5), advantage, 0.2)
    torch.testing.assert_close(loss, torch.tensor([-1.2, 1.5, -0.5, 0.8, -2.2]))
    torch.testing.assert_close(log_ratio, ratio.log())
    loss.sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([0.0, 1.5, -0.5, 0.0, -2.2]))
    each = clip_loss(ratio.log(), torch.zeros(5), advantage, torch.tensor([0.1, 9, 9, 0.1, 0.05]))
    torch.testing.assert_close(each[0], torch.tensor([-1.1, 1.5, -0.5, 0.9, -2.1]))


def test_normalized_looks_at_valid_ones_only() -> None:
    share = torch.tensor([[1.0, 1.0], [1.0, 0.0]]) / 3
    values = torch.tensor([[1.0, 2.0], [3.0, 100.0]])
    expected = torch.tensor([-1.0, 0.0]) * 1.5**0.5
    torch.testing.assert_close(normalized(values, share)[0], expected)
    assert variance(values, share).item() == pytest.approx(2 / 3)


def test_moments_of_pieces_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    values = 1e4 + torch.randn(100, 3).double()
    valid = torch.rand(100) < 0.7
    moments = Moments(3)
    moments.add(values, valid & False)
    assert not moments.count and not moments.variance.any()
    for part in torch.arange(100).split([1, 29, 1, 69]):
        moments.add(values[part], valid[part])
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
        start, batch = copies(learner.parameters()), masked(played(learner), APART)
        batch["reward"][:, APART] = reward
        batch["obs/state"][:, APART] += reward
        torch.manual_seed(2)
        metrics = learner.update(batch)
        assert all(torch.isfinite(value) for value in metrics.values())
        after.append(copies(learner.parameters()))
        assert any(moved(start, after[-1]))
    torch.testing.assert_close(after[0], after[1])


@pytest.mark.parametrize("memory", [False, True])
def test_the_table_is_that_of_the_learned_rows_alone(memory: bool) -> None:
    batch, tables = played(make(memory=memory, normalize=False)), []
    learned = masked(batch, APART)
    for given in (learned, batch):
        learner = make(memory=memory, normalize=False)  # the critic remembers
        tables.append(learner._table(given, carry_of(batch))[0])
    wanted = learned["learn"].any(0) if memory else learned["learn"].flatten()
    alone = take(tables[1], wanted.nonzero().flatten())
    torch.testing.assert_close(tables[0], alone)


@pytest.mark.parametrize("memory", [False, True])
def test_nothing_to_learn_from_leaves_everything_as_it_is(memory: bool) -> None:
    learner = make(memory=memory, normalize=False)
    before = copies(learner.parameters())
    metrics = learner.update(masked(played(learner), [0, 1, 2, 3]))
    assert set(metrics) == {"explained"} and torch.isfinite(metrics["explained"])
    assert not any(moved(before, learner.parameters()))
    assert not any(adam.state for adam in learner.optims.values())
    assert learner.estimates is not None and learner.estimates["value"].shape == (6, 4)
    learner.update(played(learner))
    assert any(moved(before, learner.parameters()))


@pytest.mark.parametrize("memory", [False, True])
def test_a_few_decisions_are_not_learned_from_as_if_they_were_a_minibatch(memory: bool) -> None:
    learner = make(memory=memory, normalize=False, batch_size=24)
    batch, before = masked(played(learner), [0, 1, 2]), copies(learner.parameters())
    for sixth in (False, True):  # 5 of 24, and 6
        batch["learn"][:1, 3] = sixth
        learner.update(batch)
        assert any(moved(before, learner.parameters())) == sixth


@torch.no_grad()
def test_estimates_by_hand() -> None:
    """Two steps of one row, of which the second ends: A_1 = d_1 + 0.9 0.95 A_2, A_2 = r_2 - V_2."""
    learner = make(normalize=False, batch_size=2)
    batch = {key: value[:2, :1].clone() for key, value in played(learner).items()}
    batch["ended"] = torch.tensor([[False], [True]])
    batch["discount"] = torch.tensor([[0.9], [0.0]])
    batch["reward"] = torch.tensor([[0.5], [1.0]])
    v = [learner.value({k: batch[f"obs/{k}"][t] for k in OBS}) for t in (0, 1)]
    after = learner.value({k: batch[f"next_obs/{k}"][0] for k in OBS})
    with torch.enable_grad():
        learner.update(batch)
    second = 1.0 - v[1]
    first = 0.5 + 0.9 * after - v[0] + 0.9 * 0.95 * second
    expected = {"value": torch.stack(v), "advantage": torch.stack([first, second])}
    torch.testing.assert_close(learner.estimates, expected)


def test_scaled_rewards_are_not_the_worlds_own() -> None:
    learner = make(scale_rewards=True)
    learner.update(played(learner))
    assert learner.estimates is None
