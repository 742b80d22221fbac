"""`import embodied as em`: names and objects of one's own, units of actions, saving, mistakes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn

import embodied as em
from embodied.core import build as core_build
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.errors import ContractError
from embodied.evaluation import evaluate
from embodied.policies.gaussian import Config, Gaussian
from embodied.policies.steering.dsrl import Dsrl
from embodied.serve.policy_service import PolicyService
from embodied.serve.server import Server
from embodied.training.logger import read_metrics
from tests.builders import Patch, node_of, python, write_files

SMALL = {"size": "debug", "verbose": False}


class Slide(gymnasium.Env[Any, Any]):
    """Slide a block to zero; the force is in newtons, from 0 to 20 (10 keeps it where it is)."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(0.0, 20.0, (1,), np.float32)
    handle: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.steps = self.np_random.uniform(-1, 1), 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.x += 0.02 * (float(action[0]) - 10)
        self.steps += 1
        return self._obs(), -abs(self.x), False, self.steps == 20, {}

    def _obs(self) -> Any:
        return np.array([self.x, self.steps / 20], np.float32)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> em.Agent:
    out = tmp_path_factory.mktemp("runs") / "slide"
    return em.train(env=Slide, learner="sac", out=str(out), **SMALL)


def play(agent: em.Agent, env: gymnasium.Env[Any, Any]) -> list[Any]:
    obs, _ = env.reset(seed=0)
    agent.reset()
    actions: list[Any] = []
    for _ in range(5):
        actions.append(agent.predict(obs))
        obs, *_ = env.step(actions[-1])
    return actions


def test_a_class_of_ones_own_trains_and_acts_in_its_own_units(agent: em.Agent) -> None:
    actions = play(agent, Slide())  # which asserts that they are in its space
    assert np.std(actions) > 0 and np.mean(actions) > 1.5, "in newtons, not in [-1, 1]"
    played = em.rollout(agent, Slide, steps=3)
    assert torch.equal(played["obs/state"][1], played["next_obs/state"][0])


def test_predict_is_the_policys_action_in_newtons(agent: em.Agent) -> None:
    obs = np.array([[0.5, 0.1], [-0.5, 0.2]], np.float32)
    agent.reset()
    got = agent.predict(obs)
    noise = torch.zeros_like(agent.policy.sample_noise(2))
    unit, _ = agent.policy.act({"state": torch.from_numpy(obs)}, {}, noise)
    assert np.allclose(got, 10 + 10 * unit[:, 0].detach().numpy(), atol=1e-5)
    with pytest.raises(ConfigError, match=r"1 observations after 2: call reset\(\)"):
        agent.predict(obs[:1])


def test_a_run_is_loaded_as_it_was(agent: em.Agent) -> None:
    before = play(agent, Slide())
    for again in (em.load(agent.folder or ""), em.load(str(agent.folder), env=Slide())):
        assert np.array_equal(before, play(again, Slide()))


PREDICTS = """
import sys
import embodied as em
for folder in sys.argv[1:]:
    print(em.load(folder).predict([0.5, 0.1])[0])
em.evaluate(em.load(sys.argv[1]), episodes=1)
"""


def test_another_process_loads_what_acts_the_same_and_asks_for_the_object(
    agent: em.Agent, tmp_path: Path
) -> None:
    """Of the run, of a saved agent and of a checkpoint that was copied out of its run."""
    run = agent.folder or Path()
    saved, copied = em.save(agent, tmp_path / "saved"), tmp_path / "copied"
    shutil.copytree(checkpoint.find(run), copied)
    agent.reset()
    here = float(agent.predict([0.5, 0.1])[0])
    done = python("-c", PREDICTS, run, saved, copied)
    assert [float(line) for line in done.stdout.split()] == pytest.approx([here] * 3, abs=1e-5)
    assert "ConfigError: python/Slide-v0 was an object of the Python program" in done.stderr


