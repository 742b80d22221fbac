"""Environments in another process: numbers, seeds, states, bad workers; mjlab where it is."""

from __future__ import annotations

import json
import sys
from itertools import cycle
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces

from embodied.core.build import ConfigError, build
from embodied.core.env import NotFinite, NotSavable, VecEnv
from embodied.core.saved_node import require_inside
from embodied.envs.gym import Config as GymConfig
from embodied.envs.gym import Gym
from embodied.envs.gym_object import register
from embodied.envs.process import env as process_env
from embodied.envs.process.env import GymnasiumProcess, WorkerError, checked_spec, interpreter
from embodied.envs.process.worker.gymnasium_rows import Rows
from embodied.envs.process.worker.memory import mapped, total
from tests.api.test_choices import SPACES
from tests.builders import make_policy
from tests.envs.test_spaces import ACTIONS, NUMBERS, PICTURES
from tests.toy_envs import Lock


def made(**settings) -> GymnasiumProcess:
    return GymnasiumProcess(
        process_env.GymnasiumConfig(**{"id": "Pendulum-v1", "num_envs": 3, **settings})
    )


def seeds(seed: int) -> list[int]:
    """The words that the first two rows begin with."""
    words = [np.random.SeedSequence((seed, row, 1)).generate_state(1)[0] for row in (0, 1)]
    return [int(word) >> 1 for word in words]


