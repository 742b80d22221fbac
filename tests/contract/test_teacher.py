"""Every teacher YAML: what it chooses can be played, tickets in any order, its own randomness, an
outcome that is no number, an episode that never ends, exact resume; in the world that it needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from embodied.core.build import build
from embodied.core.state_codec import pack, unpack
from embodied.core.wrapper import Wrapper
from embodied.teachers.teacher import Curriculum, Outcome, Teacher
from envs.toy.rooms import Config as RoomsConfig
from envs.toy.rooms import Rooms
from envs.wrappers.episodic_density import Config as FamiliarConfig
from envs.wrappers.episodic_density import EpisodicDensity
from tests.teachers.kinds import GAME, WORLDS, Box, need, small

FILES = sorted(Path("configs/teacher").glob("*.yaml"))
NODES = {file.stem: yaml.safe_load(file.read_text()) for file in FILES}
GAMES = [name for name, node in NODES.items() if need(node["_target_"]) == GAME]
CHOOSERS = [name for name in NODES if name not in GAMES]
LEARNS_NOTHING = ("domain_randomization", "snapshot", "uniform")
EPISODES = 180
OWN_CLOCKS = ("pending", "issued", "dropped", "counts", "random")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teachers")


def world_for(name: str) -> Box:
    kind = need(NODES[name]["_target_"])
    assert kind in WORLDS, f'{name}.yaml needs "{kind}", and this contract has no such world'
    return WORLDS[kind]


@pytest.fixture(params=CHOOSERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def world(name: str) -> Box:
    return world_for(name)


@pytest.fixture
def node(name: str, world: Box, folder: Path) -> dict[str, Any]:
    """The YAML's settings, made small."""
    settings = NODES[name]
    return world.node(small(settings["_target_"], settings), folder)


@pytest.fixture
def made(world: Box, node: dict[str, Any]) -> Callable[..., Teacher]:
    return lambda seed=0: build(node, Curriculum, **world.context(), seed=seed)


def outcome(*scores: float) -> Outcome:
    """Episodes of five steps with such returns; the student expected half."""
    value = torch.tensor(scores)
    won = torch.where(value.isnan(), value, (value > 0.5).float())
    return Outcome(value, won, torch.full_like(value, 5), value, value, 0.5 * value)


def play(
    world: Box, teacher: Teacher, episodes: int, flight: int = 4, seed: int = 0
) -> list[Tensor]:
    """What was chosen, one at a time from `flight` in the air, which end in random order; the
    student gets better with time. A second one plays as much, and is about as good."""
    random = np.random.default_rng(seed)
    rival = getattr(teacher, "rival", None)
    air: list[tuple[Tensor, Tensor]] = []
    seen: list[Tensor] = []
    for played in range(episodes):
        air.append(teacher.sample(1))
        seen.append(air[-1][0])
        if len(air) == flight:
            task, ticket = air.pop(int(random.integers(flight)))
            ease = world.ease(task) - 0.5 * (played < episodes / 2)
            teacher.update(ticket, outcome(float(random.random() < ease)))
        if rival is not None:
            rival.update(rival.sample(1)[1], outcome(float(random.random() < 0.5)))
    return [torch.cat(seen)]


