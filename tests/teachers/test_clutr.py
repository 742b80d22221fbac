"""Clutr: losses by hand, what is written can be read, and the adversary finds a place that pays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import build
from embodied.core.state_codec import pack, unpack
from embodied.envs.maze.env import Config, Maze
from embodied.teachers.levels.regret import (
    AutoencoderSettings as Settings,
)
from embodied.teachers.levels.regret import (
    Clutr,
    Grammar,
    LatentGaussian,
    LevelAutoencoder,
    beta,
    divergence,
    train,
)
from embodied.teachers.teacher import Curriculum, Outcome

SMALL = {"pool": 64, "steps": 3, "latent": 4}
NODE = {"_target_": "embodied.teachers.levels.regret.Clutr", "every": 8, "autoencoder": SMALL}


@pytest.fixture(scope="module")
def world() -> Maze:
    return Maze(Config(side=5, blocks=6, num_envs=3, horizon=6))


def made(world: Maze, seed: int = 0, **settings: Any) -> Clutr:
    return build(NODE | settings, Curriculum, spec=world.spec, levels=world.levels, seed=seed)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def ended(*returns: float) -> Outcome:
    value = torch.tensor(returns)
    return Outcome(value, value > 0, torch.ones(len(returns)))


def test_losses_by_hand() -> None:
    """KL of N(1, 4) in one dimension: (1 + 4 - log 4 - 1) / 2; N(0, 1) is the prior itself."""
    mean, log = torch.tensor([[1.0, 0.0]]), torch.tensor([[math.log(4), 0.0]])
    assert divergence(mean, log).item() == pytest.approx((4 - math.log(4)) / 2)
    assert beta(350, 100) == 0.5 and beta(0, 100) < 0.01 and beta(900, 100) > 0.99
    place = LatentGaussian(2)
    with torch.no_grad():
        place.mean[0], place.log[1] = 1.0, math.log(2)
    # z = (0, 2): densities of N(1, 1) at 0 and N(0, 4) at 2, both 1 deviation away
    wanted = -1 - math.log(2) - math.log(2 * math.pi)
    assert place(torch.tensor([[0.0, 2.0]])).item() == pytest.approx(wanted)


def test_a_latent_may_be_bounded() -> None:
    grammar = Grammar(5, 4, 1)
    plain, bounded = (LevelAutoencoder(Settings(bounded=b), grammar, rng()) for b in (False, True))
    z = torch.tensor([[0.5, 100.0]])
    assert torch.equal(plain.bound(z), z)
    assert torch.allclose(bounded.bound(z), torch.tensor([[4 * math.tanh(0.5), 4.0]]))


def test_it_learns_to_write_what_it_read() -> None:
    """Sorted words of a small world, far better than the most frequent words would be."""
    random, grammar = rng(), Grammar(words=7, length=4, marks=1)
    pool = np.concatenate(
        [random.integers(6, size=(400, 1)), np.sort(random.integers(7, size=(400, 3)), 1)], 1
    )
    settings = Settings(steps=400, batch=32, lr=5e-3, latent=8, writer=32, reader=32, warm=1e6)
    model = LevelAutoencoder(settings, grammar, random)
    adam = torch.optim.Adam(model.parameters(), settings.lr)
    before = torch.get_rng_state()
    noted = train(model, adam, pool, random)
    assert torch.equal(before, torch.get_rng_state())
    with torch.no_grad():
        again = model.write(model.read(torch.from_numpy(pool))[0])
    often = np.mean([np.bincount(column).max() / 400 for column in pool.T])
    assert np.mean(again == pool) > 0.8 > 2 * often and noted["kl"] > 1
    assert again[:, 0].max() <= 5  # a mark is never "nothing"


def test_writing_is_what_the_writer_thinks_likeliest() -> None:
    """Word by word it says what it would say of the whole sentence at once."""
    model = LevelAutoencoder(Settings(latent=3), Grammar(6, 5, 2), rng())
    z = torch.from_numpy(rng(1).standard_normal((7, 3))).float()
    words = torch.from_numpy(model.write(z))
    assert torch.equal(model.logits(z, words).argmax(2), words)


def test_the_adversary_finds_the_place_that_pays(world: Maze) -> None:
    """The rival is the better the larger the first number of the place."""
    teacher = made(world, every=32)
    desk = teacher.rival
    for _ in range(15):
        _, tickets = teacher.sample(32)
        _, against = desk.sample(32)
        teacher.update(tickets, ended(*[0.0] * 32))
        desk.update(against, ended(*teacher.z[:, 0].add(3).tolist()))
    mean = teacher.place.mean.tolist()
    assert teacher.round == 15 and mean[0] > 0.3 and mean[0] > 2 * max(map(abs, mean[1:]))
    assert {"kept", "written", "spread"} <= set(teacher.metrics())


def test_levels_are_learned_once(world: Maze) -> None:
    """A resumed teacher neither learns them again nor forgets them."""
    teacher, other = made(world), made(world, seed=4)
    assert not teacher.learned
    teacher.sample(1)
    other.set_state(unpack(pack(teacher.get_state())))
    assert other.learned
    z = torch.from_numpy(rng().standard_normal((5, 4))).float()
    assert np.array_equal(teacher.sentences.write(z), other.sentences.write(z))
    assert torch.equal(teacher.sample(9)[0], other.sample(9)[0])
