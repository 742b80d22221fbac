"""Levels: regret by hand, rounds of two students, adversaries, CLUTR's autoencoder; the library's
arithmetic, what a score is, who learns from what; learnability."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.core.build import ConfigError, Node, build
from embodied.core.remembered import pack, unpack
from embodied.core.spec import Leaf
from embodied.envs.maze.env import Config, Maze
from embodied.teachers.levels.clutr import (
    AutoencoderSettings,
    LatentGaussian,
    LevelAutoencoder,
    beta,
    divergence,
    train,
)
from embodied.teachers.levels.plr import AGAIN, EDIT, NEW, LevelBuffer, Plr
from embodied.teachers.levels.regret import (
    STUDENT,
    Grammar,
    LevelGenerator,
    advantages,
    regret,
    surrogate,
)
from embodied.teachers.levels.sfl import Sfl
from embodied.teachers.teacher import Curriculum, Outcome, StudentEstimates, TaskWrapper
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


def test_a_round_waits_for_its_long_episodes(world: Maze) -> None:
    """Of the student's first two the one that fails takes longer: 1 - (1 + 0 + 1) / 3."""
    teacher = made(world, every=1)
    _, tickets = teacher.sample(2)
    teacher.update(tickets[:1], ended(1.0))
    play(teacher, 1.0)
    play(teacher.rival, 1.0)
    assert not teacher.heard
    teacher.update(tickets[1:], ended(0.0))
    np.testing.assert_allclose(teacher.heard, [[1 / 3]], rtol=1e-5)


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


def test_an_adversary_follows_the_regret(world: Maze) -> None:
    """The rival does better the fewer walls there are, so walls become fewer."""
    teacher = made(world, every=32, adversary={"lr": 0.005})
    walls = []
    for _ in range(20):
        count = play(teacher, *[0.0] * 32)[:, :25].sum(1)
        walls.append(float(count.mean()))
        play(teacher.rival, *(1 - 0.1 * count).tolist())
    assert teacher.round == 20 and walls[0] > 4.5 > 3.5 > np.mean(walls[-5:])


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


PLR = {"_target_": "embodied.teachers.levels.plr.Plr", "size": 8, "fill": 0.5, "score": "gain"}


@pytest.fixture(scope="module")
def maze() -> Maze:
    return Maze(Config(side=5, blocks=8, num_envs=3, horizon=6))


def made_plr(maze: Maze, node: Node = PLR, **settings: Any) -> Any:
    return build(node | settings, Curriculum, spec=maze.spec, levels=maze.levels, seed=0)


def outcome(gain: float, ret: float = 0.0, value: float = 0.0, n: int = 1) -> Outcome:
    numbers = (ret, ret > 0, 5.0, gain, 2 * gain, value)
    return Outcome(*(torch.full((n,), float(number)) for number in numbers))


def filled(maze: Maze, count: int = 4, **settings: Any) -> Plr:
    """A teacher with so many levels in its library, scored 0.1, 0.2, ..."""
    teacher = made_plr(maze, **settings)
    for played in range(count):
        teacher.update(teacher.sample(1)[1], outcome(0.1 * (played + 1)))
    return teacher


def library(*scores: float, staleness: float = 0.25, size: int = 4) -> LevelBuffer:
    books = LevelBuffer(size, 1, 0.5, staleness)
    for at, score in enumerate(scores):
        assert books.add(np.array([at / 10]), score, 0.0)
    return books


def bytes_of(levels: Any) -> set[bytes]:
    return {np.asarray(level, np.float32).tobytes() for level in levels}


def test_chances_by_hand() -> None:
    """Scores 0.2, 0.5, 0.1: ranks 2, 1, 3; beta 1/2 weighs them 1/4, 1, 1/9, 49/36 together. After
    two more draws of the first, the others were drawn two draws ago. Of those that are not being
    played (all, if all are) the first and third weigh 4/5 and 1/5."""
    books, random = library(0.2, 0.5, 0.1), np.random.default_rng(0)
    score = np.array([9, 36, 4]) / 49
    np.testing.assert_allclose(books.chances(), 0.75 * score + 0.25 / 3)
    np.testing.assert_allclose(books.chances([0, 1, 2]), books.chances())
    others = 0.75 * np.array([0.8, 0, 0.2]) + 0.25 * np.array([0.5, 0, 0.5])
    np.testing.assert_allclose(books.chances([1]), others)
    assert 1 not in {books.sample(random, [1]) for _ in range(50)}
    books = library(0.2, 0.5, 0.1)
    books.clock, books.drawn[0] = 2, 2
    np.testing.assert_allclose(books.chances(), 0.75 * score + 0.25 * np.array([0, 0.5, 0.5]))
    books = library(0.2, 0.5, 0.1, staleness=0.0)
    counts = np.bincount([books.sample(random) for _ in range(3000)], minlength=3)
    assert books.clock == 3000
    np.testing.assert_allclose(counts / 3000, score, atol=0.03)


