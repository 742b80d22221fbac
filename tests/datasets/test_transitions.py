"""Rows from episodes, against sums written out by hand."""

from __future__ import annotations

import pytest
import torch

from embodied.buffers.pending import columns_of_episodes
from embodied.core.env import RETURN_ENDS
from embodied.core.errors import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import (
    Dataset,
    chunks,
    flags,
    human_steps,
    joined,
    past_observations,
    return_ends,
    transitions,
    with_steps,
)

SPEC = Spec(obs={"state": Leaf((1,))}, act=Leaf((2,), low=-1.0, high=1.0), dt=0.05)


def episodes(rewards: list[list[float]], terminated: list[bool]) -> Episodes:
    """State t of episode e is 10 e + t; its action is (state, -state)."""
    length = torch.tensor([len(r) for r in rewards])
    start = length.cumsum(0) - length
    state = torch.cat([10.0 * e + torch.arange(n) for e, n in enumerate(length.tolist())])
    last = torch.zeros(len(state), dtype=torch.bool)
    last[start + length - 1] = True
    ended = torch.tensor(terminated).repeat_interleave(length)
    steps = {
        "obs/state": state.unsqueeze(1),
        "action": torch.stack([state, -state], 1),
        "reward": torch.tensor([r for one in rewards for r in one]),
        "terminated": last & ended,
        "truncated": last & ~ended,
        "success": last & ended,
    }
    final = {"state": (10.0 * torch.arange(len(length)) + length).unsqueeze(1)}
    return Episodes(SPEC, steps, start, length, final)


TWO = episodes([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], [True, False])


def test_past_observations() -> None:
    """Of two steps, before each step and before the one two steps later; the episode's first
    observation again where it has none."""
    rows = past_observations(TWO, {"state": 2}, width=2)
    assert set(rows) == {"obs/history/state", "next_obs/history/state"}
    before = rows["obs/history/state"].squeeze(2).tolist()
    assert before == [[0, 0], [0, 0], [0, 1], [10, 10], [10, 10], [10, 11]]
    # The first episode ends after its step 2, so that 3 is the step after each late window.
    after = rows["next_obs/history/state"].squeeze(2).tolist()
    assert after == [[0, 1], [1, 2], [1, 2], [10, 11], [11, 12], [11, 12]]


def test_n_steps_of_chunks() -> None:
    """Two decisions of two steps: rewards of four steps, the actions of the first two."""
    data = episodes([[1.0, 2.0, 4.0, 8.0, 16.0], [32.0, 64.0, 128.0]], [True, False])
    rows = transitions(data, gamma=0.5, chunk=2, n_step=2)
    # 1 + 2/2 + 4/4 + 8/8, 2 + 4/2 + 8/4 + 16/8, 4 + 8/2 + 16/4, 8 + 16/2, 16; 32 + 64/2 + 128/4 ...
    assert rows["reward"].tolist() == [4, 8, 12, 16, 16, 96, 128, 128]
    # Row 0 bootstraps after four steps; those that contain step 4 terminate in it.
    assert rows["discount"].tolist() == [0.5**4, 0, 0, 0, 0, 0.5**3, 0.5**2, 0.5]
    assert rows["next_obs/state"].flatten().tolist() == [4, 5, 5, 5, 5, 13, 13, 13]
    assert rows["executed_steps"].tolist() == [2, 2, 2, 2, 1, 2, 2, 1]
    assert torch.equal(rows["action"], transitions(data, 0.5, chunk=2)["action"])
    assert rows["action"][0].tolist() == [0, 0, 1, -1]
    assert rows["action"][4].tolist() == [4, -4, 4, -4]  # cut: the last action again


def test_returns_end_where_the_recording_says_so() -> None:
    """Play goes on after its second step, which is at the goal: nothing later counts before it."""
    play = episodes([[-1.0, 0.0, -1.0, -1.0]], [False])
    play = with_steps(play, {RETURN_ENDS: torch.tensor([False, True, False, False])})
    rows = transitions(play, gamma=0.5, n_step=3)
    assert rows["reward"].tolist() == [-1, 0, -1.5, -1]
    assert rows["discount"].tolist() == [0, 0, 0.25, 0.5]
    found = columns_of_episodes(play, rows, ["returns"], 0.5, 3)["returns"]
    assert found.tolist() == [-1, 0, -2, -2], "the last reward goes on forever"
    both = joined([play, TWO])
    assert return_ends(both).tolist() == [False, True, False, False, False, False, True] + 3 * [
        False
    ]


