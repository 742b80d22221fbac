"""Classes, objects, functions, networks and arrays that a Python program gives; what an agent does
by itself, callbacks, notebooks, and the words of other libraries."""

from __future__ import annotations

import re
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import embodied as em
from embodied.api.arrays import write_episodes
from embodied.compose import option, options, search_folders
from embodied.core.build import ConfigError, build, resolve
from embodied.core.reward import Reward
from embodied.core.spec import SpecMismatch
from embodied.datasets.lerobot.reader import read_episodes
from embodied.learners.imitation.behavior_cloning import BehaviorCloning
from embodied.policies.gaussian import Gaussian
from embodied.policies.networks.encoders import Encoder
from embodied.teachers.tasks.uniform import Uniform
from embodied.teachers.teacher import Curriculum, EpisodeLog, TaskWrapper
from embodied.training.logger import read_metrics
from tests.api.test_api import Slide, Tasked
from tests.builders import python
from tests.tiers import usually
from tests.toy_envs import Reach

SMALL = {"size": "debug", "verbose": False, "video": False}


class Effort(Reward):
    frozen = True

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, transitions: dict[str, Tensor]) -> Tensor:
        return -self.weight * transitions["action"].square().sum(1)


class Own(Gaussian):
    """A policy of one's own."""


class Halving(Uniform):
    def propose(self, n: int) -> Any:
        return [(point / 2, memo) for point, memo in super().propose(n)]


def make_net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Features(Encoder):
    def __init__(self, obs: Any, *settings: Any, **more: Any) -> None:
        super().__init__(obs, *settings, **more)
        self.net = nn.Linear(obs["state"].size, 4)
        self.size = 4

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return torch.tanh(self.net(self.norm(obs["state"])))


PARTS: list[dict[str, Any]] = [
    {"reward": lambda batch: -batch["obs/state"][:, 0].abs()},
    {"reward": Effort(2.0), "policy": Own},
    {"reward": {"name": Effort, "weight": 0.5}, "policy": {"name": Own, "hidden": [8]}},
]


@pytest.mark.parametrize("parts", PARTS, ids=("function", "object", "class"))
def test_parts_may_be_given_themselves(parts: dict[str, Any], tmp_path: Path) -> None:
    agent = em.train(env=Slide, learner="sac", out=str(tmp_path / "run"), **parts, **SMALL)
    assert type(agent.policy) is (Own if "policy" in parts else Gaussian)
    if isinstance(parts.get("policy"), dict):
        done = python("-c", f"import embodied as em; em.load({str(agent.folder)!r})")
        assert "python.policy.Own was given by the Python program that made this run" in done.stderr


def test_teachers_are_functions_and_classes(tmp_path: Path) -> None:
    how = {"env": Tasked, "learner": "ppo", "num_envs": 2, **SMALL}
    teachers: list[Any] = [lambda n, random: random.uniform(0, 0.5, (n, 1))]
    teachers.append({"name": Halving, "signal": "return"})
    for number, teacher in enumerate(teachers):
        em.train(out=str(tmp_path / str(number)), teacher=teacher, **how)
        lines = (tmp_path / str(number) / "tasks.jsonl").read_text().splitlines()
        assert lines and all('"task": [0.' in line for line in lines)
    with pytest.raises(ValueError, match="cannot reshape array of size 3"):
        em.train(out=str(tmp_path / "no"), teacher=lambda n, random: [0, 1, 2], **how)


def test_policies_and_environments_of_ours_are_given(tmp_path: Path) -> None:
    policy = em.make_policy("gaussian", em.make_env(Slide), hidden=[8])
    made = em.train(env=Slide, learner="sac", policy=policy, out=str(tmp_path / "sac"), **SMALL)
    assert made.policy is not policy and em.load(tmp_path / "sac").policy.spec == policy.spec
    with pytest.raises(SpecMismatch, match="environment and policy do not fit"):
        em.train(env="Pendulum-v1", learner="sac", policy=policy, **SMALL)
    agent = em.train(env=Reach, learner="sac", out=str(tmp_path / "reach"), **SMALL)
    assert len(agent.evaluate(episodes=2).returns) == 2