def test_parallel_envs_replay_different_levels(maze: Maze) -> None:
    """With beta 0.01 the best level has nearly all the chances; four envs play all four levels."""
    teacher = filled(maze, replay=1.0, beta=0.01, staleness=0.0)
    memos = [teacher.pending[ticket][1] for ticket in teacher.sample(4)[1].tolist()]
    assert {kind for kind, _ in memos} == {AGAIN}
    assert sorted(number for _, number in memos) == [0, 1, 2, 3]


def test_the_least_likely_level_leaves_for_a_better_one() -> None:
    books = library(0.2, 0.5, 0.1, 0.4)
    assert not books.add(np.array([0.9]), 0.1, 0.0)  # not higher than the lowest
    assert books.add(np.array([0.9]), 0.11, 0.7)
    assert books.get(2) is None and books.find(np.array([0.2])) is None
    number = books.find(np.array([0.9]))
    assert number == 4 and books.best_of(number) == 0.7 and len(books) == 4
    books.update_score(2, 9.0, 9.0)  # late news of a level that has left
    assert books.score.max() == 0.5
    # A stale level is likely to be drawn, and stays although its score is the lowest.
    old = library(0.3, 0.1, 0.2, staleness=0.9, size=3)
    old.clock, old.drawn[:] = 10, [10, 0, 10]
    assert old.add(np.array([0.9]), 0.25, 0.0)
    assert old.find(np.array([0.1])) == 1 and old.find(np.array([0.2])) is None


def test_new_levels_until_the_library_is_filled(maze: Maze) -> None:
    """New levels may be the simplest."""
    teacher = filled(maze, 3, replay=1.0)
    assert not teacher.ready and set(teacher.kinds) == {NEW}
    teacher.update(teacher.sample(1)[1], outcome(0.4))
    assert teacher.ready
    assert bytes_of(teacher.sample(20)[0]) <= bytes_of(teacher.library.level[:4])
    tasks, _ = made_plr(maze, first="plain").sample(20)
    assert not tasks[:, :25].any() and len(tasks.unique(dim=0)) > 10


def test_only_what_is_played_again_is_learned_from(maze: Maze) -> None:
    """And that as often as asked for."""
    robust, plain = filled(maze, robust=True, replay=0.3), filled(maze)
    _, tickets = robust.sample(1000)
    again = [robust.pending[number][1][0] == AGAIN for number in tickets.tolist()]
    assert robust.trains(tickets).tolist() == again
    assert np.mean(again) == pytest.approx(0.3, abs=0.05)
    assert plain.trains(plain.sample(40)[1]).all()


@pytest.mark.parametrize(
    ("score", "first", "second"),
    [("gain", 0.3, 0.1), ("error", 0.6, 0.2), ("maxmc", 0.5, 0.7 - 0.6)],
)
def test_scores_by_hand(maze: Maze, score: str, first: float, second: float) -> None:
    """An episode that returned 0.7 where the student expected 0.2 on average; then another, and
    worse: the best return is remembered, the newest expectation counts."""
    teacher = made_plr(maze, score=score, replay=1.0, size=1, fill=1.0)
    for told, expected in (
        (outcome(0.3, ret=0.7, value=0.2), first),
        (outcome(0.1, ret=0.0, value=0.6), second),
    ):
        teacher.update(teacher.sample(1)[1], told)
        assert teacher.library.score[0] == pytest.approx(expected, abs=1e-6)
    assert len(teacher.library) == 1


