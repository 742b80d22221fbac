"""There and back on the table: a script pushes, nobody puts the cube back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import yaml

from embodied.core.actor import Actor
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.envs.fr3.shuttle import HOME

PUSH = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "push", "quality": 1.0}


def shuttle(n: int = 1, **more: object) -> Any:
    with open("configs/env/fr3_push_shuttle.yaml") as file:
        node = yaml.safe_load(file)
    node["wrappers"][0] |= more
    return build(node | {"num_envs": n}, VecEnv)


def goals(obs: dict[str, torch.Tensor], names: tuple[str, ...]) -> list[float]:
    at = names.index("goal_x")
    return obs["state"][0, at : at + 2].tolist()


def test_a_script_pushes_there_and_back_and_the_cube_stays_where_it_is() -> None:
    env = shuttle()
    names = env.spec.obs["state"].names
    cube, tool = names.index("cube_x"), names.index("tool_x")
    torch.manual_seed(0)
    actor = Actor(build(PUSH, Policy, spec=env.spec), 1)
    obs, first = env.reset(0), torch.tensor([True])
    seen = [goals(obs, names)]
    for _ in range(900):
        step = env.step(actor(obs, first))
        assert not step.log["manual"].any()
        if step.terminated.any():
            before, after = step.next_obs["state"][0], step.obs["state"][0]
            assert step.reward.item() == 1 and step.log["success"].item()
            assert goals(step.next_obs, names) == seen[-1], "the goal that it had"
            assert torch.equal(before[cube : cube + 3], after[cube : cube + 3])
            assert np.allclose(after[tool : tool + 3], HOME, atol=0.01), "the arm is home"
            seen.append(goals(step.obs, names))
        obs, first = step.obs, step.ended
        if len(seen) == 4:
            break
    there, back = [0.44, -0.08], [0.54, 0.08]
    assert np.allclose(seen, [there, back, there, back], atol=1e-6)


def test_a_scripted_way_back_is_not_the_learners() -> None:
    env = shuttle(played={"1": PUSH})
    torch.manual_seed(0)
    actor = Actor(build(PUSH, Policy, spec=env.spec), 1)
    obs, first = env.reset(0), torch.tensor([True])
    names, aside = env.spec.obs["state"].names, 0.0
    for _ in range(400):
        assert np.allclose(goals(obs, names), [0.44, -0.08]), "the learner knows one way only"
        step = env.step(actor(obs, first))
        obs, first, aside = step.obs, step.ended, aside + step.log["aside"].item()
        if aside:
            break
    assert step.terminated.item() and aside > 10


def test_a_cube_that_is_out_of_reach_is_put_back() -> None:
    env = shuttle()
    env.reset(0)
    world = env.env.env
    world.batch.qpos[0, world._free["cube"]] = 0.8
    step = env.step(torch.zeros(1, 4))
    assert step.truncated.item() and step.log["manual"].item()
    at = env.spec.obs["state"].names.index("cube_x")
    assert step.next_obs["state"][0, at] > 0.75 and step.obs["state"][0, at] < 0.6
