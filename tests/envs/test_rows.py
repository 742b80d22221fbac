"""Rows of environments: saved and continued, independent, reset alone, with true successors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.build import build
from embodied.core.env import Step, VecEnv
from embodied.core.env_contract import random_actions
from embodied.envs.fr3.tasks import TASKS
from tests.tiers import usually

IDS = (
    *(f"MiniGrid-{name}-v0" for name in ("DoorKey-5x5", "Dynamic-Obstacles-5x5", "MemoryS7")),
    *(f"MiniGrid-{name}-v0" for name in ("KeyCorridorS3R1", "ObstructedMaze-1Dlhb", "Unlock")),
    *(f"MiniGrid-{name}-v0" for name in ("PutNear-6x6-N2", "RedBlueDoors-6x6")),
    "embodied.envs.minigrid.levels:Levels-v0",
)
SEEN = {"horizon": 60, "privileged": True, "mission_words": 40}
FR3 = {f"fr3 {task}": ("fr3.env.Fr3", {"task": task, "horizon": 15}) for task in sorted(TASKS)}
WARP = {
    f"warp {task}": ("fr3.warp_env.Fr3Warp", {"task": task, "device": "cpu", "horizon": 9})
    for task in ("lift", "insert")
}
WORLDS = ("HalfCheetah-v5", "Ant-v5", "Reacher-v5", "CartPole-v1", "MountainCarContinuous-v0")
GYM = {name: ("gym.Gym", {"id": name, "horizon": 60}) for name in WORLDS}
MINIGRID = {
    name: ("minigrid.env.MiniGrid", {"id": name, "backend": "gymnasium", **SEEN}) for name in IDS
}
VEHICLES = {"mass": (0.8, 1.2), "blend": (0.0, 1.0), "disturbance": (0.0, 2.0)}
RANDOM = {"friction": (0.5, 1.5), "mass": (0.5, 2.0), "gain": (0.8, 1.2), "damping": (0.8, 1.2)}


def wrapped(env: dict[str, Any], **wrapper: Any) -> tuple[str, dict[str, Any]]:
    return "wrappers.stack.Wrapped", {"env": env, "wrappers": [wrapper]}


NODES: dict[str, tuple[str, dict[str, Any]]] = {
    **FR3,
    **WARP,
    **GYM,
    **MINIGRID,
    "fr3 random": ("fr3.env.Fr3", {"randomize": RANDOM, "horizon": 15}),
    "fr3_tasks": ("fr3.language.LanguageTasks", {"horizon": 12}),
    "quadrotor": ("quadrotor.hover_env.Quadrotor", {"ranges": VEHICLES}),
    "quadrotor native": ("quadrotor.hover_env.Quadrotor", {"ranges": VEHICLES, "native": True}),
    "Ant": ("mujoco.locomotion.Locomotion", {"id": "Ant-v5", "horizon": 60}),
    "Hopper": ("mujoco.locomotion.Locomotion", {"id": "Hopper-v5"}),
    "tank": wrapped(
        {"_target_": "embodied.envs.toy.contact_maze.ContactMaze", "horizon": 20},
        **{"_target_": "embodied.envs.wrappers.energy_tank.EnergyTank", "start": 3.0},
        **{"most": 4.0, "least": 0.1, "power": 10.0},
    ),
    "noise": wrapped(
        {"_target_": "embodied.envs.fr3.env.Fr3", "horizon": 15},
        _target_="embodied.envs.wrappers.observations.ObservationNoise",
        deviation={"dq": 0.01},
        bias={"cube": 0.002},
    ),
    "trials": wrapped(
        {"_target_": "embodied.envs.maze.env.Maze", "horizon": 6},
        _target_="embodied.envs.wrappers.trials.Trials",
        episodes=2,
    ),
    "process": ("process.env.GymnasiumProcess", {"id": "Pendulum-v1", "horizon": 6}),
    "Pendulum-v1": ("gym.Gym", {"id": "Pendulum-v1", "horizon": 6}),
    "maze": ("maze.env.Maze", {"horizon": 6}),
}
STEPS = dict.fromkeys(WARP, 24) | dict.fromkeys(
    [*GYM, *MINIGRID, "Ant", "Hopper", "quadrotor", "quadrotor native"], 137
)
"""Steps in which rows end, where that is not 50."""
ALONE = [*FR3, "warp lift", "quadrotor", "quadrotor native", "process", "Pendulum-v1", "maze"]


def made(name: str, num_envs: int, **settings: Any) -> VecEnv:
    target, own = NODES[name]
    if name in WARP:
        pytest.importorskip("mujoco_warp", reason="MuJoCo Warp is not installed")
    if name in MINIGRID:
        pytest.importorskip("minigrid")
    node = {"_target_": f"embodied.envs.{target}", "num_envs": num_envs, **own, **settings}
    return build(node, VecEnv)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """MuJoCo writes its warnings to a log file where it runs."""
    monkeypatch.chdir(tmp_path)


def require_equal(one: Step, other: Step) -> None:
    for name in one.obs:
        assert torch.equal(one.obs[name], other.obs[name]), name
        assert torch.equal(one.next_obs[name], other.next_obs[name]), name
    for name in ("reward", "terminated", "truncated"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize(
    "name", usually({*NODES} - {"warp insert"}, sorted({*NODES} - {"Pendulum-v1"}))
)
def test_another_environment_goes_on_exactly_across_resets(name: str) -> None:
    env, fresh = made(name, 3), made(name, 3)
    env.reset(seed=1)
    env.reset(mask=torch.tensor([True, False, False]))
    plan = random_actions(env, STEPS.get(name, 50))
    half = len(plan) // 4
    for action in plan[:half]:
        now = {key: value.clone() for key, value in env.step(action).obs.items()}
    state = {key: value.clone() for key, value in env.get_state().items()}
    went = [env.step(action) for action in plan[half:]]
    assert any(step.ended.any() for step in went)
    for again in (env, fresh):
        obs = again.set_state(state)
        assert all(torch.equal(obs[key], now[key]) for key in now)
        for before, action in zip(went, plan[half:], strict=True):
            require_equal(before, again.step(action))
        again.close()


@pytest.mark.parametrize("name", ALONE)
def test_a_row_depends_on_its_seed_and_number_only(name: str) -> None:
    few, many = made(name, 2), made(name, 5, **({"threads": 1} if name in FR3 else {}))
    exact = {} if name == "quadrotor" else {"rtol": 0.0, "atol": 0.0}
    begun, other = few.reset(seed=7), many.reset(seed=7)
    for action in random_actions(many, 18):
        for key in begun:
            torch.testing.assert_close(begun[key], other[key][:2], **exact)
        one, two = few.step(action[:2]), many.step(action)
        torch.testing.assert_close(one.next_obs[key], two.next_obs[key][:2], **exact)
        begun, other = one.obs, two.obs
    few.close()
    many.close()


@pytest.mark.parametrize("name", ["fr3 lift", *WARP, "process", "Pendulum-v1", "maze"])
def test_a_reset_of_some_rows_leaves_the_others(name: str) -> None:
    """Settling a peg takes physics steps of the whole batch, which the other rows must not feel."""
    env = made(name, 3)
    env.reset(seed=0)
    first, second = random_actions(env, 2)
    before = {key: value.clone() for key, value in env.step(first).obs.items()}
    state = {key: value.clone() for key, value in env.get_state().items()}
    after = env.reset(seed=5, mask=torch.tensor([False, True, False]))
    assert all(torch.equal(before[key][[0, 2]], after[key][[0, 2]]) for key in before)
    assert any(not torch.equal(before[key][1], after[key][1]) for key in before)
    went = env.step(second).obs
    env.set_state(state)
    alone = env.step(second).obs
    assert all(torch.equal(alone[key][[0, 2]], went[key][[0, 2]]) for key in went)
    env.close()


@pytest.mark.parametrize("name", ["fr3 lift", "warp lift", "process", "Pendulum-v1"])
def test_the_successor_of_an_ended_row_is_its_state_before_the_reset(name: str) -> None:
    short, long = made(name, 3, horizon=4), made(name, 3, horizon=60)
    assert torch.equal(short.reset(seed=2)["state"], long.reset(seed=2)["state"])
    plan = random_actions(short, 8)
    for action in plan[:4]:
        cut, on = short.step(action), long.step(action)
    assert cut.truncated.all() and not cut.terminated.any() and not on.ended.any()
    assert torch.equal(cut.next_obs["state"], on.next_obs["state"])
    long.reset(seed=2)
    assert torch.equal(cut.obs["state"], long.reset()["state"]), "the second episode of the seed"
    ends = [short.step(action).truncated.all().item() for action in plan[4:]]
    assert ends == [False, False, False, True], "its clock begins again"
    short.close()
    long.close()