def test_edits_follow_what_was_played_again(maze: Maze) -> None:
    teacher = filled(maze, replay=1.0, robust=True, edits=2)
    parents, tickets = teacher.sample(3)
    assert teacher.trains(tickets).all()
    teacher.update(tickets, outcome(0.5, n=3))
    children, tickets = teacher.sample(3)
    assert not teacher.trains(tickets).any() and list(teacher.kinds)[-3:] == [EDIT] * 3
    assert maze.levels.solvable(children.double().numpy()).all()
    apart = (children != parents).sum(1)
    assert (apart <= 4).all() and apart.sum() > 0  # a goal that moves may take a wall away
    before = len(teacher.library)
    teacher.update(tickets, outcome(0.9, n=3))
    assert len(teacher.library) >= before + 2 and not teacher.queue  # of edits none is made
    assert teacher.taken == len(teacher.library)


def test_a_level_that_is_known_is_not_taken_twice(maze: Maze) -> None:
    teacher = filled(maze, 2, replay=0.0)
    level = teacher.library.level[0].copy()
    teacher.learn(level[None], np.array([[0.9, 0.0, 0.0]]), [(NEW, -1)])
    assert len(teacher.library) == 2 and teacher.library.score[0] == 0.9


def test_estimates_are_means_over_the_steps_of_an_episode(maze: Maze) -> None:
    """Two batches, and a resume between; ticket 0 ends in the second, 1 is still running."""
    teacher = made_plr(maze)
    heard: list[Any] = []
    teacher.learn = lambda points, scores, memos: heard.append(scores)  # type: ignore[assignment]
    _, tickets = teacher.sample(2)
    before, parts = StudentEstimates(teacher), StudentEstimates(teacher)
    gains, values = torch.tensor([0.4, -0.2, 9.0]), torch.tensor([0.5, 0.1, 0])
    before.add_steps(torch.tensor([0, 0, 1]), gains, values)
    parts.set_state(unpack(pack(before.get_state())))
    parts.episodes_ended(
        tickets[:1], Outcome(torch.tensor([0.8]), torch.ones(1), torch.tensor([3.0]))
    )
    assert not heard
    parts.add_steps(torch.tensor([1, 0]), torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.9]))
    # gain (0.4 + 0 + 0.5) / 3, return, value (0.5 + 0.1 + 0.9) / 3
    np.testing.assert_allclose(heard, [[[0.3, 0.8, 0.5]]], rtol=1e-6)
    assert teacher.pending.keys() == {1} and parts.sums.keys() == {1} and not parts.ended


def test_an_episode_whose_steps_were_never_told_teaches_nothing(maze: Maze) -> None:
    teacher = made_plr(maze)
    _, tickets = teacher.sample(2)
    parts = StudentEstimates(teacher)
    ends = torch.tensor([0.8, 0.8])
    parts.episodes_ended(tickets, Outcome(ends, ends, ends))
    with pytest.warns(UserWarning, match="is NaN"):
        parts.add_steps(tickets[:1], torch.ones(1), torch.ones(1))
    assert teacher.dropped == 1 and len(teacher.library) == 1


def test_a_world_says_who_learns(maze: Maze) -> None:
    """`learn` belongs to the episode of the step, not to the one that begins after it."""
    teacher = filled(maze, robust=True)
    parts = StudentEstimates(teacher)
    taught = TaskWrapper(maze, teacher, estimates=parts)
    taught.reset(0)
    seen: dict[int, set[bool]] = {}
    for _ in range(60):
        step = taught.step(torch.zeros(3, dtype=torch.int64))
        for ticket, learn in zip(step.log["ticket"], step.log["learn"], strict=True):
            seen.setdefault(int(ticket), set()).add(bool(learn))
        for ticket in step.log["ticket"][step.ended].tolist():
            assert seen[ticket] == {teacher.pending[ticket][1][0] == AGAIN}
    assert {True, False} <= set().union(*seen.values())
    taught.reset()
    assert not parts.ended and len(teacher.pending) == 3


