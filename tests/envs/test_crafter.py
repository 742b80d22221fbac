"""Crafter: the package's numbers exactly, in processes or not, saved, continued, and in words."""

from __future__ import annotations

import collections
import math
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.policy import Policy

crafter = pytest.importorskip("crafter")
opensimplex = pytest.importorskip("opensimplex")

from embodied.core.actor import Actor  # noqa: E402
from embodied.core.build import ConfigError, build  # noqa: E402
from embodied.core.env import Step  # noqa: E402
from embodied.core.tensors import Tensors  # noqa: E402
from embodied.envs.crafter.env import Config, Crafter, read, row_seed, score, words, write  # noqa: E402
from embodied.envs.crafter.maps import Noise, make  # noqa: E402
from embodied.envs.crafter.picture import picture, seen  # noqa: E402
from embodied.envs.crafter.player import COW, KINDS, PLANT, RIPE, Thing, World  # noqa: E402
from embodied.envs.crafter.rules import (  # noqa: E402
    ACHIEVEMENTS,
    ACTIONS,
    ITEMS,
    LEFT,
    RIGHT,
    RIM,
    STRIDE,
    SYMBOL,
    TABLE,
    happened,
    place,
)
from tests.tiers import only_all  # noqa: E402

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


@pytest.mark.parametrize("seed", [0, 11])
def test_maps_are_the_same(package: Any, seed: int) -> None:
    theirs, ours = package(seed=seed), World(seed)
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
        if step % 25 == 0:
            require_same_world(theirs, ours)
        if done:
            ends += 1
            theirs.reset()
            ours.begin()
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
    assert ours.player.achieved[ACHIEVEMENTS.index("eat_plant")] == 1
    assert list(theirs._player.inventory.values()) == ours.player.inventory


@only_all
def test_rows_are_the_package_s_episodes_in_processes_or_not() -> None:
    """Row i plays seed (seed, i); a draw of pictures changes nothing else."""
    plain = Crafter(Config(num_envs=3, workers=0))
    shared = Crafter(Config(num_envs=3, workers=2, observe=("symbols", "inventory", "image")))
    worlds = [World(row_seed(7, row)) for row in range(3)]
    first, again = plain.reset(7), shared.reset(7)
    random = torch.Generator().manual_seed(0)
    ended = 0
    for _ in range(250):
        assert all(torch.equal(first[name], again[name]) for name in plain.spec.obs)
        action = torch.randint(17, (3,), generator=random)
        a, b = plain.step(action), shared.step(action)
        assert torch.equal(a.reward, b.reward) and torch.equal(a.terminated, b.terminated)
        for row, world in enumerate(worlds):
            reward, dead, _ = world.step(int(action[row]))
            assert a.reward[row] == np.float32(reward) and bool(a.terminated[row]) == dead
            assert torch.equal(b.next_obs["image"][row], torch.from_numpy(picture(world)))
            if dead:
                ended += 1
                world.begin()
        first, again = a.obs, b.obs
    assert ended
    plain.close()
    shared.close()


def test_next_obs_is_what_killed_and_obs_is_a_new_day() -> None:
    env = Crafter(Config(num_envs=2, workers=0))
    env.reset(1)
    state = env.get_state()
    state["inventory"][1, 0] = 0
    env.set_state(state)
    step = env.step(torch.tensor([0, 0]))
    assert step.terminated.tolist() == [False, True] and not step.truncated.any()
    assert step.reward[1] == np.float32(-0.9)
    assert step.next_obs["inventory"][:, 0].tolist() == [9, 0]
    assert step.obs["inventory"][:, 0].tolist() == [9, 9]
    second = World(row_seed(1, 1))
    second.begin()
    assert (step.obs["symbols"][1].numpy() == seen(second)).all()


def test_time_is_up() -> None:
    env = Crafter(Config(num_envs=1, workers=0, length=3))
    env.reset(0)
    ends = [env.step(torch.tensor([0])) for _ in range(4)]
    assert [bool(end.truncated) for end in ends] == [False, False, True, False]
    assert not any(end.terminated for end in ends)


def played(env: Crafter, plan: list[torch.Tensor]) -> list[torch.Tensor]:
    steps: list[Step] = [env.step(action) for action in plan]
    return [torch.cat([v.flatten().float() for v in s.next_obs.values()]) for s in steps] + [
        s.reward for s in steps
    ]


