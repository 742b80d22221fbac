"""Fits a model to datasets: what `embodied model train` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from embodied.core import tensors as tt
from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError, Node, build
from embodied.core.device import pick_device, seed_everything
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import read_joined, transitions
from embodied.models.dynamics import Dynamics, Fit, Progress, save


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `embodied model train`."""

    model: Node  # the model and its settings
    demos: str | tuple[str, ...]  # a dataset folder, several, or hf://owner/name
    out: str  # folder of the model; must not exist
    demo_episodes: Count | None = None  # episodes read per dataset; null: all
    seed: CountOrZero = 0  # of initial parameters, batches and held-out episodes
    device: str = "auto"  # auto, cpu, cuda
    threads: Count = 1  # CPU threads of torch
    allow: tuple[str, ...] = field(default=())  # your own packages that _target_ may name


def train(config: TrainConfig, progress: Progress = lambda *_: None) -> tuple[Dynamics, Fit]:
    """Fit `config.model` to the datasets and save it to `config.out`.

    ConfigError if the folder exists, or for observations that the model cannot predict.
    """
    require_new(config.out)
    device = pick_device(config.device)
    folders = [config.demos] if isinstance(config.demos, str) else config.demos
    episodes = read_joined(folders, config.demo_episodes)
    seed_everything(config.seed)
    model = build(config.model, Dynamics, spec=episodes.spec).to(device)
    fit = model.fit(tt.to(model_transitions(episodes, model.data_spec.obs), device), progress)
    about = {"demos": [*folders], "episodes": len(episodes), "seed": config.seed}
    save(Path(config.out), model.eval(), fit, about)
    return model, fit


def require_new(out: str) -> None:
    """ConfigError if there is something at `out`."""
    if Path(out).exists():
        raise ConfigError(f"out={out} exists; give the model another folder")


def model_transitions(episodes: Episodes, obs: Mapping[str, Leaf]) -> Tensors:
    """One transition per control step, with the observations `obs` only (pictures stay unread)."""
    kept = {f"obs/{name}" for name in obs} | {"action", "reward", "terminated", "truncated"}
    steps = {key: value for key, value in episodes.steps.items() if key in kept}
    final = {name: episodes.final[name] for name in obs}
    return transitions(replace(episodes, steps=steps, final=final), gamma=1.0)
