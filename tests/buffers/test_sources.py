"""What batches are made of: mixtures, shifted pictures, rollouts, columns in hindsight, weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from embodied.buffers.pending import (
    TrajectoryColumns,
    columns_of_episodes,
    next_actions,
    returns_to_go,
)
from embodied.buffers.replay import ReplayBuffer
from embodied.buffers.rollout import RolloutBuffer
from embodied.buffers.source import (
    Mixture,
    RandomShift,
    Relabel,
    random_shift,
    shift_by_index,
    shift_on_cpu,
)
from embodied.buffers.weighted import Weighted, Weights, positive_variance
from embodied.core.build import ConfigError, build
from embodied.core.env import RETURN_ENDS
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, cat, each
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import Dataset, transitions, with_steps
from embodied.policies.random import Config as RandomConfig
from embodied.policies.random import Random
from embodied.training.collector import Collector
from embodied.training.logger import read_metrics
from tests.builders import node_of
from tests.datasets.test_transitions import TWO, episodes
from tests.toy_envs import Config, Counter
from tests.training.test_pretrain import demos, parts
from tests.training.test_train import run, settings


def filled(value: float, count: int = 20) -> ReplayBuffer:
    replay = ReplayBuffer(count)
    replay.add({"reward": torch.full((count,), value), "obs/state": torch.full((count, 2), value)})
    return replay


@pytest.mark.parametrize(
    ("fractions", "size", "expected"),
    [((0.5, 0.5), 4, [2, 2]), ((0.75, 0.25), 8, [6, 2]), ((0.5, 0.3, 0.2), 10, [5, 3, 2])],
)
def test_every_slice_has_exact_shares(
    fractions: Sequence[float], size: int, expected: list[int]
) -> None:
    mix = Mixture([filled(float(i)) for i in range(len(fractions))], fractions)
    assert len(mix) == 20 * len(fractions)
    batch = mix.sample(6 * size)
    for part in batch["reward"].split(size):
        assert torch.bincount(part.long(), minlength=len(fractions)).tolist() == expected
    assert torch.equal(batch["obs/state"][:, 1], batch["reward"])  # rows stay whole


def test_an_empty_source_without_a_share_and_refusals() -> None:
    mix = Mixture([filled(1), ReplayBuffer(5)], (1.0, 0.0))
    assert mix.sample(5)["reward"].tolist() == [1] * 5
    other = ReplayBuffer(4)
    other.add({"reward": torch.zeros(2), "obs/image": torch.zeros(2, 2)})
    for second, share, count, says in (
        (filled(1), 0.6, 4, "sum to 1"),
        (filled(1), 0.5, 7, "multiple of"),
        (other, 0.5, 4, "obs/image"),
    ):
        with pytest.raises(ValueError, match=says):
            Mixture([filled(0), second], (0.5, share)).sample(count)


class Scale:
    """A reward that learns one number."""

    frozen = False
    factor = 1.0

    def __call__(self, rows: Tensors) -> Tensor:
        return self.factor * rows["obs/state"][:, 0]

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        self.factor += 1
        return {}


def test_relabel_uses_what_the_reward_has_learned_by_now() -> None:
    replay, reward = filled(3.0), Scale()
    source = Relabel(replay, reward)
    assert source.sample(2)["reward"].tolist() == [3, 3]
    reward.update({})
    assert source.sample(2)["reward"].tolist() == [6, 6]
    assert replay.sample(2)["reward"].tolist() == [3, 3]  # what is stored does not change


def test_every_shift_is_one_of_the_nine_and_all_occur() -> None:
    picture = torch.arange(12, dtype=torch.uint8).view(1, 3, 4, 1)
    lines = [[0, 0, 1, 2, 3, 3], [4, 4, 5, 6, 7, 7], [8, 8, 9, 10, 11, 11]]
    padded = torch.tensor([lines[0], *lines, lines[2]], dtype=torch.uint8)
    allowed = {
        tuple(padded[y : y + 3, x : x + 4].flatten().tolist()) for y in range(3) for x in range(3)
    }
    pictures = picture.expand(200, -1, -1, -1)
    shifted, again = (random_shift(pictures, 1, torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(shifted, again) and shifted.dtype == torch.uint8
    assert {tuple(one.flatten().tolist()) for one in shifted} == allowed
    assert torch.equal(random_shift(pictures, 0), pictures)
    wide = random_shift(pictures, 5)  # wider than the picture
    assert wide.shape == pictures.shape and wide.unique().tolist() == list(range(12))


def test_every_way_of_shifting_crops_the_same() -> None:
    """Bit for bit: copied lines, indexed pixels, and grid_sample of the padded image."""
    torch.manual_seed(0)
    pad, n, height, width = 4, 81, 12, 10
    pictures = torch.randint(256, (n, height, width, 3), dtype=torch.uint8)
    moved = torch.cartesian_prod(torch.arange(-pad, pad + 1), torch.arange(-pad, pad + 1)).T
    planes = functional.pad(pictures.permute(0, 3, 1, 2).float(), (pad,) * 4, "replicate")
    size = torch.tensor([width + 2 * pad, height + 2 * pad])
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([x, y], 2) + (moved + pad).T.flip(1)[:, None, None]
    sampled = functional.grid_sample(planes, (2 * pixels + 1) / size - 1, align_corners=False)
    expected = sampled.round().byte().permute(0, 2, 3, 1)
    assert torch.equal(shift_on_cpu(pictures, moved), expected)
    for given in (pictures, pictures.float(), pictures.permute(0, 2, 1, 3)):  # not contiguous
        assert torch.equal(shift_on_cpu(given, moved), shift_by_index(given, moved))


def test_only_pictures_of_a_batch_are_shifted() -> None:
    obs = {"eye": Leaf((9, 9, 3), "uint8"), "cell": Leaf((3, 3, 3), "uint8", 0, 5, "symbol")}
    spec = Spec({**obs, "state": Leaf((2,))}, Leaf((1,)), 0.1)
    data = Dataset(
        {
            f"{when}/{name}": torch.randint(6, (50, *leaf.shape)).to(leaf.zeros(1).dtype)
            for name, leaf in spec.obs.items()
            for when in ("obs", "next_obs")
        }
    )
    data.rows["obs/history/eye"] = torch.stack([data.rows["obs/eye"]] * 2, 1)
    source = RandomShift(data, spec, 2)
    torch.manual_seed(0)
    plain = data.sample(20)
    torch.manual_seed(0)
    shifted = source.sample(20)
    changed = {key for key in plain if not torch.equal(plain[key], shifted[key])}
    assert changed == {"obs/eye", "next_obs/eye", "obs/history/eye"} and len(source) == 50
    assert torch.equal(shifted["obs/history/eye"], torch.stack([shifted["obs/eye"]] * 2, 1))


def numbers(values: Sequence[float]) -> Tensors:
    return {"reward": torch.tensor(values, dtype=torch.float32)}


def test_all_rows_at_once() -> None:
    segment = RolloutBuffer(2, 2)
    for t in range(3):  # one more than expected
        segment.add(numbers([t, 10.0 + t]), None)
    batch = segment.batch()
    assert batch["reward"].tolist() == [[0, 10], [1, 11], [2, 12]]
    assert batch["valid"].all() and batch["valid"].shape == (3, 2)


def test_rows_close_on_their_own() -> None:
    segment = RolloutBuffer(3, 1)
    for values, closed in (([1, 2], [0, 2]), ([], []), ([3], [2]), ([4, 5], [2, 0])):
        segment.add(numbers(values), torch.tensor(closed, dtype=torch.int64))
    batch = segment.batch()
    assert batch["reward"].tolist() == [[1, 0, 2], [5, 0, 3], [0, 0, 4]]
    assert batch["valid"].tolist() == [[1, 0, 1], [1, 0, 1], [0, 0, 1]]
    segment.clear()
    segment.add(numbers([7, 8, 9]), torch.tensor([0, 1, 2]))
    segment.add(numbers([7]), torch.tensor([1]))
    assert segment.batch()["reward"].tolist() == [[7, 8, 9], [0, 7, 0]]


def test_kept_batches_are_side_by_side() -> None:
    """Two envs; three batches of 1, 2 and 1 decisions, of which the newest two are kept."""
    segment, resumed = (RolloutBuffer(2, 1, keep=2) for _ in range(2))
    carry = torch.tensor([[1.0], [2.0]])
    segment.add(numbers([1, 2]), None)
    one = segment.batch({"h": carry})
    assert one["reward"].tolist() == [[1, 2]] and one["carry/h"].shape == (2, 1)
    segment.clear()
    segment.add(numbers([3, 4]), None)
    segment.add(numbers([5]), torch.tensor([1]))
    two = segment.batch({"h": 10 * carry})
    assert two["reward"].tolist() == [[3, 4, 1, 2], [0, 5, 0, 0]]
    assert two["valid"].tolist() == [[1, 1, 1, 1], [0, 1, 0, 0]]
    assert two["carry/h"].flatten().tolist() == [10, 20, 1, 2]
    segment.clear()
    resumed.set_state(segment.get_state())
    for buffer in (segment, resumed):
        buffer.add(numbers([6, 7]), None)
        three = buffer.batch({"h": carry})
        assert three["reward"].tolist() == [[6, 7, 3, 4], [0, 0, 0, 5]]
        assert three["carry/h"].flatten().tolist() == [1, 2, 10, 20]


@pytest.mark.parametrize("closed", [None, torch.tensor([0, 1])])
def test_state_goes_on(closed: Tensor | None) -> None:
    one, other = RolloutBuffer(2, 2), RolloutBuffer(2, 2)
    one.add(numbers([1.0, 2.0]), closed)
    other.add(numbers([5.0, 5.0]), closed)
    other.set_state(one.get_state())
    for segment in (one, other):
        for t in range(3):
            segment.add(numbers([3.0 + t, 4.0]), closed)
    torch.testing.assert_close(one.batch(), other.batch(), rtol=0, atol=0)


BOTH = ("returns", "next_action")


@pytest.mark.parametrize(
    ("reward", "discount", "lengths", "expected"),
    [
        # 1 2 4, ended; 8 16 32, cut: 32 / (1 - 0.5) = 64, 16 + 32, 8 + 24.
        ([1, 2, 4, 8, 16, 32], [0.5, 0.5, 0, 0.5, 0.5, 0.5], [3, 3], [3, 4, 4, 32, 48, 64]),
        # 1 | 3 / 0.5 after 2 | 4 + (5 + 6 / 2) / 2
        ([1, 2, 3, 4, 5, 6], [0, 0.5, 0.5, 0.5, 0.5, 0], [1, 2, 3], [1, 5, 6, 8, 8, 6]),
        ([1, 2], [1, 1], [2], [3, 2]),
    ],
)
def test_returns_by_hand(
    reward: list[float], discount: list[float], lengths: list[int], expected: list[float]
) -> None:
    given = torch.tensor(reward, dtype=torch.float32), torch.tensor(discount, dtype=torch.float32)
    assert returns_to_go(*given, torch.tensor(lengths)).tolist() == expected


def test_returns_of_recorded_episodes() -> None:
    rows = transitions(TWO, 0.5)
    found = columns_of_episodes(TWO, rows, BOTH, 0.5, 1)["returns"]
    assert found.tolist() == [3, 4, 4, 32, 48, 64]


@pytest.mark.parametrize(
    ("ahead", "expected"), [(1, [1, -1, 3, 4, 5, -1]), (2, [-1, -1, 4, 5, -1, -1])]
)
def test_next_actions_by_hand(ahead: int, expected: list[int]) -> None:
    found = next_actions(torch.arange(6.0)[:, None], torch.tensor([2, 4]), ahead)
    assert found.flatten().nan_to_num(-1).tolist() == expected


def counted(chunk: int = 1) -> Collector:
    torch.manual_seed(0)
    env = Counter(Config())
    return Collector(env, Random(RandomConfig(chunk=chunk), env.spec), 0.5)


@pytest.mark.parametrize(("chunk", "counts"), [(1, [0, 0, 3, 0, 5]), (2, [0, 0, 2, 0, 3])])
def test_rows_come_out_when_their_episode_ends(chunk: int, counts: list[int]) -> None:
    """Counter's row 0 ends (3 steps), row 1 is cut (5): the same rows in their order, completed."""
    rollout, columns = counted(chunk), TrajectoryColumns(BOTH)
    plain, late = [], []
    for _ in range(5):
        rows, step = rollout.step()
        plain.append(each(rows, torch.clone))
        late.append(columns.push(rows, rollout.finished, step.ended))
    assert [len(rows.get("reward", [])) for rows in late] == counts
    whole = cat([rows for rows in plain if rows])
    for rows, begin in ((late[2], 0), (late[4], 100)):
        state = whole["obs/state"].flatten()
        mine = ((state >= begin) & (state < begin + 5)).nonzero().flatten()
        assert torch.equal(rows["action"], whole["action"][mine[: len(rows["reward"])]])
        assert torch.equal(rows["next_action"][:-1], rows["action"][1:])
        assert rows["next_action"][-1].isnan().all()
    first = late[2]["returns"].tolist()
    assert first == [0 + 0.5 * (1 + 0.5 * 2), 1 + 0.5 * 2, 2][::chunk]
    if chunk == 1:
        assert late[4]["returns"][-2:].tolist() == [103 + 104, 104 / 0.5]


