"""What PPO says of its batch, and decisions that it judges without learning from them."""

from __future__ import annotations

import pytest
import torch

from embodied.core.tensors import Tensors, take
from tests.learners.test_ppo import ALL, OBS, carry_of, make, played

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
