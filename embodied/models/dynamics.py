"""Dynamics: the role of learned models of an environment; saving and loading them.

MODEL/
    model.yaml  spec.json  model.safetensors     the model
    about.json                                   format, versions, data, held-out errors
    metrics.jsonl                                held-out error during the fit
    ...                                          what the model's `texts` are
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from embodied.core import formats
from embodied.core.atomic_write import sync, write_json
from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import git_revision
from embodied.core.choices import Choices
from embodied.core.files import read_json
from embodied.core.saved_file import fitting, load_tensors
from embodied.core.saved_node import read_saved, require_inside
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

WEIGHTS = "model.safetensors"
LATENT = "latent"  # the observation of a `LatentDynamics`
Progress = Callable[[int, int, float], object]
"""Called during a fit with the updates so far, the most there will be, and the held-out error."""


@dataclass(frozen=True)
class Prediction:
    """The predicted outcome of one step in n environments.

    `next_obs`: observations [n, ...]; `reward` [n]; `terminated` [n] (bool).
    """

    next_obs: Tensors
    reward: Tensor
    terminated: Tensor


@dataclass(frozen=True)
class OutputError:
    """The held-out error of one output: root mean squares of the error and of the output's
    deviation from its mean, both in the output's `unit`. An observation's output is its change."""

    name: str
    unit: str
    error: float
    spread: float

    @property
    def explained(self) -> float:
        """The share of the variance that is predicted; 0 for an output that does not vary."""
        return 1.0 - (self.error / self.spread) ** 2 if self.spread > 0 else 0.0


@dataclass(frozen=True)
class Fit:
    """Errors of every output on held-out transitions, (updates, error) over time, and facts."""

    outputs: Sequence[OutputError]
    history: Sequence[tuple[int, float]]
    facts: Mapping[str, Any]


class Dynamics(nn.Module, ABC):
    """The role of models of an environment's steps.

    `spec` has the observations that are predicted. A step is deterministic given its arguments:
    `noise` [n, noise_size] is standard normal, and zeros give the most typical outcome.
    """

    spec: Spec
    noise_size: int
    node: dict[str, Any]
    """The configuration it was built from, saved in model.yaml."""

    @property
    def data_spec(self) -> Spec:
        """The Spec of the data: actions, and the observations that the model reads."""
        return self.spec

    @abstractmethod
    def fit(self, transitions: Tensors, progress: Progress = lambda *_: None) -> Fit:
        """Fit the model to transitions [N]: `obs/*`, `action`, `reward`, `discount` (0 where the
        environment terminated), `next_obs/*` and, if known, `episode` (int64), by which transitions
        are held out. Randomness comes from torch's default generator."""

    def texts(self) -> dict[str, str]:
        """Further files of the folder, by name; those named *.txt are printed after a fit."""
        return {}

    @abstractmethod
    def step(self, obs: Tensors, action: Tensor, noise: Tensor) -> Prediction:
        """Predict the outcome of `action` [n, A] (int64 [n] if discrete) at `obs` [n, ...]."""


class LatentDynamics(Dynamics):
    """A model that steps a latent state, which it filters from the observations of `data_spec`.

    `spec` has the observation `latent` [D] alone. The latent before an episode is zero. `names` are
    the observations that it is filtered from, `choices` those of its actions.
    """

    names: Sequence[str]
    choices: Choices

    @abstractmethod
    def filtered(self, latent: Tensor, action: Tensor, obs: Tensors) -> Tensor:
        """The latent [n, D] at `obs` [n, ...], one step after `latent` [n, D]. `action` [n, width]
        is what was done between them (choices one-hot); zero before an episode."""

    @abstractmethod
    def decoded(self, latent: Tensor) -> Tensors:
        """The observations [n, ...] that latents [n, D] stand for, in their own units."""


def save(folder: Path, model: Dynamics, fit: Fit, about: Mapping[str, Any]) -> None:
    """Write a model to `folder`, which must not exist, under a temporary name that is renamed."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}
    save_file(weights, partial / WEIGHTS)
    (partial / "model.yaml").write_text(yaml.safe_dump(model.node, sort_keys=False))
    (partial / "spec.json").write_text(json.dumps(model.data_spec.to_json(), indent=1))
    for name, text in model.texts().items():
        (partial / name).write_text(text)
    lines = [json.dumps({"step": step, "held_out/error": e}) for step, e in fit.history]
    (partial / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    facts = {
        "format": formats.MODEL,
        "versions": {name: version(name) for name in ("embodied-rl", "torch")},
        "git": git_revision(),
        "held_out": {o.name: {"error": o.error, "spread": o.spread} for o in fit.outputs},
        **fit.facts,
        **about,
    }
    write_json(partial / "about.json", facts)
    partial.rename(folder)
    sync(folder.parent)


def load(folder: Path | str) -> Dynamics:
    """Load a model, on the CPU; ConfigError if the folder holds none or is damaged.

    The folder may be another person's: only classes that are a `Dynamics` are built.
    """
    folder = Path(folder)
    if not (folder / "model.yaml").is_file():
        raise ConfigError(f"{folder} holds no model: embodied model train demos=DIR out={folder}")
    try:
        format = read_json(folder / "about.json").get("format", 1)
        spec = Spec.from_json(read_json(folder / "spec.json"))
        weights = load_tensors(folder / WEIGHTS)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        SafetensorError,
        ArithmeticError,
    ) as error:
        raise ConfigError(f"the model {folder} is damaged ({error}); fit it again") from error
    node = formats.upgrade("model", read_saved(folder / "model.yaml"), format)
    require_inside(node, folder / "model.yaml")
    with fitting(weights, folder / "model.yaml"):
        model = build(node, Dynamics, spec=spec)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise ConfigError(f"the weights in {folder} do not fit its model.yaml ({line})") from error
    return model.eval()
