"""The maze: a walk by hand, what is seen, levels as vectors and back, what is refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from embodied.envs.maze.env import GO, LEFT, RIGHT, BatchLevels, Config, Maze
from embodied.envs.maze.levels import MazeLevels, Plans, distances, mazes, spell
from embodied.evaluation.task_grid import TaskGridEval

SIDE = 5


def level(*lines: str, start: int, goal: int, facing: int) -> torch.Tensor:
    """One row's task vector from a map."""
    walls = np.array([[mark == "#" for mark in line] for line in lines])[None]
    plans = Plans(walls, np.array([start]), np.array([goal]), np.array([facing]))
    return torch.from_numpy(MazeLevels(SIDE, 5).encode(plans)).float()


@pytest.fixture
def world() -> Maze:
    return Maze(Config(side=SIDE, blocks=5, num_envs=1, horizon=10))


HAND = level(".....", ".#...", ".#...", ".....", ".....", start=10, goal=7, facing=3)


def test_a_walk_by_hand(world: Maze) -> None:
    """Up, up, right, right (against nothing), and the goal below at the sixth step."""
    world.reset(0, HAND)
    steps = [world.step(torch.tensor([act])) for act in (GO, GO, RIGHT, GO, GO, RIGHT, GO)]
    assert not any(step.reward.item() or step.ended.item() for step in steps[:-1])
    assert steps[-1].terminated.item() and steps[-1].log["success"].item()
    assert steps[-1].reward.item() == pytest.approx(1 - 0.9 * 7 / 10)
    assert world.age.item() == 0  # the next episode has begun


def test_a_wall_stops(world: Maze) -> None:
    world.reset(0, HAND)
    steps = [world.step(torch.tensor([act])) for act in (RIGHT, GO, LEFT, LEFT, GO)]
    before, after = (step.next_obs["view"] for step in steps[:2])
    assert torch.equal(before, after), "it looks right, at the wall beside"
    assert steps[-1].next_obs["view"][0, 3, 2] == 1 and world._cell(0) == (2, 0), "out of the maze"


def test_what_is_seen(world: Maze) -> None:
    """Looking up from (2, 0): left of it is outside, a wall at its right, the goal ahead right.
    Looking right: ahead is the wall column, on the left hand what was above."""
    seen = world.reset(0, HAND)
    up = ["11111", "11111", "11000", "11012", "11010"]
    right = ["00000", "00000", "02000", "01100", "00000"]
    views = seen["view"], world.step(torch.tensor([RIGHT])).obs["view"]
    told = [["".join(map(str, line)) for line in view[0].tolist()] for view in views]
    assert told == [up, right] and seen["facing"].tolist() == [[3]]
    blind = Maze(Config(side=SIDE, blocks=5, num_envs=1, observe="cell"))
    assert blind.reset(0, HAND)["cell"].tolist() == [[10]] and set(blind.spec.obs) == {
        "cell",
        "facing",
    }
    assert blind.step(torch.tensor([GO])).obs["cell"].tolist() == [[5]], "a row of five up"


def test_a_level_is_its_vector_and_back() -> None:
    levels = MazeLevels(7, 20)
    drawn = levels.random(200, np.random.default_rng(0))
    exact = levels.decode(drawn)
    assert np.array_equal(levels.encode(exact), drawn)
    rounded = levels.decode(drawn.astype(np.float32).astype(float).round(5))  # as a diary keeps it
    for name in ("walls", "start", "goal", "facing"):
        assert np.array_equal(getattr(rounded, name), getattr(exact, name))
    assert levels.solvable(drawn).all() and (exact.start != exact.goal).all()
    counts = exact.walls.sum((1, 2))
    assert counts.min() == 0 and counts.max() > 14


def test_every_vector_of_the_cube_is_a_level() -> None:
    levels = MazeLevels(5, 5)
    ones, zeros = np.ones((1, levels.size)), np.zeros((1, levels.size))
    plans = levels.decode(ones)  # walls all over, the goal on the start, in the last cell
    assert (plans.start, plans.goal) == (24, 0) and plans.walls.sum() == 23
    assert not levels.solvable(ones)[0] and levels.solvable(zeros)[0]