class Counted(Slide):
    """Knows how many of it were made and closed; it renders, and dies when it is closed."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}
    made = closed = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.open = True

    def __deepcopy__(self, memo: Any) -> Counted:
        return type(self)()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.open, "it is not connected any more"
        return super().step(action)

    def close(self) -> None:
        type(self).closed += self.open
        self.open = False


def test_one_object_is_stepped_itself_and_stays_open_and_copies_are_closed(tmp_path: Path) -> None:
    env = Counted()
    made = em.train(env=env, learner="ppo", out=str(tmp_path), **SMALL)
    assert env.open and Counted.made - Counted.closed == 1 and Counted.made > 1
    result = em.evaluate(made, episodes=4, num_envs=2)
    assert len(result.returns) == 4 and str(result).startswith("return -")


def test_a_simulator_of_one_instance_is_enough(tmp_path: Path) -> None:
    """Trained, evaluated in between and filmed, all in the one object."""
    env, before = Counted(), Counted.made
    with pytest.raises(ConfigError, match="log-probabilities"):  # a refused run gives it back, too
        em.train(env=env, num_envs=1, learner="ppo", policy="gaussian", **SMALL)
    one = {"env": env, "num_envs": 1, "steps": 120, "eval_every": 50, "eval": {"episodes": 2}}
    for learner in ("ppo", "sac"):
        made = em.train(learner=learner, out=str(tmp_path / learner), **one, **SMALL)
        assert env.open and Counted.made == before, "no other one was made"
        rows = read_metrics(tmp_path / learner)
        assert [row["step"] for row in rows if "eval/return" in row] == [50, 100, 120]
        assert all(row.get("train/length", 20) == 20 for row in rows), "no episode was cut"
    assert len(em.evaluate(made, env, episodes=2, num_envs=1).returns) == 2
    assert env.open and Counted.made == before
    two = {"env": Counted, "learner": "ppo", "out": str(tmp_path / "two"), **SMALL}
    shared = {"eval.shared": True, "eval.num_envs": 1, "env.num_envs": 2}
    with pytest.raises(ConfigError, match=r"eval.shared .* has 2 parallel ") as told:
        em.train(**two, **shared)
    key, _, value = str(told.value).rpartition(": ")[2].partition("=")
    em.train(**two, **{**shared, key: int(value)})


class Several:
    possible_agents = ("a", "b")


class Plain:
    reset = step = None


class Tasked(Counted):
    task_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    made = closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x = self.x if options is None else float(options["task"][0])
        return self._obs(), {}


def test_a_teacher_chooses_tasks_of_a_gymnasium_environment_and_all_are_closed(
    tmp_path: Path,
) -> None:
    teacher = {"name": "selfpaced", "value": "critic", "every": 2, "returns": [-20, 0]}
    em.train(env=Tasked, num_envs=2, learner="ppo", teacher=teacher, out=str(tmp_path), **SMALL)
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert rows and all(0 <= row["task"][0] <= 1 and row["length"] == 20 for row in rows)
    assert Tasked.made == Tasked.closed > 2


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (None, "env is NoneType: give a name"),
        (int, "env is the class int: give a name"),
        (Several(), "env is Several of several agents, and one policy acts here"),
        (Plain, "env is the class Plain, which is no gymnasium.Env: derive its class"),
        ([], "env is list: give a name"),
        ([Slide, int], "env is the class int: give a name"),
        (lambda: gymnasium.make_vec("Pendulum-v1", num_envs=3), "SyncVectorEnv of 3 environments"),
        (lambda: None, "env is NoneType"),
        (DummyVecEnv([Slide]), "env is DummyVecEnv of 1 environments"),
        (lambda: Slide(1), "python/lambda-v0 is not made: .*takes"),
        ({"num_envs": 2}, 'env needs a name: env={"name": NAME, ...}'),
    ],
)
def test_what_is_no_single_environment_is_said_in_one_line(given: Any, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line).replace(r"\.\*", ".*")) as caught:
        em.make_env(given)
    assert "\n" not in str(caught.value)


def test_several_environments_are_asked_for_in_several_ways() -> None:
    several = [
        em.make_env(lambda: gymnasium.make("Pendulum-v1"), num_envs=3),
        em.make_env(gymnasium.make_vec("Pendulum-v1", num_envs=3)),
        em.make_env({"name": "Pendulum-v1", "num_envs": 3}),
        em.make_env({"name": "two_gap", "num_envs": 3}),
    ]
    assert [env.num_envs for env in several] == [3] * 4


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ({"policy": nn.Conv2d}, r"Conv2d does not take observations \[n, 2\]: "),
        ({"policy": lambda obs: obs}, r"lambda does not take observations .* positional"),
        ({"reward": nn.Linear}, r"reward is the class Linear: give a name .* a Reward"),
        ({"replay": lambda: 0}, "replay is function: give a name"),
    ],
)
def test_what_is_no_part_of_a_run_is_said_in_one_line(part: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        em.train(env=Slide, learner="sac", **part)


class Endless(Slide):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info


class Told(Slide):
    """Says whether it is a success in the last step only."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, over, late, _ = super().step(action)
        return obs, reward, over, late, {"is_success": True} if late else {}


