"""Curiosity: novelty and surprise fade where an agent has been, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, mixed_leaf
from embodied.core.tensors import Tensors
from embodied.nn.normalizers import RunningMeanStd
from embodied.rewards.intrinsic.features import ObservationFeatures
from tests.builders import node_of
from tests.rewards.rows import SPEC, drawn, make, step

RND = node_of("rewards.intrinsic.rnd.Rnd", env_weight=0.0, hidden=[64, 64], lr=1e-3)
ICM = node_of("rewards.intrinsic.icm.Icm", env_weight=0.0, hidden=[64], lr=1e-3)


def around(place: float, seed: int = 0) -> Tensors:
    """128 rows that lead to places near (place, place)."""
    generator = torch.Generator().manual_seed(seed)
    near = place + 0.2 * torch.randn(128, 2, generator=generator)
    return {**drawn(128, seed), "next_obs/other": near}


def test_what_is_known_is_no_news() -> None:
    """Both places are in the statistics; only one of them is visited again and again."""
    reward, nobody = make(RND | {"leaves": ["other"]}), torch.zeros(128, dtype=torch.int64)
    for place in (-1.0, 1.0):
        reward.observe_step(around(place), nobody, step(2))
    before, elsewhere = reward(around(-1.0)).mean(), reward(around(1.0)).mean()
    for seed in range(200):
        reward.update(around(-1.0, seed=seed))
    assert reward(around(-1.0, seed=999)).mean() < 0.05 * before
    assert reward(around(1.0, seed=999)).mean() > 0.3 * elsewhere


def test_the_target_is_not_learned() -> None:
    reward = make(RND)
    nets = reward.target, reward.predictor
    target, predictor = ([value.clone() for value in net.parameters()] for net in nets)
    reward.update(drawn(64))
    assert all(map(torch.equal, target, reward.target.parameters()))
    assert not any(map(torch.equal, predictor, reward.predictor.parameters()))


def test_the_bonus_is_divided_by_the_deviation_of_its_returns() -> None:
    """Two worlds, three steps: running sums R <- 0.9 R + e, of each world on its own; their
    deviation is the unit."""
    reward, everyone = make(RND), torch.arange(2)
    sums, seen = torch.zeros(2), []
    for seed in range(3):
        rows = drawn(2, seed)
        reward.observe_step(rows, everyone, step(2, ended=[True, False]))
        sums = 0.9 * sums + reward.errors(rows).detach()
        seen.append(sums.clone())
    unit = torch.cat(seen).std(correction=0)
    assert reward.scale.std.item() == pytest.approx(unit.item(), rel=1e-4)
    rows = drawn(2, 9)
    torch.testing.assert_close(reward(rows), reward.errors(rows).detach() / reward.scale.std)


def test_a_long_segment_is_learned_in_parts() -> None:
    """PPO's batches hold thousands of rows: one step of Adam each would teach next to nothing."""
    parts, whole = make(RND), make(RND | {"batch_size": 4096})
    start = parts.errors(drawn(256)).mean().item()
    for seed in range(3):
        parts.update(drawn(4096, seed))
        whole.update(drawn(4096, seed))
    assert parts.errors(drawn(256)).mean() < 0.5 * start
    assert whole.errors(drawn(256)).mean() > 0.8 * start


@pytest.mark.parametrize("method", [RND, ICM])
def test_the_bonus_does_not_fade_beside_its_first_errors(method: dict[str, object]) -> None:
    """By the time that outcomes are foreseen, errors of late are the unit, not the first ones."""
    late, ever = make(method | {"memory": 256}), make(method | {"memory": None})
    nobody = torch.zeros(64, dtype=torch.int64)
    for seed in range(300):
        for reward in (late, ever):
            reward.observe_step(caused(64, seed), nobody, step(2))
            reward.update(caused(256, seed))
    rows = caused(512, 999)
    assert late(rows).mean() > 3 * ever(rows).mean()


def caused(n: int, seed: int, law: float = 1.0) -> Tensors:
    """The tool moves by `law` times the action; the goal moves by chance."""
    rows = drawn(n, seed)
    after = rows["obs/state"].clone()
    after[:, :2] += law * rows["action"]
    generator = torch.Generator().manual_seed(seed + 1)
    after[:, 6:] += torch.randn(n, 3, generator=generator)
    return {**rows, "next_obs/state": after}


def test_an_unforeseen_outcome_is_a_surprise() -> None:
    """What follows from actions is learned; the same actions with other outcomes are not."""
    reward = make(ICM | {"leaves": ["state"]})
    reward.observe_step(caused(512, 0), torch.zeros(512, dtype=torch.int64), step(2))
    first = reward.update(caused(256, 0))
    for seed in range(150):
        last = reward.update(caused(256, seed))
    assert last["inverse_loss"] < 0.3 * first["inverse_loss"]
    usual, odd = reward(caused(512, 999)).mean(), reward(caused(512, 999, law=-3.0)).mean()
    assert odd > 2 * usual


@pytest.mark.parametrize("act", [Leaf((), "int64", 0, 3), mixed_leaf((0, 4))])
def test_choices(act: Leaf) -> None:
    reward = make(ICM, replace(SPEC, act=act))
    which = torch.randint(4, (256,), generator=torch.Generator().manual_seed(0))
    moves = torch.tensor([[0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0]])
    action = torch.stack([0 * which, which], 1).float() if act.shape else which
    rows = caused(256, 0) | {"action": action}
    rows["next_obs/state"][:, :2] = rows["obs/state"][:, :2] + moves[which]
    losses = [reward.update(rows)["inverse_loss"] for _ in range(121)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_chunk_of_actions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy\.chunk=1"):
        make(ICM)(drawn(4) | {"action": torch.zeros(4, 6)})


def test_running_moments_are_those_of_all_rows() -> None:
    values = 5 + 2 * torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    moments, of_late = RunningMeanStd(3), RunningMeanStd(3, memory=100)
    assert moments.std.tolist() == [1.0] * 3
    for part in values.split([1, 9, 490, 500]):
        moments.update(part)
        of_late.update(part)
    torch.testing.assert_close(moments.mean.float(), values.mean(0))
    torch.testing.assert_close(moments.std, values.std(0, correction=0))
    assert of_late.count.item() == 100


def test_all_kinds_of_observations_are_seen() -> None:
    obs = {
        "state": Leaf((3,)),
        "front": Leaf((32, 48, 3), "uint8", 0, 255),
        "cell": Leaf((2,), "uint8", 0, (3, 1), unit="symbol"),
        "privileged/more": Leaf((5,)),
    }
    rows = {f"obs/{name}": leaf.zeros(2) for name, leaf in obs.items()}
    rows["obs/front"][1] = 255
    numbers = ObservationFeatures(obs, None)(rows, "obs")
    assert numbers.shape == (2, 3 + 3 * 16 * 16 + 4 + 2)
    assert numbers[1, 3 : 3 + 768].unique().tolist() == [1.0]
    assert ObservationFeatures(obs, ("privileged/more",)).size == 5
    with pytest.raises(ConfigError, match="no observation fornt"):
        ObservationFeatures(obs, ("fornt",))
