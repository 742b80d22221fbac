"""Imagined: an environment whose steps are predicted by a learned model (Sutton, 1991: Dyna).

Episodes begin at observations of a dataset and end where the model predicts a termination, or after
`horizon` steps (truncated). Short horizons from all of the data's observations keep the model where
it was fitted (branched rollouts; Janner et al., 2019).

A model of latents is stepped in these: its environment has the observation `latent` alone. Recorded
episodes are encoded, and a policy that was trained in it filters them where it is deployed (DiWA;
Chandra et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError
from embodied.core.device import pick_device
from embodied.core.env import StateRoles, Step
from embodied.core.policy import Policy
from embodied.core.spec import Spec, SpecMismatch, require_same
from embodied.core.tensors import Tensors
from embodied.datasets.hub import local_folder
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.envs.batched import BatchedEnv
from embodied.envs.row_rng import RowRng
from embodied.models import dynamics, latent_policy
from embodied.models.dynamics import Dynamics, LatentDynamics
from embodied.models.latent_policy import LatentPolicy


@dataclass(frozen=True)
class Config:
    """Settings of Imagined."""

    model: str  # folder of the model (embodied model train)
    starts: str  # dataset at whose observations episodes begin: a folder or hf://owner/name
    horizon: Count = 50  # steps after which an episode is truncated
    only_first: bool = False  # begin at the first observations of the dataset's episodes only
    ends: bool = True  # whether an episode ends where the model predicts a termination
    num_envs: Count = 16  # parallel envs
    seed: CountOrZero = 0  # of initial states and of the model's noise
    device: str = "cpu"  # cpu, cuda, auto


class Imagined(BatchedEnv):
    """The model's predictions as an environment with its Spec. Every env draws initial states and
    noise from a generator of its own."""

    name = "imagined"
    kept: ClassVar = {"age": "age", "generator": "streams.state"}
    keeps_obs = True

    def __init__(self, config: Config) -> None:
        self.num_envs, self.horizon, self.ends = config.num_envs, config.horizon, config.ends
        self.device = device = pick_device(config.device)
        self.model = dynamics.load(config.model).to(device).requires_grad_(False)
        self.spec = self.model.spec
        self.starts = tt.to(initial_states(config, self.model), device)
        self.streams = RowRng(config.seed, self.num_envs, device)
        self.age = torch.zeros(self.num_envs, dtype=torch.int64, device=device)
        self.obs = self.observe(torch.arange(self.num_envs, device=device))

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        self.age = self.age.index_fill(0, rows, 0)

    def observe(self, rows: Tensor) -> Tensors:
        """Initial states, drawn from the data."""
        count = tt.length(self.starts)
        drawn = (self.streams.uniform(1, rows)[0] * count).long().clamp(max=count - 1)
        return {name: self.starts[name][drawn] for name in self.spec.obs}

    @torch.no_grad()
    def step(self, action: Tensor) -> Step:
        action = action.clamp(-1, 1) if self.spec.act.is_continuous else action
        noise = self.streams.normal(self.model.noise_size).T
        following = self.model.step(self.obs or {}, action, noise)
        self.age = self.age + 1
        terminated = following.terminated & self.ends
        late = (self.age >= self.horizon) & ~terminated
        return self.finish(following.next_obs, following.reward, terminated, late, {})

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"generator": None})

    @property
    def real_spec(self) -> Spec:
        return self.model.data_spec

    def encoded(self, episodes: Episodes, where: str) -> Episodes:
        return encoded(self.model, episodes, where)

    def deployed(self, policy: Policy) -> Policy:
        model = self.model
        return LatentPolicy.of(policy, model) if isinstance(model, LatentDynamics) else policy

    def describe(self, row: int = 0) -> str:
        parts = (f"{name} {value[row].tolist()}" for name, value in (self.obs or {}).items())
        return f"Imagined by a model, after {int(self.age[row])} steps: {', '.join(parts)}."


def initial_states(config: Config, model: Dynamics) -> Tensors:
    """The observations [N, ...] of the dataset at which episodes may begin. SpecMismatch if it is
    not of the model's environment, ConfigError if actions are in units of the dataset's own."""
    spec = model.data_spec
    if spec.act.is_continuous and not spec.act.is_unit:
        raise ConfigError(
            f"the model {config.model} has actions in [{spec.act.low}, {spec.act.high}]: an "
            "environment needs [-1, 1], so fit it to episodes of an environment of this project"
        )
    episodes = read_episodes(local_folder(config.starts))
    # The dataset may have observations that the model leaves out.
    there = episodes.spec
    obs = {name: leaf for name, leaf in there.obs.items() if name in spec.obs}
    known = Spec(obs, there.act, there.dt)
    try:
        require_same(spec, known, f"model {config.model}", f"dataset {config.starts}")
    except SpecMismatch as error:
        raise SpecMismatch(f"env.starts: {error}") from error
    index = episodes.start if config.only_first else torch.arange(int(episodes.length.sum()))
    steps = encoded(model, episodes, config.starts).steps
    return {name: steps[f"obs/{name}"][index] for name in model.spec.obs}


def encoded(model: Dynamics, episodes: Episodes, where: str) -> Episodes:
    """`episodes` in the latents of a model that has some; else as they are."""
    return (
        latent_policy.encoded(model, episodes, where)
        if isinstance(model, LatentDynamics)
        else episodes
    )