__all__ = ["demos"]

FOUR = episodes([[1.0, 1.0], [4.0], [0.0, 0.0, 0.0], [1.0, 2.0]], [True] * 4)  # 2, 4, 0, 3


def weights(kind: str, data: Episodes = FOUR, **settings: float | str) -> Tensor:
    return build(node_of(f"buffers.weighted.{kind}", **settings), Weights, gamma=0.9)(data)


def test_return_weights_by_hand() -> None:
    """Normalised returns 1/2, 1, 0, 3/4 of mean 9/16; only ratios count, so the largest weight
    is 1."""
    found = weights("Return", alpha=0.5).tolist()
    assert found == pytest.approx([math.exp((u - 1) / 0.5) for u in (0.5, 1, 0, 0.75)])
    assert weights("Return", episodes([[3.0], [1.0, 2.0]], [True, True])).tolist() == [1, 1]
    expected = ((1 - 9 / 16) ** 2 + (3 / 4 - 9 / 16) ** 2) / 4
    assert positive_variance(FOUR) == pytest.approx(expected)


def test_one_outlier_takes_all_unless_it_is_cut() -> None:
    """Returns 0 to 9 and one of 30: at alpha 0.1 it has nine tenths of the weight and more."""
    data = episodes([[float(g)] for g in (*range(10), 30)], [True] * 11)
    plain, cut = (weights("Return", data, quantile=q) for q in (1.0, 0.9))
    assert (plain[10] / plain.sum()).item() > 0.9
    assert (cut[10] / cut.sum()).item() < 0.5 and cut[9] == cut[10]
    ranked = weights("Return", data, ranks=True)
    assert ranked.tolist() == pytest.approx([math.exp(rank - 10) for rank in range(11)])