def test_the_numbers_are_those_of_the_package_here() -> None:
    env = made(num_envs=2, horizon=50)
    obs = env.reset(seed=7)
    own = [gymnasium.make("Pendulum-v1") for _ in range(2)]
    for row, (one, seed) in enumerate(zip(own, seeds(7), strict=True)):
        assert np.array_equal(one.reset(seed=seed)[0], obs["state"][row].numpy())
    for action in torch.rand(20, 2, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1:
        step = env.step(action)
        for row, one in enumerate(own):
            after, reward, over, _, _ = one.step(2 * action[row].numpy())
            np.testing.assert_allclose(step.next_obs["state"][row], after, atol=1e-6)
            assert step.reward[row].item() == pytest.approx(float(reward), rel=1e-6)
            assert not over
    assert env.spec.dt == pytest.approx(0.05)
    env.close()


def test_a_state_that_does_not_repeat_is_refused() -> None:
    env = made(horizon=6)
    env.reset(seed=2)
    state = env.get_state()
    with pytest.raises(NotSavable, match="does not repeat"):
        env.set_state({**state, "obs/state": state["obs/state"].roll(1, 0)})
    env.close()


def test_discrete_actions_and_terminations() -> None:
    env = made(id="CartPole-v1", num_envs=2)
    env.reset(seed=0)
    assert env.spec.act.dtype == "int64" and env.spec.act.high == 1
    ends = [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(12)]
    assert any(step.terminated.any() for step in ends)
    assert not any(step.truncated.any() for step in ends)
    env.close()


class Still(gymnasium.Env):
    """Nothing happens between these spaces."""

    def __init__(self, obs: spaces.Space, act: spaces.Space) -> None:
        self.observation_space, self.action_space = obs, act

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


def test_it_describes_an_environment_as_the_adapter_of_this_process() -> None:
    """Spaces, names, paths and bounds; only a picture's bounds may be left out."""
    pictures = [spaces.Box(low, high, shape, kind) for shape, kind, low, high, _ in PICTURES]
    ends = [spaces.Box(-np.arange(1, 4.0), np.arange(3.0)), spaces.Tuple([spaces.Discrete(2)] * 2)]
    masked = spaces.Dict({"action_mask": spaces.MultiBinary((3, 4))}), spaces.MultiDiscrete([3, 4])
    for obs, act in [*zip([*NUMBERS, *pictures, *ends], cycle(ACTIONS), strict=False), masked]:
        name = register(lambda obs=obs, act=act: Still(obs, act))
        settings = {"id": name, "module": "", "kwargs": {}, "horizon": None}
        said = json.loads(json.dumps(Rows(settings, 1).spec))
        here, there = Gym(GymConfig(name)).spec, checked_spec(said, 1, "")
        assert there == here and there.native == here.native, (obs, act)


class Told(Still):
    """Success is in the last info of an episode alone."""

    def step(self, action):
        last = bool(action)
        return self.reset()[0], 0.0, last, False, {"is_success": True} if last else {}


def test_a_success_is_of_its_own_step() -> None:
    name = register(lambda: Told(spaces.Box(0, 1, (2,)), spaces.Discrete(2)))
    rows = Rows({"id": name, "module": "", "kwargs": {}, "horizon": None}, 1)
    names = ("action/0", "next_obs/state", "reward", "terminated", "truncated", "success")
    arrays = {name: np.zeros((1, 2) if "state" in name else 1) for name in names}
    arrays |= {"obs/state": np.zeros((1, 2)), "success_known": np.zeros(1, bool)}
    told = []
    for action in (0, 1, 0, 1):
        arrays["action/0"][0] = action
        rows.step(arrays, [0])
        told.append(bool(arrays["success"][0]))
    assert told == [False, True, False, True]


@pytest.mark.parametrize("kind", ["MultiDiscrete", "Tuple", "Dict"])
def test_structured_actions_and_their_mask(kind: str, tmp_path: Path) -> None:
    """The mask is in the info, nested as the action; `Lock` refuses what is masked."""
    places = f"{tmp_path}:{Path(__file__).parents[2]}"
    python = tmp_path / "python"  # without -I, so that it finds the module
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={places} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "locks.py").write_text(
        "import gymnasium\nfrom tests.api.test_choices import SPACES\n"
        "from tests.toy_envs import Lock\n"
        'gymnasium.register("Lock-v0", entry_point=lambda kind: Lock(SPACES[kind], "info"))\n'
    )
    env = made(id="Lock-v0", module="locks", kwargs={"kind": kind}, num_envs=2, python=str(python))
    own = [Lock(SPACES[kind], "info") for _ in range(2)]
    act = own[0].act
    assert env.native is not None and env.native.act == act
    obs, policy = env.reset(seed=7), make_policy("random.Random", env.spec)
    for one, seed in zip(own, seeds(7), strict=True):
        one.reset(seed=seed)
    for _ in range(4):
        unit = policy.act(obs, {}, policy.sample_noise(2))[0][:, 0]
        step, native = env.step(unit), act.native(unit)
        torch.testing.assert_close(act.unit(native), unit)
        obs = step.obs
        for row, one in enumerate(own):
            seen, reward, _, _, info = one.step(act.one(native, row))
            assert step.reward[row].item() == pytest.approx(reward)
            assert np.array_equal(step.next_obs["state"][row], seen["state"])
            assert np.array_equal(step.next_obs["action_mask"][row], act.mask(info["action_mask"]))
    assert torch.equal(env.set_state(env.get_state())["action_mask"], obs["action_mask"])
    env.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"id": "NoSuch-v0"}, r"NoSuch-v0 cannot start .* env\.python=PATH"),
        ({"module": "no_such_package"}, r"No module named 'no_such_package'"),
        ({"python": "/no/such/python"}, r"cannot start /no/such/python"),
        ({"num_envs": 0}, r"num_envs must be at least 1"),
        ({"apart": "nowhere"}, r"nowhere is not here .*scripts/apart\.sh nowhere"),
    ],
)
def test_mistakes_are_one_line(settings: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made(**settings)


def test_actions_are_checked_before_they_are_sent() -> None:
    env = made()
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        env.step(torch.zeros(3, 1))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"action is \(2, 1\)"):
        env.step(torch.zeros(2, 1))
    with pytest.raises(NotFinite):
        env.step(torch.full((3, 1), float("nan")))
    env.close()
    wrong = {"id": "tests.checks.wrong_gym_envs:ObsChoice-v0", "module": None, "horizon": None}
    with pytest.raises(ValueError, match=r"observation state has numbers from 1 to 7, which are"):
        Rows({**wrong, "kwargs": {}}, 1)


def test_a_worker_that_dies_is_named_with_its_last_words(monkeypatch) -> None:
    env = made()
    env.reset(seed=0)
    env.channel.process.kill()
    env.channel.process.wait()  # so that its pipe is broken, whatever the load
    with pytest.raises(WorkerError, match=r"ended \(exit code -9\)"):
        env.step(torch.zeros(3, 1))
    env.close()
    monkeypatch.setattr(process_env, "START", "raise SystemExit('the disk is full')")
    with pytest.raises(ConfigError, match="the disk is full"):
        made()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("print('hello', flush=True); input()", "answered no JSON: b'hello'"),
        ("print('[1]', flush=True); input()", "no JSON object"),
        ("print('x' * 3_000_000, flush=True); input()", "too long"),
        ("import time; time.sleep(30)", "did not answer in 0.5 s"),
    ],
)
def test_what_a_worker_answers_is_data(monkeypatch, script: str, says: str) -> None:
    monkeypatch.setattr(process_env, "START", script)
    talk = process_env.Channel(sys.executable, 0.5 if "sleep" in script else 60.0)
    with pytest.raises(WorkerError, match=says):
        talk.ask({"backend": "gymnasium_rows"})
    talk.process.kill()
    talk.close()