def alike(one: Any, other: Any) -> bool:
    """Packed states, to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7))
    return one == other or (one != one and other != other)


def learned(teacher: Teacher) -> dict[str, Any]:
    """All that it remembers but which episodes there were."""
    state = pack(teacher.get_state())
    state["own"].pop("recent", None)  # what the log describes
    return {key: value for key, value in state.items() if key not in OWN_CLOCKS}


def test_every_yaml_is_played() -> None:
    """None is left out, and every kind of world has somebody to play for."""
    assert sorted([*CHOOSERS, *GAMES]) == [file.stem for file in FILES] and GAMES
    assert {need(NODES[name]["_target_"]) for name in CHOOSERS} == set(WORLDS)


def test_what_it_chooses_can_be_played(name: str, world: Box, made: Callable[..., Teacher]) -> None:
    """Before and after what it learns."""
    teacher = made()
    before = learned(teacher)
    (tasks,) = play(world, teacher, EPISODES)
    assert alike(before, learned(teacher)) == (name in LEARNS_NOTHING)
    assert tasks.shape == (EPISODES, *world.shape) and world.valid(tasks, teacher)
    assert len(tasks.unique(dim=0)) > 3
    assert all(np.isfinite(value) for value in teacher.metrics().values())


def test_several_at_once_and_in_any_order(world: Box, made: Callable[..., Teacher]) -> None:
    teacher = made()
    for turn in range(20):
        tasks, tickets = teacher.sample(8)
        assert tasks.shape == (8, *world.shape) and world.valid(tasks, teacher)
        assert tickets.shape == (8,) and tickets.dtype == torch.int64
        order = torch.from_numpy(np.random.default_rng(turn).permutation(8))
        for part in order.split(4):
            teacher.update(tickets[part], outcome(0.1, 0.9, 0.5, 0.2))
    assert not teacher.pending and len(set(tickets.tolist())) == 8
    with pytest.raises(KeyError):
        teacher.update(tickets[:1], outcome(1.0))  # an episode ends once


def test_an_outcome_that_is_no_number_teaches_nothing(
    world: Box, made: Callable[..., Teacher]
) -> None:
    """One warning, however many; the finite ones of the same call still teach."""
    teacher = made()
    play(world, teacher, 60)
    _, tickets = teacher.sample(12)
    before = learned(teacher)
    with pytest.warns(UserWarning, match="is NaN") as warned:
        for part, bad in zip(tickets.split(4), (np.nan, np.inf, -np.inf), strict=True):
            teacher.update(part, Outcome(*(torch.full((4,), bad),) * 6))
    assert len(warned) == 1 and alike(before, learned(teacher))
    assert 3 <= teacher.dropped <= 12  # starts as usual are nothing to be told of
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        teacher.update(teacher.sample(2)[1], outcome(np.nan, 1.0))
        (tasks,) = play(world, teacher, 30)
    assert world.valid(tasks, teacher)


def test_an_episode_that_never_ends(world: Box, made: Callable[..., Teacher]) -> None:
    teacher = made()
    _, stuck = teacher.sample(3)
    (tasks,) = play(world, teacher, EPISODES, flight=1)
    assert world.valid(tasks, teacher)
    assert set(stuck.tolist()) == set(teacher.pending)
    teacher.update(stuck, outcome(1.0, 1.0, 1.0))  # late, but known


def test_fewer_episodes_than_a_fit_needs(world: Box, made: Callable[..., Teacher]) -> None:
    for episodes in (0, 1, 3):
        teacher = made()
        if episodes:
            play(world, teacher, episodes, flight=1)
        assert world.valid(teacher.sample(5)[0], teacher)
        assert all(np.isfinite(value) for value in teacher.metrics().values())


def test_scores_that_are_all_the_same(world: Box, made: Callable[..., Teacher]) -> None:
    for score in (0.0, 1.0):
        teacher = made()
        for _ in range(12):
            teacher.update(teacher.sample(10)[1], outcome(*[score] * 10))
        assert world.valid(teacher.sample(20)[0], teacher)
        assert all(np.isfinite(value) for value in teacher.metrics().values())


def test_a_resumed_teacher_goes_on_exactly(
    world: Box, made: Callable[..., Teacher], tmp_path: Path
) -> None:
    """As a checkpoint keeps it, with episodes in the air, into a teacher of another seed."""
    teacher, resumed = made(), made(seed=5)
    play(world, teacher, 110)
    file = tmp_path / "state.pt"
    torch.save(pack(teacher.get_state()), file)
    first = play(world, teacher, 110, seed=1)
    state = unpack(torch.load(file, weights_only=True))
    for _ in range(2):  # the second time: what was saved has not moved
        resumed.set_state(state)
        assert resumed.pending.keys() == state["pending"].keys()
        again = play(world, resumed, 110, seed=1)
        assert torch.equal(first[0], again[0]) and alike(learned(teacher), learned(resumed))


def test_the_seed_decides_and_nothing_else(world: Box, made: Callable[..., Teacher]) -> None:
    """Global generators neither matter nor move."""
    only_the_seed(lambda seed: play(world, made(seed), 90))


def only_the_seed(played: Callable[[int], list[Tensor]]) -> None:
    seen: list[list[Tensor]] = []
    for seed, other in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(other)
        np.random.seed(other)
        before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore
        seen.append(played(seed))
        assert torch.equal(before, torch.get_rng_state())
        assert np.array_equal(legacy, np.random.get_state()[1])  # type: ignore
    assert alike(seen[0], seen[1]) and not alike(seen[0], seen[2])


def test_it_teaches_a_real_world(world: Box, node: dict[str, Any]) -> None:
    """Each episode, of two steps, is the one that was chosen for it."""
    teacher, taught = world.taught(node)
    taught.reset(0)
    leaf = taught.spec.act
    dtype = torch.int64 if leaf.dtype == "int64" else torch.float32
    tickets: list[int] = []
    for _ in range(6):
        step = taught.step(torch.zeros((2, *leaf.shape), dtype=dtype))
        tickets += step.log["ticket"].tolist()
        assert all(value.float().isfinite().all() for value in step.obs.values())
    assert teacher.issued >= 2 + 6 and len(set(tickets)) >= 6 and teacher.dropped == 0
    assert all(tickets.count(each) <= 2 for each in tickets)


class Unpaid(Wrapper):
    """Rewards that are no numbers."""

    def step(self, action: Tensor) -> Any:
        step = self.env.step(action)
        step.reward.fill_(torch.nan)
        return step


class Game:
    """A game of turns of three steps around small rooms, both players moving at random."""

    def __init__(self, name: str, seed: int = 0, inner: type[Wrapper] = Wrapper) -> None:
        self.env, self.random = self.world(inner), np.random.default_rng(seed)
        node = NODES[name] | {"steps": 3, "free": 0.34}
        self.teacher: Any = build(node, Curriculum, spec=self.env.spec, env=self.env, seed=seed)
        self.control = self.teacher.antagonist_env(self.env, lambda: self.world(inner))
        self.explore = self.teacher.protagonist_env(self.env, None)
        self.explore.reset(seed)

    @staticmethod
    def world(inner: type[Wrapper]) -> EpisodicDensity:
        rooms = Rooms(RoomsConfig(num_envs=2, noisy=2, dark=1, horizon=50))
        return EpisodicDensity(FamiliarConfig(horizon=50), inner(rooms))

    def move(self, obs: Any = None) -> None:
        """The second player's step."""
        self.control.step(self.actions())

    def actions(self) -> Tensor:
        high = int(self.env.spec.act.high)  # type: ignore[arg-type]
        return torch.from_numpy(self.random.integers(high + 1, size=2))

    def play(self, steps: int) -> list[Tensor]:
        """Explore's rewards, ends and observations."""
        seen: list[Tensor] = []
        for _ in range(steps):
            step = self.teacher.after_step(self.explore.step(self.actions()), self.move)
            seen += [step.reward, step.ended, *step.obs.values()]
        return seen