def test_ties_share_their_rank_and_a_high_temperature_is_uniform() -> None:
    data = episodes([[g] for g in (3.0, 1.0, 3.0, 2.0, 1.0, 1.0)], [True] * 6)
    ranked = weights("Return", data, ranks=True)
    below = [4.5 - rank for rank in (4.5, 1, 4.5, 3, 1, 1)]
    assert ranked.tolist() == pytest.approx([math.exp(-each / 3.5 / 0.1) for each in below])
    even = weights("Return", alpha=1e6)
    assert even.tolist() == pytest.approx([1.0] * 4, abs=1e-5)


def test_advantage_forgives_hard_starts() -> None:
    """Starts 0 and 10 ... return 100 s_0 + luck: what is left of G is the luck."""
    luck = [0.0, 1.0, 0.0, -1.0]
    data = episodes([[100.0 * 10 * e + x] for e, x in enumerate(luck)], [True] * 4)
    found = weights("Advantage", data)
    start = torch.tensor([0.0, 10.0, 20.0, 30.0], dtype=torch.float64)
    slope = ((start - 15) * torch.tensor(luck)).sum() / (start - 15).square().sum()
    u = torch.tensor(luck, dtype=torch.float64) - slope * (start - 15)
    expected = ((u - u.max()) / (u.max() - u.min()) / 0.1).exp()
    torch.testing.assert_close(found, expected)
    assert weights("Return", data).argmax() == 3 and found.argmax() == 1


