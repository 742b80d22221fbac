"""ManiSkill tasks, really stepped in software: equal to ManiSkill's own loop, and saved exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

pytest.importorskip("mani_skill", reason="ManiSkill is not installed (extra: maniskill)")

from embodied.core.env import NotFinite, Step, VecEnv
from embodied.core.spec import require_same
from embodied.datasets.editing.transform import Projection
from embodied.envs.maniskill.env import Batch, Config, ManiSkill, Rows
from embodied.envs.maniskill.factory import NoDriver, require_driver
from embodied.evaluation.evaluate import evaluate
from embodied.importers import Bounds
from embodied.importers import maniskill as importer
from embodied.policies.scripted.simulators import PickCube, PickCubeConfig
from tests.tiers import only_all

try:
    require_driver("cpu")
except NoDriver as absent:
    pytest.skip(str(absent), allow_module_level=True)

PICK = Config("PickCube-v1", num_envs=2, control_mode="pd_ee_delta_pos", backend="cpu", horizon=30)
EXACT = replace(PICK, kwargs={"reconfiguration_freq": 1})
"""Its episodes do not depend on those before, to the bit."""
SMALL: dict[str, Any] = {"backend": "cpu", "image_size": (32, 32)}
Maker = Callable[[Config], ManiSkill]


@pytest.fixture(scope="module")
def made() -> Iterator[Maker]:
    """Environments by their settings, each made once: making one takes a second."""
    kept: dict[str, ManiSkill] = {}

    def make(config: Config) -> ManiSkill:
        key = str(config)
        if key not in kept:
            kept[key] = ManiSkill(config)
        return kept[key]

    yield make
    for env in kept.values():
        env.close()


def pushes(env: VecEnv, steps: int, seed: int = 0) -> Tensor:
    """Random actions that press down, so that there are contacts."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.rand(steps, env.num_envs, env.spec.act.size, generator=random) * 2 - 1
    drawn[:, :, 2] = -0.7
    return drawn


def grasping(env: ManiSkill, state: Tensor, count: int) -> Tensor:
    """Above the cube, down, close, to the goal, from PickCube's state by its elements' names."""
    names = env.spec.obs["state"].names
    at = {key: names.index(f"extra_{key}[0]") for key in ("tcp_to_obj_pos", "obj_to_goal_pos")}
    to_cube = state[:, at["tcp_to_obj_pos"] :][:, :3]
    to_goal = state[:, at["obj_to_goal_pos"] :][:, :3]
    action = torch.cat([to_cube / 0.1, torch.ones(len(state), 1)], 1)
    far = to_cube[:, :2].norm(dim=1) > 0.01
    action[far, 2] = action[far, 2].clamp(min=0)
    if count > 15:
        action[:, 3] = -1
    if count > 18:
        action[:, :3] = to_goal / 0.1
    return action.clamp(-1, 1)


def play(env: ManiSkill, actions: Tensor) -> Tensor:
    """Everything that these steps gave, in one vector."""
    steps = [env.step(action) for action in actions]
    return torch.cat([torch.cat([s.next_obs["state"], s.reward[:, None]], 1) for s in steps])


TWO = Config("TwoRobotPickCube-v1", control_mode="pd_joint_pos", backend="cpu", horizon=6)


@pytest.mark.parametrize("name", ["PickCube-v1", "PushCube-v1", "StackCube-v1", TWO.id])
def test_rows_are_what_its_own_loop_gives(name: str, made: Maker) -> None:
    import gymnasium

    config = TWO if name == TWO.id else Config(name, backend="cpu", horizon=6)
    env, act = made(config), made(config)._action
    first = env.reset(seed=4)["state"].clone()
    episode = int(env.get_state()["episode"])
    own: Any = gymnasium.make(
        name, obs_mode="state", reward_mode="normalized_dense", sim_backend="physx_cpu",
        render_backend="cpu", control_mode=config.control_mode,
    ).unwrapped  # fmt: skip
    assert torch.equal(first, own.reset(seed=episode)[0])
    for count, action in enumerate(pushes(env, 6)):
        step, native = env.step(action), act.native(action)
        torch.testing.assert_close(act.unit(native), action, atol=1e-6, rtol=0)
        seen, reward, _, _, info = own.step(native)
        assert torch.equal(step.next_obs["state"], seen)
        assert torch.equal(step.reward, reward.float())
        assert step.log["success"].tolist() == info["success"].tolist()
        assert step.truncated.tolist() == [count == 5] and not step.terminated.any()
    assert not torch.equal(step.obs["state"], step.next_obs["state"])
    assert env.get_state()["count"].tolist() == [0]
    own.close()