def test_an_environment_that_never_ends_is_one_line(monkeypatch: Patch) -> None:
    monkeypatch.setattr(evaluate, "LONGEST", 300)
    agent = em.Agent(em.make_policy("gaussian", em.make_env(Endless)))
    with pytest.raises(ContractError, match="no episode has ended in 300 steps: give") as told:
        em.evaluate(agent, Endless, episodes=1)
    word, _, code = str(told.value).partition("time limit, ")[2].partition(" (in Python: ")
    limited = eval(code[:-1], {"gymnasium": gymnasium, "env": Endless(), "N": 20})
    assert word == "env.horizon=N"
    for env in (limited, em.make_env(Endless, horizon=20)):
        assert em.evaluate(agent, env, episodes=1).lengths.tolist() == [20]


def test_an_object_that_cannot_be_copied_asks_for_a_function() -> None:
    env = Slide()
    env.handle = (each for each in ())  # generators refuse
    with pytest.raises(ConfigError, match=r"function .* env=lambda: MyEnv.*alone: num_envs=1"):
        em.make_env(env, num_envs=2)
    assert em.make_env(lambda: Slide(), num_envs=2).num_envs == 2
    assert em.make_env(env, num_envs=1).reset(0)["state"].shape == (1, 2)


def test_what_only_the_last_step_says_is_false_before() -> None:
    policy = em.make_policy("gaussian", em.make_env(Told))
    played = em.rollout(policy, Told, steps=25)
    assert played["success"].flatten().tolist() == [False] * 19 + [True] + [False] * 5
    won = em.evaluate(em.Agent(policy), Told, episodes=2).success
    assert won is not None and won.tolist() == [True, True]


def test_a_torch_module_is_a_policy(tmp_path: Path) -> None:
    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))

    made = em.train(env=Slide, learner="td3", policy=module(), out=str(tmp_path), **SMALL)
    again = em.load(tmp_path, module=module())
    assert np.array_equal(play(made, Slide()), play(again, Slide()))
    for wrong, line in (
        (nn.Linear(2, 3), r"returns \[2, 3\] for 2 observations, not \[2, 1\]"),
        (nn.Linear(5, 1), r"does not take observations \[n, 2\]"),
    ):
        with pytest.raises(ConfigError, match=line):
            em.make_policy(wrong, em.make_env(Slide))


def test_names_ids_and_settings() -> None:
    env = em.make_env("two_gap", num_envs=3)
    assert len(env.reset(0)["state"]) == 3 and em.make_env(env) is env
    policy = em.make_policy("flow", env, chunk=4, width=32)
    assert em.make_learner({"name": "imitate", "lr": 1e-4}, policy).node["lr"] == 1e-4
    for call, line in (
        (lambda: em.make_env("Pendulum-v7"), "there is no environment"),
        (lambda: em.make_env(env, num_envs=4), "made already"),
        (lambda: em.list("sacs"), 'there is no group "sacs"'),
    ):
        with pytest.raises(ConfigError, match=line):
            call()


