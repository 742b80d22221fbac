"""AssistForce: privileged assistance, a virtual force that pulls an object towards the gripper.

The assistance is annealed with success (privileged-action curriculum, 2025; the force law is our
own):

    F = p k m g (a + 1) / 2 (1 - d / (p R)) u - p c m v     (N, within d < p R of the tool point)

u is the direction from object to tool, v the object velocity, a an extra action element, and p an
extra element of the task vector. p is 0 unless a teacher sets it, so evaluation, videos and robots
have no assistance. Both strength and range shrink with p: the object floats within R (p - 1 / k) of
the tool, so the gripper must come closer step by step, and for small p it must grasp. At p = 0 the
extra action has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper

GRAVITY = 9.81
PULL = "pull"
HELP = "help"


@dataclass(frozen=True)
class Config:
    """Settings of the assisting force. Using it costs `cost` p ((a + 1) / 2)^2 per step."""

    body: str  # name of the body that is pulled to the gripper
    weights: Positive = 5.0  # largest force in weights of the body (k)
    reach: Positive = 0.36  # distance within which the force acts, m (R)
    damping: NonNegative = 5.0  # of the body's velocity, 1/s (c)
    cost: NonNegative = 0.002  # reward taken for using the force (p)


class AssistForce(Wrapper):
    """Wrapper for an FR3 environment in MuJoCo: adds one action element, one task element and the
    observation `help`.
    """

    def __init__(self, config: Config, env: VecEnv) -> None:
        if not hasattr(env, "view") or not hasattr(env, "batch"):
            raise ConfigError("AssistForce needs an FR3 environment (embodied.envs.fr3.env)")
        spec = env.spec
        if spec.act.names and PULL in spec.act.names:
            raise ConfigError("AssistForce: the environment already has an AssistForce wrapper")
        act = replace(spec.act, shape=(spec.act.size + 1,), names=(*spec.act.names, PULL))
        names = () if spec.task is None else spec.task.names
        task = Leaf((len(names) + 1,), low=0.0, high=1.0, names=(*names, HELP))
        shown = Leaf((1,), low=0.0, high=1.0, names=(HELP,))
        super().__init__(env, replace(spec.with_obs(**{HELP: shown}), act=act, task=task))
        self.config = config
        inner: Any = env
        known = [inner.model.body(i).name for i in range(inner.model.nbody)]
        if config.body not in inner.what.free:
            raise ConfigError(
                f"AssistForce: no free body {config.body!r}; choose from {inner.what.free}"
            )
        self._body = known.index(config.body)
        joint = inner.model.joint(config.body)
        self._at = int(joint.qposadr[0])
        self._speed = int(joint.dofadr[0])
        self._mass = float(inner.model.body_mass[self._body])
        self.memory[HELP] = torch.zeros(self.num_envs)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        rows = self.rows(mask)
        asked = torch.zeros(self.num_envs) if task is None else task[:, -1].to(self.memory[HELP])
        if not ((asked >= 0) & (asked <= 1)).all():
            raise ValueError("AssistForce: task vectors must be in [0, 1]")
        self.memory[HELP] = torch.where(rows, asked, self.memory[HELP])
        return self.transform_obs(
            self.env.reset(seed, None if task is None else task[:, :-1], mask)
        )

    def step(self, action: Tensor) -> Step:
        help_ = self.memory[HELP]
        pull = (action[:, -1].clamp(-1, 1) + 1) / 2
        if not torch.isfinite(pull).all():
            return self.env.step(action)  # refuses it, and says in which rows
        inner: Any = self.env
        inner.batch.xfrc_applied[:, self._body, :3] = self.force(help_.numpy(), pull.numpy())
        step = self.env.step(action[:, :-1])
        reward = step.reward - self.config.cost * help_ * pull.square()
        following = {**step.next_obs, HELP: help_[:, None].clone()}
        self.memory[HELP] = help_.masked_fill(step.ended, 0)
        log = {**step.log, HELP: help_}
        return replace(
            step, obs=self.transform_obs(step.obs), next_obs=following, reward=reward, log=log
        )

    def force(self, help_: Any, pull: Any) -> Any:
        """The force on the object now, [B, 3] (N)."""
        config = self.config
        inner = self.env
        world: Any = inner
        place = world.batch.qpos[:, self._at : self._at + 3]
        speed = world.batch.qvel[:, self._speed : self._speed + 3]
        way = world.view(np.arange(self.num_envs)).tool - place
        far = np.linalg.norm(way, axis=1, keepdims=True)
        near = np.clip(1 - far / np.maximum(help_[:, None] * config.reach, 1e-6), 0, 1)
        strength = config.weights * GRAVITY * pull[:, None] * near
        held = config.damping * speed * (near > 0)
        return help_[:, None] * self._mass * (strength * way / np.maximum(far, 1e-6) - held)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**obs, HELP: self.memory[HELP][:, None].clone()}