def test_batched_levels_agree_with_numpys() -> None:
    """Decoding, ways by integers and by tensors, and what is held out."""
    levels = MazeLevels(13, 60, "zero_shot")
    batch = BatchLevels(levels, torch.device("cpu"))
    random = np.random.default_rng(2)
    drawn = np.concatenate([levels.drawn(random.random((300, levels.lots))), levels.held_out])
    here, plans = levels.decode(drawn), batch.decode(torch.from_numpy(drawn))
    assert np.array_equal(here.walls.reshape(len(drawn), -1), plans.walls)
    for name in ("start", "goal", "facing"):
        assert np.array_equal(getattr(here, name), getattr(plans, name))
    assert np.array_equal(batch.fit(plans), levels.fit(drawn)) and not batch.fit(plans)[-56:].any()
    assert np.array_equal(batch.encode(plans), levels.encode(here))
    for shortest, low, high in ((1, 0.2, 0.98), (16, 0.02, 0.4)):
        ways = levels.ways(drawn) >= shortest
        assert low < ways.mean() < high
        assert np.array_equal(batch._solvable_many(plans, shortest), ways)
        assert np.array_equal(batch._solvable_few(plans, shortest), ways)
    assert np.array_equal(levels.solvable(drawn), levels.ways(drawn) >= 1)


def test_sampled_levels_have_long_enough_paths() -> None:
    """Edited ones too, and those of the environment; held-out levels stay the same."""
    levels, random = MazeLevels(13, 60, "mixed", shortest=16), np.random.default_rng(3)
    assert np.array_equal(levels.held_out, MazeLevels(13, 60, "mixed").held_out)
    edited = levels.mutate(levels.random(50, random), 5, random)
    maze = Maze(Config(side=13, blocks=60, horizon=250, num_envs=40, shortest=16))
    maze.reset(0)
    assert levels.ways(np.concatenate([edited, maze.task.numpy()])).min() == 16


def test_the_published_mazes() -> None:
    """The name of each is that of an evaluation task."""
    env = Maze(Config(side=13, blocks=60, horizon=250, held_out="zero_shot", num_envs=2))
    names, lengths = env.levels.held_out_names, env.levels.ways(env.levels.held_out).tolist()
    ways = dict(zip(names, lengths, strict=True))
    # From (1, 1) to (11, 11) without a detour in SixteenRooms: 10 + 10 cells.
    assert ways["SixteenRooms"] == 20 and len(ways) == 56 and min(lengths) >= 16
    assert ways["Labyrinth"] == ways["LabyrinthFlipped"] > 40
    exam = TaskGridEval(env, env.held_out[:3])
    assert [each["name"] for each in exam.names] == ["SixteenRooms", "SixteenRooms2", "Labyrinth"]


def test_turned_and_mirrored_mazes_are_as_far_and_are_walked_alike() -> None:
    """The shortest path of a maze, turned and mirrored, and the same first view from its start."""
    levels = MazeLevels(13, 60, "zero_shot")
    env = Maze(Config(side=13, blocks=60, horizon=250, held_out="zero_shot", num_envs=56))
    ways, obs = levels.ways(levels.held_out), env.reset(task=env.held_out)
    views, names = obs["view"], levels.held_out_names
    of = {name: at for at, name in enumerate(names)}
    # LabyrinthFlipped is the mirror image of Labyrinth: only one of them is turned.
    assert "Labyrinth_4" not in of and "Labyrinth_5" in of and "LabyrinthFlipped_1" not in of
    for name, at in of.items():
        stem, _, number = name.partition("_")
        published = views[of[stem]]
        mirrored = number > "3"
        assert ways[at] == ways[of[stem]], name
        assert torch.equal(views[at], published.flip(1) if mirrored else published), name


def test_long_mazes() -> None:
    levels = MazeLevels(13, 60, "long")
    ways = levels.ways(levels.held_out)
    assert len(ways) == 200 and (np.diff(ways) <= 0).all() and ways[-1] > 20
    assert not levels.fit(levels.held_out).any()  # they are held out
    usual = levels.random(200, np.random.default_rng(0))
    assert levels.ways(usual).mean() < ways.mean() / 2


