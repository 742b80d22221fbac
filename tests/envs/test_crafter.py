"""Crafter: the package's numbers exactly, in processes or not, saved, continued, and in words."""

from __future__ import annotations

import collections
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from tests.builders import make_policy
from tests.tiers import only_all

pytest.importorskip("crafter")
pytest.importorskip("opensimplex")

import crafter
import opensimplex

from embodied.envs.crafter import rules
from embodied.envs.crafter.env import Config, Crafter, read, row_seed, words, write
from embodied.envs.crafter.maps import Noise, make
from embodied.envs.crafter.picture import picture, seen
from embodied.envs.crafter.player import COW, KINDS, PLANT, RIPE, Thing, World
from embodied.envs.crafter.rules import ACTIONS, ITEMS, LEFT, RIGHT, RIM, STRIDE, happened, place
from embodied.evaluation.evaluate import achievement_score

DO = ACTIONS.index("do")


class InOrder(dict):
    """A set that is iterated in the order in which it was filled."""

    def add(self, thing: Any) -> None:
        self[thing] = None

    def remove(self, thing: Any) -> None:
        del self[thing]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package's environment, its chunks in order: as sets they go by memory addresses, so that
    the package does not even repeat itself."""
    plain = crafter.engine.World.reset

    def reset(self: Any, seed: int | None = None) -> None:
        plain(self, seed)
        self._chunks = collections.defaultdict(InOrder)

    monkeypatch.setattr(crafter.engine.World, "reset", reset)
    return crafter.Env


def require_same_world(theirs: Any, ours: World) -> None:
    ground = np.frombuffer(ours.cells, np.uint8).reshape(STRIDE, STRIDE)[RIM:-RIM, RIM:-RIM]
    assert (ground == theirs._world._mat_map).all()
    there = [(type(o).__name__.lower(), place(*o.pos), o.health) for o in theirs._world.objects]
    assert [(KINDS[t.kind], t.at, t.health) for t in ours.things] == there
    words, here = theirs._world.random.get_state(), ours.generator.getstate()[1]
    assert (*words[1].tolist(), words[2]) == here


def test_noise_has_the_same_bits() -> None:
    """Also on the faces and corners of the lattice, where every comparison is a tie."""
    random = np.random.default_rng(0)
    ties = np.stack(np.meshgrid(*(np.arange(7) / 3,) * 3), -1).reshape(-1, 3)
    places = np.concatenate(
        [random.uniform(-9, 9, (800, 3)), ties, np.floor(random.uniform(0, 20, (50, 3)))]
    )
    for seed in (5, 2**31 - 7):
        reference = opensimplex.OpenSimplex(seed)
        values = [reference.noise3(float(x), float(y), float(z)) for x, y, z in places]
        assert (Noise(places).at(seed) == np.array(values)).all()


def test_a_map_is_the_same(package: Any) -> None:
    theirs, ours = package(seed=11), World(11)
    theirs.reset()
    require_same_world(theirs, ours)
    assert ours.generator.random() == theirs._world.random.uniform()


def both(theirs: Any, ours: World, item: str, count: int) -> None:
    theirs._player.inventory[item] = count
    ours.player.inventory[ITEMS.index(item)] = count


@only_all
def test_600_steps_are_the_same_with_deaths_nights_tools_and_pictures(package: Any) -> None:
    theirs, ours = package(seed=3), World(3)
    random = np.random.default_rng(1)
    assert (theirs.reset() == picture(ours)).all()
    ends = dark = asleep = heading = 0
    for step in range(600):
        if step < 300 and step % 10 == 0:  # a night and its sleep are lived through
            both(theirs, ours, "health", 9)
            both(theirs, ours, "energy", 4 if 180 <= step < 250 else 9)
        if step % 50 == 0:
            for item in ITEMS[4:]:
                both(theirs, ours, item, 9)
        if step % 20 == 0:
            heading = int(random.integers(1, 5))
        action = (heading, DO, int(random.integers(17)))[random.choice(3, p=(0.4, 0.3, 0.3))]
        seen_there, reward, done, info = theirs.step(action)
        gained, dead, late = ours.step(action)
        assert (gained, dead or late) == (reward, done), step
        assert ours.player.inventory == list(info["inventory"].values())
        assert ours.player.achieved == list(info["achievements"].values())
        assert (picture(ours) == seen_there).all(), step
        left, top = ours.player.x - RIM - 4, ours.player.y - RIM - 3
        around = np.pad(info["semantic"], 9)[left + 9 : left + 18, top + 9 : top + 16].T
        assert (np.minimum(seen(ours), 18) == around).all()
        dark, asleep = dark + (ours.light < 0.5), asleep + ours.player.sleeping
        if done:
            ends += 1
            theirs.reset()
            ours.begin()
        if done or step % 25 == 0:
            require_same_world(theirs, ours)
    assert ends >= 2 and dark > 50 and asleep > 20
    assert sum(count > 0 for count in ours.player.achieved) >= 3


def test_a_plant_ripens_and_is_eaten(package: Any) -> None:
    theirs, ours = package(seed=3), World(3)
    theirs.reset()
    both(theirs, ours, "sapling", 1)
    plan = [ACTIONS.index("place_plant"), *[0] * 3, DO, DO]
    for step, action in enumerate(plan):
        if step == 2:  # almost grown
            plant = next(t for t in ours.things if t.kind == PLANT)
            plant.clock = RIPE - 1
            next(o for o in theirs._world.objects if type(o).__name__ == "Plant").grown = RIPE - 1
        both(theirs, ours, "food", 1)
        view, *_ = theirs.step(action)
        ours.step(action)
        assert (picture(ours) == view).all()
    assert ours.player.achieved[rules.ACHIEVEMENTS.index("eat_plant")] == 1
    assert list(theirs._player.inventory.values()) == ours.player.inventory


def test_next_obs_is_what_killed_and_obs_is_a_new_day() -> None:
    env = Crafter(Config(num_envs=2, workers=0))
    env.reset(1)
    state = env.get_state()
    state["inventory"][1, 0] = 0
    env.set_state(state)
    step = env.step(torch.tensor([0, 0]))
    assert step.terminated.tolist() == [False, True] and not step.truncated.any()
    assert step.reward[1] == np.float32(-0.9)
    health = [obs["inventory"][:, 0].tolist() for obs in (step.next_obs, step.obs)]
    assert health == [[9, 0], [9, 9]]
    second = World(row_seed(1, 1))
    second.begin()
    assert (step.obs["symbols"][1].numpy() == seen(second)).all()


def test_time_is_up() -> None:
    env = Crafter(Config(num_envs=1, workers=0, length=3))
    env.reset(0)
    ends = [env.step(torch.tensor([0])) for _ in range(4)]
    assert [bool(end.truncated) for end in ends] == [False, False, True, False]
    assert not any(end.terminated for end in ends)


def played(env: Crafter, plan: torch.Tensor) -> list[torch.Tensor]:
    steps = [env.step(action) for action in plan]
    return [value for step in steps for value in (*step.next_obs.values(), step.reward)]


def test_a_saved_world_goes_on_exactly_also_elsewhere() -> None:
    here, there = (
        Crafter(Config(num_envs=2, workers=workers, observe=("symbols", "inventory", "image")))
        for workers in (0, 2)
    )
    here.reset(4)
    plan = torch.randint(17, (320, 2), generator=torch.Generator().manual_seed(2))
    for action in plan[:200]:  # into the night
        now = here.step(action).obs
    state = here.get_state()
    want = played(here, plan[200:])
    for env in (there, here):
        seen_again = env.set_state({key: value.clone() for key, value in state.items()})
        assert all(torch.equal(seen_again[name], now[name]) for name in now)
        assert all(map(torch.equal, played(env, plan[200:]), want))
    there.close()


def test_other_states_of_a_chunk_are_saved_too() -> None:
    """Who came to a chunk first decides who leaves it: the order survives."""
    world, copy = World(5), World(6)
    first, second = Thing(COW, place(1, 1)), Thing(COW, place(13, 1))
    for thing in (first, second):
        world.who[thing.at] = None
        world.add(thing)
    world.cells[place(12, 1)] = world.cells[place(11, 1)] = 2
    world.move(second, LEFT, bytes([1] * 13))
    world.move(second, LEFT, bytes([1] * 13))
    write(copy, read(world))
    order = {chunk: [t.at for t in things] for chunk, things in world.chunks.items()}
    assert {chunk: [t.at for t in things] for chunk, things in copy.chunks.items()} == order
    assert list(copy.chunks) == list(world.chunks)


def test_score_by_hand() -> None:
    """Two achievements at 50%, twenty never: exp(2 ln 51 / 22) - 1 = 0.429663 percent."""
    episodes = torch.zeros(4, 22, dtype=torch.bool)
    episodes[:2, 3] = episodes[1:3, 8] = True
    scores = [achievement_score(each) for each in (episodes, torch.ones(3, 22), torch.zeros(3, 22))]
    assert scores == pytest.approx([0.429663, 100.0, 0.0], abs=1e-6)


def test_words_say_what_is_where() -> None:
    world = World(3)
    at = world.player.at
    for thing in world.things[1:]:
        world.remove(thing)
    world.put(at + 2 * RIGHT - 1, rules.TABLE)
    world.add(Thing(COW, at + LEFT))
    world.player.way = LEFT
    world.player.inventory[ITEMS.index("wood")] = 4
    text = words(world)
    assert "faces left, in front of it: cow" in text
    assert "cow 1 left, " in text and "table 1 up 2 right" in text
    assert "health 9/9" in text and "It has 4 wood." in text
    assert "Daylight 80%, step 0. Achieved: nothing." in text


def test_a_demonstrator_reaches_the_goal_which_ends_the_episode_and_is_told() -> None:
    """Wood before the table, the table before the pickaxe."""
    env = Crafter(Config(num_envs=2, workers=0, length=400, goal="make_wood_pickaxe"))
    actor = Actor(make_policy("scripted.grids.Woodcutter", env.spec, unsteady=0.0), 2)
    obs, first = env.reset(0), torch.ones(2, dtype=torch.bool)
    won, said = 0, ([], [])
    for _ in range(150):
        step = env.step(actor(obs, first))
        for texts, text in zip(said, env.event_captions(obs, step.next_obs), strict=True):
            texts.append(text)
        obs, first, success = step.obs, step.ended, step.log["success"]
        assert torch.equal(success, step.log["achievement/make_wood_pickaxe"])
        assert not (success & ~step.terminated).any()
        pickaxes = step.next_obs["inventory"][:, ITEMS.index("wood_pickaxe")]
        assert torch.equal(pickaxes > 0, success) and (step.reward[success] > 0.5).all()
        won += int(success.sum())
    assert won >= 4
    for texts in said:
        order = ("you collected wood", "you placed a table", "you made a wood pickaxe")
        places = [texts.index(text) for text in order]
        assert places == sorted(places)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(ConfigError, match='did you mean "make_wood_pickaxe"'):
        Crafter(Config(workers=0, goal="make_wood_pickax"))
    with pytest.raises(ConfigError, match="duplicates"):
        Crafter(Config(workers=0, observe=()))
    with pytest.raises(ConfigError, match="symbols and inventory"):
        happened({"image": torch.zeros(1)}, {"image": torch.zeros(1)})
    env = Crafter(Config(num_envs=1, workers=0))
    with pytest.raises(ValueError, match="call reset"):
        env.step(torch.tensor([0]))
    env.reset(0)
    with pytest.raises(ValueError, match="0 to 16"):
        env.step(torch.tensor([17]))


def test_a_worker_that_is_killed_is_one_line() -> None:
    env = Crafter(Config(num_envs=2, workers=2))
    env.reset(0)
    process = env._pool.parts[1].process  # type: ignore[union-attr]
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    with pytest.raises(RuntimeError, match="worker process ended"):
        env.step(torch.tensor([0, 0]))
    env.close()


def test_nothing_of_a_map_is_shared() -> None:
    one, two = make(9), make(9)
    one.cells[place(0, 0)] = 0
    assert two.cells[place(0, 0)] != 0


def shown(ahead: str = "grass", sleeping: bool = False, **items: int) -> Tensors:
    """A player that looks left at `ahead`."""
    symbols = torch.full((1, 7, 9), rules.SYMBOL["grass"], dtype=torch.uint8)
    symbols[0, 3, 3] = rules.SYMBOL[ahead]
    counts = [items.get(name, 5 if i < 4 else 0) for i, name in enumerate(ITEMS)]
    body = torch.tensor([[float(sleeping), 1.0]])
    facing, inventory = torch.zeros(1, 1, dtype=torch.uint8), torch.tensor([counts]).float()
    return {"symbols": symbols, "facing": facing, "body": body, "inventory": inventory}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (shown("tree"), shown("tree", wood=1), "you collected wood"),
        (shown(wood=1), shown("table"), "you placed a table"),
        (shown("table", wood=1), shown("table", wood_pickaxe=1), "you made a wood pickaxe"),
        (shown(sapling=1), shown("plant"), "you placed a plant"),
        (shown("cow"), shown(food=9), "you ate a cow"),
        (shown("water"), shown("water", drink=6), "you drank water"),
        (shown(), shown(sleeping=True), "you fell asleep"),
        (shown(), shown(health=3), "you were hurt badly"),
        (shown(), shown(drink=4), "you are thirstier"),
        (shown(), shown("iron"), "you face iron"),
        (shown("tree"), shown("tree"), ""),
    ],
)
def test_what_happened(before: Tensors, after: Tensors, said: str) -> None:
    assert happened(before, after) == [said]


def test_a_signal_to_all_processes_leaves_the_run_its_environments() -> None:
    """A batch system's SIGTERM: the trainer saves, and ends the workers itself."""
    env = Crafter(Config(num_envs=2, workers=1, length=20))
    env.reset(0)
    process = env._pool.parts[0].process
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.1)
    assert env.step(torch.zeros(2, dtype=torch.int64)).reward.shape == (2,)
    env.close()
    process.join(10)
    assert process.exitcode == 0
