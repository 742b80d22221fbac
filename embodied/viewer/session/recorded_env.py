"""Recorded episodes as a world: its steps are those of a dataset, whatever is done in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mujoco
import torch
import yaml
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import build
from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.viewer.run_folder import ViewerError
from embodied.viewer.scene.pose_from_obs import Posed
from embodied.viewer.session.episode import MOVED, SAFETY

TARGETS = ("proposed", "filtered", "sent")
"""What the policy asked for, what safety left of it, and what the arm was sent."""
AHEAD = 16
"""Episodes that are read at first; a dataset may be larger than the memory."""


class Recorded(VecEnv):
    """Row 0 plays episode `seed` of a dataset (our own, or LeRobot's).

    After its last step it begins the one after. Actions are not looked at: `recorded` is the one
    that was taken.
    """

    num_envs = 1

    def __init__(self, path: Path, number: int = 0) -> None:
        self.path, self.at = path, 0
        self.number = number
        self.episodes = read_episodes(path, max(number + 1, AHEAD))
        self.load(number)
        # The task cannot be set any more.
        self.spec = replace(self.episodes.spec, task=None)

    @property
    def recorded(self) -> Tensor:
        """The action [1, A] that was taken now."""
        return self.tape["action"][self.at : self.at + 1]

    def load(self, number: int) -> None:
        """Take episode `number` of the dataset; ViewerError where it has fewer."""
        if number >= len(self.episodes):
            more: Episodes = read_episodes(self.path, 2 * (number + 1))
            if number >= len(more):
                raise ViewerError(f"{self.path} has {len(more)} episodes, from episode=0")
            self.episodes = more
        self.number, self.at = number, 0
        self.tape = self.episodes.episode(number)
        self.steps = int(self.episodes.length[number])

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        self.load(self.number if seed is None else seed)
        return self._obs()

    def step(self, action: Tensor) -> Step:
        tape, at = self.tape, self.at
        self.at += 1
        following = self._obs()
        flags = [tape[name][at : at + 1].bool() for name in ("terminated", "truncated")]
        log = {"success": tape["success"][at : at + 1].bool()} if "success" in tape else {}
        log |= self._safety(at)
        reward = tape["reward"][at : at + 1].float()
        if self.at >= self.steps:
            self._notify_before_reset(torch.ones(1, dtype=torch.bool))
            flags[1] = ~flags[0]
        obs = following
        return Step(obs, following, reward, flags[0], flags[1], log)

    def _safety(self, at: int) -> Tensors:
        """The ticks of step `at` in which each stage of safety acted, and how far the target was
        moved, where a robot noted them."""
        noted = self.tape.get("interventions")
        if noted is None:
            return {}
        ways = [self.tape.get(f"action/{name}") for name in TARGETS]
        moved = {
            f"{MOVED}{TARGETS[i]} to {TARGETS[i + 1]}": (b[at] - a[at]).abs().max()[None]
            for i, (a, b) in enumerate(pairwise(ways))
            if a is not None and b is not None
        }
        about = self.episodes.info[self.number] if self.episodes.info else {}
        stages = [str(name) for name in about.get("stages", ())]
        ticks = noted[at].reshape(1, -1)
        names = stages if len(stages) == ticks.shape[1] else map(str, range(ticks.shape[1]))
        return {f"{SAFETY}{name}": ticks[:, i] for i, name in enumerate(names)} | moved

    def get_state(self) -> Tensors:
        return {"number": torch.tensor([self.number]), "at": torch.tensor([self.at])}

    def set_state(self, state: Tensors) -> Tensors:
        self.load(int(state["number"][0]))
        self.at = int(state["at"][0])
        return self._obs()

    def describe(self, row: int = 0) -> str:
        text = self.episodes.texts[self.number] if self.episodes.texts else ""
        noted: Mapping[str, Any] = self.episodes.info[self.number] if self.episodes.info else {}
        facts = ", ".join(f"{key} {value}" for key, value in noted.items())
        return "\n".join(filter(None, (f"**episode {self.number}** {text}", facts)))

    def _obs(self) -> Tensors:
        """The observation before step `at`; after the last one, the final one."""
        if self.at < self.steps:
            return tt.each(tt.under(self.tape, "obs"), lambda v: v[self.at : self.at + 1])
        return tt.each(tt.under(self.tape, "next_obs"), lambda v: v[None])


class Staged(Recorded):
    """Recorded episodes of a robot of which there is a MuJoCo model, drawn in 3D."""

    def __init__(self, path: Path, posed: Posed, number: int = 0) -> None:
        super().__init__(path, number)
        self.posed = posed

    def scene(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Model and data as people should see them."""
        return self.posed.put(tt.each(self._obs(), lambda value: value[0]))


class Retold:
    """Does what was done."""

    explore = False

    def __init__(self, env: Recorded) -> None:
        self.env = env

    def __call__(self, obs: Tensors, first: Tensor) -> Tensor:
        return self.env.recorded


def open_recorded(path: Path, number: int, env_node: Mapping[str, Any] | None) -> Recorded:
    """The dataset at `path` from episode `number` on; in 3D where `env_node`, or the note that the
    collecting of it left, names a world whose robot can be posed by what was observed."""
    plain = Recorded(path, number)
    file = path / "collect.yaml"
    if env_node is None and file.exists():
        env_node = yaml.safe_load(file.read_text()).get("env")
    if env_node is None:
        return plain
    world: Any = build(dict(env_node) | {"num_envs": 1})
    try:
        posed = Posed.of(world, plain.spec)
    finally:
        world.close()
    return plain if posed is None else Staged(path, posed, number)
