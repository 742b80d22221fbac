"""Other projects' files, laid out as their own writers do, against the numbers put into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces.utils import flatten
from minari.data_collector import EpisodeBuffer

import embodied as em
from embodied.commands.train import train
from embodied.core.native import Native
from embodied.core.spec import Leaf, require_same
from embodied.datasets.lerobot.reader import DatasetError, read_episodes
from embodied.envs.gym import Config as GymConfig
from embodied.envs.gym import Gym
from embodied.envs.spaces import action_of
from embodied.importers import Bounds, Converted, convert, formats
from tests.builders import exit_of
from tests.tiers import usually
from tests.toy_envs import batched

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
RNG = np.random.default_rng(0)


def same(ours: torch.Tensor, theirs: Any) -> None:
    np.testing.assert_allclose(ours.numpy(), np.asarray(theirs), rtol=0, atol=1e-6)


def robomimic_file(path: Path, next_obs: bool = True, scale: float = 1.0) -> list[dict[str, Any]]:
    """Twelve demonstrations (demo_10 must come after demo_9); the odd ones do not succeed."""
    demos = list[dict[str, Any]]()
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        args = {"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 25}}
        data.attrs["env_args"] = json.dumps(args)
        for i in range(12):
            steps = 3 + i
            last = np.arange(steps) == steps - 1
            seen = RNG.normal(size=(steps + 1, 3))
            image = RNG.integers(0, 255, (steps + 1, 8, 10, 3), dtype=np.uint8)
            made = {"action": RNG.uniform(-1, 1, (steps, 2)) * [1.0, scale]}
            made["reward"] = 1.0 * last * (i % 2 == 0)
            one = data.create_group(f"demo_{i}")
            one.attrs["num_samples"] = steps
            one["actions"], one["rewards"], one["dones"] = made["action"], made["reward"], last
            one["states"] = RNG.normal(size=(steps, 20))
            for name, values in {"robot0_eef_pos": seen, "agentview_image": image}.items():
                one[f"obs/{name}"] = values[:-1]
                if next_obs:
                    one[f"next_obs/{name}"] = values[1:]
            demos.append({"seen": seen, "image": image, **made})
        data.attrs["total"] = sum(len(d["reward"]) for d in demos)
    return demos


def test_robomimic(tmp_path: Path) -> None:
    demos = robomimic_file(tmp_path / "low_dim.hdf5")
    made = convert("robomimic", tmp_path / "low_dim.hdf5", tmp_path / "out", images="png")
    assert made == Converted(12)
    ours = read_episodes(tmp_path / "out")
    assert ours.spec.obs["robot0_eef_pos"] == Leaf((3,))
    assert ours.spec.obs["agentview_image"].is_image
    assert ours.spec.dt == pytest.approx(1 / 25)
    assert ours.texts == ("Lift",) * 12
    assert ours.length.tolist() == list(range(3, 15))
    for i, demo in enumerate(demos):
        rows = ours.episode(i)
        for name, seen in (("robot0_eef_pos", demo["seen"]), ("agentview_image", demo["image"])):
            same(rows[f"obs/{name}"], seen[:-1])
            same(rows[f"next_obs/{name}"], seen[-1])
        same(rows["action"], demo["action"])
        same(rows["reward"], demo["reward"])
        assert bool(rows["terminated"][-1]) == (i % 2 == 0)
        assert bool(rows["truncated"][-1]) == (i % 2 == 1)
        assert rows["success"].tolist() == (demo["reward"] > 0).tolist()


def test_robomimic_without_successors_keeps_only_true_ones(tmp_path: Path) -> None:
    demos = robomimic_file(tmp_path / "a.hdf5", next_obs=False)
    convert("robomimic", tmp_path / "a.hdf5", tmp_path / "out", images="png")
    ours = read_episodes(tmp_path / "out")
    # Failures (odd) lose their last step, whose successor nobody recorded.
    assert ours.length.tolist() == [3 + i - i % 2 for i in range(12)]
    failed = ours.episode(1)
    same(failed["obs/robot0_eef_pos"], demos[1]["seen"][:-2])
    same(failed["next_obs/robot0_eef_pos"], demos[1]["seen"][-2])
    assert bool(failed["truncated"][-1])


def test_actions_beyond_one_are_clipped_and_counted_and_others_unchanged(tmp_path: Path) -> None:
    demos = robomimic_file(tmp_path / "a.hdf5", scale=40.0)
    action = np.concatenate([demo["action"] for demo in demos])
    beyond = np.abs(action[:, 1]) > 1
    clipped = convert("robomimic", tmp_path / "a.hdf5", tmp_path / "out", images="png").clipped
    ours = read_episodes(tmp_path / "out")
    same(ours.steps["action"], action.clip(-1, 1))
    assert clipped == beyond.sum() > 10 and np.abs(action).max() > 30
    assert sum(info.get("clipped_actions", 0) for info in ours.info) == clipped
    wide = Bounds((-1.0, -40.0), (1.0, 40.0))
    convert("robomimic", tmp_path / "a.hdf5", tmp_path / "wide", images="png", bounds=wide)
    same(read_episodes(tmp_path / "wide").steps["action"], action / [1.0, 40.0])
    with pytest.raises(DatasetError, match="actions have 2 elements, --low has 1 numbers"):
        convert("robomimic", tmp_path / "a.hdf5", tmp_path / "x", bounds=Bounds((-1.0,), (1.0,)))
    parts = {"right": {"input_type": "absolute"}}
    for absolute in ({"control_delta": False}, {"body_parts": parts}):
        with h5py.File(tmp_path / "a.hdf5", "a") as file:
            args = {"env_name": "Lift", "env_kwargs": {"controller_configs": absolute}}
            file["data"].attrs["env_args"] = json.dumps(args)
        with pytest.raises(DatasetError, match=r"are absolute poses, .*: --low and --high"):
            convert("robomimic", tmp_path / "a.hdf5", tmp_path / "x")
    convert("robomimic", tmp_path / "a.hdf5", tmp_path / "poses", images="png", bounds=wide)
    same(read_episodes(tmp_path / "poses").steps["action"], action / [1.0, 40.0])


def maniskill_file(
    path: Path, state: bool, observations: bool = True, mode: str = "", reach: float = 1.0
) -> list[dict[str, Any]]:
    done = []
    episodes = []
    with h5py.File(path, "w") as file:
        for i in range(3):
            steps = 4 + i
            one = file.create_group(f"traj_{i}")
            data: dict[str, Any] = {
                "qpos": RNG.normal(size=(steps + 1, 9)).astype(np.float32),
                "grasped": RNG.integers(0, 2, steps + 1).astype(bool),
                "rgb": RNG.integers(0, 255, (steps + 1, 8, 8, 3), dtype=np.uint8),
                "depth": RNG.integers(0, 9000, (steps + 1, 4, 4, 1)).astype(np.int16),
                "action": (reach * RNG.uniform(-1, 1, (steps, 7))).astype(np.float32),
                "reward": RNG.uniform(0, 1, steps).astype(np.float32),
                "success": np.arange(steps) == (steps - 1 if i < 2 else steps),
            }
            if observations and state:
                one["obs"] = data["qpos"]
            elif observations:
                one["obs/agent/qpos"] = data["qpos"]
                one["obs/extra/is_grasped"] = data["grasped"]
                one["obs/sensor_data/base_camera/rgb"] = data["rgb"]
                one["obs/sensor_data/base_camera/depth"] = data["depth"]
                one["obs/sensor_param/base_camera/intrinsic_cv"] = np.zeros((steps + 1, 3, 3))
            one["actions"], one["success"] = data["action"], data["success"]
            one["terminated"] = data["success"]
            one["truncated"] = np.arange(steps) == (steps if i < 2 else steps - 1)
            one["env_states/actors/cube"] = np.zeros((steps + 1, 13))
            if not state:
                one["rewards"] = data["reward"]
            done.append(data)
            episodes.append({"episode_id": i, "elapsed_steps": steps, "episode_seed": i})
    settings = {"obs_mode": "rgb", **({"control_mode": mode} if mode else {})}
    env = {"env_id": "PickCube-v1", "env_kwargs": settings, "max_episode_steps": 50}
    path.with_suffix(".json").write_text(json.dumps({"env_info": env, "episodes": episodes}))
    return done


def test_maniskills_controllers_tell_what_an_action_means(tmp_path: Path) -> None:
    """Actions of a delta controller are clipped as ManiSkill does; joint angles need their bounds,
    and come out of the environment as they were recorded."""
    file = tmp_path / "a.h5"
    data = maniskill_file(file, state=True, mode="pd_ee_delta_pose", reach=2.3)
    assert convert("maniskill", file, tmp_path / "delta", dt=0.1).clipped > 0
    flat, actions = read_episodes(tmp_path / "delta"), np.concatenate([d["action"] for d in data])
    same(flat.steps["action"], actions.clip(-1, 1))
    assert set(flat.spec.obs) == {"state"} and flat.spec.dt == pytest.approx(0.1)
    same(flat.steps["obs/state"], np.concatenate([one["qpos"][:-1] for one in data]))
    success = np.concatenate([one["success"] for one in data])
    same(flat.steps["reward"], success)  # where the file has no rewards
    data = maniskill_file(file, state=True, mode="pd_joint_pos", reach=2.3)
    actions = np.concatenate([one["action"] for one in data])
    with pytest.raises(DatasetError, match=r"bounds of their own.*: --low and --high \(env"):
        convert("maniskill", file, tmp_path / "joints")
    bounds = Bounds((-2.5,) * 7, (2.8,) * 7)
    words = ["--low", *bounds.low, "--high", *bounds.high]
    assert exit_of("demos", "convert", "maniskill", file, tmp_path / "joints", *words) == 0
    kept = read_episodes(tmp_path / "joints").steps["action"]
    assert np.abs(bounds.action((7,), "it").native(kept) - actions).max() < 1e-6


def test_actions_of_several_robots_of_maniskill(tmp_path: Path) -> None:
    data = maniskill_file(tmp_path / "two.h5", state=True)
    arms = ("panda-0", "panda-1")
    with h5py.File(tmp_path / "two.h5", "a") as file:
        for i, one in enumerate(data):
            del file[f"traj_{i}/actions"]
            for arm, part in zip(arms, np.split(one["action"], [3], 1), strict=True):
                file[f"traj_{i}/actions/{arm}"] = part
    convert("maniskill", tmp_path / "two.h5", tmp_path / "out")
    episodes = read_episodes(tmp_path / "out")
    same(episodes.steps["action"], np.concatenate([one["action"] for one in data]))
    native = Native.of(episodes.spec)
    assert native is not None
    given = native.act.native(episodes.steps["action"])
    assert [given[arm].shape[1] for arm in arms] == [3, 4]


def test_maniskill_groups(tmp_path: Path) -> None:
    data = maniskill_file(tmp_path / "trajectory.rgb.h5", state=False)
    convert("maniskill", tmp_path / "trajectory.rgb.h5", tmp_path / "out", images="png")
    ours = read_episodes(tmp_path / "out")
    camera = "sensor_data_base_camera"
    names = {"agent_qpos", "extra_is_grasped", f"{camera}_rgb", f"{camera}_depth"}
    assert set(ours.spec.obs) == names
    assert ours.spec.dt == pytest.approx(0.05) and ours.texts[0] == "PickCube-v1"
    for i, one in enumerate(data):
        rows, metres = ours.episode(i), one["depth"].astype(np.float32) / 1000
        kinds = {"agent_qpos": one["qpos"], "extra_is_grasped": one["grasped"]}
        for name, seen in {**kinds, f"{camera}_rgb": one["rgb"], f"{camera}_depth": metres}.items():
            same(rows[f"obs/{name}"], seen[:-1])
            same(rows[f"next_obs/{name}"], seen[-1])
        same(rows["action"], one["action"])
        same(rows["reward"], one["reward"])
        assert rows["success"].tolist() == one["success"].tolist()
        assert bool(rows["terminated"][-1]) == (i < 2) != bool(rows["truncated"][-1])


def test_maniskill_without_observations_is_one_clear_line(tmp_path: Path) -> None:
    maniskill_file(tmp_path / "t.h5", state=True, observations=False)
    with pytest.raises(DatasetError, match=r"obs_mode none.*replay_trajectory") as error:
        convert("maniskill", tmp_path / "t.h5", tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
    (tmp_path / "t.json").unlink()
    with pytest.raises(DatasetError, match=r"t\.json is missing"):
        convert("maniskill", tmp_path / "t.h5", tmp_path / "out")


def test_minari_bounds_pictures_and_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A goal dictionary, JPEG pictures, a mission, and actions in newtons."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    low, high = np.array([-2.0, 0.0, -np.inf]), np.array([6.0, 10.0, np.inf])
    picture_space = spaces.Box(0, 255, (16, 16, 3), np.uint8)
    goal = spaces.Dict({"place": spaces.Box(-9, 9, (2,), np.float64)})
    seen = spaces.Dict({"goal": goal, "picture": picture_space, "mission": spaces.Text(20)})
    place = RNG.normal(size=(6, 2))
    picture = np.full((6, 16, 16, 3), 77, np.uint8)
    action = np.array([[-2, 0, 4], [6, 10, -8], [2, 5, 0], [0, 5, 2], [4, 0, 2]], np.float64)
    end = np.arange(5) == 4
    buffer = EpisodeBuffer(
        observations={"goal": {"place": place}, "picture": picture, "mission": ["go"] * 6},
        actions=action,
        rewards=np.arange(5.0).tolist(),
        terminations=(~end & end).tolist(),
        truncations=end.tolist(),
        infos={"success": end},
    )
    both = {"observation_space": seen, "action_space": spaces.Box(low, high, dtype=np.float64)}
    minari.create_dataset_from_buffers("own/goal-v0", [buffer], **both)
    here, there = tmp_path / "minari/own/goal-v0", tmp_path / "out"
    with pytest.raises(DatasetError, match="no finite bounds: --low and --high"):
        convert("minari", here, there)
    bounds = Bounds((-2.0, 0.0, -8.0), (6.0, 10.0, 8.0))
    with pytest.raises(DatasetError, match=r"does not say the environment.*: --dt$"):
        convert("minari", here, there, bounds=bounds)
    convert("minari", here, there, dt=0.02, images="png", bounds=bounds)
    ours = read_episodes(tmp_path / "out")
    rows = ours.episode(0)
    same(rows["obs/goal/place"], place[:-1].astype(np.float32))
    same(rows["obs/picture"], picture[:-1])
    assert ours.texts == ("go",) and ours.spec.dt == pytest.approx(0.02)
    # (a - 2) / 4, (a - 5) / 5, and a / 8 where the bounds are the user's
    same(rows["action"], [[-1, -1, 0.5], [1, 1, -1], [0, 0, 0], [-0.5, 0, 0.25], [0.5, -1, 0.25]])
    assert rows["success"].tolist() == end.tolist() == rows["truncated"].tolist()


PAIR = spaces.Tuple([spaces.MultiBinary(2), spaces.Box(0, 8, (1,), np.float32)])
KEYS = {"gear": spaces.Discrete(3, start=1), "keys": spaces.MultiDiscrete([2, 4]), "pair": PAIR}
ACTIONS = spaces.Dict(KEYS)


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
@pytest.mark.parametrize("space", [ACTIONS, *ACTIONS.values()], ids=str)
def test_minari_actions_of_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: Any, data_format: str
) -> None:
    """They come out of the dataset as its own environment's actions, the tenth episode after the
    ninth."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    space.seed(0)
    actions = [space.sample() for _ in range(22)]
    buffers = [
        EpisodeBuffer(
            observations=np.full((3, 1), 0.01 * at, np.float32),
            actions=batched(space, actions[at : at + 2]),
            rewards=[0.0, float(at)],
            terminations=[False, True],
            truncations=[False, False],
        )
        for at in range(0, 22, 2)
    ]
    seen = spaces.Box(-1, 1, (1,), np.float32)
    both = {"observation_space": seen, "action_space": space}
    minari.create_dataset_from_buffers("own/all-v0", buffers, **both, data_format=data_format)
    made = convert("minari", tmp_path / "minari/own/all-v0", tmp_path / "out", dt=0.05)
    assert made == Converted(11)
    ours, native = read_episodes(tmp_path / "out"), action_of(space, "it")
    assert (ours.spec.act.shape, ours.spec.act.classes) == (native.leaf.shape, native.leaf.classes)
    assert ours.steps["reward"].tolist() == [r for at in range(0, 22, 2) for r in (0, at)]
    assert ours.steps["terminated"].tolist() == [False, True] * 11
    again = native.native(ours.steps["action"])
    for row, action in enumerate(actions):
        one, given = (flatten(space, each) for each in (native.one(again, row), action))
        np.testing.assert_allclose(one, given, atol=1e-5)


