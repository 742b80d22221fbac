"""The FR3 tasks: determinism, exact save and restore, true successors, success and bad input."""

from typing import Literal

import numpy as np
import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.env import NotFinite, Step
from embodied.envs.fr3.env import Config, Fr3
from embodied.envs.fr3.tasks import TASKS
from embodied.policies.scripted import fr3
from embodied.policies.scripted.fr3 import Scripted


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """MuJoCo writes its warnings to a log file where it runs."""
    monkeypatch.chdir(tmp_path)


def actions(count: int, rows: int, size: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(rows, size, generator=generator) * 2 - 1 for _ in range(count)]


def same(a: Step, b: Step) -> bool:
    pairs = [(a.reward, b.reward), (a.terminated, b.terminated), (a.truncated, b.truncated)]
    pairs += [(a.obs[key], b.obs[key]) for key in a.obs]
    pairs += [(a.next_obs[key], b.next_obs[key]) for key in a.next_obs]
    return all(torch.equal(x, y) for x, y in pairs)


OPEN = {"can_distance": (0.2, 0.26)}  # detour, with both ways open


def play(task: str, rows: int, quality: float = 1.0) -> tuple[float, float]:
    """Success rate of first episodes, and how much sparse reward came without success."""
    torch.manual_seed(0)
    env = Fr3(Config(task=task, num_envs=rows, ranges=OPEN if task == "detour" else {}))
    obs = env.reset(seed=3)
    actor = Actor(Scripted(fr3.Config(task=task, quality=quality), env.spec), rows)
    first, over = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    won, unearned = over.clone(), 0.0
    while not over.all():
        step = env.step(actor(obs, first))
        obs, first = step.obs, step.ended
        success = step.log["success"]
        assert torch.equal(step.reward, success.float())
        assert torch.equal(step.terminated, success | step.log["lost"])
        unearned += step.reward[~success].sum().item()
        won |= success & ~over
        over |= step.ended
    return won.float().mean().item(), unearned


@pytest.mark.parametrize(
    "task,least",
    [("lift", 0.9), ("reach", 0.9), ("push", 0.9), ("insert", 0.7), ("detour", 0.9)],
)
def test_demonstrator_succeeds_and_only_success_pays(task: str, least: float) -> None:
    rate, unearned = play(task, 32)
    assert rate > least and unearned == 0.0


def test_a_can_knocked_over_ends_the_episode_without_reward() -> None:
    """The demonstrator goes left or right whatever stands there: half of the ways are closed."""
    torch.manual_seed(0)
    env = Fr3(Config(task="detour", num_envs=32))
    obs = env.reset(seed=3)
    actor = Actor(Scripted(fr3.Config(task="detour", quality=1.0), env.spec), 32)
    first, over = torch.ones(32, dtype=torch.bool), torch.zeros(32, dtype=torch.bool)
    lost = over.clone()
    while not over.all():
        step = env.step(actor(obs, first))
        obs, first = step.obs, step.ended
        fell = step.log["lost"]
        assert not (fell & (step.log["success"] | step.truncated)).any()
        assert step.terminated[fell].all() and not step.reward[fell].any()
        lost |= fell & ~over
        over |= step.ended
    assert 8 <= lost.sum() <= 24


def test_doing_nothing_never_pays() -> None:
    for task in TASKS:
        env = Fr3(Config(task=task, num_envs=8, horizon=20))
        env.reset(seed=0)
        still = torch.zeros(8, 4)
        still[:, 3] = -1.0
        paid = sum(env.step(still).reward.sum().item() for _ in range(40))
        assert paid == 0.0, task


@pytest.mark.parametrize("task", sorted(TASKS))
def test_same_seed_same_rows_whatever_their_number(task: str) -> None:
    few, many = (
        Fr3(Config(task=task, num_envs=2, horizon=10)),
        Fr3(Config(task=task, num_envs=5, horizon=10, threads=1)),
    )
    few_obs, many_obs = few.reset(seed=7), many.reset(seed=7)
    assert torch.equal(few_obs["state"], many_obs["state"][:2])
    for action in actions(25, 5):
        one, other = few.step(action[:2]), many.step(action)
        assert torch.equal(one.obs["state"], other.obs["state"][:2])
        assert torch.equal(one.next_obs["state"], other.next_obs["state"][:2])
    assert not torch.equal(few.reset(seed=8)["state"], few_obs["state"])


@pytest.mark.parametrize("task", sorted(TASKS))
def test_state_continues_bit_for_bit_across_resets(task: str) -> None:
    env = Fr3(Config(task=task, num_envs=4, horizon=15))
    env.reset(seed=1)
    plan = actions(50, 4)
    for action in plan[:12]:
        env.step(action)
    state = env.get_state()
    went = [env.step(action) for action in plan[12:]]
    assert any(step.truncated.any() for step in went)
    fresh = Fr3(Config(task=task, num_envs=4, horizon=15, seed=99))
    for again in (env, fresh):
        obs = again.set_state(state)
        assert torch.equal(obs["state"], state["obs/state"])
        assert all(same(a, again.step(action)) for a, action in zip(went, plan[12:], strict=True))