@pytest.mark.parametrize("width", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("kind", [{"chunk": 1}, {"n_step": 1}, {"chunk": 1, "n_step": 2}])
def test_chained_rows_give_the_return_of_the_chain(width: int, kind: dict[str, int]) -> None:
    """Following rows from start to end, V = reward + discount V', is the discounted return."""
    torch.manual_seed(width)
    rewards = [torch.rand(n).tolist() for n in (1, 7, 12)]
    data = episodes(rewards, [False, True, False])
    rows = transitions(data, 0.9, **{name: width * times for name, times in kind.items()})
    for e, (reward, terminated) in enumerate(zip(rewards, [False, True, False], strict=True)):
        for t in range(len(reward)):
            value, weight, at = 0.0, 1.0, t
            while at < len(reward) and weight > 0:
                row = int(data.start[e]) + at
                value += weight * rows["reward"][row].item()
                weight *= rows["discount"][row].item()
                at = int(rows["next_obs/state"][row].item()) - 10 * e
            expected = sum(0.9**i * r for i, r in enumerate(reward[t:]))
            assert value == pytest.approx(expected, rel=1e-5)
            bootstrap = 0.0 if terminated else 0.9 ** (len(reward) - t)
            assert weight == pytest.approx(bootstrap, rel=1e-5)


def taken_over(data: Episodes, theirs: list[bool]) -> Episodes:
    return with_steps(data, {"intervened": torch.tensor(theirs)})


def test_a_chunk_ends_with_its_episode_or_where_a_person_lets_go() -> None:
    classes = with_steps(TWO, {"action": torch.arange(6)})
    for made in (transitions(classes, 0.9, chunk=2), chunks(classes, 2)):
        assert made["action"].tolist() == [[0, 1], [1, 2], [2, 2], [3, 4], [4, 5], [5, 5]]
    rows = chunks(TWO, 3)
    assert rows["valid"].tolist()[:3] == [[True] * 3, [True, True, False], [True, False, False]]
    assert rows["action"][1].tolist() == [[1, -1], [2, -2], [2, -2]]
    assert rows["obs/state"].flatten().tolist() == [0, 1, 2, 10, 11, 12]
    data = taken_over(TWO, [False, True, True, True, False, True])
    rows = chunks(data, 2)
    assert rows["valid"].int().tolist() == [[0, 0], [1, 1], [1, 0], [1, 0], [0, 0], [1, 0]]
    assert rows["action"][3, :, 0].tolist() == [10, 10], "the last one again, as at the end"
    found = flags(data, ["intervened", "real"], 2)
    assert found["intervened"].tolist() == [False, True, True, False, False, True]
    assert found["real"].all(), "as of any demonstration"
    with pytest.raises(ConfigError, match="no column fast"):
        flags(data, ["fast"])
    both = joined([TWO, taken_over(TWO, [True, False] * 3)])
    assert human_steps(both).tolist() == [True] * 6 + [True, False] * 3, "others do not say it"
    assert "intervened" not in joined([TWO, TWO]).steps


def test_sampling_is_uniform_and_repeatable() -> None:
    source = Dataset(transitions(TWO, 0.5))
    assert len(source) == 6
    torch.manual_seed(0)
    first = source.sample(6000)
    torch.manual_seed(0)
    again = source.sample(6000)
    assert all(torch.equal(first[key], again[key]) for key in first)
    counts = first["reward"].log2().long().bincount(minlength=6)
    assert counts.min() > 850 and counts.max() < 1150  # 1000 +- 5 deviations
    assert torch.equal(first["next_obs/state"], first["obs/state"] + 1)  # rows stay together


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk=2 and n_step=0"):
        transitions(TWO, 0.9, chunk=2, n_step=0)
    with pytest.raises(ValueError, match="chunk=0"):
        chunks(TWO, 0)
    with pytest.raises(ValueError, match="at least one step"):
        Dataset({"reward": torch.zeros(0)})