PICTURE = spaces.Box(0, 255, (40, 48, 3), np.uint8)
JOINTS = spaces.Box(-3, 3, (4,))
SPACES: list[tuple[spaces.Space[Any], spaces.Space[Any]]] = [
    (JOINTS, spaces.Box(-1, 1, (2,))),
    (spaces.Dict({"goal": spaces.Dict({"kettle": JOINTS}), "q": JOINTS}), spaces.Discrete(3)),
    (spaces.Box(0, 255, (3, 40, 48), np.uint8), spaces.Discrete(3, start=-1)),
    (spaces.Dict({"cam": spaces.Dict({"wrist": spaces.Box(0, 255, (3, 16, 20), np.uint8)})}),
     spaces.Box(-0.5, 7.25, (2, 3))),
    (spaces.Box(0, 255, (40, 48), np.uint8), spaces.Box(-2, 5, (1,), np.float64)),
    (spaces.Tuple((JOINTS, spaces.Discrete(4))), spaces.Discrete(2)),
    (spaces.Discrete(5, start=2), spaces.Box(0, 10, (2,), np.int64)),
    (spaces.MultiDiscrete([3, 4]), spaces.Box(0, 255, (1,), np.uint8)),
    (spaces.MultiBinary(4), spaces.Box(np.array([-2.0, 0.0]), np.array([1.0, 100.0]))),
    (spaces.Box(0, 255, (4, 36, 40, 3), np.uint8), spaces.Discrete(2)),
    (spaces.Dict({"state": JOINTS, "privileged_state": JOINTS}), spaces.Box(-1, 1, (2,))),
    (spaces.Dict({"eye": PICTURE, "say": spaces.Text(9)}), spaces.Discrete(2, start=5)),
]  # fmt: skip


