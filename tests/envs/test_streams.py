"""Row generators: known words, independent rows, uniform and normal numbers, an exact state."""

from __future__ import annotations

import torch

from embodied.envs.row_rng import GOLDEN, RowRng, mixed

WORD = (1 << 64) - 1


def by_hand(state: int) -> int:
    """SplitMix64's finaliser in Python's own integers."""
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def test_words_are_splitmix() -> None:
    """The first output of the reference implementation seeded with 0 is 0xe220a8397b1dcdaf."""
    assert int(mixed(torch.tensor([GOLDEN]))) & WORD == 0xE220A8397B1DCDAF
    streams = RowRng(5, 3)
    key = int(streams.state[1, 0])
    first, second = streams.words(2), streams.words(1)
    expected = [by_hand((key + n * (GOLDEN & WORD)) & WORD) for n in (1, 2, 3)]
    assert [int(w) & WORD for w in (first[0, 1], first[1, 1], second[0, 1])] == expected


def test_a_row_depends_on_seed_and_number_only() -> None:
    few, many = RowRng(7, 2), RowRng(7, 5)
    many.normal(6, torch.tensor([0, 3, 4]))  # others draw, rows 1 and 2 do not
    assert torch.equal(few.uniform(5, torch.tensor([1])), many.uniform(5, torch.tensor([1])))
    assert not torch.equal(RowRng(7, 4).words(4), RowRng(8, 4).words(4))
    few.seed(7, torch.tensor([0, 1]))
    assert torch.equal(few.state, RowRng(7, 2).state)


def test_all_rows_and_picked_rows_draw_the_same() -> None:
    whole, parts = RowRng(1, 4), RowRng(1, 4)
    picked = [parts.normal(7, torch.tensor(rows)) for rows in ([0, 2], [1, 3])]
    everything = whole.normal(7)
    assert torch.equal(everything[:, [0, 2]], picked[0])
    assert torch.equal(everything[:, [1, 3]], picked[1])
    assert torch.equal(whole.state, parts.state)


def test_uniform_numbers_fill_the_interval_evenly() -> None:
    drawn = RowRng(3, 2000).uniform(101)
    assert drawn.min() > 0 and drawn.max() <= 1
    n = drawn.numel()
    counts = torch.histc(drawn, 50, 0, 1)
    expected = n / 50
    chi = ((counts - expected) ** 2 / expected).sum()
    assert chi < 49 + 5 * (2 * 49) ** 0.5
    # Neighbours in a row, and the same place in neighbouring rows, know nothing of each other.
    centred = drawn - 0.5
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert ((a * b).mean() * 12).abs() < 5 / n**0.5


def test_normal_numbers_have_normal_moments_and_tails() -> None:
    drawn = RowRng(4, 4000).normal(51).flatten().double()
    n = len(drawn)
    assert drawn.isfinite().all() and drawn.abs().max() < 5.9
    assert drawn.mean().abs() < 5 / n**0.5
    assert (drawn.var() - 1).abs() < 5 * (2 / n) ** 0.5
    assert ((drawn**4).mean() - 3).abs() < 5 * (96 / n) ** 0.5
    for limit, share in ((1.0, 0.317311), (2.0, 0.045500), (3.0, 0.002700)):
        beyond = (drawn.abs() > limit).double().mean()
        assert (beyond - share).abs() < 5 * (share / n) ** 0.5