class Net(nn.Module):
    """A class of networks, as users of other libraries have."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = make_net(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


NETS: list[tuple[str, Any]] = [
    ("sac", make_net),
    ("ppo", make_net(2, 1)),
    ("sac", {"name": "gaussian", "extractor": Features}),
    ("ppo", {"name": "diagonal_gaussian", "extractor": Features, "net": make_net}),
    ("ppo", Net),
]


def answered(call: Callable[[], Any]) -> str:
    """What the mistake in `call` is answered with, without what it is about."""
    with pytest.raises((ImportError, AttributeError, ValueError)) as told:
        call()
    line = str(told.value)
    assert "\n" not in line
    return re.split(r": write |: ", line, maxsplit=1)[1]


@pytest.mark.parametrize(("learner", "policy"), usually(NETS[:1] + NETS[3:], NETS))
def test_an_own_network_under_sac_and_ppo(learner: str, policy: Any, tmp_path: Path) -> None:
    agent = em.train(env=Slide, learner=learner, policy=policy, out=str(tmp_path / "r"), **SMALL)
    parts = [*agent.policy.modules()]
    assert any(isinstance(part, nn.Linear) and part.out_features in (4, 8) for part in parts)
    before = agent.predict([0.5, 0.1])
    given = policy["extractor"] if isinstance(policy, dict) and "net" not in policy else policy
    if not isinstance(given, dict):
        assert em.load(tmp_path / "r", module=given).predict([0.5, 0.1]) == before


@pytest.mark.parametrize("name", ["flow", "diffusion"])
def test_an_own_network_denoises(name: str) -> None:
    env = em.make_env(Slide)
    policy = em.make_policy({"name": name, "net": make_net, "extractor": Features}, env, chunk=2)
    learner = em.make_learner("imitate", policy)
    batch = {"obs/state": torch.rand(8, 2), "action": torch.rand(8, 2, 1)}
    losses = learner.update({**batch, "valid": torch.ones(8, 2, dtype=torch.bool)})
    assert losses["loss"].isfinite()
    assert em.rollout(policy, Slide, steps=2)["action"].shape == (2, 1, 1)
    with pytest.raises(ConfigError, match=r"returns \[2, 3\] for 2 observations, not \[2, 2\]"):
        em.make_policy({"name": name, "net": lambda inputs, _: nn.Linear(inputs, 3)}, env, chunk=2)


def steps(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Observations of Slide, and the force (N) that pushes it to zero."""
    x = np.random.default_rng(0).uniform(-1, 1, count)
    obs = np.stack([x, np.zeros(count)], 1).astype(np.float32)
    return obs, (10 - 10 * np.sign(x))[:, None].astype(np.float32)


class Pairs(Dataset[Any]):
    def __init__(self) -> None:
        self.obs, self.action = steps(60)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        part = {"observation.state": self.obs[index], "action": self.action[index]}
        return {**part, "done": np.array(index % 20 == 19)}


@pytest.mark.parametrize("kind", ["one", "parts", "dataset", "function", "tensors"])
def test_arrays_and_datasets_are_demonstrations(kind: str, tmp_path: Path) -> None:
    """In the units of the environment; three episodes of 20 steps each, however they are given."""
    obs, action = steps(60)
    parts = [{"obs": obs[at : at + 20], "action": action[at : at + 20]} for at in (0, 20, 40)]
    late = np.arange(60) == 39
    given: dict[str, Any] = {
        "one": {"obs": obs, "action": action, "done": np.arange(60) % 20 == 19, "truncated": late},
        "parts": parts,
        "dataset": Pairs(),
        "function": lambda: parts,
        "tensors": TensorDataset(torch.from_numpy(obs), torch.from_numpy(action)),
    }
    agent = em.train(env=Slide, demos=given[kind], steps=200, out=str(tmp_path), **CLONING)
    (folder,) = tmp_path.glob("demos-*")
    episodes = read_episodes(folder)
    assert len(episodes) == (1 if kind == "tensors" else 3)
    assert set(episodes.steps["action"].flatten().tolist()) == {-1.0, 1.0}
    done = {"one": [19, 59], "dataset": [19, 39, 59]}.get(kind, [])
    assert episodes.steps["terminated"].nonzero().flatten().tolist() == done
    pushes = [float(agent.predict([x, 0.0])[0]) for x in (-0.9, 0.9)]
    assert pushes[0] > 10 > pushes[1], "in newtons"