def test_two_arms_act_together(made: Maker) -> None:
    """One vector of the joints of both, which a batch converts as the rows do."""
    env = made(TWO)
    arms = [f"panda_wristcam-{arm}" for arm in (0, 1)]
    assert env.spec.act.names == tuple(f"{arm}/{i}" for arm in arms for i in range(8))
    env.reset(seed=0)
    state, plan = env.get_state(), pushes(env, 4)
    first = play(env, plan)
    env.set_state(state)
    assert torch.equal(play(env, plan), first)
    assert isinstance(env.rows, Rows)
    batch = Batch(env.rows.settings, 1)
    for action in plan * 1.2:
        ours, native = batch._native(action), env._action.native(action)
        assert set(ours) == set(native) == set(arms)
        for arm in arms:
            torch.testing.assert_close(ours[arm], torch.from_numpy(native[arm]))
            assert batch.env.single_action_space[arm].contains(native[arm][0])
    batch.close()


def test_peg_insertion_builds_its_scene_anew(made: Maker) -> None:
    env = made(Config("PegInsertionSide-v1", backend="cpu", horizon=3))
    runs = []
    for _ in range(2):
        env.reset(seed=1)
        runs.append(play(env, pushes(env, 7)))
    assert torch.equal(*runs)


def test_a_row_does_not_see_the_contacts_of_its_last_episode(made: Maker) -> None:
    env = made(PICK)
    grasped = env.spec.obs["state"].names.index("extra_is_grasped")
    state = env.reset(seed=0)["state"]
    for count in range(30):
        step = env.step(grasping(env, state, count))
        state = step.obs["state"]
    assert step.truncated.all() and (step.next_obs["state"][:, grasped] > 0).any()
    assert not (step.obs["state"][:, grasped] > 0).any()


@pytest.mark.parametrize("ends", [False, True])
def test_success_is_logged_and_ends_only_if_asked_for(made: Maker, ends: bool) -> None:
    env = made(replace(PICK, num_envs=1, horizon=60, end_on_success=ends))
    state, steps = env.reset(seed=3)["state"], list[Step]()
    while not steps or not steps[-1].ended:
        steps.append(env.step(grasping(env, state, len(steps))))
        state = steps[-1].obs["state"]
    assert any(step.log["success"] for step in steps)
    assert all(bool(step.terminated) == (bool(step.log["success"]) and ends) for step in steps)
    assert ends or (len(steps) == 60 and steps[-1].truncated)


def test_saved_rows_go_on_to_the_bit_also_in_later_episodes(made: Maker) -> None:
    """With these pushes a scene that is not built anew goes on with other last bits."""
    env, other = made(EXACT), ManiSkill(EXACT)
    plan = pushes(env, 12, 2)
    env.reset(seed=6)
    play(env, pushes(env, 30, 1))
    state = {key: value.clone() for key, value in env.get_state().items()}
    there = play(env, plan)
    assert torch.equal(env.set_state(state)["state"], state["obs/state"])
    assert torch.equal(play(env, plan), there)
    other.reset(seed=9)
    play(other, pushes(other, 5, 3))
    other.set_state(state)
    assert torch.equal(play(other, plan), there)
    other.close()


def test_worker_processes_give_the_same(made: Maker) -> None:
    here, there = made(EXACT), ManiSkill(replace(EXACT, workers=2))
    plan = pushes(here, 35)
    assert torch.equal(here.reset(seed=2)["state"], there.reset(seed=2)["state"])
    assert torch.equal(play(here, plan), play(there, plan))
    state = there.get_state()
    assert all(torch.equal(value, state[key]) for key, value in here.get_state().items())
    assert here.describe(1) == there.describe(1)
    mask = torch.tensor([False, True])
    assert torch.equal(here.reset(mask=mask)["state"], there.reset(mask=mask)["state"])
    with pytest.raises(ValueError, match="workers=0"):
        there.sub_scene(0)
    there.close()


def seen(mode: str, name: str, shape: tuple[int, ...], dtype: str) -> tuple[ManiSkill, Tensor]:
    """The world with observations of that kind, and one of them of a step."""
    env = ManiSkill(Config("PickCube-v1", obs=mode, **SMALL))  # pyright: ignore[reportArgumentType]
    first = env.reset(seed=0)[name]
    shown = env.step(torch.zeros(1, env.spec.act.size)).obs[name]
    assert (env.spec.obs[name].shape, env.spec.obs[name].dtype) == (shape, dtype)
    assert first.shape == shown.shape == (1, *shape) and shown.float().std() > 0
    assert not any(name.startswith("sensor_param") for name in env.spec.obs)
    env.close()
    return env, shown[0]


