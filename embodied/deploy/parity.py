"""Parity check: observations and actions in simulation against those through the robot's side."""

from __future__ import annotations

import numpy as np
import torch

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.saved_node import require_inside
from embodied.core.tensors import Tensors
from embodied.deploy.site import Site
from embodied.real_robot.cameras.policy_images import image_sizes
from embodied.real_robot.policy.compatibility import observer

SEED = 7


def compare(site: Site, policy: Policy) -> tuple[float, float] | str:
    """How far apart, at most, observations (in their units) and actions are; or why nobody knows.

    The first observation of the run's world goes to the policy as it is; its named numbers go
    through the robot's kinematics and observer to the same policy, with the same noise.
    """
    assert site.trained is not None
    try:
        require_inside(site.trained["env"], "its run.yaml")
    except ConfigError as error:
        return str(error)
    env = build(site.trained["env"] | {"num_envs": 1}, VecEnv)
    try:
        obs: Tensors = env.reset(SEED)
    finally:
        env.close()
    pairs = ((leaf.names, obs[name][0]) for name, leaf in policy.spec.obs.items() if leaf.names)
    shown = {n: float(v) for names, row in pairs for n, v in zip(names, row.tolist(), strict=True)}
    joints = site.deployment.joints
    needed = [f"{kind}{i}" for kind in ("q", "dq") for i in range(1, joints + 1)]
    if missing := [name for name in (*needed, *_axes("tool"), *_axes("lead")) if name not in shown]:
        return f"the run's world does not show {missing[0]}: it is another robot's, or its task's"
    here = _through(site, policy, shown)
    there = {name: obs[name] for name in here}
    apart = max(float((here[k] - there[k]).abs().max()) for k in here)
    pictures = {name: obs[name] for name in image_sizes(policy.spec)}  # the same for both
    return apart, _acts_apart(policy, here | pictures, there | pictures)


def _axes(name: str) -> list[str]:
    return [f"{name}_{axis}" for axis in "xyz"]


def _through(site: Site, policy: Policy, shown: dict[str, float]) -> Tensors:
    """The same numbers, from joints and what is given and sensed."""
    made = site.deployment
    watch = observer(policy.spec, made)
    q = np.array([shown[f"q{i}"] for i in range(1, made.joints + 1)])
    dq = np.array([shown[f"dq{i}"] for i in range(1, made.joints + 1)])
    target = np.array(
        [shown[t] + shown[a] for t, a in zip(_axes("tool"), _axes("lead"), strict=True)]
    )
    watch.given |= {name: shown[name] for name in made.given if name in shown}
    sensed = np.array([shown.get(name, 0.0) for name in made.sensed])
    leaves = watch(q, dq, target, shown.get("width", 0.0), sensed)
    return {name: torch.as_tensor(value)[None] for name, value in leaves.items()}


@torch.inference_mode()
def _acts_apart(policy: Policy, here: Tensors, there: Tensors) -> float:
    noise = policy.sample_noise(1)
    said: list[torch.Tensor] = []
    for obs in (here, there):
        seen, carry = policy.observe(obs, policy.initial(1), noise)
        said.append(policy.act(seen, carry, noise)[0])
    return float((said[0] - said[1]).abs().max())
