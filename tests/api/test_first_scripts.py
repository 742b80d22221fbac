"""What users of other libraries write first runs here, with the words changed that the answers
name. Each script is in the habits of its library; debug size."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

import embodied as em
from tests.builders import python

SMALL = {"size": "debug", "verbose": False, "video": False}


def answered(call: Callable[[], Any]) -> str:
    """What the mistake in `call` is answered with, without what it is about."""
    with pytest.raises((ImportError, AttributeError, ValueError)) as told:
        call()
    line = str(told.value)
    assert "\n" not in line
    return re.split(r": write |: ", line, maxsplit=1)[1]


def imported(name: str) -> None:
    exec(f"from embodied import {name}")


def test_a_script_of_stable_baselines3(tmp_path: Path) -> None:
    """A model is made with PPO("MlpPolicy", ...), learns, is saved, loaded and played."""
    assert answered(lambda: imported("PPO")) == "em.train(env=ENV, learner='ppo')"
    how = {"env": "CartPole-v1", "learner": "ppo", **SMALL}
    assert answered(lambda: em.train(total_timesteps=10_000, **how)) == "steps=N"
    assert answered(lambda: em.make_vec_env("CartPole-v1", n_envs=4)).startswith("em.make_env(")
    assert answered(lambda: em.make_env("CartPole-v1", n_envs=4)) == "num_envs=N"

    model = em.train(steps=400, num_envs=4, out=tmp_path / "run", **how)
    assert answered(lambda: model.learn(1_000)) == "agent.train(steps=N)"
    model.train(steps=100, verbose=False)
    model.save(tmp_path / "ppo_cartpole")
    model = em.load(tmp_path / "ppo_cartpole")

    envs = em.make_env("CartPole-v1", num_envs=4, numpy=True)
    obs, _ = envs.reset(seed=0)
    said = answered(lambda: model.predict(obs, deterministic=True))
    assert said == "nothing: predict acts without exploration noise"
    for _ in range(20):
        obs, rewards, _, _, _ = envs.step(model.predict(obs))
    assert rewards.tolist() == [1.0] * 4


def test_a_script_of_lerobot(tmp_path: Path) -> None:
    """A policy learns from a dataset, is loaded, and acts in a Gymnasium environment."""
    dataset = em.collect("two_gap", tmp_path / "dataset", episodes=4)
    how = {"env": "two_gap", "learner": "imitate", "policy": "diffusion", **SMALL}
    assert answered(lambda: em.train(dataset=str(dataset), **how)) == "demos=..."
    assert answered(lambda: em.train(output_dir="x", **how)) == "out=FOLDER"
    em.train(demos=dataset, out=tmp_path / "run", **how)
    assert answered(lambda: em.from_pretrained(tmp_path / "run")) == "em.load(FOLDER)"
    policy = em.load(tmp_path / "run")
    envs = em.make_env("two_gap", num_envs=2, numpy=True)
    obs, _ = envs.reset(seed=0)
    policy.reset()
    assert answered(lambda: policy.select_action(obs)) == "agent.predict(obs)"
    for _ in range(10):
        obs, reward, *_ = envs.step(policy.predict(obs))
    assert reward.shape == (2,)
    assert answered(lambda: policy.push_to_hub("me/policy")) == "agent.save(FOLDER)"


def test_a_script_of_gymnasium() -> None:
    """An environment is made, reset and stepped with random actions, and drawn."""
    assert answered(lambda: em.make("Pendulum-v1")) == "em.make_env(ENV, num_envs=N)"
    said = answered(lambda: em.make_env("Pendulum-v1", render_mode="rgb_array"))
    assert said.startswith("nothing: ")
    env = em.make_env("Pendulum-v1", numpy=True)
    env.reset(seed=42)
    obs, reward, *_ = env.step(env.action_space.sample())
    assert obs in env.observation_space and float(reward[0]) < 0
    env.close()


class Network(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_a_script_with_the_habits_of_cleanrl(tmp_path: Path) -> None:
    """Own networks, vector envs, a loop of rollouts and updates in plain PyTorch; and the same
    network with our PPO."""
    thunks = [lambda: gymnasium.make("CartPole-v1") for _ in range(4)]
    envs = em.make_env(thunks, numpy=True)
    inputs = int(np.prod(envs.single_observation_space.shape))
    agent = Network(inputs, int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    obs, _ = envs.reset(seed=1)
    log_probs, rewards = [], []
    for _ in range(16):
        chosen = torch.distributions.Categorical(logits=agent(torch.as_tensor(obs)))
        action = chosen.sample()
        log_probs.append(chosen.log_prob(action))
        obs, reward, _, _, _ = envs.step(action.numpy())
        rewards.append(torch.as_tensor(reward))
    gains = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    loss = -(torch.stack(log_probs) * (gains - gains.mean())).mean()
    loss.backward()
    optimizer.step()
    assert loss.isfinite()

    how = {"env": thunks, "learner": "ppo", "out": tmp_path, **SMALL}
    assert answered(lambda: em.train(learning_rate=2.5e-4, **how)).startswith("lr ")
    how["learner"] = {"name": "ppo", "lr": 2.5e-4}
    assert isinstance(em.train(policy=Network, **how).policy.net, Network)
    assert "num_envs: 4" in (tmp_path / "run.yaml").read_text()


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