@pytest.mark.parametrize("name", ["domain_randomization", "plr", "accel", "paired", "clutr"])
def test_what_cannot_be_taught_is_refused(name: str, maze: Maze) -> None:
    node = yaml.safe_load(Path(f"configs/teacher/{name}.yaml").read_text())
    small = Maze(Config(side=6, blocks=3))
    for more, context, message in (
        ({}, {"spec": maze.spec}, "needs an environment with levels"),
        ({"box": {"start": [0, 1]}}, {"spec": maze.spec, "levels": maze.levels}, "chosen whole"),
        ({}, {"spec": small.spec, "levels": maze.levels}, "39 elements, a level has 28"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(node | more, Curriculum, seed=0, **context)


def test_settings_that_make_no_sense_are_refused(maze: Maze) -> None:
    with pytest.raises(ConfigError, match="replay above 0"):
        made_plr(maze, robust=True, replay=0.0)
    with pytest.raises(ConfigError, match=r"size=9 should be at most teacher\.candidates=6"):
        made_sfl(maze, size=9)
    teacher = made_plr(maze)
    with pytest.raises(ConfigError, match="value estimates"):
        teacher.update(teacher.sample(1)[1], ended(1.0))
    names = ("random", "plain", "mutate", "solvable", "picture", "traits")
    wordless = SimpleNamespace(size=3, held_out=np.zeros((0, 3)), **dict.fromkeys(names))
    spec = replace(maze.spec, task=Leaf((3,), low=0.0, high=1.0))
    with pytest.raises(ConfigError, match="token by token"):
        build(NODE, Curriculum, spec=spec, levels=wordless, seed=0)


SFL = {"_target_": "embodied.teachers.levels.sfl.Sfl", "candidates": 6, "plays": 4, "size": 2}
made_sfl = partial(made_plr, node=SFL)


def play_round(teacher: Sfl, rates: list[float]) -> None:
    """All tests of a round: candidate i wins the share `rates[i]` of its four."""
    wins = [0.0] * 6
    while len(teacher.tested):
        _, ticket = teacher.sample(1)
        place = teacher.pending[int(ticket)][1]
        won = wins[place] < 4 * rates[place]
        wins[place] += won
        teacher.update(ticket, ended(float(won)))


def test_levels_that_are_solved_sometimes_are_kept(maze: Maze) -> None:
    """p (1 - p) of 0, 1/4, 1/2, 3/4, 1 and 0: the largest is at 1/2, then at 1/4."""
    teacher = made_sfl(maze)
    tested = teacher.tested.copy()
    play_round(teacher, [0.0, 0.25, 0.5, 0.75, 1.0, 0.0])
    assert np.array_equal(teacher.kept, tested[[2, 1]]) and teacher.rounds == 1
    assert teacher.learnability == pytest.approx((0.25 + 0.1875) / 2)
    assert teacher.metrics()["learnability"] == teacher.learnability


def test_tests_are_random_levels_and_the_rest_is_on_kept_levels(maze: Maze) -> None:
    """Interrupted tests are repeated."""
    teacher = made_sfl(maze)
    _, tickets = teacher.sample(7)
    teacher.update(tickets[:2], ended(1.0, 0.0))
    teacher.forget()
    assert len(teacher.waiting) == 22
    _, tickets = teacher.sample(22)
    assert teacher.trains(tickets).all()
    teacher.update(tickets, ended(*[1.0, 0.0] * 11))
    tasks, after = teacher.sample(50)
    assert teacher.trains(after).all() and bytes_of(tasks) == bytes_of(teacher.kept)


def test_published_tests_are_not_trained_on_and_half_of_the_rest_is_kept(maze: Maze) -> None:
    teacher = made_sfl(maze, train_on_tests=False, replay=0.5)
    _, tickets = teacher.sample(24)
    assert not teacher.trains(tickets).any()
    assert sorted(teacher.pending[t][1] for t in tickets.tolist()) == sorted([*range(6)] * 4)
    # The tests are still running: the next episodes are random levels, and trained on.
    assert teacher.trains(teacher.sample(5)[1]).all()
    teacher.update(tickets, ended(*[1.0, 0.0] * 12))
    tasks, after = teacher.sample(400)
    known = bytes_of(teacher.kept)
    share = np.mean([bytes_of([task]) <= known for task in tasks])
    assert len(known) == 2 and teacher.trains(after).all()
    assert share == pytest.approx(0.5, abs=0.08)


def test_a_round_follows_after_so_many_episodes(maze: Maze) -> None:
    teacher = made_sfl(maze, every=10)
    play_round(teacher, [0.5] * 6)
    _, tickets = teacher.sample(10)
    teacher.update(tickets[:9], ended(*[1.0] * 9))
    assert not len(teacher.tested)
    teacher.update(tickets[9:], ended(1.0))
    assert len(teacher.tested) == 6 and len(teacher.waiting) == 24 and len(teacher.kept) == 2
