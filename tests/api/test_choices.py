"""Actions of choices and numbers, and masks of what is invalid: training, files, processes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium import spaces

import embodied as em
from embodied.checks.env import CHECKS, EnvSubject
from embodied.core.build import ConfigError
from embodied.core.choices import Choices
from embodied.core.env_contract import require_start
from embodied.core.errors import ContractError, NotApplicable
from embodied.core.spec import MASK, Leaf, Spec, mixed_leaf
from embodied.datasets.lerobot.reader import EpisodeWriter
from embodied.envs.gym_object import register
from embodied.export.decision import Decision, facts, write_onnx
from tests.builders import make_policy, node_of, recorded
from tests.tiers import usually
from tests.toy_envs import Forbidden, Lock, batched

SPACES: dict[str, spaces.Space[Any]] = {
    "MultiDiscrete": spaces.MultiDiscrete([3, 2, 4], start=[0, 1, -2]),
    "MultiBinary": spaces.MultiBinary(4),
    "Tuple": spaces.Tuple([spaces.Discrete(4, start=1), spaces.Box(-2, 6, (1,), np.float32)]),
    "Dict": spaces.Dict(
        {
            "gear": spaces.Discrete(3),
            "hand": spaces.Dict({"on": spaces.MultiBinary(2), "force": spaces.Box(0, 20, (1,))}),
        }
    ),
}
PPO = {"name": "ppo", "horizon": 32, "batch_size": 64, "epochs": 10, "lr": 3e-3, "gamma": 0.0}
HOW = {"learner": PPO, "steps": 4000, "eval": {"episodes": 4}, "verbose": False}
KINDS = [("MultiDiscrete", "info"), ("Tuple", "obs"), ("Dict", ""), ("Discrete", "obs")]
KINDS += [("MultiDiscrete", ""), ("MultiBinary", ""), ("MultiBinary", "obs"), ("Tuple", "")]


def lock(kind: str, mask: Any = "") -> Lock:
    return Lock(spaces.Discrete(5, start=-2) if kind == "Discrete" else SPACES[kind], mask)


def trained(kind: str, mask: Any, out: Path, **settings: Any) -> em.Agent:
    given = {"env": lambda: lock(kind, mask), "out": str(out), **HOW, **settings}
    return em.train("env.num_envs=8", **given)


def distance(agent: em.Agent, env: Lock) -> float:
    """Of 40 predicted actions to the right one, the largest: at least 1 where a choice is wrong, in
    units of half the range for numbers. An invalid one raises Forbidden."""
    worst, (obs, info) = 0.0, env.reset(seed=3)
    for _ in range(40):
        action = agent.predict(obs, info)
        unit = env.act.unit(batched(env.action_space, [action, env.right])).float()
        worst = max(worst, float((unit[0] - unit[1]).abs().max()))
        obs, _, _, ended, info = env.step(action)
        if ended:
            agent.reset()
            obs, info = env.reset()
    return worst


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> em.Agent:
    return trained("Dict", "info", tmp_path_factory.mktemp("runs") / "hybrid")


@pytest.mark.parametrize(("kind", "mask"), usually(KINDS[:1], KINDS))
def test_ppo_finds_the_one_right_action(kind: str, mask: str, tmp_path: Path) -> None:
    """An invalid action would end the training: `Lock` raises."""
    agent = trained(kind, mask, tmp_path / "run")
    assert distance(agent, lock(kind, mask)) < 0.2
    played = em.evaluate(agent, lambda: lock(kind, mask), episodes=8)
    assert played.returns.min() > -1.25 and played.change is None


class Starts(gymnasium.Env[Any, Any]):
    """Of observations 5 and 6 and actions -1, 0 and 1, -1 pays in 5 and 1 in 6."""

    observation_space = spaces.Discrete(2, start=5)
    action_space = spaces.Discrete(3, start=-1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.age = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in self.action_space
        paid = float(action == (-1 if self.seen == 5 else 1))
        self.age += 1
        return self._seen(), paid, False, self.age == 10, {}

    def _seen(self) -> int:
        self.seen = int(self.np_random.integers(5, 7))
        return self.seen


@pytest.mark.filterwarnings("error")  # a first observation may be the last one by chance
def test_discrete_numbers_may_begin_anywhere(tmp_path: Path) -> None:
    agent = em.train("env.num_envs=8", env=Starts, learner="ppo", steps=4000, out=str(tmp_path))
    assert em.evaluate(agent, Starts, episodes=8).returns.tolist() == [10.0] * 8
    actions = []
    for obs in (5, 6):
        agent.reset()
        actions.append(agent.predict(obs))
    assert actions == [-1, 1]


class Paired(Lock):
    """With a mask of combinations, half of which are allowed."""

    def __init__(self) -> None:
        super().__init__(spaces.MultiDiscrete([3, 4], start=[1, -2]))
        parts = {"state": spaces.Box(-1, 1, (1,)), MASK: spaces.MultiBinary((3, 4))}
        self.observation_space = spaces.Dict(parts)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.pairs[tuple(np.subtract(action, [1, -2]))]:
            raise Forbidden(action)
        return super().step(action)

    def _shown(self) -> tuple[Any, dict[str, Any]]:
        obs, info = super()._shown()
        self.pairs = self.np_random.random((3, 4)) < 0.5
        self.pairs[tuple(np.subtract(self.right, [1, -2]))] = True
        return {**obs, MASK: self.pairs}, info


def test_a_mask_of_combinations_makes_them_one_choice(tmp_path: Path) -> None:
    """Its axes are the choices, and no other combination is chosen."""
    agent = em.train("env.num_envs=8", env=Paired, out=str(tmp_path), **HOW)
    assert agent.policy.spec.act == Leaf((), "int64", 0, 11)
    env = Paired()
    obs, _ = env.reset(seed=0)
    for _ in range(4):
        action = agent.predict(obs)
        assert action.tolist() == env.right.tolist()
        obs = env.step(action)[0]


def test_a_batch_of_observations_has_nested_arrays_of_actions(hybrid: em.Agent) -> None:
    obs = {"state": np.zeros((3, 1), np.float32)}
    given = {"gear": np.ones((3, 3), np.int8), "hand": {"on": np.ones((3, 4), np.int8)}}
    hybrid.reset()
    actions = hybrid.predict(obs, {MASK: given})
    assert actions["gear"].shape == (3,) and actions["hand"]["on"].shape == (3, 2)
    hybrid.reset()
    with pytest.raises(ConfigError, match=r"needs the action_mask: agent.predict\(obs, info\)"):
        hybrid.predict(obs)


def recorded_lock(folder: Path, kind: str, episodes: list[dict[str, torch.Tensor]]) -> str:
    """A dataset whose actions are the right one, with these observations."""
    mask = "obs" if MASK in episodes[0] else ""
    env, spec = lock(kind, mask), em.make_env(lambda: lock(kind, mask)).spec
    right = env.act.unit(batched(env.action_space, [env.right] * 10))
    with EpisodeWriter(folder, spec) as writer:
        for obs in episodes:
            writer.add(recorded(obs, right))
    return str(folder)


@pytest.mark.parametrize("kind", usually(["MultiDiscrete"], ["Discrete", "MultiDiscrete"]))
@pytest.mark.parametrize("policy", ["recurrent_categorical", "transformer_categorical"])
def test_policies_with_memory_never_choose_what_is_masked(
    kind: str, policy: str, tmp_path: Path
) -> None:
    agent = trained(kind, "info", tmp_path / "run", steps=300, policy=policy)
    distance(agent, lock(kind, "info"))  # raises Forbidden


@pytest.mark.parametrize("kind", ["Discrete", *SPACES])
def test_without_the_mask_invalid_actions_are_chosen(kind: str) -> None:
    env = em.make_env(lambda: lock(kind, "info"), num_envs=2)
    blind = Spec({"state": env.spec.obs["state"]}, env.spec.act, env.spec.dt)
    for target in ("categorical.Categorical", "random.Random"):
        sees = make_policy(target, env.spec)
        em.rollout(sees.warmup_policy(), env, steps=50)
        em.rollout(sees, env, steps=50)
        with pytest.raises(Forbidden):
            em.rollout(make_policy(target, blind), env, steps=50)


def test_each_allowed_class_is_as_likely_for_the_random_policy() -> None:
    spec = Spec({MASK: Leaf((7,), low=0.0, high=1.0)}, mixed_leaf((3, 0, 4)), 0.1)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]).expand(30_000, 7)
    drawn = Choices(spec).random(torch.rand(30_000, 1, 3), {MASK: mask})[:, 0]
    for column, shares in ((0, (1 / 2, 0, 1 / 2)), (2, (0, 1 / 3, 1 / 3, 1 / 3))):
        found = torch.bincount(drawn[:, column].long(), minlength=len(shares)) / 30_000
        assert found.tolist() == pytest.approx(shares, abs=0.015)
    assert drawn[:, 1].min() < -0.99 and drawn[:, 1].max() > 0.99


def test_an_action_is_split_joined_and_one_hot() -> None:
    choices = Choices(Spec({"state": Leaf((1,))}, mixed_leaf((0, 3, 2)), 0.1))
    action = torch.tensor([[0.4, 2.0, 0.0]])
    choice, numbers = choices.split(action)
    assert choice.tolist() == [[2, 0]] and torch.equal(choices.join(choice, numbers), action)
    assert torch.equal(choices.one_hot(action), torch.tensor([[0, 0, 1, 1, 0, 0.4]]))


@pytest.mark.parametrize("kind", usually(["Dict"], SPACES))
def test_behaviour_cloning_of_recorded_choices(kind: str, tmp_path: Path) -> None:
    seen = [{"state": torch.rand(11, 1) * 2 - 1} for _ in range(8)]
    given: dict[str, Any] = {"learner": {"name": "imitate", "lr": 1e-2}}
    given["demos"] = recorded_lock(tmp_path / "demos", kind, seen)
    agent = trained(kind, "", tmp_path / "run", steps=150, **given)
    assert distance(agent, lock(kind)) < 0.1


@pytest.mark.parametrize("kind", ["Discrete", *SPACES])
def test_an_exported_policy_chooses_the_same(kind: str, tmp_path: Path) -> None:
    env = em.make_env(lambda: lock(kind, "obs"), num_envs=1)
    policy = make_policy("categorical.Categorical", env.spec)
    decision = Decision(policy)
    write_onnx(decision, facts(decision), tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    obs, first = env.reset(0), json.loads(session.get_modelmeta().custom_metadata_map["spec"])
    assert Spec.from_json(first) == env.spec
    for _ in range(30):
        noise = policy.sample_noise(1, explore=True).numpy()
        feed = {f"obs/{name}": value.numpy() for name, value in obs.items()}
        found = torch.from_numpy(session.run(["actions"], feed | {"noise": noise})[0])
        obs = env.step(found[:, 0]).obs  # raises Forbidden


def test_a_recorded_action_that_its_mask_forbids_is_one_line(tmp_path: Path) -> None:
    whole, holed = ({"state": torch.zeros(11, 1), MASK: torch.ones(11, 5)} for _ in range(2))
    env = lock("Discrete", "obs")
    holed[MASK][3, int(env.act.unit(batched(env.action_space, [env.right])).item())] = 0
    demos = recorded_lock(tmp_path / "demos", "Discrete", [whole, holed])
    with pytest.raises(ConfigError, match=r"1 recorded actions are ones .* in episode 1: record"):
        trained("Discrete", "obs", tmp_path / "run", steps=10, learner="imitate", demos=demos)


def test_what_cannot_choose_says_what_can(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'Sac needs continuous actions.* learner="ppo"'):
        em.train(env=lambda: lock("Tuple"), learner="sac", out=str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="policy=categorical, with learner=ppo"):
        em.train(env=lambda: lock("Tuple"), learner="sac", policy="gaussian", out=str(tmp_path))
    act = mixed_leaf((3, 0))
    for obs, chunk, line in (
        ({MASK: Leaf((4,))}, 1, "action_mask with 4 numbers, and the action has 3 classes"),
        ({f"{MASK}/0": Leaf((3,))}, 1, "action_mask is one array"),
        ({MASK: Leaf((3,))}, 2, "allowed in the next step only: policy.chunk=1, not 2"),
    ):
        with pytest.raises(ConfigError, match=line):
            make_policy("categorical.Categorical", Spec(obs, act, 0.1), chunk=chunk)
    box = spaces.Box(-1, 1, (2,), np.float32)
    numbers = em.make_env(lambda: Lock(spaces.Dict({"a": box, "b": box})))
    assert numbers.spec.act.is_continuous and make_policy("gaussian.Gaussian", numbers.spec)


@pytest.mark.parametrize("kind", ["Discrete", "Dict"])
def test_the_checks_of_environments_keep_to_the_mask(kind: str) -> None:
    subject = EnvSubject(node_of("envs.gym.Gym", id=register(lambda: lock(kind, "info"))))
    for check in CHECKS:
        with suppress(NotApplicable):
            check(subject)
    require_start(subject.env, 0)
    subject.close()


@pytest.mark.parametrize(("wrong", "line"), [(np.zeros, "allows nothing"), (None, "has no action")])
def test_a_mask_that_is_missing_or_empty_is_one_line(wrong: Any, line: str) -> None:
    class Careless(Lock):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            obs, reward, over, late, info = super().step(action)
            info = {} if wrong is None else {MASK: wrong(5)}
            return obs, reward, over, late, info

    env = em.make_env(lambda: Careless(spaces.Discrete(5), "info"))
    allowed = env.reset(0)[MASK]
    with pytest.raises(ContractError, match=line):
        env.step(allowed.argmax(1))