def test_the_best_share() -> None:
    assert weights("Top", share=0.5).tolist() == [0, 1, 0, 1]
    assert weights("Top", share=0.01).tolist() == [0, 1, 0, 0]
    with pytest.raises(ConfigError, match="share=0"):
        weights("Top", share=0.0)


SLOW, QUICK, FAILED = [0.0, 0.0, 0.0, 1.0], [0.0, 1.0], [0.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "over", "settings", "expected"),
    [
        ([SLOW, QUICK], [True] * 2, {"share": 0.5}, [0, 1]),
        ([QUICK, FAILED, SLOW], [True, False, True], {"share": 1 / 3}, [1, 0, 0]),
        ([[0.0, 1.5], [1.0]], [True] * 2, {"share": 0.5}, [1, 0]),
        ([[0.0, 1.5], [1.0]], [True] * 2, {"share": 0.5, "gamma": 0.5}, [0, 1]),
    ],
)
def test_of_two_successes_the_sooner_is_better(
    rewards: list[list[float]], over: list[bool], settings: Any, expected: list[int]
) -> None:
    """Sparse reward: the slow success and the failure are left out, in whatever order they come."""
    assert weights("Top", episodes(rewards, over), **settings).tolist() == expected


def test_the_best_steps_of_play_are_those_before_the_goal() -> None:
    play = episodes([[-1.0] * 3 + [0.0] + [-1.0] * 4], [False])
    play = with_steps(play, {RETURN_ENDS: torch.arange(8) == 3})
    assert weights("Top", play, share=3 / 8, of="steps").tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


