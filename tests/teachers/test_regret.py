"""Regret by hand, rounds of two students, adversaries that learn from it, CLUTR's autoencoder."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError, Node, build
from embodied.core.spec import Leaf, Spec
from embodied.envs.maze.env import Config, Maze
from embodied.teachers.levels.clutr import (
    AutoencoderSettings,
    LatentGaussian,
    LevelAutoencoder,
    beta,
    divergence,
    train,
)
from embodied.teachers.levels.regret import (
    STUDENT,
    Grammar,
    LevelGenerator,
    Settings,
    advantages,
    improve,
    regret,
    surrogate,
)
from embodied.teachers.teacher import Curriculum, TaskWrapper
from tests.teachers.place import ended, rng

NODE = {"_target_": "embodied.teachers.levels.paired.Paired", "every": 4}


@pytest.fixture(scope="module")
def world() -> Maze:
    return Maze(Config(side=5, blocks=6, num_envs=3, horizon=6))


def made(world: Maze, node: Node = NODE, **settings: Any) -> Any:
    teacher = build(node | settings, Curriculum, spec=world.spec, levels=world.levels, seed=0)
    teacher.heard = []
    if node is NODE and "adversary" not in settings:
        teacher.update_generator = lambda regrets: teacher.heard.append(regrets) or {}
    return teacher


def play(who: Any, *scores: float) -> torch.Tensor:
    """As many levels as there are scores, which they end with."""
    levels, tickets = who.sample(len(scores))
    who.update(tickets, ended(*scores))
    return levels


def test_regret_by_hand() -> None:
    """The rival's best, 0.9, less the student's mean, (0.2 + 0.6) / 2. Flexible: where the
    student's best is better, it is the rival, 0.8 - (0.3 + 0.1) / 2."""
    assert regret([0.8], [0.3], False) == 0.0
    assert regret([0.8], [0.3, 0.1], True) == pytest.approx(0.6)
    for flexible in (False, True):
        assert regret([0.2, 0.6], [0.9, 0.1], flexible) == pytest.approx(0.5)


def test_a_round_ends_when_both_have_played_every_level(world: Maze) -> None:
    teacher = made(world)
    desk = teacher.rival
    first = play(teacher, 0.1, 0.2, 0.3, 0.4, 0.5)
    others, against = desk.sample(4)
    assert torch.equal(first[:4], others) and torch.equal(first[4], first[0])  # the same levels
    assert len(first[:4].unique(dim=0)) == 4
    desk.update(against[:3], ended(0.9, 0.1, 0.3))
    assert not teacher.heard and teacher.round == 0
    desk.update(against[3:], ended(0.8))
    # 0.9 - (0.1 + 0.5) / 2, max(0, 0.1 - 0.2), 0.3 - 0.3, 0.8 - 0.4
    np.testing.assert_allclose(teacher.heard, [[0.6, 0.0, 0.0, 0.4]], atol=1e-6)
    how = {"regret": 0.25, "rounds": 1, "student": (0.3 + 0.2 + 0.3 + 0.4) / 4, "rival": 2.1 / 4}
    metrics = teacher.metrics()
    assert {name: metrics[name] for name in how} == pytest.approx(how)
    assert teacher.round == 1 and not torch.equal(teacher.sample(4)[0], others)


def test_more_plays_and_whoever_is_faster(world: Maze) -> None:
    teacher = made(world, every=2, plays=2)
    for played in range(6):  # of the student: three each
        play(teacher, 0.1 * played)
    assert teacher.given[STUDENT] == [3, 3] and not teacher.heard
    _, tickets = teacher.rival.sample(5)
    teacher.rival.update(tickets[:4], ended(0.5, 0.6, 0.7, 0.2))
    # 0.7 - (0 + 0.2 + 0.4) / 3 and 0.6 - (0.1 + 0.3 + 0.5) / 3
    np.testing.assert_allclose(teacher.heard, [[0.5, 0.3]], rtol=1e-5)
    teacher.rival.update(tickets[4:], ended(9.0))  # late: of a round that is over
    assert len(teacher.heard) == 1 and not teacher.made


def test_forgetting_is_each_ones_own(world: Maze) -> None:
    teacher = made(world)
    desk = teacher.rival
    teacher.sample(2)
    _, tickets = desk.sample(2)
    teacher.forget()
    assert set(teacher.pending) == set(tickets.tolist())
    desk.forget()
    assert not teacher.pending


def test_two_worlds_of_the_same_levels(world: Maze) -> None:
    """Both agents play the levels of a round, each in its own environment."""
    teacher = made(world)
    other = teacher.antagonist_env(world, lambda: Maze(world.config))
    assert isinstance(other, TaskWrapper) and other.env is not world
    env = teacher.protagonist_env(world, None)
    seen, first = other.reset(1), env.reset(0)
    assert all(torch.equal(first[key], seen[key]) for key in ("facing", "view"))
    for _ in range(40):
        env.step(torch.zeros(3, dtype=torch.int64))
        other.step(torch.full((3,), 2))
    assert teacher.round >= 1 and teacher.how["student"] == 0.0
    assert len(teacher.pending) == 6


def test_advantages_by_hand() -> None:
    """Three words worth 0.5, 0.4, 0.2; the level earns 1; gamma 0.9, lambda 0.5."""
    value, earned = torch.tensor([[0.5, 0.4, 0.2]]), torch.tensor([1.0])
    last = 1.0 - 0.2
    middle = 0.9 * 0.2 - 0.4 + 0.45 * last
    first = 0.9 * 0.4 - 0.5 + 0.45 * middle
    found = advantages(value, earned, 0.9, 0.5)
    assert torch.allclose(found, torch.tensor([[first, middle, last]]))