def test_given_tasks_are_not_drawn_beside() -> None:
    """The generators of the envs stay where they are, and the last state is returned."""
    env = Maze(Config(side=SIDE, blocks=5, num_envs=1, horizon=2))
    env.expect_given_tasks()
    env.reset(0, HAND)
    before = env.streams.state.clone()
    env.step(torch.tensor([LEFT]))
    step = env.step(torch.tensor([LEFT]))
    assert step.truncated.all() and torch.equal(env.streams.state, before)
    assert torch.equal(step.obs["view"], step.next_obs["view"])
    assert torch.equal(env.reset(task=HAND)["view"], Maze(env.config).reset(0, HAND)["view"])


def test_steps_by_hand() -> None:
    walls = np.array([[[0, 1, 0], [0, 1, 0], [0, 0, 0]], [[0, 1, 0], [0, 1, 0], [0, 1, 0]]], bool)
    steps = distances(walls, np.array([0, 0]))
    assert steps[0].tolist() == [[0, -1, 6], [1, -1, 5], [2, 3, 4]]
    assert steps[1, 0, 2] == -1
    near = distances(walls[:1], np.array([0]), np.array([6]))  # two steps away, and no further
    assert near[0].tolist() == [[0, -1, -1], [1, -1, -1], [2, -1, -1]]


def test_edits_keep_a_way_and_change_little() -> None:
    levels, random = MazeLevels(7, 40), np.random.default_rng(1)
    parents = levels.random(100, random)
    children = levels.mutate(parents, 3, random)
    assert levels.solvable(children).all()
    walls = abs(children[:, :49] - parents[:, :49]).sum(1)
    assert 1.5 < walls.mean() <= 3 and walls.max() <= 3  # an edit is one cell
    moved = children[:, 50] != parents[:, 50]
    assert 0.1 < moved.mean() < 0.5  # three edits, a tenth of them of the goal
    assert np.array_equal(children[:, 49], parents[:, 49])


def test_an_edit_that_would_leave_no_way_is_not_made() -> None:
    """A corridor of one cell's width: walls can go, none can come in the way."""
    levels, random = MazeLevels(5, 5), np.random.default_rng(0)
    walls = np.ones((1, 5, 5), bool)
    walls[0, 0] = False
    plans = Plans(walls, np.array([0]), np.array([4]), np.array([0]))
    corridor = levels.encode(plans).repeat(300, 0)
    once = levels.decode(levels.mutate(corridor, 1, random))
    assert levels.solvable(levels.encode(once)).all()
    unmoved = once.goal == 4
    assert not once.walls[unmoved, 0].any() and once.walls.sum((1, 2)).min() == 19


@pytest.mark.parametrize("side", [5, 6, 9, 12])
def test_held_out_mazes_are_of_every_size_and_never_drawn(side: int) -> None:
    levels, again = MazeLevels(side, 2), MazeLevels(side, 2)
    assert len(levels.held_out) == len(set(levels.held_out_names)) == 50
    assert np.array_equal(levels.held_out, again.held_out)
    assert levels.solvable(levels.held_out).all() and not levels.fit(levels.held_out).any()
    # An edit that would make one of them is not made: with one wall more it is refused.
    near = levels.held_out[:1].repeat(400, 0)
    wall = int(near[0, : levels.cells].argmax())
    near[:, wall] = 0
    edited = levels.mutate(near, 1, np.random.default_rng(0))
    assert levels.fit(edited).all() and (edited != near).any()


def test_labyrinths_have_one_way() -> None:
    """Free cells and the openings between them are a tree: one opening fewer than rooms."""
    for maze in mazes(9, np.random.default_rng(3))[10:]:
        assert (~maze.walls).sum() == 25 + 24
        steps = distances(maze.walls[None], np.array([maze.start]))[0]
        assert (steps[~maze.walls] >= 0).all() and steps.reshape(-1)[maze.goal] == steps.max()