def test_successor_of_an_ended_row_is_the_state_before_its_reset() -> None:
    short, long = (Fr3(Config(num_envs=3, horizon=h)) for h in (6, 60))
    assert torch.equal(short.reset(seed=2)["state"], long.reset(seed=2)["state"])
    for action in actions(6, 3):
        cut, on = short.step(action), long.step(action)
    assert cut.truncated.all() and not on.ended.any()
    assert torch.equal(cut.next_obs["state"], on.next_obs["state"])
    assert not torch.equal(cut.obs["state"], cut.next_obs["state"])
    # The reset rows begin at rest, as far from their targets as a reset puts them.
    at = short.spec.obs["state"].names.index("dq1")
    assert (cut.obs["state"][:, at : at + 7] == 0).all()
    assert short.count.tolist() == [0, 0, 0]


def test_task_vector_is_obeyed_for_one_episode() -> None:
    env = Fr3(Config(num_envs=2, horizon=5))
    task = torch.tensor([[0.0, 1.0, 0.5, 0.5, 0.5], [1.0, 0.0, 0.5, 0.5, 0.5]])
    state = env.reset(seed=0, task=task)["state"]
    at = env.spec.obs["state"].names.index("cube_x")
    torch.testing.assert_close(state[:, at : at + 2], torch.tensor([[0.38, 0.20], [0.62, -0.20]]))
    # The cube's size follows its parameter: half-way between 18 and 24 mm.
    cube = env.model.geom("cube").id
    np.testing.assert_allclose(env.batch.expand("geom_size")[:, cube], 0.021)
    for action in actions(5, 2):
        step = env.step(action)
    assert step.truncated.all()
    assert not torch.allclose(torch.from_numpy(env.task), task.double())
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        env.reset(task=task + 1)


def test_reset_of_some_rows_leaves_the_others() -> None:
    env = Fr3(Config(num_envs=3))
    env.reset(seed=0)
    before = env.step(actions(1, 3)[0]).obs["state"]
    after = env.reset(seed=5, mask=torch.tensor([False, True, False]))["state"]
    assert torch.equal(before[[0, 2]], after[[0, 2]]) and not torch.equal(before[1], after[1])


def test_ranges_change_the_task_and_unknown_ones_are_named() -> None:
    env = Fr3(Config(num_envs=2, ranges={"cube_x": (0.5, 0.5)}))
    env.reset(seed=0)
    np.testing.assert_allclose(env.native(np.arange(2))["cube_x"], 0.5)
    with pytest.raises(ValueError, match="no parameter 'cube_z'"):
        Fr3(Config(ranges={"cube_z": (0.0, 1.0)}))
    with pytest.raises(ValueError, match="FR3 task 'lft'"):
        Fr3(Config(task="lft"))


def test_shaped_reward_is_the_weighted_sum_of_its_terms() -> None:
    env = Fr3(Config(num_envs=4, reward="shaped"))
    env.reset(seed=0)
    step = env.step(actions(1, 4)[0])
    terms = {name: step.log[f"term/{name}"] for name in ("approach", "grasp", "raised")}
    by_hand = (0.2 * terms["approach"] + 0.2 * terms["grasp"] + 0.6 * terms["raised"]) / 10
    torch.testing.assert_close(step.reward, by_hand.float())
    assert (step.reward > 0).all()


def test_nan_is_refused_with_the_row() -> None:
    env = Fr3(Config(num_envs=3))
    env.reset(seed=0)
    action = torch.zeros(3, 4)
    action[1, 2] = float("nan")
    with pytest.raises(NotFinite, match=r"fr3_lift: action is not finite in envs \[1\]"):
        env.step(action)
    env.batch.qpos[2, 0] = np.nan
    with pytest.raises(NotFinite, match=r"envs \[2\]"):
        env.step(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="expected"):
        env.step(torch.zeros(3, 7))


@pytest.mark.parametrize("drawing", ["full", "light"])
def test_pictures_show_the_scene(drawing: Literal["full", "light"]) -> None:
    env = Fr3(Config(num_envs=2, cameras=("front", "wrist"), image_size=48, drawing=drawing))
    obs = env.reset(seed=0)
    assert env.spec.obs["front"].shape == (48, 48, 3)
    for name in ("front", "wrist"):
        assert obs[name].shape == (2, 48, 48, 3) and obs[name].dtype == torch.uint8
        assert obs[name].float().std() > 5
    moved = env.step(torch.ones(2, 4)).obs
    assert not torch.equal(moved["front"], obs["front"])
    picture = env.render(row=1, width=64, height=40)
    assert picture.shape == (40, 64, 3) and picture.float().std() > 10
    with pytest.raises(ValueError, match="camera 'back'"):
        Fr3(Config(num_envs=1, cameras=("back",))).reset(seed=0)


def test_description_names_the_numbers() -> None:
    for task in TASKS:
        env = Fr3(Config(task=task, num_envs=1))
        env.reset(seed=0)
        assert "tool is at x" in env.describe() or "The tool is at x" in env.describe()
        assert env.spec.text