def test_the_clipped_objective_by_hand() -> None:
    """rho = 2 is 1.2 where that is worse, and rho = 1/2 counts in full where that is worse."""
    old = torch.zeros(4)
    log = torch.tensor([2.0, 2.0, 0.5, 0.5]).log()
    loss = surrogate(log, old, torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2)
    assert torch.allclose(loss, torch.tensor([-1.2, 2.0, -0.5, 0.8]))


def test_what_was_said_is_as_likely_as_it_says() -> None:
    """And is seen again as it was seen when it was said."""
    grammar = Grammar(words=5, length=6, marks=2)
    builder = LevelGenerator(grammar, 8, rng())
    with torch.no_grad():
        builder.word.weight.normal_()
    words, old, value = builder.generate(200, rng(1))
    assert words.shape == (200, 6) and words[:, :2].max() == 3 and words[:, 2:].max() == 4
    seen = builder.observations(torch.from_numpy(words))
    logs, again = builder(seen, torch.arange(6))
    said = logs.gather(2, torch.from_numpy(words)[..., None])[..., 0]
    assert torch.allclose(said, old, atol=1e-5) and torch.allclose(again, value, atol=1e-5)
    often = np.bincount(words[:, 0], minlength=5) / 200
    assert np.allclose(often, logs[0, 0].exp().detach().numpy(), atol=0.1)


def test_what_is_seen_by_hand() -> None:
    """Words 2, 0 (marks), 1, 1 of 0..3; before the last: both marks, a 1, three quarters done."""
    builder = LevelGenerator(Grammar(4, 4, 2), 8, rng())
    seen = builder.observations(torch.tensor([[2, 0, 1, 1]]))[0]
    assert seen[0].tolist() == [0] * 13
    assert seen[1].tolist() == [0, 0, 1, 0] + [0] * 8 + [0.25]
    assert seen[3].tolist() == [0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0.75]


def test_it_learns_to_say_what_pays() -> None:
    """A level earns the share of its words that are 0: from a fifth to most of them."""
    grammar, random = Grammar(words=5, length=6, marks=1), rng()
    builder, settings = LevelGenerator(grammar, 16, random), Settings(lr=5e-3)
    adam = torch.optim.Adam(builder.parameters(), settings.lr)
    shares = []
    for _ in range(50):
        words, old, value = builder.generate(32, random)
        earned = torch.from_numpy((words == 0).mean(1)).float()
        shares.append(float(earned.mean()))
        improve(builder, adam, settings, words, old, value, earned)
    assert shares[0] < 0.35 and np.mean(shares[-5:]) > 0.7


def test_an_adversary_follows_the_regret(world: Maze) -> None:
    """The rival does better the fewer walls there are, so walls become fewer."""
    teacher = made(world, every=32, adversary={"lr": 0.005})
    walls = []
    for _ in range(20):
        count = play(teacher, *[0.0] * 32)[:, :25].sum(1)
        walls.append(float(count.mean()))
        play(teacher.rival, *(1 - 0.1 * count).tolist())
    assert teacher.round == 20 and walls[0] > 4.5 > 3.5 > np.mean(walls[-5:])


def test_what_makes_no_sense_is_refused(world: Maze) -> None:
    names = ("random", "plain", "mutate", "solvable", "picture", "traits")
    wordless = SimpleNamespace(size=3, held_out=np.zeros((0, 3)), **dict.fromkeys(names))
    leaf = Leaf((3,), low=0.0, high=1.0)
    spec = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), 0.1, leaf)
    with pytest.raises(ConfigError, match="token by token"):
        build(NODE, Curriculum, spec=spec, levels=wordless, seed=0)


SMALL = {"pool": 64, "steps": 3, "latent": 4}
CLUTR = {"_target_": "embodied.teachers.levels.clutr.Clutr", "every": 8, "autoencoder": SMALL}


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
    z = torch.tensor([[0.5, 100.0]])
    for bounded, expected in ((False, z), (True, torch.tensor([[4 * math.tanh(0.5), 4.0]]))):
        model = LevelAutoencoder(AutoencoderSettings(bounded=bounded), Grammar(5, 4, 1), rng())
        torch.testing.assert_close(model.bound(z), expected)


def test_it_learns_to_write_what_it_read() -> None:
    """Sorted words of a small world, far better than the most frequent words would be."""
    random, grammar = rng(), Grammar(words=7, length=4, marks=1)
    marks, rest = random.integers(6, size=(400, 1)), random.integers(7, size=(400, 3))
    pool = np.concatenate([marks, np.sort(rest, 1)], 1)
    sizes = {"latent": 8, "writer": 32, "reader": 32}
    settings = AutoencoderSettings(steps=400, batch=32, lr=5e-3, warm=1e6, **sizes)
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
    model = LevelAutoencoder(AutoencoderSettings(latent=3), Grammar(6, 5, 2), rng())
    z = torch.from_numpy(rng(1).standard_normal((7, 3))).float()
    words = torch.from_numpy(model.write(z))
    assert torch.equal(model.logits(z, words).argmax(2), words)


def test_the_adversary_finds_the_place_that_pays(world: Maze) -> None:
    """The rival is the better the larger the first number of the place."""
    teacher = made(world, CLUTR, every=32)
    for _ in range(15):
        _, against = teacher.rival.sample(32)
        play(teacher, *[0.0] * 32)
        teacher.rival.update(against, ended(*teacher.z[:, 0].add(3).tolist()))
    mean = teacher.place.mean.tolist()
    assert teacher.round == 15 and mean[0] > 0.3 and mean[0] > 2 * max(map(abs, mean[1:]))
    assert {"kept", "written", "spread"} <= set(teacher.metrics())
