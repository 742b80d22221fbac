"""Gymnasium environments behind our contract, and ours as Gymnasium's and LeRobot's."""

from __future__ import annotations

import importlib.util
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.vec_env import DummyVecEnv

import embodied as em
from embodied.core import tensors
from embodied.core.env import NotFinite, NotSavable, VecEnv
from embodied.core.env_contract import require_masked_reset, require_start, require_tasks
from embodied.core.errors import ContractError
from embodied.envs.adapters.gymnasium_env import GymView
from embodied.envs.adapters.lerobot_env import LeRobotEnv
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.gym import Config, Gym
from embodied.envs.row_rng import row_seed
from embodied.training.collector import Collector
from tests.builders import make_policy, python
from tests.tiers import only_all
from tests.toy_envs import Reach


class Counter(gymnasium.Env):
    """Counts its steps; ends at 3 by itself, and says both kinds of end at once when told to."""

    observation_space = spaces.Dict(
        {
            "count": spaces.Box(0.0, 10.0, (1,), np.float64),
            "eye": spaces.Dict({"left": spaces.Box(0, 255, (3, 4, 5), np.uint8)}),
            "mode": spaces.Discrete(3, start=2),
            "words": spaces.Text(5),
        }
    )
    action_space = spaces.Box(np.array([0.0, -2.0]), np.array([10.0, 2.0]), dtype=np.float64)
    metadata = {"render_modes": [], "render_fps": 4}  # noqa: RUF012

    def __init__(self, both: bool = False, broken: bool = False) -> None:
        self.both, self.broken, self.count, self.got = both, broken, 0, []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.count = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.got.append(action)
        self.count += 1
        over = self.count == 3
        reward = float("nan") if self.broken and over else 1.5
        return self._obs(), reward, over, over and self.both, {"is_success": over}

    def _obs(self) -> dict[str, Any]:
        eye = np.zeros((3, 4, 5), np.uint8)
        eye[2, 1, 3] = self.count
        return {"count": [self.count], "eye": {"left": eye}, "mode": 3, "words": "hi"}


gymnasium.register("Counter-v0", Counter)


class Words(Counter):
    observation_space = spaces.Sequence(spaces.Discrete(3))


gymnasium.register("Words-v0", Words)


def push(env: VecEnv, generator: torch.Generator) -> torch.Tensor:
    n, act = env.num_envs, env.spec.act
    if act.dtype == "int64":
        return torch.randint(0, int(act.high) + 1, (n,), generator=generator)  # type: ignore[arg-type]
    return torch.rand((n, act.size), generator=generator) * 2 - 1


@pytest.mark.parametrize("name", ["Hopper-v5", "Pendulum-v1", "CartPole-v1"])
def test_numbers_are_gymnasiums(name: str) -> None:
    env, peers = Gym(Config(name, 2)), [gymnasium.make(name) for _ in range(2)]
    obs = env.reset(seed=4)
    for row, peer in enumerate(peers):
        first, _ = peer.reset(seed=row_seed(4, row))
        np.testing.assert_array_equal(obs["state"][row], first.astype(np.float32))
    generator, ends = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        action = push(env, generator)
        step = env.step(action)
        for row, peer in enumerate(peers):
            native: Any = int(action[row]) if action.ndim == 1 else action[row].numpy()
            native = native * 2 if name == "Pendulum-v1" else native
            seen, reward, *over, _ = peer.step(native)
            np.testing.assert_array_equal(step.next_obs["state"][row], seen.astype(np.float32))
            assert step.reward[row].item() == np.float32(reward)
            assert [bool(step.terminated[row]), bool(step.truncated[row])] == over
            if any(over):
                seen, _ = peer.reset()
                ends += 1
            np.testing.assert_array_equal(step.obs["state"][row], seen.astype(np.float32))
    assert ends >= 2