CLONING = {"learner": "imitate", "policy": "deterministic", **SMALL}


def test_demonstrations_that_lack_something_are_refused(tmp_path: Path) -> None:
    obs, action = steps(60)
    for eye in (np.zeros((60, 3, 32, 32), np.uint8), np.zeros((60, 32, 32, 3), np.float32)):
        with pytest.raises(ConfigError, match=r"obs/eye .* uint8 \[N, height, width, channels\]"):
            write_episodes({"obs": {"eye": eye}, "action": action}, None, tmp_path, False)
    whole = {"obs": obs, "action": action, "done": np.arange(60) % 20 == 19}
    alone = em.train(demos=whole, learner="imitate", out=str(tmp_path / "alone"), **SMALL)
    assert alone.predict(obs[0]).shape == (1,), "they need no environment"
    for demos, how, line in (
        ({"obs": obs}, CLONING, "demos need obs and action"),
        ({**whole, "picture": obs}, CLONING, 'demos has "picture", which is none of'),
        (3, CLONING, "demos is a int: give a folder"),
        (whole, {"learner": "iql", **SMALL}, 'no "reward", which every learner but imitate needs'),
    ):
        with pytest.raises(ConfigError, match=line):
            em.train(env=Slide, demos=demos, out=str(tmp_path / "no"), **how)


def test_a_function_is_the_loss(tmp_path: Path) -> None:
    calls: list[int] = []

    def loss(policy: Any, batch: dict[str, Tensor]) -> Tensor:
        calls.append(len(batch["action"]))
        return policy.loss(batch).mean()

    demos = dict(zip(("obs", "action"), steps(40), strict=True))
    how = {"demos": demos, "policy": "deterministic", "env": Slide, **SMALL}
    em.train(learner=loss, out=str(tmp_path / "a"), **how)
    assert calls
    em.train(learner=BehaviorCloning, out=str(tmp_path / "b"), **how)


def test_several_environments_and_numpy(tmp_path: Path) -> None:
    made = em.train(env=[Slide, lambda: Slide()], learner="ppo", out=str(tmp_path), **SMALL)
    assert "num_envs: 2" in (tmp_path / "run.yaml").read_text()
    envs = em.make_env([Slide, Slide, Slide], numpy=True)
    assert isinstance(envs, SyncVectorEnv) and envs.single_action_space == Slide.action_space
    obs, _ = envs.reset(seed=0)
    assert isinstance(obs, np.ndarray) and obs.shape == (3, 2)
    action = made.predict(obs)
    assert action in envs.action_space
    after, reward, *_ = envs.step(action)
    assert np.allclose(after[:, 0], obs[:, 0] + 0.02 * (action[:, 0] - 10), atol=1e-6), "newtons"
    assert np.allclose(reward, -np.abs(after[:, 0]))
    two = em.make_env("two_gap", num_envs=2, numpy=True)
    seen = [two.reset(seed=0)[0], two.step(two.action_space.sample())[0]]
    assert all(each in two.observation_space for each in seen)


def task_teachers() -> dict[str, dict[str, Any]]:
    nodes = {name: option(file) for name, file in options("teacher", search_folders()).items()}
    needs = {name: resolve(node["_target_"], Curriculum).needs for name, node in nodes.items()}
    return {name: node for name, node in nodes.items() if needs[name] == "tasks"}


TEACHERS = task_teachers()


@pytest.mark.parametrize("name", usually({*TEACHERS} - {"goalgan"}, TEACHERS))
def test_every_teacher_of_tasks_chooses_those_of_a_gymnasium_environment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env, log = em.make_env(Tasked, num_envs=2), tmp_path / "tasks.jsonl"
    scores = {"signal": "return", "returns": [-20.0, 0.0]}
    scores |= {"stepping": "none"} if name == "meta_acl" else {}  # its archive is empty
    context = {"spec": env.spec, "env": env, "seed": 0, "folder": tmp_path}
    teacher: Any = build({**TEACHERS[name], **scores}, Curriculum, **context)
    taught = TaskWrapper(env, teacher, EpisodeLog(log))
    obs = taught.reset(0)
    for step in range(60):
        if step % 20 == 0:  # an episode begins: x is the task, in its own units
            assert torch.allclose(obs["state"][:, 0], 2 * taught.memory["task"][:, 0] - 1)
        obs = taught.step(torch.zeros(2, 1)).obs
    assert len(log.read_text().splitlines()) == 6


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[em.Agent, list[Any]]:
    """A run that its third callback ends, and what the callbacks saw."""
    seen: list[Any] = []

    def watch(progress: Any) -> bool:
        action = progress.agent.predict(np.zeros(3, np.float32))
        seen.append((progress.step, action.shape, progress.metrics))
        return len(seen) < 3

    out = str(tmp_path_factory.mktemp("runs") / "run")
    how = {"callback": watch, "callback_every": 20, "log": "tensorboard", "log_every": 20}
    return em.train(env="Pendulum-v1", learner="sac", out=out, **how, **SMALL), seen