ACT = {"shape": [1], "dtype": "float32", "low": -1, "high": 1}


def seen(shape: int, dtype: str = "float32") -> dict:
    return {"obs": {"a": {"shape": [shape], "dtype": dtype, "low": None, "high": None}}}


@pytest.mark.parametrize(
    "wrong", [None, {"obs": {}}, seen(1, "object"), seen(-1), seen(1 << 40, "uint8")]
)
def test_a_described_environment_is_checked(wrong) -> None:
    with pytest.raises(WorkerError):
        checked_spec({"act": ACT, "dt": 1.0, **wrong} if wrong else wrong, 2, "")


def test_the_shared_file_must_be_as_large_as_its_layout(tmp_path: Path) -> None:
    layout = [("a", "float32", [3, 2]), ("b", "bool", [5])]
    file = tmp_path / "memory"
    file.write_bytes(bytes(total(layout)))
    one, other = mapped(str(file), layout), mapped(str(file), layout)
    one["a"][:], one["b"][4] = 7.0, True
    assert (other["a"] == 7).all() and other["b"].tolist() == [False] * 4 + [True]
    file.write_bytes(bytes(8))
    with pytest.raises(ValueError, match="smaller"):
        mapped(str(file), layout)


def test_no_file_is_left_and_a_saved_run_does_not_start_programs() -> None:
    env = made()
    assert not list(process_env.SHARED.glob("embodied_env_*")) or not process_env.SHARED.is_dir()
    env.close()
    assert env.channel.process.returncode is not None
    node = {"_target_": "embodied.envs.process.env.GymnasiumProcess", "python": "/tmp/evil"}
    with pytest.raises(ConfigError, match=r"allow=\[\"embodied\.envs\.process\"\]"):
        require_inside(node, "run.yaml")


def test_without_mjlab_the_error_says_what_to_type(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EMBODIED_MJLAB_PYTHON", raising=False)
    with pytest.raises(ConfigError, match=r"install it with: sh scripts/apart\.sh mjlab"):
        process_env.Mjlab(process_env.MjlabConfig(task="Mjlab-Cartpole-Balance"))


@pytest.fixture(scope="module")
def cartpole():
    try:
        python = interpreter("mjlab")
    except ConfigError as error:
        pytest.skip(str(error))
    config = process_env.MjlabConfig("Mjlab-Cartpole-Balance", 4, python, device="cpu", horizon=5)
    env = process_env.Mjlab(config)
    yield env
    env.close()


def test_mjlab_steps_and_truncates_with_its_true_successor(cartpole) -> None:
    assert cartpole.reset(seed=1)["state"].shape[0] == 4
    still = torch.zeros(4, *cartpole.spec.act.shape)
    steps = [cartpole.step(still) for _ in range(6)]
    assert [bool(step.truncated.all()) for step in steps] == [False] * 4 + [True, False]
    assert not torch.equal(steps[4].obs["state"], steps[4].next_obs["state"])
    assert all(step.reward.isfinite().all() for step in steps) and not steps[5].ended.any()


def test_mjlab_repeats_with_its_seed_and_cannot_save(cartpole) -> None:
    shape = (6, 4, *cartpole.spec.act.shape)
    plan = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    runs = []
    for seed in (1, 1, 2):
        cartpole.reset(seed)
        runs.append(torch.stack([cartpole.step(action).next_obs["state"] for action in plan]))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    with pytest.raises(NotSavable):
        cartpole.get_state()


def test_pusht_in_a_python_of_its_own() -> None:
    try:
        interpreter("pusht")
    except ConfigError as reason:
        pytest.skip(str(reason))
    node = yaml.safe_load(Path("configs/env/pusht.yaml").read_text())
    env = build(node | {"num_envs": 2, "horizon": 4}, VecEnv)
    shapes = {name: leaf.shape for name, leaf in env.spec.obs.items()}
    assert shapes == {"environment_state": (16,), "agent_pos": (2,)} and env.spec.dt == 0.1
    env.reset(seed=0)
    step = [env.step(torch.zeros(2, 2)) for _ in range(4)][-1]
    # Actions are absolute positions on a board of 512: the middle for 0.
    assert (step.next_obs["agent_pos"] - 256).abs().max() < 128
    assert step.truncated.all() and "success" in step.log
    env.close()
    env = build(node | {"num_envs": 1, "kwargs": {"obs_type": "pixels_agent_pos"}}, VecEnv)
    seen = env.reset(seed=0)["pixels"]
    assert seen.shape == (1, 96, 96, 3) and seen.dtype == torch.uint8 and seen.max() > 200
    env.close()