def test_frequencies_are_exact() -> None:
    """100,000 draws of rows that weigh 1, 0, 2, 5 of 8: each within four deviations."""
    source = Weighted({"row": torch.arange(4)}, torch.tensor([1.0, 0.0, 2.0, 5.0]))
    torch.manual_seed(0)
    n = 100_000
    counts = source.sample(n)["row"].bincount(minlength=4)
    for count, p in zip(counts.tolist(), (1 / 8, 0.0, 2 / 8, 5 / 8), strict=True):
        assert abs(count - n * p) <= 4 * math.sqrt(n * p * (1 - p))
    assert source.effective == pytest.approx(64 / 30)


def test_small_weights_among_millions_are_drawn() -> None:
    """More rows than torch.multinomial takes; the last one weighs as much as all others."""
    n = 2**24 + 1
    weight = torch.full((n,), 1e-3, dtype=torch.float64)
    weight[-1] = weight[:-1].sum()
    source = Weighted({"row": torch.arange(n)}, weight)
    torch.manual_seed(0)
    share = (source.sample(10_000)["row"] == n - 1).double().mean().item()
    assert share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("bad", [[1.0], [1.0, -1.0], [0.0, 0.0]])
def test_bad_weights_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="one per transition"):
        Weighted({"row": torch.arange(2)}, torch.tensor(bad))


@pytest.mark.parametrize("data", ["offline", "off_policy"])
def test_a_run_draws_by_weight(tmp_path: Path, demos: list[str], data: str) -> None:
    own = {} if data == "offline" else {"warmup_steps": 0}
    node = settings(tmp_path, demos=demos, data=data, steps=40, **own)
    node["weighting"] = {"_target_": "embodied.buffers.weighted.Top", "share": 1 / 12}
    made = parts(node)
    # One episode of twelve.
    assert made.episodes is not None
    assert made.loop.data_metrics == {
        "data/rows": 240,
        "data/effective_rows": 20,
        "data/positive_variance": positive_variance(made.episodes),
    }
    discount = 0.99 ** torch.arange(20)
    best = int((made.episodes.steps["reward"].view(12, 20) * discount).sum(1).argmax())
    loop: Any = made.loop
    rows = (loop.source if data == "offline" else loop.buffers.demos).sample(50)
    mine = made.episodes.episode(best)["action"]
    assert (rows["action"][:, None] == mine).all(2).any(1).all()
    run(node)
    assert read_metrics(tmp_path)[0]["data/effective_rows"] == 20


@pytest.mark.parametrize("given", [False, True])
def test_weights_without_data_of_their_own_are_refused(
    tmp_path: Path, demos: list[str], given: bool
) -> None:
    own = {"demos": demos, "demo_fraction": None} if given else {}
    with pytest.raises(ConfigError, match="own buffer" if given else "demos=DIR"):
        parts(settings(tmp_path, weighting=node_of("buffers.weighted.Return"), **own))
