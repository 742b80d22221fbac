"""FR3 tasks on MuJoCo Warp: MuJoCo's own trajectories, exact state, masked resets, bad input.

Warp's CPU back end runs the same kernels, graphs included; its compiler takes about half a minute
on a machine's first run, and keeps what it made.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.env import NotFinite
from embodied.envs.fr3.env import Config as PoolConfig
from embodied.envs.fr3.env import Fr3
from embodied.envs.fr3.tasks import TASKS
from embodied.evaluation.evaluate import evaluate
from embodied.policies.scripted import fr3
from embodied.policies.scripted.fr3 import Scripted

pytest.importorskip("mujoco_warp", reason="MuJoCo Warp is not installed")

from embodied.envs.fr3.warp_env import Config, Fr3Warp
from embodied.envs.mujoco.warp_batch import warp
from tests.tiers import only_all


def made(task: str = "lift", rows: int = 4, **settings: Any) -> Fr3Warp:
    return Fr3Warp(Config(**{"task": task, "num_envs": rows, "device": "cpu", **settings}))


def pair(task: str, rows: int) -> tuple[Fr3, Fr3Warp, torch.Tensor]:
    """Both worlds with the same rows, begun by MuJoCo's, and the observation."""
    pool = Fr3(PoolConfig(task=task, num_envs=rows, reward="shaped"))
    ours = made(task, rows, reward="shaped")
    obs = pool.reset(seed=3)["state"]
    ours.reset(seed=0)
    given, state = pool.get_state(), ours.get_state()
    for key in state:
        if key in given:
            state[key] = given[key]
    for name in ("qpos", "qvel", "ctrl", "qacc_warmstart", "mocap_pos", "mocap_quat"):
        key = f"physics/{name}"
        field = np.array(getattr(pool.batch, name), np.float32)
        state[key] = torch.from_numpy(field).reshape(state[key].shape)
    ours.set_state(state)
    return pool, ours, obs


@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_same_task_file_gives_the_same_world(task: str) -> None:
    pool, ours, obs = pair(task, 3)
    assert ours.spec == pool.spec and ours.spec.text == pool.spec.text
    assert ours.horizon == pool.horizon and ours.substeps == pool.substeps
    assert [p.name for p in ours.parameters] == [p.name for p in pool.parameters]
    torch.testing.assert_close(ours._observe(ours.view())["state"], obs, atol=1e-6, rtol=0)
    # In words too, and the picture is of the same row.
    assert ours.describe(1) == pool.describe(1)
    for mine, theirs in zip(ours.scene(2), pool.scene(2), strict=True):
        for name in ("geom_size", "xpos"):
            if hasattr(mine, name):
                np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), atol=1e-5)


def test_a_free_arm_moves_as_in_mujoco() -> None:
    pool, ours, _ = pair("lift", 8)
    for action in torch.rand(20, 8, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1:
        a, b = pool.step(action), ours.step(action)
        off = (a.next_obs["state"] - b.next_obs["state"]).abs()
        # q (rad), tool (m), everything else (velocities too).
        assert off[:, :7].max() < 5e-6 and off[:, 14:17].max() < 2e-6 and off.max() < 5e-4
        assert (a.reward - b.reward).abs().max() < 1e-6
        assert torch.equal(a.log["success"], b.log["success"])


def test_a_grasp_goes_as_in_mujoco() -> None:
    """Contacts differ in the last digits of single precision, so rows drift apart slowly."""
    pool, ours, obs = pair("lift", 8)
    torch.manual_seed(0)
    actor = Actor(Scripted(fr3.Config(task="lift", quality=1.0), pool.spec), 8)
    first, over, highest = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.bool), 0.0
    cube = pool.spec.obs["state"].names.index("cube_x")
    slack = torch.full((len(pool.spec.obs["state"].names),), torch.inf)
    slack[:7], slack[14:17], slack[cube : cube + 3] = 2e-3, 1e-3, 2e-3
    for _ in range(40):
        action = actor({"state": obs}, first)
        a, b = pool.step(action), ours.step(action)
        obs, first = a.obs["state"], a.ended
        seen, other = a.next_obs["state"], b.next_obs["state"]
        assert ((seen - other).abs()[~over] < slack).all()
        assert torch.equal(a.log["success"][~over], b.log["success"][~over])
        highest = max(highest, seen[:, cube + 2].max().item())
        over |= a.ended | b.ended
    assert over.all() and highest > 0.1, "no cube was lifted"


@only_all
def test_the_demonstrator_inserts_the_peg() -> None:
    env = made("insert", 12)
    script = Scripted(fr3.Config(task="insert", quality=1.0), env.spec)
    won = evaluate(script, env, 12, seed=3).success
    assert won is not None and won.float().mean() > 0.8


def test_tensors_are_warps_own_memory() -> None:
    env = made(rows=2)
    env.reset(seed=0)
    env.batch.state["qpos"][1, 3] = -1.25
    assert env.batch._data.qpos.numpy()[1, 3] == -1.25
    assert env.batch.field("geom_friction").data_ptr() == env.batch._model.geom_friction.ptr


def test_what_is_wrong_is_said() -> None:
    env, nan = made(rows=3), torch.zeros(3, 4)
    nan[1, 2] = float("nan")
    for act, kind, says in (
        (lambda: env.step(torch.zeros(3, 4)), RuntimeError, "call reset"),
        (lambda: env.reset(mask=torch.tensor([True, False, True])), ValueError, "first reset"),
        (lambda: env.reset(task=torch.full((3, 5), 1.5)), ValueError, r"\[0, 1\]"),
        (lambda: made(ranges={"cube_z": (0.0, 1.0)}), ValueError, "no parameter 'cube_z'"),
        (lambda: made(device="cuda:9"), ConfigError, r"no GPU here|counted from 0"),
        (lambda: env.reset(0) and env.step(torch.zeros(3, 7)), ValueError, "expected"),
        (lambda: env.step(nan), NotFinite, r"fr3_lift_warp: action is not finite in envs \[1\]"),
    ):
        with pytest.raises(kind, match=says):
            act()
    env.reset(seed=0)
    env.batch.state["qpos"][2, 0] = float("nan")
    with pytest.raises(NotFinite, match=r"envs \[2\]"):
        env.step(torch.zeros(3, 4))


@pytest.mark.parametrize("setting", ["constraints", "contacts"])
def test_too_little_room_names_the_setting(setting: str) -> None:
    env = made(rows=2, **{setting: 3})
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=f"fr3_lift_warp: .* raise .*{setting}"):
        for _ in range(3):
            env.step(torch.zeros(2, 4))


def test_only_rows_that_begin_again_draw() -> None:
    """A row's next start depends on its own episodes, not on those of the others."""
    alone, busy = made(rows=2), made(rows=2)
    alone.reset(seed=4)
    busy.reset(seed=4)
    for _ in range(3):
        busy.reset(mask=torch.tensor([True, False]))
    both = torch.ones(2, dtype=torch.bool)
    assert torch.equal(alone.reset(mask=both)["state"][1], busy.reset(mask=both)["state"][1])
    assert not torch.equal(alone.task[0], busy.task[0])


def test_it_is_quiet_and_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import embodied.envs.fr3.warp_env, warp; warp.zeros(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
    for package in ("warp", "mujoco_warp"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            patch.delitem(sys.modules, "embodied.envs.mujoco.warp_batch")
            with pytest.raises(ImportError, match=r"pip install 'embodied-rl\[warp\]'"):
                importlib.import_module("embodied.envs.mujoco.warp_batch")
    assert warp.config.kernel_cache_dir, "kernels are not kept"
