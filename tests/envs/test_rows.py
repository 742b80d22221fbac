"""Rows of environments: saved, independent, reset alone, true successors; their generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.build import build
from embodied.core.env import Step, VecEnv
from embodied.core.env_contract import random_actions, require_masked_reset
from embodied.envs.fr3.tasks import TASKS
from embodied.envs.row_rng import GOLDEN, RowRng, mixed
from tests.builders import node_of
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
TANK = {"start": 3.0, "most": 4.0, "least": 0.1, "power": 10.0}
NOISE = {"deviation": {"dq": 0.01}, "bias": {"cube": 0.002}}
WEAK = {"gain": (0.5, 1.0), "offset": (-0.2, 0.2), "turn": (-1.0, 1.0)}
RANDOM = {"friction": (0.5, 1.5), "mass": (0.5, 2.0), "gain": (0.8, 1.2), "damping": (0.8, 1.2)}


def wrapped(env: str, horizon: int, wrapper: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    inner, outer = node_of(f"envs.{env}", horizon=horizon), node_of(f"envs.{wrapper}", **settings)
    return "wrappers.stack.Wrapped", {"env": inner, "wrappers": [outer]}


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
    "tank": wrapped("toy.contact_maze.ContactMaze", 20, "wrappers.energy_tank.EnergyTank", **TANK),
    "noise": wrapped("fr3.env.Fr3", 15, "wrappers.observations.ObservationNoise", **NOISE),
    "actuators": wrapped("toy.patrol.Patrol", 20, "wrappers.actuators.Actuators", **WEAK),
    "magnet": wrapped("fr3.env.Fr3", 15, "fr3.assist_force.AssistForce", body="cube"),
    "trials": wrapped("maze.env.Maze", 6, "wrappers.trials.Trials", episodes=2),
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


def test_a_reset_of_some_pegs_leaves_the_others() -> None:
    """Settling a peg takes physics steps of the whole batch, which the other rows must not feel."""
    require_masked_reset(made("warp insert", 3), seed=0, steps=3)


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


WORD = (1 << 64) - 1


def by_hand(state: int) -> int:
    """SplitMix64's finaliser in Python's own integers."""
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def test_words_are_splitmix() -> None:
    """The first output of the reference implementation seeded with 0 is 0xe220a8397b1dcdaf."""
    assert int(mixed(torch.tensor([GOLDEN]))) & WORD == 0xE220A8397B1DCDAF
    streams = RowRng(5, 3)
    key = int(streams.state[1, 0])
    first, second = streams.words(2), streams.words(1)
    expected = [by_hand((key + n * (GOLDEN & WORD)) & WORD) for n in (1, 2, 3)]
    assert [int(w) & WORD for w in (first[0, 1], first[1, 1], second[0, 1])] == expected


def test_a_row_draws_by_its_seed_and_number_only() -> None:
    whole, parts, more = RowRng(1, 4), RowRng(1, 4), RowRng(1, 6)
    picked = [parts.normal(7, torch.tensor(rows)) for rows in ([0, 2], [1, 3])]
    everything = whole.normal(7)
    assert torch.equal(everything[:, [0, 2, 1, 3]], torch.cat(picked, 1))
    assert torch.equal(everything, more.normal(7)[:, :4])
    assert torch.equal(whole.state, parts.state) and torch.equal(whole.state, more.state[:4])
    assert not torch.equal(RowRng(7, 4).words(4), RowRng(8, 4).words(4))
    whole.seed(7, torch.arange(4))
    assert torch.equal(whole.state, RowRng(7, 4).state)


def test_uniform_numbers_fill_the_interval_evenly() -> None:
    drawn = RowRng(3, 2000).uniform(101)
    assert drawn.min() > 0 and drawn.max() <= 1
    n = drawn.numel()
    chi = ((torch.histc(drawn, 50, 0, 1) - n / 50) ** 2 / (n / 50)).sum()
    assert chi < 49 + 5 * (2 * 49) ** 0.5
    # Neighbours in a row, and the same place in neighbouring rows, know nothing of each other.
    centred = drawn - 0.5
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert ((a * b).mean() * 12).abs() < 5 / n**0.5


def test_normal_numbers_have_normal_moments_and_tails() -> None:
    drawn = RowRng(4, 4000).normal(51).flatten().double()
    assert drawn.isfinite().all() and drawn.abs().max() < 5.9
    beyond = [(drawn.abs() > limit).double().mean() for limit in (1, 2, 3)]
    found = torch.stack([drawn.mean(), drawn.var(), (drawn**4).mean(), *beyond])
    wanted = torch.tensor([0, 1, 3, 0.317311, 0.045500, 0.002700])
    spread = torch.tensor([1, 2, 96, 0.317311, 0.045500, 0.002700])  # variance of one number
    assert ((found - wanted).abs() < 5 * (spread / len(drawn)).sqrt()).all()
