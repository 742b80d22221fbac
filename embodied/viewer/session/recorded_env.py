"""Recorded episodes as an environment: steps come from a dataset, actions are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mujoco
import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import build
from embodied.core.env import Step, VecEnv
from embodied.core.saved_node import read_saved, require_inside
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.viewer.run_folder import ViewerError
from embodied.viewer.scene.detect import PosedModel
from embodied.viewer.session.episode import MOVED, SAFETY

TARGETS = ("proposed", "filtered", "sent")
"""Joint targets as the policy proposed them, as safety changed them, and as they were sent."""
AHEAD = 16
"""Episodes that are read at first; a dataset may be larger than memory."""


class RecordedEnv(VecEnv):
    """Plays episode `seed` of a dataset (our own or LeRobot's) in parallel env 0.

    After its last step the next episode starts. Actions are ignored; `recorded` is the recorded
    one.
    """

    num_envs = 1

    def __init__(self, path: Path, number: int = 0) -> None:
        self.path, self.at = path, 0
        self.number = number
        self.episodes = read_episodes(path, max(number + 1, AHEAD))
        self.load(number)
        # The task is recorded and cannot be set.
        spec = self.episodes.spec
        self.spec = replace(spec, task=None, text=spec.text or path.resolve().name)

    @property
    def recorded(self) -> Tensor:
        return self.tape["action"][self.at : self.at + 1]

    def load(self, number: int) -> None:
        """Load episode `number` of the dataset; ViewerError if it has fewer."""
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
        return Step(following, following, reward, flags[0], flags[1], log)

    def _safety(self, at: int) -> Tensors:
        """In how many ticks of step `at` each safety stage acted, and how far the target was moved,
        if the robot recorded it."""
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
        noted = dict(self.episodes.info[self.number]) if self.episodes.info else {}
        noted.pop("number", None)
        by = str(noted.pop("_target_", "")).rpartition(".")[2]
        lines = [f"**episode {self.number}** {'' if text == self.spec.text else text}".rstrip()]
        lines += [f"recorded by {by}"] if by else []
        return "\n".join([*lines, *(f"{key}: {value}" for key, value in noted.items())])

    def _obs(self) -> Tensors:
        """The observation before step `at`; after the last step, the final one."""
        if self.at < self.steps:
            return tt.each(tt.under(self.tape, "obs"), lambda v: v[self.at : self.at + 1])
        return tt.each(tt.under(self.tape, "next_obs"), lambda v: v[None])


class RecordedSceneEnv(RecordedEnv):
    """Recorded episodes of a robot with a MuJoCo model, displayed in 3D."""

    def __init__(self, path: Path, posed: PosedModel, number: int = 0) -> None:
        super().__init__(path, number)
        self.posed = posed

    def scene(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        return self.posed.put(tt.each(self._obs(), lambda value: value[0]))


class RecordedActions:
    """The action source of a recorded episode: the recorded actions."""

    explore = False

    def __init__(self, env: RecordedEnv) -> None:
        self.env = env

    def __call__(self, obs: Tensors, first: Tensor) -> Tensor:
        return self.env.recorded


def open_recorded(path: Path, number: int, env_node: Mapping[str, Any] | None) -> RecordedEnv:
    """Open the dataset at `path` at episode `number`.

    It is displayed in 3D if `env_node`, or the collect.yaml in the dataset, names an environment
    whose robot can be posed from the observations.
    """
    plain = RecordedEnv(path, number)
    file = path / "collect.yaml"
    if env_node is None and file.exists():
        env_node = read_saved(file).get("env")
        require_inside(env_node, file)
    if env_node is None:
        return plain
    world = build(dict(env_node) | {"num_envs": 1}, VecEnv)
    try:
        posed = PosedModel.of(world, plain.spec)
    finally:
        world.close()
    return plain if posed is None else RecordedSceneEnv(path, posed, number)