def test_nested_spaces_become_flat_leaves() -> None:
    env = Gym(Config("Counter-v0", 2))
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in env.spec.obs.items()} == {
        "count": ((1,), "float32"),
        "eye/left": ((4, 5, 3), "uint8"),
        "mode": ((), "int64"),
    }
    assert (env.spec.obs["mode"].low, env.spec.obs["mode"].high, env.spec.dt) == (2, 4, 0.25)
    env.reset(seed=0)
    seen = env.step(torch.zeros(2, 2)).next_obs
    assert seen["eye/left"][1, 1, 3].tolist() == [0, 0, 1] and seen["mode"].tolist() == [3, 3]


def test_actions_reach_the_native_bounds() -> None:
    env = Gym(Config("Counter-v0"))
    env.reset()
    for action in ([-1.0, 1.0], [0.5, 0.0], [7.0, -7.0]):
        env.step(torch.tensor([action]))
    world: Any = env.envs[0].unwrapped
    # low + (a + 1) / 2 * (high - low), and outside values are clipped.
    np.testing.assert_allclose(world.got, [[0.0, 2.0], [7.5, 0.0], [10.0, -2.0]])


def test_ended_rows_begin_again_and_keep_their_true_successor() -> None:
    env = Gym(Config("Counter-v0", 2, kwargs={"both": True}))
    env.reset(seed=0)
    env.step(torch.zeros(2, 2))
    obs = env.reset(mask=torch.tensor([False, True]))
    step = [env.step(torch.zeros(2, 2)) for _ in range(2)][-1]
    counts = [each["count"].flatten().tolist() for each in (obs, step.next_obs, step.obs)]
    assert counts == [[1, 0], [3, 2], [0, 2]]
    assert step.terminated.tolist() == step.log["success"].tolist() == [True, False]
    assert not step.truncated.any(), "terminated wins over truncated"


@pytest.mark.parametrize("wrap", [lambda env: env, gymnasium.wrappers.Autoreset])
@pytest.mark.parametrize(
    ("make", "steps", "last"),
    [
        (lambda: gymnasium.wrappers.TimeLimit(Counter(), 2), 2, 0.9),
        (Counter, 3, 0.0),
        (lambda: Counter(both=True), 3, 0.0),
    ],
    ids=["time", "task", "task and time"],
)
def test_what_ends_an_episode_decides_what_comes_after_it(
    make: Any, steps: int, last: float, wrap: Any
) -> None:
    """A task that has ended has no future, a clock cuts nothing off; the successor is the true
    last observation, also where a wrapper of Gymnasium begins episodes itself."""
    env = em.make_env(lambda: wrap(make()), num_envs=2)
    collector = Collector(env, make_policy("random.Random", env.spec), 0.9)
    rows = tensors.cat([collector.step()[0] for _ in range(10)])
    seen, after = (rows[key].flatten().tolist() for key in ("obs/count", "next_obs/count"))
    assert seen == [i % steps for i in range(10) for _ in range(2)]
    assert after == [i + 1 for i in seen]
    ended = torch.tensor(seen) == steps - 1
    assert rows["discount"].tolist() == torch.where(ended, last, 0.9).tolist()