def test_a_callback_sees_the_progress_and_ends_the_training(
    watched: tuple[em.Agent, list[Any]],
) -> None:
    agent, seen = watched
    assert [(step, shape) for step, shape, _ in seen] == [(20, (1,)), (40, (1,)), (60, (1,))]
    assert "train/steps_per_second" in seen[0][2]
    assert read_metrics(agent.folder or Path())[-1]["step"] == 60


def test_a_callback_changes_nothing(tmp_path: Path) -> None:
    """Its random numbers and the mode of its policy are its own."""

    def act(progress: Any) -> None:
        progress.agent.predict(np.zeros(3, np.float32))

    how = {"env": "Pendulum-v1", "learner": "sac", "callback_every": 7, **SMALL}
    agents = [em.train(out=tmp_path / str(each), callback=each, **how) for each in (act, None)]
    pairs = zip(*(agent.policy.parameters() for agent in agents), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_tensorboard_reads_what_was_logged(watched: tuple[em.Agent, list[Any]]) -> None:
    """Records of a length and data, with a checksum each; the bytes of the first are TensorBoard's
    own but for the time."""
    folder = watched[0].folder
    assert folder is not None
    (file,) = folder.glob("events.out.tfevents.*")
    left, events = file.read_bytes(), []
    assert left[:12] == struct.pack("<Q", 26) + bytes.fromhex("129bd82d")
    while left:
        (size,) = struct.unpack("<Q", left[:8])
        events.append(left[12 : 12 + size])
        left = left[16 + size :]
    assert events[0][9:] == b"\x10\x00\x1a\x0dbrain.Event:2"
    said = b"".join(events)
    assert b"eval/return" in said and b"train/steps_per_second" in said
    value = struct.pack("<f", read_metrics(folder)[-1]["eval/return"])
    assert b"\x0a\x0beval/return\x15" + value in said


def test_an_agent_goes_on_films_and_shows_its_curves(
    watched: tuple[em.Agent, list[Any]], tmp_path: Path
) -> None:
    agent = em.load(watched[0].folder or "")
    assert "state [3] -> action [1], 60 steps, eval return -" in repr(agent)
    assert agent.train(steps=40, verbose=False) is agent
    table = agent.metrics
    assert table.index[-1] == 100 and table["eval/return"].dropna().index.tolist() == [60, 100]
    assert len(agent.evaluate(episodes=2).returns) == 2
    assert agent.video(tmp_path / "films" / "one.mp4").stat().st_size > 1000
    saved = em.load(agent.save(tmp_path / "saved"))
    assert repr(saved).endswith("of no run>")
    with pytest.raises(ConfigError, match="belongs to no run"):
        saved.train(steps=10)
    went_on = em.train(env="Pendulum-v1", learner="sac", init=agent, out=tmp_path / "b", **SMALL)
    assert went_on.folder == tmp_path / "b"


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        # Stable-Baselines3
        (lambda: exec("from embodied import PPO"), "em.train(env=ENV, learner='ppo')"),
        (lambda: em.train(total_timesteps=10_000, **PENDULUM), "steps=N"),
        (lambda: em.make_vec_env("Pendulum-v1", n_envs=4), "em.make_env(ENV, num_envs=N)"),
        (lambda: em.make_env("Pendulum-v1", n_envs=4), "num_envs=N"),
        (lambda: untrained().learn(1_000), "agent.train(steps=N)"),
        (
            lambda: untrained().predict(np.zeros(3), deterministic=True),
            "nothing: predict acts without exploration noise",
        ),
        # LeRobot
        (lambda: em.train(dataset="x", **PENDULUM), "demos=..."),
        (lambda: em.train(output_dir="x", **PENDULUM), "out=FOLDER"),
        (lambda: em.from_pretrained("x"), "em.load(FOLDER)"),
        (lambda: untrained().select_action(np.zeros(3)), "agent.predict(obs)"),
        (lambda: untrained().push_to_hub("me/policy"), "agent.save(FOLDER)"),
        # Gymnasium and CleanRL
        (lambda: em.make("Pendulum-v1"), "em.make_env(ENV, num_envs=N)"),
        (lambda: em.make_env("Pendulum-v1", render_mode="rgb_array"), "nothing: "),
        (lambda: em.train(learning_rate=2.5e-4, **PENDULUM), "lr "),
    ],
)
def test_the_words_of_other_libraries_are_answered(call: Callable[[], Any], answer: str) -> None:
    assert answered(call).startswith(answer)