@only_all
def test_a_picture_is_drawn(made: Maker) -> None:
    env = made(PICK)
    env.reset(seed=0)
    drawn = env.render(0, 96, 64)
    assert drawn.shape == (64, 96, 3) and drawn.float().std() > 10


@only_all
def test_points_of_the_table() -> None:
    """Its top is the plane z = 0, and the camera looks at it."""
    env, points = seen("pointcloud", "points", (1024, 6), "float32")
    assert env.spec.obs["points"].is_points and points[:, 3:].max() <= 1.0
    assert ((points[:, 2].abs() < 0.005) & (points[:, 0] != 0)).sum() > 100


@only_all
def test_the_depth_of_the_table() -> None:
    _, metres = seen("rgbd", "sensor_data_base_camera_depth", (32, 32, 1), "float32")
    # ManiSkill's camera at (0.3, 0, 0.6) looks at (-0.1, 0, 0.1).
    ahead = np.array([-0.4, 0.0, -0.5]) / 0.41**0.5
    turn = np.stack([[0.0, 1.0, 0.0], np.cross(ahead, [0.0, 1.0, 0.0]), ahead], 1)
    pose = (0.3, 0.0, 0.6, *Rotation.from_matrix(turn).as_quat())
    eye = Projection(fov=90, points=1024, voxel=0.001, pose=pose)
    cloud = eye.clouds(metres[None, ..., 0].numpy())[0]
    assert (np.abs(cloud[:, 2]) < 0.005).sum() > 100


def test_a_converted_dataset_has_the_spec_of_the_world(tmp_path: Path, made: Maker) -> None:
    import gymnasium
    from mani_skill.utils.wrappers.record import RecordEpisode

    env = made(PICK)
    own: Any = gymnasium.make(
        PICK.id, obs_mode="state", control_mode=PICK.control_mode, sim_backend="physx_cpu",
        render_backend="cpu", max_episode_steps=5,
    )  # fmt: skip
    own = RecordEpisode(own, str(tmp_path), trajectory_name="t", save_video=False)
    own.reset(seed=0)
    for action in pushes(env, 5)[:, 0]:
        own.step(action)
    own.close()
    spec, episodes = importer.read(tmp_path / "t.h5", None, Bounds())
    require_same(spec, env.spec, "the dataset", "the world")
    assert len(next(episodes).rows["action"]) == 5


def test_words_and_scene(made: Maker) -> None:
    env = made(PICK)
    state = env.reset(seed=0)["state"]
    said = env.describe(1)
    names = env.spec.obs["state"].names
    place = state[1, names.index("extra_obj_pose[0]")].item()
    assert "grasp a red cube" in said and f"cube at [{place:.3f}" in said
    assert any(entity.name.endswith("cube") for entity in env.sub_scene(0).entities)
    with pytest.raises(ValueError, match="no env 2"):
        env.describe(2)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"id": "PickCub-v1"}, ValueError, "did you mean PickCube-v1"),
        ({"control_mode": "pd_nonsense"}, ValueError, "pd_nonsense"),
        ({"id": "PickSingleYCB-v1"}, FileNotFoundError, "download_asset PickSingleYCB-v1"),
        ({"cameras": ("wrist",), "obs": "state"}, ValueError, "no camera 'wrist'"),
    ],
)
def test_refusals_are_one_line(settings: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        ManiSkill(replace(Config("PickCube-v1", backend="cpu"), **settings))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_done_is_refused(made: Maker) -> None:
    env = made(PICK)
    env.reset(seed=0)
    with pytest.raises(NotFinite):
        env.step(torch.full((2, 4), float("nan")))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="backend=cpu"):
            ManiSkill(Config("PickCube-v1", backend="gpu"))


def test_without_a_driver_one_line_says_what_to_install() -> None:
    module = "embodied.envs.maniskill.env"
    code = f"from {module} import Config, ManiSkill; ManiSkill(Config('PickCube-v1'))"
    surroundings = {**os.environ, "VK_ICD_FILENAMES": "/nowhere.json"}
    surroundings.pop("VK_DRIVER_FILES", None)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, check=False
    )
    last = ran.stderr.strip().splitlines()[-1]
    assert ran.returncode == 1 and "NoDriver" in last
    assert "scripts/system-packages.sh" in last and "mesa-vulkan-drivers" in last


@only_all
def test_the_script_picks_the_cube(made: Maker) -> None:
    env = made(replace(PICK, horizon=50))
    won = evaluate(PickCube(PickCubeConfig(), env.spec), env, 2, seed=1).success
    assert won is not None and won.all()