class Foreign(gymnasium.Env[Any, Any]):
    """Random observations of SPACES[number]; an episode has 4 steps, 25 a second."""

    metadata: dict[str, Any] = {"render_fps": 25}  # noqa: RUF012

    def __init__(self, number: int) -> None:
        self.observation_space, self.action_space = SPACES[number]
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        seen = self.observation_space.sample()
        return seen, 1.0, False, self.count == 4, {"success": 0.4 + 0.1 * self.count}


gymnasium.register("Foreign-v0", f"{__name__}:Foreign", order_enforce=False)


def stacked(values: list[Any]) -> Any:
    """Nested observations one after the other, as Minari keeps them."""
    if isinstance(values[0], dict):
        return {key: stacked([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], tuple):
        return tuple(stacked(list(part)) for part in zip(*values, strict=True))
    return values if isinstance(values[0], str) else np.stack(values)


def written_by_minari(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two episodes of Foreign below `folder`, written by Minari; returns (observations, actions) as
    they were."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    env = gymnasium.make("Foreign-v0", number=number)
    env.observation_space.seed(1)
    env.action_space.seed(1)
    episodes, buffers = [], []
    for _ in range(2):
        seen, steps = [env.reset()[0]], list[Any]()
        acted = [env.action_space.sample() for _ in range(4)]
        for action in acted:
            obs, *step = env.step(action)
            seen.append(obs)
            steps.append(step)
        episodes.append((seen, acted))
        rewards, over, late, infos = map(list, zip(*steps, strict=True))
        told = {"success": np.array([0.0, *(info["success"] for info in infos)])}
        named = {"rewards": rewards, "terminations": over, "truncations": late, "infos": told}
        buffers.append(EpisodeBuffer(observations=stacked(seen), actions=np.stack(acted), **named))
    minari.create_dataset_from_buffers("own/foreign-v0", buffers, env=env, data_format="hdf5")
    return episodes


@pytest.mark.parametrize("number", usually(range(0, len(SPACES), 2), range(len(SPACES))))
def test_a_minari_dataset_fits_the_environment_that_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Same Spec, every observation as the adapter converts it, every action back as it was; a run
    trains on it without a mapping, and its agent takes what `env.reset` gave."""
    episodes = written_by_minari(tmp_path / "minari", number, monkeypatch)
    convert("minari", tmp_path / "minari/own/foreign-v0", tmp_path / "out", images="png")
    ours = read_episodes(tmp_path / "out")
    env = Gym(GymConfig("Foreign-v0", kwargs={"number": number}))
    require_same(env.spec, ours.spec, "environment", "dataset")
    native = Native.of(ours.spec)
    assert native is not None and native == Native.of(env.spec) and ours.spec.dt == 0.04
    for at, (seen, acted) in enumerate(episodes):
        rows = ours.episode(at)
        for entry in native.obs:
            raw = [entry.converted(np.asarray(entry.pick(one))) for one in seen]
            if "Box(0, 255, (40" in str(SPACES[number][0]) or entry.name == "eye":
                # Minari stores these as JPEG: other places of noise would differ by 85.
                difference = rows[f"obs/{entry.name}"].float().numpy() - np.stack(raw[:-1])
                assert np.abs(difference).mean() < 60
            else:
                same(rows[f"obs/{entry.name}"], np.stack(raw[:-1]))
                same(rows[f"next_obs/{entry.name}"], raw[-1])
        np.testing.assert_allclose(native.act.native(rows["action"]), acted, atol=1e-5)
        assert rows["success"].tolist() == [False, True, True, True]
    words = ["env=gym", "env.id=Foreign-v0", f"env.kwargs.number={number}", "learner=imitate"]
    words += [f"demos={tmp_path / 'out'}", f"out={tmp_path / 'run'}", "steps=2", "eval_every=null"]
    policy = "categorical" if native.act.discrete else "flow"
    agent = em.load(train([*words, f"policy={policy}", "learner.batch_size=4"]))
    own = gymnasium.make("Foreign-v0", number=number)
    assert agent.predict(own.reset()[0]) in own.action_space
    agent.reset()
    acted = agent.predict(stacked([own.reset()[0] for _ in range(3)]))
    assert len(acted) == 3 and all(np.asarray(each) in own.action_space for each in acted)


def test_an_episode_with_one_observation_too_few_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by_minari(tmp_path / "minari", 0, monkeypatch)
    folder = tmp_path / "minari/own/foreign-v0"
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        file["episode_1/observations"].resize((4, 4))
    line = r"data, episode 1: state has 4 observations and there are 4 actions"
    with pytest.raises(DatasetError, match=line):
        convert("minari", folder, tmp_path / "out")


def test_masks_choose_and_empty_demonstrations_are_left_out(tmp_path: Path) -> None:
    robomimic_file(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file["mask/train"] = np.array([f"demo_{i}" for i in range(9)], "S")
        file["mask/valid"] = np.array([f"demo_{i}" for i in range(9, 12)], "S")
        one = file["data/demo_3"]
        for name in ("actions", "rewards", "dones", "obs/robot0_eef_pos", "obs/agentview_image"):
            values = one.pop(name)[:0]
            one[name] = values
    made = convert("robomimic", tmp_path / "a.hdf5", tmp_path / "all", images="png")
    assert made == Converted(11, 0, ("demo_3",), {"train": 9, "valid": 3})
    assert read_episodes(tmp_path / "all").info[10] == {"demo": "demo_11", "masks": ["valid"]}
    words = ["robomimic", str(tmp_path / "a.hdf5"), str(tmp_path / "few"), "--mask", "valid"]
    assert exit_of("demos", "convert", *words) == 0
    assert read_episodes(tmp_path / "few").length.tolist() == [12, 13, 14]
    with pytest.raises(DatasetError, match=r'no mask vaild \(did you mean "valid"'):
        convert("robomimic", tmp_path / "a.hdf5", tmp_path / "x", mask="vaild")


def test_a_cut_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.h5"
    robomimic_file(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DatasetError, match=r"not a complete HDF5 file.*again") as error:
        convert("robomimic", path, tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_wrong_requests(tmp_path: Path) -> None:
    assert formats() == ["lerobot", "maniskill", "minari", "rlds", "robomimic", "zarr"]
    for kind, file, line in (
        ("robomimc", tmp_path, 'did you mean "robomimic"'),
        ("minari", tmp_path / "nothing", "does not exist"),
        ("minari", tmp_path, r"metadata\.json is missing"),
    ):
        with pytest.raises(DatasetError, match=line):
            convert(kind, file, tmp_path / "out")
    with h5py.File(tmp_path / "empty.hdf5", "w") as file:
        file.create_group("data")
    with pytest.raises(DatasetError, match="demo_0"):
        convert("robomimic", tmp_path / "empty.hdf5", tmp_path / "out")
    maniskill_file(tmp_path / "t.h5", state=True)
    convert("maniskill", tmp_path / "t.h5", tmp_path / "out")
    with pytest.raises(DatasetError, match="already"):
        convert("maniskill", tmp_path / "t.h5", tmp_path / "out")