class Docks(Counter):
    """Its task is where it counts from, in its own units."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    task_space = spaces.Box(np.array([10.0, 0.0]), np.array([30.0, 1.0]), dtype=np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.begin = 50.0 if options is None else options["task"][0]
        super().reset(seed=seed)
        return self._obs(), {}

    def _obs(self) -> Any:
        return np.array([self.begin + self.count], np.float32)


gymnasium.register("Docks-v0", Docks, max_episode_steps=100)


def test_tasks_of_a_task_space_come_as_options_in_its_own_units() -> None:
    env = Gym(Config("Docks-v0", 2))
    assert env.spec.task is not None and env.spec.task.shape == (2,)
    assert env.reset(0, torch.tensor([[0.0, 0.0], [0.25, 1.0]]))["state"].tolist() == [[10], [15]]
    env.step(torch.zeros(2, 2))
    one = torch.tensor([False, True])
    obs = env.reset(task=torch.ones(2, 2), mask=one)
    assert obs["state"].flatten().tolist() == [11, 30]
    step = [env.step(torch.zeros(2, 2)) for _ in range(2)][-1]
    assert step.obs["state"].flatten().tolist() == [50, 32], "a task lasts for one episode"
    require_tasks(env, 0, 2)
    require_masked_reset(env, 0, 2)
    Docks.task_space = spaces.Discrete(3)
    with pytest.raises(ContractError, match=r"task_space is Discrete\(3\), should be vectors"):
        Gym(Config("Docks-v0"))


def test_wrappers_with_a_state_of_their_own_are_named_at_the_start() -> None:
    wrappers, said = gymnasium.wrappers, list[str]()
    for wrap in (
        wrappers.NormalizeObservation,
        lambda env: wrappers.StickyAction(env, 0.25),
        wrappers.RecordEpisodeStatistics,  # has none
    ):
        env = em.make_env(lambda wrap=wrap: wrap(gymnasium.make("Pendulum-v1")))
        require_start(env, 0, said.append)
    first, second = said
    kept = "has a state of its own, which is neither saved nor shared with the evaluation"
    assert f"NormalizeObservation {kept}" in first
    assert first.endswith("leave it out: policies normalise observations themselves")
    assert second.endswith(f"StickyAction {kept}")


def test_unknown_worlds_cannot_be_saved() -> None:
    env = Gym(Config("Counter-v0"))
    env.reset()
    with pytest.raises(NotSavable, match="Counter-v0 cannot save its state"):
        env.get_state()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config("Hoper-v5"), "Gymnasium environment 'Hoper-v5'.*Hopper"),
        (Config("Pendulum-v1", kwargs={"gravety": 1}), "does not accept kwargs.*gravety"),
        (Config("Words-v0"), "Sequence are not supported"),
    ],
)
def test_mistakes_are_one_line(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Gym(config)
    assert "\n" not in str(caught.value)


def test_not_finite_is_an_error() -> None:
    env = Gym(Config("Counter-v0", 2, kwargs={"broken": True}))
    env.reset()
    for _ in range(2):
        env.step(torch.zeros(2, 2))
    with pytest.raises(NotFinite, match="action is not finite"):
        env.step(torch.full((2, 2), torch.nan))
    with pytest.raises(NotFinite, match=r"Counter-v0: reward is not finite in envs \[0, 1\]"):
        env.step(torch.zeros(2, 2))


def test_a_missing_package_says_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install '.+'"):
        Gym(Config("LunarLander-v3"))


def test_drawing_leaves_the_signals_alone() -> None:
    """SIGTERM ends a process that has drawn with pygame, which says nothing about displays."""
    ended = python(
        "-c",
        "import os, signal, time\nimport embodied as em\n"
        "env = em.make_env('Pendulum-v1'); env.reset(seed=0); env.render(0)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)",
    )
    assert ended.returncode == -signal.SIGTERM and "XDG_RUNTIME_DIR" not in ended.stderr


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1", "reach", "push", "lift", "insert"])
def test_gymnasium_checker_passes(name: str, flat: bool) -> None:
    ours = name.islower()
    env = Fr3(Fr3Config(task=name, num_envs=1)) if ours else Gym(Config(name))
    with warnings.catch_warnings():
        # Unbounded observations, and no registered id: advice, not errors.
        warnings.simplefilter("ignore")
        check_env(GymView(env, flat), skip_render_check=True)


def test_a_view_of_a_view_is_the_environment() -> None:
    """Gymnasium -> ours -> Gymnasium gives the original numbers, ends included."""
    view, peer = GymView(Gym(Config("CartPole-v1"))), gymnasium.make("CartPole-v1")
    seen, _ = view.reset(seed=7)
    peer.reset(seed=0)
    peer.unwrapped.state = seen.astype(np.float64)  # type: ignore[attr-defined]
    terminated = False
    while not terminated:
        obs, reward, terminated, truncated, _ = view.step(1)
        wanted = peer.step(1)
        np.testing.assert_allclose(obs, wanted[0], atol=1e-5)
        assert (reward, terminated, truncated) == wanted[1:4]
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        view.step(1)
    with pytest.raises(ValueError, match="got num_envs=2"):
        GymView(Gym(Config("CartPole-v1", num_envs=2)))


def test_reset_after_an_end_shows_the_episode_already_begun() -> None:
    view = GymView(Gym(Config("CartPole-v1", horizon=3)))
    view.reset(seed=0)
    for _ in range(3):
        obs, _, _, truncated, _ = view.step(0)
    begun, _ = view.reset()
    other, _ = view.reset()
    assert truncated
    assert not np.array_equal(begun, obs) and not np.array_equal(begun, other)


def peer(n: int) -> DummyVecEnv:
    return DummyVecEnv([lambda: GymView(Reach(1))] * n)


def mean_return(view: DummyVecEnv, choose: Callable[[Any], np.ndarray]) -> float:
    """The mean return of an episode of 20 steps under `choose(obs)`."""
    view.seed(100)
    obs, total = view.reset(), np.zeros(view.num_envs)
    for _ in range(20):
        obs, reward, _, _ = view.step(choose(obs))
        total += reward
    return float(total.mean())


@only_all
def test_stable_baselines_learns_to_reach() -> None:
    from stable_baselines3 import SAC

    torch.set_num_threads(1)
    network = {"gamma": 0.9, "ent_coef": 0.01, "policy_kwargs": {"net_arch": [64, 64]}}
    pace = {"learning_rate": 1e-3, "learning_starts": 400, "gradient_steps": 2, "batch_size": 128}
    model = SAC("MlpPolicy", peer(8), seed=0, **network, **pace)
    model.learn(2400)
    held_out, generator = peer(50), np.random.default_rng(0)
    random = mean_return(held_out, lambda obs: generator.uniform(-1, 1, (50, 2)).astype(np.float32))
    learned = mean_return(held_out, lambda obs: model.predict(obs, deterministic=True)[0])
    assert random < -10 and learned > -4, (learned, random)


def loaded() -> Any:
    file = Path(__file__).parents[2] / "plugins" / "envhub" / "env.py"
    spec = importlib.util.spec_from_file_location("envhub_env", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("apart", [False, True])
def test_the_file_makes_a_vector_environment(apart: bool) -> None:
    env = loaded().make_env(n_envs=2, use_async_envs=apart)
    try:
        obs, _ = env.reset(seed=3)
        assert set(obs) == {"agent_pos", "environment_state"}
        assert obs["agent_pos"].shape == (2, 2) and obs["agent_pos"].dtype == np.float32
        np.testing.assert_array_equal(obs["agent_pos"], obs["environment_state"])
        assert env.call("_max_episode_steps") == (100, 100)
        assert env.call("task_description")[0] == "go through a gap"
        ended, info = np.zeros(2, bool), {}
        while not ended.any():
            obs, _, terminated, truncated, info = env.step(env.action_space.sample())
            ended = terminated | truncated
        assert "is_success" in info["final_info"], "an episode has ended, and says how"
        assert env.observation_space.contains(obs)
    finally:
        env.close()


def test_images_are_pixels_and_critics_see_more() -> None:
    env = LeRobotEnv(em.make_env("fr3_lift_pixels", image_size=32), "lift the cube", 5)
    try:
        obs, _ = env.reset(seed=0)
        assert obs["pixels"]["front"].dtype == np.uint8
        assert not any(name.startswith(("critic", "privileged")) for name in obs)
        assert env.observation_space.contains(obs)
        ends = [env.step(env.action_space.sample())[2:4] for _ in range(5)]
        assert ends[-1][1] or any(end[0] for end in ends)
    finally:
        env.close()