def test_a_saved_world_goes_on_exactly_also_elsewhere() -> None:
    here = Crafter(Config(num_envs=2, workers=0, observe=("symbols", "inventory", "image")))
    there = Crafter(Config(num_envs=2, workers=1, observe=("symbols", "inventory", "image")))
    here.reset(4)
    random = torch.Generator().manual_seed(2)
    plan = [torch.randint(17, (2,), generator=random) for _ in range(320)]
    for action in plan[:200]:  # into the night
        now = here.step(action).obs
    state = here.get_state()
    assert all(value.shape[0] == 2 for value in state.values())
    want = played(here, plan[200:])
    seen_again = there.set_state({key: value.clone() for key, value in state.items()})
    assert all(torch.equal(seen_again[name], now[name]) for name in now)
    for env in (there, here):
        env.set_state(state)
        assert all(torch.equal(a, b) for a, b in zip(played(env, plan[200:]), want, strict=True))
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
    assert score(episodes) == pytest.approx(0.429663, abs=1e-6)
    assert score(torch.ones(3, 22)) == pytest.approx(100.0)
    assert score(torch.zeros(3, 22)) == 0.0
    assert math.isclose(score(episodes), math.exp(2 * math.log(51) / 22) - 1)


def test_words_say_what_is_where() -> None:
    world = World(3)
    at = world.player.at
    for thing in world.things[1:]:
        world.remove(thing)
    world.put(at + 2 * RIGHT - 1, TABLE)
    world.add(Thing(COW, at + LEFT))
    world.player.way = LEFT
    world.player.inventory[ITEMS.index("wood")] = 4
    text = words(world)
    assert "faces left, in front of it: cow" in text
    assert "cow 1 left, " in text and "table 1 up 2 right" in text
    assert "health 9/9" in text and "It has 4 wood." in text
    assert "Daylight 80%, step 0. Achieved: nothing." in text


def test_a_demonstrator_reaches_the_goal_which_ends_the_episode() -> None:
    env = Crafter(Config(num_envs=2, workers=0, length=400, goal="make_wood_pickaxe"))
    policy = build(
        {"_target_": "embodied.policies.scripted.grids.Woodcutter", "unsteady": 0.0},
        Policy,
        spec=env.spec,
    )
    actor = Actor(policy, 2)
    torch.manual_seed(0)
    obs, first = env.reset(0), torch.ones(2, dtype=torch.bool)
    won = 0
    for _ in range(150):
        step = env.step(actor(obs, first))
        obs, first = step.obs, step.ended
        assert torch.equal(step.log["success"], step.log["achievement/make_wood_pickaxe"])
        assert not (step.log["success"] & ~step.terminated).any()
        pickaxes = step.next_obs["inventory"][:, ITEMS.index("wood_pickaxe")]
        assert torch.equal(pickaxes > 0, step.log["success"])
        assert (step.reward[step.log["success"]] > 0.5).all()
        won += int(step.log["success"].sum())
    assert won >= 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"goal": "make_wood_pickax"}, 'did you mean "make_wood_pickaxe"'),
        ({"observe": ()}, "duplicates"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Crafter(Config(workers=0, **settings))


def test_a_world_needs_a_reset_and_actions_that_exist() -> None:
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
    symbols = torch.full((1, 7, 9), SYMBOL["grass"], dtype=torch.uint8)
    symbols[0, 3, 3] = SYMBOL[ahead]
    inventory = torch.tensor(
        [[float(items.get(name, 5 if i < 4 else 0)) for i, name in enumerate(ITEMS)]]
    )
    return {
        "symbols": symbols,
        "facing": torch.zeros(1, 1, dtype=torch.uint8),
        "body": torch.tensor([[float(sleeping), 1.0]]),
        "inventory": inventory,
    }


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


def test_pictures_alone_do_not_say() -> None:
    with pytest.raises(ConfigError, match="symbols and inventory"):
        happened({"image": torch.zeros(1)}, {"image": torch.zeros(1)})


def test_on_the_way_to_a_pickaxe() -> None:
    """A scripted player's messages: wood before the table, the table before the pickaxe."""
    env = Crafter(Config(num_envs=4, workers=0, length=400, goal="make_wood_pickaxe"))
    player = build(
        {"_target_": "embodied.policies.scripted.grids.Woodcutter"}, Policy, spec=env.spec
    )
    obs, said = env.reset(0), [[] for _ in range(4)]
    carry, over = player.initial(4), torch.zeros(4, dtype=torch.bool)
    for _ in range(400):
        action, carry = player.act(obs, carry, player.sample_noise(4))
        step = env.step(action[:, 0])
        for row, text in enumerate(env.event_captions(obs, step.next_obs)):
            said[row] += [text] if text and not over[row] else []
        obs, over = step.obs, over | step.ended
        if over.all():
            break
    won = [texts for texts in said if "you made a wood pickaxe" in texts]
    assert len(won) >= 2
    for texts in won:
        assert texts[-1] == "you made a wood pickaxe"
        assert texts.index("you collected wood") < texts.index("you placed a table")