def test_a_policy_built_directly_is_saved(tmp_path: Path) -> None:
    env = em.make_env("Pendulum-v1")
    policy = Gaussian(Config(hidden=(8,)), env.spec)
    again = em.load(em.save(policy, tmp_path / "mine"))
    assert again.folder is None
    pairs = zip(policy.parameters(), again.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len(em.evaluate(again, env="Pendulum-v1", episodes=2).returns) == 2
    with pytest.raises(ConfigError, match="belongs to no run: give the environment"):
        em.evaluate(policy)


def test_a_run_acts_with_as_many_steps_of_a_chunk_as_it_was_trained_with(tmp_path: Path) -> None:
    env = em.make_env("two_gap", num_envs=2)
    policy = em.make_policy("deterministic", env, hidden=[8], chunk=4)
    em.save(policy, tmp_path / "checkpoints" / "00000100")
    settings = {"format": 1, "execute": 1, "env": node_of("envs.toy.two_gap.TwoGap")}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    alone, seen = em.load(em.save(policy, tmp_path / "alone")), np.zeros((3, 2), np.float32)
    seen[1:] = 0.5
    for agent, new in ((em.load(tmp_path), True), (alone, False)):
        acted = [agent.predict({"state": one}).tolist() for one in seen]
        assert (acted[1] == acted[2]) == new, "it decides anew in every step"
    one = evaluate.evaluate(policy.eval(), env, 4, 10_000, execute=1).change
    whole = evaluate.evaluate(policy, env, 4, 10_000).change
    found = em.evaluate(tmp_path, env=env, episodes=4).change
    assert one is not None and whole is not None and found is not None
    assert torch.equal(found, one) and not torch.equal(found, whole)
    played = em.rollout(em.load(tmp_path), env, steps=3)
    assert torch.equal(
        played["action"][2],
        policy.act({"state": played["obs/state"][2]}, {}, policy.sample_noise(2))[0][:, 0],
    )


def test_an_address_where_a_run_can_be(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(core_build, "ASKED", [])
    policy = em.make_policy("flow", em.make_env("two_gap"), width=16, chunk=4).eval()
    folder = em.save(policy, tmp_path / "mine")
    with Server(PolicyService(policy), port=0) as server:
        returns = [
            em.evaluate(run, env="two_gap", episodes=4, num_envs=2).returns.tolist()
            for run in (server.url, folder)
        ]
        assert returns[0] == returns[1]
        agents = [em.load(server.url), em.load(server.url, env="two_gap"), em.load(folder)]
        acted: list[Any] = []
        for agent in agents:
            torch.manual_seed(0)
            acted.append(agent.predict({"state": np.zeros(2, np.float32)}).tolist())
        assert acted == [acted[0]] * 3
        with pytest.raises(ConfigError, match="name the environment"):
            em.evaluate(server.url)
        with pytest.raises(ConfigError, match="leave module out"):
            em.load(server.url, module=nn.Linear(2, 2))
        inner = node_of("policies.gaussian.Gaussian", hidden=[8])
        steered = Dsrl.wrap(agents[0].policy, node_of("policies.steering.dsrl.Dsrl"), inner)
        saved = em.save(steered, tmp_path / "steered")
        monkeypatch.setattr(core_build, "ASKED", [])
        with pytest.raises(ConfigError, match=r'allow=\["embodied.policies.remote"\]'):
            em.load(saved)
        assert em.load(saved, allow=["embodied.policies.remote"]).policy.chunk == 4


def test_the_package_imports_without_torch_and_says_its_version() -> None:
    said = "import embodied, sys; assert 'torch' not in sys.modules; print(embodied.__version__)"
    done = python("-c", said)
    assert done.stdout.strip() == em.__version__
    assert all(getattr(em, name).__doc__ for name in em.__all__)


def test_an_environment_of_an_allowed_package_by_name(tmp_path: Path, monkeypatch: Patch) -> None:
    """`allow` counts before the usual policy is chosen, which builds the environment."""
    slides = "import gymnasium\nfrom tests.api.test_api import Slide\n"
    files = {
        "env/slide.yaml": "_target_: embodied.envs.gym.Gym\nid: slides:Slide-v0\n",
        "slides.py": f'{slides}gymnasium.register("Slide-v0", entry_point=Slide)\n',
    }
    write_files(tmp_path, files)
    monkeypatch.setenv("EMBODIED_CONFIGS", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    how = {"env": "slide", "learner": "sac", "out": str(tmp_path / "run"), **SMALL}
    with pytest.raises(ConfigError, match=r'allow=\["slides"\]'):
        em.train(**how)
    assert em.train("allow=[slides]", **how).folder == tmp_path / "run"