@pytest.fixture(params=GAMES)
def game(request: pytest.FixtureRequest) -> Callable[..., Game]:
    return lambda **settings: Game(request.param, **settings)


def test_a_game_is_paid_when_a_turn_is_over(game: Callable[..., Game]) -> None:
    """Turns of three steps in an order that nobody chooses; what is paid is a number."""
    playing = game()
    seen = playing.play(12)
    width = len(seen) // 12
    rewards, ends = torch.stack(seen[::width]), torch.stack(seen[1::width])
    assert rewards.isfinite().all() and ends[2::3].all() and ends.sum() == 8
    assert (rewards[2::3] != 0).all() and rewards.count_nonzero() == 8
    assert playing.teacher.metrics()["games"] == 2


def test_a_game_around_rewards_that_are_no_numbers(game: Callable[..., Game]) -> None:
    """They are not what is paid: both players learn the same."""
    sound, broken = game(), game(inner=Unpaid)
    assert alike(sound.play(4), broken.play(4))
    with pytest.warns(UserWarning, match="not finite") as warned:
        assert alike(sound.play(10), broken.play(10))
    assert len(warned) == 1 and broken.teacher.dropped == 2 and sound.teacher.dropped == 0
    assert all(np.isfinite(value) for value in broken.teacher.metrics().values())


def test_a_game_that_is_broken_off_or_not_over(game: Callable[..., Game]) -> None:
    playing, other = game(), game()
    playing.play(4)
    assert playing.teacher.metrics()["games"] == 0
    assert all(np.isfinite(value) for value in playing.teacher.metrics().values())
    playing.explore.reset(3)
    other.explore.reset(3)
    playing.random = other.random = np.random.default_rng(4)
    first = playing.play(7)
    other.random = np.random.default_rng(4)
    assert alike(first, other.play(7)) and playing.teacher.games == 1


def test_a_resumed_game_goes_on_exactly(game: Callable[..., Game], tmp_path: Path) -> None:
    playing, resumed = game(), game(seed=5)
    playing.play(10)
    file = tmp_path / "state.pt"
    kept = {"teacher": pack(playing.teacher.get_state()), "env": playing.explore.get_state()}
    torch.save(kept, file)
    playing.random = np.random.default_rng(1)
    first, state = playing.play(15), torch.load(file, weights_only=True)
    for _ in range(2):
        resumed.teacher.set_state(unpack(state["teacher"]))
        resumed.explore.set_state(state["env"])
        resumed.random = np.random.default_rng(1)
        assert alike(first, resumed.play(15))
        assert resumed.teacher.metrics() == playing.teacher.metrics()


def test_a_game_has_its_own_chance(game: Callable[..., Game]) -> None:
    only_the_seed(lambda seed: game(seed=seed).play(13))
