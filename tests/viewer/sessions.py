"""Environments, policies, runs and sessions for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from embodied.core import checkpoint
from embodied.core.build import Node, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.learners.learner import Learner, RunPlan
from embodied.viewer.session.session import Session, choices_for

LIFT: Node = {"_target_": "embodied.envs.fr3.env.Fr3", "task": "lift", "num_envs": 1, "threads": 1}
REACH: Node = LIFT | {"task": "reach", "horizon": 6}
FLOW: Node = {
    "_target_": "embodied.policies.generative.flow.Flow",
    **{"chunk": 4, "steps": 2, "width": 16, "depth": 1},
}
SEVERAL = LIFT | {"num_envs": 16}  # as in training; the viewer has one
HOPPER: Node = {"_target_": "embodied.envs.gym.Gym", "id": "Hopper-v5", "num_envs": 1}


def alone(env: VecEnv) -> Session:
    """A world without a run."""
    return Session(env, *choices_for(env, None))


def play(session: Session, seed: int) -> Session:
    """The whole episode of `seed`, at its end."""
    session.reset(seed)
    while not session.over:
        session.advance()
    session.seek(session.length - 1)
    return session


def parts_of(env: VecEnv, policy: Node, learner: Node) -> tuple[Policy, Learner]:
    """A policy and what learns it, both untrained."""
    made = build(policy, Policy, spec=env.spec)
    return made, build(learner, Learner, policy=made, spec=env.spec, run=RunPlan(1, execute=2))


def run_with(folder: Path, env: Node, policy: Node, **settings: Any) -> Path:
    """A run with one checkpoint, of step 10; it has a learner if `settings` have one."""
    world = build(env | {"num_envs": 1}, VecEnv)
    torch.manual_seed(1)
    state = None
    if "learner" in settings:
        made, learner = parts_of(world, policy, settings["learner"])
        state = learner.get_state()
    else:
        made = build(policy, Policy, spec=world.spec)
    loop = {"loop": {"reward": None}}
    checkpoint.save(folder / "checkpoints" / "00000010", made, 10, state, loop)
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": env, "execute": 2, **settings}))
    world.close()
    return folder