def untrained() -> Any:
    return em.Agent(em.make_policy("gaussian", em.make_env("Pendulum-v1")))


PENDULUM: dict[str, Any] = {"env": "Pendulum-v1", "learner": "sac"}


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"learning_rate": 1e-3}, 'learner={"name": NAME, ...}'),
        ({"policy_kwargs": {"net_arch": [64]}}, '"hidden": [64, 64]'),
        ({"tensorboard_log": "x"}, 'log="tensorboard"'),
    ],
)
def test_the_words_of_other_trainings_are_answered(given: dict[str, Any], answer: str) -> None:
    with pytest.raises(ConfigError) as told:
        em.train(**PENDULUM, **given)
    assert answer in str(told.value)


CELLS = """
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
shell.run_cell("import embodied as em")
for typed in ("em.", "em.ev"):
    with provisionalcompleter():
        found = shell.Completer.completions(typed, len(typed))
        print("complete", *sorted(each.text for each in found))
def cell(code):
    print("cell", code.splitlines()[0])
    done = shell.run_cell(code)
    assert done.success == ("mistake" not in code), code
cell('agent = em.train(env="Pendulum-v1", learner="sac", size="debug", out="run", verbose=False)')
cell("agent")
cell('agent.metrics.filter(like="eval").columns.tolist()')
cell('em.train(env="Pendulum-v1", learner="sacc")  # a mistake')
"""


def test_a_notebook(tmp_path: Path) -> None:
    """Tab completes, an agent and its curves show themselves, and a mistake is short."""
    said = re.sub(r"\x1b\[[\d;]*m", "", python("-c", CELLS, folder=tmp_path).stdout)
    first, second = (line for line in said.splitlines() if line.startswith("complete"))
    assert "train" in first.split() and "evaluate" in first and "TYPE_CHECKING" not in first
    assert second == "complete evaluate"
    assert "<Agent Gaussian: state [3] -> action [1]" in said and "eval/return" in said
    mistake = said.partition("sacc")[2]
    assert 'there is no learner "sacc" (did you mean "sac"?)' in mistake
    assert len(mistake.strip().splitlines()) < 30 and "compose.py" not in mistake


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda agent: em.evaluate(agent, "CartPole-v1"), SpecMismatch),
        (lambda agent: em.train(env="Pendulum-v1", learner="sacs"), ConfigError),
        (lambda agent: em.make_env("Pendulum-v1", kwargs={"mass": 1}), ValueError),
        (lambda agent: agent.predict(np.zeros(5)), ConfigError),
        (lambda agent: em.load("nowhere"), Exception),
    ],
)
def test_a_mistake_is_one_line_without_the_traceback_inside(
    call: Any, kind: type[Exception], watched: tuple[em.Agent, list[Any]]
) -> None:
    with pytest.raises(kind) as told:
        call(watched[0])
    assert "\n" not in str(told.value) and told.value.__suppress_context__
    assert len(traceback.extract_tb(told.value.__traceback__)) <= 5, "of this file, and the edge"


def test_a_script_that_fails_says_little() -> None:
    line = "import embodied as em; em.make_env('Pendulum-v7')"
    assert len(python("-c", line).stderr.strip().splitlines()) <= 8