def test_what_is_no_level_is_refused(world: Maze) -> None:
    none = torch.zeros(1, dtype=torch.bool)
    filled = partial(torch.full, (1, 28))
    for act, says in (
        (lambda: world.reset(mask=none), "first reset"),
        (lambda: world.reset(0, torch.zeros(1, 9)), r"expected \(1, 28\)"),
        (lambda: world.reset(0, filled(float("nan"))), r"must be in \[0, 1\]"),
        (lambda: world.reset(0, filled(-0.1)), r"must be in \[0, 1\]"),
        (lambda: world.reset(0, filled(1.5)), r"must be in \[0, 1\]"),
        (lambda: world.levels.decode(np.zeros((2, 5))), "28 numbers, got"),
        (lambda: Maze(Config(side=4)), "at least 5"),
        (lambda: Maze(Config(blocks=80)), "blocks=80"),
        (lambda: Maze(Config(view=4)), "view=4"),
        (lambda: Maze(Config(held_out="zero_shot")), "mazes of side 13, not 9"),
        (lambda: MazeLevels(13, 60, shortest=23), "shortest=23 must be 0 to 22"),
        (lambda: world.reset(0) and world.step(torch.tensor([3])), "0 to 2"),
    ):
        with pytest.raises(ValueError, match=says):
            act()


def test_it_can_be_seen_and_told(world: Maze) -> None:
    world.reset(0, HAND)
    picture, text = world.render(0, 160, 120), world.describe(0)
    assert picture.shape == (120, 160, 3) and picture.dtype == torch.uint8
    assert "row 2, column 0, looking up" in text and "^#" in text.replace("\n", "")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def space() -> MazeLevels:
    return MazeLevels(5, 8)


def spelled(space: MazeLevels, walls: list[int], start: int, goal: int) -> np.ndarray:
    plan = np.zeros(25, bool)
    plan[walls] = True
    at = (np.array([value]) for value in (start, goal, 0))
    return space.encode(Plans(plan.reshape(1, 5, 5), *at))


def test_words_by_hand(space: MazeLevels) -> None:
    """Goal, start, walls in rising order, then nothing (25)."""
    words = space.spell(spelled(space, [13, 2, 7], start=20, goal=4))
    assert words.tolist() == [[4, 20, 2, 7, 13, 25, 25, 25, 25, 25]]
    assert (space.words, space.length, space.marks) == (26, 10, 2)
    crowded = space.decode(spelled(space, list(range(5, 20)), 0, 1))
    assert spell(crowded, 10).tolist() == [[1, 0, 5, 6, 7, 8, 9, 10, 11, 12]]


def test_any_words_are_a_level_with_a_way(space: MazeLevels) -> None:
    """Words of a level are that level again, but for which way one looks at first; none of those
    held out is built."""
    built = space.built(rng().integers(26, size=(500, 10)), rng(1))
    assert space.fit(built).all() and len(np.unique(built, axis=0)) > 490
    assert space.fit(space.built(space.spell(space.held_out), rng())).all()
    levels = space.random(200, rng())
    again = space.built(space.spell(levels), rng(1))
    assert np.array_equal(again[:, :-1], levels[:, :-1]) and len(np.unique(again[:, -1])) == 4


def test_the_wall_that_would_close_the_way_is_not_put(space: MazeLevels) -> None:
    """Start in a corner, walls on both sides of it: the second of them is left out."""
    for first, second in ((1, 5), (5, 1)):
        words = np.array([[24, 0, first, second, 12, 25, 25, 25, 25, 25]])
        assert np.flatnonzero(space.built(words, rng())[0, :25]).tolist() == [first, 12]


def test_walls_twice_or_on_start_and_goal_are_nothing(space: MazeLevels) -> None:
    words = np.array([[24, 0, 12, 12, 0, 24, 12, 25, 25, 25], [3, 3] + [25] * 8])
    plans = space.decode(space.built(words, rng()))
    assert np.flatnonzero(plans.walls[0]).tolist() == [12]
    assert plans.goal.tolist() == [24, 4] and plans.start.tolist() == [0, 3]
